/* The quantised matmul kernels for AVX-512 with VNNI. */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,avx2")
#define LEVEL(name) name##_avx512vnni
#define VNNI
#include "vec_avx512.h"
PI_INLINE vi v_dpbusd(vi acc, vb u, vb s) { return _mm512_dpbusd_epi32(acc, u, s); }
#include "../simd/strips.h"
#include "sums.h"
enum { STRIPS = 2, TOKENS = TILE_AVX512, STRIPS_ALONE = 4, AHEAD = 0 };
#include "../simd/matmul_quant.h"
PI_END
#endif
