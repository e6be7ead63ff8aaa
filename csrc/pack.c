/* From GGUF's block layouts to row groups (quant.h). A type says how to read 32 codes and their scales out of its block; spreading
 * codes over planes and rows over lanes is done once, for all. */
#include "pack.h"

#include "ref/codes.h"

/* What a block of 32 columns of one row holds, as it stands in the file. */
typedef struct {
    uint8_t code[PI_BLOCK]; /* as stored: before offset or table */
    uint16_t half[2];       /* f16 d, and m or dmin */
    uint8_t sub[2];         /* scale bytes in the order of quant.h */
} block;

static uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* Bytes are moved eight at a time: a field that is masked after its shift has nothing of its neighbour's byte. */
static uint64_t eight(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}
static void put_eight(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }
#define EACH(byte) (0x0101010101010101u * (uint64_t)(byte))

/* code[i] |= (p[i] >> shift & mask) << to, for n bytes */
static void add_fields(const uint8_t *p, int n, int shift, int mask, int to, uint8_t *code) {
    for (int i = 0; i < n; i += 8) put_eight(code + i, eight(code + i) | (eight(p + i) >> shift & EACH(mask)) << to);
}
static void set_fields(const uint8_t *p, int n, int shift, int mask, uint8_t *code) {
    memset(code, 0, (size_t)n);
    add_fields(p, n, shift, mask, 0, code);
}
/* code[i] |= bit i of four bytes, at bit 4. The product puts bit i of seven at bit 8 i; the eighth would carry. */
static void add_fifth_bits(const uint8_t *p, uint8_t *code) {
    for (int i = 0; i < 4; i++) {
        const uint64_t low = (p[i] & 0x7f) * UINT64_C(0x02040810204081) & EACH(1), high = (uint64_t)(p[i] >> 7) << 56;
        put_eight(code + 8 * i, eight(code + 8 * i) | (low | high) << 4);
    }
}

/* Readers: block `i` of 32 inside the file's block at `p`. */
static void nibbles(const uint8_t *p, uint8_t *code) {
    set_fields(p, 16, 0, 15, code);
    set_fields(p, 16, 4, 15, code + 16);
}

static void read_q4_0(const uint8_t *p, int i, block *o) { /* f16 d, nibbles[16] */
    (void)i;
    o->half[0] = half_at(p);
    nibbles(p + 2, o->code);
}
static void read_q4_1(const uint8_t *p, int i, block *o) { /* f16 d, f16 m, nibbles[16] */
    (void)i;
    o->half[0] = half_at(p), o->half[1] = half_at(p + 2);
    nibbles(p + 4, o->code);
}
static void read_q5_0(const uint8_t *p, int i, block *o) { /* f16 d, bits[4], nibbles[16] */
    (void)i;
    o->half[0] = half_at(p);
    nibbles(p + 6, o->code);
    add_fifth_bits(p + 2, o->code);
}
static void read_q5_1(const uint8_t *p, int i, block *o) { /* f16 d, f16 m, bits[4], nibbles[16] */
    (void)i;
    o->half[0] = half_at(p), o->half[1] = half_at(p + 2);
    nibbles(p + 8, o->code);
    add_fifth_bits(p + 4, o->code);
}
static void read_q8_0(const uint8_t *p, int i, block *o) { /* f16 d, int8[32] */
    (void)i;
    o->half[0] = half_at(p);
    memcpy(o->code, p + 2, PI_BLOCK);
}
static void read_mxfp4(const uint8_t *p, int i, block *o) { /* e8m0, nibbles[16] */
    (void)i;
    o->sub[0] = p[0];
    nibbles(p + 1, o->code);
}

/* Super-blocks of 256: block i lies in half i / 4, a 128-column half spread over 32 bytes by two-bit fields. */
static void two_bits(const uint8_t *p, int i, uint8_t *code) { set_fields(p + i / 4 * 32, PI_BLOCK, i % 4 * 2, 3, code); }
static void nibble_run(const uint8_t *p, int i, uint8_t *code) { /* blocks 2c and 2c + 1: the low and high nibbles of 32 bytes */
    set_fields(p + i / 2 * 32, PI_BLOCK, i % 2 * 4, 15, code);
}
static void six_bit_pair(const uint8_t *p, int i, uint8_t *sub) { /* 8 scales and 8 minimums of 6 bits in 12 bytes */
    if (i < 4) {
        sub[0] = p[i] & 63, sub[1] = p[i + 4] & 63;
    } else {
        sub[0] = (uint8_t)((p[i + 4] & 15) | (p[i - 4] >> 6) << 4);
        sub[1] = (uint8_t)(p[i + 4] >> 4 | (p[i] >> 6) << 4);
    }
}

static void read_q2_k(const uint8_t *p, int i, block *o) { /* scales[16], two bits[64], f16 d, f16 dmin */
    o->half[0] = half_at(p + 80), o->half[1] = half_at(p + 82);
    o->sub[0] = p[2 * i], o->sub[1] = p[2 * i + 1];
    two_bits(p + 16, i, o->code);
}
static void read_q3_k(const uint8_t *p, int i, block *o) { /* third bits[32], two bits[64], scales[12], f16 d */
    o->half[0] = half_at(p + 108);
    for (int h = 0; h < 2; h++) {
        const int g = 2 * i + h; /* 16 scales of 6 bits, less 32: low nibbles in 8 bytes, then high pairs in 4 */
        const int low = p[96 + g % 8] >> (g / 8 * 4) & 15, high = p[104 + g % 4] >> (g / 4 * 2) & 3;
        o->sub[h] = (uint8_t)((low | high << 4) - 32);
    }
    two_bits(p + 32, i, o->code);
    add_fields(p, PI_BLOCK, i, 1, 2, o->code);
}
static void read_q4_k(const uint8_t *p, int i, block *o) { /* f16 d, f16 dmin, scales[12], nibbles[128] */
    o->half[0] = half_at(p), o->half[1] = half_at(p + 2);
    six_bit_pair(p + 4, i, o->sub);
    nibble_run(p + 16, i, o->code);
}
static void read_q5_k(const uint8_t *p, int i, block *o) { /* f16 d, f16 dmin, scales[12], fifth bits[32], nibbles[128] */
    o->half[0] = half_at(p), o->half[1] = half_at(p + 2);
    six_bit_pair(p + 4, i, o->sub);
    nibble_run(p + 48, i, o->code);
    add_fields(p + 16, PI_BLOCK, i, 1, 4, o->code);
}
static void read_q6_k(const uint8_t *p, int i, block *o) { /* nibbles[128], two bits[64], int8 scales[16], f16 d */
    o->half[0] = half_at(p + 208);
    o->sub[0] = p[192 + 2 * i], o->sub[1] = p[193 + 2 * i];
    const uint8_t *low = p + i / 4 * 64 + i % 2 * 32; /* a half's four blocks: low nibbles of 64 bytes, then the high ones */
    set_fields(low, PI_BLOCK, i % 4 / 2 * 4, 15, o->code);
    add_fields(p + 128 + i / 4 * 32, PI_BLOCK, i % 4 * 2, 3, 4, o->code);
}
static void read_iq4_xs(const uint8_t *p, int i, block *o) { /* f16 d, u16 high pairs, low nibbles[4], nibbles[128] */
    o->half[0] = half_at(p);
    o->sub[0] = (uint8_t)(((p[4 + i / 2] >> (i % 2 * 4) & 15) | (half_at(p + 2) >> (2 * i) & 3) << 4) - 32);
    nibbles(p + 8 + i * 16, o->code);
}
#define read_iq4_nl read_q4_0 /* f16 d, nibbles[16] */

/* ---- spreading -----------------------------------------------------------------------------------------*/

static uint32_t four(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}
static void put(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

/* Codes are moved four at a time: bits of one never reach its neighbour's byte. */
PI_INLINE void spread_codes(const pi_format f, const uint8_t *code, uint8_t *to) {
    uint32_t c[8];
    for (int k = 0; k < 8; k++) c[k] = four(code + 4 * k);
    if (f.bits == 8) {
        for (int k = 0; k < 8; k++) put(to + k * PI_VECTOR_BYTES, c[k]);
        return;
    }
    if (PI_HAS_NIBBLE(f))
        for (int k = 0; k < 4; k++) put(to + k * PI_VECTOR_BYTES, (c[k] & 0x0f0f0f0fu) | (c[k + 4] & 0x0f0f0f0fu) << 4);
    if (PI_HAS_TWO(f))
        for (int v = 0; v < 2; v++) {
            uint32_t plane = 0;
            for (int k = 0; k < 4; k++) plane |= (c[4 * v + k] >> PI_TWO_SHIFT(f) & 0x03030303u) << (2 * k);
            put(to + PI_TWO_AT(f) + v * PI_VECTOR_BYTES, plane);
        }
    if (PI_HAS_ONE(f)) {
        uint32_t plane = 0;
        for (int k = 0; k < 8; k++) plane |= (c[k] >> PI_ONE_SHIFT(f) & 0x01010101u) << k;
        put(to + PI_ONE_AT(f), plane);
    }
}

PI_INLINE void spread_scales(const pi_format f, const block *o, uint8_t *super, uint8_t *sub, int r) {
    uint8_t *d = PI_HAS_SUPER(f) ? super : sub;
    if (f.scales != PI_SCALE_E8M0) memcpy(d + 2 * r, &o->half[0], 2);
    if (PI_HAS_MIN(f)) memcpy(d + 2 * (PI_LANES + r), &o->half[1], 2);
    if (PI_HAS_SUPER(f) || f.scales == PI_SCALE_E8M0)
        for (int i = 0; i < PI_SUB_BYTES(f) / PI_LANES; i++) sub[i * PI_LANES + r] = o->sub[i];
}

typedef void reader(const uint8_t *p, int i, block *o);
PI_INLINE void pack_quantised(const pi_format f, reader *read, int block_cols, int src_bytes, const uint8_t *const *rows, int64_t cols,
                              uint8_t *group) {
    const int64_t nb = cols / PI_BLOCK;
    const int each = block_cols / PI_BLOCK;
    for (int64_t b = 0; b < nb; b++) {
        uint8_t *super = group + nb * PI_CODE_BYTES(f) + b / 8 * (PI_SUPER_BYTES(f) + 8 * PI_SUB_BYTES(f));
        uint8_t *sub = super + PI_SUPER_BYTES(f) + b % 8 * PI_SUB_BYTES(f), *planes = group + b * PI_CODE_BYTES(f);
        for (int r = 0; r < PI_LANES; r++) {
            block o;
            read(rows[r] + b / each * src_bytes, (int)(b % each), &o);
            spread_codes(f, o.code, planes + 4 * r);
            spread_scales(f, &o, super, sub, r);
        }
    }
}

#define PACK_FLOAT(type, T_) \
    static void pack_##type(const uint8_t *const *rows, int64_t cols, uint8_t *group) { \
        for (int64_t k = 0; k < cols; k++) \
            for (int r = 0; r < PI_LANES; r++) memcpy(group + (k * PI_LANES + r) * sizeof(T_), rows[r] + k * sizeof(T_), sizeof(T_)); \
    }
PACK_FLOAT(f32, uint32_t)
PACK_FLOAT(f16, uint16_t)
#define pack_bf16 pack_f16

/* ---- reading back --------------------------------------------------------------------------------------*/

#define ROW_FLOAT(type, T_, widen) \
    static void row_##type(const uint8_t *group, int64_t cols, int r, float *y) { \
        for (int64_t k = 0; k < cols; k++) y[k] = widen(((const T_ *)group)[k * PI_LANES + r]); \
    }
ROW_FLOAT(f32, float, )
ROW_FLOAT(f16, uint16_t, pi_f32_of_f16)
ROW_FLOAT(bf16, uint16_t, pi_f32_of_bf16)

PI_INLINE void row_quantised(const pi_format f, const uint8_t *group, int64_t cols, int r, float *y) {
    const int size = PI_BLOCK / PI_SCALE_GROUPS(f);
    for (int64_t b = 0; b < cols / PI_BLOCK; b++) {
        int32_t code[PI_BLOCK];
        pi_codes(f, group, b, r, code);
        for (int i = 0; i < PI_BLOCK; i++, y++) {
            float s, m;
            pi_scales(f, group, cols / PI_BLOCK, b, i / size, r, &s, &m);
            *y = PI_HAS_MIN(f) ? __builtin_fmaf(s, (float)code[i], m) : s * (float)code[i];
        }
    }
}
#define ROW(stem, ...) \
    static void row_##stem(const uint8_t *group, int64_t cols, int r, float *y) { \
        row_quantised(PI_FORMAT(stem, __VA_ARGS__), group, cols, r, y); \
    }
PI_QUANTISED(ROW)

/* ---- the types -----------------------------------------------------------------------------------------*/

/* Columns and bytes of the file's blocks. */
enum {
    BLOCK_Q4_0 = 32, BLOCK_Q4_1 = 32, BLOCK_Q5_0 = 32, BLOCK_Q5_1 = 32, BLOCK_Q8_0 = 32, BLOCK_IQ4_NL = 32, BLOCK_MXFP4 = 32,
    BLOCK_Q2_K = 256, BLOCK_Q3_K = 256, BLOCK_Q4_K = 256, BLOCK_Q5_K = 256, BLOCK_Q6_K = 256, BLOCK_IQ4_XS = 256,
    BYTES_Q4_0 = 18, BYTES_Q4_1 = 20, BYTES_Q5_0 = 22, BYTES_Q5_1 = 24, BYTES_Q8_0 = 34, BYTES_IQ4_NL = 18, BYTES_MXFP4 = 17,
    BYTES_Q2_K = 84, BYTES_Q3_K = 110, BYTES_Q4_K = 144, BYTES_Q5_K = 176, BYTES_Q6_K = 210, BYTES_IQ4_XS = 136,
};

#define PACK(stem, TYPE, ...) \
    static void pack_##stem(const uint8_t *const *rows, int64_t cols, uint8_t *group) { \
        pack_quantised(PI_FORMAT(stem, TYPE, __VA_ARGS__), read_##stem, BLOCK_##TYPE, BYTES_##TYPE, rows, cols, group); \
    }
PI_QUANTISED(PACK)

#define QUANTISED(stem, TYPE, bits, offset, table, scales, spread) \
    {PI_##TYPE, BLOCK_##TYPE, BYTES_##TYPE, true, {bits, offset, table, scales}, pack_##stem, row_##stem},
static const pi_weight_type types[] = {
    {PI_F32, 1, 4, false, {32, 0, 0, 0}, pack_f32, row_f32},
    {PI_F16, 1, 2, false, {16, 0, 0, 0}, pack_f16, row_f16},
    {PI_BF16, 1, 2, false, {16, 0, 0, 0}, pack_bf16, row_bf16},
    PI_QUANTISED(QUANTISED)
};

const pi_weight_type *pi_find_type(int type) {
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].type == type) return &types[i];
    return NULL;
}

int64_t pi_group_bytes(const pi_weight_type *t, int64_t cols) {
    const pi_format f = t->format;
    const int64_t bytes = t->quantised ? cols / PI_BLOCK * (PI_CODE_BYTES(f) + PI_SUB_BYTES(f)) + cols / PI_SUPER * PI_SUPER_BYTES(f)
                                       : cols * PI_LANES * t->src_bytes;
    return pi_ceil_div(bytes, PI_VECTOR_BYTES) * PI_VECTOR_BYTES;
}
