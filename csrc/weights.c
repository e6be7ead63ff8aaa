/* Weight matrices: packed into row groups, or left in GGUF's layout; and reading rows of either. */
#include <stdlib.h>

#include "ctx.h"
#include "pack.h"

static int64_t row_bytes(const pi_weight *w) { return w->cols / w->type->block * w->type->src_bytes; }

/* Rows past the end repeat the last one: their outputs are never stored. */
void pi_pack_groups(const pi_weight *w, int64_t g0, int64_t g1, uint8_t *out) {
    const int64_t bytes = row_bytes(w);
    for (int64_t g = g0; g < g1; g++, out += w->group_bytes) {
        const uint8_t *rows[PI_LANES];
        for (int r = 0; r < PI_LANES; r++) rows[r] = w->src + pi_min(g * PI_LANES + r, w->rows - 1) * bytes;
        w->type->pack(rows, w->cols, out);
    }
}

static void pack_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const pi_weight *w = arg;
    (void)slot;
    pi_pack_groups(w, lo, hi, w->data + lo * w->group_bytes);
}

int pi_weight_new(pi_ctx *c, int type, int64_t rows, int64_t cols, const void *src, int64_t src_bytes, int pack, pi_weight **out) {
    const pi_weight_type *t = pi_find_type(type);
    if (!t) return PI_ETYPE;
    if (!c || !src || !out || rows < 1 || cols < 1 || rows > INT32_MAX || cols > INT32_MAX || cols % t->block) return PI_EINVAL;
    pi_weight *w = calloc(1, sizeof *w);
    if (!w) return PI_ENOMEM;
    *w = (pi_weight){.type = t, .rows = rows, .cols = cols, .groups = pi_ceil_div(rows, PI_LANES), .src = src};
    w->group_bytes = pi_group_bytes(t, cols);
    if (rows > INT64_MAX / row_bytes(w) || src_bytes != rows * row_bytes(w)) {
        free(w);
        return PI_EINVAL;
    }
    pi_fpenv env = pi_enter(c);
    if (pack) {
        w->data = pi_arena_alloc(&c->arena, (size_t)(w->groups * w->group_bytes), &w->arena);
        if (!w->data) {
            free(w);
            return pi_leave(c, env, PI_ENOMEM);
        }
        pi_pool_run(c->pool, w->groups, 4, pack_task, w);
        w->src = NULL;
    }
    *out = w;
    return pi_leave(c, env, PI_OK);
}

void pi_weight_free(pi_weight *w) {
    if (w && w->arena) pi_arena_release(w->arena);
    free(w);
}

int64_t pi_weight_bytes(const pi_weight *w) { return !w ? 0 : w->data ? w->groups * w->group_bytes : w->rows * row_bytes(w); }

int pi_weight_memory(const pi_weight *w, void **data, int64_t *group_bytes, void **pages, int64_t *page_bytes) {
    if (!w || !w->data || !data || !group_bytes || !pages || !page_bytes) return PI_EINVAL;
    *data = w->data, *group_bytes = w->group_bytes;
    *page_bytes = pi_arena_pages(w->arena, pages);
    return PI_OK;
}

int pi_gather_rows(pi_ctx *c, const pi_weight *w, const int32_t *ids, int64_t n, float *y) {
    if (!c || !w || n < 0 || (n && (!ids || !y))) return PI_EINVAL;
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= w->rows) return PI_EINVAL;
    pi_fpenv env = pi_enter(c);
    uint8_t *group = w->data ? NULL : pi_scratch(c, (size_t)w->group_bytes);
    if (!w->data && !group) return pi_leave(c, env, PI_ENOMEM);
    for (int64_t i = 0; i < n; i++) {
        const int64_t g = ids[i] / PI_LANES;
        if (!w->data) pi_pack_groups(w, g, g + 1, group);
        w->type->row(w->data ? w->data + g * w->group_bytes : group, w->cols, ids[i] % PI_LANES, y + i * w->cols);
    }
    return pi_leave(c, env, PI_OK);
}
