/* Matmul by sdot: four products of signed bytes into the int32 lane of their row. */
#include "matmul_dotprod.h"
#if PI_ARM

PI_BEGIN(PI_DOTPROD)
#define LEVEL(name) name##_dotprod
#define TOKENS 3
#define SUMS_Q4_1 sums_q4_1_sdot
#define SUMS_Q8_0 sums_q8_0_sdot
#include "matmul_arm.h"
PI_END
#endif
