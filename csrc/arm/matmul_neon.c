/* Baseline NEON matmul: bytes multiply into int16, two rows to a register half, and pairs add up at the end of a block.
 * Codes below 16 leave room for all eight steps (8 * 15 * 127); int8 codes for two (2 * 128 * 127). */
#include "../pi.h"
#if PI_ARM

PI_INLINE int8x16_t bytes4(const int8_t *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(v));
}

/* low: rows 0 and 1 of four, high: rows 2 and 3; each row has two int32 in its half */
PI_INLINE int32x4_t rows4(int32x4_t low, int32x4_t high) { return vpaddq_s32(low, high); }

PI_INLINE void sums_q4_1(const uint8_t *code, const pi_act *a, int64_t t0, int64_t b, const int T, int32x4_t dot[4][4]) {
    const uint8x16_t low4 = vdupq_n_u8(15);
    PI_UNROLL for (int t = 0; t < T; t++) {
        const int8_t *x = a->q + (t0 + t) * a->cols + b * PI_BLOCK;
        PI_UNROLL for (int i = 0; i < 4; i++) {
            int16x8_t low = vdupq_n_s16(0), high = low;
            PI_UNROLL for (int j = 0; j < 4; j++) {
                uint8x16_t v = vld1q_u8(code + j * 64 + i * 16);
                int8x16_t c0 = vreinterpretq_s8_u8(vandq_u8(v, low4)), c1 = vreinterpretq_s8_u8(vshrq_n_u8(v, 4));
                int8x16_t x0 = bytes4(x + j * 4), x1 = bytes4(x + 16 + j * 4);
                low = vmlal_s8(vmlal_s8(low, vget_low_s8(c0), vget_low_s8(x0)), vget_low_s8(c1), vget_low_s8(x1));
                high = vmlal_high_s8(vmlal_high_s8(high, c0, x0), c1, x1);
            }
            dot[t][i] = rows4(vpaddlq_s16(low), vpaddlq_s16(high));
        }
    }
}

PI_INLINE void sums_q8_0(const uint8_t *code, const pi_act *a, int64_t t0, int64_t b, const int T, int32x4_t dot[4][4]) {
    PI_UNROLL for (int t = 0; t < T; t++) {
        const int8_t *x = a->q + (t0 + t) * a->cols + b * PI_BLOCK;
        PI_UNROLL for (int i = 0; i < 4; i++) {
            int32x4_t low = vdupq_n_s32(0), high = low;
            PI_UNROLL for (int j = 0; j < 8; j += 2) {
                int8x16_t c0 = vreinterpretq_s8_u8(vld1q_u8(code + j * 64 + i * 16)), x0 = bytes4(x + j * 4);
                int8x16_t c1 = vreinterpretq_s8_u8(vld1q_u8(code + j * 64 + 64 + i * 16)), x1 = bytes4(x + j * 4 + 4);
                int16x8_t p = vmull_s8(vget_low_s8(c0), vget_low_s8(x0));
                low = vpadalq_s16(low, vmlal_s8(p, vget_low_s8(c1), vget_low_s8(x1)));
                high = vpadalq_s16(high, vmlal_high_s8(vmull_high_s8(c0, x0), c1, x1));
            }
            dot[t][i] = rows4(low, high);
        }
    }
}

#define LEVEL(name) name##_neon
#define TOKENS 2
#define SUMS_Q4_1 sums_q4_1
#define SUMS_Q8_0 sums_q8_0
#include "matmul_arm.h"

#endif
