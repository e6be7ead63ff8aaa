/* Weights times activations, and rows of weights; NUMERICS.md section 3, the layout of packed weights: quant.h.
 *
 * The integer dot product of a scale group is exact in any order, so it is spread over threads, or over the multipliers of a matrix
 * unit: 32 products of 8 bits by 8 lie far below 2^24. The fold over groups is one thread's, ascending, one fma to a group. */

enum { SCALE_D, SCALE_DM, SCALE_S8X2, SCALE_U8M };

struct Scales {
    float scale, min;
};
INLINE int signed_byte(uint v, uint i) { return int(char(v >> (8u * i) & 0xffu)); }

template <int BITS, int OFFSET, int SCALES> struct Format {
    enum {
        nibble = BITS == 4 || BITS == 5 || BITS == 6,
        two = BITS == 6,
        one = BITS == 5,
        code_bytes = BITS * 64,
        parts = SCALES == SCALE_S8X2 ? 2 : 1, /* scale groups to a block */
        has_min = SCALES == SCALE_DM || SCALES == SCALE_U8M,
        has_super = SCALES == SCALE_S8X2 || SCALES == SCALE_U8M,
        super_bytes = !has_super ? 0 : has_min ? 64 : 32,
        sub_bytes = SCALES == SCALE_DM ? 64 : 32
    };

    INLINE uint word(device const uchar *planes, uint vector) { return *(device const uint *)(planes + vector * 64u); }

    /* Codes 4k .. 4k+3 of the row whose part of a block's planes begins at `planes`, a byte each, as stored; and the integer of one. */
    INLINE uint four(device const uchar *planes, uint k) {
        if (BITS == 8) return word(planes, k);
        uint v = word(planes, k % 4u) >> (k / 4u * 4u) & 0x0f0f0f0fu;
        if (two) v |= (word(planes, 4u + k / 4u) >> (k % 4u * 2u) & 0x03030303u) << 4;
        if (one) v |= (word(planes, 4u) >> k & 0x01010101u) << 4;
        return v;
    }
    INLINE int code(uint v, uint i) { return BITS == 8 ? signed_byte(v, i) : int(v >> (8u * i) & 0xffu) - OFFSET; }

    /* s_g and m_g of row r's block b, or of a half of it. */
    INLINE Scales scales(device const uchar *group, uint blocks, uint b, uint part, uint r) {
        device const uchar *shared = group + blocks * code_bytes + b / 8u * (super_bytes + 8 * sub_bytes);
        device const uchar *sub = shared + super_bytes + b % 8u * sub_bytes;
        device const half *d = (device const half *)(has_super ? shared : sub);
        const float first = float(d[r]);
        if (SCALES == SCALE_D) return Scales{first, 0.0f};
        if (SCALES == SCALE_S8X2) return Scales{first * float(((device const char *)sub)[part * LANES + r]), 0.0f};
        const float second = float(d[LANES + r]);
        if (SCALES == SCALE_DM) return Scales{first, second};
        return Scales{first * float(sub[r]), -(second * float(sub[LANES + r]))};
    }
};

typedef Format<4, 8, SCALE_D> Q4_0;
typedef Format<4, 0, SCALE_DM> Q4_1;
typedef Format<5, 16, SCALE_D> Q5_0;
typedef Format<8, 0, SCALE_D> Q8_0;
typedef Format<4, 0, SCALE_U8M> Q4_K;
typedef Format<5, 0, SCALE_U8M> Q5_K;
typedef Format<6, 32, SCALE_S8X2> Q6_K;

struct Matmul {
    uint rows, cols, blocks, tokens;
    ulong group_bytes;
    uint add; /* whether something is added */
};

INLINE device const uchar *group_of(device const uchar *w, constant Matmul &c, uint row) { return w + ulong(row / LANES) * c.group_bytes; }

/* add + acc: acc is a multiple of 2^-126, and so must be what is added. */
INLINE void finish(device atomic_uint *small, constant Matmul &c, device const float *add, device float *y, uint row, uint token, float acc) {
    const ulong i = ulong(token) * c.rows + row;
    if (c.add != 0u) {
        tell(small, !is_fine(add[i]));
        acc = add[i] + acc;
    }
    y[i] = acc;
}

/* ---- matrix times a row ----------------------------------------------------------------------------------
 * A threadgroup has 32 weight rows, a lane to each, and one token. Its 8 SIMD groups share the blocks of a chunk; what they find, the
 * integer and the step, goes into threadgroup memory, where the first folds it. */

enum { MATVEC_CHUNK = 32, MATVEC_SIMDS = 8 };

template <typename F>
INLINE void matvec(device atomic_uint *small, constant Matmul &c, device const uchar *w, device const char *q, device const float *d,
                   device const float *sx, device const float *add, device float *y, threadgroup float *memory, uint3 at, uint lane,
                   uint sg) {
    const uint row = at.x * SIMD + lane, token = at.y, here = min(row, c.rows - 1u), r = here % LANES;
    device const uchar *group = group_of(w, c, here);
    q += ulong(token) * c.cols, d += ulong(token) * c.blocks, sx += ulong(token) * c.blocks;
    threadgroup float *dots = memory, *steps = dots + MATVEC_CHUNK * F::parts * SIMD, *mins = steps + MATVEC_CHUNK * F::parts * SIMD;
    float acc = 0.0f;
    for (uint first = 0; first < c.blocks; first += MATVEC_CHUNK) {
        const uint n = min(c.blocks - first, uint(MATVEC_CHUNK));
        for (uint i = sg; i < n; i += MATVEC_SIMDS) {
            const uint b = first + i;
            device const uchar *planes = group + b * F::code_bytes + r * 4u;
            device const uint *x = (device const uint *)(q + b * BLOCK_SIZE);
            for (uint part = 0; part < F::parts; part++) {
                int dot = 0;
                for (uint k = part * 8u / F::parts; k < (part + 1u) * 8u / F::parts; k++) {
                    const uint v = F::four(planes, k), xk = x[k];
                    for (uint j = 0; j < 4u; j++) dot += F::code(v, j) * signed_byte(xk, j);
                }
                const Scales s = F::scales(group, c.blocks, b, part, r);
                const uint to = (i * F::parts + part) * SIMD + lane;
                dots[to] = float(dot);
                steps[to] = s.scale * d[b];
                if (F::has_min) mins[to] = s.min;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (sg == 0u)
            for (uint i = 0; i < n; i++)
                for (uint part = 0; part < F::parts; part++) {
                    const uint from = (i * F::parts + part) * SIMD + lane;
                    acc = fma(dots[from], steps[from], acc);
                    if (F::has_min) acc = fma(mins[from], sx[first + i], acc);
                }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (sg == 0u && row < c.rows) finish(small, c, add, y, row, token, acc);
}

/* ---- matrix times many rows ------------------------------------------------------------------------------
 * A threadgroup has 32 weight rows and 32 tokens. A block's codes go into threadgroup memory as floats; each of its 4 SIMD groups
 * multiplies 8 tokens by 32 rows there, and then folds, a lane to a weight row:
 *
 *     codes of q [32 tokens][32]  x  codes of w [32][32 rows]  ->  dots of a SIMD group [8 tokens][32 rows] */

enum { TILE_ROWS = 32, TILE_TOKENS = 32, TILE_SIMDS = 4, SIMD_TOKENS = 8 };

template <typename F>
INLINE void matmul(device atomic_uint *small, constant Matmul &c, device const uchar *w, device const char *q, device const float *d,
                   device const float *sx, device const float *add, device float *y, threadgroup float *memory, uint3 at, uint lane,
                   uint sg) {
    const uint row = at.x * TILE_ROWS + lane, here = min(row, c.rows - 1u), r = here % LANES, token = at.y * TILE_TOKENS + sg * SIMD_TOKENS;
    device const uchar *group = group_of(w, c, here);
    threadgroup float *wt = memory, *qt = wt + BLOCK_SIZE * TILE_ROWS, *dots = qt + TILE_TOKENS * BLOCK_SIZE + sg * SIMD_TOKENS * TILE_ROWS;
    float acc[SIMD_TOKENS];
    for (uint t = 0; t < SIMD_TOKENS; t++) acc[t] = 0.0f;
    for (uint b = 0; b < c.blocks; b++) {
        for (uint k = sg * 2u; k < sg * 2u + 2u; k++) {
            const uint v = F::four(group + b * F::code_bytes + r * 4u, k);
            for (uint i = 0; i < 4u; i++) wt[(k * 4u + i) * TILE_ROWS + lane] = float(F::code(v, i));
        }
        for (uint t = 0; t < SIMD_TOKENS; t++) {
            const uint from = min(token + t, c.tokens - 1u);
            qt[(sg * SIMD_TOKENS + t) * BLOCK_SIZE + lane] = float(q[ulong(from) * c.cols + b * BLOCK_SIZE + lane]);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint part = 0; part < F::parts; part++) {
            for (uint j = 0; j < TILE_ROWS; j += 8u) {
                simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f), left, right;
                for (uint k = part * BLOCK_SIZE / F::parts; k < (part + 1u) * BLOCK_SIZE / F::parts; k += 8u) {
                    simdgroup_load(left, qt + sg * SIMD_TOKENS * BLOCK_SIZE + k, BLOCK_SIZE);
                    simdgroup_load(right, wt + k * TILE_ROWS + j, TILE_ROWS);
                    simdgroup_multiply_accumulate(sum, left, right, sum);
                }
                simdgroup_store(sum, dots + j, TILE_ROWS);
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
            const Scales s = F::scales(group, c.blocks, b, part, r);
            for (uint t = 0; t < SIMD_TOKENS; t++) {
                const ulong block = ulong(min(token + t, c.tokens - 1u)) * c.blocks + b;
                acc[t] = fma(dots[t * TILE_ROWS + lane], s.scale * d[block], acc[t]);
                if (F::has_min) acc[t] = fma(s.min, sx[block], acc[t]);
            }
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint t = 0; t < SIMD_TOKENS; t++)
        if (row < c.rows && token + t < c.tokens) finish(small, c, add, y, row, token + t, acc[t]);
}

/* ---- rows read back --------------------------------------------------------------------------------------*/

struct Gather {
    uint cols, blocks;
    ulong group_bytes;
};

template <typename F> INLINE float value_of(device const uchar *group, uint blocks, uint col, uint r) {
    const uint b = col / BLOCK_SIZE, i = col % BLOCK_SIZE;
    const Scales s = F::scales(group, blocks, b, i * F::parts / BLOCK_SIZE, r);
    const float code = float(F::code(F::four(group + b * F::code_bytes + r * 4u, i / 4u), i % 4u));
    return F::has_min ? fma(s.scale, code, s.min) : s.scale * code;
}

#define WEIGHT_ARGS \
    device atomic_uint *small [[buffer(0)]], constant Matmul &c [[buffer(1)]], device const uchar *w [[buffer(3)]], \
        device const char *q [[buffer(4)]], device const float *d [[buffer(5)]], device const float *sx [[buffer(6)]], \
        device const float *add [[buffer(7)]], device float *y [[buffer(8)]], threadgroup float *memory [[threadgroup(0)]], \
        uint3 at [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]]
#define GATHER_ARGS \
    constant Gather &c [[buffer(1)]], constant int *ids [[buffer(2)]], device const uchar *w [[buffer(3)]], device float *y [[buffer(4)]], \
        uint3 at [[thread_position_in_grid]]

#define QUANTISED(stem, F) \
    kernel void matvec_##stem(WEIGHT_ARGS) { matvec<F>(small, c, w, q, d, sx, add, y, memory, at, lane, sg); } \
    kernel void matmul_##stem(WEIGHT_ARGS) { matmul<F>(small, c, w, q, d, sx, add, y, memory, at, lane, sg); } \
    kernel void gather_##stem(GATHER_ARGS) { \
        const uint row = uint(ids[at.y]); \
        if (at.x < c.cols) \
            y[ulong(at.y) * c.cols + at.x] = value_of<F>(w + ulong(row / LANES) * c.group_bytes, c.blocks, at.x, row % LANES); \
    }
QUANTISED(q4_0, Q4_0)
QUANTISED(q4_1, Q4_1)
QUANTISED(q5_0, Q5_0)
QUANTISED(q8_0, Q8_0)
QUANTISED(q4_k, Q4_K)
QUANTISED(q5_k, Q5_K)
QUANTISED(q6_k, Q6_K)

/* ---- weights that are no codes ---------------------------------------------------------------------------
 * One fold over all columns: a thread has a weight row and up to 4 tokens. The backend guards x, so that products have no last bit
 * below 2^-126 (f16 is a multiple of 2^-24; of f32 it lets none pass that is below 2^-40). */

enum { FLOAT_TOKENS = 4, FLOAT_ROWS = 64 };

template <typename T>
INLINE void matmul_float(device atomic_uint *small, constant Matmul &c, device const uchar *w, device const float *x, device const float *add,
                         device float *y, uint3 at) {
    const uint row = at.x, token = at.y * FLOAT_TOKENS;
    if (row >= c.rows) return;
    device const T *column = (device const T *)group_of(w, c, row) + row % LANES;
    device const float *rows[FLOAT_TOKENS];
    float acc[FLOAT_TOKENS];
    for (uint t = 0; t < FLOAT_TOKENS; t++) rows[t] = x + ulong(min(token + t, c.tokens - 1u)) * c.cols, acc[t] = 0.0f;
    for (uint k = 0; k < c.cols; k++) {
        const float v = float(column[k * LANES]);
        for (uint t = 0; t < FLOAT_TOKENS; t++) acc[t] = fma(v, rows[t][k], acc[t]);
    }
    for (uint t = 0; t < FLOAT_TOKENS; t++)
        if (token + t < c.tokens) finish(small, c, add, y, row, token + t, acc[t]);
}

#define FLOAT(stem, T) \
    kernel void matmul_##stem(device atomic_uint *small [[buffer(0)]], constant Matmul &c [[buffer(1)]], \
                              device const uchar *w [[buffer(3)]], device const float *x [[buffer(4)]], \
                              device const float *add [[buffer(5)]], device float *y [[buffer(6)]], \
                              uint3 at [[thread_position_in_grid]]) { \
        matmul_float<T>(small, c, w, x, add, y, at); \
    } \
    kernel void gather_##stem(GATHER_ARGS) { \
        const uint row = uint(ids[at.y]); \
        device const T *from = (device const T *)(w + ulong(row / LANES) * c.group_bytes) + row % LANES; \
        if (at.x < c.cols) y[ulong(at.y) * c.cols + at.x] = float(from[at.x * LANES]); \
    }
FLOAT(f32, float)
FLOAT(f16, half)
