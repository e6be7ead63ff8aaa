/* Packing GGUF rows into groups of 16 (layouts: pi.h), and reading single rows back. A type is one line of `types`. */
#include <stdlib.h>

#include "ctx.h"

typedef struct {
    int type;
    int block, src_bytes;  /* values in a block of the file, its bytes */
    int packed_bytes;      /* of 16 packed blocks */
    void (*pack)(const uint8_t *const *rows, int64_t blocks, uint8_t *group);
    void (*row)(const pi_weight *w, int64_t n, float *y); /* dequantises row n */
} weight_type;

static void store16(void *p, const void *v) { memcpy(p, v, 2); }
static uint16_t load16(const void *p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static void pack_f32(const uint8_t *const *rows, int64_t blocks, uint8_t *group) {
    for (int64_t k = 0; k < blocks; k++)
        for (int r = 0; r < PI_LANES; r++) memcpy(group + (k * PI_LANES + r) * 4, rows[r] + k * 4, 4);
}
static void row_f32(const pi_weight *w, int64_t n, float *y) {
    const float *v = (const float *)(w->data + n / PI_LANES * w->group_bytes) + n % PI_LANES;
    for (int64_t k = 0; k < w->cols; k++) y[k] = v[k * PI_LANES];
}

static void pack_f16(const uint8_t *const *rows, int64_t blocks, uint8_t *group) {
    for (int64_t k = 0; k < blocks; k++)
        for (int r = 0; r < PI_LANES; r++) store16(group + (k * PI_LANES + r) * 2, rows[r] + k * 2);
}
static void row_f16(const pi_weight *w, int64_t n, float *y) {
    const uint16_t *v = (const uint16_t *)(w->data + n / PI_LANES * w->group_bytes) + n % PI_LANES;
    for (int64_t k = 0; k < w->cols; k++) y[k] = pi_f32_of_f16(v[k * PI_LANES]);
}

/* In the file: f16 d, 32 int8. */
static void pack_q8_0(const uint8_t *const *rows, int64_t blocks, uint8_t *group) {
    uint8_t *scales = group + blocks * 512;
    for (int64_t b = 0; b < blocks; b++)
        for (int r = 0; r < PI_LANES; r++) {
            const uint8_t *src = rows[r] + b * 34;
            store16(scales + (b * PI_LANES + r) * 2, src);
            for (int j = 0; j < 8; j++) memcpy(group + b * 512 + j * 64 + r * 4, src + 2 + j * 4, 4);
        }
}
static void row_q8_0(const pi_weight *w, int64_t n, float *y) {
    const uint8_t *group = w->data + n / PI_LANES * w->group_bytes;
    int64_t blocks = w->cols / PI_BLOCK, r = n % PI_LANES;
    for (int64_t b = 0; b < blocks; b++) {
        float d = pi_f32_of_f16(load16(group + blocks * 512 + (b * PI_LANES + r) * 2));
        const int8_t *code = (const int8_t *)group + b * 512 + r * 4;
        for (int i = 0; i < PI_BLOCK; i++) y[b * PI_BLOCK + i] = d * (float)code[i / 4 * 64 + i % 4];
    }
}

/* In the file: f16 d, f16 m, 16 bytes of nibbles, low ones first. */
static void pack_q4_1(const uint8_t *const *rows, int64_t blocks, uint8_t *group) {
    uint8_t *scales = group + blocks * 256;
    for (int64_t b = 0; b < blocks; b++)
        for (int r = 0; r < PI_LANES; r++) {
            const uint8_t *src = rows[r] + b * 20;
            store16(scales + (b * 32 + r) * 2, src);
            store16(scales + (b * 32 + 16 + r) * 2, src + 2);
            for (int j = 0; j < 4; j++) memcpy(group + b * 256 + j * 64 + r * 4, src + 4 + j * 4, 4);
        }
}
static void row_q4_1(const pi_weight *w, int64_t n, float *y) {
    const uint8_t *group = w->data + n / PI_LANES * w->group_bytes;
    int64_t blocks = w->cols / PI_BLOCK, r = n % PI_LANES;
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *dm = group + blocks * 256 + (b * 32 + r) * 2, *code = group + b * 256 + r * 4;
        float d = pi_f32_of_f16(load16(dm)), m = pi_f32_of_f16(load16(dm + 32));
        for (int i = 0; i < 16; i++) {
            int byte = code[i / 4 * 64 + i % 4];
            y[b * PI_BLOCK + i] = __builtin_fmaf(d, (float)(byte & 15), m);
            y[b * PI_BLOCK + 16 + i] = __builtin_fmaf(d, (float)(byte >> 4), m);
        }
    }
}

static const weight_type types[] = {
    {PI_F32, 1, 4, 64, pack_f32, row_f32},
    {PI_F16, 1, 2, 32, pack_f16, row_f16},
    {PI_Q4_1, 32, 20, 320, pack_q4_1, row_q4_1},
    {PI_Q8_0, 32, 34, 544, pack_q8_0, row_q8_0},
};

static const weight_type *find_type(int type) {
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].type == type) return &types[i];
    return NULL;
}

typedef struct {
    const weight_type *type;
    pi_weight *w;
    const uint8_t *src, *zeros;
    int64_t row_bytes;
} pack_job;

static void pack_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const pack_job *j = arg;
    (void)slot;
    for (int64_t g = lo; g < hi; g++) {
        const uint8_t *rows[PI_LANES];
        for (int r = 0; r < PI_LANES; r++) {
            int64_t n = g * PI_LANES + r;
            rows[r] = n < j->w->rows ? j->src + n * j->row_bytes : j->zeros;
        }
        j->type->pack(rows, j->w->cols / j->type->block, j->w->data + g * j->w->group_bytes);
    }
}

int pi_weight_pack(pi_ctx *c, int type, int64_t rows, int64_t cols, const void *src, int64_t src_bytes, pi_weight **out) {
    const weight_type *wt = find_type(type);
    if (!wt) return PI_ETYPE;
    if (!c || !src || !out || rows < 1 || cols < 1 || rows > INT32_MAX || cols > INT32_MAX || cols % wt->block) return PI_EINVAL;
    int64_t row_bytes = cols / wt->block * wt->src_bytes;
    if (src_bytes != rows * row_bytes) return PI_EINVAL;
    pi_weight *w = calloc(1, sizeof *w);
    uint8_t *zeros = calloc(1, (size_t)row_bytes);
    if (w) {
        *w = (pi_weight){.type = type, .rows = rows, .cols = cols, .groups = pi_ceil_div(rows, PI_LANES)};
        w->group_bytes = pi_ceil_div(cols / wt->block * wt->packed_bytes, 64) * 64;
        w->bytes = (size_t)(w->groups * w->group_bytes);
    }
    pi_fpenv env = pi_enter(c);
    if (w) w->data = pi_arena_alloc(&c->arena, w->bytes, &w->arena);
    if (!w || !zeros || !w->data) {
        free(w);
        free(zeros);
        return pi_leave(c, env, PI_ENOMEM);
    }
    pack_job j = {wt, w, src, zeros, row_bytes};
    pi_pool_run(c->pool, w->groups, 4, pack_task, &j);
    free(zeros);
    *out = w;
    return pi_leave(c, env, PI_OK);
}

void pi_weight_free(pi_weight *w) {
    if (w) pi_arena_release(w->arena);
    free(w);
}

int64_t pi_weight_bytes(const pi_weight *w) { return (int64_t)w->bytes; }

int pi_gather_rows(pi_ctx *c, const pi_weight *w, const int32_t *ids, int64_t n, float *y) {
    if (!c || !w || n < 0 || (n && (!ids || !y))) return PI_EINVAL;
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= w->rows) return PI_EINVAL;
    pi_fpenv env = pi_enter(c);
    const weight_type *wt = find_type(w->type);
    for (int64_t i = 0; i < n; i++) wt->row(w, ids[i], y + i * w->cols);
    return pi_leave(c, env, PI_OK);
}
