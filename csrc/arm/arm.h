/* What the aarch64 kernel files share. */
#ifndef PI_ARM_H
#define PI_ARM_H

#include "../pi.h"

/* Targets for PI_BEGIN; NEON is part of the baseline. */
#if defined(__clang__)
#define PI_DOTPROD "dotprod"
#define PI_I8MM "dotprod,i8mm"
#else
#define PI_DOTPROD "arch=armv8.2-a+dotprod"
#define PI_I8MM "arch=armv8.2-a+dotprod+i8mm"
#endif

/* Tokens to a tile of the quantised matmuls. */
enum { TILE_NEON = 2, TILE_DOTPROD = 3, TILE_I8MM = 2 };

#endif
