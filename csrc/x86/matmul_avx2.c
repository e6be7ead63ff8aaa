/* The quantised matmul kernels for AVX2. */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx2,fma,f16c")
#define LEVEL(name) name##_avx2
#include "vec_avx2.h"
#include "../simd/strips.h"
#include "sums.h"
#include "../simd/matmul_quant.h"
#define X(stem, ...) QUANTISED(stem, 2, TILE_AVX2, 2)
PI_QUANTISED(X)
#undef X
PI_END
#endif
