/* What the aarch64 levels share of simd/matmul_quant.h: a strip is 4 rows, four strips to a row group, and codes are signed.
 *
 *   w    | row 0: c0 c1 c2 c3 | row 1 | row 2 | row 3 |     16 bytes, one load
 *   dot  | row 0: int32       | row 1 | row 2 | row 3 |
 *
 * csrc/arm/matmul_<level>.c say how a level multiplies. */
#ifdef PAIRS
#define OPERANDS(f) 2
enum { STEPS = 2 };
#else
#define OPERANDS(f) 1
enum { STEPS = 1 };
#endif
#include "../simd/codes.h"

enum { E2M1_OFFSET = 0 };
PI_INLINE int8x16_t signed_codes(const pi_format f, const uint8_t *p, int k) {
    return vreinterpretq_s8_u8(codes(f, pi_table_e2m1, p, k));
}
#ifndef PAIRS
PI_INLINE void unpack UNPACK_ARGS { v[0] = codes(f, pi_table_e2m1, code, k); }
#endif
