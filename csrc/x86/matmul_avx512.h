/* The AVX-512 matmul kernels, written once for two levels. The including file sits inside its target region and
 * defines LEVEL(name) and what a level has for four-code dot products:
 *
 *   DOT4_U8(acc, w, x)   adds to the running dot products of 16 rows: unsigned codes w below 16, signed x
 *   DOT4_END(acc)        the 16 int32 sums
 *   DOT8_TILE            the body of one block of Q8_0
 *
 * A tile is R row groups by T tokens. Lane = weight row:
 *
 *   w   | row 0: c0 c1 c2 c3 | row 1: c0 c1 c2 c3 | ... | row 15 |     64 bytes, one load
 *   x   | x0 x1 x2 x3        | x0 x1 x2 x3        | ... |        |     4 bytes of one token, broadcast
 *   acc | row 0: int32       | row 1              | ... | row 15 |
 *
 * so a fold lives in one lane from first block to last. Past the last group a tile repeats that group: the same sums are
 * stored twice, and no narrower tile is needed. NUMERICS.md section 3. */

PI_INLINE __m512i bytes4(const int8_t *p) { return _mm512_set1_epi32((int)(*(const pi_u32 *)p)); }
PI_INLINE __m512 halves16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

PI_INLINE void store_tile(const pi_weight *w, int64_t g, float *y, __m512 v) {
    int64_t left = w->rows - g * PI_LANES;
    _mm512_mask_storeu_ps(y + g * PI_LANES, left >= PI_LANES ? 0xffff : (__mmask16)((1u << left) - 1), v);
}

PI_INLINE void tile_q4_1(const pi_weight *w, const pi_act *a, int64_t g, int64_t g_last, int64_t t0, float *y, int64_t ldy,
                         const int R, const int T) {
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t *code[4];
    __m512 acc[4][6];
    for (int r = 0; r < R; r++) code[r] = w->data + pi_min(g + r, g_last) * w->group_bytes;
    PI_UNROLL for (int r = 0; r < R; r++)
        PI_UNROLL for (int t = 0; t < T; t++) acc[r][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < a->nb; b++) {
        __m512i dot[4][6];
        PI_UNROLL for (int r = 0; r < R; r++)
            PI_UNROLL for (int t = 0; t < T; t++) dot[r][t] = _mm512_setzero_si512();
        PI_UNROLL for (int j = 0; j < 4; j++) {
            __m512i lo[4], hi[4];
            PI_UNROLL for (int r = 0; r < R; r++) {
                __m512i v = _mm512_loadu_si512(code[r] + b * 256 + j * 64);
                lo[r] = _mm512_and_si512(v, low);
                hi[r] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
            }
            PI_UNROLL for (int t = 0; t < T; t++) {
                const int8_t *x = a->q + (t0 + t) * a->cols + b * PI_BLOCK + j * 4;
                __m512i x0 = bytes4(x), x1 = bytes4(x + 16);
                PI_UNROLL for (int r = 0; r < R; r++) {
                    dot[r][t] = DOT4_U8(dot[r][t], lo[r], x0);
                    dot[r][t] = DOT4_U8(dot[r][t], hi[r], x1);
                    PI_KEEP(dot[r][t]);
                }
            }
        }
        PI_UNROLL for (int r = 0; r < R; r++) {
            const uint16_t *dm = (const uint16_t *)(code[r] + a->nb * 256) + b * 32;
            __m512 d = halves16(dm), m = halves16(dm + 16);
            PI_UNROLL for (int t = 0; t < T; t++) {
                int64_t at = (t0 + t) * a->nb + b;
                __m512 s = _mm512_mul_ps(d, _mm512_set1_ps(a->d[at]));
                acc[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(DOT4_END(dot[r][t])), s, acc[r][t]);
                acc[r][t] = _mm512_fmadd_ps(m, _mm512_set1_ps(a->sx[at]), acc[r][t]);
            }
        }
    }
    PI_UNROLL for (int r = 0; r < R; r++)
        PI_UNROLL for (int t = 0; t < T; t++) store_tile(w, pi_min(g + r, g_last), y + (t0 + t) * ldy, acc[r][t]);
}

PI_INLINE void tile_q8_0(const pi_weight *w, const pi_act *a, int64_t g, int64_t g_last, int64_t t0, float *y, int64_t ldy,
                         const int R, const int T) {
    const uint8_t *code[4];
    __m512 acc[4][6];
    for (int r = 0; r < R; r++) code[r] = w->data + pi_min(g + r, g_last) * w->group_bytes;
    PI_UNROLL for (int r = 0; r < R; r++)
        PI_UNROLL for (int t = 0; t < T; t++) acc[r][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < a->nb; b++) {
        __m512i dot[4][6];
        DOT8_TILE
        PI_UNROLL for (int r = 0; r < R; r++) {
            __m512 d = halves16((const uint16_t *)(code[r] + a->nb * 512) + b * PI_LANES);
            PI_UNROLL for (int t = 0; t < T; t++) {
                __m512 s = _mm512_mul_ps(d, _mm512_set1_ps(a->d[(t0 + t) * a->nb + b]));
                acc[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][t]), s, acc[r][t]);
            }
        }
    }
    PI_UNROLL for (int r = 0; r < R; r++)
        PI_UNROLL for (int t = 0; t < T; t++) store_tile(w, pi_min(g + r, g_last), y + (t0 + t) * ldy, acc[r][t]);
}

PI_TILED(LEVEL(pi_matmul_q4_1), tile_q4_1, 2, 6, 4)
PI_TILED(LEVEL(pi_matmul_q8_0), tile_q8_0, 2, 6, 4)
