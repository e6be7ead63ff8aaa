/* shim.h: declarations only, compiled by Objective-C and read by cffi (ffi.py). What the Metal backend needs of a GPU, and no more:
 * memory that both sides see, kernels by name, one open list of dispatches that run in the order in which they were encoded.
 * One thread at a time uses a pi_gpu. A return of PI_GPU_OK is 0, anything else an error code; `error` gets a text. */

enum { PI_GPU_OK = 0, PI_GPU_EINVAL = 1, PI_GPU_EUNKNOWN = 2, PI_GPU_EFAIL = 3 };

typedef struct pi_gpu pi_gpu;

/* The kernels' source, all of csrc/metal/ one behind the other. */
const char *pi_gpu_source(void);

/* The system's GPU with the kernels of `source`; NULL and a text where there is none, or where the source does not compile. */
pi_gpu *pi_gpu_open(const char *source, char *error, int64_t error_bytes);
void pi_gpu_close(pi_gpu *g);
const char *pi_gpu_name(const pi_gpu *g);

typedef struct {
    int64_t buffer_bytes;      /* of one buffer, at most */
    int64_t working_set_bytes; /* what the device recommends to use in all */
    int64_t group_bytes;       /* of threadgroup memory */
    int32_t simd_matrices;     /* whether it has simdgroup matrices: Apple7 and later */
} pi_gpu_limits;
void pi_gpu_limits_of(const pi_gpu *g, pi_gpu_limits *out);

/* A kernel's number, or -1 and a text; `threads`: how many of them a threadgroup may have. */
int pi_gpu_kernel(pi_gpu *g, const char *name, int64_t *threads, char *error, int64_t error_bytes);

/* Memory that the GPU sees too: fresh and zero, or of the caller, who keeps it until `forget`. Both in whole pages of 16 KiB.
 * Nothing that is encoded and not yet finished may use what is forgotten. */
void *pi_gpu_alloc(pi_gpu *g, int64_t bytes);
int pi_gpu_wrap(pi_gpu *g, void *base, int64_t bytes);
void pi_gpu_forget(pi_gpu *g, void *base);
/* The memory that `p` lies in: its bytes, and where it begins; 0 if the GPU does not know it. */
int64_t pi_gpu_memory(const pi_gpu *g, const void *p, void **base);

/* One dispatch, run by `finish`. Buffer 0 of a kernel: one word, set by what cannot promise its bytes; 1: `constants`; 2: `table`
 * (each at most 4 KiB, copied; or none); 3 and on: `data`, pointers into memory that the GPU sees, or NULL.
 * PI_GPU_EUNKNOWN: one of them is not. `shape`: groups in x, y and z, threads to a group, bytes of threadgroup memory. */
int pi_gpu_encode(pi_gpu *g, int kernel, const void *constants, int64_t constant_bytes, const void *table, int64_t table_bytes,
                  const void *const *data, int n_data, const int64_t shape[5]);
/* Runs what has been encoded and waits for it. `small`: whether a kernel set that word. */
int pi_gpu_finish(pi_gpu *g, int *small, char *error, int64_t error_bytes);
