/* The kernels of simd/ for AVX2 with FMA and F16C. */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx2,fma,f16c")

#define LEVEL(name) name##_avx2
#include "vec_avx2.h"
#include "../simd/exp.h"
#include "../simd/elementwise.h"
#include "../simd/attention.h"
#include "../simd/attention_rows.h"
#include "../simd/strips.h"
#include "../simd/matmul_float.h"
#define X(type, ...) TILED(LEVEL(pi_matmul_##type), tile_##type, 2, 4, 4)
PI_FLOAT(X)
#undef X

PI_END
#endif
