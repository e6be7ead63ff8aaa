/* The kernels of simd/ for AVX2 with FMA and F16C. */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx2,fma,f16c")

#define LEVEL(name) name##_avx2
#include "vec_avx2.h"
#include "../simd/exp.h"
#include "../simd/elementwise.h"
#include "../simd/attention.h"
#include "../simd/matmul_float.h"
PI_TILED(pi_matmul_f32_avx2, tile_f32, 1, 4, 2)
PI_TILED(pi_matmul_f16_avx2, tile_f16, 1, 4, 2)

PI_END
#endif
