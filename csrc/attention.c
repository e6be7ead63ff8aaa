/* Fused attention over a cache.
 *
 * A unit is a block of queries of one sequence by the query heads of one KV head (or by one query head), with all its keys. It
 * gathers its query rows and folds their scores over a chunk of keys at a time, so that a chunk of K serves every row from the
 * second-level cache; then softmax of each row over what it may see; then the values, likewise by chunks. A unit owns its outputs and
 * a scratch slot. Where a step has fewer heads than there are threads it splits instead into three regions, over keys, rows and value
 * dimensions. All of this divides outputs, never folds: what a fold has so far is an f32 in memory between two chunks.
 * NUMERICS.md section 4, attention. */
#include "ctx.h"
#include "kv.h"

enum {
    CHUNK = 256,             /* keys to a chunk: 64 KiB of f16 at head_dim 128 */
    BLOCK_ROWS = 24,         /* query rows to a unit of prefill ... */
    SCORE_BYTES = 512 << 10, /* ... fewer where their scores would not stay in the second-level cache */
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
    int64_t lds;           /* floats to a row of scores */
    float *scratch;        /* per slot: query rows, output rows, scores, a chunk of K as tiles; of a split step: all its scores */
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

/* Softmax of each row over what its query sees; row 0 is the unit's first, and s its score for key `from`. */
static void softmax(const attention_job *j, const unit *n, int64_t from, float *s) {
    float *row[BLOCK_ROWS];
    int64_t count[BLOCK_ROWS];
    for (int64_t r = 0, k = 0; r < n->rows; r++) {
        const int64_t t = n->t0 + r / j->heads;
        row[k] = s + r * j->lds + (sees_from(n, t) - from);
        count[k++] = sees_to(n, t) - sees_from(n, t);
        if (k == BLOCK_ROWS || r + 1 == n->rows) j->t->softmax(row, count, k), k = 0;
    }
}

static void unit_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const attention_job *j = arg;
    const int64_t dim = j->dim, heads = j->heads, most = j->block * heads;
    float *q = j->scratch + slot * j->slot_floats, *out = q + most * dim, *s = out + most * dim, *copy = s + most * j->lds;
    for (int64_t u = lo; u < hi; u++) {
        const unit n = find_unit(j, u);
        const int64_t at = (n.q0 * j->n_heads + n.h0) * dim; /* of the sequence's first query, in q and in out */
        for (int64_t t = n.t0; t < n.t1; t++)
            memcpy(q + (t - n.t0) * heads * dim, j->q + at + t * j->n_heads * dim, (size_t)(heads * dim) * sizeof *q);
        const int64_t from = tile_floor(sees_from(&n, n.t0)), last = n.t1 - 1;
        scores(j, &n, q, n.rows, from, sees_to(&n, last), s, copy);
        softmax(j, &n, from, s);
        memset(out, 0, (size_t)(n.rows * dim) * sizeof *out);
        /* Keys that all rows see go through the kernel together; before and behind them each query has an edge of its own. */
        int64_t all_from = sees_from(&n, last), all_to = sees_to(&n, n.t0);
        if (all_from >= all_to) all_from = all_to = sees_to(&n, last);
        for (int64_t t = n.t0, r = 0; t < n.t1; t++, r += heads) {
            const int64_t lo_t = sees_from(&n, t), hi_t = pi_min(all_from, sees_to(&n, t));
            context(j, &n, s + r * j->lds + (lo_t - from), heads, lo_t, hi_t, 0, dim, out + r * dim, dim);
        }
        context(j, &n, s + (all_from - from), n.rows, all_from, all_to, 0, dim, out, dim);
        for (int64_t t = n.t0, r = 0; t < n.t1; t++, r += heads) {
            const int64_t lo_t = pi_max(all_to, sees_from(&n, t));
            context(j, &n, s + r * j->lds + (lo_t - from), heads, lo_t, sees_to(&n, t), 0, dim, out + r * dim, dim);
        }
        for (int64_t t = n.t0; t < n.t1; t++)
            memcpy(j->out + at + t * j->n_heads * dim, out + (t - n.t0) * heads * dim, (size_t)(heads * dim) * sizeof *out);
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
        softmax(&sj->j, &n, from, s);
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
    j->lds = (pi_ceil_div(span, PI_LANES) | 1) * PI_LANES;
    j->block = pi_min(most, pi_max(1, pi_min(BLOCK_ROWS, SCORE_BYTES / 4 / j->lds) / j->heads));
    const int64_t rows = j->block * j->heads, copy = CHUNK * j->dim, shared = unit_of == PI_UNIT_SPLIT ? n_seqs * n_heads * j->lds : 0;
    j->slot_floats = (shared ? 0 : pi_ceil_div(rows * (2 * j->dim + j->lds), PI_LANES) * PI_LANES) + copy;
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
