/* Writing into a cache: rows into tiles or rows, in the cache's own type. */
#include "kv.h"

#include <math.h>

#include "columns.h"
#include "ctx.h"

typedef struct {
    const pi_table *t;
    const pi_kv_view *v;
    const float *k, *values; /* rows [tokens][n_kv_heads * head_dim] */
    int64_t tokens;
} write_job;

/* One block of 32 as q8_0. NUMERICS.md section 4, the cache. */
static void narrow_q8_0(const float *x, int8_t *code, uint8_t *half) {
    float amax = 0.0f, zero = 0.0f; /* zero: or NaN, when x holds NaN or infinity */
    for (int i = 0; i < PI_BLOCK; i++) {
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
        zero = fmaf(x[i], 0.0f, zero);
    }
    const uint16_t d = zero == 0.0f ? pi_f16_of_f32(amax / 127.0f) : 0x7e00;
    const float s = pi_f32_of_f16(d), id = s > 0.0f ? 1.0f / s : 0.0f;
    for (int i = 0; i < PI_BLOCK; i++) {
        const float v = rintf(x[i] * id);
        code[i] = v >= 127.0f ? 127 : v <= -127.0f ? -127 : v == v ? (int8_t)v : 0;
    }
    memcpy(half, &d, 2);
}

/* A row of head_dim values in the cache's type, as it lies in V. */
static void narrow_row(const write_job *j, const float *x, uint8_t *to) {
    const int64_t dim = j->v->head_dim;
    switch (j->v->dtype) {
    case PI_F32: memcpy(to, x, (size_t)dim * sizeof *x); break;
    case PI_F16: j->t->narrow(x, dim, (uint16_t *)to); break;
    case PI_Q8_0:
        for (int64_t d = 0; d < dim; d += PI_BLOCK) narrow_q8_0(x + d, (int8_t *)to + d, to + dim + d / PI_BLOCK * 2);
        break;
    }
}

/* One token's row into lane `lane` of a K tile. */
static void into_tile(const write_job *j, const uint8_t *row, uint8_t *tile, int64_t lane) {
    const int64_t dim = j->v->head_dim, halves = j->v->dtype == PI_F16 ? dim : dim / PI_BLOCK;
    switch (j->v->dtype) {
    case PI_F32:
        for (int64_t d = 0; d < dim; d++) memcpy(tile + (d * PI_LANES + lane) * 4, row + d * 4, 4);
        return;
    case PI_Q8_0:
        for (int64_t d = 0; d < dim; d++) tile[d * PI_LANES + lane] = row[d];
        tile += PI_LANES * dim, row += dim;
        break;
    }
    for (int64_t d = 0; d < halves; d++) memcpy(tile + (d * PI_LANES + lane) * 2, row + d * 2, 2);
}

/* A whole tile at once: 16 keys `width` floats apart as columns, then narrowed. */
static void write_tile(const write_job *j, const float *k, int64_t width, uint8_t *tile) {
    enum { PART = 64 };
    const int64_t dim = j->v->head_dim;
    const float *x[PI_LANES];
    float wide[PART * PI_LANES];
    for (int64_t d = 0, n; d < dim; d += n) {
        n = pi_min(PART, dim - d);
        for (int64_t i = 0; i < PI_LANES; i++) x[i] = k + i * width + d;
        const bool f32 = j->v->dtype == PI_F32;
        pi_to_columns(x, PI_LANES, n, f32 ? (float *)tile + d * PI_LANES : wide, PI_LANES);
        if (!f32) j->t->narrow(wide, n * PI_LANES, (uint16_t *)tile + d * PI_LANES);
    }
}

/* Unit: 16 tokens (a tile) of one head. */
static void write_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const write_job *j = arg;
    const pi_kv_view *v = j->v;
    const int64_t dim = v->head_dim, width = v->n_kv_heads * dim, first = v->length, end = first + j->tokens;
    (void)slot;
    for (int64_t u = lo; u < hi; u++) {
        const int64_t h = u % v->n_kv_heads, tile = first / PI_LANES + u / v->n_kv_heads;
        const int64_t t0 = pi_max(first, tile * PI_LANES), t1 = pi_min(end, (tile + 1) * PI_LANES);
        const bool whole = t1 - t0 == PI_LANES && v->layout == PI_TILES && v->dtype != PI_Q8_0;
        if (whole) write_tile(j, j->k + (t0 - first) * width + h * dim, width, pi_kv_tile(v, t0, h));
        for (int64_t t = t0; t < t1; t++) {
            const int64_t from = (t - first) * width + h * dim;
            uint8_t *key = pi_kv_row(v, v->k, t, h), row[4 * PI_MAX_HEAD_DIM];
            narrow_row(j, j->values + from, pi_kv_row(v, v->v, t, h));
            if (whole) continue;
            narrow_row(j, j->k + from, v->layout == PI_TILES ? row : key);
            if (v->layout == PI_TILES) into_tile(j, row, pi_kv_tile(v, t, h), t % PI_LANES);
        }
    }
}

int pi_kv_write(pi_ctx *c, pi_kv_view *view, const float *k, const float *v, int64_t tokens) {
    if (!c || !k || !v || tokens < 0 || !pi_kv_view_ok(view, tokens)) return PI_EINVAL;
    pi_fpenv env = pi_enter(c);
    write_job j = {&c->t, view, k, v, tokens};
    const int64_t tiles = tokens ? (view->length + tokens - 1) / PI_LANES - view->length / PI_LANES + 1 : 0;
    pi_pool_run(c->pool, tiles * view->n_kv_heads, pi_max(1, PI_FORK_VALUES / (PI_LANES * view->head_dim)), write_task, &j);
    view->length += tokens;
    return pi_leave(c, env, PI_OK);
}
