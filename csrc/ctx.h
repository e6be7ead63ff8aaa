/* The context behind every op: a kernel table, a pool, scratch, and one lock, so that several Python threads may
 * share it. pi_enter and pi_leave stand around each op: lock and floating-point environment. */
#ifndef PI_CTX_H
#define PI_CTX_H

#include <pthread.h>

#include "fpenv.h"
#include "pi.h"

struct pi_ctx {
    pi_table t;
    int level;
    pi_pool *pool;
    pthread_mutex_t lock;
    unsigned fork_generation;
    uint8_t *scratch;
    size_t scratch_bytes;
    struct pi_arena *arena; /* where the next packed weight goes */
    int64_t *ticks;         /* NULL, or when the last ops began and ended, by pi_ticks: a ring of `room` */
    int64_t room, noted;    /* noted: where the next goes */
    int64_t first_tick, first_ns; /* the same moment by both clocks */
};

/* The time stamp counter: a clock that takes no memory to read, since ops come when caches hold nothing but weights. */
PI_INLINE int64_t pi_ticks(void) {
#if PI_X86
    return (int64_t)__rdtsc();
#elif PI_ARM
    int64_t t;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(t));
    return t;
#else
    return pi_clock();
#endif
}

PI_INLINE void pi_note(pi_ctx *c) {
    if (!c->ticks) return;
    c->ticks[c->noted] = pi_ticks();
    if (++c->noted == c->room) c->noted = 0;
}

PI_INLINE void pi_lock(pi_ctx *c) {
    if (c->fork_generation != pi_fork_generation()) { /* a lock held by a thread that this child does not have */
        pthread_mutex_init(&c->lock, NULL);
        c->fork_generation = pi_fork_generation();
    }
    pthread_mutex_lock(&c->lock);
}

PI_INLINE pi_fpenv pi_enter(pi_ctx *c) {
    pi_lock(c);
    pi_fpenv env = pi_fpenv_get();
    pi_fpenv_set();
    pi_note(c);
    return env;
}

PI_INLINE int pi_leave(pi_ctx *c, pi_fpenv env, int code) {
    pi_note(c);
    pi_fpenv_put(env);
    pthread_mutex_unlock(&c->lock);
    return code;
}

/* Scratch of at least `bytes`, 64-byte aligned, valid until the op leaves; NULL when there is no memory. */
void *pi_scratch(pi_ctx *c, size_t bytes);

/* 64-byte aligned memory; free() releases it. */
void *pi_alloc(size_t bytes);

/* Packed weights lie one after the other in arenas of 2 MB pages: decoding reads all of them for every token, and with
 * 4 KB pages a tenth of its time goes to address translation. An arena lives as long as its context or a weight in it. */
typedef struct pi_arena pi_arena;
uint8_t *pi_arena_alloc(pi_arena **current, size_t bytes, pi_arena **owner);
void pi_arena_release(pi_arena *a);
int64_t pi_arena_pages(const pi_arena *a, void **base); /* all of its memory, whole pages, in bytes */

/* Elementwise work below this many values is not worth a fork. */
enum { PI_FORK_VALUES = 16384 };

#endif
