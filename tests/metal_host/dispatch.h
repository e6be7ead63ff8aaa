/* dispatch.h: running one dispatch of a compiled kernel (dispatch.c), for metal.m. */
#ifndef METAL_HOST_DISPATCH_H
#define METAL_HOST_DISPATCH_H
#include <stddef.h>
#include <stdint.h>

#include "runtime.h"

typedef struct {
    const mh_kernel *kernel;
    void *buffers[MH_BUFFERS]; /* from the offset that was set on */
    size_t bytes[MH_BUFFERS];
    size_t group_bytes[MH_GROUP_ARGS];
    unsigned groups[3], threads[3];
    const char *image, *image_end; /* where the compiled library lies: its constants */
} mh_dispatch;

extern const mh_calls mh_runtime;
/* Prints what is wrong and aborts, as Metal's own validation does. */
_Noreturn void mh_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* A number from the environment. */
long mh_setting(const char *name, long otherwise);
/* Memory between 4 MB and 4 MB that nobody may touch, so that far strays are caught, too; filled with 0xFF. */
void *mh_guarded(size_t bytes, size_t align, void **all, size_t *all_bytes);
void mh_run(const mh_dispatch *d, int flush_subnormals);
#endif
