/* The GPU of the Metal backend behind a plain C interface (shim.h). Manual retain and release; autoreleased objects end with the
 * pool of the function that asked for them. One command buffer with one serial encoder is open at a time: its dispatches run in
 * order and each sees what those before it wrote, so there is nothing to synchronise. */
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "shim.h"

enum { PAGE_BYTES = 16384, SET_BYTES = 4096, FIRST_DATA = 3, MAX_BUFFERS = 31, MAX_KERNELS = 128 };

typedef struct {
    uint8_t *base;
    int64_t bytes;
    int own; /* whether it was allocated here */
    id<MTLBuffer> buffer;
} memory;

struct pi_gpu {
    id<MTLDevice> device;
    id<MTLLibrary> library;
    id<MTLCommandQueue> queue;
    id<MTLBuffer> small;
    id<MTLCommandBuffer> commands; /* open, or nil */
    id<MTLComputeCommandEncoder> encoder;
    id<MTLComputePipelineState> kernels[MAX_KERNELS];
    int n_kernels;
    memory *memories; /* by address */
    int64_t n_memories, room;
    char name[128];
};

static void say(char *error, int64_t bytes, const char *what, NSError *why) {
    if (!error || bytes < 1) return;
    const char *detail = why ? [[why localizedDescription] UTF8String] : NULL;
    snprintf(error, (size_t)bytes, "%s%s%s", what, detail ? ": " : "", detail ? detail : "");
}

/* No operation is fused, reordered or estimated. The older name of this option is the one that every SDK knows. */
static MTLCompileOptions *compile_options(void) {
    MTLCompileOptions *options = [[[MTLCompileOptions alloc] init] autorelease];
    [options setLanguageVersion:MTLLanguageVersion2_3];
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
    [options setFastMathEnabled:NO];
#pragma clang diagnostic pop
    if ([options respondsToSelector:NSSelectorFromString(@"setMathMode:")])
        [options setValue:[NSNumber numberWithInteger:0] forKey:@"mathMode"]; /* MTLMathModeSafe, of macOS 15 */
    return options;
}

pi_gpu *pi_gpu_open(const char *source, char *error, int64_t error_bytes) {
    @autoreleasepool {
        NSError *why = nil;
        pi_gpu *g = calloc(1, sizeof *g);
        if (!g) return say(error, error_bytes, "out of memory", nil), NULL;
        g->device = MTLCreateSystemDefaultDevice();
        if (!g->device) {
            say(error, error_bytes, "there is no Metal device", nil);
            return pi_gpu_close(g), NULL;
        }
        snprintf(g->name, sizeof g->name, "%s", [[g->device name] UTF8String]);
        g->library = [g->device newLibraryWithSource:[NSString stringWithUTF8String:source] options:compile_options() error:&why];
        if (!g->library) {
            say(error, error_bytes, "the kernels do not compile", why);
            return pi_gpu_close(g), NULL;
        }
        g->queue = [g->device newCommandQueue];
        g->small = [g->device newBufferWithLength:PAGE_BYTES options:MTLResourceStorageModeShared];
        if (!g->queue || !g->small) {
            say(error, error_bytes, "the device gives no queue or no memory", nil);
            return pi_gpu_close(g), NULL;
        }
        *(uint32_t *)[g->small contents] = 0;
        return g;
    }
}

static void drop(memory *m) {
    [m->buffer release];
    if (m->own) munmap(m->base, (size_t)m->bytes);
}

void pi_gpu_close(pi_gpu *g) {
    if (!g) return;
    @autoreleasepool {
        if (g->encoder) [g->encoder endEncoding]; /* an encoder must not die open; what it holds is never committed */
        [g->encoder release];
        [g->commands release];
        for (int i = 0; i < g->n_kernels; i++) [g->kernels[i] release];
        for (int64_t i = 0; i < g->n_memories; i++) drop(&g->memories[i]);
        [g->small release];
        [g->queue release];
        [g->library release];
        [g->device release];
    }
    free(g->memories);
    free(g);
}

const char *pi_gpu_name(const pi_gpu *g) { return g->name; }

void pi_gpu_limits_of(const pi_gpu *g, pi_gpu_limits *out) {
    @autoreleasepool {
        out->buffer_bytes = (int64_t)[g->device maxBufferLength];
        out->working_set_bytes = (int64_t)[g->device recommendedMaxWorkingSetSize];
        out->group_bytes = (int64_t)[g->device maxThreadgroupMemoryLength];
        out->simd_matrices = [g->device supportsFamily:MTLGPUFamilyApple7];
    }
}

int pi_gpu_kernel(pi_gpu *g, const char *name, int64_t *threads, char *error, int64_t error_bytes) {
    @autoreleasepool {
        NSError *why = nil;
        id<MTLFunction> function = [g->library newFunctionWithName:[NSString stringWithUTF8String:name]];
        if (!function || g->n_kernels == MAX_KERNELS) {
            say(error, error_bytes, function ? "too many kernels" : "there is no kernel of this name", nil);
            [function release];
            return -1;
        }
        id<MTLComputePipelineState> kernel = [g->device newComputePipelineStateWithFunction:function error:&why];
        [function release];
        if (!kernel || [kernel threadExecutionWidth] != 32) {
            say(error, error_bytes, kernel ? "its SIMD groups do not have 32 threads" : "it makes no pipeline", why);
            [kernel release];
            return -1;
        }
        *threads = (int64_t)[kernel maxTotalThreadsPerThreadgroup];
        g->kernels[g->n_kernels] = kernel;
        return g->n_kernels++;
    }
}

/* ---- memory --------------------------------------------------------------------------------------------*/

/* How many memories begin at or before p. */
static int64_t memories_to(const pi_gpu *g, const void *p) {
    int64_t lo = 0, hi = g->n_memories;
    while (lo < hi) {
        const int64_t mid = (lo + hi) / 2;
        if ((uintptr_t)g->memories[mid].base <= (uintptr_t)p) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

static const memory *find(const pi_gpu *g, const void *p) {
    const int64_t n = memories_to(g, p);
    if (!n) return NULL;
    const memory *m = &g->memories[n - 1];
    return (uintptr_t)p - (uintptr_t)m->base < (uintptr_t)m->bytes ? m : NULL;
}

static int add_memory(pi_gpu *g, void *base, int64_t bytes, int own) {
    if (!base || bytes < 1 || bytes % PAGE_BYTES || (uintptr_t)base % PAGE_BYTES) return PI_GPU_EINVAL;
    if (g->n_memories == g->room) {
        const int64_t room = g->room ? 2 * g->room : 64;
        memory *more = realloc(g->memories, (size_t)room * sizeof *more);
        if (!more) return PI_GPU_EFAIL;
        g->memories = more, g->room = room;
    }
    @autoreleasepool {
        id<MTLBuffer> buffer = [g->device newBufferWithBytesNoCopy:base
                                                            length:(NSUInteger)bytes
                                                           options:MTLResourceStorageModeShared
                                                       deallocator:nil];
        if (!buffer) return PI_GPU_EFAIL;
        const int64_t at = memories_to(g, base);
        memmove(g->memories + at + 1, g->memories + at, (size_t)(g->n_memories - at) * sizeof *g->memories);
        g->memories[at] = (memory){base, bytes, own, buffer};
        g->n_memories++;
    }
    return PI_GPU_OK;
}

void *pi_gpu_alloc(pi_gpu *g, int64_t bytes) {
    if (bytes < 1 || bytes > INT64_MAX / 2) return NULL;
    bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    uint8_t *all = mmap(NULL, (size_t)bytes + PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (all == MAP_FAILED) return NULL;
    /* The system's pages may be smaller: cut what sticks out on either side. */
    const size_t before = (PAGE_BYTES - (uintptr_t)all % PAGE_BYTES) % PAGE_BYTES, behind = PAGE_BYTES - before;
    if (before) munmap(all, before);
    if (behind) munmap(all + before + bytes, behind);
    if (add_memory(g, all + before, bytes, 1) == PI_GPU_OK) return all + before;
    munmap(all + before, (size_t)bytes);
    return NULL;
}

int pi_gpu_wrap(pi_gpu *g, void *base, int64_t bytes) { return add_memory(g, base, bytes, 0); }

void pi_gpu_forget(pi_gpu *g, void *base) {
    const int64_t at = memories_to(g, base) - 1;
    if (at < 0 || g->memories[at].base != base) return;
    @autoreleasepool {
        drop(&g->memories[at]);
    }
    memmove(g->memories + at, g->memories + at + 1, (size_t)(--g->n_memories - at) * sizeof *g->memories);
}

int64_t pi_gpu_memory(const pi_gpu *g, const void *p, void **base) {
    const memory *m = find(g, p);
    *base = m ? m->base : NULL;
    return m ? m->bytes : 0;
}

/* ---- dispatches ----------------------------------------------------------------------------------------*/

static int open_encoder(pi_gpu *g) {
    if (g->encoder) return PI_GPU_OK;
    g->commands = [[g->queue commandBuffer] retain];
    g->encoder = [[g->commands computeCommandEncoder] retain];
    if (g->encoder) {
        [g->encoder setBuffer:g->small offset:0 atIndex:0];
        return PI_GPU_OK;
    }
    [g->commands release];
    g->commands = nil;
    return PI_GPU_EFAIL;
}

int pi_gpu_encode(pi_gpu *g, int kernel, const void *constants, int64_t constant_bytes, const void *table, int64_t table_bytes,
                  const void *const *data, int n_data, const int64_t shape[5]) {
    if (kernel < 0 || kernel >= g->n_kernels || n_data < 0 || n_data > MAX_BUFFERS - FIRST_DATA) return PI_GPU_EINVAL;
    if (constant_bytes < 0 || constant_bytes > SET_BYTES || table_bytes < 0 || table_bytes > SET_BYTES) return PI_GPU_EINVAL;
    for (int i = 0; i < 4; i++)
        if (shape[i] < 1 || shape[i] > UINT32_MAX) return PI_GPU_EINVAL;
    const memory *in[MAX_BUFFERS];
    for (int i = 0; i < n_data; i++)
        if (data[i] && !(in[i] = find(g, data[i]))) return PI_GPU_EUNKNOWN;
    @autoreleasepool {
        if (open_encoder(g)) return PI_GPU_EFAIL;
        [g->encoder setComputePipelineState:g->kernels[kernel]];
        if (constant_bytes) [g->encoder setBytes:constants length:(NSUInteger)constant_bytes atIndex:1];
        if (table_bytes) [g->encoder setBytes:table length:(NSUInteger)table_bytes atIndex:2];
        for (int i = 0; i < n_data; i++) {
            /* In the place of NULL, which the kernel does not touch, something that is bound. */
            id<MTLBuffer> buffer = data[i] ? in[i]->buffer : g->small;
            const NSUInteger offset = data[i] ? (NSUInteger)((const uint8_t *)data[i] - in[i]->base) : 0;
            [g->encoder setBuffer:buffer offset:offset atIndex:(NSUInteger)(FIRST_DATA + i)];
        }
        if (shape[4]) [g->encoder setThreadgroupMemoryLength:(NSUInteger)(shape[4] + 15) / 16 * 16 atIndex:0];
        [g->encoder dispatchThreadgroups:MTLSizeMake((NSUInteger)shape[0], (NSUInteger)shape[1], (NSUInteger)shape[2])
                   threadsPerThreadgroup:MTLSizeMake((NSUInteger)shape[3], 1, 1)];
    }
    return PI_GPU_OK;
}

int pi_gpu_finish(pi_gpu *g, int *small, char *error, int64_t error_bytes) {
    *small = 0;
    if (!g->encoder) return PI_GPU_OK;
    int code = PI_GPU_OK;
    @autoreleasepool {
        [g->encoder endEncoding];
        [g->commands commit];
        [g->commands waitUntilCompleted];
        if ([g->commands status] != MTLCommandBufferStatusCompleted) {
            say(error, error_bytes, "the command buffer did not complete", [g->commands error]);
            code = PI_GPU_EFAIL;
        }
        uint32_t *word = [g->small contents];
        *small = *word != 0;
        *word = 0;
        [g->encoder release];
        [g->commands release];
        g->encoder = nil, g->commands = nil;
    }
    return code;
}
