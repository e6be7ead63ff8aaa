/* Reference kernels, one output at a time. NUMERICS.md sections 2 and 4. */
#include <math.h>

#include "exp.h"
#include "ref.h"

void pi_saxpy_ref(float *y, const float *x, float a, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

void pi_softmax_ref(float *const *rows_of, const int64_t *n, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        float *x = rows_of[r], max = -INFINITY, sum = 0.0f;
        for (int64_t i = 0; i < n[r]; i++) max = x[i] > max ? x[i] : max;
        for (int64_t i = 0; i < n[r]; i++) x[i] = pi_exp1(x[i] - max);
        for (int64_t i = 0; i < n[r]; i++) sum += x[i];
        for (int64_t i = 0; i < n[r]; i++) x[i] /= sum;
    }
}

void pi_rms_norm_ref(const float *x, const float *w, int64_t rows, int64_t n, float eps, float *y) {
    for (int64_t r = 0; r < rows; r++, x += n, y += n) {
        float ss = 0.0f;
        for (int64_t i = 0; i < n; i++) ss = fmaf(x[i], x[i], ss);
        float scale = 1.0f / sqrtf(ss / (float)n + eps);
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
    }
}

void pi_swiglu_ref(const float *gate, const float *up, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = pi_silu1(gate[i]) * up[i];
}

void pi_silu_ref(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = pi_silu1(x[i]);
}

void pi_exp_ref(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = pi_exp1(x[i]);
}

void pi_add_ref(const float *a, const float *b, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}

void pi_mul_ref(const float *a, const float *b, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = a[i] * b[i];
}

/* Pair i of a head is (2i, 2i + 1), or (i, i + rot / 2) in the NEOX style; what lies beyond rot passes through. */
void pi_rope_ref(const float *x, const float *cos, const float *sin, int64_t heads, int64_t dim, int64_t rot, int neox, float *y) {
    int64_t first = neox ? 1 : 2, second = neox ? rot / 2 : 1;
    for (int64_t h = 0; h < heads; h++, x += dim, y += dim) {
        for (int64_t i = 0; i < rot / 2; i++) {
            float x0 = x[i * first], x1 = x[i * first + second];
            y[i * first] = fmaf(x0, cos[i], -(x1 * sin[i]));
            y[i * first + second] = fmaf(x0, sin[i], x1 * cos[i]);
        }
        for (int64_t i = rot; i < dim; i++) y[i] = x[i];
    }
}

void pi_narrow_ref(const float *x, int64_t n, uint16_t *y) {
    for (int64_t i = 0; i < n; i++) y[i] = pi_f16_of_f32(x[i]);
}

void pi_widen_ref(const uint16_t *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; i++) y[i] = pi_f32_of_f16(x[i]);
}
