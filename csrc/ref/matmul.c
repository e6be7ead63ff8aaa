/* Reference matmul and activation quantisation. NUMERICS.md section 3: one fold per output, blocks ascending. */
#include <math.h>

#include "ref.h"

void pi_quantize_ref(const float *x, const pi_act *a, int64_t row) {
    float zero = 0.0f; /* or NaN, when x holds NaN or infinity: then so must all that is computed from the row */
    for (int64_t b = 0; b < a->nb; b++) {
        const float *xb = x + b * PI_BLOCK;
        int64_t at = row * a->nb + b, first = row * a->cols + b * PI_BLOCK;
        float amax = 0.0f;
        for (int i = 0; i < PI_BLOCK; i++) amax = fabsf(xb[i]) > amax ? fabsf(xb[i]) : amax;
        if (amax < 0x1p-100f) amax = 0.0f; /* 127 / amax must stay finite */
        float id = amax > 0.0f ? 127.0f / amax : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < PI_BLOCK; i++) {
            zero = fmaf(xb[i], 0.0f, zero);
            float v = rintf(xb[i] * id);
            int8_t code = v >= -127.0f && v <= 127.0f ? (int8_t)v : 0; /* outside: only after NaN or infinity */
            a->q[first + i] = code;
            sum += code;
        }
        for (int i = 0; i < PI_BLOCK; i += 4)
            for (int j = 0; j < 4; j++) a->q16[first + i + j] = a->q[first + i + (j % 2 * 2 + j / 2)];
        a->d[at] = amax / 127.0f;
        a->sx[at] = (float)sum * a->d[at];
        a->off[at] = -128 * sum;
    }
    if (zero != 0.0f) a->d[row * a->nb] = zero;
}

void pi_matmul_f32_ref(const pi_weight *w, const pi_act *a, int64_t g0, int64_t g1, int64_t t0, int64_t t1, float *y, int64_t ldy) {
    for (int64_t t = t0; t < t1; t++)
        for (int64_t n = g0 * PI_LANES; n < pi_min(g1 * PI_LANES, w->rows); n++) {
            const float *row = (const float *)(w->data + n / PI_LANES * w->group_bytes) + n % PI_LANES;
            float acc = 0.0f;
            for (int64_t k = 0; k < w->cols; k++) acc = fmaf(row[k * PI_LANES], a->x[t * w->cols + k], acc);
            y[t * ldy + n] = acc;
        }
}

void pi_matmul_f16_ref(const pi_weight *w, const pi_act *a, int64_t g0, int64_t g1, int64_t t0, int64_t t1, float *y, int64_t ldy) {
    for (int64_t t = t0; t < t1; t++)
        for (int64_t n = g0 * PI_LANES; n < pi_min(g1 * PI_LANES, w->rows); n++) {
            const uint16_t *row = (const uint16_t *)(w->data + n / PI_LANES * w->group_bytes) + n % PI_LANES;
            float acc = 0.0f;
            for (int64_t k = 0; k < w->cols; k++)
                acc = fmaf(pi_f32_of_f16(row[k * PI_LANES]), a->x[t * w->cols + k], acc);
            y[t * ldy + n] = acc;
        }
}

void pi_matmul_q8_0_ref(const pi_weight *w, const pi_act *a, int64_t g0, int64_t g1, int64_t t0, int64_t t1, float *y, int64_t ldy) {
    for (int64_t t = t0; t < t1; t++)
        for (int64_t n = g0 * PI_LANES; n < pi_min(g1 * PI_LANES, w->rows); n++) {
            const uint8_t *group = w->data + n / PI_LANES * w->group_bytes;
            const uint16_t *d = (const uint16_t *)(group + a->nb * 512);
            int r = (int)(n % PI_LANES);
            float acc = 0.0f;
            for (int64_t b = 0; b < a->nb; b++) {
                const int8_t *code = (const int8_t *)group + b * 512 + r * 4, *q = a->q + t * a->cols + b * PI_BLOCK;
                int32_t dot = 0;
                for (int i = 0; i < PI_BLOCK; i++) dot += code[i / 4 * 64 + i % 4] * q[i];
                acc = fmaf((float)dot, pi_f32_of_f16(d[b * PI_LANES + r]) * a->d[t * a->nb + b], acc);
            }
            y[t * ldy + n] = acc;
        }
}

void pi_matmul_q4_1_ref(const pi_weight *w, const pi_act *a, int64_t g0, int64_t g1, int64_t t0, int64_t t1, float *y, int64_t ldy) {
    for (int64_t t = t0; t < t1; t++)
        for (int64_t n = g0 * PI_LANES; n < pi_min(g1 * PI_LANES, w->rows); n++) {
            const uint8_t *group = w->data + n / PI_LANES * w->group_bytes;
            const uint16_t *dm = (const uint16_t *)(group + a->nb * 256);
            int r = (int)(n % PI_LANES);
            float acc = 0.0f;
            for (int64_t b = 0; b < a->nb; b++) {
                const uint8_t *code = group + b * 256 + r * 4;
                const int8_t *q = a->q + t * a->cols + b * PI_BLOCK;
                int32_t dot = 0;
                for (int i = 0; i < 16; i++) {
                    int byte = code[i / 4 * 64 + i % 4];
                    dot += (byte & 15) * q[i] + (byte >> 4) * q[16 + i];
                }
                float s = pi_f32_of_f16(dm[b * 32 + r]), m = pi_f32_of_f16(dm[b * 32 + 16 + r]);
                acc = fmaf((float)dot, s * a->d[t * a->nb + b], acc);
                acc = fmaf(m, a->sx[t * a->nb + b], acc);
            }
            y[t * ldy + n] = acc;
        }
}
