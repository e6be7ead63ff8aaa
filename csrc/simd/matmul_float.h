/* F32, F16 and BF16 matmul for vectors of V lanes: lane = weight row, one fold over k in each. NUMERICS.md section 3. */
#define TILE_FLOAT(type, T_) \
    PI_INLINE void tile_##type TILE_ARGS { \
        const T_ *row[MAX_R]; \
        vf acc[MAX_R][MAX_T]; \
        for (int r = 0; r < R; r++) { \
            const int64_t s = pi_min(s0 + r, s_last); \
            row[r] = (const T_ *)strip_group(w, s) + strip_lane(s); \
        } \
        PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) acc[r][t] = v_set1(0.0f); \
        for (int64_t k = 0; k < a->cols; k++) { \
            vf v[MAX_R]; \
            PI_UNROLL for (int r = 0; r < R; r++) v[r] = v_load_##type(row[r] + k * PI_LANES); \
            PI_UNROLL for (int t = 0; t < T; t++) { \
                const vf x = v_set1(a->x[(t0 + t) * a->cols + k]); \
                PI_UNROLL for (int r = 0; r < R; r++) acc[r][t] = v_fma(v[r], x, acc[r][t]); \
            } \
        } \
        PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) \
            store_strip(w, pi_min(s0 + r, s_last), y + (t0 + t) * ldy, acc[r][t]); \
    }
TILE_FLOAT(f32, float)
TILE_FLOAT(f16, uint16_t)
TILE_FLOAT(bf16, uint16_t)
