/* Contexts, and the ops that are elementwise or by row: checks, then ranges of the table's kernel over the pool. */
#include "ctx.h"

#include <stdlib.h>

int pi_numerics(void) { return 1; }

#define X(name, args) #name,
static const char *const kernel_names[] = {PI_KERNELS(X)};
#undef X

int pi_level_count(void) { return pi_n_levels; }
const char *pi_level_name(int i) { return i >= 0 && i < pi_n_levels ? pi_levels[i].name : NULL; }
int pi_level_available(int i) { return i >= 0 && i < pi_n_levels && pi_levels[i].available(); }

pi_ctx *pi_ctx_new(const char *level, int threads) {
    int pick = -1;
    for (int i = 0; i < pi_n_levels; i++)
        if (pi_levels[i].available() && (!level || !strcmp(level, pi_levels[i].name))) pick = i;
    if (pick < 0 || threads < 1 || threads > 1024) return NULL;
    pi_ctx *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->level = pick;
    c->fork_generation = pi_fork_generation();
    pi_build_table(&c->t, pick);
    pthread_mutex_init(&c->lock, NULL);
    c->pool = pi_pool_new(threads);
    if (!c->pool) {
        pi_ctx_free(c);
        return NULL;
    }
    return c;
}

void pi_ctx_free(pi_ctx *c) {
    if (!c) return;
    pi_pool_free(c->pool);
    pi_arena_release(c->arena);
    free(c->scratch);
    free(c->ticks);
    free(c);
}

const char *pi_ctx_level(const pi_ctx *c) { return c ? pi_levels[c->level].name : NULL; }
void pi_ctx_scramble(pi_ctx *c, uint32_t seed) {
    if (c) pi_pool_scramble(c->pool, seed);
}
int64_t pi_ctx_spans(pi_ctx *c, int64_t *out, int64_t n, int64_t room) {
    if (!c || n < 0 || room < 0 || (n && !out)) return 0;
    pi_fpenv env = pi_enter(c);
    n = pi_pool_spans(c->pool, out, n, room);
    pi_leave(c, env, PI_OK);
    return n;
}
int pi_ctx_op_times(pi_ctx *c, int64_t *out, int64_t ops) {
    if (!c || ops < 0 || ops > INT32_MAX || (ops && !out)) return PI_EINVAL;
    const int64_t n = 2 * ops;
    int64_t *ticks = c->ticks;
    if (n != c->room) {
        ticks = n ? calloc((size_t)n, sizeof *ticks) : NULL;
        if (n && !ticks) return PI_ENOMEM;
    }
    pi_lock(c); /* not an op: it is not to be noted down */
    const int64_t tick = pi_ticks(), ns = pi_clock();
    if (n == c->room) {
        const double scale = tick > c->first_tick ? (double)(ns - c->first_ns) / (double)(tick - c->first_tick) : 1;
        for (int64_t i = 0, at = c->noted; i < n; i++, at = at + 1 == n ? 0 : at + 1)
            out[i] = c->first_ns + (int64_t)((double)(ticks[at] - c->first_tick) * scale);
    } else {
        free(c->ticks);
        c->ticks = ticks, c->room = n, c->noted = 0;
        c->first_tick = tick, c->first_ns = ns;
        if (n) memset(out, 0, (size_t)n * sizeof *out);
    }
    pthread_mutex_unlock(&c->lock);
    return PI_OK;
}
int64_t pi_ctx_regions(const pi_ctx *c) { return c ? pi_pool_regions(c->pool) : 0; }
int pi_ctx_threads(const pi_ctx *c) { return c ? pi_pool_threads(c->pool) : 0; }
int pi_kernel_count(void) { return PI_K_COUNT; }
const char *pi_kernel_name(int i) { return i >= 0 && i < PI_K_COUNT ? kernel_names[i] : NULL; }
const char *pi_ctx_kernel_level(const pi_ctx *c, int i) { return c && i >= 0 && i < PI_K_COUNT ? c->t.level_of[i] : NULL; }

void *pi_alloc(size_t bytes) {
    void *p = NULL;
    return posix_memalign(&p, 64, bytes ? bytes : 1) ? NULL : p;
}

void *pi_scratch(pi_ctx *c, size_t bytes) {
    if (bytes > c->scratch_bytes) {
        free(c->scratch);
        c->scratch_bytes = 0;
        c->scratch = pi_alloc(bytes);
        if (!c->scratch) return NULL;
        c->scratch_bytes = bytes;
    }
    return c->scratch;
}

/* ---- elementwise and row ops ---------------------------------------------------------------------------*/

typedef struct {
    const pi_table *t;
    const float *a, *b;
    const uint16_t *h;
    float *y;
    uint16_t *yh;
    int64_t n;
    float eps;
} job;

#define TASK(op, call) \
    static void op##_task(void *arg, int64_t lo, int64_t hi, int slot) { \
        const job *j = arg; \
        (void)slot; \
        call; \
    }
/* Elementwise: a unit is one value. By row: a unit is one row. */
#define ELEMENTWISE(entry, signature, fill, ok, call) \
    TASK(entry, call) \
    int pi_##entry signature { \
        if (!c || n < 0 || (n && !(ok))) return PI_EINVAL; \
        pi_fpenv env = pi_enter(c); \
        job j = {.t = &c->t}; \
        fill; \
        pi_pool_run(c->pool, n, PI_FORK_VALUES, entry##_task, &j); \
        return pi_leave(c, env, PI_OK); \
    }

ELEMENTWISE(swiglu, (pi_ctx * c, const float *gate, const float *up, int64_t n, float *y), (j.a = gate, j.b = up, j.y = y),
            gate && up && y, j->t->swiglu(j->a + lo, j->b + lo, hi - lo, j->y + lo))
ELEMENTWISE(silu, (pi_ctx * c, const float *x, int64_t n, float *y), (j.a = x, j.y = y), x && y,
            j->t->silu(j->a + lo, hi - lo, j->y + lo))
ELEMENTWISE(exp, (pi_ctx * c, const float *x, int64_t n, float *y), (j.a = x, j.y = y), x && y,
            j->t->exp(j->a + lo, hi - lo, j->y + lo))
ELEMENTWISE(add, (pi_ctx * c, const float *a, const float *b, int64_t n, float *y), (j.a = a, j.b = b, j.y = y), a && b && y,
            j->t->add(j->a + lo, j->b + lo, hi - lo, j->y + lo))
ELEMENTWISE(hadamard, (pi_ctx * c, const float *a, const float *b, int64_t n, float *y), (j.a = a, j.b = b, j.y = y),
            a && b && y, j->t->mul(j->a + lo, j->b + lo, hi - lo, j->y + lo))
ELEMENTWISE(narrow_f16, (pi_ctx * c, const float *x, int64_t n, uint16_t *y), (j.a = x, j.yh = y), x && y,
            j->t->narrow(j->a + lo, hi - lo, j->yh + lo))
ELEMENTWISE(widen_f16, (pi_ctx * c, const uint16_t *x, int64_t n, float *y), (j.h = x, j.y = y), x && y,
            j->t->widen(j->h + lo, hi - lo, j->y + lo))

/* Rows of n values, `grain` rows to a range so that a range is worth a fork. */
static int64_t row_grain(int64_t n) { return pi_max(1, PI_FORK_VALUES / pi_max(1, n)); }

static void softmax_rows_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const job *j = arg;
    (void)slot;
    for (int64_t r = lo; r < hi; r += PI_FOLDS) {
        float *row[PI_FOLDS];
        int64_t n[PI_FOLDS];
        for (int i = 0; i < PI_FOLDS; i++) row[i] = j->y + (r + i) * j->n, n[i] = j->n;
        j->t->softmax(row, n, pi_min(PI_FOLDS, hi - r));
    }
}
int pi_softmax_rows(pi_ctx *c, const float *x, int64_t rows, int64_t n, float *y) {
    if (!c || rows < 0 || n < 0 || (rows && n && (!x || !y))) return PI_EINVAL;
    pi_fpenv env = pi_enter(c);
    job j = {.t = &c->t, .y = y, .n = n};
    if (rows && n && x != y) memmove(y, x, (size_t)(rows * n) * sizeof *y);
    pi_pool_run(c->pool, n ? rows : 0, row_grain(n), softmax_rows_task, &j);
    return pi_leave(c, env, PI_OK);
}

TASK(rms_norm, j->t->rms_norm(j->a + lo * j->n, j->b, hi - lo, j->n, j->eps, j->y + lo * j->n))
int pi_rms_norm(pi_ctx *c, const float *x, const float *w, int64_t rows, int64_t n, float eps, float *y) {
    if (!c || rows < 0 || n < 1 || (rows && (!x || !w || !y))) return PI_EINVAL;
    pi_fpenv env = pi_enter(c);
    job j = {.t = &c->t, .a = x, .b = w, .y = y, .n = n, .eps = eps};
    pi_pool_run(c->pool, rows, row_grain(n), rms_norm_task, &j);
    return pi_leave(c, env, PI_OK);
}

int pi_sum_squares(pi_ctx *c, const float *x, int64_t rows, int64_t n, float *y) {
    if (!c || rows < 0 || n < 0 || (rows && (!x || !y))) return PI_EINVAL;
    pi_fpenv env = pi_enter(c);
    for (int64_t r = 0; r < rows; r++) {
        y[r] = 0.0f;
        for (int64_t i = 0; i < n; i++) c->t.saxpy(y + r, x + r * n + i, x[r * n + i], 1);
    }
    return pi_leave(c, env, PI_OK);
}
