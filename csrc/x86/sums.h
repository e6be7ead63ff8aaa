/* How the x86 levels add up a block's codes, for simd/matmul_quant.h; byte vectors (vb) and their names come from vec_<isa>.h.
 *
 *   w    | row 0: c0 c1 c2 c3 | row 1: c0 c1 c2 c3 | ...      one load of 4 codes to each row
 *   x    | x0 x1 x2 x3        | x0 x1 x2 x3        | ...      4 bytes of one token, broadcast
 *   dot  | row 0: int32       | row 1: int32       | ...
 *
 * Such four columns are a step; eight make a block. With VNNI, dpbusd multiplies unsigned by signed bytes and sums four without
 * saturation. Without it, maddubs sums pairs in int16, which hold several steps of small codes before they must widen; wide signed
 * codes are split into even and odd int16. */

#define WIDE(f) ((f).bits == 8 || (f).table == PI_TABLE_NL) /* codes of the whole int8 range */
#ifdef VNNI
#define OPERANDS(f) 1
#else
#define OPERANDS(f) (WIDE(f) ? 2 : 1)
#endif
enum { STEPS = 1 };
#include "../simd/codes.h"

/* Biased by 12, so that maddubs and dpbusd may take them: simd/matmul_quant.h subtracts it again. */
enum { E2M1_OFFSET = 12 };
static const int8_t e2m1_biased[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

#ifdef VNNI
PI_INLINE void unpack UNPACK_ARGS {
    const vb c = codes(f, e2m1_biased, code, k);
    v[0] = WIDE(f) ? vb_xor(c, vb_set1(0x80)) : c;
}

PI_INLINE void sums SUMS_ARGS {
    const int halves = PI_SCALE_GROUPS(f);
    PI_UNROLL for (int t = 0; t < T; t++)
        PI_UNROLL for (int r = 0; r < R; r++) dot[r][t] = WIDE(f) ? v_set1i(a->off[scale_at(a, tile, t0, b, 0, 1, t)]) : v_set1i(0);
    PI_UNROLL for (int i = 0; i < 8 / halves; i++) {
        const int k = step_codes(half, halves, i);
        vb c[MAX_R][2];
        PI_UNROLL for (int r = 0; r < R; r++) operands(f, tile, code[r], k, c[r]);
        PI_UNROLL for (int t = 0; t < T; t++) {
            const vb x = vb_four(a->q + step_at(a, tile, t0, b, k, t));
            PI_UNROLL for (int r = 0; r < R; r++) dot[r][t] = v_dpbusd(dot[r][t], c[r][0], x);
        }
    }
}
#else
/* word pairs:  even = (c0, c2)  odd = (c1, c3)   against q16 = x0 x2 | x1 x3 */
PI_INLINE void unpack UNPACK_ARGS {
    v[0] = codes(f, e2m1_biased, code, k);
    if (WIDE(f)) v[1] = v_high8(v[0]), v[0] = v_low8(v[0]);
}

PI_INLINE void sums_wide SUMS_ARGS {
    (void)half;
    PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) dot[r][t] = v_set1i(0);
    PI_UNROLL for (int i = 0; i < 8; i++) {
        const int k = step_codes(0, 1, i);
        vb c[MAX_R][2];
        PI_UNROLL for (int r = 0; r < R; r++) operands(f, tile, code[r], k, c[r]);
        PI_UNROLL for (int t = 0; t < T; t++) {
            const int16_t *x = a->q16 + step_at(a, tile, t0, b, k, t);
            const vb x0 = vb_four(x), x1 = vb_four(x + 2);
            PI_UNROLL for (int r = 0; r < R; r++) {
                dot[r][t] = v_addi(dot[r][t], v_madd(c[r][0], x0));
                dot[r][t] = v_addi(dot[r][t], v_madd(c[r][1], x1));
                PI_KEEP(dot[r][t]);
            }
        }
    }
}

PI_INLINE void sums SUMS_ARGS {
    if (WIDE(f)) {
        sums_wide(f, tile, code, a, t0, b, half, R, T, dot);
        return;
    }
    /* Steps whose pairs fit one int16: 2 * 127 * 15 * 8, * 31 * 4, * 63 * 2 are all below 32768. */
    const int top = f.table ? 24 : (1 << f.bits) - 1, room = pi_min(8, 32767 / (2 * 127 * top)) & -2;
    const int halves = PI_SCALE_GROUPS(f), steps = 8 / halves;
    vb part[MAX_R][MAX_T];
    PI_UNROLL for (int i = 0; i < steps; i++) {
        const int k = step_codes(half, halves, i);
        vb c[MAX_R][2];
        PI_UNROLL for (int r = 0; r < R; r++) operands(f, tile, code[r], k, c[r]);
        PI_UNROLL for (int t = 0; t < T; t++) {
            const vb x = vb_four(a->q + step_at(a, tile, t0, b, k, t));
            PI_UNROLL for (int r = 0; r < R; r++) {
                const vb p = vb_maddubs(c[r][0], x);
                part[r][t] = i % room ? v_add16(part[r][t], p) : p;
                if ((i + 1) % room == 0 || i + 1 == steps) {
                    const vi four = v_madd(part[r][t], v_set16(1));
                    dot[r][t] = i < room ? four : v_addi(dot[r][t], four);
                    PI_KEEP(dot[r][t]);
                } else
                    PI_KEEP(part[r][t]);
            }
        }
    }
}
#endif
