/* Attention as one writes it first: for each query head transpose its keys, then saxpy rows. It follows csrc/NUMERICS.md section 4, so its
 * bytes are those of csrc/attention.c; bench/attention.py compares both, and their speeds. One query; k, v: [keys][n_kv_heads * dim] f32;
 * scratch: [keys * (dim + 1)]. */
#include "ref/exp.h"

static void saxpy(float *y, const float *x, float a, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

static void softmax(float *s, int64_t n, float scale) {
    float max = -INFINITY, sum = 0.0f;
    for (int64_t t = 0; t < n; t++) s[t] *= scale;
    for (int64_t t = 0; t < n; t++) max = s[t] > max ? s[t] : max;
    for (int64_t t = 0; t < n; t++) s[t] = pi_exp1(s[t] - max);
    for (int64_t t = 0; t < n; t++) sum += s[t];
    for (int64_t t = 0; t < n; t++) s[t] /= sum;
}

void seed_attention(const float *q, const float *k, const float *v, int64_t n_heads, int64_t n_kv_heads, int64_t dim, int64_t keys, float scale,
                    float *scratch, float *out) {
    const int64_t width = n_kv_heads * dim;
    float *s = scratch, *transposed = scratch + keys;
    for (int64_t h = 0; h < n_heads; h++) {
        const int64_t at = h / (n_heads / n_kv_heads) * dim;
        float *y = out + h * dim;
        for (int64_t t = 0; t < keys; t++)
            for (int64_t d = 0; d < dim; d++) transposed[d * keys + t] = k[t * width + at + d];
        memset(s, 0, (size_t)keys * sizeof *s);
        for (int64_t d = 0; d < dim; d++) saxpy(s, transposed + d * keys, q[h * dim + d], keys);
        softmax(s, keys, scale);
        memset(y, 0, (size_t)dim * sizeof *y);
        for (int64_t t = 0; t < keys; t++) saxpy(y, v + t * width + at, s[t], dim);
    }
}
