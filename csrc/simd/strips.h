/* Strips: a strip is one vector of weight rows, V of a row group's 16. A tile function computes R strips by T tokens; past the
 * last strip it repeats that one: the same sums are stored twice, and no narrower tile is needed. */
enum { GROUP_STRIPS = PI_LANES / V };

/* Where strip s starts inside its matrix, and which lane of its group is its first. */
PI_INLINE const uint8_t *strip_group(const pi_weight *w, int64_t s) { return w->data + s / GROUP_STRIPS * w->group_bytes; }
PI_INLINE int64_t strip_lane(int64_t s) { return s % GROUP_STRIPS * V; }

/* y[V] of strip s; the matrix may end inside it, or before it. */
PI_INLINE void store_strip(const pi_weight *w, int64_t s, float *y, vf v) {
    int64_t left = w->rows - s * V;
    if (left >= V)
        v_store(y + s * V, v);
    else if (left > 0)
        v_store_n(y + s * V, v, (int)left);
}

/* A matmul kernel from a tile function: R strips by T tokens, then by two; the last of an odd number takes R1 strips at once, a
 * multiple of R, whose independent folds hide the latency of one. */
#define TILED(name, tile, R, T, R1) \
    void name PI_MATMUL_ARGS { \
        const int64_t s1 = g1 * GROUP_STRIPS; \
        for (int64_t s = g0 * GROUP_STRIPS; s < s1; s += R1) { \
            int64_t t = t0; \
            for (int64_t r = s; r < pi_min(s + R1, s1); r += R) { \
                for (t = t0; t + T <= t1; t += T) tile(w, a, r, s1 - 1, t, y, ldy, R, T); \
                for (; t + 2 <= t1; t += 2) tile(w, a, r, s1 - 1, t, y, ldy, R, 2); \
            } \
            if (t < t1) tile(w, a, s, s1 - 1, t, y, ldy, R1, 1); \
        } \
    }
/* The most that a level may ask for. */
enum { MAX_R = 8, MAX_T = 6 };
#define TILE_ARGS (const pi_weight *w, const pi_act *a, int64_t s0, int64_t s_last, int64_t t0, float *y, int64_t ldy, const int R, const int T)
