/* One row's block of 32 out of a packed group (quant.h), in plain C: the meaning of the layout. */
#ifndef PI_REF_CODES_H
#define PI_REF_CODES_H

#include "../pi.h"

PI_INLINE float pi_half_at(const uint8_t *p, int i) {
    uint16_t h;
    memcpy(&h, p + 2 * i, 2);
    return pi_f32_of_f16(h);
}

PI_INLINE float pi_f32_of_e8m0(uint8_t e) { return pi_f32_of_bits(e < 2 ? 0x200000u << e : (uint32_t)(e - 1) << 23); } /* 2^(e - 128) */

/* Row r of block b: its 32 integer codes. */
PI_INLINE void pi_codes(const pi_format f, const uint8_t *group, int64_t b, int r, int32_t code[PI_BLOCK]) {
    const uint8_t *planes = group + b * PI_CODE_BYTES(f) + r * 4;
    for (int i = 0; i < PI_BLOCK; i++) {
        const uint8_t *p = planes + i % 4;
        const int k = i / 4;
        if (f.bits == 8) {
            code[i] = (int8_t)p[k * PI_VECTOR_BYTES];
            continue;
        }
        int v = 0;
        if (PI_HAS_NIBBLE(f)) v = p[k % 4 * PI_VECTOR_BYTES] >> (k / 4 * 4) & 15;
        if (PI_HAS_TWO(f)) v |= (p[PI_TWO_AT(f) + k / 4 * PI_VECTOR_BYTES] >> (k % 4 * 2) & 3) << PI_TWO_SHIFT(f);
        if (PI_HAS_ONE(f)) v |= (p[PI_ONE_AT(f)] >> k & 1) << PI_ONE_SHIFT(f);
        code[i] = f.table == PI_TABLE_NL ? pi_table_nl[v] : f.table == PI_TABLE_E2M1 ? pi_table_e2m1[v] : v - f.offset;
    }
}

/* Row r of block b: s_g and m_g of half `half`, or of the block. nb blocks to a row. */
PI_INLINE void pi_scales(const pi_format f, const uint8_t *group, int64_t nb, int64_t b, int half, int r, float *s, float *m) {
    const uint8_t *super = group + nb * PI_CODE_BYTES(f) + b / 8 * (PI_SUPER_BYTES(f) + 8 * PI_SUB_BYTES(f));
    const uint8_t *sub = super + PI_SUPER_BYTES(f) + b % 8 * PI_SUB_BYTES(f), *d = PI_HAS_SUPER(f) ? super : sub;
    *m = 0.0f;
    switch (f.scales) {
    case PI_SCALE_D: *s = pi_half_at(d, r); break;
    case PI_SCALE_DM: *s = pi_half_at(d, r), *m = pi_half_at(d, PI_LANES + r); break;
    case PI_SCALE_E8M0: *s = pi_f32_of_e8m0(sub[r]); break;
    case PI_SCALE_S8:
    case PI_SCALE_S8X2: *s = pi_half_at(d, r) * (float)(int8_t)sub[half * PI_LANES + r]; break;
    case PI_SCALE_U8M:
        *s = pi_half_at(d, r) * (float)sub[r];
        *m = -(pi_half_at(d, PI_LANES + r) * (float)sub[PI_LANES + r]);
        break;
    case PI_SCALE_U4M:
        *s = pi_half_at(d, r) * (float)(sub[half * PI_LANES + r] & 15);
        *m = -(pi_half_at(d, PI_LANES + r) * (float)(sub[half * PI_LANES + r] >> 4));
        break;
    }
}

#endif
