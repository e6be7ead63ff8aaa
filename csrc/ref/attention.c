/* Reference attention pieces over K tiles and V rows. NUMERICS.md section 4. */
#include <math.h>

#include "codes.h"
#include "exp.h"
#include "ref.h"

/* Value d of key t of a run of tiles; of the V row at `row`. */
static float key_f32(const uint8_t *k, int64_t dim, int64_t t, int64_t d) {
    return ((const float *)k)[(t / PI_LANES * dim + d) * PI_LANES + t % PI_LANES];
}
static float key_f16(const uint8_t *k, int64_t dim, int64_t t, int64_t d) {
    return pi_half_at(k, (int)((t / PI_LANES * dim + d) * PI_LANES + t % PI_LANES));
}
static float key_q8_0(const uint8_t *k, int64_t dim, int64_t t, int64_t d) {
    const uint8_t *tile = k + t / PI_LANES * PI_LANES * (dim + dim / PI_BLOCK * 2);
    const float s = pi_half_at(tile + PI_LANES * dim, (int)(d / PI_BLOCK * PI_LANES + t % PI_LANES));
    return s * (float)(int8_t)tile[d * PI_LANES + t % PI_LANES];
}
static float value_f32(const uint8_t *row, int64_t dim, int64_t d) { return (void)dim, ((const float *)row)[d]; }
static float value_f16(const uint8_t *row, int64_t dim, int64_t d) { return (void)dim, pi_half_at(row, (int)d); }
static float value_q8_0(const uint8_t *row, int64_t dim, int64_t d) {
    return pi_half_at(row + dim, (int)(d / PI_BLOCK)) * (float)(int8_t)row[d];
}

#define ATTENTION(type) \
    void pi_scores_##type##_ref PI_SCORES_ARGS { \
        for (int64_t r = 0; r < rows; r++) \
            for (int64_t t = 0; t < n; t++) { \
                float acc = 0.0f; \
                for (int64_t d = 0; d < dim; d++) acc = fmaf(q[r * ldq + d], key_##type(k, dim, t, d), acc); \
                s[r * lds + t] = acc * scale; \
            } \
    } \
    void pi_context_##type##_ref PI_CONTEXT_ARGS { \
        for (int64_t r = 0; r < rows; r++) \
            for (int64_t d = d0; d < d1; d++) { \
                float acc = out[r * ldo + d]; \
                for (int64_t t = 0; t < n; t++) \
                    acc = fmaf(p[r * ldp + t], value_##type((const uint8_t *)v + t * ldv, dim, d), acc); \
                out[r * ldo + d] = acc; \
            } \
    }
ATTENTION(f32)
ATTENTION(f16)
ATTENTION(q8_0)

static bool sees(const pi_rows *b, int64_t r, int64_t t) { return t >= b->from[r] && t < b->to[r]; }

void pi_rows_exp_ref(const pi_rows *b, int64_t n) {
    for (int64_t r = 0; r < b->rows; r++) {
        b->sum[r] = 0.0f;
        for (int64_t t = 0; t < n; t++)
            if (sees(b, r, t)) b->sum[r] += b->s[t * b->ld + r] = pi_exp1(b->s[t * b->ld + r] - b->max[r]);
    }
}

#define ROWS(type) \
    void pi_rows_scores_##type##_ref PI_ROWS_SCORES_ARGS { \
        (void)next, (void)next_bytes; \
        for (int64_t i = 0; i < PI_LANES; i++) \
            for (int64_t r = 0; r < b->rows; r++) { \
                float acc = 0.0f; \
                for (int64_t d = 0; d < b->dim; d++) acc = fmaf(b->q[d * b->ld + r], key_##type(k, b->dim, i, d), acc); \
                acc *= b->scale; \
                b->s[(t + i) * b->ld + r] = acc; \
                if (sees(b, r, t + i) && acc > b->max[r]) b->max[r] = acc; \
            } \
    } \
    void pi_rows_context_##type##_ref PI_ROWS_CONTEXT_ARGS { \
        (void)next, (void)next_bytes; \
        for (int64_t i = 0; i < n; i++, v += ldv) \
            for (int64_t r = 0; r < b->rows; r++) { \
                if (!sees(b, r, t + i)) continue; \
                const float p = b->s[(t + i) * b->ld + r] / b->sum[r]; \
                for (int64_t d = 0; d < b->dim; d++) b->out[d * b->ld + r] = fmaf(p, value_##type(v, b->dim, d), b->out[d * b->ld + r]); \
            } \
    }
ROWS(f32)
ROWS(f16)
ROWS(q8_0)
