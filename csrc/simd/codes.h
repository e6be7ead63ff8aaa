/* Codes out of their planes (quant.h), for byte vectors (vb) of any level; a code is one byte. */

/* A field of each byte, moved from bit `from` to bit `to`. */
PI_INLINE vb field(vb v, int from, int to, int mask) {
    return vb_and(from > to ? vb_shr(v, from - to) : from < to ? vb_shl(v, to - from) : v, vb_set1((uint8_t)(mask << to)));
}

/* Codes 4k..4k+3 of each row of a strip, as stored; of a table type, the table's values, those of E2M1 as `e2m1` has them. */
PI_INLINE vb codes(const pi_format f, const int8_t *e2m1, const uint8_t *p, int k) {
    if (f.bits == 8) return vb_load(p + k * PI_VECTOR_BYTES);
    vb v = vb_set1(0);
    if (PI_HAS_NIBBLE(f)) v = field(vb_load(p + k % 4 * PI_VECTOR_BYTES), k / 4 * 4, 0, 15);
    if (PI_HAS_TWO(f)) v = vb_or(v, field(vb_load(p + PI_TWO_AT(f) + k / 4 * PI_VECTOR_BYTES), k % 4 * 2, PI_TWO_SHIFT(f), 3));
    if (PI_HAS_ONE(f)) v = vb_or(v, field(vb_load(p + PI_ONE_AT(f)), k, PI_ONE_SHIFT(f), 1));
    if (f.table) v = vb_lookup(f.table == PI_TABLE_NL ? pi_table_nl : e2m1, v);
    return v;
}

/* A level's, which says by STEPS and OPERANDS(f) how many steps it takes and vectors it makes. */
#define UNPACK_ARGS (const pi_format f, const uint8_t *code, int k, vb v[2])
PI_INLINE void unpack UNPACK_ARGS;

/* What the levels' sums multiply, of steps k .. k + STEPS. Tiles of more than one token go with spread strips. */
PI_INLINE void operands(const pi_format f, const int tile, const uint8_t *code, int k, vb v[2]) {
    if (tile == 1)
        unpack(f, code, k, v);
    else
        for (int i = 0; i < OPERANDS(f); i++) v[i] = vb_load(code + (k / STEPS * OPERANDS(f) + i) * sizeof(vb));
}

/* Where an act holds step k of block b of token t0 + t, in codes; and the numbers of that block's scale group `half` of `halves`. t0 is
 * the first token of a tile. */
PI_INLINE int64_t step_at(const pi_act *a, const int tile, int64_t t0, int64_t b, int k, int t) {
    return (tile == 1 ? (t0 + t) * a->nb + b : t0 * a->nb + b * tile + t) * PI_BLOCK + k * 4;
}
PI_INLINE int64_t scale_at(const pi_act *a, const int tile, int64_t t0, int64_t b, int half, int halves, int t) {
    return tile == 1 ? ((t0 + t) * a->nb + b) * halves + half : (t0 * a->nb + b * tile) * halves + half * tile + t;
}

/* Step i of a scale group: which vector of codes. Two that share a load follow each other. */
PI_INLINE int step_codes(int half, int halves, int i) { return halves == 1 ? i % 2 * 4 + i / 2 : half * 4 + i; }

#define SUMS_ARGS \
    (const pi_format f, const int tile, const uint8_t *const *code, const pi_act *a, int64_t t0, int64_t b, int half, const int R, \
     const int T, vi dot[MAX_R][MAX_T])
