/* Lets the avx512vnni level run on a CPU with AVX-512 but without VNNI: the one instruction that sets it apart is spelled out in
 * plain C, as its manual page defines it. For tests, by PYINFER_CFLAGS="-include .../emulate_vnni.h". BREAK_VNNI in the environment
 * makes it wrong: a positive control, which what holds the level to its digests must notice. */
#if defined(__x86_64__) && !defined(PI_EMULATE_VNNI)
#define PI_EMULATE_VNNI
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Four products of an unsigned and a signed byte, added to an int32, in each of 16 lanes; no saturation. */
#pragma GCC push_options
#pragma GCC target("avx512f")
static __attribute__((noinline, unused)) __m512i pi_dpbusd(__m512i acc, __m512i u, __m512i s) {
    static int broken = -1;
    int32_t sum[16];
    uint8_t a[64];
    int8_t b[64];
    memcpy(sum, &acc, 64);
    memcpy(a, &u, 64);
    memcpy(b, &s, 64);
    for (int i = 0; i < 64; i++) sum[i / 4] += a[i] * b[i];
    if (broken < 0) broken = getenv("BREAK_VNNI") != NULL;
    sum[7] += broken;
    memcpy(&acc, sum, 64);
    return acc;
}
#pragma GCC pop_options
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 pi_dpbusd
#endif
