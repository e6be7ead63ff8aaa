/* The quantised matmul for vectors of V lanes: lane = weight row, so a fold lives in one lane from first block to last. The
 * including file has a level's way to multiply,
 *
 *   unpack(f, code, k, v)    v[OPERANDS(f)] = packed codes of steps k .. k + STEPS (a step is four codes of each row of a strip) in
 *                            the form that `sums` multiplies
 *   sums(f, tile, code, a, t0, b, half, R, T, dot)
 *                            dot[r][t] = the sum of (code as stored, or table[code]) * q, exact integers, over block b of token
 *                            t0 + t, or over one half of it; code[r] are strip r's codes of that block
 *
 * and all else (scales, offsets, minimums, the fold) stands here, once for all types and levels. NUMERICS.md section 3.
 *
 * A few tokens read strips as they are packed. Many read them spread: PANEL_BLOCKS blocks of R strips are unpacked into a panel that
 * stays in the first-level cache while all tokens pass by, and their folds wait in memory for the next blocks. Spread, types that
 * differ in how they are packed alone are one.
 *
 * Few tokens wait for memory: a level whose arithmetic does not hide in that asks for codes AHEAD bytes before their turn. */

/* Scale and minimum of a strip's rows as packed: `at` are the group's scales, `lane` the strip's first. */
PI_INLINE void unpack_scales(const pi_format f, const uint8_t *at, int64_t lane, int64_t b, int half, vf *s, vf *m) {
    const uint8_t *super = at + b / 8 * (PI_SUPER_BYTES(f) + 8 * PI_SUB_BYTES(f));
    const uint8_t *sub = super + PI_SUPER_BYTES(f) + b % 8 * PI_SUB_BYTES(f) + lane;
    const uint16_t *d = (const uint16_t *)(PI_HAS_SUPER(f) ? super : sub - lane) + lane;
    switch (f.scales) {
    case PI_SCALE_D: *s = v_load_f16(d); break;
    case PI_SCALE_DM: *s = v_load_f16(d), *m = v_load_f16(d + PI_LANES); break;
    case PI_SCALE_E8M0: *s = v_load_e8m0(sub); break;
    case PI_SCALE_S8:
    case PI_SCALE_S8X2: *s = v_mul(v_load_f16(d), v_load_s8(sub + half * PI_LANES)); break;
    case PI_SCALE_U8M:
        *s = v_mul(v_load_f16(d), v_load_u8(sub));
        *m = v_neg(v_mul(v_load_f16(d + PI_LANES), v_load_u8(sub + PI_LANES)));
        break;
    case PI_SCALE_U4M:
        *s = v_mul(v_load_f16(d), v_load_u4(sub + half * PI_LANES, 0));
        *m = v_neg(v_mul(v_load_f16(d + PI_LANES), v_load_u4(sub + half * PI_LANES, 4)));
        break;
    }
}

/* One strip, packed or spread: its codes and scales of the next block. */
typedef struct {
    const uint8_t *code, *scale;
    int64_t lane; /* packed: the strip's first in its group */
} strip;

#define SPREAD_CODE_BYTES(f) ((int)(8 / STEPS * OPERANDS(f) * sizeof(vb)))
#define SPREAD_SCALES(f) (PI_SCALE_GROUPS(f) * (PI_HAS_MIN(f) ? 2 : 1)) /* vectors: s and m of each scale group */

#define OFFSET(f) ((f).table == PI_TABLE_E2M1 ? E2M1_OFFSET : (f).offset)

/* T tokens from t0 on go on folding blocks b0..b1 of R strips. Spread ones may be of another type than f, with an offset of its own. */
PI_INLINE void fold(const pi_format f, float offset, const int tile, const strip *w, const pi_act *a, int64_t t0, int64_t b0, int64_t b1,
                    const int R, const int T, vf acc[MAX_R][MAX_T]) {
    const int halves = PI_SCALE_GROUPS(f);
    const float *sum = a->sum[halves - 1], *sx = a->sx[halves - 1];
    const int vectors = SPREAD_SCALES(f) / halves;
    const uint8_t *code[MAX_R];
    for (int r = 0; r < R; r++) code[r] = w[r].code;
    for (int64_t b = b0; b < b1; b++) {
        if (AHEAD && tile == 1)
            for (int r = 0; r < R; r += GROUP_STRIPS)
                PI_UNROLL for (int i = 0; i < PI_CODE_BYTES(f); i += 64) __builtin_prefetch(code[r] + AHEAD + i, 0, 2);
        PI_UNROLL for (int half = 0; half < halves; half++) {
            vi dot[MAX_R][MAX_T];
            sums(f, tile, code, a, t0, b, half, R, T, dot);
            PI_UNROLL for (int r = 0; r < R; r++) {
                vf s = v_set1(0.0f), m = s;
                if (tile > 1) {
                    const float *p = (const float *)w[r].scale + ((b - b0) * halves + half) * vectors * V;
                    s = v_load(p);
                    if (PI_HAS_MIN(f)) m = v_load(p + V);
                } else
                    unpack_scales(f, w[r].scale, w[r].lane, b, half, &s, &m);
                PI_UNROLL for (int t = 0; t < T; t++) {
                    const int64_t at = scale_at(a, tile, t0, b, half, halves, t);
                    vf i = v_from_int(dot[r][t]); /* below 2^24, so taking the offset off in floats is exact */
                    if (OFFSET(f)) i = v_fma(v_set1(-offset), v_set1(sum[at]), i);
                    acc[r][t] = v_fma(i, v_mul(s, v_set1(a->d[scale_at(a, tile, t0, b, 0, 1, t)])), acc[r][t]);
                    if (PI_HAS_MIN(f)) acc[r][t] = v_fma(m, v_set1(sx[at]), acc[r][t]);
                }
            }
        }
        for (int r = 0; r < R; r++) code[r] += tile > 1 ? SPREAD_CODE_BYTES(f) : PI_CODE_BYTES(f);
    }
}

PI_INLINE strip packed_strip(const pi_format f, const pi_weight *w, const pi_act *a, int64_t s) {
    const uint8_t *group = strip_group(w, s);
    return (strip){group + strip_lane(s) * 4, group + a->nb * PI_CODE_BYTES(f), strip_lane(s)};
}

PI_INLINE void tile_packed(const pi_format f, const pi_weight *w, const pi_act *a, int64_t s0, int64_t s_last, int64_t t0, float *y,
                           int64_t ldy, const int R, const int T) {
    strip at[MAX_R];
    vf acc[MAX_R][MAX_T];
    for (int r = 0; r < R; r++) at[r] = packed_strip(f, w, a, pi_min(s0 + r, s_last));
    PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) acc[r][t] = v_set1(0.0f);
    fold(f, OFFSET(f), 1, at, a, t0, 0, a->nb, R, T, acc);
    PI_UNROLL for (int r = 0; r < R; r++)
        PI_UNROLL for (int t = 0; t < T; t++) store_strip(w, pi_min(s0 + r, s_last), y + (t0 + t) * ldy, acc[r][t]);
}

/* A panel has 256 columns, which share scales, of at most so many rows; folds of more rows wait, so that the same activations serve
 * them all. MAX_SPREAD bytes hold a block of a strip. */
enum { PANEL_BLOCKS = PI_SUPER / PI_BLOCK, PANEL_ROWS = 32, WAITING_ROWS = 64, MAX_SPREAD = 8 * 2 * sizeof(vb) };
_Static_assert(PI_TILE_MULTIPLE % TOKENS == 0 && WAITING_ROWS % (STRIPS * V) == 0 && STRIPS * V <= PANEL_ROWS, "what panels hold");

/* Blocks b0..b1 of STRIPS strips from s on, spread; and what they meet: tokens t0..t1, at most PI_TOKENS, t0 the first of a tile. */
typedef struct {
    strip at[STRIPS];
    const pi_weight *w;
    const pi_act *a;
    int64_t s, s_last, t0, t1, b0, b1, ldy;
    float offset, *wait, *y;
} panel;

/* Blocks b0..b1 of a strip, spread. */
PI_INLINE void spread_strip(const pi_format f, const strip w, int64_t b0, int64_t b1, uint8_t *code, float *scale) {
    const uint8_t *from = w.code + b0 * PI_CODE_BYTES(f);
    for (int64_t b = b0; b < b1; b++, from += PI_CODE_BYTES(f), code += SPREAD_CODE_BYTES(f)) {
        PI_UNROLL for (int k = 0; k < 8; k += STEPS) {
            vb v[2];
            unpack(f, from, k, v);
            for (int i = 0; i < OPERANDS(f); i++) vb_store(code + (k / STEPS * OPERANDS(f) + i) * sizeof(vb), v[i]);
        }
        for (int half = 0; half < PI_SCALE_GROUPS(f); half++) {
            vf s = v_set1(0.0f), m = s;
            unpack_scales(f, w.scale, w.lane, b, half, &s, &m);
            v_store(scale, s), scale += V;
            if (PI_HAS_MIN(f)) v_store(scale, m), scale += V;
        }
    }
}

/* The tokens go on with their folds at `wait`, which become outputs at the last block. */
PI_INLINE void fold_panel(const pi_format f, const panel *p) {
    enum { R = STRIPS, T = TOKENS };
    float *wait = p->wait;
    for (int64_t t0 = p->t0; t0 < p->t1; t0 += T, wait += R * T * V) {
        vf acc[MAX_R][MAX_T];
        PI_UNROLL for (int r = 0; r < R; r++)
            PI_UNROLL for (int t = 0; t < T; t++) acc[r][t] = p->b0 ? v_load(wait + (r * T + t) * V) : v_set1(0.0f);
        fold(f, p->offset, T, p->at, p->a, t0, p->b0, p->b1, R, T, acc);
        PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int t = 0; t < T; t++) {
            if (p->b1 < p->a->nb)
                v_store(wait + (r * T + t) * V, acc[r][t]);
            else if (t0 + t < p->t1)
                store_strip(p->w, pi_min(p->s + r, p->s_last), p->y + (t0 + t) * p->ldy, acc[r][t]);
        }
    }
}

/* Strips s0..s1, at most WAITING_ROWS rows, by at most PI_TOKENS tokens. */
PI_INLINE void block_of_panels(const pi_format f, void (*fold_as)(const panel *), const pi_weight *w, const pi_act *a, int64_t s0,
                               int64_t s1, int64_t t0, int64_t t1, float *y, int64_t ldy) {
    _Alignas(64) uint8_t code[PANEL_BLOCKS * MAX_SPREAD * PANEL_ROWS / V];
    _Alignas(64) float scale[PANEL_BLOCKS * 4 * PANEL_ROWS], waiting[PI_TOKENS * WAITING_ROWS];
    panel p = {.w = w, .a = a, .s_last = s1 - 1, .t0 = t0, .t1 = t1, .ldy = ldy, .offset = OFFSET(f), .y = y};
    for (; p.b0 < a->nb; p.b0 = p.b1) {
        p.b1 = pi_min(p.b0 + PANEL_BLOCKS, a->nb);
        p.wait = waiting;
        for (p.s = s0; p.s < s1; p.s += STRIPS, p.wait += PI_TOKENS * STRIPS * V) {
            for (int r = 0; r < STRIPS; r++) {
                uint8_t *const c = code + r * PANEL_BLOCKS * SPREAD_CODE_BYTES(f);
                float *const v = scale + r * PANEL_BLOCKS * SPREAD_SCALES(f) * V;
                spread_strip(f, packed_strip(f, w, a, pi_min(p.s + r, p.s_last)), p.b0, p.b1, c, v);
                p.at[r] = (strip){c, (const uint8_t *)v, 0};
            }
            fold_as(&p);
        }
    }
}

PI_INLINE void panels(const pi_format f, void (*fold_as)(const panel *), const pi_weight *w, const pi_act *a, int64_t g0, int64_t g1,
                      int64_t t0, int64_t t1, float *y, int64_t ldy) {
    const int64_t strips = WAITING_ROWS / V, s1 = g1 * GROUP_STRIPS;
    for (int64_t s = g0 * GROUP_STRIPS; s < s1; s += strips)
        for (int64_t t = t0; t < t1; t += PI_TOKENS)
            block_of_panels(f, fold_as, w, a, s, pi_min(s + strips, s1), t, pi_min(t + PI_TOKENS, t1), y, ldy);
}

/* A type's kernel: through panels where the activations lie in tiles. (Of the folds of panels those that no type takes go away.) */
#define KERNEL(stem, TYPE, bits, offset, table, scales, spread) \
    PI_INLINE void tile_##stem TILE_ARGS { \
        tile_packed(PI_FORMAT(stem, TYPE, bits, offset, table, scales, spread), w, a, s0, s_last, t0, y, ldy, R, T); \
    } \
    static TILED(LEVEL(few_##stem), tile_##stem, STRIPS, TOKENS, STRIPS_ALONE) \
    static __attribute__((noinline, unused)) void LEVEL(fold_##stem)(const panel *p) { \
        fold_panel(PI_FORMAT(stem, TYPE, bits, offset, table, scales, spread), p); \
    } \
    void LEVEL(pi_matmul_##stem) PI_MATMUL_ARGS { \
        if (a->tile != TOKENS) \
            LEVEL(few_##stem)(w, a, g0, g1, t0, t1, y, ldy); \
        else \
            panels(PI_FORMAT(stem, TYPE, bits, offset, table, scales, spread), LEVEL(fold_##spread), w, a, g0, g1, t0, t1, y, ldy); \
    }
PI_QUANTISED(KERNEL)
