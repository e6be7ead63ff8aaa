/* The matmul driver: quantises the input rows once, then hands out blocks of row groups by tokens. Which block a
 * thread takes moves no byte: an output belongs to one block, and its fold lies whole inside the kernel. */
#include "ctx.h"
#include "pack.h"

/* A block of tokens for float matmuls, which use all its columns at once: they stay in the second-level cache while row groups stream
 * by. Packed groups of a matrix that lies in GGUF's layout: what a thread packs at a time, before its kernel reads it back from the cache. */
enum { FLOAT_BYTES = 192 * 1024, PACKED_BYTES = 128 * 1024 };

typedef struct {
    const pi_table *t;
    const pi_weight *w[3];
    float *y[3];
    const float *add;
    pi_act a;
    int n;
    bool quantised, floats;     /* any of the matrices */
    int64_t tokens, block;      /* rows of x; tokens to a block */
    int64_t groups, chunks;     /* row groups to a chunk; chunks over all n matrices */
    uint8_t *packed;            /* per slot: packed_bytes for groups of an unpacked matrix */
    size_t packed_bytes;
} matmul_job;

static void quantize_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const matmul_job *j = arg;
    (void)slot;
    for (int64_t r = lo * j->a.tile; r < hi * j->a.tile; r++)
        j->t->quantize(j->a.x + pi_min(r, j->tokens - 1) * j->a.cols, &j->a, r);
}

static void kernel(const pi_table *t, const pi_weight *w, const pi_act *a, int64_t g0, int64_t g1, int64_t t0, int64_t t1, float *y,
                   int64_t ldy) {
    switch (w->type->type) {
#define X(stem, TYPE, ...) \
    case PI_##TYPE: t->matmul_##stem(w, a, g0, g1, t0, t1, y, ldy); break;
        PI_FLOAT(X)
        PI_QUANTISED(X)
#undef X
    }
}

/* Groups of an unpacked matrix, packed into this slot's memory a few at a time: each few is a small matrix of its own. */
static void kernel_unpacked(const matmul_job *j, const pi_weight *w, int64_t g0, int64_t g1, int64_t t0, int64_t t1, float *y, int slot) {
    const int64_t step = pi_max(1, (int64_t)j->packed_bytes / w->group_bytes);
    for (int64_t g = g0; g < g1; g += step) {
        pi_weight few = *w;
        few.groups = pi_min(step, g1 - g);
        few.rows = pi_min(few.groups * PI_LANES, w->rows - g * PI_LANES);
        few.data = j->packed + (size_t)slot * j->packed_bytes;
        pi_pack_groups(w, g, g + few.groups, few.data);
        kernel(j->t, &few, &j->a, 0, few.groups, t0, t1, y + g * PI_LANES, w->rows);
    }
}

/* Unit u: chunk u % chunks of token block u / chunks. */
static void matmul_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const matmul_job *j = arg;
    for (int64_t u = lo; u < hi; u++) {
        int64_t chunk = u % j->chunks, t0 = u / j->chunks * j->block, t1 = pi_min(t0 + j->block, j->tokens);
        int i = 0;
        for (int64_t own; chunk >= (own = pi_ceil_div(j->w[i]->groups, j->groups)); i++) chunk -= own;
        const pi_weight *w = j->w[i];
        int64_t g0 = chunk * j->groups, g1 = pi_min(g0 + j->groups, w->groups);
        if (w->data)
            kernel(j->t, w, &j->a, g0, g1, t0, t1, j->y[i], w->rows);
        else
            kernel_unpacked(j, w, g0, g1, t0, t1, j->y[i], slot);
        int64_t n0 = g0 * PI_LANES, n1 = pi_min(g1 * PI_LANES, w->rows);
        for (int64_t t = t0; j->add && i == 0 && t < t1; t++) {
            float *y = j->y[i] + t * w->rows + n0;
            j->t->add(j->add + t * w->rows + n0, y, n1 - n0, y);
        }
    }
}

/* `bytes` of scratch at *used. */
static size_t take(size_t *used, int64_t bytes) {
    size_t at = *used;
    *used += (size_t)(bytes + 63) / 64 * 64;
    return at;
}

/* Room for the activations, whole tiles of them, and for packing, in one piece of scratch. */
static bool make_room(pi_ctx *c, matmul_job *j) {
    const int64_t rows = pi_ceil_div(j->tokens, j->a.tile) * j->a.tile, values = rows * j->a.cols, blocks = rows * j->a.nb * 4;
    const int threads = pi_pool_threads(c->pool);
    size_t used = 0, q = 0, q16 = 0, d = 0, off = 0, sum[2] = {0, 0}, sx[2] = {0, 0};
    if (j->quantised) {
        q = take(&used, values), q16 = take(&used, 2 * values), d = take(&used, blocks), off = take(&used, blocks);
        for (int i = 0; i < 2; i++) sum[i] = take(&used, blocks << i), sx[i] = take(&used, blocks << i);
    }
    size_t packed = take(&used, (int64_t)j->packed_bytes * threads);
    uint8_t *s = pi_scratch(c, used);
    if (!s) return used == 0;
    j->a.q = (int8_t *)(s + q), j->a.q16 = (int16_t *)(s + q16), j->a.d = (float *)(s + d), j->a.off = (int32_t *)(s + off);
    for (int i = 0; i < 2; i++) j->a.sum[i] = (float *)(s + sum[i]), j->a.sx[i] = (float *)(s + sx[i]);
    j->packed = s + packed;
    return true;
}

int pi_matmul(pi_ctx *c, const pi_weight *w0, const pi_weight *w1, const pi_weight *w2, const float *x, int64_t tokens,
              const float *add, float *y0, float *y1, float *y2) {
    matmul_job j = {.w = {w0, w1, w2}, .y = {y0, y1, y2}, .add = add, .n = w2 ? 3 : w1 ? 2 : 1, .tokens = tokens};
    if (!c || !w0 || (w2 && !w1) || tokens < 0 || (add && add == y0)) return PI_EINVAL;
    int64_t groups = 0;
    for (int i = 0; i < j.n; i++) {
        const pi_weight *w = j.w[i];
        if (w->cols != w0->cols || (tokens && (!x || !j.y[i]))) return PI_EINVAL;
        groups += w->groups;
        *(w->type->quantised ? &j.quantised : &j.floats) = true;
        if (!w->data) j.packed_bytes = (size_t)pi_max((int64_t)j.packed_bytes, pi_max(PACKED_BYTES, w->group_bytes));
    }
    if (tokens == 0) return PI_OK;
    pi_fpenv env = pi_enter(c);
    const int64_t cols = w0->cols;
    j.t = &c->t;
    j.a = (pi_act){.x = x, .cols = cols, .nb = cols / PI_BLOCK, .tile = tokens < PI_PANEL_TOKENS ? 1 : j.t->tile};
    if (!make_room(c, &j)) return pi_leave(c, env, PI_ENOMEM);
    if (j.quantised)
        pi_pool_run(c->pool, pi_ceil_div(tokens, j.a.tile), pi_max(1, PI_FORK_VALUES / cols / j.a.tile), quantize_task, &j);
    /* One token: a few chunks a thread, so that a thread which lost its core does not hold up the rest for long.
     * Many: small chunks, each read once from memory and used for a whole block of tokens. */
    int threads = pi_pool_threads(c->pool);
    j.block = j.floats ? pi_max(1, FLOAT_BYTES / cols / PI_TILE_MULTIPLE) * PI_TILE_MULTIPLE : PI_TOKENS;
    j.groups = tokens < 8 ? pi_max(4, groups / (threads * 4) / 4 * 4) : 4;
    for (int i = 0; i < j.n; i++) j.chunks += pi_ceil_div(j.w[i]->groups, j.groups);
    pi_pool_run(c->pool, j.chunks * pi_ceil_div(tokens, j.block), 1, matmul_task, &j);
    return pi_leave(c, env, PI_OK);
}

typedef struct {
    const pi_table *t;
    const float *a, *b;
    float *y;
    int64_t k, n;
} rows_job;

static void rows_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const rows_job *j = arg;
    (void)slot;
    for (int64_t m = lo; m < hi; m++) {
        float *y = j->y + m * j->n;
        memset(y, 0, (size_t)j->n * sizeof *y);
        for (int64_t k = 0; k < j->k; k++) j->t->saxpy(y, j->b + k * j->n, j->a[m * j->k + k], j->n);
    }
}

int pi_matmul_rows(pi_ctx *c, const float *a, const float *b, int64_t m, int64_t k, int64_t n, float *y) {
    if (!c || m < 0 || k < 0 || n < 0 || (m && k && !a) || (k && n && !b) || (m && n && !y)) return PI_EINVAL;
    pi_fpenv env = pi_enter(c);
    rows_job j = {&c->t, a, b, y, k, n};
    pi_pool_run(c->pool, n ? m : 0, pi_max(1, PI_FORK_VALUES / pi_max(1, k * n)), rows_task, &j);
    return pi_leave(c, env, PI_OK);
}
