/* The quantised matmul kernels of all three aarch64 levels: a tile is one row group by T tokens, R = 1. The including file
 * defines how a level adds up a block:
 *
 *   SUMS_Q4_1 / SUMS_Q8_0(code, a, t0, b, T, dot)   dot[t][i]: int32 sums of rows 4i..4i+3 for token t0 + t, i < 4
 *
 * Lane = weight row; a register holds four codes of four rows:  | row 4i: c0 c1 c2 c3 | row 4i+1 | row 4i+2 | row 4i+3 |
 * NUMERICS.md section 3. */

PI_INLINE float32x4_t halves4(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

PI_INLINE void store_rows(const pi_weight *w, int64_t n, float *y, float32x4_t v) {
    if (w->rows - n >= 4) {
        vst1q_f32(y + n, v);
    } else {
        float t[4];
        vst1q_f32(t, v);
        for (int64_t i = n; i < w->rows; i++) y[i] = t[i - n];
    }
}

PI_INLINE void tile_q4_1(const pi_weight *w, const pi_act *a, int64_t g, int64_t g_last, int64_t t0, float *y, int64_t ldy, const int R,
                         const int T) {
    const uint8_t *code = w->data + g * w->group_bytes;
    const uint16_t *dm = (const uint16_t *)(code + a->nb * 256);
    float32x4_t acc[4][4];
    (void)g_last, (void)R;
    PI_UNROLL for (int t = 0; t < T; t++) PI_UNROLL for (int i = 0; i < 4; i++) acc[t][i] = vdupq_n_f32(0.0f);
    for (int64_t b = 0; b < a->nb; b++, code += 256, dm += 32) {
        int32x4_t dot[4][4];
        SUMS_Q4_1(code, a, t0, b, T, dot);
        PI_UNROLL for (int t = 0; t < T; t++) {
            const float dx = a->d[(t0 + t) * a->nb + b], sx = a->sx[(t0 + t) * a->nb + b];
            PI_UNROLL for (int i = 0; i < 4; i++) {
                float32x4_t s = vmulq_f32(halves4(dm + 4 * i), vdupq_n_f32(dx));
                acc[t][i] = vfmaq_f32(acc[t][i], vcvtq_f32_s32(dot[t][i]), s);
                acc[t][i] = vfmaq_f32(acc[t][i], halves4(dm + 16 + 4 * i), vdupq_n_f32(sx));
            }
        }
    }
    PI_UNROLL for (int t = 0; t < T; t++)
        PI_UNROLL for (int i = 0; i < 4; i++) store_rows(w, g * PI_LANES + 4 * i, y + (t0 + t) * ldy, acc[t][i]);
}

PI_INLINE void tile_q8_0(const pi_weight *w, const pi_act *a, int64_t g, int64_t g_last, int64_t t0, float *y, int64_t ldy, const int R,
                         const int T) {
    const uint8_t *code = w->data + g * w->group_bytes;
    const uint16_t *d = (const uint16_t *)(code + a->nb * 512);
    float32x4_t acc[4][4];
    (void)g_last, (void)R;
    PI_UNROLL for (int t = 0; t < T; t++) PI_UNROLL for (int i = 0; i < 4; i++) acc[t][i] = vdupq_n_f32(0.0f);
    for (int64_t b = 0; b < a->nb; b++, code += 512, d += 16) {
        int32x4_t dot[4][4];
        SUMS_Q8_0(code, a, t0, b, T, dot);
        PI_UNROLL for (int t = 0; t < T; t++) {
            const float dx = a->d[(t0 + t) * a->nb + b];
            PI_UNROLL for (int i = 0; i < 4; i++) {
                float32x4_t s = vmulq_f32(halves4(d + 4 * i), vdupq_n_f32(dx));
                acc[t][i] = vfmaq_f32(acc[t][i], vcvtq_f32_s32(dot[t][i]), s);
            }
        }
    }
    PI_UNROLL for (int t = 0; t < T; t++)
        PI_UNROLL for (int i = 0; i < 4; i++) store_rows(w, g * PI_LANES + 4 * i, y + (t0 + t) * ldy, acc[t][i]);
}

PI_TILED(LEVEL(pi_matmul_q4_1), tile_q4_1, 1, TOKENS, 1)
PI_TILED(LEVEL(pi_matmul_q8_0), tile_q8_0, 1, TOKENS, 1)
