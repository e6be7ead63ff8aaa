/* Constants of exp, written by gen/exp.py. Section: NUMERICS.md, exp. */
#ifndef PI_EXP_CONST_H
#define PI_EXP_CONST_H
#define PI_EXP_LOG2E   (0x1.715476p+0f)
#define PI_EXP_LN2_HI  (0x1.62e4p-1f)
#define PI_EXP_LN2_LO  (0x1.7f7d1cp-20f)
#define PI_EXP_C6      (0x1.6d111cp-10f)
#define PI_EXP_C5      (0x1.120b8p-7f)
#define PI_EXP_C4      (0x1.55551ap-5f)
#define PI_EXP_C3      (0x1.5554dcp-3f)
#define PI_EXP_C2      (0x1p-1f)
#define PI_EXP_MIN     (-0x1.ap+6f)
#define PI_EXP_MAX     (0x1.64p+6f)
#endif
