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
#include "../simd/matmul_quant.h"
#define X(stem, ...) QUANTISED(stem, 4, TILE_DOTPROD, 4)
PI_QUANTISED(X)
#undef X
PI_END
#endif
