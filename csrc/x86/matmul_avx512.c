/* The quantised matmul kernels for AVX-512 (F, BW, DQ, VL) without VNNI. */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2")
#define LEVEL(name) name##_avx512
#include "vec_avx512.h"
#include "../simd/strips.h"
#include "sums.h"
enum { STRIPS = 2, TOKENS = TILE_AVX512, STRIPS_ALONE = 4, AHEAD = 0 };
#include "../simd/matmul_quant.h"
PI_END
#endif
