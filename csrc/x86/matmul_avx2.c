/* AVX2 matmul: the arithmetic of matmul_avx512.c in vectors of 8 rows, two to a row group. NUMERICS.md section 3.
 *
 *   w   | row 0: c0 c1 c2 c3 | row 1 | ... | row 7 |     32 bytes; the group's other 8 rows lie 32 bytes on
 *   x   | x0 x1 x2 x3        | x0 .. |               */
#include "x86.h"
#if PI_X86

PI_BEGIN("avx2,fma,f16c")

PI_INLINE __m256i bytes4(const void *p) { return _mm256_set1_epi32((int)(*(const pi_u32 *)p)); }
PI_INLINE __m256i load8(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
PI_INLINE __m256 halves8(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

PI_INLINE void store_half(const pi_weight *w, int64_t n, float *y, __m256 v) {
    float t[8];
    if (w->rows - n >= 8) {
        _mm256_storeu_ps(y + n, v);
    } else {
        _mm256_storeu_ps(t, v);
        for (int64_t i = n; i < w->rows; i++) y[i] = t[i - n];
    }
}

/* A tile is R half groups (8 rows) by T tokens; half h of the kernel's range lies in group g0 + h / 2. */
PI_INLINE void tile_q4_1(const pi_weight *w, const pi_act *a, int64_t g, int64_t g_last, int64_t t0, float *y, int64_t ldy, const int R,
                         const int T) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int half = 0; half < 2; half++) {
        const uint8_t *code[4];
        __m256 acc[4][4];
        for (int r = 0; r < R; r++) code[r] = w->data + pi_min(g + r, g_last) * w->group_bytes;
        PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) acc[r][t] = _mm256_setzero_ps();
        for (int64_t b = 0; b < a->nb; b++) {
            __m256i dot[4][4];
            PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) dot[r][t] = _mm256_setzero_si256();
            PI_UNROLL for (int j = 0; j < 4; j++)
                PI_UNROLL for (int r = 0; r < R; r++) {
                    __m256i v = load8(code[r] + b * 256 + j * 64 + half * 32);
                    __m256i lo = _mm256_and_si256(v, low), hi = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
                    PI_UNROLL for (int t = 0; t < T; t++) {
                        const int8_t *x = a->q + (t0 + t) * a->cols + b * PI_BLOCK + j * 4;
                        dot[r][t] = _mm256_add_epi16(dot[r][t], _mm256_maddubs_epi16(lo, bytes4(x)));
                        dot[r][t] = _mm256_add_epi16(dot[r][t], _mm256_maddubs_epi16(hi, bytes4(x + 16)));
                        PI_KEEP(dot[r][t]);
                    }
                }
            PI_UNROLL for (int r = 0; r < R; r++) {
                const uint16_t *dm = (const uint16_t *)(code[r] + a->nb * 256) + b * 32 + half * 8;
                __m256 d = halves8(dm), m = halves8(dm + 16);
                PI_UNROLL for (int t = 0; t < T; t++) {
                    int64_t at = (t0 + t) * a->nb + b;
                    __m256 s = _mm256_mul_ps(d, _mm256_set1_ps(a->d[at]));
                    acc[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(dot[r][t], ones)), s, acc[r][t]);
                    acc[r][t] = _mm256_fmadd_ps(m, _mm256_set1_ps(a->sx[at]), acc[r][t]);
                }
            }
        }
        PI_UNROLL for (int r = 0; r < R; r++)
            PI_UNROLL for (int t = 0; t < T; t++)
                store_half(w, pi_min(g + r, g_last) * PI_LANES + half * 8, y + (t0 + t) * ldy, acc[r][t]);
    }
}

/* Even and odd codes as int16, against activations stored in the same order: q16 = x0 x2 | x1 x3. */
PI_INLINE void tile_q8_0(const pi_weight *w, const pi_act *a, int64_t g, int64_t g_last, int64_t t0, float *y, int64_t ldy, const int R,
                         const int T) {
    for (int half = 0; half < 2; half++) {
        const uint8_t *code[4];
        __m256 acc[4][4];
        for (int r = 0; r < R; r++) code[r] = w->data + pi_min(g + r, g_last) * w->group_bytes;
        PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) acc[r][t] = _mm256_setzero_ps();
        for (int64_t b = 0; b < a->nb; b++) {
            __m256i dot[4][4];
            PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) dot[r][t] = _mm256_setzero_si256();
            PI_UNROLL for (int j = 0; j < 8; j++)
                PI_UNROLL for (int r = 0; r < R; r++) {
                    __m256i v = load8(code[r] + b * 512 + j * 64 + half * 32);
                    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), odd = _mm256_srai_epi16(v, 8);
                    PI_UNROLL for (int t = 0; t < T; t++) {
                        const int16_t *x = a->q16 + (t0 + t) * a->cols + b * PI_BLOCK + j * 4;
                        dot[r][t] = _mm256_add_epi32(dot[r][t], _mm256_madd_epi16(even, bytes4(x)));
                        dot[r][t] = _mm256_add_epi32(dot[r][t], _mm256_madd_epi16(odd, bytes4(x + 2)));
                        PI_KEEP(dot[r][t]);
                    }
                }
            PI_UNROLL for (int r = 0; r < R; r++) {
                __m256 d = halves8((const uint16_t *)(code[r] + a->nb * 512) + b * PI_LANES + half * 8);
                PI_UNROLL for (int t = 0; t < T; t++) {
                    __m256 s = _mm256_mul_ps(d, _mm256_set1_ps(a->d[(t0 + t) * a->nb + b]));
                    acc[r][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[r][t]), s, acc[r][t]);
                }
            }
        }
        PI_UNROLL for (int r = 0; r < R; r++)
            PI_UNROLL for (int t = 0; t < T; t++)
                store_half(w, pi_min(g + r, g_last) * PI_LANES + half * 8, y + (t0 + t) * ldy, acc[r][t]);
    }
}

PI_TILED(pi_matmul_q4_1_avx2, tile_q4_1, 1, 4, 2)
PI_TILED(pi_matmul_q8_0_avx2, tile_q8_0, 1, 4, 2)

PI_END
#endif
