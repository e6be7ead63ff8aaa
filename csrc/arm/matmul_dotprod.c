/* Matmul by sdot. */
#include "arm.h"
#if PI_ARM

#define LEVEL(name) name##_dotprod
#include "vec_neon.h"
#include "../simd/strips.h"
#include "sums.h"
#include "sdot.h"

PI_BEGIN(PI_DOTPROD)
#define sums sums_sdot
enum { STRIPS = 4, TOKENS = TILE_DOTPROD, STRIPS_ALONE = 4, AHEAD = 0 };
#include "../simd/matmul_quant.h"
PI_END
#endif
