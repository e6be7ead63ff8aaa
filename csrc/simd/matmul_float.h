/* F32 and F16 matmul for vectors of V lanes: lane = weight row, one fold over k in each. NUMERICS.md section 3. */

#define GROUP_VECTORS (PI_LANES / V)

/* y[16] of a group from its vectors; the last group may be cut short. */
PI_INLINE void store_group(const pi_weight *w, int64_t g, float *y, const vf *v) {
    int64_t left = w->rows - g * PI_LANES;
    PI_UNROLL for (int i = 0; i < GROUP_VECTORS; i++, left -= V) {
        float *p = y + g * PI_LANES + i * V;
        if (left >= V)
            v_store(p, v[i]);
        else if (left > 0)
            v_store_n(p, v[i], (int)left);
    }
}

#define TILE_FLOAT(type, T_) \
    PI_INLINE void tile_##type(const pi_weight *w, const pi_act *a, int64_t g, int64_t g_last, int64_t t0, float *y, int64_t ldy, \
                               const int R, const int T) { \
        const T_ *row[4]; \
        vf acc[6][4][GROUP_VECTORS]; \
        for (int r = 0; r < R; r++) row[r] = (const T_ *)(w->data + pi_min(g + r, g_last) * w->group_bytes); \
        PI_UNROLL for (int t = 0; t < T; t++) PI_UNROLL for (int r = 0; r < R; r++) \
            PI_UNROLL for (int i = 0; i < GROUP_VECTORS; i++) acc[t][r][i] = v_set1(0.0f); \
        for (int64_t k = 0; k < a->cols; k++) \
            PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int i = 0; i < GROUP_VECTORS; i++) { \
                const vf v = v_load_##type(row[r] + k * PI_LANES + i * V); \
                PI_UNROLL for (int t = 0; t < T; t++) \
                    acc[t][r][i] = v_fma(v, v_set1(a->x[(t0 + t) * a->cols + k]), acc[t][r][i]); \
            } \
        PI_UNROLL for (int t = 0; t < T; t++) PI_UNROLL for (int r = 0; r < R; r++) \
            store_group(w, pi_min(g + r, g_last), y + (t0 + t) * ldy, acc[t][r]); \
    }
TILE_FLOAT(f32, float)
TILE_FLOAT(f16, uint16_t)
