/* Fused attention over a cache.
 *
 * A unit is a block of queries of one sequence by the query heads of one KV head (or by one query head), with all its keys: scores,
 * then softmax, then values. One query's heads go through kernels whose lanes are keys and value dimensions, in the cache's own
 * type; a block of queries through kernels whose lanes are its rows, and K and V are widened to f32 a tile and a few rows at a time.
 * A unit owns its outputs and a scratch slot. Where a step has fewer heads than there are threads it splits instead into three
 * regions, over keys, rows and value dimensions. All of this divides outputs, never folds: what a fold has so far is an f32 in
 * memory between two chunks of keys. NUMERICS.md section 4, attention. */
#include "columns.h"
#include "ctx.h"
#include "kv.h"

#include <math.h>

enum {
    CHUNK = 256,             /* keys to a chunk of one query: 64 KiB of f16 at head_dim 128 */
    BLOCK_ROWS = 48,         /* query rows to a block ... */
    SCORE_BYTES = 4 << 20,   /* ... or 32, where the scores of more would need more memory than this */
    SPLIT_KEYS = 64,         /* keys to a unit of a split step; a multiple of PI_LANES */
    SPLIT_DIMS = 32          /* value dimensions to a unit; a multiple of PI_LANES */
};

typedef struct {
    const pi_table *t;
    const pi_kv_view *const *views;
    const int64_t *tokens; /* of each sequence */
    const float *q;
    float *out;
    float scale;
    int n_heads, heads;    /* heads: query heads to a unit, all of a KV group or one */
    int64_t dim, block;    /* queries to a unit */
    int64_t span;          /* most keys that a unit sees, by whole tiles */
    int64_t lds;           /* floats to a row of scores, of one query */
    int64_t ld;            /* rows to a column, of a block of queries */
    float *scratch;        /* per slot: what one_query and block_of_queries lay out; of a split step: all its scores before */
    int64_t slot_floats;
} attention_job;

typedef struct {
    const pi_kv_view *v;
    int64_t tokens;        /* of the sequence */
    int64_t q0, t0, t1;    /* the sequence's first row in q; which of its queries */
    int64_t rows;          /* queries times heads */
    int h0, kv;            /* the first query head; the KV head */
} unit;

static unit find_unit(const attention_job *j, int64_t u) {
    const int parts = j->n_heads / j->heads;
    int64_t q0 = 0, blocks;
    int s = 0;
    for (; u >= (blocks = pi_ceil_div(j->tokens[s], j->block)) * parts; s++) u -= blocks * parts, q0 += j->tokens[s];
    unit n = {.v = j->views[s], .tokens = j->tokens[s], .q0 = q0, .h0 = (int)(u / blocks) * j->heads, .t0 = u % blocks * j->block};
    n.kv = n.h0 / (j->n_heads / n.v->n_kv_heads);
    n.t1 = pi_min(n.t0 + j->block, n.tokens);
    n.rows = (n.t1 - n.t0) * j->heads;
    return n;
}

/* Query t of a unit's sequence sees the keys from..to. */
static int64_t sees_to(const unit *n, int64_t t) { return n->v->length - n->tokens + t + 1; }
static int64_t sees_from(const unit *n, int64_t t) {
    return n->v->window ? pi_max(n->v->first, sees_to(n, t) - n->v->window) : n->v->first;
}
static int64_t tile_floor(int64_t t) { return t / PI_LANES * PI_LANES; }

/* The end of a chunk that starts at token t: inside one block, and before `to`. */
static int64_t chunk_end(const pi_kv_view *v, int64_t t, int64_t to, int64_t size) {
    return pi_min(pi_min(t - t % size + size, (t / v->block + 1) * v->block), to);
}

/* K tiles of tokens t.. (a tile's first) to `to`, in one block: in place, or turned from rows into `copy`. */
static const void *key_tiles(const pi_kv_view *v, int64_t t, int64_t to, int kv, void *copy) {
    if (v->layout == PI_TILES) return pi_kv_tile(v, t, kv);
    for (int64_t i = t; i < to; i++) {
        const int64_t lane = (i - t) / PI_LANES * PI_LANES * v->head_dim + (i - t) % PI_LANES;
        const uint8_t *row = pi_kv_row(v, v->k, i, kv);
        if (v->dtype == PI_F32)
            for (int64_t d = 0; d < v->head_dim; d++) ((float *)copy)[lane + d * PI_LANES] = ((const float *)row)[d];
        else
            for (int64_t d = 0; d < v->head_dim; d++) ((uint16_t *)copy)[lane + d * PI_LANES] = ((const uint16_t *)row)[d];
    }
    return copy;
}

/* Scores of rows against keys from.. (a tile's first) to `to`; s is where key `from` goes. */
static void scores(const attention_job *j, const unit *n, const float *q, int64_t rows, int64_t from, int64_t to, float *s, void *copy) {
    for (int64_t t = from, end; t < to; t = end) {
        end = chunk_end(n->v, t, to, CHUNK);
        const void *k = key_tiles(n->v, t, end, n->kv, copy);
        float *st = s + (t - from);
        switch (n->v->dtype) {
        case PI_F32: j->t->scores_f32(q, j->dim, rows, k, end - t, j->dim, j->scale, st, j->lds); break;
        case PI_F16: j->t->scores_f16(q, j->dim, rows, k, end - t, j->dim, j->scale, st, j->lds); break;
        case PI_Q8_0: j->t->scores_q8_0(q, j->dim, rows, k, end - t, j->dim, j->scale, st, j->lds); break;
        }
    }
}

/* Adds keys from..to to the folds of value dimensions d0..d1; p is where key `from` is. */
static void context(const attention_job *j, const unit *n, const float *p, int64_t rows, int64_t from, int64_t to, int64_t d0, int64_t d1,
                    float *out, int64_t ldo) {
    const int64_t ldv = n->v->layout == PI_TILES ? pi_kv_row_bytes(n->v) : n->v->row_stride;
    for (int64_t t = from, end; t < to; t = end) {
        end = chunk_end(n->v, t, to, CHUNK);
        const void *v = pi_kv_row(n->v, n->v->v, t, n->kv);
        const float *pt = p + (t - from);
        switch (n->v->dtype) {
        case PI_F32: j->t->context_f32(pt, j->lds, rows, v, ldv, end - t, j->dim, d0, d1, out, ldo); break;
        case PI_F16: j->t->context_f16(pt, j->lds, rows, v, ldv, end - t, j->dim, d0, d1, out, ldo); break;
        case PI_Q8_0: j->t->context_q8_0(pt, j->lds, rows, v, ldv, end - t, j->dim, d0, d1, out, ldo); break;
        }
    }
}

/* Softmax of one query's rows; s is the first one's score for the first key that it sees. */
static void softmax(const attention_job *j, const unit *n, float *s) {
    float *row[PI_FOLDS];
    int64_t count[PI_FOLDS];
    for (int64_t r = 0, k = 0; r < n->rows; r++) {
        row[k] = s + r * j->lds;
        count[k++] = sees_to(n, n->t0) - sees_from(n, n->t0);
        if (k == PI_FOLDS || r + 1 == n->rows) j->t->softmax(row, count, k), k = 0;
    }
}

/* Where the rows of query t lie in q and in out. */
static int64_t rows_at(const attention_job *j, const unit *n, int64_t t) { return ((n->q0 + t) * j->n_heads + n->h0) * j->dim; }

/* slot: scores [rows][lds], a chunk of K as tiles */
static void one_query(const attention_job *j, const unit *n, float *slot) {
    const int64_t at = rows_at(j, n, n->t0), lo = sees_from(n, n->t0), to = sees_to(n, n->t0), from = tile_floor(lo);
    float *s = slot, *seen = s + (lo - from);
    scores(j, n, j->q + at, n->rows, from, to, s, s + n->rows * j->lds);
    softmax(j, n, seen);
    memset(j->out + at, 0, (size_t)(n->rows * j->dim) * sizeof *j->out);
    context(j, n, seen, n->rows, lo, to, 0, j->dim, j->out + at, j->dim);
}

/* slot: bounds, maximum and sum of each row [4][ld], q and out [dim][ld], scores [span][ld], a K tile */
static void block_of_queries(const attention_job *j, const unit *n, float *slot) {
    const pi_kv_view *v = n->v;
    const int64_t dim = j->dim, ld = j->ld, heads = j->heads, last = n->t1 - 1, row_bytes = pi_kv_row_bytes(v);
    const int64_t from = sees_from(n, n->t0), first = tile_floor(from), to = sees_to(n, last);
    int32_t *row_from = (int32_t *)slot, *row_to = row_from + ld;
    float *q = slot + 4 * ld, *copy = q + (2 * dim + j->span) * ld, *y[BLOCK_ROWS];
    const float *x[BLOCK_ROWS];
    pi_rows b = {.rows = n->rows, .ld = ld, .dim = dim, .from = row_from, .to = row_to, .q = q, .s = q + 2 * dim * ld,
                 .max = slot + 2 * ld, .sum = slot + 3 * ld, .out = q + dim * ld, .scale = j->scale};
    for (int64_t r = 0; r < ld; r++) { /* lanes behind the last row repeat it */
        const int64_t row = pi_min(r, n->rows - 1), t = n->t0 + row / heads, at = rows_at(j, n, t) + row % heads * dim;
        x[r] = j->q + at, y[r] = j->out + at;
        row_from[r] = (int32_t)(sees_from(n, t) - first), row_to[r] = (int32_t)(sees_to(n, t) - first);
        b.max[r] = -INFINITY;
    }
    /* Before and behind what all rows see each has an edge of its own. */
    int64_t all_from = sees_from(n, last), all_to = sees_to(n, n->t0);
    if (all_from >= all_to) all_from = all_to = to;
    b.all_from = all_from - first, b.all_to = all_to - first;

    pi_to_columns(x, ld, dim, q, ld);
    for (int64_t t = first; t < to; t += PI_LANES) {
        const uint8_t *k = key_tiles(v, t, pi_min(t + PI_LANES, to), n->kv, copy);
        const int64_t next = t + PI_LANES < to ? t + PI_LANES : t, bytes = PI_LANES * row_bytes;
        const char *soon = (const char *)(v->layout == PI_TILES ? pi_kv_tile(v, next, n->kv) : pi_kv_row(v, v->k, next, n->kv));
        switch (v->dtype) {
        case PI_F32: j->t->rows_scores_f32(&b, t - first, k, soon, bytes); break;
        case PI_F16: j->t->rows_scores_f16(&b, t - first, k, soon, bytes); break;
        case PI_Q8_0: j->t->rows_scores_q8_0(&b, t - first, k, soon, bytes); break;
        }
    }
    j->t->rows_exp(&b, to - first);
    for (int64_t r = 0; r < n->rows; r++) /* they are written after all else, and were not in any cache */
        for (int64_t d = 0; d < dim; d += PI_LANES) __builtin_prefetch(y[r] + d, 1);
    memset(b.out, 0, (size_t)(dim * ld) * sizeof *b.out);
    const int64_t ldv = v->layout == PI_TILES ? row_bytes : v->row_stride;
    for (int64_t t = from, end; t < to; t = end) {
        end = chunk_end(v, t, t < all_from ? all_from : t < all_to ? all_to : to, PI_ROWS_KEYS);
        const uint8_t *rows = pi_kv_row(v, v->v, t, n->kv);
        const char *soon = (const char *)pi_kv_row(v, v->v, end < to ? end : t, n->kv);
        const int64_t bytes = pi_min(PI_ROWS_KEYS, to - end) * row_bytes;
        switch (v->dtype) {
        case PI_F32: j->t->rows_context_f32(&b, t - first, end - t, rows, ldv, soon, bytes); break;
        case PI_F16: j->t->rows_context_f16(&b, t - first, end - t, rows, ldv, soon, bytes); break;
        case PI_Q8_0: j->t->rows_context_q8_0(&b, t - first, end - t, rows, ldv, soon, bytes); break;
        }
    }
    pi_to_rows(b.out, ld, y, n->rows, dim);
}

static void unit_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const attention_job *j = arg;
    float *scratch = j->scratch + slot * j->slot_floats;
    for (int64_t u = lo; u < hi; u++) {
        const unit n = find_unit(j, u);
        if (n.t1 - n.t0 > 1)
            block_of_queries(j, &n, scratch);
        else
            one_query(j, &n, scratch);
    }
}

/* ---- a step in three regions: one query to each sequence, units of one KV head each ----------------------*/

typedef struct {
    attention_job j;
    int64_t parts; /* units to a sequence's KV head */
    float *s;      /* scores [n_seqs * n_heads][lds] */
} split_job;

/* The scores of a unit's heads, and the token that the first column is of. */
static float *split_scores(const split_job *sj, const unit *n, int64_t *from) {
    *from = tile_floor(sees_from(n, 0));
    return sj->s + (n->q0 * sj->j.n_heads + n->h0) * sj->j.lds;
}

static void split_scores_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const split_job *sj = arg;
    const attention_job *j = &sj->j;
    for (int64_t u = lo; u < hi; u++) {
        const unit n = find_unit(j, u / sj->parts);
        int64_t from;
        float *s = split_scores(sj, &n, &from);
        const int64_t t0 = from + u % sj->parts * SPLIT_KEYS, t1 = pi_min(t0 + SPLIT_KEYS, sees_to(&n, 0));
        const float *q = j->q + (n.q0 * j->n_heads + n.h0) * j->dim;
        if (t0 < t1) scores(j, &n, q, n.rows, t0, t1, s + (t0 - from), j->scratch + slot * j->slot_floats);
    }
}

static void split_softmax_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const split_job *sj = arg;
    (void)slot;
    for (int64_t u = lo; u < hi; u++) {
        const unit n = find_unit(&sj->j, u);
        int64_t from;
        float *s = split_scores(sj, &n, &from);
        softmax(&sj->j, &n, s + (sees_from(&n, 0) - from));
    }
}

static void split_context_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const split_job *sj = arg;
    const attention_job *j = &sj->j;
    (void)slot;
    for (int64_t u = lo; u < hi; u++) {
        const unit n = find_unit(j, u / sj->parts);
        int64_t from;
        const float *s = split_scores(sj, &n, &from);
        const int64_t d0 = u % sj->parts * SPLIT_DIMS, d1 = pi_min(d0 + SPLIT_DIMS, j->dim), lo_t = sees_from(&n, 0);
        float *out = j->out + (n.q0 * j->n_heads + n.h0) * j->dim;
        for (int64_t r = 0; r < n.rows; r++) memset(out + r * j->dim + d0, 0, (size_t)(d1 - d0) * sizeof *out);
        context(j, &n, s + (lo_t - from), n.rows, lo_t, sees_to(&n, 0), d0, d1, out, j->dim);
    }
}

/* ---- entries -------------------------------------------------------------------------------------------*/

/* Divisions, since a product of what the caller says may overflow. */
bool pi_kv_view_ok(const pi_kv_view *v, int64_t more) {
    if (!v || !v->k || !v->v || v->n_kv_heads < 1 || v->n_kv_heads > PI_MAX_HEADS || v->head_dim < 1 || v->head_dim > PI_MAX_HEAD_DIM)
        return false;
    if (v->first < 0 || v->length < v->first || v->length > v->capacity || v->capacity > PI_MAX_TOKENS || v->window < 0) return false;
    if (more > v->capacity - v->length || v->block < 1) return false;
    if (v->dtype != PI_F32 && v->dtype != PI_F16 && (v->dtype != PI_Q8_0 || v->head_dim % PI_BLOCK)) return false;
    const int64_t row = pi_kv_row_bytes(v), item = v->dtype == PI_F32 ? 4 : 2;
    if (v->head_stride % item || v->head_stride > PTRDIFF_MAX / v->n_kv_heads) return false;
    if (v->layout == PI_TILES) return v->block % PI_LANES == 0 && v->head_stride / row >= v->block;
    return v->layout == PI_ROWS && v->dtype != PI_Q8_0 && v->block >= v->capacity && v->head_stride >= row &&
           v->row_stride / v->n_kv_heads >= v->head_stride && v->row_stride % item == 0 && v->row_stride <= PTRDIFF_MAX / PI_MAX_TOKENS;
}

int pi_attention(pi_ctx *c, const float *q, int64_t n_seqs, const pi_kv_view *const *views, const int64_t *tokens, int n_heads,
                 float scale, int unit_of, int tasks, float *out) {
    if (!c || !q || !out || n_seqs < 1 || n_seqs > PI_MAX_SEQS || !views || !tokens || n_heads < 1 || n_heads > PI_MAX_HEADS) return PI_EINVAL;
    if (unit_of < PI_UNIT_GROUP || unit_of > PI_UNIT_SPLIT || tasks < 1) return PI_EINVAL;
    int64_t span = 0, most = 0;
    for (int64_t i = 0; i < n_seqs; i++) {
        const pi_kv_view *v = views[i];
        if (!pi_kv_view_ok(v, 0) || tokens[i] < 1 || tokens[i] > v->length - v->first || n_heads % v->n_kv_heads) return PI_EINVAL;
        if (v->n_kv_heads != views[0]->n_kv_heads || v->head_dim != views[0]->head_dim) return PI_EINVAL;
        if (unit_of == PI_UNIT_SPLIT && tokens[i] > 1) return PI_EINVAL;
        const unit n = {.v = v, .tokens = tokens[i]};
        span = pi_max(span, v->length - tile_floor(sees_from(&n, 0)));
        most = pi_max(most, tokens[i]);
    }
    pi_fpenv env = pi_enter(c);
    const int n_kv = views[0]->n_kv_heads, threads = pi_pool_threads(c->pool);
    split_job sj = {.j = {.t = &c->t, .views = views, .tokens = tokens, .q = q, .out = out, .scale = scale, .n_heads = n_heads}};
    attention_job *j = &sj.j;
    j->heads = unit_of == PI_UNIT_HEAD ? 1 : n_heads / n_kv;
    j->dim = views[0]->head_dim;
    j->span = pi_ceil_div(span, PI_LANES) * PI_LANES;
    j->lds = j->span | PI_LANES;
    j->block = pi_min(most, pi_max(1, pi_min(BLOCK_ROWS, pi_max(2 * PI_LANES, SCORE_BYTES / 4 / j->span)) / j->heads));
    j->ld = pi_ceil_div(j->block * j->heads, PI_LANES) * PI_LANES;
    const int64_t one = j->heads * j->lds + CHUNK * j->dim;
    const int64_t block = j->ld * (4 + 2 * j->dim + j->span) + PI_LANES * j->dim;
    const int64_t shared = unit_of == PI_UNIT_SPLIT ? n_seqs * n_heads * j->lds : 0;
    j->slot_floats = pi_ceil_div(shared ? CHUNK * j->dim : j->block > 1 ? pi_max(one, block) : one, PI_LANES) * PI_LANES;
    j->scratch = pi_scratch(c, (size_t)(shared + threads * j->slot_floats) * sizeof(float));
    if (!j->scratch) return pi_leave(c, env, PI_ENOMEM);
    int64_t units = 0;
    for (int64_t i = 0; i < n_seqs; i++) units += pi_ceil_div(tokens[i], j->block) * (n_heads / j->heads);
    tasks = (int)pi_min(tasks, threads);
    /* Ranges as small as can be level out what the units differ in; fewer tasks than threads need as few ranges. */
#define GRAIN(n) (tasks == threads ? 1 : pi_ceil_div(n, tasks))
    if (unit_of == PI_UNIT_SPLIT) {
        sj.s = j->scratch;
        j->scratch += shared;
        sj.parts = pi_ceil_div(j->lds, SPLIT_KEYS);
        pi_pool_run(c->pool, units * sj.parts, GRAIN(units * sj.parts), split_scores_task, &sj);
        pi_pool_run(c->pool, units, GRAIN(units), split_softmax_task, &sj);
        sj.parts = pi_ceil_div(j->dim, SPLIT_DIMS);
        pi_pool_run(c->pool, units * sj.parts, GRAIN(units * sj.parts), split_context_task, &sj);
    } else {
        pi_pool_run(c->pool, units, GRAIN(units), unit_task, j);
    }
    return pi_leave(c, env, PI_OK);
}
