/* What the x86-64 kernel files share. */
#ifndef PI_X86_H
#define PI_X86_H

#include "../pi.h"

/* Tokens to a tile of the quantised matmuls. */
enum { TILE_AVX2 = 3, TILE_AVX512 = 6 };

/* Four bytes at any address, through any alias. */
typedef uint32_t pi_u32 __attribute__((may_alias, aligned(1)));

#endif
