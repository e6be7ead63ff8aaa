/* A scale group's sums by sdot, for the levels that have it: four products of signed bytes into the int32 lane of their row. */
PI_BEGIN(PI_DOTPROD)
PI_INLINE int32x4_t sdot(int32x4_t acc, int8x16_t c, int8x16_t x, int lane) {
    switch (lane) {
    case 0: return vdotq_laneq_s32(acc, c, x, 0);
    case 1: return vdotq_laneq_s32(acc, c, x, 1);
    case 2: return vdotq_laneq_s32(acc, c, x, 2);
    default: return vdotq_laneq_s32(acc, c, x, 3);
    }
}

PI_INLINE void sums_sdot SUMS_ARGS {
    const int halves = PI_SCALE_GROUPS(f);
    int8x16_t x[MAX_T][2];
    PI_UNROLL for (int t = 0; t < T; t++) {
        PI_UNROLL for (int h = 0; h < 2; h++) x[t][h] = vld1q_s8(a->q + step_at(a, tile, t0, b, 4 * h, t));
        PI_UNROLL for (int r = 0; r < R; r++) dot[r][t] = vdupq_n_s32(0);
    }
    PI_UNROLL for (int i = 0; i < 8 / halves; i++) {
        const int k = step_codes(half, halves, i);
        PI_UNROLL for (int r = 0; r < R; r++) {
            /* (Not by `operands`: matmul_i8mm.c, whose steps come in pairs, comes here with packed strips alone.) */
            const int8x16_t c = tile == 1 ? signed_codes(f, code[r], k) : vld1q_s8((const int8_t *)code[r] + k * 16);
            PI_UNROLL for (int t = 0; t < T; t++) dot[r][t] = sdot(dot[r][t], c, x[t][k / 4], k % 4);
        }
    }
}
PI_END
