/* The quantised matmul for vectors of V lanes: lane = weight row, so a fold lives in one lane from first block to last. The
 * including file has a level's way to add up the codes of one scale group:
 *
 *   sums(f, code, a, t0, b, half, R, T, dot)   dot[r][t] = the sum of (code as stored, or table[code]) * q, exact integers,
 *                                              over block b of token t0 + t, or over one half of it
 *
 * where code[r] are strip r's codes of that block. All else (scales, offsets, minimums, the fold) stands here, once for all
 * types and levels. NUMERICS.md section 3. */

/* Scale and minimum of a strip's rows: `at` are the group's scales, `lane` the strip's first. */
PI_INLINE void scales(const pi_format f, const uint8_t *at, int64_t lane, int64_t b, int half, vf *s, vf *m) {
    const uint8_t *super = at + b / 8 * (PI_SUPER_BYTES(f) + 8 * PI_SUB_BYTES(f));
    const uint8_t *sub = super + PI_SUPER_BYTES(f) + b % 8 * PI_SUB_BYTES(f) + lane;
    const uint16_t *d = (const uint16_t *)(PI_HAS_SUPER(f) ? super : sub - lane) + lane;
    switch (f.scales) {
    case PI_SCALE_D: *s = v_load_f16(d); break;
    case PI_SCALE_DM: *s = v_load_f16(d), *m = v_load_f16(d + PI_LANES); break;
    case PI_SCALE_E8M0: *s = v_load_e8m0(sub); break;
    case PI_SCALE_S8:
    case PI_SCALE_S8X2: *s = v_mul(v_load_f16(d), v_load_s8(sub + half * PI_LANES)); break;
    case PI_SCALE_U8M:
        *s = v_mul(v_load_f16(d), v_load_u8(sub));
        *m = v_neg(v_mul(v_load_f16(d + PI_LANES), v_load_u8(sub + PI_LANES)));
        break;
    case PI_SCALE_U4M:
        *s = v_mul(v_load_f16(d), v_load_u4(sub + half * PI_LANES, 0));
        *m = v_neg(v_mul(v_load_f16(d + PI_LANES), v_load_u4(sub + half * PI_LANES, 4)));
        break;
    }
}

PI_INLINE void tile_quantised(const pi_format f, const pi_weight *w, const pi_act *a, int64_t s0, int64_t s_last, int64_t t0, float *y,
                              int64_t ldy, const int R, const int T) {
    const int halves = PI_SCALE_GROUPS(f), offset = f.table == PI_TABLE_E2M1 ? E2M1_OFFSET : f.offset;
    const float *sum = a->sum[halves - 1], *sx = a->sx[halves - 1];
    const uint8_t *code[MAX_R], *scale[MAX_R];
    int64_t lane[MAX_R];
    vf acc[MAX_R][MAX_T];
    for (int r = 0; r < R; r++) {
        const int64_t s = pi_min(s0 + r, s_last);
        lane[r] = strip_lane(s);
        code[r] = strip_group(w, s) + lane[r] * 4;
        scale[r] = strip_group(w, s) + a->nb * PI_CODE_BYTES(f);
    }
    PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) acc[r][t] = v_set1(0.0f);
    for (int64_t b = 0; b < a->nb; b++) {
        PI_UNROLL for (int half = 0; half < halves; half++) {
            vi dot[MAX_R][MAX_T];
            sums(f, code, a, t0, b, half, R, T, dot);
            PI_UNROLL for (int r = 0; r < R; r++) {
                vf s = v_set1(0.0f), m = s;
                scales(f, scale[r], lane[r], b, half, &s, &m);
                PI_UNROLL for (int t = 0; t < T; t++) {
                    const int64_t row = (t0 + t) * a->nb + b;
                    vf i = v_from_int(dot[r][t]); /* below 2^24, so taking the offset off in floats is exact */
                    if (offset) i = v_fma(v_set1((float)-offset), v_set1(sum[row * halves + half]), i);
                    acc[r][t] = v_fma(i, v_mul(s, v_set1(a->d[row])), acc[r][t]);
                    if (PI_HAS_MIN(f)) acc[r][t] = v_fma(m, v_set1(sx[row * halves + half]), acc[r][t]);
                }
            }
        }
        for (int r = 0; r < R; r++) code[r] += PI_CODE_BYTES(f);
    }
    PI_UNROLL for (int r = 0; r < R; r++)
        PI_UNROLL for (int t = 0; t < T; t++) store_strip(w, pi_min(s0 + r, s_last), y + (t0 + t) * ldy, acc[r][t]);
}

#define TILE_QUANTISED(stem, ...) \
    PI_INLINE void tile_##stem TILE_ARGS { \
        tile_quantised(PI_FORMAT(stem, __VA_ARGS__), w, a, s0, s_last, t0, y, ldy, R, T); \
    }
PI_QUANTISED(TILE_QUANTISED)
