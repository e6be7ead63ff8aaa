/* A stand-in for Metal.framework on Linux, so that the shipped shim (csrc/metal/shim.m) and kernels (csrc/metal/ *.metal) run unchanged
 * where there is no Mac. It shows that they are right by the rules that Metal states, and is stricter than a GPU; it says nothing of
 * speed, of Apple's compiler, or of what Apple's hardware does beyond those rules.
 *
 *   Metal/Metal.h   the names of the framework that the shim uses     metal.m      this: objects, and their limits
 *   msl.h           the language, for clang                          mslc.py      the compiler of a source
 *   dispatch.c      runs a dispatch: fibers, orders, checks           build.py     a pyinfer with it
 *   test_host.py    the stand-in's own tests
 *
 * A use that Metal's validation refuses ends the process with a message that begins `metal_host:`. Work runs when it is waited for
 * (or something committed later is): who reads results before that, or changes inputs, sees it. Settings, beside dispatch.c's:
 *
 *   METAL_HOST_FTZ=1     kernels flush subnormals to zero, operands and results; looked at when a buffer is committed
 *   METAL_HOST_MACOS     14: compile options know no math mode (15)
 *   METAL_HOST_CACHE     where compiled kernels are kept (pyinfer-metal-host in the temporary folder)
 *   METAL_HOST_BUFFER    maxBufferLength (2^32), to test with a small one
 *
 * Manual retain and release. */
#define _GNU_SOURCE
#import <Metal/Metal.h>

#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dispatch.h"

#ifndef METAL_HOST_FOLDER
#error "METAL_HOST_FOLDER: where mslc.py lies"
#endif
enum { ALIGNMENT = 16384, SET_BYTES = 4096 };

@implementation MTLCompileOptions
@synthesize fastMathEnabled, languageVersion, mathMode;
- (id)init {
    if ((self = [super init])) fastMathEnabled = YES, languageVersion = MTLLanguageVersion2_3, mathMode = MTLMathModeFast;
    return self;
}
- (BOOL)respondsToSelector:(SEL)selector {
    if (sel_isEqual(selector, @selector(setMathMode:)) && mh_setting("METAL_HOST_MACOS", 15) < 15) return NO;
    return [super respondsToSelector:selector];
}
- (void)setMathMode:(MTLMathMode)mode {
    if (mh_setting("METAL_HOST_MACOS", 15) < 15) mh_fail("setMathMode: is of macOS 15");
    mathMode = mode;
    fastMathEnabled = mode != MTLMathModeSafe;
}
@end

/* ---- buffers ----------------------------------------------------------------------------------------------------*/

@interface MHBuffer : NSObject <MTLBuffer> {
  @public
    char *contents;
    NSUInteger length;
    void *all; /* what to unmap, or null */
    size_t all_bytes;
}
@end
@implementation MHBuffer
- (void *)contents {
    return contents;
}
- (NSUInteger)length {
    return length;
}
- (void)dealloc {
    if (all) munmap(all, all_bytes);
    [super dealloc];
}
@end

/* ---- libraries --------------------------------------------------------------------------------------------------*/

@interface MHLibrary : NSObject <MTLLibrary> {
  @public
    void *handle;
    const char *image, *image_end;
}
@end
@interface MHFunction : NSObject <MTLFunction> {
  @public
    NSString *name;
    MHLibrary *library;
    const mh_kernel *kernel;
}
@end
@implementation MHFunction
- (NSString *)name {
    return name;
}
- (void)dealloc {
    [name release];
    [library release];
    [super dealloc];
}
@end

static int find_image(struct dl_phdr_info *info, size_t bytes, void *data) {
    (void)bytes;
    MHLibrary *library = data;
    const char *inside = dlsym(library->handle, "mh_calls_of");
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const char *from = (const char *)info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, *to = from + info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type != PT_LOAD || inside < from || inside >= to) continue;
        for (int j = 0; j < info->dlpi_phnum; j++) {
            if (info->dlpi_phdr[j].p_type != PT_LOAD) continue;
            const char *a = (const char *)info->dlpi_addr + info->dlpi_phdr[j].p_vaddr, *b = a + info->dlpi_phdr[j].p_memsz;
            if (!library->image || a < library->image) library->image = a;
            if (b > library->image_end) library->image_end = b;
        }
        return 1;
    }
    return 0;
}

@implementation MHLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString *)name {
    if (!name) mh_fail("newFunctionWithName: nil");
    const mh_kernel *kernel = dlsym(handle, [[@"mh_kernel_" stringByAppendingString:name] UTF8String]);
    if (!kernel) return nil;
    MHFunction *function = [[MHFunction alloc] init];
    function->name = [name copy];
    function->library = [self retain];
    function->kernel = kernel;
    return function;
}
- (void)dealloc {
    if (handle) dlclose(handle);
    [super dealloc];
}
@end

@interface MHPipeline : NSObject <MTLComputePipelineState> {
  @public
    MHFunction *function;
}
@end
@implementation MHPipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup {
    return function->kernel->max_threads ? function->kernel->max_threads : MH_MAX_THREADS;
}
- (NSUInteger)threadExecutionWidth {
    return MH_LANES;
}
- (void)dealloc {
    [function release];
    [super dealloc];
}
@end

/* ---- commands ---------------------------------------------------------------------------------------------------*/

/* A dispatch as it was encoded, with what it keeps alive. */
@interface MHDispatch : NSObject {
  @public
    mh_dispatch d;
    id kept[MH_BUFFERS];
    MHPipeline *pipeline;
}
@end
@implementation MHDispatch
- (void)dealloc {
    for (int i = 0; i < MH_BUFFERS; i++) [kept[i] release];
    [pipeline release];
    [super dealloc];
}
@end

@class MHCommands;
@interface MHQueue : NSObject <MTLCommandQueue> {
  @public
    NSMutableArray *committed; /* and not yet run */
}
- (void)runUntil:(MHCommands *)last;
@end

@interface MHCommands : NSObject <MTLCommandBuffer> {
  @public
    MHQueue *queue;
    NSMutableArray *dispatches;
    MTLCommandBufferStatus status;
    BOOL encoding, flush;
}
@end

@interface MHEncoder : NSObject <MTLComputeCommandEncoder> {
  @public
    MHCommands *commands;
    BOOL ended;
    MHPipeline *pipeline;
    id bound[MH_BUFFERS]; /* MHBuffer, or NSData of setBytes */
    NSUInteger offsets[MH_BUFFERS], group_bytes[MH_GROUP_ARGS];
}
@end

@implementation MHEncoder
- (void)check:(const char *)what {
    if (ended) mh_fail("%s after endEncoding", what);
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
    [self check:"setComputePipelineState:"];
    if (!state) mh_fail("setComputePipelineState: nil");
    [(id)state retain];
    [pipeline release];
    pipeline = (MHPipeline *)state;
}
- (void)bind:(id)what offset:(NSUInteger)offset atIndex:(NSUInteger)index {
    if (index >= MH_BUFFERS) mh_fail("buffer index %lu: 0 to 30", (unsigned long)index);
    [what retain];
    [bound[index] release];
    bound[index] = what;
    offsets[index] = offset;
}
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
    [self check:"setBuffer:"];
    if (buffer && offset >= [buffer length])
        mh_fail("setBuffer: offset %lu into a buffer of %lu bytes", (unsigned long)offset, (unsigned long)[buffer length]);
    [self bind:buffer offset:offset atIndex:index];
}
- (void)setBytes:(const void *)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
    [self check:"setBytes:"];
    if (!bytes || !length || length > SET_BYTES) mh_fail("setBytes: %lu bytes: at least 1 and at most 4096", (unsigned long)length);
    MHBuffer *copy = [[MHBuffer alloc] init];
    copy->length = length;
    copy->contents = mh_guarded(length, 16, &copy->all, &copy->all_bytes);
    memcpy(copy->contents, bytes, length);
    [self bind:copy offset:0 atIndex:index];
    [copy release];
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
    [self check:"setThreadgroupMemoryLength:"];
    if (index >= MH_GROUP_ARGS) mh_fail("threadgroup memory index %lu: 0 to 30", (unsigned long)index);
    if (length % 16) mh_fail("setThreadgroupMemoryLength: %lu: a multiple of 16", (unsigned long)length);
    if (length > MH_GROUP_BYTES) mh_fail("setThreadgroupMemoryLength: %lu: at most 32768", (unsigned long)length);
    group_bytes[index] = length;
}
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads {
    [self check:"dispatchThreadgroups:"];
    if (!pipeline) mh_fail("dispatchThreadgroups: without a pipeline");
    const mh_kernel *kernel = pipeline->function->kernel;
    const char *name = kernel->name;
    const NSUInteger sizes[6] = {groups.width, groups.height, groups.depth, threads.width, threads.height, threads.depth};
    for (int i = 0; i < 6; i++)
        if (!sizes[i] || sizes[i] > UINT32_MAX) mh_fail("kernel %s: a size of %lu in a dispatch", name, (unsigned long)sizes[i]);
    const NSUInteger most = [pipeline maxTotalThreadsPerThreadgroup];
    for (int i = 3; i < 6; i++)
        if (sizes[i] > most) mh_fail("kernel %s: %lu threads to a threadgroup: at most %lu", name, (unsigned long)sizes[i], (unsigned long)most);
    if (sizes[3] * sizes[4] * sizes[5] > most)
        mh_fail("kernel %s: %lu threads to a threadgroup: at most %lu", name, (unsigned long)(sizes[3] * sizes[4] * sizes[5]), (unsigned long)most);
    MHDispatch *dispatch = [[[MHDispatch alloc] init] autorelease];
    dispatch->pipeline = [pipeline retain];
    mh_dispatch *d = &dispatch->d;
    d->kernel = kernel;
    d->image = pipeline->function->library->image, d->image_end = pipeline->function->library->image_end;
    NSUInteger total = 0;
    for (unsigned i = 0; i < MH_GROUP_ARGS; i++) {
        if (!(kernel->group_memory >> i & 1)) continue;
        if (!group_bytes[i]) mh_fail("kernel %s: no length is set for threadgroup(%u)", name, i);
        total += d->group_bytes[i] = group_bytes[i];
    }
    if (total > MH_GROUP_BYTES) mh_fail("kernel %s: %lu bytes of threadgroup memory: at most 32768", name, (unsigned long)total);
    for (unsigned i = 0; i < MH_BUFFERS; i++) {
        if (!(kernel->buffers >> i & 1)) continue;
        MHBuffer *buffer = bound[i];
        if (!buffer) mh_fail("kernel %s: nothing is bound to buffer(%u)", name, i);
        d->buffers[i] = buffer->contents + offsets[i];
        d->bytes[i] = buffer->length - offsets[i];
        if (d->bytes[i] < kernel->least[i])
            mh_fail("kernel %s: %zu bytes bound to buffer(%u), which declares %lu", name, d->bytes[i], i, kernel->least[i]);
        const size_t alignment = kernel->least[i] & -kernel->least[i];
        if (alignment && offsets[i] % (alignment < 16 ? alignment : 16))
            mh_fail("kernel %s: the offset %lu of buffer(%u) is not aligned to its type", name, (unsigned long)offsets[i], i);
        dispatch->kept[i] = [buffer retain];
    }
    for (int i = 0; i < 3; i++) d->groups[i] = (unsigned)sizes[i], d->threads[i] = (unsigned)sizes[3 + i];
    [commands->dispatches addObject:dispatch];
}
- (void)endEncoding {
    [self check:"endEncoding"];
    ended = YES;
    commands->encoding = NO;
}
- (void)dealloc {
    if (!ended) mh_fail("an encoder is released before endEncoding");
    for (int i = 0; i < MH_BUFFERS; i++) [bound[i] release];
    [pipeline release];
    [commands release];
    [super dealloc];
}
@end

@implementation MHCommands
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
    if (status != MTLCommandBufferStatusNotEnqueued) mh_fail("computeCommandEncoder after commit");
    if (encoding) mh_fail("computeCommandEncoder while another encoder is open");
    MHEncoder *encoder = [[[MHEncoder alloc] init] autorelease];
    encoder->commands = [self retain];
    encoding = YES;
    return encoder;
}
- (void)commit {
    if (status != MTLCommandBufferStatusNotEnqueued) mh_fail("commit of what is committed");
    if (encoding) mh_fail("commit before endEncoding");
    status = MTLCommandBufferStatusCommitted;
    flush = mh_setting("METAL_HOST_FTZ", 0) != 0;
    [queue->committed addObject:self];
}
- (void)waitUntilCompleted {
    if (status == MTLCommandBufferStatusNotEnqueued) mh_fail("waitUntilCompleted before commit: it would wait for ever");
    [queue runUntil:self];
}
- (void)run {
    for (MHDispatch *dispatch in dispatches) mh_run(&dispatch->d, flush);
    [dispatches removeAllObjects];
    status = MTLCommandBufferStatusCompleted;
}
- (MTLCommandBufferStatus)status {
    return status;
}
- (NSError *)error {
    return nil;
}
- (void)dealloc {
    [queue release];
    [dispatches release];
    [super dealloc];
}
@end

@implementation MHQueue
- (id)init {
    if ((self = [super init])) committed = [[NSMutableArray alloc] init];
    return self;
}
- (id<MTLCommandBuffer>)commandBuffer {
    MHCommands *commands = [[[MHCommands alloc] init] autorelease];
    commands->queue = [self retain];
    commands->dispatches = [[NSMutableArray alloc] init];
    return commands;
}
- (void)runUntil:(MHCommands *)last {
    while (last->status != MTLCommandBufferStatusCompleted) {
        MHCommands *first = [[committed objectAtIndex:0] retain];
        [committed removeObjectAtIndex:0];
        [first run];
        [first release];
    }
}
- (void)dealloc {
    [committed release];
    [super dealloc];
}
@end

/* ---- the device -------------------------------------------------------------------------------------------------*/

/* Runs mslc.py: the path of the library, or what the compiler says. */
static NSString *compile(NSString *source, BOOL fast, BOOL *good) {
    NSFileManager *files = [NSFileManager defaultManager];
    const char *kept = getenv("METAL_HOST_CACHE");
    NSString *folder = kept ? [NSString stringWithUTF8String:kept] : [NSTemporaryDirectory() stringByAppendingPathComponent:@"pyinfer-metal-host"];
    [files createDirectoryAtPath:folder withIntermediateDirectories:YES attributes:nil error:NULL];
    char text[] = "/tmp/metal-host-XXXXXX";
    const int file = mkstemp(text);
    const char *utf8 = [source UTF8String];
    const size_t length = strlen(utf8);
    if (file < 0 || write(file, utf8, length) != (ssize_t)length) mh_fail("cannot write a temporary file");
    close(file);
    NSString *command = [NSString stringWithFormat:@"unset LD_PRELOAD; exec python3 -I '%s/mslc.py' %s%s'%@' <%s 2>&1", METAL_HOST_FOLDER,
                                                   fast ? "--fast-math " : "", mh_setting("METAL_HOST_CHECK", 0) ? "--check " : "", folder, text];
    FILE *pipe = popen([command UTF8String], "r");
    if (!pipe) mh_fail("cannot run mslc.py");
    NSMutableData *said = [NSMutableData data];
    char part[4096];
    for (size_t n; (n = fread(part, 1, sizeof part, pipe)) > 0;) [said appendBytes:part length:n];
    const int code = pclose(pipe);
    unlink(text);
    *good = code == 0;
    NSString *answer = [[[NSString alloc] initWithData:said encoding:NSUTF8StringEncoding] autorelease];
    return [answer stringByTrimmingCharactersInSet:[NSCharacterSet whitespaceAndNewlineCharacterSet]];
}

@interface MHDevice : NSObject <MTLDevice>
@end
@implementation MHDevice
- (NSString *)name {
    return @"Metal stand-in (CPU)";
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
    return family <= MTLGPUFamilyApple7;
}
- (NSUInteger)maxBufferLength {
    return (NSUInteger)mh_setting("METAL_HOST_BUFFER", 1L << 32);
}
- (NSUInteger)maxThreadgroupMemoryLength {
    return MH_GROUP_BYTES;
}
- (uint64_t)recommendedMaxWorkingSetSize {
    return (uint64_t)1 << 33;
}
- (id<MTLCommandQueue>)newCommandQueue {
    return [[MHQueue alloc] init];
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source options:(MTLCompileOptions *)options error:(NSError **)error {
    if (!source) mh_fail("newLibraryWithSource: nil");
    BOOL good;
    NSString *answer = compile(source, !options || [options fastMathEnabled], &good);
    MHLibrary *library = [[MHLibrary alloc] init];
    if (good && (library->handle = dlopen([answer UTF8String], RTLD_NOW | RTLD_LOCAL))) {
        memcpy(dlsym(library->handle, "mh_calls_of"), &mh_runtime, sizeof mh_runtime);
        dl_iterate_phdr(find_image, library);
        return library;
    }
    if (good) mh_fail("%s", dlerror());
    [library release];
    if (error)
        *error = [NSError errorWithDomain:@"MTLLibraryErrorDomain"
                                     code:3
                                 userInfo:[NSDictionary dictionaryWithObject:answer forKey:NSLocalizedDescriptionKey]];
    return nil;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError **)error {
    (void)error;
    if (!function) mh_fail("newComputePipelineStateWithFunction: nil");
    MHPipeline *pipeline = [[MHPipeline alloc] init];
    pipeline->function = (MHFunction *)[(id)function retain];
    return pipeline;
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
    (void)options;
    if (!length) mh_fail("newBufferWithLength: 0");
    if (length > [self maxBufferLength]) return nil;
    MHBuffer *buffer = [[MHBuffer alloc] init];
    buffer->length = length;
    buffer->contents = mh_guarded(length, 16, &buffer->all, &buffer->all_bytes);
    return buffer;
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void *)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(MHDeallocator)deallocator {
    if (!pointer || (uintptr_t)pointer % ALIGNMENT || !length || length % ALIGNMENT)
        mh_fail("newBufferWithBytesNoCopy: %p, %lu bytes: both multiples of 16384", pointer, (unsigned long)length);
    if (options != MTLResourceStorageModeShared) mh_fail("newBufferWithBytesNoCopy: storage mode %lu: shared", (unsigned long)options);
    if (deallocator) mh_fail("newBufferWithBytesNoCopy: the stand-in has no deallocators");
    if (length > [self maxBufferLength]) return nil;
    MHBuffer *buffer = [[MHBuffer alloc] init];
    buffer->length = length;
    buffer->contents = pointer;
    return buffer;
}
@end

id<MTLDevice> MTLCreateSystemDefaultDevice(void) { return [[MHDevice alloc] init]; }
