/* The floating-point environment of NUMERICS.md section 1: round to nearest even, subnormals kept, nothing trapped.
 * Another library's fast-math start-up code or the caller's own settings must not move a byte. */
#ifndef PI_FPENV_H
#define PI_FPENV_H

#include "pi.h"

#if PI_X86
typedef unsigned pi_fpenv;
PI_INLINE pi_fpenv pi_fpenv_get(void) { return _mm_getcsr(); }
PI_INLINE void pi_fpenv_put(pi_fpenv e) { _mm_setcsr(e); }
PI_INLINE void pi_fpenv_set(void) { _mm_setcsr(0x1f80); }
#elif PI_ARM
typedef uint64_t pi_fpenv;
PI_INLINE pi_fpenv pi_fpenv_get(void) {
    pi_fpenv e;
    __asm__ volatile("mrs %0, fpcr" : "=r"(e));
    return e;
}
PI_INLINE void pi_fpenv_put(pi_fpenv e) { __asm__ volatile("msr fpcr, %0" : : "r"(e)); }
PI_INLINE void pi_fpenv_set(void) { pi_fpenv_put(0); }
#else
#error "pyinfer runs on x86-64 and aarch64"
#endif

#endif
