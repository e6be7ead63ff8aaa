/* runtime.h: what a compiled kernel and the runtime that runs it know of each other. C and C++. */
#ifndef METAL_HOST_RUNTIME_H
#define METAL_HOST_RUNTIME_H

enum { MH_BUFFERS = 31, MH_GROUP_ARGS = 31, MH_LANES = 32, MH_MAX_THREADS = 1024, MH_GROUP_BYTES = 32768 };
enum { MH_DEVICE = 1, MH_THREADGROUP = 2 }; /* mem_flags */

/* One thread's place. */
typedef struct {
    unsigned in_grid[3], in_group[3], group[3], group_size[3], groups[3], index, lane, simdgroup;
} mh_place;

/* An operation of a whole SIMD group: the last lane to arrive does it for all, on what each has posted. */
typedef void (*mh_op)(void *const *lanes, int n, const unsigned char *order);

/* What a kernel asks of the runtime; copied into each compiled library before it runs. */
typedef struct {
    void (*barrier)(int flags);
    void (*simd)(mh_op op, void *mine, int flags);      /* op may be null: a barrier */
    const unsigned char *(*elements)(void);             /* which element of an 8x8 matrix a lane's two are: [lane * 2 + i] */
    int (*lane)(void);
    void (*fail)(const char *why);
    void (*access)(const void *p, unsigned n, int write); /* of a library compiled with checks; write: 1, or 2: atomic */
} mh_calls;

/* What a compiled library says of a kernel. */
typedef struct {
    const char *name;
    void (*run)(void *const *buffers, void *const *group_memory, const mh_place *place);
    unsigned buffers, group_memory; /* which indices it declares, a bit each */
    unsigned max_threads;           /* 0, or max_total_threads_per_threadgroup */
    unsigned long least[MH_BUFFERS]; /* bytes that must be bound: one element */
} mh_kernel;
#endif
