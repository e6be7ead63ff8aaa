/* Attention over K tiles and V rows, for vectors of V lanes. Scores: lane = another key. Values: lane = another dimension. Each K or V
 * vector that is loaded serves a block of query rows.  NUMERICS.md section 4, attention.
 *
 *   K tile   d = 0: | key 0 | key 1 | ... | key 15 |      one fma of (q[d], row d) moves 16 folds a step on
 *            d = 1: | key 0 | ...
 *   V        key 0: | d 0 | d 1 | ... | dim - 1 |         one fma of (p[key], row)
 *
 * q8_0: what a code is worth is code * s, exactly; s stands once for 32 dimensions of a key. */

enum { KEY_VECTORS = PI_LANES / V, MOST_ROWS = 12, MOST_VECTORS = 8 };

/* Few query rows wait for memory. The processor's own prefetcher stops at the end of a page and makes little of one stream, so K and V
 * are asked for so many bytes ahead; several K tiles at a time are streams enough. Where registers hold the sums of a part of the
 * dimensions only, a strip of V rows is taken through all parts while it is in the first-level cache. */
enum { FEW_ROWS = 4, AHEAD = 2048, STRIP = 1024 /* bytes */ };

/* One K vector, keys lane.. of dimension d; and one V vector, dimensions d... `s` is load_scale's, of the same 32 dimensions. */
#define key_f32(tile, d, lane, s) v_load((const float *)(tile) + (d)*PI_LANES + (lane))
#define key_f16(tile, d, lane, s) v_load_f16((const uint16_t *)(tile) + (d)*PI_LANES + (lane))
#define key_q8_0(tile, d, lane, s) v_mul(v_load_s8((tile) + (d)*PI_LANES + (lane)), s)
#define key_scale_f32(tile, dim, d, lane) v_set1(0.0f)
#define key_scale_f16(tile, dim, d, lane) v_set1(0.0f)
#define key_scale_q8_0(tile, dim, d, lane) v_load_f16((const uint16_t *)((tile) + PI_LANES * (dim)) + (d) / PI_BLOCK * PI_LANES + (lane))
#define value_f32(row, dim, d) v_load((const float *)(row) + (d))
#define value_f16(row, dim, d) v_load_f16((const uint16_t *)(row) + (d))
#define value_q8_0(row, dim, d) v_mul(v_load_s8((row) + (d)), v_set1_f16((const uint16_t *)((row) + (dim)) + (d) / PI_BLOCK))
#define value_n_f32(row, dim, d, n) v_load_n((const float *)(row) + (d), n)
#define value_n_f16(row, dim, d, n) v_load_n_f16((const uint16_t *)(row) + (d), n)
#define value_n_q8_0(row, dim, d, n) value_q8_0(row, dim, d) /* whole blocks of 32 */
#define ROW_BYTES_f32(dim) (4 * (dim))
#define ROW_BYTES_f16(dim) (2 * (dim))
#define ROW_BYTES_q8_0(dim) ((dim) + (dim) / PI_BLOCK * 2)

/* Rows in blocks of the level's own size, then of 4, and what is left at once. */
#define BY_ROWS(call, most, rows) \
    do { \
        int64_t r = 0; \
        for (; r + (most) <= (rows); r += (most)) call(r, most); \
        for (; (most) > 4 && r + 4 <= (rows); r += 4) call(r, 4); \
        switch ((rows) - r) { \
        case 3: call(r, 3); break; \
        case 2: call(r, 2); break; \
        case 1: call(r, 1); break; \
        } \
    } while (0)

#define ATTENTION(type) \
    PI_INLINE void scores_block_##type(const float *q, int64_t ldq, const uint8_t *k, int64_t dim, float scale, float *s, int64_t lds, \
                                       const int R, const int TILES) { \
        const int vectors = TILES * KEY_VECTORS; \
        const int64_t tile_bytes = PI_LANES * ROW_BYTES_##type(dim), dim_bytes = tile_bytes / dim; \
        vf acc[MOST_ROWS][MOST_VECTORS]; \
        PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int i = 0; i < vectors; i++) acc[r][i] = v_set1(0.0f); \
        for (int64_t d0 = 0; d0 < dim; d0 += PI_BLOCK) { \
            vf of_block[MOST_VECTORS]; \
            PI_UNROLL for (int i = 0; i < vectors; i++) \
                of_block[i] = key_scale_##type(k + i / KEY_VECTORS * tile_bytes, dim, d0, i % KEY_VECTORS * V); \
            for (int64_t d = d0; d < pi_min(d0 + PI_BLOCK, dim); d++) { \
                vf key[MOST_VECTORS]; \
                if (R <= FEW_ROWS && TILES == 1) __builtin_prefetch(k + d * dim_bytes + AHEAD); \
                PI_UNROLL for (int i = 0; i < vectors; i++) { \
                    key[i] = key_##type(k + i / KEY_VECTORS * tile_bytes, d, i % KEY_VECTORS * V, of_block[i]); \
                    PI_KEEP(key[i]); \
                } \
                PI_UNROLL for (int r = 0; r < R; r++) { \
                    const vf x = v_set1(q[r * ldq + d]); \
                    PI_UNROLL for (int i = 0; i < vectors; i++) acc[r][i] = v_fma(x, key[i], acc[r][i]); \
                } \
            } \
            (void)of_block; \
        } \
        PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int i = 0; i < vectors; i++) \
            v_store(s + r * lds + i * V, v_mul(acc[r][i], v_set1(scale))); \
    } \
    PI_INLINE void scores_rows_##type(const float *q, int64_t ldq, const uint8_t *k, int64_t tiles, int64_t dim, float scale, float *s, \
                                      int64_t lds, const int R, const int TILES) { \
        const int64_t tile_bytes = PI_LANES * ROW_BYTES_##type(dim); \
        int64_t i = 0; \
        for (; i + TILES <= tiles; i += TILES) \
            scores_block_##type(q, ldq, k + i * tile_bytes, dim, scale, s + i * PI_LANES, lds, R, TILES); \
        for (; i < tiles; i++) scores_block_##type(q, ldq, k + i * tile_bytes, dim, scale, s + i * PI_LANES, lds, R, 1); \
    } \
    void LEVEL(pi_scores_##type) PI_SCORES_ARGS { \
        const int64_t tiles = pi_ceil_div(n, PI_LANES); \
        BY_ROWS(SCORES_##type, SCORE_ROWS, rows); \
    } \
    /* `vectors` of dimensions from d on; `left` < V lanes in the last one when it is not whole */ \
    PI_INLINE void context_block_##type(const float *p, int64_t ldp, const uint8_t *v, int64_t ldv, int64_t n, int64_t dim, int64_t d, \
                                        float *out, int64_t ldo, int left, const int R, const int vectors) { \
        vf acc[MOST_ROWS][MOST_VECTORS]; \
        (void)dim; \
        out += d; \
        PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int i = 0; i < vectors; i++) \
            acc[r][i] = left ? v_load_n(out + r * ldo + i * V, left) : v_load(out + r * ldo + i * V); \
        for (int64_t t = 0; t < n; t++, v += ldv) { \
            vf x[MOST_VECTORS]; \
            if (R <= FEW_ROWS) \
                for (int64_t at = ROW_BYTES_##type(d); at < ROW_BYTES_##type(d + vectors * V); at += 64) \
                    __builtin_prefetch(v + AHEAD + at); \
            PI_UNROLL for (int i = 0; i < vectors; i++) { \
                x[i] = left ? value_n_##type(v, dim, d + i * V, left) : value_##type(v, dim, d + i * V); \
                PI_KEEP(x[i]); \
            } \
            PI_UNROLL for (int r = 0; r < R; r++) { \
                const vf w = v_set1(p[r * ldp + t]); \
                PI_UNROLL for (int i = 0; i < vectors; i++) acc[r][i] = v_fma(w, x[i], acc[r][i]); \
            } \
        } \
        PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int i = 0; i < vectors; i++) { \
            if (left) \
                v_store_n(out + r * ldo + i * V, acc[r][i], left); \
            else \
                v_store(out + r * ldo + i * V, acc[r][i]); \
        } \
    } \
    PI_INLINE void context_rows_##type(const float *p, int64_t ldp, const uint8_t *v, int64_t ldv, int64_t n, int64_t dim, int64_t d0, \
                                       int64_t d1, float *out, int64_t ldo, const int R, const int vectors) { \
        const int64_t strip = vectors * V >= d1 - d0 ? n : pi_max(1, STRIP / ROW_BYTES_##type(dim)); \
        for (int64_t t = 0; t < n; t += strip, p += strip, v += strip * ldv) { \
            const int64_t some = pi_min(strip, n - t); \
            int64_t d = d0; \
            for (; d + vectors * V <= d1; d += vectors * V) context_block_##type(p, ldp, v, ldv, some, dim, d, out, ldo, 0, R, vectors); \
            for (; d + V <= d1; d += V) context_block_##type(p, ldp, v, ldv, some, dim, d, out, ldo, 0, R, 1); \
            if (d < d1) context_block_##type(p, ldp, v, ldv, some, dim, d, out, ldo, (int)(d1 - d), R, 1); \
        } \
    } \
    void LEVEL(pi_context_##type) PI_CONTEXT_ARGS { BY_ROWS(CONTEXT_##type, CONTEXT_ROWS, rows); }

/* Fewer rows (_4: three, too; _2: one, too) leave registers for more keys, or dimensions, at a time. */
#define SCORES(type, r, R) \
    scores_rows_##type(q + (r)*ldq, ldq, k, tiles, dim, scale, s + (r)*lds, lds, R, \
                       (R) == SCORE_ROWS ? SCORE_TILES : (R) > 2 ? SCORE_TILES_4 : SCORE_TILES_2)
#define CONTEXT(type, r, R) \
    context_rows_##type(p + (r)*ldp, ldp, v, ldv, n, dim, d0, d1, out + (r)*ldo, ldo, R, \
                        (R) == CONTEXT_ROWS ? CONTEXT_VECTORS : (R) > 2 ? CONTEXT_VECTORS_4 : CONTEXT_VECTORS_2)
#define SCORES_f32(r, R) SCORES(f32, r, R)
#define SCORES_f16(r, R) SCORES(f16, r, R)
#define SCORES_q8_0(r, R) SCORES(q8_0, r, R)
#define CONTEXT_f32(r, R) CONTEXT(f32, r, R)
#define CONTEXT_f16(r, R) CONTEXT(f16, r, R)
#define CONTEXT_q8_0(r, R) CONTEXT(q8_0, r, R)
ATTENTION(f32)
ATTENTION(f16)
ATTENTION(q8_0)
