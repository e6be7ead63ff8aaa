/* Reference matmul and activation quantisation. NUMERICS.md section 3: one fold per output, scale groups ascending. */
#include <math.h>

#include "codes.h"
#include "ref.h"

void pi_quantize_ref(const float *x, const pi_act *a, int64_t row) {
    const int64_t first = pi_act_row(a, row);
    float zero = 0.0f; /* or NaN, when x holds NaN or infinity: then so must all that is computed from the row */
    for (int64_t b = 0; b < a->nb; b++) {
        const float *xb = x + b * PI_BLOCK;
        const int64_t at = first + b * a->tile;
        int8_t *q = a->q + at * PI_BLOCK;
        int16_t *q16 = a->q16 + at * PI_BLOCK;
        float amax = 0.0f;
        for (int i = 0; i < PI_BLOCK; i++) amax = fabsf(xb[i]) > amax ? fabsf(xb[i]) : amax;
        if (amax < 0x1p-100f) amax = 0.0f; /* 127 / amax must stay finite */
        float id = amax > 0.0f ? 127.0f / amax : 0.0f;
        int32_t sum[2] = {0, 0};
        for (int i = 0; i < PI_BLOCK; i++) {
            zero = fmaf(xb[i], 0.0f, zero);
            float v = rintf(xb[i] * id);
            int8_t code = v >= -127.0f && v <= 127.0f ? (int8_t)v : 0; /* outside: only after NaN or infinity */
            q[i] = code;
            sum[i / 16] += code;
        }
        for (int i = 0; i < PI_BLOCK; i += 4)
            for (int j = 0; j < 4; j++) q16[i + j] = q[i + (j % 2 * 2 + j / 2)];
        pi_act_scales(a, at, row % a->tile, amax / 127.0f, sum[0], sum[1]);
    }
    if (zero != 0.0f) a->d[first] = zero;
}

/* acc: every output of a kernel's range, by an expression or a statement over row n and token t */
#define EACH_OUTPUT(fold) \
    for (int64_t t = t0; t < t1; t++) \
        for (int64_t n = g0 * PI_LANES; n < pi_min(g1 * PI_LANES, w->rows); n++) y[t * ldy + n] = fold(w, a, n, t);

#define FLOAT(type, T_, widen) \
    static float fold_##type(const pi_weight *w, const pi_act *a, int64_t n, int64_t t) { \
        const T_ *row = (const T_ *)(w->data + n / PI_LANES * w->group_bytes) + n % PI_LANES; \
        float acc = 0.0f; \
        for (int64_t k = 0; k < w->cols; k++) acc = fmaf(widen(row[k * PI_LANES]), a->x[t * w->cols + k], acc); \
        return acc; \
    } \
    void pi_matmul_##type##_ref PI_MATMUL_ARGS { EACH_OUTPUT(fold_##type) }
FLOAT(f32, float, )
FLOAT(f16, uint16_t, pi_f32_of_f16)
FLOAT(bf16, uint16_t, pi_f32_of_bf16)

PI_INLINE float fold_quantised(const pi_format f, const pi_weight *w, const pi_act *a, int64_t n, int64_t t) {
    const uint8_t *group = w->data + n / PI_LANES * w->group_bytes;
    const int r = (int)(n % PI_LANES), halves = PI_SCALE_GROUPS(f), size = PI_BLOCK / halves;
    float acc = 0.0f;
    for (int64_t b = 0; b < a->nb; b++) {
        const int8_t *q = a->q + t * a->cols + b * PI_BLOCK;
        const int64_t at = t * a->nb + b;
        int32_t code[PI_BLOCK];
        pi_codes(f, group, b, r, code);
        for (int half = 0; half < halves; half++) {
            int32_t dot = 0;
            for (int i = half * size; i < (half + 1) * size; i++) dot += code[i] * q[i];
            float s, m;
            pi_scales(f, group, a->nb, b, half, r, &s, &m);
            acc = fmaf((float)dot, s * a->d[at], acc);
            if (PI_HAS_MIN(f)) acc = fmaf(m, a->sx[halves - 1][at * halves + half], acc);
        }
    }
    return acc;
}
#define QUANTISED(stem, ...) \
    static float fold_##stem(const pi_weight *w, const pi_act *a, int64_t n, int64_t t) { \
        return fold_quantised(PI_FORMAT(stem, __VA_ARGS__), w, a, n, t); \
    } \
    void pi_matmul_##stem##_ref PI_MATMUL_ARGS { EACH_OUTPUT(fold_##stem) }
PI_QUANTISED(QUANTISED)
