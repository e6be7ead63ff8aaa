"""Derives the constants of exp in binary32: range reduction and polynomial. Needs mpmath; prints
`csrc/exp_const.h`.

    exp(x) = 2^n * e^r,  n = rint(x * LOG2E),  r = x - n * ln 2,  |r| <= ln 2 / 2
    e^r    = 1 + r + r^2 * q(r),  q of degree 4, the Chebyshev fit of (e^r - 1 - r) / r^2

ln 2 is split so that n * LN2_HI is exact for every n in use (LN2_HI has 15 significant bits, |n| < 2^8).
"""

import struct

from mpmath import chebyfit, exp, ln, mp, mpf

mp.prec = 200


def f32(x: mpf) -> float:
    """x rounded once to binary32."""
    return struct.unpack("<f", struct.pack("<f", float(x)))[0]


def q(r: mpf) -> mpf:
    # Near 0 the quotient cancels; its Taylor series does not.
    if abs(r) < mpf(2) ** -30:
        return mpf(1) / 2 + r / 6
    return (exp(r) - 1 - r) / r**2


half = ln(2) / 2 * (1 + mpf(2) ** -12)  # r may overshoot by the rounding of x * LOG2E
coefficients = chebyfit(q, [-half, half], 5)
ln2_hi = mpf(int(ln(2) * 2**15)) / 2**15
constants = {
    "PI_EXP_LOG2E": 1 / ln(2),
    "PI_EXP_LN2_HI": ln2_hi,
    "PI_EXP_LN2_LO": ln(2) - ln2_hi,
    **{f"PI_EXP_C{6 - i}": c for i, c in enumerate(coefficients)},
    # Outside these the result is 0 or infinity; inside, n stays within [-150, 128].
    "PI_EXP_MIN": mpf(-104),
    "PI_EXP_MAX": mpf(89),
}

print("/* Constants of exp, written by gen/exp.py. Section: NUMERICS.md, exp. */")
print("#ifndef PI_EXP_CONST_H\n#define PI_EXP_CONST_H")
for name, value in constants.items():
    mantissa, _, exponent = f32(value).hex().partition("p")
    print(f"#define {name:<14} ({mantissa.rstrip('0').rstrip('.')}p{exponent}f)")
print("#endif")
