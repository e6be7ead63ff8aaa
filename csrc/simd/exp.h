/* exp and silu in every lane: the steps of ref/exp.h, one for one. NUMERICS.md section 4, exp. */
#include "../exp_const.h"

PI_INLINE vf v_exp(vf x) {
    x = v_max(v_set1(PI_EXP_MIN), x); /* both give their second operand when it is NaN */
    x = v_min(v_set1(PI_EXP_MAX), x);
    vf n = v_rint(v_mul(x, v_set1(PI_EXP_LOG2E)));
    vf r = v_fma(n, v_set1(-PI_EXP_LN2_LO), v_fma(n, v_set1(-PI_EXP_LN2_HI), x));
    vf p = v_set1(PI_EXP_C6);
    p = v_fma(p, r, v_set1(PI_EXP_C5));
    p = v_fma(p, r, v_set1(PI_EXP_C4));
    p = v_fma(p, r, v_set1(PI_EXP_C3));
    p = v_fma(p, r, v_set1(PI_EXP_C2));
    vf one = v_set1(1.0f), a = v_add(one, r), b = v_sub(r, v_sub(a, one));
    vf y = v_add(a, v_fma(v_mul(p, r), r, b));
    return v_scale2(y, n);
}

/* x / sum, correctly rounded, for x of 0 to 1 and a sum of 1 to 2^31; `inverse` is 1 / sum. After P. Markstein (IBM J. Res. Dev. 34,
 * 1990) one correction by the remainder does it; ../../tools/quotients.c goes through all quotients where it might not. A remainder
 * of less than 2^-90 may not be exact. A division takes three times as long. */
PI_INLINE vf v_share(vf x, vf sum, vf inverse) {
    if (v_any(v_small(x, v_set1(0x1p-90f)))) return v_div(x, sum);
    const vf q = v_mul(x, inverse);
    return v_fma(v_fma(v_neg(q), sum, x), inverse, q);
}

PI_INLINE vf v_silu(vf x) { return v_div(x, v_add(v_set1(1.0f), v_exp(v_neg(x)))); }
