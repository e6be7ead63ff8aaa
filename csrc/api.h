/* api.h: declarations only, compiled by C and read by cffi. Every function checks what it is given and sets the
 * floating-point environment that it needs; a return of PI_OK is 0, anything else an error code. */

enum { PI_OK = 0, PI_EINVAL = 1, PI_ENOMEM = 2, PI_ETYPE = 3 };
enum { /* GGUF's own numbers */
    PI_F32 = 0, PI_F16 = 1, PI_BF16 = 30,
    PI_Q4_0 = 2, PI_Q4_1 = 3, PI_Q5_0 = 6, PI_Q5_1 = 7, PI_Q8_0 = 8,
    PI_Q2_K = 10, PI_Q3_K = 11, PI_Q4_K = 12, PI_Q5_K = 13, PI_Q6_K = 14,
    PI_IQ4_NL = 20, PI_IQ4_XS = 23, PI_MXFP4 = 39
};

typedef struct pi_ctx pi_ctx;       /* a kernel table, worker threads, scratch */
typedef struct pi_weight pi_weight; /* a packed matrix */

/* What a cache holds of one sequence in one layer: tokens first..length, in blocks of `block` tokens, k[t / block] and v[t / block].
 * A row is head_dim values of one token and head: f32, f16, or q8_0 (int8[head_dim], then f16 d for each 32 of them). Rows: one
 * block; a row of K and of V at t * row_stride + h * head_stride. Tiles: head h of a block at h * head_stride; K there in tiles of 16
 * tokens, [head_dim][16] values, then (q8_0) [head_dim / 32][16] f16; V one row after the other. Strides are in bytes, multiples of
 * what an f32 takes, or an f16. */
enum { PI_ROWS = 0, PI_TILES = 1 };
typedef struct {
    void *const *k, *const *v;
    int64_t block;                   /* tokens to a block; of tiles a multiple of 16 */
    int64_t head_stride, row_stride;
    int64_t first, length, capacity; /* the first token held, the end of those written, the end of room */
    int64_t window;                  /* a query sees itself and window - 1 tokens before; 0: all */
    int layout, dtype;               /* PI_ROWS or PI_TILES; PI_F32, PI_F16 or (tiles) PI_Q8_0 */
    int n_kv_heads, head_dim;
} pi_kv_view;

/* What a thread takes at a time of a step of attention; moves no byte. */
enum { PI_UNIT_GROUP = 0, PI_UNIT_HEAD = 1, PI_UNIT_SPLIT = 2 };

/* Levels of instruction set. pi_ctx_new takes a level's name or NULL for the best that runs here; NULL on error. */
int pi_numerics(void);
int pi_level_count(void);
const char *pi_level_name(int level);
int pi_level_available(int level);
pi_ctx *pi_ctx_new(const char *level, int threads);
void pi_ctx_free(pi_ctx *c);
const char *pi_ctx_level(const pi_ctx *c);
int pi_ctx_threads(const pi_ctx *c);
/* For tests. The order in which threads take their ranges, 0: ascending, UINT32_MAX: descending, else by this seed; and how many
 * regions have been forked. */
void pi_ctx_scramble(pi_ctx *c, uint32_t seed);
int64_t pi_ctx_regions(const pi_ctx *c);
/* For traces. out[n][3]: thread (0: the caller), from, to, by pi_clock, of what threads did in forked regions since the last call;
 * gives how many, and notes down `room` more from now on (0: none). pi_clock: nanoseconds of a clock that only goes forward. */
int64_t pi_ctx_spans(pi_ctx *c, int64_t *out, int64_t n, int64_t room);
/* Likewise out[ops][2], when the last so many ops began and ended; all 0 if as many were not asked for the time before: that starts it,
 * and 0 ends it. */
int pi_ctx_op_times(pi_ctx *c, int64_t *out, int64_t ops);
int64_t pi_clock(void);
int pi_kernel_count(void);
const char *pi_kernel_name(int i);
const char *pi_ctx_kernel_level(const pi_ctx *c, int i); /* which level's kernel runs entry i */

/* Weights. `src` is GGUF data, rows * row bytes long; unless `pack`, it must outlive the weight. */
int pi_weight_new(pi_ctx *c, int type, int64_t rows, int64_t cols, const void *src, int64_t src_bytes, int pack, pi_weight **out);
void pi_weight_free(pi_weight *w);
int64_t pi_weight_bytes(const pi_weight *w); /* of the packed copy, or of src */
/* Where a packed matrix lies, for whoever reads it beside C: data, the distance between its row groups, and the pages around it,
 * which are there as long as the weight. PI_EINVAL for one that is not packed. */
int pi_weight_memory(const pi_weight *w, void **data, int64_t *group_bytes, void **pages, int64_t *page_bytes);
int pi_gather_rows(pi_ctx *c, const pi_weight *w, const int32_t *ids, int64_t n, float *y);

/* y_i[t] = w_i x[t] for up to three matrices over the same input rows; w1 and w2 may be NULL. add: NULL, or what is
 * added to y0, in a buffer of its own. */
int pi_matmul(pi_ctx *c, const pi_weight *w0, const pi_weight *w1, const pi_weight *w2, const float *x, int64_t tokens,
              const float *add, float *y0, float *y1, float *y2);
/* y[m][n] = a[m][k] b[k][n], as saxpy rows. */
int pi_matmul_rows(pi_ctx *c, const float *a, const float *b, int64_t m, int64_t k, int64_t n, float *y);

/* Attention of n_seqs sequences at once, which have the same heads: tokens[i] queries of sequence i, the last of which is its token
 * views[i]->length - 1. q, out: [sum of tokens][n_heads * head_dim]. unit_of: PI_UNIT_..; SPLIT for one query to a sequence. At most
 * `tasks` threads take part. */
int pi_attention(pi_ctx *c, const float *q, int64_t n_seqs, const pi_kv_view *const *views, const int64_t *tokens, int n_heads,
                 float scale, int unit_of, int tasks, float *out);
/* Writes k and v rows [tokens][n_kv_heads * head_dim] at positions view->length.., and moves the length on. */
int pi_kv_write(pi_ctx *c, pi_kv_view *view, const float *k, const float *v, int64_t tokens);

int pi_softmax_rows(pi_ctx *c, const float *x, int64_t rows, int64_t n, float *y);
int pi_rms_norm(pi_ctx *c, const float *x, const float *w, int64_t rows, int64_t n, float eps, float *y);
int pi_swiglu(pi_ctx *c, const float *gate, const float *up, int64_t n, float *y);
int pi_silu(pi_ctx *c, const float *x, int64_t n, float *y);
int pi_exp(pi_ctx *c, const float *x, int64_t n, float *y);
int pi_add(pi_ctx *c, const float *a, const float *b, int64_t n, float *y);
int pi_hadamard(pi_ctx *c, const float *a, const float *b, int64_t n, float *y);
int pi_sum_squares(pi_ctx *c, const float *x, int64_t rows, int64_t n, float *y);
int pi_narrow_f16(pi_ctx *c, const float *x, int64_t n, uint16_t *y);
int pi_widen_f16(pi_ctx *c, const uint16_t *x, int64_t n, float *y);

/* Rotates x[tokens][heads][head_dim] by rows first..first+tokens of the tables [n_pos][rot / 2]. */
int pi_rope(pi_ctx *c, const float *x, int64_t tokens, int64_t heads, int64_t head_dim, int64_t rot, int neox,
            const float *cos, const float *sin, int64_t n_pos, int64_t first, float *y);
/* Fills rows first..first+n of cos and sin [n][rot / 2]; factors: NULL or [rot / 2] divisors of the frequencies. */
int pi_rope_table(int64_t first, int64_t n, int64_t rot, double base, double scale, const float *factors, float *cos, float *sin);

/* Of `count` strings of a GGUF array, each its length in eight bytes and then its text, at most `bytes` in all: where each begins, and
 * in starts[count] the end. found: how many there are; if fewer, starts[found] is where the first begins that is cut short. */
int pi_string_starts(const void *data, int64_t bytes, int64_t count, int64_t *starts, int64_t *found);

/* What the machine can do, to hold speeds against. Reads all of `data`, whole blocks of 65,536 bytes; sum: the xor of its
 * 64-bit words. Makes units * steps rounds of the level's fastest multiply-adds, of f32 (type PI_F32) or of bytes (PI_Q8_0);
 * macs: how many that were, 0 at level ref. */
int pi_measure_read(pi_ctx *c, const void *data, int64_t bytes, uint64_t *sum);
int pi_measure_multiply(pi_ctx *c, int type, int64_t units, int64_t steps, int64_t *macs);
