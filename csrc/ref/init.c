/* The reference table: every entry, so that each level above may leave out what it cannot better. */
#include "ref.h"

void pi_init_ref(pi_table *t) {
#define X(name, args) PI_SET(t, name, ref);
    PI_KERNELS(X)
#undef X
    t->tile = 1;
}
