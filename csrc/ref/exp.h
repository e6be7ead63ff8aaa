/* exp of one value, as NUMERICS.md (exp) states it; the vector levels do these steps in every lane. */
#ifndef PI_REF_EXP_H
#define PI_REF_EXP_H

#include <math.h>

#include "../exp_const.h"
#include "../pi.h"

PI_INLINE float pi_exp1(float x) {
    x = PI_EXP_MIN > x ? PI_EXP_MIN : x; /* a NaN passes through both */
    x = PI_EXP_MAX < x ? PI_EXP_MAX : x;
    if (!(x == x)) return x; /* its conversion to int would be undefined in C */
    float n = rintf(x * PI_EXP_LOG2E);
    float r = fmaf(n, -PI_EXP_LN2_LO, fmaf(n, -PI_EXP_LN2_HI, x));
    float p = PI_EXP_C6;
    p = fmaf(p, r, PI_EXP_C5);
    p = fmaf(p, r, PI_EXP_C4);
    p = fmaf(p, r, PI_EXP_C3);
    p = fmaf(p, r, PI_EXP_C2);
    float a = 1.0f + r;
    float b = r - (a - 1.0f); /* what the sum a lost: exact */
    float y = a + fmaf(p * r, r, b);
    int k = (int)n, half = k >> 1; /* in two steps: 2^k itself may lie outside binary32 */
    return y * pi_f32_of_bits((uint32_t)(half + 127) << 23) * pi_f32_of_bits((uint32_t)(k - half + 127) << 23);
}

PI_INLINE float pi_silu1(float x) { return x / (1.0f + pi_exp1(-x)); }

#endif
