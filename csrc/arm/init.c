/* Which kernels each aarch64 level adds to the table below it. */
#include "arm.h"
#if PI_ARM

#define X(name, args) void pi_##name##_neon args;
PI_KERNELS(X)
#undef X
#define X(stem, ...) void pi_matmul_##stem##_dotprod PI_MATMUL_ARGS, pi_matmul_##stem##_i8mm PI_MATMUL_ARGS;
PI_QUANTISED(X)
#undef X

void pi_init_neon(pi_table *t) {
#define X(name, args) PI_SET(t, name, neon);
    PI_KERNELS(X)
#undef X
    t->tile = TILE_NEON;
}

void pi_init_dotprod(pi_table *t) {
#define X(stem, ...) PI_SET(t, matmul_##stem, dotprod);
    PI_QUANTISED(X)
#undef X
    t->tile = TILE_DOTPROD;
}

void pi_init_i8mm(pi_table *t) {
#define X(stem, ...) PI_SET(t, matmul_##stem, i8mm);
    PI_QUANTISED(X)
#undef X
    t->tile = TILE_I8MM;
}

#endif
