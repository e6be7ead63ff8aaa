/* What the x86-64 kernel files share. */
#ifndef PI_X86_H
#define PI_X86_H

#include "../pi.h"

/* Four bytes at any address, through any alias. */
typedef uint32_t pi_u32 __attribute__((may_alias, aligned(1)));

/* Holds a vector in a register here: else gcc regroups integer sums of an unrolled block and spills them all. */
#define PI_KEEP(v) __asm__("" : "+v"(v))

/* A matmul kernel from a tile function: R row groups by T tokens, then what is left of the tokens by narrower tiles; a
 * single token takes R1 row groups at once, whose independent folds hide the latency of one. */
#define PI_TILED(name, tile, R, T, R1) \
    void name PI_MATMUL_ARGS { \
        if (t1 - t0 > 1) \
            for (int64_t g = g0; g < g1; g += R) { \
                int64_t t = t0; \
                for (; t + T <= t1; t += T) tile(w, a, g, g1 - 1, t, y, ldy, R, T); \
                for (; t + 2 <= t1; t += 2) tile(w, a, g, g1 - 1, t, y, ldy, R, 2); \
                if (t < t1) tile(w, a, g, g1 - 1, t, y, ldy, R, 1); \
            } \
        else \
            for (int64_t g = g0; g < g1; g += R1) tile(w, a, g, g1 - 1, t0, y, ldy, R1, 1); \
    }

#endif
