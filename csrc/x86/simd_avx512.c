/* The kernels of simd/ for AVX-512 (F, BW, DQ, VL). */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2")

#define LEVEL(name) name##_avx512
#include "vec_avx512.h"
#include "../simd/exp.h"
#include "../simd/elementwise.h"
#include "../simd/attention.h"
#include "../simd/attention_rows.h"
#include "../simd/strips.h"
#include "../simd/matmul_float.h"
#define X(type, ...) TILED(LEVEL(pi_matmul_##type), tile_##type, 2, 6, 4)
PI_FLOAT(X)
#undef X

PI_END
#endif
