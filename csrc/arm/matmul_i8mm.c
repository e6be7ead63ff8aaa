/* Matmul by smmla: a 2 x 8 block of codes times a 8 x 2 block of activations into a 2 x 2 block of int32. Two steps of the
 * packed layout zip into two rows of eight codes; a pair of tokens fills the other side; a lone token takes sdot.
 *
 *   zip1(codes k, codes k + 1)   | row 0: c0..c3 c4..c7 | row 1: c0..c3 c4..c7 |
 *   x                            | token 0: x0..x7      | token 1: x0..x7      |
 *   sum                          | r0 t0 | r0 t1 | r1 t0 | r1 t1 |      uzp1, uzp2 of two sums: four rows of one token */
#include "arm.h"
#if PI_ARM

#define LEVEL(name) name##_i8mm
#include "vec_neon.h"
#include "../simd/strips.h"
#include "sums.h"
#include "sdot.h"

PI_BEGIN(PI_I8MM)

PI_INLINE void sums_smmla SUMS_ARGS {
    if (T == 1) {
        sums_sdot(f, code, a, t0, b, half, R, 1, dot);
        return;
    }
    const int halves = PI_SCALE_GROUPS(f);
    PI_UNROLL for (int t = 0; t < T; t += 2) {
        const int8_t *x0 = a->q + (t0 + t) * a->cols + b * PI_BLOCK, *x1 = x0 + a->cols;
        int32x4_t sum[MAX_R][2];
        PI_UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = vdupq_n_s32(0);
        PI_UNROLL for (int k = half * 4; k < half * 4 + 8 / halves; k += 2) {
            const int8x16_t x = vcombine_s8(vld1_s8(x0 + k * 4), vld1_s8(x1 + k * 4));
            PI_UNROLL for (int r = 0; r < R; r++) {
                const int32x4_t u = vreinterpretq_s32_s8(signed_codes(f, code[r], k));
                const int32x4_t v = vreinterpretq_s32_s8(signed_codes(f, code[r], k + 1));
                sum[r][0] = vmmlaq_s32(sum[r][0], vreinterpretq_s8_s32(vzip1q_s32(u, v)), x);
                sum[r][1] = vmmlaq_s32(sum[r][1], vreinterpretq_s8_s32(vzip2q_s32(u, v)), x);
            }
        }
        PI_UNROLL for (int r = 0; r < R; r++) {
            dot[r][t] = vuzp1q_s32(sum[r][0], sum[r][1]);
            dot[r][t + 1] = vuzp2q_s32(sum[r][0], sum[r][1]);
        }
    }
}

#define sums sums_smmla
#include "../simd/matmul_quant.h"
#define X(stem, ...) TILED(LEVEL(pi_matmul_##stem), tile_##stem, 4, 2, 4)
PI_QUANTISED(X)
#undef X
PI_END
#endif
