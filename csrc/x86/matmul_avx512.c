/* AVX-512 (F, BW, DQ, VL) matmul without VNNI. Codes below 16: maddubs gives pairs of at most 2 * 15 * 127, so the eight
 * steps of a block sum within int16 (30,480) and widen once. Int8 codes: even and odd codes are split into int16 by
 * shifts and multiplied by activations stored in the same order, since |code| * 127 * 2 would saturate maddubs. */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx2")

#define LEVEL(name) name##_avx512
#define DOT4_U8(acc, w, x) _mm512_add_epi16(acc, _mm512_maddubs_epi16(w, x))
#define DOT4_END(acc) _mm512_madd_epi16(acc, _mm512_set1_epi16(1))
/* word pairs:  even = (c0, c2)  odd = (c1, c3)   against q16 = x0 x2 | x1 x3 */
#define DOT8_TILE \
    PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) dot[r][t] = _mm512_setzero_si512(); \
    PI_UNROLL for (int j = 0; j < 8; j++) { \
        __m512i even[4], odd[4]; \
        PI_UNROLL for (int r = 0; r < R; r++) { \
            __m512i v = _mm512_loadu_si512(code[r] + b * 512 + j * 64); \
            even[r] = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8); \
            odd[r] = _mm512_srai_epi16(v, 8); \
        } \
        PI_UNROLL for (int t = 0; t < T; t++) { \
            const int8_t *x = (const int8_t *)(a->q16 + (t0 + t) * a->cols + b * PI_BLOCK + j * 4); \
            __m512i x0 = bytes4(x), x1 = bytes4(x + 4); \
            PI_UNROLL for (int r = 0; r < R; r++) { \
                dot[r][t] = _mm512_add_epi32(dot[r][t], _mm512_madd_epi16(even[r], x0)); \
                dot[r][t] = _mm512_add_epi32(dot[r][t], _mm512_madd_epi16(odd[r], x1)); \
                PI_KEEP(dot[r][t]); \
            } \
        } \
    }
#include "matmul_avx512.h"

PI_END
#endif
