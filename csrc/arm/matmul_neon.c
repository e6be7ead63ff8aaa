/* Baseline NEON matmul: bytes multiply into int16, two rows to a register, and pairs add up when its lanes are full. */
#include "arm.h"
#if PI_ARM

#define LEVEL(name) name##_neon
#include "vec_neon.h"
#include "../simd/strips.h"
#include "sums.h"

PI_INLINE int8x16_t four(const int8_t *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(v));
}

PI_INLINE void sums SUMS_ARGS {
    /* Steps that fit one int16: |code| * 127 each, so 17 of 15, 8 of 31, 4 of 63, 2 of 128. */
    const int top = f.bits == 8 || f.table == PI_TABLE_NL ? 128 : (1 << f.bits) - 1, room = (int)pi_min(8, 32767 / (127 * top));
    const int halves = PI_SCALE_GROUPS(f), steps = 8 / halves;
    PI_UNROLL for (int t = 0; t < T; t++) PI_UNROLL for (int r = 0; r < R; r++) {
        int32x4_t low = vdupq_n_s32(0), high = low; /* rows 0 and 1, rows 2 and 3: two int32 to each */
        int16x8_t p = vdupq_n_s16(0), q = p;
        PI_UNROLL for (int i = 0; i < steps; i++) {
            const int k = step_codes(half, halves, i);
            vb v[2];
            operands(f, tile, code[r], k, v);
            const int8x16_t c = vreinterpretq_s8_u8(v[0]), x = four(a->q + step_at(a, tile, t0, b, k, t));
            p = i % room ? vmlal_s8(p, vget_low_s8(c), vget_low_s8(x)) : vmull_s8(vget_low_s8(c), vget_low_s8(x));
            q = i % room ? vmlal_high_s8(q, c, x) : vmull_high_s8(c, x);
            if ((i + 1) % room == 0 || i + 1 == steps) low = vpadalq_s16(low, p), high = vpadalq_s16(high, q);
        }
        dot[r][t] = vpaddq_s32(low, high);
    }
}

enum { STRIPS = 4, TOKENS = TILE_NEON, STRIPS_ALONE = 4, AHEAD = 0 };
#include "../simd/matmul_quant.h"

#endif
