/* The kernels of simd/ for NEON. */
#include "../pi.h"
#if PI_ARM

#define LEVEL(name) name##_neon
#include "vec_neon.h"
#include "../simd/exp.h"
#include "../simd/elementwise.h"
#include "../simd/attention.h"
#include "../simd/matmul_float.h"
PI_TILED(pi_matmul_f32_neon, tile_f32, 1, 4, 2)
PI_TILED(pi_matmul_f16_neon, tile_f16, 1, 4, 2)

#endif
