/* Which kernels each aarch64 level adds to the table below it. */
#include "../pi.h"
#if PI_ARM

#define X(name, args) void pi_##name##_neon args;
PI_KERNELS(X)
#undef X
void pi_matmul_q8_0_dotprod PI_MATMUL_ARGS;
void pi_matmul_q4_1_dotprod PI_MATMUL_ARGS;
void pi_matmul_q8_0_i8mm PI_MATMUL_ARGS;
void pi_matmul_q4_1_i8mm PI_MATMUL_ARGS;

void pi_init_neon(pi_table *t) {
#define X(name, args) PI_SET(t, name, neon);
    PI_KERNELS(X)
#undef X
}

void pi_init_dotprod(pi_table *t) {
    PI_SET(t, matmul_q8_0, dotprod);
    PI_SET(t, matmul_q4_1, dotprod);
}

void pi_init_i8mm(pi_table *t) {
    PI_SET(t, matmul_q8_0, i8mm);
    PI_SET(t, matmul_q4_1, i8mm);
}

#endif
