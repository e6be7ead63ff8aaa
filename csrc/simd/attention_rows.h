/* Attention of a block of queries, in f32, for vectors of V lanes: lane = another query row. Scores are columns of keys, values
 * columns of dimensions, and both are one product: each vector of rows that is loaded serves a block of columns, each value of K or
 * V a block of rows.  NUMERICS.md section 4, attention.
 *
 *   a   step 0: | row 0 | row 1 | ... | row ld - 1 |      rows of q by dimension, or of p by key
 *   b   step 0: | column 0 | ... | column 15 |            a K tile (steps: dimensions), or 16 dimensions of V (steps: keys)
 *   c   column 0: | row 0 | row 1 | ...                   c = fold over steps of fma(a, b, c)
 *
 * K and V are widened to f32 a few steps at a time, so that what is widened never leaves the first-level cache. */

enum { MOST_VECTORS_OF_ROWS = 3, MOST_COLUMNS = 8, STEPS = PI_ROWS_KEYS };

/* Folds that start here; that go on; that go on in the rows which see the key of a step. */
enum { START, GO_ON, GO_ON_EDGE };

typedef struct {
    int64_t n, columns;           /* steps; of 16 columns at most */
    const float *a, *b;
    int64_t ldb, t;               /* t: the key of the first step */
    float *c;
    const char *next;             /* what is read after this, brought nearer meanwhile: `ahead` bytes with each step of a block */
    int64_t ahead;
} panel;

PI_INLINE vm sees(const pi_rows *b, int64_t row, int64_t t) {
    return v_between(v_load_int(b->from + row), (int32_t)t, v_load_int(b->to + row));
}

PI_INLINE void fold_block(const int kind, const pi_rows *rows, const panel *f, int64_t row, int64_t column, const int R, const int C) {
    const int64_t ld = rows->ld;
    const float *a = f->a + row, *b = f->b + column;
    const char *next = f->next + column / C * f->n * f->ahead;
    float *c = f->c + column * ld + row;
    vf acc[MOST_VECTORS_OF_ROWS][MOST_COLUMNS];
    PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int i = 0; i < C; i++)
        acc[r][i] = kind == START ? v_set1(0.0f) : v_load(c + i * ld + r * V);
    for (int64_t k = 0; k < f->n; k++, a += ld, b += f->ldb, next += f->ahead) {
        vf x[MOST_VECTORS_OF_ROWS];
        if (row == 0) __builtin_prefetch(next);
        PI_UNROLL for (int r = 0; r < R; r++) {
            x[r] = v_load(a + r * V);
            PI_KEEP(x[r]);
        }
        PI_UNROLL for (int i = 0; i < C; i++) {
            const vf y = v_set1(b[i]);
            PI_UNROLL for (int r = 0; r < R; r++) {
                const vf on = v_fma(x[r], y, acc[r][i]);
                acc[r][i] = kind == GO_ON_EDGE ? v_select(sees(rows, row + r * V, f->t + k), on, acc[r][i]) : on;
            }
        }
    }
    PI_UNROLL for (int r = 0; r < R; r++) PI_UNROLL for (int i = 0; i < C; i++) v_store(c + i * ld + r * V, acc[r][i]);
}

PI_INLINE void fold_columns(const int kind, const pi_rows *rows, const panel *f, int64_t row, const int R) {
    int64_t i = 0;
    for (; i + ROW_COLUMNS <= f->columns; i += ROW_COLUMNS) fold_block(kind, rows, f, row, i, R, ROW_COLUMNS);
    for (; i < f->columns; i++) fold_block(kind, rows, f, row, i, R, 1);
}

/* At an edge, the first and the last of some rows say whether all of them see the keys, or none: bounds rise from row to row. */
PI_INLINE void fold_some(const int kind, const pi_rows *rows, const panel *f, int64_t row, const int R) {
    const int64_t last = pi_min(row + R * V, rows->rows) - 1, end = f->t + f->n;
    if (kind != GO_ON_EDGE)
        fold_columns(kind, rows, f, row, R);
    else if (rows->from[last] <= f->t && end <= rows->to[row])
        fold_columns(GO_ON, rows, f, row, R);
    else if (rows->from[row] < end && f->t < rows->to[last])
        fold_columns(GO_ON_EDGE, rows, f, row, R);
}

PI_INLINE void fold_panel(const int kind, const pi_rows *rows, const panel *f) {
    int64_t r = 0;
    for (; rows->rows - r > 2 * V; r += 3 * V) fold_some(kind, rows, f, r, 3);
    if (rows->rows - r > V)
        fold_some(kind, rows, f, r, 2);
    else if (rows->rows - r > 0)
        fold_some(kind, rows, f, r, 1);
}

/* Whether every row sees the keys t..t + n. */
PI_INLINE bool all_see(const pi_rows *b, int64_t t, int64_t n) { return t >= b->all_from && t + n <= b->all_to; }

/* The scores of 16 keys times `scale`. What a row does not see is no part of its maximum ... */
PI_INLINE void scale_and_max(const bool edge, const pi_rows *b, int64_t t) {
    for (int64_t r = 0; r < b->rows; r += V) {
        vf max = v_load(b->max + r);
        for (int64_t i = t; i < t + PI_LANES; i++) {
            const vf x = v_mul(v_load(b->s + i * b->ld + r), v_set1(b->scale));
            v_store(b->s + i * b->ld + r, x);
            max = v_max(max, edge ? v_select(sees(b, r, i), x, v_set1(-INFINITY)) : x);
        }
        v_store(b->max + r, max);
    }
}

/* ... and adds 0 to its sum. */
PI_INLINE vf exp_and_sum(const bool edge, const pi_rows *b, int64_t row, int64_t t, int64_t end, vf max, vf sum) {
    for (float *s = b->s + t * b->ld + row; t < end; t++, s += b->ld) {
        const vf e = v_exp(v_sub(v_load(s), max));
        v_store(s, e);
        sum = v_add(sum, edge ? v_select(sees(b, row, t), e, v_set1(0.0f)) : e);
    }
    return sum;
}

void LEVEL(pi_rows_exp)(const pi_rows *b, int64_t n) {
    for (int64_t r = 0; r < b->rows; r += V) {
        const vf max = v_load(b->max + r);
        vf sum = exp_and_sum(true, b, r, 0, b->all_from, max, v_set1(0.0f));
        sum = exp_and_sum(false, b, r, b->all_from, b->all_to, max, sum);
        v_store(b->sum + r, exp_and_sum(true, b, r, b->all_to, n, max, sum));
    }
}

PI_INLINE void shares(const pi_rows *b, int64_t t, int64_t n) {
    for (int64_t r = 0; r < b->rows; r += V) {
        const vf sum = v_load(b->sum + r), inverse = v_div(v_set1(1.0f), sum);
        for (float *s = b->s + t * b->ld + r; s < b->s + (t + n) * b->ld; s += b->ld) v_store(s, v_share(v_load(s), sum, inverse));
    }
}

/* Dimensions d..d + n of a K tile; dimensions d..d + 16 of n V rows. */
#define WIDEN(type) \
    PI_INLINE void widen_keys_##type(const uint8_t *tile, int64_t dim, int64_t d, int64_t n, float *wide) { \
        (void)dim; \
        for (int64_t end = d + n; d < end; d++) \
            PI_UNROLL for (int i = 0; i < PI_LANES; i += V) \
                v_store(wide, key_##type(tile, d, i, key_scale_##type(tile, dim, d, i))), wide += V; \
    } \
    PI_INLINE void widen_values_##type(const uint8_t *v, int64_t ldv, int64_t dim, int64_t d, int64_t n, float *wide) { \
        for (const int64_t end = pi_min(d + PI_LANES, dim); d < end; d += V, wide += V) { \
            const int left = (int)(end - d); \
            const uint8_t *row = v; \
            if (left >= V) \
                for (int64_t t = 0; t < n; t++, row += ldv) v_store(wide + t * PI_LANES, value_##type(row, dim, d)); \
            else \
                for (int64_t t = 0; t < n; t++, row += ldv) v_store_n(wide + t * PI_LANES, value_n_##type(row, dim, d, left), left); \
        } \
    }
WIDEN(f16)
WIDEN(q8_0)
#define widen_keys_f32(tile, dim, d, n, wide) (void)(wide)
#define widen_values_f32(v, ldv, dim, d, n, wide) (void)(wide)
#define IN_PLACE_f32 1
#define IN_PLACE_f16 0
#define IN_PLACE_q8_0 0

#define ROWS(type) \
    void LEVEL(pi_rows_scores_##type) PI_ROWS_SCORES_ARGS { \
        _Alignas(64) float wide[STEPS * PI_LANES]; \
        const int64_t ahead = next_bytes * ROW_COLUMNS / (PI_LANES * b->dim); \
        panel f = {.columns = PI_LANES, .ldb = PI_LANES, .c = b->s + t * b->ld, .ahead = ahead}; \
        for (int64_t d = 0; d < b->dim; d += STEPS) { \
            f.n = pi_min(STEPS, b->dim - d), f.a = b->q + d * b->ld; \
            f.b = IN_PLACE_##type ? (const float *)k + d * PI_LANES : wide; \
            f.next = next + d * ahead * (PI_LANES / ROW_COLUMNS); \
            widen_keys_##type(k, b->dim, d, f.n, wide); \
            if (d) \
                fold_panel(GO_ON, b, &f); \
            else \
                fold_panel(START, b, &f); \
        } \
        if (all_see(b, t, PI_LANES)) \
            scale_and_max(false, b, t); \
        else \
            scale_and_max(true, b, t); \
    } \
    void LEVEL(pi_rows_context_##type) PI_ROWS_CONTEXT_ARGS { \
        _Alignas(64) float wide[STEPS * PI_LANES]; \
        const int64_t ahead = next_bytes * ROW_COLUMNS / (n * b->dim); \
        panel f = {.n = n, .a = b->s + t * b->ld, .t = t, .ahead = ahead, \
                   .ldb = IN_PLACE_##type ? ldv / (int64_t)sizeof(float) : PI_LANES}; \
        shares(b, t, n); \
        for (int64_t d = 0; d < b->dim; d += PI_LANES) { \
            f.columns = pi_min(PI_LANES, b->dim - d), f.c = b->out + d * b->ld; \
            f.b = IN_PLACE_##type ? (const float *)v + d : wide; \
            f.next = next + d / ROW_COLUMNS * n * ahead; \
            widen_values_##type(v, ldv, b->dim, d, n, wide); \
            fold_panel(GO_ON_EDGE, b, &f); \
        } \
    }
ROWS(f32)
ROWS(f16)
ROWS(q8_0)
