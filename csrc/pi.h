/* pi.h: what every C file shares: types, the kernel table, target regions, the few inlines. */
#ifndef PI_H
#define PI_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "api.h"
#include "quant.h"

/* ---- target regions ------------------------------------------------------------------------------------
 * One set of compiler flags builds every file; code for a CPU level stands between PI_BEGIN_x and PI_END,
 * and is reached through the kernel table only. Headers of intrinsics are included before the first region. */
#if defined(__x86_64__)
#include <immintrin.h>
#define PI_X86 1
#define PI_VECTOR "+v"
#elif defined(__aarch64__)
#include <arm_neon.h>
#define PI_ARM 1
#define PI_VECTOR "+w"
#endif

#define PI_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define PI_BEGIN(isa) PI_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define PI_END PI_PRAGMA(clang attribute pop)
#define PI_UNROLL _Pragma("unroll")
#else
#define PI_BEGIN(isa) PI_PRAGMA(GCC push_options) PI_PRAGMA(GCC target(isa))
#define PI_END PI_PRAGMA(GCC pop_options)
#define PI_UNROLL _Pragma("GCC unroll 16")
#endif
#define PI_INLINE static inline __attribute__((always_inline))

/* Holds a vector in a register here: else gcc regroups integer sums of an unrolled block and spills them all. */
#define PI_KEEP(v) __asm__("" : PI_VECTOR(v))

/* A shift by a count that is constant once inlined, but not for a compiler that does not optimise. */
#define PI_SHIFT(op, v, n) \
    switch (n) { \
    case 1: return op(v, 1); \
    case 2: return op(v, 2); \
    case 3: return op(v, 3); \
    case 4: return op(v, 4); \
    case 5: return op(v, 5); \
    case 6: return op(v, 6); \
    default: return v; \
    }

/* Groups, tiles and blocks: 16 outputs side by side, 32 inputs to one activation scale. */
enum { PI_LANES = 16, PI_BLOCK = 32, PI_SUPER = 256 };
/* Sequential folds that run side by side. */
enum { PI_FOLDS = 8 };
/* Fewer tokens do not repay the unpacking of weights into panels (simd/matmul_quant.h). */
enum { PI_PANEL_TOKENS = 32 };
/* Tokens that a quantised matmul takes at a time; any level's tile divides PI_TILE_MULTIPLE, and that PI_TOKENS. */
enum { PI_TOKENS = 192, PI_TILE_MULTIPLE = 12 };
/* V rows that a block of queries takes at a time. */
enum { PI_ROWS_KEYS = 64 };

/* ---- weights ------------------------------------------------------------------------------------------
 * A matrix packed in row groups (quant.h), or, with src set, left where it is in GGUF's own layout: then the driver packs
 * the few groups that it is about to use, so both run the same kernels. */
struct pi_weight {
    const struct pi_weight_type *type;
    int64_t rows, cols;   /* of the matrix: y[rows] = w[rows][cols] x[cols] */
    int64_t groups;       /* ceil(rows / 16) */
    int64_t group_bytes;  /* distance between groups */
    uint8_t *data;        /* 64-byte aligned, in `arena`; or NULL */
    const uint8_t *src;   /* GGUF's own rows, where data is NULL */
    struct pi_arena *arena;
};

/* Quantised input rows (NUMERICS.md, 3). nb = cols / 32. They lie in tiles of `tile` rows, as many as a level's kernels take at
 * once, block by block; the last tile is filled up with copies of the last row. Few rows lie in plain order, [rows][cols]: tiles of one. */
typedef struct {
    const float *x;       /* [rows][cols], the rows as they came */
    int64_t cols, nb;
    int tile;
    int8_t *q;            /* [tiles][nb][tile][32] */
    int16_t *q16;         /* the same, widened, each four in the order 0 2 1 3: levels without a byte dot product */
    float *d;             /* [tiles][nb][tile] dx */
    float *sum[2];        /* [tiles][nb][tile] sum of q over the block; [tiles][nb][2][tile] over its halves */
    float *sx[2];         /* the same sums times dx */
    int32_t *off;         /* [tiles][nb][tile] -128 * sum of q: corrects codes shifted to unsigned */
} pi_act;

/* A block of query rows in columns: all matrices are [..][ld], and rows are lanes. Row r sees the keys from[r]..to[r] of those that
 * it has columns of scores for; all rows see all_from..all_to. */
typedef struct {
    int64_t rows, ld, dim, all_from, all_to;
    const int32_t *from, *to;
    const float *q;       /* [dim] */
    float *s;             /* [keys] scores, then their exponentials, then their shares of the sum */
    float *max, *sum;     /* one column each */
    float *out;           /* [dim] */
    float scale;
} pi_rows;

/* ---- the kernel table ----------------------------------------------------------------------------------
 * PI_KERNELS(X) lists every entry once (the matmuls through quant.h, so the macro must be called X); the struct, the names and the
 * completeness check derive from it.
 *
 * quantize   one row x[cols] into row `row` of an act
 * matmul_T   row groups g0..g1 times rows t0..t1 of an act: y[t * ldy + n], n < rows
 * saxpy      y[i] = fma(a, x[i], y[i])
 * scores_T   s[r][t] = fold_d(q[r], k_t) * scale for t < n over K tiles (api.h) one after the other; may write up to the tile's end
 * context_T  out[r][d] goes on folding p[r][t] with v_t[d] for t < n, d0 <= d < d1; V rows ldv bytes apart; d0 a multiple of PI_BLOCK
 * softmax    rows x[r][0..n[r]), in place
 * rows_T     the same for a block of query rows (pi_rows); `next`: bytes that will be read soon
 *   scores_T   of the keys t..t + 16 of a K tile, and `max`;   exp   of all n scores, and `sum`;
 *   context_T  scores t..t + n (n <= PI_ROWS_KEYS) become shares of `sum`, and `out` goes on folding them with V, rows ldv bytes apart
 * rms_norm   y = rms_norm(x) * w for each of `rows` rows of n
 */
#define PI_MATMUL_ARGS (const pi_weight *w, const pi_act *a, int64_t g0, int64_t g1, int64_t t0, int64_t t1, float *y, int64_t ldy)
#define PI_SCORES_ARGS \
    (const float *q, int64_t ldq, int64_t rows, const void *k, int64_t n, int64_t dim, float scale, float *s, int64_t lds)
#define PI_CONTEXT_ARGS \
    (const float *p, int64_t ldp, int64_t rows, const void *v, int64_t ldv, int64_t n, int64_t dim, int64_t d0, int64_t d1, float *out, \
     int64_t ldo)
#define PI_ROWS_SCORES_ARGS (const pi_rows *b, int64_t t, const uint8_t *k, const char *next, int64_t next_bytes)
#define PI_ROWS_CONTEXT_ARGS \
    (const pi_rows *b, int64_t t, int64_t n, const uint8_t *v, int64_t ldv, const char *next, int64_t next_bytes)
#define PI_MATMUL_ENTRY(stem, ...) X(matmul_##stem, PI_MATMUL_ARGS)
#define PI_KERNELS(X) \
    X(quantize, (const float *x, const pi_act *a, int64_t row)) \
    PI_FLOAT(PI_MATMUL_ENTRY) \
    PI_QUANTISED(PI_MATMUL_ENTRY) \
    X(saxpy, (float *y, const float *x, float a, int64_t n)) \
    X(scores_f32, PI_SCORES_ARGS) \
    X(scores_f16, PI_SCORES_ARGS) \
    X(scores_q8_0, PI_SCORES_ARGS) \
    X(context_f32, PI_CONTEXT_ARGS) \
    X(context_f16, PI_CONTEXT_ARGS) \
    X(context_q8_0, PI_CONTEXT_ARGS) \
    X(softmax, (float *const *x, const int64_t *n, int64_t rows)) \
    X(rows_scores_f32, PI_ROWS_SCORES_ARGS) \
    X(rows_scores_f16, PI_ROWS_SCORES_ARGS) \
    X(rows_scores_q8_0, PI_ROWS_SCORES_ARGS) \
    X(rows_exp, (const pi_rows *b, int64_t n)) \
    X(rows_context_f32, PI_ROWS_CONTEXT_ARGS) \
    X(rows_context_f16, PI_ROWS_CONTEXT_ARGS) \
    X(rows_context_q8_0, PI_ROWS_CONTEXT_ARGS) \
    X(rms_norm, (const float *x, const float *w, int64_t rows, int64_t n, float eps, float *y)) \
    X(swiglu, (const float *gate, const float *up, int64_t n, float *y)) \
    X(silu, (const float *x, int64_t n, float *y)) \
    X(exp, (const float *x, int64_t n, float *y)) \
    X(add, (const float *a, const float *b, int64_t n, float *y)) \
    X(mul, (const float *a, const float *b, int64_t n, float *y)) \
    X(rope, (const float *x, const float *cos, const float *sin, int64_t heads, int64_t dim, int64_t rot, int neox, float *y)) \
    X(narrow, (const float *x, int64_t n, uint16_t *y)) \
    X(widen, (const uint16_t *x, int64_t n, float *y))

enum {
#define X(name, args) PI_K_##name,
    PI_KERNELS(X)
#undef X
    PI_K_COUNT
};

typedef struct {
#define X(name, args) void(*name) args;
    PI_KERNELS(X)
#undef X
    int tile; /* of a pi_act, for quantised matmuls of PI_PANEL_TOKENS or more */
    const char *level_of[PI_K_COUNT]; /* which level each entry came from */
} pi_table;

/* PI_SET(t, saxpy, avx2): the entry `saxpy` becomes pi_saxpy_avx2. */
#define PI_SET(t, entry, isa) ((t)->entry = pi_##entry##_##isa, (t)->level_of[PI_K_##entry] = #isa)

/* Levels, ascending within an architecture; each init_ overwrites what its level does better. */
typedef struct {
    const char *name;
    bool (*available)(void);
    void (*init)(pi_table *t);
} pi_level;
extern const pi_level pi_levels[];
extern const int pi_n_levels;
void pi_build_table(pi_table *t, int level); /* pure: the table of that level and all below */

void pi_init_ref(pi_table *t);
#if PI_X86
bool pi_has_avx2(void);
bool pi_has_avx512(void);
bool pi_has_avx512vnni(void);
void pi_init_avx2(pi_table *t);
void pi_init_avx512(pi_table *t);
void pi_init_avx512vnni(pi_table *t);
#elif PI_ARM
bool pi_has_dotprod(void);
bool pi_has_i8mm(void);
void pi_init_neon(pi_table *t);
void pi_init_dotprod(pi_table *t);
void pi_init_i8mm(pi_table *t);
#endif

/* ---- pool ----------------------------------------------------------------------------------------------*/
typedef struct pi_pool pi_pool;
typedef void (*pi_task)(void *arg, int64_t lo, int64_t hi, int slot); /* slot < threads: private scratch */
pi_pool *pi_pool_new(int threads);
void pi_pool_free(pi_pool *p);
int pi_pool_threads(const pi_pool *p);
int64_t pi_pool_regions(const pi_pool *p); /* forked so far */
void pi_pool_scramble(pi_pool *p, uint32_t seed); /* from now on, ranges in another order; 0: ascending */
int64_t pi_pool_spans(pi_pool *p, int64_t *out, int64_t n, int64_t room); /* as pi_ctx_spans */
unsigned pi_fork_generation(void); /* counts the forks that led to this process: locks of before are void */
/* Runs task over 0..units in disjoint ranges of at most `grain`; returns when all are done. */
void pi_pool_run(pi_pool *p, int64_t units, int64_t grain, pi_task task, void *arg);

/* ---- shared inlines ------------------------------------------------------------------------------------*/
PI_INLINE int64_t pi_min(int64_t a, int64_t b) { return a < b ? a : b; }
PI_INLINE int64_t pi_max(int64_t a, int64_t b) { return a > b ? a : b; }
PI_INLINE int64_t pi_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

PI_INLINE float pi_f32_of_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
PI_INLINE uint32_t pi_bits_of_f32(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

PI_INLINE float pi_f32_of_bf16(uint16_t h) { return pi_f32_of_bits((uint32_t)h << 16); }

/* Blocks of an act that come before row `row`'s first: block b is at that plus b * tile. */
PI_INLINE int64_t pi_act_row(const pi_act *a, int64_t row) { return row / a->tile * a->tile * a->nb + row % a->tile; }
/* What block `at`, of the row that is t-th in its tile, keeps beside its codes: dx, and the sums of the codes of its two halves. */
PI_INLINE void pi_act_scales(const pi_act *a, int64_t at, int64_t t, float dx, int32_t low, int32_t high) {
    const int64_t half = 2 * at - t, other = half + a->tile;
    a->d[at] = dx;
    a->off[at] = -128 * (low + high);
    a->sum[0][at] = (float)(low + high), a->sum[1][half] = (float)low, a->sum[1][other] = (float)high;
    a->sx[0][at] = (float)(low + high) * dx, a->sx[1][half] = (float)low * dx, a->sx[1][other] = (float)high * dx;
}

/* binary16 <-> binary32 in integers: no compiler on the list lacks them, no FTZ setting reaches them. */
PI_INLINE float pi_f32_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31, man = h & 0x3ff;
    if (exp == 31) return pi_f32_of_bits(sign | 0x7f800000u | man << 13);
    if (exp != 0) return pi_f32_of_bits(sign | (exp + 112) << 23 | man << 13);
    if (man == 0) return pi_f32_of_bits(sign);
    int shift = __builtin_clz(man) - 21; /* bring the leading one to bit 10 */
    return pi_f32_of_bits(sign | (uint32_t)(113 - shift) << 23 | (man << shift & 0x3ff) << 13);
}
PI_INLINE uint16_t pi_f16_of_f32(float f) {
    uint32_t u = pi_bits_of_f32(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x1ff));      /* NaN, made quiet */
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);                         /* rounds to infinity */
    if (a < 0x33000001u) return (uint16_t)sign;                                     /* rounds to zero */
    uint32_t man = (a & 0x7fffffu) | 0x800000u, exp = a >> 23;
    uint32_t drop = exp < 113 ? 126 - exp : 13;                                     /* bits rounded away */
    uint32_t kept = man >> drop, rest = man & ((1u << drop) - 1), half = 1u << (drop - 1);
    kept += rest > half || (rest == half && (kept & 1));
    return (uint16_t)(sign | (exp < 113 ? kept : kept + ((exp - 113) << 10)));
}

#endif
