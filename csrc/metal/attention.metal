/* Attention over the tiled cache, and writing into it; NUMERICS.md section 4, the layout: api.h (pi_kv_view, PI_TILES).
 *
 * A threadgroup has up to 8 rows, a row being a query and one of the heads that share a KV head: of decoding the heads of one query,
 * of a prompt several queries. Lanes are keys, then rows of softmax, then value dimensions; each fold is one thread's, ascending. */

/* Where a block begins, in units of 4 bytes: K and V. */
struct Place {
    uint k, v;
};

struct Attention {
    uint heads, n_heads, dim;          /* heads: query heads to a KV head */
    uint tokens, length, first, window; /* queries, the last of which is token length - 1; tokens held from `first` */
    uint block, head_bytes;            /* tokens to a block; from a head of it to the next */
    uint row, row_blocks;              /* the dispatch's first row, and how many threadgroups take theirs from there on */
    uint base, columns;                /* the token of column 0 of its scores, and how many there are */
    float scale;
};
enum { ROWS = 8, ATTENTION_THREADS = 256, SUM_CHUNK = 256 };

INLINE uint sees_to(constant Attention &c, uint t) { return c.length - c.tokens + t + 1u; }
INLINE uint sees_from(constant Attention &c, uint t) {
    const uint to = sees_to(c, t);
    return c.window != 0u && to > c.window ? max(c.first, to - c.window) : c.first;
}

/* acc + a * b, noting what may have been flushed: an operand that is subnormal, or a result. */
INLINE float fma_checked(float a, float b, float acc, thread bool &lost) {
    const float r = fma(a, b, acc);
    lost = lost || is_lost(r, a, b) || is_below(a, POWER_OF_TWO(-126)) || is_below(b, POWER_OF_TWO(-126));
    return r;
}

/* A step of scores. Of f16, which is a multiple of 2^-24, with q from 2^-79 on: nothing to note. */
INLINE float score_step(float q, half k, float acc, thread bool &lost) { return fma(q, float(k), acc); }
INLINE float score_step(float q, float k, float acc, thread bool &lost) { return fma_checked(q, k, acc, lost); }

/* A step of the values' fold. Where p is below 2^-79 (also one that came out TINY), p * v is below 2^-63: less than a quarter of the
 * last bit of acc from 2^-37 on, which then stays as it is. */
INLINE bool stays(float p, float v, float acc, thread bool &lost) {
    if (!is_below(p, POWER_OF_TWO(-79))) return false;
    lost = lost || ((magnitude(acc) < POWER_OF_TWO(-37) || magnitude(v) >= POWER_OF_TWO(16)) && magnitude(v) != 0u);
    return true;
}
INLINE float value_step(float p, half v, float acc, thread bool &lost) {
    const float wide = float(v);
    return stays(p, wide, acc, lost) ? acc : fma(p, wide, acc);
}
INLINE float value_step(float p, float v, float acc, thread bool &lost) { return stays(p, v, acc, lost) ? acc : fma_checked(p, v, acc, lost); }

template <typename T>
INLINE void attention(device atomic_uint *small, constant Attention &c, constant Place *places, device const float *q,
                      device const uchar *cache, device float *out, device float *scores, threadgroup float *memory, uint3 at,
                      uint thread_index, uint lane, uint sg) {
    const uint kv = at.y, row0 = c.row + at.x * ROWS, n_rows = min(c.tokens * c.heads - row0, uint(ROWS));
    threadgroup float *rows = memory, *chunk = memory + ROWS * c.dim + sg * SUM_CHUNK; /* rows of q [ROWS][dim] */
    device float *s = scores + (ulong(at.y) * c.row_blocks + at.x) * ROWS * c.columns;
    bool lost = false;

    for (uint i = thread_index; i < ROWS * c.dim; i += ATTENTION_THREADS) {
        const uint row = row0 + min(i / c.dim, n_rows - 1u);
        const float x = q[(ulong(row / c.heads) * c.n_heads + kv * c.heads + row % c.heads) * c.dim + i % c.dim];
        lost = lost || is_below(x, POWER_OF_TWO(-79));
        rows[i] = x;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    /* Lanes are keys: those that any of the rows sees. A query's loop has no mask; what it does not see is not read again. */
    const uint from = sees_from(c, row0 / c.heads), to = sees_to(c, (row0 + n_rows - 1u) / c.heads);
    for (uint t = from + thread_index; t < to; t += ATTENTION_THREADS) {
        const uint in_block = t % c.block;
        device const T *k = (device const T *)(cache + ulong(places[t / c.block].k) * 4u + ulong(kv) * c.head_bytes);
        k += in_block / LANES * LANES * c.dim + in_block % LANES;
        float acc[ROWS];
        for (uint r = 0; r < ROWS; r++) acc[r] = 0.0f;
        for (uint d = 0; d < c.dim; d++)
            for (uint r = 0; r < ROWS; r++) acc[r] = score_step(rows[r * c.dim + d], k[d * LANES], acc[r], lost);
        for (uint r = 0; r < n_rows; r++) s[r * c.columns + (t - c.base)] = acc[r] * c.scale;
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);

    /* A SIMD group has a row of softmax; all its lanes make the same sum. */
    if (sg < n_rows) {
        const uint query = (row0 + sg) / c.heads, lo = sees_from(c, query), n = sees_to(c, query) - lo;
        device float *x = s + sg * c.columns + (lo - c.base);
        float most = -INFINITY, sum = 0.0f;
        for (uint i = lane; i < n; i += SIMD) most = x[i] > most ? x[i] : most;
        most = simd_max(most);
        for (uint first = 0; first < n; first += SUM_CHUNK) {
            const uint end = min(n - first, uint(SUM_CHUNK));
            for (uint i = lane; i < end; i += SIMD) {
                const float e = exp_or_tiny(x[first + i] - most);
                x[first + i] = e;
                chunk[i] = e;
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            for (uint i = 0; i < end; i++) sum = add_exp(sum, chunk[i], lost);
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        for (uint i = lane; i < n; i += SIMD)
            if (!is_tiny(x[i])) x[i] = x[i] / sum;
    }
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);

    /* Lanes are value dimensions, of one row or of several. */
    for (uint i = thread_index; i < n_rows * c.dim; i += ATTENTION_THREADS) {
        const uint r = i / c.dim, d = i % c.dim, row = row0 + r, query = row / c.heads, end = sees_to(c, query);
        device const float *p = s + r * c.columns;
        float acc = 0.0f;
        for (uint t = sees_from(c, query); t < end;) {
            const uint stop = min((t / c.block + 1u) * c.block, end);
            device const T *v = (device const T *)(cache + ulong(places[t / c.block].v) * 4u + ulong(kv) * c.head_bytes) + d;
            for (; t < stop; t++) acc = value_step(p[t - c.base], v[t % c.block * c.dim], acc, lost);
        }
        out[(ulong(query) * c.n_heads + kv * c.heads + row % c.heads) * c.dim + d] = acc;
    }
    tell(small, lost);
}

struct Write {
    uint heads, dim, length, block, head_bytes; /* the first token goes to place `length` */
};

INLINE void store(device float *to, float x) { *to = x; }
INLINE void store(device ushort *to, float x) { *to = narrow(x); }

/* A thread has a value of K and one of V. */
template <typename T>
INLINE void kv_write(constant Write &c, constant Place *places, device uchar *cache, device const float *k, device const float *v, uint3 at) {
    const uint d = at.x, head = at.y, token = at.z, t = c.length + token, in_block = t % c.block;
    if (d >= c.dim) return;
    const ulong from = (ulong(token) * c.heads + head) * c.dim + d;
    device T *keys = (device T *)(cache + ulong(places[t / c.block].k) * 4u + ulong(head) * c.head_bytes);
    device T *values = (device T *)(cache + ulong(places[t / c.block].v) * 4u + ulong(head) * c.head_bytes);
    store(keys + in_block / LANES * LANES * c.dim + d * LANES + in_block % LANES, k[from]);
    store(values + in_block * c.dim + d, v[from]);
}

#define CACHE(stem, T, STORED) \
    kernel void attention_##stem(device atomic_uint *small [[buffer(0)]], constant Attention &c [[buffer(1)]], \
                                 constant Place *places [[buffer(2)]], device const float *q [[buffer(3)]], \
                                 device const uchar *cache [[buffer(4)]], device float *out [[buffer(5)]], \
                                 device float *scores [[buffer(6)]], threadgroup float *memory [[threadgroup(0)]], \
                                 uint3 at [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]], \
                                 uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]) { \
        attention<T>(small, c, places, q, cache, out, scores, memory, at, thread_index, lane, sg); \
    } \
    kernel void kv_write_##stem(constant Write &c [[buffer(1)]], constant Place *places [[buffer(2)]], device uchar *cache [[buffer(3)]], \
                                device const float *k [[buffer(4)]], device const float *v [[buffer(5)]], \
                                uint3 at [[thread_position_in_grid]]) { \
        kv_write<STORED>(c, places, cache, k, v, at); \
    }
CACHE(f32, float, float)
CACHE(f16, half, ushort)
