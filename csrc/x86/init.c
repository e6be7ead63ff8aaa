/* Which kernels each x86-64 level adds to the table below it. */
#include "x86.h"
#if PI_X86

#define X(name, args) void pi_##name##_avx2 args, pi_##name##_avx512 args;
PI_KERNELS(X)
#undef X
#define X(stem, ...) void pi_matmul_##stem##_avx512vnni PI_MATMUL_ARGS;
PI_QUANTISED(X)
#undef X

void pi_init_avx2(pi_table *t) {
#define X(name, args) PI_SET(t, name, avx2);
    PI_KERNELS(X)
#undef X
    t->tile = TILE_AVX2;
}

void pi_init_avx512(pi_table *t) {
#define X(name, args) PI_SET(t, name, avx512);
    PI_KERNELS(X)
#undef X
    t->tile = TILE_AVX512;
}

void pi_init_avx512vnni(pi_table *t) {
#define X(stem, ...) PI_SET(t, matmul_##stem, avx512vnni);
    PI_QUANTISED(X)
#undef X
}

#endif
