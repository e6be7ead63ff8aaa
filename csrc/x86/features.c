/* What this x86-64 CPU and its operating system offer. The builtins read CPUID and XGETBV: a level counts only when
 * the OS saves the registers that it uses. */
#include "../pi.h"
#if PI_X86

bool pi_has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool pi_has_avx512(void) {
    return pi_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool pi_has_avx512vnni(void) {
#ifdef PI_EMULATE_VNNI /* a test build, tests/kernels/emulate_vnni.h */
    return pi_has_avx512();
#else
    return pi_has_avx512() && __builtin_cpu_supports("avx512vnni");
#endif
}

#endif
