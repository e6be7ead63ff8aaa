/* Arenas for packed weights: see ctx.h. */
#include <stdlib.h>
#include <sys/mman.h>

#include "ctx.h"

enum { PAGE = 2 << 20, ARENA = 32 << 20 };

struct pi_arena {
    uint8_t *base;
    size_t bytes, used;
    _Atomic int holders; /* the context that fills it, and each weight in it */
};

static pi_arena *arena_new(size_t bytes) {
    pi_arena *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    void *base = mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (base == MAP_FAILED) {
        free(a);
        return NULL;
    }
    /* Only whole aligned pages can become large ones: cut what sticks out on either side. */
    uintptr_t start = ((uintptr_t)base + PAGE - 1) / PAGE * PAGE, end = start + bytes;
    if (start > (uintptr_t)base) munmap(base, start - (uintptr_t)base);
    if (end < (uintptr_t)base + bytes + PAGE) munmap((void *)end, (uintptr_t)base + bytes + PAGE - end);
#ifdef MADV_HUGEPAGE
    madvise((void *)start, bytes, MADV_HUGEPAGE);
#endif
    a->base = (uint8_t *)start;
    a->bytes = bytes;
    a->holders = 1;
    return a;
}

uint8_t *pi_arena_alloc(pi_arena **current, size_t bytes, pi_arena **owner) {
    pi_arena *a = *current;
    bytes = (bytes + 63) / 64 * 64;
    if (!a || a->bytes - a->used < bytes) {
        a = arena_new((size_t)pi_ceil_div(pi_max((int64_t)bytes, ARENA), PAGE) * PAGE);
        if (!a) return NULL;
        pi_arena_release(*current);
        *current = a;
    }
    uint8_t *p = a->base + a->used;
    a->used += bytes;
    a->holders++;
    *owner = a;
    return p;
}

void pi_arena_release(pi_arena *a) {
    if (!a || --a->holders) return;
    munmap(a->base, a->bytes);
    free(a);
}

int64_t pi_arena_pages(const pi_arena *a, void **base) {
    *base = a->base;
    return (int64_t)a->bytes;
}
