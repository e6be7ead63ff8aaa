/* Rope: tables of cos and sin by a float64 procedure of + - * / only, and the op that applies them.
 * NUMERICS.md section 4, rope. Angles are kept as the unevaluated sum of two doubles (T. J. Dekker, 1971; D. E. Knuth,
 * TAOCP 2, 4.2.2), so that the tables stay within one ulp at positions in the millions. */
#include <math.h>
#include <stdlib.h>

#include "ctx.h"

typedef struct {
    double hi, lo;
} dd;

static dd two_sum(double a, double b) {
    double s = a + b, v = s - a;
    return (dd){s, (a - (s - v)) + (b - v)};
}
static dd quick_two_sum(double a, double b) { /* |a| >= |b| */
    double s = a + b;
    return (dd){s, b - (s - a)};
}
static dd two_prod(double a, double b) {
    double ca = 134217729.0 * a, cb = 134217729.0 * b; /* 2^27 + 1 splits 53 bits in halves */
    double ah = ca - (ca - a), al = a - ah, bh = cb - (cb - b), bl = b - bh;
    double p = a * b;
    return (dd){p, ((ah * bh - p) + ah * bl + al * bh) + al * bl};
}
static dd dd_mul(dd a, dd b) {
    dd p = two_prod(a.hi, b.hi);
    return quick_two_sum(p.hi, p.lo + (a.hi * b.lo + a.lo * b.hi));
}
static dd dd_mul1(dd a, double b) {
    dd p = two_prod(a.hi, b);
    return quick_two_sum(p.hi, p.lo + a.lo * b);
}
static dd dd_sub(dd a, dd b) {
    dd s = two_sum(a.hi, -b.hi);
    return quick_two_sum(s.hi, s.lo + (a.lo - b.lo));
}
static dd dd_add(dd a, dd b) { return dd_sub(a, (dd){-b.hi, -b.lo}); }
static dd dd_div1(dd a, double b) {
    double q = a.hi / b;
    dd r = dd_sub(a, two_prod(q, b));
    return quick_two_sum(q, (r.hi + r.lo) / b);
}

/* base^(-1/n): bisection in double, then Newton's y += y (1 - base y^n) / n in double-double. */
static dd inverse_root(double base, int64_t n) {
    double lo = 0.0, hi = 1.0;
    for (int i = 0; i < 64; i++) {
        double mid = (lo + hi) / 2.0, p = base;
        for (int64_t j = 0; j < n; j++) p = p * mid;
        if (p < 1.0)
            lo = mid;
        else
            hi = mid;
    }
    dd y = {hi, 0.0};
    for (int i = 0; i < 4; i++) {
        dd p = {base, 0.0};
        for (int64_t j = 0; j < n; j++) p = dd_mul(p, y);
        y = dd_add(y, dd_div1(dd_mul(y, dd_sub((dd){1.0, 0.0}, p)), (double)n));
    }
    return y;
}

/* Taylor series about 0 for |r.hi| <= pi / 4, the low part of r to first order. */
static void sin_cos(dd r, double *sin, double *cos) {
    double x = r.hi, z = x * x, s = 1.0, c = 1.0;
    for (int k = 17; k >= 3; k -= 2) s = 1.0 - z / (double)(k * (k - 1)) * s;
    for (int k = 18; k >= 2; k -= 2) c = 1.0 - z / (double)(k * (k - 1)) * c;
    s = x * s;
    *sin = s + r.lo * c;
    *cos = c - r.lo * s;
}

static void angle(dd frequency, int64_t position, float *cos, float *sin) {
    static const dd half_pi = {0x1.921fb54442d18p+0, 0x1.1a62633145c07p-54};
    dd a = dd_mul1(frequency, (double)position);
    double k = rint(a.hi / half_pi.hi), s, c;
    sin_cos(dd_sub(a, dd_mul1(half_pi, k)), &s, &c);
    switch ((int64_t)k & 3) {
    case 0: *cos = (float)c, *sin = (float)s; break;
    case 1: *cos = (float)-s, *sin = (float)c; break;
    case 2: *cos = (float)-c, *sin = (float)-s; break;
    case 3: *cos = (float)s, *sin = (float)-c; break;
    }
}

int pi_rope_table(int64_t first, int64_t n, int64_t rot, double base, double scale, const float *factors, float *cos, float *sin) {
    if (first < 0 || n < 0 || n > (int64_t)1 << 32 || first > ((int64_t)1 << 32) - n || rot < 2 || rot % 2 || rot > 4096) return PI_EINVAL;
    if (!(base > 1.0) || !(base < 0x1p100) || !(scale >= 0x1p-20) || isinf(scale) || (n && (!cos || !sin))) return PI_EINVAL;
    for (int64_t i = 0; factors && i < rot / 2; i++)
        if (!(factors[i] > 0.0f) || isinf(factors[i])) return PI_EINVAL;
    pi_fpenv env = pi_fpenv_get();
    pi_fpenv_set();
    int64_t half = rot / 2;
    dd step = inverse_root(base, half), power = {1.0, 0.0};
    for (int64_t i = 0; i < half; i++, power = dd_mul(power, step)) {
        dd frequency = dd_div1(power, scale);
        if (factors) frequency = dd_div1(frequency, (double)factors[i]);
        for (int64_t p = 0; p < n; p++) angle(frequency, first + p, cos + p * half + i, sin + p * half + i);
    }
    pi_fpenv_put(env);
    return PI_OK;
}

typedef struct {
    const pi_table *t;
    const float *x, *cos, *sin;
    float *y;
    int64_t heads, dim, rot;
    int neox;
} rope_job;

static void rope_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const rope_job *j = arg;
    int64_t row = j->heads * j->dim, half = j->rot / 2;
    (void)slot;
    for (int64_t t = lo; t < hi; t++)
        j->t->rope(j->x + t * row, j->cos + t * half, j->sin + t * half, j->heads, j->dim, j->rot, j->neox, j->y + t * row);
}

int pi_rope(pi_ctx *c, const float *x, int64_t tokens, int64_t heads, int64_t head_dim, int64_t rot, int neox,
            const float *cos, const float *sin, int64_t n_pos, int64_t first, float *y) {
    if (!c || first < 0 || tokens < 0 || n_pos < 0 || tokens > n_pos - first) return PI_EINVAL;
    if (heads < 1 || head_dim < 2 || rot < 2 || rot % 2 || rot > head_dim) return PI_EINVAL;
    if (tokens && (!x || !cos || !sin || !y || x == y)) return PI_EINVAL;
    pi_fpenv env = pi_enter(c);
    rope_job j = {&c->t, x, cos + first * (rot / 2), sin + first * (rot / 2), y, heads, head_dim, rot, neox};
    pi_pool_run(c->pool, tokens, pi_max(1, PI_FORK_VALUES / (heads * head_dim)), rope_task, &j);
    return pi_leave(c, env, PI_OK);
}
