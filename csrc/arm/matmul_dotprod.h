/* A block's sums by sdot, for the levels that have it. */
#include "../pi.h"
#if PI_ARM

#if defined(__clang__)
#define PI_DOTPROD "dotprod"
#define PI_I8MM "dotprod,i8mm"
#else
#define PI_DOTPROD "arch=armv8.2-a+dotprod"
#define PI_I8MM "arch=armv8.2-a+dotprod+i8mm"
#endif

PI_BEGIN(PI_DOTPROD)

PI_INLINE void sums_q4_1_sdot(const uint8_t *code, const pi_act *a, int64_t t0, int64_t b, const int T, int32x4_t dot[4][4]) {
    const uint8x16_t low4 = vdupq_n_u8(15);
    int8x16_t x[4][2];
    PI_UNROLL for (int t = 0; t < T; t++) {
        x[t][0] = vld1q_s8(a->q + (t0 + t) * a->cols + b * PI_BLOCK);
        x[t][1] = vld1q_s8(a->q + (t0 + t) * a->cols + b * PI_BLOCK + 16);
        PI_UNROLL for (int i = 0; i < 4; i++) dot[t][i] = vdupq_n_s32(0);
    }
#define STEP(j) \
    PI_UNROLL for (int i = 0; i < 4; i++) { \
        uint8x16_t v = vld1q_u8(code + j * 64 + i * 16); \
        int8x16_t c0 = vreinterpretq_s8_u8(vandq_u8(v, low4)), c1 = vreinterpretq_s8_u8(vshrq_n_u8(v, 4)); \
        PI_UNROLL for (int t = 0; t < T; t++) { \
            dot[t][i] = vdotq_laneq_s32(dot[t][i], c0, x[t][0], j); \
            dot[t][i] = vdotq_laneq_s32(dot[t][i], c1, x[t][1], j); \
        } \
    }
    STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
}

PI_INLINE void sums_q8_0_sdot(const uint8_t *code, const pi_act *a, int64_t t0, int64_t b, const int T, int32x4_t dot[4][4]) {
    int8x16_t x[4][2];
    PI_UNROLL for (int t = 0; t < T; t++) {
        x[t][0] = vld1q_s8(a->q + (t0 + t) * a->cols + b * PI_BLOCK);
        x[t][1] = vld1q_s8(a->q + (t0 + t) * a->cols + b * PI_BLOCK + 16);
        PI_UNROLL for (int i = 0; i < 4; i++) dot[t][i] = vdupq_n_s32(0);
    }
#define STEP(j) \
    PI_UNROLL for (int i = 0; i < 4; i++) { \
        int8x16_t c0 = vreinterpretq_s8_u8(vld1q_u8(code + j * 64 + i * 16)); \
        int8x16_t c1 = vreinterpretq_s8_u8(vld1q_u8(code + 256 + j * 64 + i * 16)); \
        PI_UNROLL for (int t = 0; t < T; t++) { \
            dot[t][i] = vdotq_laneq_s32(dot[t][i], c0, x[t][0], j); \
            dot[t][i] = vdotq_laneq_s32(dot[t][i], c1, x[t][1], j); \
        } \
    }
    STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
}

PI_END
#endif
