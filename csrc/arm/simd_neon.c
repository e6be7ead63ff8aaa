/* The kernels of simd/ for NEON. */
#include "arm.h"
#if PI_ARM

#define LEVEL(name) name##_neon
#include "vec_neon.h"
#include "../simd/exp.h"
#include "../simd/elementwise.h"
#include "../simd/attention.h"
#include "../simd/attention_rows.h"
#include "../simd/strips.h"
#include "../simd/matmul_float.h"
#define X(type, ...) TILED(LEVEL(pi_matmul_##type), tile_##type, 4, 4, 8)
PI_FLOAT(X)
#undef X

#endif
