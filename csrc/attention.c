/* Fused attention, and writing into a cache. Per query head: scores, softmax, values; a unit owns its outputs and a
 * scratch slot. Tiles: the kernels fold straight from the cache. Rows: K is transposed into scratch, then both
 * products are saxpy rows, the order all other paths reproduce. NUMERICS.md section 4, attention. */
#include "ctx.h"

typedef struct {
    const pi_table *t;
    const pi_kv_view *v;
    const float *q;
    float *out;
    float scale;
    int64_t tokens, lds;
    int n_heads, group;
    float *scratch;
    int64_t slot_floats;
} attention_job;

static int64_t visible(const attention_job *j, int64_t token) { return j->v->length - j->tokens + token + 1; }

/* Unit: one query of one KV head, with all the query heads that share it. */
static void tiles_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const attention_job *j = arg;
    const pi_kv_view *v = j->v;
    float *s = j->scratch + slot * j->slot_floats;
    int64_t dim = v->head_dim;
    for (int64_t u = lo; u < hi; u++) {
        int64_t kv = u % v->n_kv_heads, token = u / v->n_kv_heads, n = visible(j, token), at = kv * v->head_stride;
        const float *q = j->q + (token * j->n_heads + kv * j->group) * dim;
        float *out = j->out + (q - j->q);
        if (v->dtype == PI_F32)
            j->t->scores_f32(q, dim, j->group, (const float *)v->k + at, n, dim, j->scale, s, j->lds);
        else
            j->t->scores_f16(q, dim, j->group, (const uint16_t *)v->k + at, n, dim, j->scale, s, j->lds);
        j->t->softmax(s, j->group, n, j->lds);
        if (v->dtype == PI_F32)
            j->t->context_f32(s, j->lds, j->group, (const float *)v->v + at, n, dim, out, dim);
        else
            j->t->context_f16(s, j->lds, j->group, (const uint16_t *)v->v + at, n, dim, out, dim);
    }
}

static const float *row_f32(const attention_job *j, const void *data, int64_t t, int64_t kv, float *copy) {
    int64_t at = t * j->v->row_stride + kv * j->v->head_stride;
    if (j->v->dtype == PI_F32) return (const float *)data + at;
    j->t->widen((const uint16_t *)data + at, j->v->head_dim, copy);
    return copy;
}

/* Unit: one KV head, whose K is transposed once for all queries. */
static void rows_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const attention_job *j = arg;
    const pi_kv_view *v = j->v;
    int64_t dim = v->head_dim, length = v->length;
    float *s = j->scratch + slot * j->slot_floats, *copy = s + length, *k_t = copy + dim;
    for (int64_t kv = lo; kv < hi; kv++) {
        for (int64_t t = 0; t < length; t++) {
            const float *k = row_f32(j, v->k, t, kv, copy);
            for (int64_t d = 0; d < dim; d++) k_t[d * length + t] = k[d];
        }
        for (int64_t token = 0; token < j->tokens; token++) {
            int64_t n = visible(j, token);
            for (int h = 0; h < j->group; h++) {
                const float *q = j->q + (token * j->n_heads + kv * j->group + h) * dim;
                float *out = j->out + (q - j->q);
                memset(s, 0, (size_t)n * sizeof *s);
                for (int64_t d = 0; d < dim; d++) j->t->saxpy(s, k_t + d * length, q[d], n);
                for (int64_t t = 0; t < n; t++) s[t] *= j->scale;
                j->t->softmax(s, 1, n, n);
                memset(out, 0, (size_t)dim * sizeof *out);
                for (int64_t t = 0; t < n; t++) j->t->saxpy(out, row_f32(j, v->v, t, kv, copy), s[t], dim);
            }
        }
    }
}

static bool view_ok(const pi_kv_view *v, int64_t length) {
    if (!v || !v->k || !v->v || v->n_kv_heads < 1 || v->head_dim < 1 || length < 0 || length > v->capacity) return false;
    if (v->dtype != PI_F32 && v->dtype != PI_F16) return false;
    if (v->layout == PI_TILES) return v->capacity % PI_LANES == 0 && v->head_stride >= v->capacity * v->head_dim;
    return v->layout == PI_ROWS && v->head_stride >= v->head_dim && v->row_stride >= v->head_stride * v->n_kv_heads;
}

int pi_attention(pi_ctx *c, const float *q, int64_t tokens, int n_heads, const pi_kv_view *view, float scale, float *out) {
    if (!c || !q || !out || tokens < 1 || !view_ok(view, view ? view->length : 0) || view->length < tokens) return PI_EINVAL;
    if (n_heads < 1 || n_heads % view->n_kv_heads) return PI_EINVAL;
    pi_fpenv env = pi_enter(c);
    attention_job j = {.t = &c->t, .v = view, .q = q, .out = out, .scale = scale, .tokens = tokens, .n_heads = n_heads};
    j.group = n_heads / view->n_kv_heads;
    j.lds = pi_ceil_div(view->length, PI_LANES) * PI_LANES;
    bool tiles = view->layout == PI_TILES;
    j.slot_floats = tiles ? j.group * j.lds : view->length + view->head_dim + view->length * view->head_dim;
    j.slot_floats = pi_ceil_div(j.slot_floats, PI_LANES) * PI_LANES;
    j.scratch = pi_scratch(c, (size_t)(pi_pool_threads(c->pool) * j.slot_floats) * sizeof(float));
    if (!j.scratch) return pi_leave(c, env, PI_ENOMEM);
    /* Below 64 keys a fork costs more than it saves. */
    int64_t units = tiles ? tokens * view->n_kv_heads : view->n_kv_heads;
    int64_t grain = tokens == 1 && view->length < 64 ? units : 1;
    pi_pool_run(c->pool, units, grain, tiles ? tiles_task : rows_task, &j);
    return pi_leave(c, env, PI_OK);
}

typedef struct {
    const pi_kv_view *v;
    const void *k, *values; /* rows [tokens][n_kv_heads * head_dim] in the cache's dtype */
    int64_t tokens;
} write_job;

/* Unit: one tile of 16 tokens of one head. */
#define WRITE_TILES(type, T) \
    static void write_tiles_##type(void *arg, int64_t lo, int64_t hi, int slot) { \
        const write_job *j = arg; \
        const pi_kv_view *v = j->v; \
        int64_t dim = v->head_dim, width = v->n_kv_heads * dim, first = v->length, end = first + j->tokens; \
        (void)slot; \
        for (int64_t u = lo; u < hi; u++) { \
            int64_t h = u % v->n_kv_heads, tile = first / PI_LANES + u / v->n_kv_heads; \
            int64_t t0 = pi_max(first, tile * PI_LANES), t1 = pi_min(end, (tile + 1) * PI_LANES); \
            const T *k = (const T *)j->k + h * dim, *values = (const T *)j->values + h * dim; \
            T *kt = (T *)v->k + h * v->head_stride + tile * PI_LANES * dim, *vt = (T *)v->v + h * v->head_stride; \
            for (int64_t d = 0; d < dim; d++) \
                for (int64_t t = t0; t < t1; t++) kt[d * PI_LANES + t % PI_LANES] = k[(t - first) * width + d]; \
            for (int64_t t = t0; t < t1; t++) memcpy(vt + t * dim, values + (t - first) * width, (size_t)dim * sizeof(T)); \
        } \
    }
WRITE_TILES(f32, float)
WRITE_TILES(f16, uint16_t)

static void write_rows(const write_job *j, size_t element) {
    const pi_kv_view *v = j->v;
    size_t head = (size_t)v->head_dim * element;
    for (int64_t t = 0; t < j->tokens; t++)
        for (int h = 0; h < v->n_kv_heads; h++) {
            size_t to = (size_t)((v->length + t) * v->row_stride + h * v->head_stride) * element;
            size_t from = (size_t)(t * v->n_kv_heads + h) * head;
            memcpy((uint8_t *)v->k + to, (const uint8_t *)j->k + from, head);
            memcpy((uint8_t *)v->v + to, (const uint8_t *)j->values + from, head);
        }
}

int pi_kv_write(pi_ctx *c, pi_kv_view *view, const float *k, const float *v, int64_t tokens) {
    if (!c || !k || !v || tokens < 0 || !view_ok(view, view ? view->length + tokens : 0)) return PI_EINVAL;
    pi_fpenv env = pi_enter(c);
    write_job j = {view, k, v, tokens};
    int64_t n = tokens * view->n_kv_heads * view->head_dim;
    if (view->dtype == PI_F16) {
        uint16_t *s = pi_scratch(c, (size_t)n * 2 * sizeof *s);
        if (!s) return pi_leave(c, env, PI_ENOMEM);
        c->t.narrow(k, n, s);
        c->t.narrow(v, n, s + n);
        j.k = s;
        j.values = s + n;
    }
    if (view->layout == PI_TILES) {
        int64_t tiles = tokens ? (view->length + tokens - 1) / PI_LANES - view->length / PI_LANES + 1 : 0;
        int64_t grain = pi_max(1, PI_FORK_VALUES / (PI_LANES * view->head_dim));
        pi_pool_run(c->pool, tiles * view->n_kv_heads, grain, view->dtype == PI_F32 ? write_tiles_f32 : write_tiles_f16, &j);
    } else {
        write_rows(&j, view->dtype == PI_F32 ? 4 : 2);
    }
    view->length += tokens;
    return pi_leave(c, env, PI_OK);
}
