/* The quantised matmul kernels for AVX2. */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx2,fma,f16c")
#define LEVEL(name) name##_avx2
#include "vec_avx2.h"
#include "../simd/strips.h"
#include "sums.h"
enum { STRIPS = 2, TOKENS = TILE_AVX2, STRIPS_ALONE = 2, AHEAD = 16384 };
#include "../simd/matmul_quant.h"
PI_END
#endif
