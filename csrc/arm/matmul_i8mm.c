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
#define PAIRS
#include "sums.h"
#include "sdot.h"

PI_INLINE void unpack UNPACK_ARGS {
    const uint32x4_t c = vreinterpretq_u32_u8(codes(f, pi_table_e2m1, code, k));
    const uint32x4_t d = vreinterpretq_u32_u8(codes(f, pi_table_e2m1, code, k + 1));
    v[0] = vreinterpretq_u8_u32(vzip1q_u32(c, d)), v[1] = vreinterpretq_u8_u32(vzip2q_u32(c, d));
}

PI_BEGIN(PI_I8MM)

PI_INLINE void sums_smmla SUMS_ARGS {
    if (tile == 1 && T == 1) {
        sums_sdot(f, 1, code, a, t0, b, half, R, 1, dot);
        return;
    }
    const int halves = PI_SCALE_GROUPS(f);
    PI_UNROLL for (int t = 0; t < T; t += 2) {
        int32x4_t sum[MAX_R][2];
        PI_UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = vdupq_n_s32(0);
        PI_UNROLL for (int k = half * 4; k < half * 4 + 8 / halves; k += 2) {
            const int8x16_t x = vcombine_s8(vld1_s8(a->q + step_at(a, tile, t0, b, k, t)), vld1_s8(a->q + step_at(a, tile, t0, b, k, t + 1)));
            PI_UNROLL for (int r = 0; r < R; r++) {
                vb v[2];
                operands(f, tile, code[r], k, v);
                PI_UNROLL for (int i = 0; i < 2; i++) sum[r][i] = vmmlaq_s32(sum[r][i], vreinterpretq_s8_u8(v[i]), x);
            }
        }
        PI_UNROLL for (int r = 0; r < R; r++) {
            dot[r][t] = vuzp1q_s32(sum[r][0], sum[r][1]);
            dot[r][t + 1] = vuzp2q_s32(sum[r][0], sum[r][1]);
        }
    }
}

#define sums sums_smmla
enum { STRIPS = 4, TOKENS = TILE_I8MM, STRIPS_ALONE = 4, AHEAD = 0 };
#include "../simd/matmul_quant.h"
PI_END
#endif
