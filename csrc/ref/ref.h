/* The reference kernels: plain C, complete, the meaning of every table entry. */
#ifndef PI_REF_H
#define PI_REF_H

#include "../pi.h"

#define X(name, args) void pi_##name##_ref args;
PI_KERNELS(X)
#undef X

#endif
