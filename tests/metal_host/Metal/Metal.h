/* Metal/Metal.h: those names of Apple's framework that csrc/metal/shim.m uses, with their public meaning, for GNUstep on Linux.
 * What implements them is ../metal.m. */
#ifndef METAL_HOST_METAL_H
#define METAL_HOST_METAL_H
#import <Foundation/Foundation.h>

typedef struct {
    NSUInteger width, height, depth;
} MTLSize;
static inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth) {
    MTLSize size = {width, height, depth};
    return size;
}

typedef void *MHDeallocator; /* a block; nil is all that the shim gives, and GNUstep here knows no blocks */
typedef NSUInteger MTLResourceOptions;
enum { MTLResourceStorageModeShared = 0, MTLResourceStorageModeManaged = 1 << 4, MTLResourceStorageModePrivate = 2 << 4 };
typedef NSUInteger MTLCommandBufferStatus;
enum {
    MTLCommandBufferStatusNotEnqueued,
    MTLCommandBufferStatusEnqueued,
    MTLCommandBufferStatusCommitted,
    MTLCommandBufferStatusScheduled,
    MTLCommandBufferStatusCompleted,
    MTLCommandBufferStatusError
};
typedef NSUInteger MTLLanguageVersion;
enum { MTLLanguageVersion2_0 = 2 << 16, MTLLanguageVersion2_3 = (2 << 16) + 3, MTLLanguageVersion3_0 = 3 << 16 };
typedef NSInteger MTLGPUFamily;
enum { MTLGPUFamilyApple6 = 1006, MTLGPUFamilyApple7 = 1007, MTLGPUFamilyApple8 = 1008 };
typedef NSInteger MTLMathMode;
enum { MTLMathModeSafe, MTLMathModeRelaxed, MTLMathModeFast };

@interface MTLCompileOptions : NSObject {
    BOOL fastMathEnabled;
    MTLLanguageVersion languageVersion;
    MTLMathMode mathMode;
}
@property(nonatomic) BOOL fastMathEnabled; /* YES unless said otherwise */
@property(nonatomic) MTLLanguageVersion languageVersion;
@property(nonatomic) MTLMathMode mathMode; /* of macOS 15 */
@end

@protocol MTLResource <NSObject>
@end
@protocol MTLBuffer <MTLResource>
- (void *)contents;
- (NSUInteger)length;
@end

@protocol MTLFunction <NSObject>
- (NSString *)name;
@end

@protocol MTLLibrary <NSObject>
- (id<MTLFunction>)newFunctionWithName:(NSString *)name;
@end

@protocol MTLComputePipelineState <NSObject>
- (NSUInteger)maxTotalThreadsPerThreadgroup;
- (NSUInteger)threadExecutionWidth;
@end

@protocol MTLComputeCommandEncoder <NSObject>
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state;
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index;
- (void)setBytes:(const void *)bytes length:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads;
- (void)endEncoding;
@end

@protocol MTLCommandBuffer <NSObject>
- (id<MTLComputeCommandEncoder>)computeCommandEncoder;
- (void)commit;
- (void)waitUntilCompleted;
- (MTLCommandBufferStatus)status;
- (NSError *)error;
@end

@protocol MTLCommandQueue <NSObject>
- (id<MTLCommandBuffer>)commandBuffer;
@end

@protocol MTLDevice <NSObject>
- (NSString *)name;
- (BOOL)supportsFamily:(MTLGPUFamily)family;
- (NSUInteger)maxBufferLength;
- (NSUInteger)maxThreadgroupMemoryLength;
- (uint64_t)recommendedMaxWorkingSetSize;
- (id<MTLCommandQueue>)newCommandQueue;
- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source options:(MTLCompileOptions *)options error:(NSError **)error;
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError **)error;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void *)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(MHDeallocator)deallocator;
@end

extern id<MTLDevice> MTLCreateSystemDefaultDevice(void);
#endif
