/* What this x86-64 CPU and its operating system offer, from CPUID and XGETBV (Intel SDM volume 1, chapter 14): a level counts
 * only when the OS saves the registers that it uses. */
#include "../pi.h"
#if PI_X86

#include <cpuid.h>

enum { FMA = 12, OSXSAVE = 27, AVX = 28, F16C = 29 };                                    /* leaf 1, ecx */
enum { AVX2 = 5, AVX512F = 16, AVX512DQ = 17, AVX512BW = 30, AVX512VL = 31, VNNI = 11 }; /* leaf 7, ebx; VNNI: ecx */
enum { YMM_STATE = 0x06, ZMM_STATE = 0xe6 };                                             /* XCR0: what the OS saves */

typedef struct {
    unsigned leaf1_ecx, leaf7_ebx, leaf7_ecx, saved;
} features;

static features read_features(void) {
    features f = {0};
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) f.leaf1_ecx = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) f.leaf7_ebx = b, f.leaf7_ecx = c;
    if (f.leaf1_ecx >> OSXSAVE & 1) __asm__ volatile("xgetbv" : "=a"(f.saved), "=d"(d) : "c"(0));
    return f;
}

static bool has(unsigned word, int bit) { return word >> bit & 1; }

bool pi_has_avx2(void) {
    features f = read_features();
    return (f.saved & YMM_STATE) == YMM_STATE && has(f.leaf1_ecx, AVX) && has(f.leaf1_ecx, FMA) && has(f.leaf1_ecx, F16C) &&
           has(f.leaf7_ebx, AVX2);
}

bool pi_has_avx512(void) {
    features f = read_features();
    return pi_has_avx2() && (f.saved & ZMM_STATE) == ZMM_STATE && has(f.leaf7_ebx, AVX512F) && has(f.leaf7_ebx, AVX512DQ) &&
           has(f.leaf7_ebx, AVX512BW) && has(f.leaf7_ebx, AVX512VL);
}

bool pi_has_avx512vnni(void) {
#ifdef PI_EMULATE_VNNI /* a test build, tests/kernels/emulate_vnni.h */
    return pi_has_avx512();
#else
    return pi_has_avx512() && has(read_features().leaf7_ecx, VNNI);
#endif
}

#endif
