/* Checks that q = fma(fma(-q, d, x), 1 / d, q), from q = x * (1 / d), is x / d correctly rounded (csrc/simd/exp.h, v_share).
 *
 *   cc -O2 -march=native -ffp-contract=off tools/quotients.c -o quotients -lm && ./quotients
 *
 * The inverse, the first q and its remainder are each off by a rounding, so what the last fma rounds is off by less than 2^-22 units
 * of the last place of q, and its result can only be wrong where x / d lies closer than that to the middle of two neighbours. With
 * 24-bit integers X and D, and an odd W for twice the middle, that is X * 2^k = W * D + c with |c| <= 8; k is 24 for X >= D, else 25.
 * So for each D and c the W that make the right side a multiple of 2^k give all such quotients, some 47 million. Exit status 0: all good. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

/* 1 / a modulo 2^64, a odd. */
static uint64_t inverse(uint64_t a) {
    uint64_t x = a;
    for (int i = 0; i < 6; i++) x *= 2 - a * x;
    return x;
}

int main(void) {
    const uint64_t low = 1 << 23, high = 1 << 24;
    uint64_t quotients = 0, failures = 0;
    for (uint64_t d = low; d < high; d++) {
        const int twos = __builtin_ctzll(d); /* 2^twos must divide c, too */
        if (twos > 3) continue;
        const uint64_t of_d = inverse(d >> twos);
        for (int k = 24; k <= 25; k++)
            for (int64_t c = -8; c <= 8; c++) {
                if (c == 0 || c % (1 << twos)) continue;
                const uint64_t step = 1ull << (k - twos), first = -(uint64_t)(c / (1 << twos)) * of_d & (step - 1);
                for (uint64_t w = first; w < 2 * high; w += step) {
                    const uint64_t x = (w * d + (uint64_t)c) >> k;
                    if (w < high || w % 2 == 0 || x < low || x >= high || (x >= d) != (k == 24)) continue;
                    const float fx = (float)x, fd = (float)d, r = 1.0f / fd, q = fx * r;
                    quotients++;
                    if (fmaf(fmaf(-q, fd, fx), r, q) != fx / fd && failures++ < 20) printf("%a / %a\n", (double)fx, (double)fd);
                }
            }
    }
    printf("%" PRIu64 " quotients next to the middle of two neighbours, %" PRIu64 " wrong\n", quotients, failures);
    return failures || quotients < 40000000;
}
