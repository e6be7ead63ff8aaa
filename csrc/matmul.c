/* The matmul driver: quantises the input rows once, then hands out blocks of row groups by tokens. Which block a
 * thread takes moves no byte: an output belongs to one block, and its fold lies whole inside the kernel. */
#include "ctx.h"

/* Tokens to a block: their quantised rows stay in the second-level cache while row groups stream by. */
enum { TOKEN_BYTES = 192 * 1024 };

typedef struct {
    const pi_table *t;
    const pi_weight *w[3];
    float *y[3];
    const float *add;
    pi_act a;
    int n;
    int64_t tokens, block;      /* rows of x; tokens to a block */
    int64_t groups, chunks;     /* row groups to a chunk; chunks over all n matrices */
} matmul_job;

static bool is_quantised(const pi_weight *w) { return w->type != PI_F32 && w->type != PI_F16; }

static void quantize_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const matmul_job *j = arg;
    (void)slot;
    for (int64_t r = lo; r < hi; r++) j->t->quantize(j->a.x + r * j->a.cols, &j->a, r);
}

static void kernel(const pi_table *t, const pi_weight *w, const pi_act *a, int64_t g0, int64_t g1, int64_t t0, int64_t t1, float *y) {
    switch (w->type) {
    case PI_F32: t->matmul_f32(w, a, g0, g1, t0, t1, y, w->rows); break;
    case PI_F16: t->matmul_f16(w, a, g0, g1, t0, t1, y, w->rows); break;
    case PI_Q4_1: t->matmul_q4_1(w, a, g0, g1, t0, t1, y, w->rows); break;
    case PI_Q8_0: t->matmul_q8_0(w, a, g0, g1, t0, t1, y, w->rows); break;
    }
}

/* Unit u: chunk u % chunks of token block u / chunks. */
static void matmul_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const matmul_job *j = arg;
    (void)slot;
    for (int64_t u = lo; u < hi; u++) {
        int64_t chunk = u % j->chunks, t0 = u / j->chunks * j->block, t1 = pi_min(t0 + j->block, j->tokens);
        int i = 0;
        for (int64_t own; chunk >= (own = pi_ceil_div(j->w[i]->groups, j->groups)); i++) chunk -= own;
        const pi_weight *w = j->w[i];
        int64_t g0 = chunk * j->groups, g1 = pi_min(g0 + j->groups, w->groups);
        kernel(j->t, w, &j->a, g0, g1, t0, t1, j->y[i]);
        int64_t n0 = g0 * PI_LANES, n1 = pi_min(g1 * PI_LANES, w->rows);
        for (int64_t t = t0; j->add && i == 0 && t < t1; t++) {
            float *y = j->y[i] + t * w->rows + n0;
            j->t->add(j->add + t * w->rows + n0, y, n1 - n0, y);
        }
    }
}

static size_t align64(size_t n) { return (n + 63) / 64 * 64; }

int pi_matmul(pi_ctx *c, const pi_weight *w0, const pi_weight *w1, const pi_weight *w2, const float *x, int64_t tokens,
              const float *add, float *y0, float *y1, float *y2) {
    matmul_job j = {.w = {w0, w1, w2}, .y = {y0, y1, y2}, .add = add, .n = w2 ? 3 : w1 ? 2 : 1, .tokens = tokens};
    if (!c || !w0 || (w2 && !w1) || tokens < 0 || (add && add == y0)) return PI_EINVAL;
    int64_t groups = 0;
    bool quantised = false;
    for (int i = 0; i < j.n; i++) {
        if (j.w[i]->cols != w0->cols || (tokens && (!x || !j.y[i]))) return PI_EINVAL;
        groups += j.w[i]->groups;
        quantised |= is_quantised(j.w[i]);
    }
    if (tokens == 0) return PI_OK;
    pi_fpenv env = pi_enter(c);
    int64_t cols = w0->cols, nb = cols / PI_BLOCK;
    j.t = &c->t;
    j.a = (pi_act){.x = x, .cols = cols, .nb = nb};
    if (quantised) {
        size_t values = align64((size_t)(tokens * cols)), blocks = align64((size_t)(tokens * nb) * 4);
        uint8_t *s = pi_scratch(c, values * 3 + blocks * 3);
        if (!s) return pi_leave(c, env, PI_ENOMEM);
        j.a.q = (int8_t *)s;
        j.a.q16 = (int16_t *)(s + values);
        j.a.d = (float *)(s + values * 3);
        j.a.sx = (float *)(s + values * 3 + blocks);
        j.a.off = (int32_t *)(s + values * 3 + blocks * 2);
        pi_pool_run(c->pool, tokens, pi_max(1, PI_FORK_VALUES / cols), quantize_task, &j);
    }
    /* One token: a few chunks a thread, so that a thread which lost its core does not hold up the rest for long.
     * Many: small chunks, each read once from memory and used for a whole block of tokens. */
    int threads = pi_pool_threads(c->pool);
    j.block = pi_max(8, TOKEN_BYTES / cols / 8 * 8);
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
