/* dispatch.c: runs a kernel on this machine's CPU, unkindly. Each thread of a threadgroup is a fiber with a stack of its own; which one
 * goes on is drawn at random wherever Metal promises no order, and so is the order of groups. What a group shares is filled with 0xFF
 * before it begins.
 *
 *   METAL_HOST_SEED      another order (0)                  METAL_HOST_THREADS   host threads that take groups (1)
 *   METAL_HOST_CHECK=1   every access of memory is looked at: it must lie in what is bound, and two threads may not meet in a byte that
 *                        one of them writes unless a barrier that orders that kind of memory lies between (metal.m compiles for it) */
#define _GNU_SOURCE
#include "dispatch.h"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined __x86_64__ && !defined METAL_HOST_UCONTEXT
#include <immintrin.h>
#else
#include <ucontext.h>
#if defined __x86_64__
#include <immintrin.h>
#endif
#endif

enum { STACK = 1 << 17, PAGE = 4096, GUARD = 4 << 20 };

void mh_fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fputs("metal_host: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    fflush(stderr);
    abort();
}

long mh_setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

void *mh_guarded(size_t bytes, size_t align, void **all, size_t *all_bytes) {
    const size_t inner = (bytes + align + PAGE - 1) / PAGE * PAGE;
    *all_bytes = inner + 2 * GUARD;
    char *p = mmap(NULL, *all_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect(p + GUARD, inner, PROT_READ | PROT_WRITE)) mh_fail("out of memory for %zu bytes", bytes);
    *all = p;
    memset(p + GUARD, 0xff, inner);
    return (char *)((uintptr_t)(p + GUARD + inner - bytes) & ~(uintptr_t)(align - 1));
}

/* ---- random orders -------------------------------------------------------------------------------------------- */

static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static unsigned below(uint64_t *state, unsigned n) { return (unsigned)((next_random(state) >> 32) * n >> 32); }
static void shuffle_bytes(uint64_t *state, unsigned char *a, unsigned n) {
    for (unsigned i = n; i > 1; i--) {
        const unsigned j = below(state, i);
        const unsigned char t = a[i - 1];
        a[i - 1] = a[j], a[j] = t;
    }
}

/* ---- fibers ----------------------------------------------------------------------------------------------------*/

#if defined __x86_64__ && !defined METAL_HOST_UCONTEXT
typedef void *context;
void mh_switch(context *from, context to);
__asm__(".text\n.globl mh_switch\n.hidden mh_switch\n.type mh_switch, @function\nmh_switch:\n"
        "    push %rbp\n    push %rbx\n    push %r12\n    push %r13\n    push %r14\n    push %r15\n"
        "    mov %rsp, (%rdi)\n    mov %rsi, %rsp\n"
        "    pop %r15\n    pop %r14\n    pop %r13\n    pop %r12\n    pop %rbx\n    pop %rbp\n    ret\n"
        ".size mh_switch, .-mh_switch\n");
static void switch_to(context *from, context *to) { mh_switch(from, *to); }
static void make(context *c, char *stack, size_t bytes, void (*entry)(void)) {
    void **top = (void **)((uintptr_t)(stack + bytes) & ~(uintptr_t)15);
    *--top = NULL; /* where entry would return to: it does not */
    *--top = (void *)entry;
    for (int i = 0; i < 6; i++) *--top = NULL;
    *c = top;
}
#else
typedef ucontext_t context;
static void switch_to(context *from, context *to) { swapcontext(from, to); }
static void make(context *c, char *stack, size_t bytes, void (*entry)(void)) {
    getcontext(c);
    c->uc_stack.ss_sp = stack, c->uc_stack.ss_size = bytes, c->uc_link = NULL;
    makecontext(c, entry, 0);
}
#endif

typedef struct {
    mh_place place;
    unsigned epoch[2], simd_epoch[2]; /* barriers passed that order device memory, and threadgroup memory */
    int fiber;
} thread;

typedef struct {
    mh_op op;
    void *lanes[MH_LANES];
    int arrived, flags, size;
} simdgroup;

/* What a host thread has: one group at a time. */
typedef struct {
    const mh_dispatch *d;
    uint64_t random;
    context scheduler, fibers[MH_MAX_THREADS];
    char *stacks; /* one behind the other, each above a page that nobody may touch */
    int idle[MH_MAX_THREADS], n_idle, n_fibers;
    thread threads[MH_MAX_THREADS];
    unsigned ready[MH_MAX_THREADS], n_ready, current, n, finished;
    unsigned waiting[MH_MAX_THREADS], n_waiting;
    int barrier_flags;
    simdgroup simds[MH_MAX_THREADS / MH_LANES];
    unsigned char elements[64];
    char *group_memory; /* MH_GROUP_BYTES that end at a guard */
    void *blocks[MH_GROUP_ARGS];
    unsigned group_number;
} worker;

static __thread worker *w;

/* `w` is read once: the worker stays, but the host thread that has it is another one at the next dispatch. */
static void fiber(void) {
    worker *const mine = w;
    for (;;) {
        thread *t = &mine->threads[mine->current];
        mine->d->kernel->run(mine->d->buffers, mine->blocks, &t->place);
        mine->finished++;
        mine->idle[mine->n_idle++] = t->fiber;
        switch_to(&mine->fibers[t->fiber], &mine->scheduler);
    }
}

static void wait_here(void) { switch_to(&w->fibers[w->threads[w->current].fiber], &w->scheduler); }
static void wake(unsigned i) { w->ready[w->n_ready++] = i; }

static void count_epochs(unsigned *epoch, int flags) {
    for (int space = 0; space < 2; space++)
        if (flags >> space & 1) epoch[space]++;
}

static void barrier(int flags) {
    if (w->n_waiting && flags != w->barrier_flags)
        mh_fail("kernel %s: threads meet in barriers with different mem_flags (%d and %d)", w->d->kernel->name, flags, w->barrier_flags);
    w->barrier_flags = flags;
    w->waiting[w->n_waiting++] = w->current;
    if (w->n_waiting == w->n) {
        for (unsigned i = 0; i < w->n; i++) {
            count_epochs(w->threads[i].epoch, flags);
            if (i != w->current) wake(i);
        }
        w->n_waiting = 0;
        wake(w->current);
    }
    wait_here();
}

static void simd(mh_op op, void *mine, int flags) {
    const unsigned number = w->threads[w->current].place.simdgroup;
    simdgroup *s = &w->simds[number];
    if (s->arrived && (s->op != op || s->flags != flags))
        mh_fail("kernel %s: the lanes of a SIMD group meet in different operations", w->d->kernel->name);
    s->op = op, s->flags = flags;
    s->lanes[w->threads[w->current].place.lane] = mine;
    if (++s->arrived < s->size) {
        wait_here();
        return;
    }
    s->arrived = 0;
    if (op) {
        unsigned char order[64];
        for (int i = 0; i < 64; i++) order[i] = (unsigned char)i;
        shuffle_bytes(&w->random, order, (unsigned)s->size);
        shuffle_bytes(&w->random, order + 32, 8);
        order[40] = (unsigned char)below(&w->random, 256);
        op(s->lanes, s->size, order);
    }
    for (int lane = 0; lane < s->size; lane++) {
        const unsigned i = number * MH_LANES + (unsigned)lane;
        count_epochs(w->threads[i].simd_epoch, flags);
        if (i != w->current) wake(i);
    }
    if (!op) { /* the last goes on at random, too */
        wake(w->current);
        wait_here();
    }
}

static const unsigned char *elements(void) { return w->elements; }

/* ---- checks of every access ------------------------------------------------------------------------------------- */

typedef struct {
    unsigned dispatch, group;                    /* when, and by which group */
    unsigned short writer, reader;               /* thread + 1; for readers see below */
    unsigned write_epoch, write_simd, read_epoch, read_simd;
} shadow;
enum { MANY = 0xffff, LANES = 0x8000, ATOMIC = 2 }; /* readers: of several SIMD groups, of one (LANES | its number) */
#define EVERY 0xffffffffu /* group: more than one has read */

static pthread_mutex_t shadow_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned dispatches;

/* The shadow of an address's page. */
static shadow *shadow_of(uintptr_t p) {
    enum { SLOTS = 1 << 16 };
    static struct { uintptr_t page; shadow *cells; } slots[SLOTS];
    const uintptr_t page = p / PAGE;
    for (unsigned i = (unsigned)(page * 0x9e3779b97f4a7c15u >> 48), tried = 0; tried < SLOTS; i = (i + 1) % SLOTS, tried++) {
        if (!slots[i].cells) {
            slots[i].page = page;
            slots[i].cells = mmap(NULL, PAGE * sizeof(shadow), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (slots[i].cells == MAP_FAILED) mh_fail("out of memory for checks");
        }
        if (slots[i].page == page) return slots[i].cells + p % PAGE;
    }
    mh_fail("too much memory for METAL_HOST_CHECK");
}

static void race(const char *what, unsigned other, unsigned other_group, int space) {
    const thread *t = &w->threads[w->current];
    if (other & LANES)
        mh_fail("kernel %s: %s of %s memory by thread %u of threadgroup %u, which others share, with no barrier between", w->d->kernel->name, what,
                space ? "threadgroup" : "device", t->place.index, w->group_number);
    if (other_group != w->group_number)
        mh_fail("kernel %s: %s by thread %u of threadgroup %u and thread %u of threadgroup %u, which nothing orders", w->d->kernel->name, what,
                other - 1, other_group, t->place.index, w->group_number);
    mh_fail("kernel %s: %s of %s memory by threads %u and %u of a threadgroup with no barrier between", w->d->kernel->name, what,
            space ? "threadgroup" : "device", other - 1, t->place.index);
}

/* Which SIMD group a reader or writer is of, -1 for more than one. */
static int simdgroup_of(unsigned who) { return who == MANY ? -1 : who & LANES ? (int)(who & ~(unsigned)LANES) : (int)(who - 1) / MH_LANES; }

/* Whether the current thread's access comes after one by `other` at those epochs. */
static int ordered(unsigned other, unsigned other_group, unsigned epoch, unsigned simd_epoch, int space) {
    const thread *t = &w->threads[w->current];
    if (other_group != w->group_number) return 0;
    if (other - 1 == t->place.index || t->epoch[space] > epoch) return 1;
    return simdgroup_of(other) == (int)t->place.simdgroup && t->simd_epoch[space] > simd_epoch;
}

static void look(uintptr_t p, unsigned n, int write, int space) {
    if (write == ATOMIC) return;
    const thread *t = &w->threads[w->current];
    const unsigned me = t->place.index + 1;
    for (unsigned i = 0; i < n; i++) {
        shadow *s = shadow_of(p + i);
        if (s->dispatch != dispatches || (space && s->group != w->group_number)) *s = (shadow){.dispatch = dispatches, .group = w->group_number};
        if (s->writer && !ordered(s->writer, s->group, s->write_epoch, s->write_simd, space))
            race(write ? "two writes" : "a write and then a read", s->writer, s->group, space);
        if (write) {
            if (s->reader && !ordered(s->reader, s->group, s->read_epoch, s->read_simd, space))
                race("a read and then a write", s->reader, s->group, space);
            s->writer = (unsigned short)me, s->write_epoch = t->epoch[space], s->write_simd = t->simd_epoch[space], s->reader = 0;
            s->group = w->group_number;
        } else {
            const int same = simdgroup_of(s->reader) == (int)t->place.simdgroup;
            if (s->reader && s->group != w->group_number) s->group = EVERY, s->reader = MANY;
            else if (!s->reader || ordered(s->reader, s->group, s->read_epoch, s->read_simd, space))
                s->reader = (unsigned short)me, s->group = w->group_number;
            else s->reader = same ? (unsigned short)(LANES | t->place.simdgroup) : MANY;
            s->read_epoch = t->epoch[space], s->read_simd = t->simd_epoch[space];
        }
    }
}

static void check_access(const void *at, unsigned n, int write) {
    const char *p = at;
    const thread *t = &w->threads[w->current];
    if (p >= w->stacks && p < w->stacks + (size_t)MH_MAX_THREADS * (STACK + PAGE)) return; /* also a lane that works for all */
    if (!write && p >= (char *)w && p < (char *)(w + 1)) return;
    for (int i = 0; i < MH_GROUP_ARGS; i++) {
        const char *block = w->blocks[i];
        if (block && p >= block && p + n <= block + w->d->group_bytes[i]) return look((uintptr_t)p, n, write, 1);
    }
    for (int i = 0; i < MH_BUFFERS; i++) {
        const char *buffer = w->d->buffers[i];
        if (w->d->kernel->buffers >> i & 1 && p >= buffer && p + n <= buffer + w->d->bytes[i]) {
            pthread_mutex_lock(&shadow_lock);
            look((uintptr_t)p, n, write, 0);
            pthread_mutex_unlock(&shadow_lock);
            return;
        }
    }
    if (!write && p >= w->d->image && p < w->d->image_end) return;
    if (p >= w->group_memory - GUARD && p < w->group_memory + MH_GROUP_BYTES + GUARD)
        mh_fail("kernel %s: thread %u %s %u bytes outside its threadgroup memory", w->d->kernel->name, t->place.index, write ? "writes" : "reads", n);
    mh_fail("kernel %s: thread %u of group %u,%u,%u %s %u bytes at %p, outside of what is bound", w->d->kernel->name, t->place.index,
            t->place.group[0], t->place.group[1], t->place.group[2], write ? "writes" : "reads", n, at);
}

static int lane_number(void) { return (int)w->threads[w->current].place.lane; }
static void fail_in_kernel(const char *why) { mh_fail("kernel %s: %s", w->d->kernel->name, why); }

const mh_calls mh_runtime = {barrier, simd, elements, lane_number, fail_in_kernel, check_access};

/* ---- groups -----------------------------------------------------------------------------------------------------*/

static void start(unsigned i) {
    thread *t = &w->threads[i];
    if (!w->n_idle) {
        const int f = w->n_fibers++;
        char *stack = w->stacks + (size_t)f * (STACK + PAGE) + PAGE;
        if (mprotect(stack, STACK, PROT_READ | PROT_WRITE)) mh_fail("out of memory for stacks");
        /* At different places of their pages: equal ones would fall into few sets of the cache. */
        make(&w->fibers[f], stack, (size_t)(STACK - f % 61 * 832), fiber);
        w->idle[w->n_idle++] = f;
    }
    t->fiber = w->idle[--w->n_idle];
}

static void run_group(unsigned number) {
    const mh_dispatch *d = w->d;
    const unsigned gx = number % d->groups[0], gy = number / d->groups[0] % d->groups[1], gz = number / d->groups[0] / d->groups[1];
    w->group_number = number;
    w->n = d->threads[0] * d->threads[1] * d->threads[2];
    w->finished = w->n_waiting = w->n_ready = 0;
    char *at = w->group_memory + MH_GROUP_BYTES;
    for (int i = 0; i < MH_GROUP_ARGS; i++) {
        w->blocks[i] = NULL;
        if (d->group_bytes[i]) w->blocks[i] = at -= (d->group_bytes[i] + 15) / 16 * 16;
    }
    memset(at, 0xff, (size_t)(w->group_memory + MH_GROUP_BYTES - at));
    for (unsigned i = 0; i < w->n; i++) {
        thread *t = &w->threads[i];
        memset(t, 0, sizeof *t);
        t->fiber = -1;
        const unsigned size[3] = {d->threads[0], d->threads[1], d->threads[2]};
        const unsigned in[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]}, group[3] = {gx, gy, gz};
        for (int k = 0; k < 3; k++) {
            t->place.in_group[k] = in[k], t->place.group[k] = group[k], t->place.group_size[k] = size[k];
            t->place.groups[k] = d->groups[k], t->place.in_grid[k] = group[k] * size[k] + in[k];
        }
        t->place.index = i, t->place.lane = i % MH_LANES, t->place.simdgroup = i / MH_LANES;
        wake(i);
    }
    for (unsigned s = 0; s * MH_LANES < w->n; s++) {
        const unsigned size = w->n - s * MH_LANES;
        w->simds[s].arrived = 0, w->simds[s].size = (int)(size < MH_LANES ? size : MH_LANES);
    }
    while (w->n_ready) {
        const unsigned at_random = below(&w->random, w->n_ready), i = w->ready[at_random];
        w->ready[at_random] = w->ready[--w->n_ready];
        if (w->threads[i].fiber < 0) start(i);
        w->current = i;
        switch_to(&w->scheduler, &w->fibers[w->threads[i].fiber]);
    }
    if (w->finished != w->n)
        mh_fail("kernel %s: %u of %u threads wait at a threadgroup barrier or SIMD-group operation that the others do not reach", d->kernel->name,
                w->n - w->finished, w->n);
}

/* ---- a dispatch -------------------------------------------------------------------------------------------------*/

typedef struct {
    const mh_dispatch *d;
    const unsigned *order;
    unsigned n;
    unsigned next; /* taken atomically */
    uint64_t seed;
    int flush;
} job;

static const char *faulty; /* the kernel that runs, for the handler */
static void fault(int signal, siginfo_t *info, void *machine) {
    (void)signal, (void)machine;
    char text[256];
    const int n = snprintf(text, sizeof text, "metal_host: kernel %s: an access at %p, outside of what is bound (or its stack is full)\n", faulty,
                           info->si_addr);
    if (write(2, text, (size_t)n) < 0) _exit(134);
    abort();
}

static worker *workers[64]; /* one to a host thread, kept for its stacks */

static void *work(void *arg) {
    job *j = ((void **)arg)[0];
    worker *mine = ((void **)arg)[1];
    w = mine;
    w->d = j->d;
    stack_t before, alternate = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16};
    sigaltstack(&alternate, &before);
#if defined __x86_64__
    const unsigned control = _mm_getcsr();
    if (j->flush) _mm_setcsr(control | 0x8040);
#elif defined __aarch64__
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    if (j->flush) __asm__ volatile("msr fpcr, %0" ::"r"(control | 1u << 24));
#endif
    for (unsigned i; (i = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->n;) {
        w->random = j->seed ^ (uint64_t)j->order[i] << 32;
        for (int e = 0; e < 64; e++) w->elements[e] = (unsigned char)e;
        uint64_t of_dispatch = j->seed;
        shuffle_bytes(&of_dispatch, w->elements, 64);
        run_group(j->order[i]);
    }
#if defined __x86_64__
    _mm_setcsr(control);
#elif defined __aarch64__
    __asm__ volatile("msr fpcr, %0" ::"r"(control));
#endif
    sigaltstack(&before, NULL);
    free(alternate.ss_sp);
    return NULL;
}

void mh_run(const mh_dispatch *d, int flush_subnormals) {
    const uint64_t n = (uint64_t)d->groups[0] * d->groups[1] * d->groups[2];
    if (n > UINT32_MAX) mh_fail("kernel %s: more threadgroups than this stand-in runs", d->kernel->name);
    long threads = mh_setting("METAL_HOST_THREADS", 1);
    if (threads < 1) threads = 1;
    if (threads > 64) threads = 64;
    if (mh_setting("METAL_HOST_CHECK", 0)) threads = 1; /* the order of accesses is what it looks at */
    if ((uint64_t)threads > n) threads = (long)n;
    dispatches++;
    job j = {.d = d, .n = (unsigned)n, .flush = flush_subnormals};
    j.seed = (uint64_t)mh_setting("METAL_HOST_SEED", 0) * 1000003u + dispatches;
    unsigned *order = malloc(n * sizeof *order);
    if (!order) mh_fail("out of memory");
    for (unsigned i = 0; i < n; i++) order[i] = i;
    uint64_t random = j.seed;
    for (unsigned i = (unsigned)n; i > 1; i--) {
        const unsigned k = below(&random, i), t = order[i - 1];
        order[i - 1] = order[k], order[k] = t;
    }
    j.order = order;
    faulty = d->kernel->name;
    struct sigaction segv, bus, mine = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGSEGV, &mine, &segv);
    sigaction(SIGBUS, &mine, &bus);
    pthread_t others[64];
    void *args[64][2];
    for (long i = 0; i < threads; i++) {
        if (!workers[i]) {
            void *all;
            size_t bytes;
            if (!(workers[i] = calloc(1, sizeof(worker)))) mh_fail("out of memory");
            workers[i]->group_memory = mh_guarded(MH_GROUP_BYTES, 16, &all, &bytes);
            workers[i]->stacks = mmap(NULL, (size_t)MH_MAX_THREADS * (STACK + PAGE), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (workers[i]->stacks == MAP_FAILED) mh_fail("out of memory for stacks");
        }
        args[i][0] = &j, args[i][1] = workers[i];
        if (i && pthread_create(&others[i], NULL, work, args[i])) mh_fail("no thread");
    }
    work(args[0]);
    for (long i = 1; i < threads; i++) pthread_join(others[i], NULL);
    sigaction(SIGSEGV, &segv, NULL);
    sigaction(SIGBUS, &bus, NULL);
    free(order);
}
