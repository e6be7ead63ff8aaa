/* Elementwise and row kernels over vectors of V lanes: lane = another output. Written once; each level includes it
 * inside its target region after its vec_<isa>.h. LEVEL(name) appends the level's name. NUMERICS.md sections 2 and 4. */
#include <math.h>

/* for each vector of outputs i..i+V, then the tail: `n` lanes, the rest not read or written */
#define V_FOR(i, n, body, tail) \
    do { \
        int64_t i = 0; \
        for (; i + V <= (n); i += V) body; \
        if (i < (n)) { \
            const int left = (int)((n)-i); \
            tail; \
        } \
    } while (0)
#define V_MAP1(y, x, n, f) \
    V_FOR(i, n, v_store(y + i, f(v_load(x + i))), v_store_n(y + i, f(v_load_n(x + i, left)), left))
#define V_MAP2(y, a, b, n, f) \
    V_FOR(i, n, v_store(y + i, f(v_load(a + i), v_load(b + i))), \
          v_store_n(y + i, f(v_load_n(a + i, left), v_load_n(b + i, left)), left))

void LEVEL(pi_saxpy)(float *y, const float *x, float a, int64_t n) {
    const vf va = v_set1(a);
    V_FOR(i, n, v_store(y + i, v_fma(va, v_load(x + i), v_load(y + i))),
          v_store_n(y + i, v_fma(va, v_load_n(x + i, left), v_load_n(y + i, left)), left));
}

PI_INLINE vf v_swiglu(vf gate, vf up) { return v_mul(v_silu(gate), up); }
void LEVEL(pi_swiglu)(const float *gate, const float *up, int64_t n, float *y) { V_MAP2(y, gate, up, n, v_swiglu); }
void LEVEL(pi_silu)(const float *x, int64_t n, float *y) { V_MAP1(y, x, n, v_silu); }
void LEVEL(pi_exp)(const float *x, int64_t n, float *y) { V_MAP1(y, x, n, v_exp); }
void LEVEL(pi_add)(const float *a, const float *b, int64_t n, float *y) { V_MAP2(y, a, b, n, v_add); }
void LEVEL(pi_mul)(const float *a, const float *b, int64_t n, float *y) { V_MAP2(y, a, b, n, v_mul); }

void LEVEL(pi_narrow)(const float *x, int64_t n, uint16_t *y) {
    V_FOR(i, n, v_store_f16(y + i, v_load(x + i)), v_store_f16_n(y + i, v_load_n(x + i, left), left));
}
void LEVEL(pi_widen)(const uint16_t *x, int64_t n, float *y) {
    V_FOR(i, n, v_store(y + i, v_load_f16(x + i)), v_store_n(y + i, v_load_n_f16(x + i, left), left));
}

/* A sum is one sequential fold, so its speed is the latency of an addition; the folds of several rows run side by side. Rows
 * x[r][0..n[r]): as far as all of them go together, then each to its end. */
PI_INLINE float step_sum(float x, float acc) { return acc + x; }
PI_INLINE float step_squares(float x, float acc) { return __builtin_fmaf(x, x, acc); }
#define FOLD_SOME(step, x, n, R, acc) /* R rows side by side, as far as all go */ \
    do { \
        const float *p_[R]; \
        int64_t all_ = n[0]; \
        PI_UNROLL for (int r = 0; r < R; r++) acc[r] = 0.0f, p_[r] = x[r], all_ = pi_min(all_, n[r]); \
        for (int64_t i = 0; i < all_; i++) \
            PI_UNROLL for (int r = 0; r < R; r++) acc[r] = step(p_[r][i], acc[r]); \
        for (int r = 0; r < R; r++) \
            for (int64_t i = all_; i < n[r]; i++) acc[r] = step(p_[r][i], acc[r]); \
    } while (0)
#define FOLD_ROWS(step, x, n, rows, acc) \
    do { \
        int at_ = 0; \
        for (; at_ + PI_FOLDS <= rows; at_ += PI_FOLDS) FOLD_SOME(step, (x + at_), (n + at_), PI_FOLDS, (acc + at_)); \
        for (; at_ + 4 <= rows; at_ += 4) FOLD_SOME(step, (x + at_), (n + at_), 4, (acc + at_)); \
        for (; at_ + 2 <= rows; at_ += 2) FOLD_SOME(step, (x + at_), (n + at_), 2, (acc + at_)); \
        if (at_ < rows) FOLD_SOME(step, (x + at_), (n + at_), 1, (acc + at_)); \
    } while (0)

void LEVEL(pi_softmax)(float *const *x, const int64_t *n, int64_t rows) {
    for (; rows > 0; x += PI_FOLDS, n += PI_FOLDS, rows -= PI_FOLDS) {
        const int few = (int)pi_min(rows, PI_FOLDS);
        for (int r = 0; r < few; r++) {
            float *row = x[r], max = -INFINITY;
            vf m = v_set1(-INFINITY);
            int64_t whole = n[r] / V * V;
            for (int64_t i = 0; i < whole; i += V) m = v_max(m, v_load(row + i));
            for (int64_t i = whole; i < n[r]; i++) max = row[i] > max ? row[i] : max;
            max = v_max_across(m) > max ? v_max_across(m) : max;
            m = v_set1(max);
            V_FOR(i, n[r], v_store(row + i, v_exp(v_sub(v_load(row + i), m))),
                  v_store_n(row + i, v_exp(v_sub(v_load_n(row + i, left), m)), left));
        }
        float sum[PI_FOLDS];
        FOLD_ROWS(step_sum, x, n, few, sum);
        for (int r = 0; r < few; r++) {
            float *row = x[r];
            const vf s = v_set1(sum[r]), inverse = v_set1(1.0f / sum[r]);
            V_FOR(i, n[r], v_store(row + i, v_share(v_load(row + i), s, inverse)),
                  v_store_n(row + i, v_share(v_load_n(row + i, left), s, inverse), left));
        }
    }
}

void LEVEL(pi_rms_norm)(const float *x, const float *w, int64_t rows, int64_t n, float eps, float *y) {
    for (int64_t r0 = 0; r0 < rows; r0 += PI_FOLDS) {
        const int few = (int)pi_min(rows - r0, PI_FOLDS);
        const float *row[PI_FOLDS];
        int64_t length[PI_FOLDS];
        for (int r = 0; r < few; r++) row[r] = x + (r0 + r) * n, length[r] = n;
        float ss[PI_FOLDS];
        FOLD_ROWS(step_squares, row, length, few, ss);
        for (int r = 0; r < few; r++) {
            float *out = y + (r0 + r) * n;
            const vf s = v_set1(1.0f / sqrtf(ss[r] / (float)n + eps));
            V_FOR(i, n, v_store(out + i, v_mul(v_mul(v_load(row[r] + i), s), v_load(w + i))),
                  v_store_n(out + i, v_mul(v_mul(v_load_n(row[r] + i, left), s), v_load_n(w + i, left)), left));
        }
    }
}

/* The compiler turns these plain loops into vectors of pairs: no output shares an operation with another. */
void LEVEL(pi_rope)(const float *x, const float *cos, const float *sin, int64_t heads, int64_t dim, int64_t rot, int neox, float *y) {
    const int64_t half = rot / 2;
    for (int64_t h = 0; h < heads; h++, x += dim, y += dim) {
        if (neox)
            for (int64_t i = 0; i < half; i++) {
                float x0 = x[i], x1 = x[half + i];
                y[i] = __builtin_fmaf(x0, cos[i], -(x1 * sin[i]));
                y[half + i] = __builtin_fmaf(x0, sin[i], x1 * cos[i]);
            }
        else
            for (int64_t i = 0; i < half; i++) {
                float x0 = x[2 * i], x1 = x[2 * i + 1];
                y[2 * i] = __builtin_fmaf(x0, cos[i], -(x1 * sin[i]));
                y[2 * i + 1] = __builtin_fmaf(x0, sin[i], x1 * cos[i]);
            }
        for (int64_t i = rot; i < dim; i++) y[i] = x[i];
    }
}

void LEVEL(pi_quantize)(const float *x, const pi_act *a, int64_t row) {
    /* So many blocks at a time, since the steps of one hang on each other for longer than they keep the machine busy. */
    enum { BLOCKS = 16, PARTS = PI_BLOCK / V };
    const int64_t first = pi_act_row(a, row), t = row % a->tile;
    vf zeros = v_set1(0.0f); /* or NaN, when x holds NaN or infinity: then so must all that is computed from the row */
    for (int64_t b0 = 0; b0 < a->nb; b0 += BLOCKS, x += BLOCKS * PI_BLOCK) {
        const int n = (int)pi_min(BLOCKS, a->nb - b0);
        float amax[BLOCKS] = {0}, id[BLOCKS], dx[BLOCKS];
        for (int b = 0; b < n; b++) {
            vf m = v_set1(0.0f);
            PI_UNROLL for (int i = 0; i < PARTS; i++) {
                const vf v = v_load(x + b * PI_BLOCK + i * V);
                m = v_max(m, v_abs(v));
                zeros = v_fma(v, v_set1(0.0f), zeros);
            }
            amax[b] = v_max_across(m);
        }
        for (int b = 0; b < BLOCKS; b += V) {
            const vf top = v_load(amax + b), m = v_select(v_small(top, v_set1(0x1p-100f)), v_set1(0.0f), top);
            v_store(id + b, v_select(v_small(m, v_set1(INFINITY)), v_div(v_set1(127.0f), m), v_set1(0.0f)));
            v_store(dx + b, v_div(m, v_set1(127.0f)));
        }
        for (int b = 0; b < n; b++) {
            const int64_t at = first + (b0 + b) * a->tile;
            int32_t sum[2] = {0, 0};
            PI_UNROLL for (int i = 0; i < PARTS; i++) {
                /* The bounds change no number; they keep what comes of NaN within a byte. */
                const vf v = v_mul(v_load(x + b * PI_BLOCK + i * V), v_set1(id[b]));
                const vi code = v_to_int(v_min(v_max(v, v_set1(-127.0f)), v_set1(127.0f)));
                v_store_codes(a->q + at * PI_BLOCK + i * V, a->q16 + at * PI_BLOCK + i * V, code);
                sum[i * V / 16] += v_sum(code);
            }
            pi_act_scales(a, at, t, dx[b], sum[0], sum[1]);
        }
    }
    float lane[V], zero = 0.0f;
    v_store(lane, zeros);
    for (int i = 0; i < V; i++) zero += lane[i];
    if (zero != 0.0f) a->d[first] = zero;
}
