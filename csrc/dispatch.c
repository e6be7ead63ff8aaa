/* CPU features -> one complete kernel table. The levels of this architecture, ascending; building the table of a
 * level is a pure function, so a test may hold several at once. */
#include "pi.h"

static bool always(void) { return true; }

const pi_level pi_levels[] = {
    {"ref", always, pi_init_ref},
#if PI_X86
    {"avx2", pi_has_avx2, pi_init_avx2},
    {"avx512", pi_has_avx512, pi_init_avx512},
    {"avx512vnni", pi_has_avx512vnni, pi_init_avx512vnni},
#elif PI_ARM
    {"neon", always, pi_init_neon},
    {"dotprod", pi_has_dotprod, pi_init_dotprod},
    {"i8mm", pi_has_i8mm, pi_init_i8mm},
#endif
};
const int pi_n_levels = sizeof pi_levels / sizeof *pi_levels;

void pi_build_table(pi_table *t, int level) {
    memset(t, 0, sizeof *t);
    for (int i = 0; i <= level; i++) pi_levels[i].init(t);
}
