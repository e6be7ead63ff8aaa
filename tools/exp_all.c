/* Checks exp (csrc/ref/exp.h) over binary32 inputs: at most one ulp off, never descending, exact ends.
 *
 *   cc -O2 -march=native -ffp-contract=off -Icsrc tools/exp_all.c -o exp_all -pthread -lm
 *   ./exp_all [FIRST END [THREADS]]     bit patterns FIRST..END-1, default 0 and 0x100000000: all of them
 *
 * The yardstick is the C library's double exp, whose error of about 2^-52 is far below the 2^-24 at stake. Within one
 * sign bit patterns ascend with magnitude, so each input is compared with the one before it; the two signs meet at 0,
 * where both give 1. Exit status 0: all good. */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "ref/exp.h"

enum { CHUNK = 1 << 20, MAX_THREADS = 256, SHOWN = 20 };

static uint64_t end, next_chunk;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double worst;
static uint32_t worst_at;
static uint64_t inputs, not_rounded, failures;

static void fail(const char *what, uint32_t bits, float y) {
    pthread_mutex_lock(&lock);
    if (failures++ < SHOWN)
        printf("%s: exp(%a) = %a, input bits 0x%08" PRIx32 "\n", what, (double)pi_f32_of_bits(bits), (double)y, bits);
    pthread_mutex_unlock(&lock);
}

/* The distance of two float32 neighbours about e. */
static double unit(double e) {
    int exponent;
    frexp(e, &exponent);
    return ldexp(1.0, exponent - 24 < -149 ? -149 : exponent - 24);
}

static void check(uint64_t lo, uint64_t hi) {
    double most = 0.0;
    uint32_t most_at = (uint32_t)lo;
    uint64_t off_nearest = 0;
    for (uint64_t b = lo; b < hi; b++) {
        uint32_t bits = (uint32_t)b;
        float x = pi_f32_of_bits(bits), y = pi_exp1(x);
        if (x != x) {
            if (y == y) fail("NaN is lost", bits, y);
            continue;
        }
        double e = exp((double)x);
        if (e > 0x1.fffffep+127) { /* above the largest binary32: infinity, or the largest where that is nearer */
            if (y != INFINITY && (e >= 0x1.ffffffp+127 || y != 0x1.fffffep+127f)) fail("not infinite", bits, y);
        } else if (x <= -104.0f) {
            if (y != 0.0f || signbit(y)) fail("not +0", bits, y);
        } else {
            double ulps = fabs((double)y - e) / unit(e);
            if (!(ulps <= 1.0)) fail("more than one ulp", bits, y);
            if (ulps > most) most = ulps, most_at = bits;
            off_nearest += y != (float)e;
        }
        if (x == 0.0f && y != 1.0f) fail("not 1", bits, y);
        if (bits & 0x7fffffff) { /* its neighbour on the side of 0 */
            float before = pi_exp1(pi_f32_of_bits(bits - 1));
            if (x > 0.0f ? y < before : y > before) fail("descends", bits, y);
        }
    }
    pthread_mutex_lock(&lock);
    inputs += hi - lo;
    not_rounded += off_nearest;
    if (most > worst) worst = most, worst_at = most_at;
    pthread_mutex_unlock(&lock);
}

static void *work(void *unused) {
    (void)unused;
    for (;;) {
        pthread_mutex_lock(&lock);
        uint64_t lo = next_chunk;
        next_chunk += CHUNK;
        pthread_mutex_unlock(&lock);
        if (lo >= end) return NULL;
        check(lo, lo + CHUNK < end ? lo + CHUNK : end);
    }
}

int main(int argc, char **argv) {
    next_chunk = argc > 2 ? strtoull(argv[1], NULL, 0) : 0;
    end = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)1 << 32;
    int threads = argc > 3 ? atoi(argv[3]) : 2;
    if (argc == 2 || argc > 4 || next_chunk >= end || end > (uint64_t)1 << 32 || threads < 1 || threads > MAX_THREADS) {
        fprintf(stderr, "usage: %s [FIRST END [THREADS]]\n", argv[0]);
        return 2;
    }
    pthread_t started[MAX_THREADS];
    for (int i = 0; i < threads; i++)
        if (pthread_create(&started[i], NULL, work, NULL)) return 2;
    for (int i = 0; i < threads; i++) pthread_join(started[i], NULL);
    printf("%" PRIu64 " inputs, %" PRIu64 " not rounded to nearest, worst %.4f ulp at %a (0x%08" PRIx32 "), %" PRIu64 " failures\n",
           inputs, not_rounded, worst, (double)pi_f32_of_bits(worst_at), worst_at, failures);
    return failures != 0;
}
