/* What all kernels share; NUMERICS.md, and its section on Metal. Compiled as one text: the constants of exp (EXP_..), this, then the
 * other files. Buffers: 0 `small`, 1 constants, 2 a table, 3 and on data.
 *
 * A GPU may flush subnormals of binary32, operands and results, to zero. No kernel asks whether it does: each knows from the size of
 * its inputs, or from a result that came out zero, when it might matter, and then sets `small`. The backend computes all that ran
 * with it again on the CPU. Sizes are compared as integers, which nothing flushes. */
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#pragma METAL fp contract(off)
#pragma clang fp contract(off)

#define INLINE static inline __attribute__((always_inline))
#define POWER_OF_TWO(n) (uint(127 + (n)) << 23) /* its bits */

enum { LANES = 16, BLOCK_SIZE = 32, SUPER_SIZE = 256, SIMD = 32 };

INLINE uint magnitude(float x) { return as_type<uint>(x) & 0x7fffffffu; } /* ordered as |x| is; NaN above all */
INLINE bool is_below(float x, uint bits) { return magnitude(x) - 1u < bits - 1u; } /* and not zero */
/* Whether r, a product or quotient of a and b, is less than the smallest normal, or came out so, and is not simply zero. */
INLINE bool is_lost(float r, float a, float b) { return magnitude(r) < POWER_OF_TWO(-126) && magnitude(a) != 0u && magnitude(b) != 0u; }
INLINE void tell(device atomic_uint *small, bool any) {
    if (any) atomic_store_explicit(small, 1u, memory_order_relaxed);
}

/* NUMERICS.md, exp; steps as in ref/exp.h. Flushed subnormals on the way change nothing, a result below 2^-126 may come out 0. */
INLINE float exp_of(float x) {
    x = EXP_MIN > x ? EXP_MIN : x;
    x = EXP_MAX < x ? EXP_MAX : x;
    if (!(x == x)) return x;
    const float n = rint(x * EXP_LOG2E);
    const float r = fma(n, -EXP_LN2_LO, fma(n, -EXP_LN2_HI, x));
    float p = EXP_C6;
    p = fma(p, r, EXP_C5);
    p = fma(p, r, EXP_C4);
    p = fma(p, r, EXP_C3);
    p = fma(p, r, EXP_C2);
    const float a = 1.0f + r;
    const float b = r - (a - 1.0f);
    const float y = a + fma(p * r, r, b);
    const int k = int(n), half_k = k >> 1;
    return y * as_type<float>(uint(half_k + 127) << 23) * as_type<float>(uint(k - half_k + 127) << 23);
}

INLINE float silu_of(float x) { return x / (1.0f + exp_of(-x)); }

/* binary32 to binary16, nearest even, in integers: the steps of pi_f16_of_f32. */
INLINE ushort narrow(float f) {
    const uint u = as_type<uint>(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return ushort(sign | 0x7e00u | (a >> 13 & 0x1ffu));
    if (a >= 0x477ff000u) return ushort(sign | 0x7c00u);
    if (a < 0x33000001u) return ushort(sign);
    const uint man = (a & 0x7fffffu) | 0x800000u, exponent = a >> 23, drop = exponent < 113u ? 126u - exponent : 13u;
    const uint kept = man >> drop, rest = man & ((1u << drop) - 1u), middle = 1u << (drop - 1u);
    const uint rounded = kept + uint(rest > middle || (rest == middle && (kept & 1u) != 0u));
    return ushort(sign | (exponent < 113u ? rounded : rounded + ((exponent - 113u) << 10)));
}
