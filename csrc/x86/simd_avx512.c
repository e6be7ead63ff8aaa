/* The kernels of simd/ for AVX-512 (F, BW, DQ, VL). */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2")

#define LEVEL(name) name##_avx512
#include "vec_avx512.h"
#include "../simd/exp.h"
#include "../simd/elementwise.h"
#include "../simd/attention.h"
#include "../simd/matmul_float.h"
PI_TILED(pi_matmul_f32_avx512, tile_f32, 2, 6, 4)
PI_TILED(pi_matmul_f16_avx512, tile_f16, 2, 6, 4)

PI_END
#endif
