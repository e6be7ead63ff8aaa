/* Drives the stand-in for its tests: a misuse by name, or one kernel over files.
 *
 *   probe misuse NAME                                               should end with a message of the stand-in
 *   probe run SOURCE KERNEL GROUPS THREADS BYTES [=]FILE...          FILE i is buffer i, read before and written after; with `=` what
 *                                                                   setBytes gives; `-`: nothing bound. BYTES: of threadgroup memory
 * Environment: PROBE_FAST leaves fast math on, PROBE_TIMES dispatches that often. */
#import <Metal/Metal.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static id<MTLDevice> device;
static id<MTLLibrary> library(NSString *source, BOOL fast) {
    NSError *error = nil;
    MTLCompileOptions *options = [[MTLCompileOptions alloc] init];
    [options setFastMathEnabled:fast];
    id<MTLLibrary> made = [device newLibraryWithSource:source options:options error:&error];
    if (!made) {
        fprintf(stderr, "refused: %s\n", [[error localizedDescription] UTF8String]);
        exit(3);
    }
    return made;
}
static id<MTLComputePipelineState> pipeline(id<MTLLibrary> from, NSString *name) {
    id<MTLFunction> function = [from newFunctionWithName:name];
    if (!function) {
        fprintf(stderr, "refused: no kernel %s\n", [name UTF8String]);
        exit(3);
    }
    return [device newComputePipelineStateWithFunction:function error:NULL];
}

static NSString *const KERNELS = @"#include <metal_stdlib>\n"
                                  "using namespace metal;\n"
                                  "kernel void one(device float *x [[buffer(0)]]) { x[0] = 1.0f; }\n"
                                  "kernel void big(constant float4 &x [[buffer(1)]], device float *y [[buffer(0)]]) { y[0] = x.w; }\n"
                                  "[[max_total_threads_per_threadgroup(64)]] kernel void small(device float *x [[buffer(0)]]) { x[0] = 1.0f; }\n"
                                  "kernel void two(device float *x [[buffer(0)]], threadgroup float *a [[threadgroup(0)]],\n"
                                  "                threadgroup float *b [[threadgroup(1)]]) { a[0] = b[0] = x[0]; }\n";

static int misuse(const char *name) {
    id<MTLLibrary> kernels = library(KERNELS, NO);
    id<MTLCommandQueue> queue = [device newCommandQueue];
    id<MTLCommandBuffer> commands = [queue commandBuffer];
    id<MTLComputeCommandEncoder> e = [[commands computeCommandEncoder] retain];
    id<MTLBuffer> buffer = [device newBufferWithLength:64 options:MTLResourceStorageModeShared];
    char *pages = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0), bytes[5000] = {0};
    pages += (16384 - (uintptr_t)pages % 16384) % 16384;
    const MTLSize one = MTLSizeMake(1, 1, 1);
    [e setComputePipelineState:pipeline(kernels, @"one")];
#define CASE(text) if (!strcmp(name, text))
    CASE("nothing bound")[e dispatchThreadgroups:one threadsPerThreadgroup:one];
    [e setBuffer:buffer offset:0 atIndex:0];
    CASE("good") {
        id<MTLBuffer> whole = [device newBufferWithBytesNoCopy:pages length:16384 options:MTLResourceStorageModeShared deallocator:nil];
        [e setBuffer:whole offset:16 atIndex:0];
        [e setBytes:bytes length:4096 atIndex:30];
        [e dispatchThreadgroups:one threadsPerThreadgroup:MTLSizeMake(32, 32, 1)];
        [e setComputePipelineState:pipeline(kernels, @"two")];
        [e setThreadgroupMemoryLength:16384 atIndex:0];
        [e setThreadgroupMemoryLength:16384 atIndex:1];
        [e dispatchThreadgroups:one threadsPerThreadgroup:one];
        [e endEncoding];
        [commands commit];
        const float before = *(float *)(pages + 16); /* nothing runs before it is waited for */
        [commands waitUntilCompleted];
        return !(before == 0.0f && *(float *)(pages + 16) == 1.0f && [commands status] == MTLCommandBufferStatusCompleted);
    }
    CASE("pointer")[device newBufferWithBytesNoCopy:pages + 4096 length:16384 options:MTLResourceStorageModeShared deallocator:nil];
    CASE("length")[device newBufferWithBytesNoCopy:pages length:4096 options:MTLResourceStorageModeShared deallocator:nil];
    CASE("bytes")[e setBytes:bytes length:4097 atIndex:1];
    CASE("index")[e setBuffer:buffer offset:0 atIndex:31];
    CASE("bytes index")[e setBytes:bytes length:4 atIndex:31];
    CASE("offset")[e setBuffer:buffer offset:64 atIndex:0];
    CASE("threads")[e dispatchThreadgroups:one threadsPerThreadgroup:MTLSizeMake(32, 33, 1)];
    CASE("no threads")[e dispatchThreadgroups:one threadsPerThreadgroup:MTLSizeMake(0, 1, 1)];
    CASE("no groups")[e dispatchThreadgroups:MTLSizeMake(1, 0, 1) threadsPerThreadgroup:one];
    CASE("its threads") {
        [e setComputePipelineState:pipeline(kernels, @"small")];
        [e dispatchThreadgroups:one threadsPerThreadgroup:MTLSizeMake(65, 1, 1)];
    }
    CASE("group memory")[e setThreadgroupMemoryLength:32784 atIndex:0];
    CASE("group memory by 16")[e setThreadgroupMemoryLength:100 atIndex:0];
    CASE("group memory in all") {
        [e setComputePipelineState:pipeline(kernels, @"two")];
        [e setThreadgroupMemoryLength:16384 atIndex:0];
        [e setThreadgroupMemoryLength:16400 atIndex:1];
        [e dispatchThreadgroups:one threadsPerThreadgroup:one];
    }
    CASE("no group memory") {
        [e setComputePipelineState:pipeline(kernels, @"two")];
        [e setThreadgroupMemoryLength:16384 atIndex:0];
        [e dispatchThreadgroups:one threadsPerThreadgroup:one];
    }
    CASE("less than declared") {
        [e setComputePipelineState:pipeline(kernels, @"big")];
        [e setBytes:bytes length:12 atIndex:1];
        [e dispatchThreadgroups:one threadsPerThreadgroup:one];
    }
    CASE("alignment") {
        [e setComputePipelineState:pipeline(kernels, @"big")];
        [e setBuffer:buffer offset:8 atIndex:1];
        [e dispatchThreadgroups:one threadsPerThreadgroup:one];
    }
    CASE("no pipeline") {
        [e endEncoding];
        [[commands computeCommandEncoder] dispatchThreadgroups:one threadsPerThreadgroup:one];
    }
    CASE("open encoder")[commands commit];
    CASE("two encoders")[commands computeCommandEncoder];
    CASE("wait before commit")[commands waitUntilCompleted];
    [e endEncoding];
    CASE("encode after end")[e setBuffer:buffer offset:0 atIndex:0];
    [commands commit];
    CASE("commit twice")[commands commit];
    CASE("encoder after commit")[commands computeCommandEncoder];
    CASE("math mode")[[[MTLCompileOptions alloc] init] setMathMode:MTLMathModeSafe];
    fprintf(stderr, "nothing refused %s\n", name);
    return 2;
}

static NSData *read_file(const char *path) {
    NSData *data = [NSData dataWithContentsOfFile:[NSString stringWithUTF8String:path]];
    if (!data) fprintf(stderr, "cannot read %s\n", path), exit(2);
    return data;
}

static int run(int argc, char **argv) {
    NSString *source = [[NSString alloc] initWithData:read_file(argv[0]) encoding:NSUTF8StringEncoding];
    id<MTLComputePipelineState> kernel = pipeline(library(source, getenv("PROBE_FAST") != NULL), [NSString stringWithUTF8String:argv[1]]);
    id<MTLCommandBuffer> commands = [[device newCommandQueue] commandBuffer];
    id<MTLComputeCommandEncoder> e = [commands computeCommandEncoder];
    id<MTLBuffer> buffers[31] = {nil};
    [e setComputePipelineState:kernel];
    unsigned sizes[2][3];
    for (int i = 0; i < 2; i++)
        if (sscanf(argv[2 + i], "%u,%u,%u", &sizes[i][0], &sizes[i][1], &sizes[i][2]) != 3) return 2;
    if (atoi(argv[4])) [e setThreadgroupMemoryLength:(NSUInteger)atoi(argv[4]) atIndex:0];
    for (int i = 0; i < argc - 5; i++) {
        const char *path = argv[5 + i];
        if (*path == '-') continue;
        NSData *data = read_file(path + (*path == '='));
        if (*path == '=') {
            [e setBytes:[data bytes] length:[data length] atIndex:(NSUInteger)i];
            continue;
        }
        buffers[i] = [device newBufferWithLength:[data length] options:MTLResourceStorageModeShared];
        memcpy([buffers[i] contents], [data bytes], [data length]);
        [e setBuffer:buffers[i] offset:0 atIndex:(NSUInteger)i];
    }
    const char *times = getenv("PROBE_TIMES");
    for (int n = times ? atoi(times) : 1; n > 0; n--)
        [e dispatchThreadgroups:MTLSizeMake(sizes[0][0], sizes[0][1], sizes[0][2]) threadsPerThreadgroup:MTLSizeMake(sizes[1][0], sizes[1][1], sizes[1][2])];
    [e endEncoding];
    [commands commit];
    [commands waitUntilCompleted];
    for (int i = 0; i < argc - 5; i++)
        if (buffers[i])
            [[NSData dataWithBytes:[buffers[i] contents] length:[buffers[i] length]] writeToFile:[NSString stringWithUTF8String:argv[5 + i]] atomically:NO];
    return 0;
}

int main(int argc, char **argv) {
    @autoreleasepool {
        device = MTLCreateSystemDefaultDevice();
        if (argc == 3 && !strcmp(argv[1], "misuse")) return misuse(argv[2]);
        if (argc >= 7 && !strcmp(argv[1], "run")) return run(argc - 2, argv + 2);
    }
    return 2;
}
