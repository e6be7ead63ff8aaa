/* The quantised matmul kernels for AVX2. */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx2,fma,f16c")
#define LEVEL(name) name##_avx2
#include "vec_avx2.h"
#include "../simd/strips.h"
#include "sums.h"
#include "../simd/matmul_quant.h"
#define X(stem, ...) TILED(LEVEL(pi_matmul_##stem), tile_##stem, 1, 4, 2)
PI_QUANTISED(X)
#undef X
PI_END
#endif
