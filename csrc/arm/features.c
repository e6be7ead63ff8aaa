/* What this aarch64 CPU offers beyond NEON, which every one has: Linux tells by hardware capabilities, macOS by sysctl. */
#include "arm.h"
#if PI_ARM

#if defined(__APPLE__)
#include <sys/sysctl.h>
static bool has(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(name, &value, &size, NULL, 0) && value;
}
bool pi_has_dotprod(void) { return has("hw.optional.arm.FEAT_DotProd"); }
bool pi_has_i8mm(void) { return pi_has_dotprod() && has("hw.optional.arm.FEAT_I8MM"); }
#else
#include <sys/auxv.h>
enum { ASIMDDP = 1 << 20, I8MM = 1 << 13 }; /* the kernel's HWCAP_ASIMDDP and HWCAP2_I8MM, which older headers lack */
bool pi_has_dotprod(void) { return getauxval(AT_HWCAP) & ASIMDDP; }
bool pi_has_i8mm(void) { return pi_has_dotprod() && (getauxval(AT_HWCAP2) & I8MM); }
#endif

#endif
