/* pool.c: the fork and join of a parallel region.
 *
 * A job is open between its publication and its close. A worker announces itself in `active`, then looks whether the
 * job is still open: so the caller closes the job, waits for `active` to fall to zero, and never waits for a worker that
 * was asleep. Ranges are handed out by one atomic counter. Between jobs a worker spins for some tens of microseconds
 * (the gap between two ops of a forward pass), then sleeps. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "fpenv.h"
#include "pi.h"

enum { SPINS = 4000 }; /* about 50 us of pauses */

struct pi_pool {
    int threads;                 /* the caller included */
    _Atomic uint32_t epoch;      /* counts jobs */
    _Atomic int open, active, sleepers, stop;
    _Atomic int64_t next;
    int64_t units, grain;
    int64_t regions;             /* forked so far */
    uint32_t scramble;           /* 0, or a seed: ranges are handed out in another order */
    int64_t *spans;              /* NULL, or who worked when: [room][3] of slot, from, to */
    int64_t room;
    _Atomic int64_t noted;       /* spans in use; more than `room` when some found none left */
    pi_task task;
    void *arg;
    int started;                 /* workers running */
    unsigned fork_generation;    /* in a forked child the workers are gone */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct worker {
        pthread_t thread;
        pi_pool *pool;
        int slot;
    } *workers;
};

static _Atomic unsigned fork_generation;
static _Thread_local int region_slot = -1; /* the slot of the region that this thread is in */

unsigned pi_fork_generation(void) { return fork_generation; }

static void after_fork(void) { fork_generation++; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

static inline void pause_cpu(void) {
#if PI_X86
    _mm_pause();
#elif PI_ARM
    __asm__ volatile("yield");
#endif
}

static int64_t common_factor(int64_t a, int64_t b) { return b ? common_factor(b, a % b) : a; }

/* The i-th of a permutation of 0..n: steps that share no factor with n reach every one. */
static int64_t scrambled(int64_t i, int64_t n, uint32_t seed) {
    if (seed == UINT32_MAX) return n - 1 - i;
    int64_t step = pi_max(1, n - 1 - seed % pi_max(1, n / 2));
    while (common_factor(n, step) != 1) step--;
    return (i * step + seed) % n;
}

int64_t pi_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void note_span(pi_pool *p, int slot, int64_t from) {
    int64_t at = atomic_fetch_add_explicit(&p->noted, 1, memory_order_relaxed);
    if (at < p->room) memcpy(p->spans + 3 * at, (int64_t[]){slot, from, pi_clock()}, 3 * sizeof *p->spans);
}

static void take_ranges(pi_pool *p, int slot) {
    const int64_t from = p->spans ? pi_clock() : 0;
    for (int64_t taken = 0;; taken++) {
        int64_t i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed), n = pi_ceil_div(p->units, p->grain);
        if (i >= n) {
            if (p->spans && taken) note_span(p, slot, from);
            return;
        }
        const int64_t lo = (p->scramble ? scrambled(i, n, p->scramble) : i) * p->grain;
        p->task(p->arg, lo, pi_min(lo + p->grain, p->units), slot);
    }
}

static void *work(void *arg) {
    struct worker *w = arg;
    pi_pool *p = w->pool;
    uint32_t seen = 0;
    pi_fpenv_set();
    region_slot = w->slot;
    while (!p->stop) {
        int spins = 0;
        while (p->epoch == seen && !p->stop && ++spins < SPINS) pause_cpu();
        if (p->epoch == seen && !p->stop) {
            pthread_mutex_lock(&p->lock);
            p->sleepers++;
            while (p->epoch == seen && !p->stop) pthread_cond_wait(&p->wake, &p->lock);
            p->sleepers--;
            pthread_mutex_unlock(&p->lock);
            continue;
        }
        seen = p->epoch;
        p->active++;
        if (p->open) take_ranges(p, w->slot);
        p->active--;
    }
    return NULL;
}

/* A worker that cannot be started is one fewer: the ranges go to the others. */
static void start(pi_pool *p) {
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->epoch = 0;
    p->open = p->active = p->sleepers = p->stop = 0;
    p->fork_generation = fork_generation;
    for (p->started = 0; p->started < p->threads - 1; p->started++) {
        struct worker *w = &p->workers[p->started];
        w->pool = p;
        w->slot = p->started + 1;
        if (pthread_create(&w->thread, NULL, work, w)) break;
    }
}

pi_pool *pi_pool_new(int threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pi_pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->threads = threads;
    p->workers = calloc((size_t)threads, sizeof *p->workers);
    if (!p->workers) {
        free(p);
        return NULL;
    }
    start(p);
    return p;
}

void pi_pool_free(pi_pool *p) {
    if (!p) return;
    if (p->fork_generation == fork_generation) {
        pthread_mutex_lock(&p->lock);
        p->stop = 1;
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
        for (int i = 0; i < p->started; i++) pthread_join(p->workers[i].thread, NULL);
        pthread_cond_destroy(&p->wake);
        pthread_mutex_destroy(&p->lock);
    }
    free(p->spans);
    free(p->workers);
    free(p);
}

int64_t pi_pool_spans(pi_pool *p, int64_t *out, int64_t n, int64_t room) {
    const int64_t noted = pi_min(pi_min(p->noted, p->room), n);
    if (noted > 0) memcpy(out, p->spans, (size_t)noted * 3 * sizeof *out);
    if (room != p->room) {
        free(p->spans);
        p->spans = room > 0 ? malloc((size_t)room * 3 * sizeof *p->spans) : NULL;
        p->room = p->spans ? room : 0;
    }
    p->noted = 0;
    return noted;
}

void pi_pool_scramble(pi_pool *p, uint32_t seed) { p->scramble = seed; }

int pi_pool_threads(const pi_pool *p) { return p->threads; }
int64_t pi_pool_regions(const pi_pool *p) { return p->regions; }

void pi_pool_run(pi_pool *p, int64_t units, int64_t grain, pi_task task, void *arg) {
    if (units <= 0) return;
    if ((p->threads == 1 && !p->scramble) || units <= grain || region_slot >= 0) { /* a region inside a region runs inline */
        task(arg, 0, units, region_slot < 0 ? 0 : region_slot);
        return;
    }
    if (p->fork_generation != fork_generation) start(p);
    p->regions++;
    p->task = task;
    p->arg = arg;
    p->units = units;
    p->grain = grain;
    p->next = 0;
    p->open = 1;
    p->epoch++;
    if (p->sleepers) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->lock);
    }
    region_slot = 0;
    take_ranges(p, 0);
    region_slot = -1;
    p->open = 0;
    for (int spins = 0; p->active; spins++) {
        pause_cpu();
        if (spins > SPINS) sched_yield(); /* more threads than cores: let the last worker finish */
    }
}
