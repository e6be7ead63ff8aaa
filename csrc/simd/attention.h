/* Attention over the tiled cache, for vectors of V lanes. Scores: lane = another key. Values: lane = another dimension.
 * Each K or V vector that is loaded serves every query head of the group.  NUMERICS.md section 4, attention.
 *
 *   K tile   d = 0: | key 0 | key 1 | ... | key 15 |      one fma of (q[d], row d) moves 16 folds a step on
 *            d = 1: | key 0 | ...
 *   V        key 0: | d 0 | d 1 | ... | dim - 1 |         one fma of (p[key], row)
 */

#define KEY_VECTORS (PI_LANES / V) /* vectors to a row of a K tile */

#define ATTENTION(type, T) \
    PI_INLINE void scores_block_##type(const float *q, int64_t ldq, const T *k, int64_t dim, float scale, float *s, int64_t lds, \
                                       const int H, const int TILES) { \
        vf acc[4][4 * KEY_VECTORS]; \
        PI_UNROLL for (int h = 0; h < H; h++) \
            PI_UNROLL for (int i = 0; i < TILES * KEY_VECTORS; i++) acc[h][i] = v_set1(0.0f); \
        for (int64_t d = 0; d < dim; d++) { \
            vf key[4 * KEY_VECTORS]; \
            PI_UNROLL for (int i = 0; i < TILES * KEY_VECTORS; i++) \
                key[i] = v_load_##type(k + (i / KEY_VECTORS * dim + d) * PI_LANES + i % KEY_VECTORS * V); \
            PI_UNROLL for (int h = 0; h < H; h++) { \
                const vf x = v_set1(q[h * ldq + d]); \
                PI_UNROLL for (int i = 0; i < TILES * KEY_VECTORS; i++) acc[h][i] = v_fma(x, key[i], acc[h][i]); \
            } \
        } \
        PI_UNROLL for (int h = 0; h < H; h++) \
            PI_UNROLL for (int i = 0; i < TILES * KEY_VECTORS; i++) \
                v_store(s + h * lds + i * V, v_mul(acc[h][i], v_set1(scale))); \
    } \
    PI_INLINE void scores_heads_##type(const float *q, int64_t ldq, const T *k, int64_t tiles, int64_t dim, float scale, float *s, \
                                       int64_t lds, const int H, const int TILES) { \
        int64_t i = 0; \
        for (; i + TILES <= tiles; i += TILES) \
            scores_block_##type(q, ldq, k + i * dim * PI_LANES, dim, scale, s + i * PI_LANES, lds, H, TILES); \
        for (; i < tiles; i++) scores_block_##type(q, ldq, k + i * dim * PI_LANES, dim, scale, s + i * PI_LANES, lds, H, 1); \
    } \
    void LEVEL(pi_scores_##type) PI_SCORES_ARGS(T) { \
        int64_t tiles = pi_ceil_div(n, PI_LANES); \
        for (int h = 0; h < heads;) { \
            const float *qh = q + h * ldq; \
            float *sh = s + h * lds; \
            switch (pi_min(heads - h, SCORE_HEADS)) { \
            case 1: scores_heads_##type(qh, ldq, k, tiles, dim, scale, sh, lds, 1, SCORE_VECTORS / KEY_VECTORS); h += 1; break; \
            case 2: scores_heads_##type(qh, ldq, k, tiles, dim, scale, sh, lds, 2, pi_max(1, SCORE_VECTORS / 2 / KEY_VECTORS)); h += 2; break; \
            case 3: scores_heads_##type(qh, ldq, k, tiles, dim, scale, sh, lds, 3, pi_max(1, SCORE_VECTORS / 2 / KEY_VECTORS)); h += 3; break; \
            default: scores_heads_##type(qh, ldq, k, tiles, dim, scale, sh, lds, 4, pi_max(1, SCORE_VECTORS / 4 / KEY_VECTORS)); h += 4; \
            } \
        } \
    } \
    /* D vectors of dimensions; `left` < V lanes in the last one when it is not whole */ \
    PI_INLINE void context_block_##type(const float *p, int64_t ldp, const T *v, int64_t n, int64_t dim, float *out, int64_t ldo, \
                                        int left, const int H, const int D) { \
        vf acc[4][4]; \
        PI_UNROLL for (int h = 0; h < H; h++) PI_UNROLL for (int i = 0; i < D; i++) acc[h][i] = v_set1(0.0f); \
        for (int64_t t = 0; t < n; t++, v += dim) { \
            vf x[4]; \
            PI_UNROLL for (int i = 0; i < D; i++) x[i] = left ? v_load_n_##type(v + i * V, left) : v_load_##type(v + i * V); \
            PI_UNROLL for (int h = 0; h < H; h++) { \
                const vf w = v_set1(p[h * ldp + t]); \
                PI_UNROLL for (int i = 0; i < D; i++) acc[h][i] = v_fma(w, x[i], acc[h][i]); \
            } \
        } \
        PI_UNROLL for (int h = 0; h < H; h++) \
            PI_UNROLL for (int i = 0; i < D; i++) { \
                if (left) \
                    v_store_n(out + h * ldo + i * V, acc[h][i], left); \
                else \
                    v_store(out + h * ldo + i * V, acc[h][i]); \
            } \
    } \
    PI_INLINE void context_heads_##type(const float *p, int64_t ldp, const T *v, int64_t n, int64_t dim, float *out, int64_t ldo, \
                                        const int H) { \
        int64_t d = 0; \
        for (; d + 4 * V <= dim; d += 4 * V) context_block_##type(p, ldp, v + d, n, dim, out + d, ldo, 0, H, 4); \
        for (; d + V <= dim; d += V) context_block_##type(p, ldp, v + d, n, dim, out + d, ldo, 0, H, 1); \
        if (d < dim) context_block_##type(p, ldp, v + d, n, dim, out + d, ldo, (int)(dim - d), H, 1); \
    } \
    void LEVEL(pi_context_##type) PI_CONTEXT_ARGS(T) { \
        for (int h = 0; h < heads;) { \
            const float *ph = p + h * ldp; \
            float *oh = out + h * ldo; \
            switch (pi_min(heads - h, CONTEXT_HEADS)) { \
            case 1: context_heads_##type(ph, ldp, v, n, dim, oh, ldo, 1); h += 1; break; \
            case 2: context_heads_##type(ph, ldp, v, n, dim, oh, ldo, 2); h += 2; break; \
            case 3: context_heads_##type(ph, ldp, v, n, dim, oh, ldo, 3); h += 3; break; \
            default: context_heads_##type(ph, ldp, v, n, dim, oh, ldo, 4); h += 4; \
            } \
        } \
    }

ATTENTION(f32, float)
ATTENTION(f16, uint16_t)
