/* Matmul by smmla: a 2 x 8 block of codes times a 8 x 2 block of activations into a 2 x 2 block of int32. Two steps of the
 * packed layout zip into two rows of eight codes; a pair of tokens fills the other side; a lone token takes sdot.
 *
 *   zip1(step j, step j + 1)   | row 0: c0..c3 c4..c7 | row 1: c0..c3 c4..c7 |
 *   x                          | token 0: x0..x7      | token 1: x0..x7      |
 *   sum                        | r0 t0 | r0 t1 | r1 t0 | r1 t1 |      uzp1, uzp2 of two sums: four rows of one token */
#include "matmul_dotprod.h"
#if PI_ARM

PI_BEGIN(PI_I8MM)

PI_INLINE void sums_smmla(const int8x16_t step[8][4], const pi_act *a, int64_t t0, int64_t b, int32x4_t dot[4][4]) {
    const int8_t *x0 = a->q + t0 * a->cols + b * PI_BLOCK, *x1 = x0 + a->cols;
    int32x4_t sum[4][2];
    PI_UNROLL for (int i = 0; i < 4; i++) sum[i][0] = sum[i][1] = vdupq_n_s32(0);
    PI_UNROLL for (int j = 0; j < 8; j += 2) {
        int8x16_t x = vcombine_s8(vld1_s8(x0 + j * 4), vld1_s8(x1 + j * 4));
        PI_UNROLL for (int i = 0; i < 4; i++) {
            int32x4_t u = vreinterpretq_s32_s8(step[j][i]), v = vreinterpretq_s32_s8(step[j + 1][i]);
            sum[i][0] = vmmlaq_s32(sum[i][0], vreinterpretq_s8_s32(vzip1q_s32(u, v)), x);
            sum[i][1] = vmmlaq_s32(sum[i][1], vreinterpretq_s8_s32(vzip2q_s32(u, v)), x);
        }
    }
    PI_UNROLL for (int i = 0; i < 4; i++) {
        dot[0][i] = vuzp1q_s32(sum[i][0], sum[i][1]);
        dot[1][i] = vuzp2q_s32(sum[i][0], sum[i][1]);
    }
}

PI_INLINE void sums_q4_1(const uint8_t *code, const pi_act *a, int64_t t0, int64_t b, const int T, int32x4_t dot[4][4]) {
    if (T == 1) {
        sums_q4_1_sdot(code, a, t0, b, 1, dot);
        return;
    }
    int8x16_t step[8][4];
    PI_UNROLL for (int j = 0; j < 4; j++) PI_UNROLL for (int i = 0; i < 4; i++) {
        uint8x16_t v = vld1q_u8(code + j * 64 + i * 16);
        step[j][i] = vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15)));
        step[j + 4][i] = vreinterpretq_s8_u8(vshrq_n_u8(v, 4));
    }
    sums_smmla(step, a, t0, b, dot);
}

PI_INLINE void sums_q8_0(const uint8_t *code, const pi_act *a, int64_t t0, int64_t b, const int T, int32x4_t dot[4][4]) {
    if (T == 1) {
        sums_q8_0_sdot(code, a, t0, b, 1, dot);
        return;
    }
    int8x16_t step[8][4];
    PI_UNROLL for (int j = 0; j < 8; j++)
        PI_UNROLL for (int i = 0; i < 4; i++) step[j][i] = vreinterpretq_s8_u8(vld1q_u8(code + j * 64 + i * 16));
    sums_smmla(step, a, t0, b, dot);
}

#define LEVEL(name) name##_i8mm
#define TOKENS 2
#define SUMS_Q4_1 sums_q4_1
#define SUMS_Q8_0 sums_q8_0
#include "matmul_arm.h"

PI_END
#endif
