/* AVX-512 VNNI matmul: dpbusd multiplies unsigned by signed bytes and sums four of them into int32, with no
 * saturation. Int8 codes are shifted to unsigned (xor 0x80) and the accumulator starts at -128 * sum(q). */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,avx2")

#define LEVEL(name) name##_avx512vnni
#define DOT4_U8(acc, w, x) _mm512_dpbusd_epi32(acc, w, x)
#define DOT4_END(acc) (acc)
#define DOT8_TILE \
    PI_UNROLL for (int t = 0; t < T; t++) PI_UNROLL for (int r = 0; r < R; r++) \
        dot[r][t] = _mm512_set1_epi32(a->off[(t0 + t) * a->nb + b]); \
    PI_UNROLL for (int j = 0; j < 8; j++) { \
        __m512i u[4]; \
        PI_UNROLL for (int r = 0; r < R; r++) \
            u[r] = _mm512_xor_si512(_mm512_loadu_si512(code[r] + b * 512 + j * 64), _mm512_set1_epi8(-128)); \
        PI_UNROLL for (int t = 0; t < T; t++) { \
            __m512i x = bytes4(a->q + (t0 + t) * a->cols + b * PI_BLOCK + j * 4); \
            PI_UNROLL for (int r = 0; r < R; r++) dot[r][t] = _mm512_dpbusd_epi32(dot[r][t], u[r], x); \
        } \
    }
#include "matmul_avx512.h"

PI_END
#endif
