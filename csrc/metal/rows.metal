/* Rows and elements; NUMERICS.md sections 3 (activations) and 4. A thread has outputs of its own; a fold has one thread. */

struct Elements {
    uint n;
    uint limit; /* of `guard`: bits of a float */
};

/* Nothing but to see whether x holds something else than zero below the limit. */
kernel void guard(device atomic_uint *small [[buffer(0)]], constant Elements &c [[buffer(1)]], device const float *x [[buffer(3)]],
                  uint3 at [[thread_position_in_grid]]) {
    if (at.x < c.n) tell(small, is_below(x[at.x], c.limit));
}

/* Both multiples of 2^-126, and so is their sum. */
INLINE bool is_fine(float x) { return !is_below(x, POWER_OF_TWO(-103)); }

kernel void add(device atomic_uint *small [[buffer(0)]], constant Elements &c [[buffer(1)]], device const float *a [[buffer(3)]],
                device const float *b [[buffer(4)]], device float *y [[buffer(5)]], uint3 at [[thread_position_in_grid]]) {
    const uint i = at.x;
    if (i >= c.n) return;
    tell(small, !is_fine(a[i]) || !is_fine(b[i]));
    y[i] = a[i] + b[i];
}

kernel void hadamard(device atomic_uint *small [[buffer(0)]], constant Elements &c [[buffer(1)]], device const float *a [[buffer(3)]],
                     device const float *b [[buffer(4)]], device float *y [[buffer(5)]], uint3 at [[thread_position_in_grid]]) {
    const uint i = at.x;
    if (i >= c.n) return;
    const float r = a[i] * b[i];
    tell(small, is_lost(r, a[i], b[i]));
    y[i] = r;
}

/* From -EXP_MAX down silu is x / infinity: a zero on every machine. */
INLINE bool is_silu_lost(float r, float x) { return is_lost(r, x, 1.0f) && !(x <= -EXP_MAX); }

kernel void silu(device atomic_uint *small [[buffer(0)]], constant Elements &c [[buffer(1)]], device const float *x [[buffer(3)]],
                 device float *y [[buffer(4)]], uint3 at [[thread_position_in_grid]]) {
    const uint i = at.x;
    if (i >= c.n) return;
    const float r = silu_of(x[i]);
    tell(small, is_silu_lost(r, x[i]));
    y[i] = r;
}

kernel void swiglu(device atomic_uint *small [[buffer(0)]], constant Elements &c [[buffer(1)]], device const float *gate [[buffer(3)]],
                   device const float *up [[buffer(4)]], device float *y [[buffer(5)]], uint3 at [[thread_position_in_grid]]) {
    const uint i = at.x;
    if (i >= c.n) return;
    const float s = silu_of(gate[i]), r = s * up[i];
    tell(small, is_silu_lost(s, gate[i]) || is_lost(r, s, up[i]));
    y[i] = r;
}

/* ---- activations into codes ------------------------------------------------------------------------------
 * A SIMD group has a block of 32. Its codes and sums are integers; dx below 2^-70 could make products whose last bit lies below
 * what is normal, and where it is not, each step of a fold over groups is a multiple of 2^-117: no sum of them is subnormal. */

struct Quantize {
    uint cols, blocks;
};
enum { QUANTIZE_BLOCKS = 8 };

kernel void quantize(device atomic_uint *small [[buffer(0)]], constant Quantize &c [[buffer(1)]], device const float *x [[buffer(3)]],
                     device char *q [[buffer(4)]], device float *d [[buffer(5)]], device float *sx [[buffer(6)]],
                     uint3 at [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                     uint sg [[simdgroup_index_in_threadgroup]]) {
    const uint b = at.x * QUANTIZE_BLOCKS + sg, row = at.y;
    if (b >= c.blocks) return;
    const ulong i = ulong(row) * c.cols + b * BLOCK_SIZE + lane, block = ulong(row) * c.blocks + b;
    const uint most = simd_max(magnitude(x[i]));
    const float amax = most < POWER_OF_TWO(-100) ? 0.0f : as_type<float>(most);
    const float id = amax > 0.0f ? 127.0f / amax : 0.0f, v = rint(x[i] * id);
    const int code = v >= -127.0f && v <= 127.0f ? int(v) : 0; /* outside: only after NaN or infinity */
    const int sum = simd_sum(code);
    q[i] = char(code);
    if (lane != 0u) return;
    /* After NaN or infinity the block's dx is NaN, and so is all that is computed from the row. */
    const float dx = most >= 0x7f800000u ? as_type<float>(0x7fc00000u) : amax / 127.0f;
    d[block] = dx;
    sx[block] = float(sum) * dx;
    tell(small, is_below(dx, POWER_OF_TWO(-70)));
}

/* ---- norms and softmax -----------------------------------------------------------------------------------
 * A threadgroup has a row. Its fold is one thread's, over values that all have put into threadgroup memory. */

struct Norm {
    uint n;
    float eps;
};
enum { FOLD_CHUNK = 1024 };

/* x from 2^-40 on: squares, and what follows, are far from what is flushed. */
kernel void rms_norm(device atomic_uint *small [[buffer(0)]], constant Norm &c [[buffer(1)]], device const float *x [[buffer(3)]],
                     device const float *w [[buffer(4)]], device float *y [[buffer(5)]], threadgroup float *chunk [[threadgroup(0)]],
                     uint3 at [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                     uint3 threads [[threads_per_threadgroup]]) {
    x += ulong(at.x) * c.n, y += ulong(at.x) * c.n;
    float ss = 0.0f;
    for (uint first = 0; first < c.n; first += FOLD_CHUNK) {
        const uint n = min(c.n - first, uint(FOLD_CHUNK));
        for (uint i = thread_index; i < n; i += threads.x) {
            chunk[i] = x[first + i];
            tell(small, is_below(chunk[i], POWER_OF_TWO(-40)));
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (thread_index == 0u)
            for (uint i = 0; i < n; i++) ss = fma(chunk[i], chunk[i], ss);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (thread_index == 0u) chunk[0] = 1.0f / precise::sqrt(ss / float(c.n) + c.eps);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float r = chunk[0];
    for (uint i = thread_index; i < c.n; i += threads.x) {
        const float scaled = x[i] * r, v = scaled * w[i];
        tell(small, is_lost(scaled, x[i], r) || is_lost(v, scaled, w[i]));
        y[i] = v;
    }
}

/* exp of differences. What is below 2^-103 is as good as unknown where subnormals are flushed: it becomes TINY, unless it is zero on
 * every machine. */
#define TINY as_type<float>(POWER_OF_TWO(-126))
INLINE float exp_or_tiny(float x) {
    const float e = exp_of(x);
    return x <= EXP_MIN ? 0.0f : magnitude(e) < POWER_OF_TWO(-103) ? TINY : e;
}
INLINE bool is_tiny(float e) { return is_below(e, POWER_OF_TWO(-103)); }
/* sum + e. Less than a quarter of the sum's last bit changes nothing. */
INLINE float add_exp(float sum, float e, thread bool &lost) {
    if (!is_tiny(e)) return sum + e;
    lost = lost || magnitude(sum) < POWER_OF_TWO(-70);
    return sum;
}

struct Softmax {
    uint n;
};
enum { SOFTMAX_THREADS = 256 };

kernel void softmax(device atomic_uint *small [[buffer(0)]], constant Softmax &c [[buffer(1)]], device const float *x [[buffer(3)]],
                    device float *y [[buffer(4)]], threadgroup float *chunk [[threadgroup(0)]],
                    uint3 at [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]]) {
    x += ulong(at.x) * c.n, y += ulong(at.x) * c.n;
    float most = -INFINITY;
    for (uint i = thread_index; i < c.n; i += SOFTMAX_THREADS) most = x[i] > most ? x[i] : most;
    chunk[thread_index] = most;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < SOFTMAX_THREADS; i++) most = chunk[i] > most ? chunk[i] : most;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0.0f;
    bool lost = false;
    for (uint first = 0; first < c.n; first += SOFTMAX_THREADS) { /* every thread makes the same sum: nothing to hand around */
        const uint i = first + thread_index, n = min(c.n - first, uint(SOFTMAX_THREADS));
        if (i < c.n) chunk[thread_index] = exp_or_tiny(x[i] - most);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint j = 0; j < n; j++) sum = add_exp(sum, chunk[j], lost);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint i = thread_index; i < c.n; i += SOFTMAX_THREADS) {
        const float e = exp_or_tiny(x[i] - most), p = e / sum;
        lost = lost || is_tiny(e);
        y[i] = p;
    }
    tell(small, lost);
}

/* ---- rope ------------------------------------------------------------------------------------------------
 * From 2^-40 on, a product's last bit is no smaller than 2^-126. */

struct Rope {
    uint pairs, heads, dim, half_rot, first; /* pairs: threads to a head, also those that copy what is not rotated */
    uint step, second;                       /* from a pair to the next, from its one to its other */
};

INLINE bool is_short(float x) { return is_below(x, POWER_OF_TWO(-40)); }

kernel void rope(device atomic_uint *small [[buffer(0)]], constant Rope &c [[buffer(1)]], device const float *x [[buffer(3)]],
                 device const float *cosines [[buffer(4)]], device const float *sines [[buffer(5)]], device float *y [[buffer(6)]],
                 uint3 at [[thread_position_in_grid]]) {
    const uint i = at.x, head = at.y, token = at.z;
    const ulong row = (ulong(token) * c.heads + head) * c.dim;
    if (i < c.half_rot) {
        const uint table = (c.first + token) * c.half_rot + i;
        const float co = cosines[table], si = sines[table];
        const float x0 = x[row + i * c.step], x1 = x[row + i * c.step + c.second];
        const float a = x1 * si, b = x1 * co;
        tell(small, is_short(x0) || is_short(x1) || is_short(co) || is_short(si));
        y[row + i * c.step] = fma(x0, co, -a);
        y[row + i * c.step + c.second] = fma(x0, si, b);
    } else if (i < c.pairs) {
        const ulong to = row + i + c.half_rot;
        y[to] = x[to];
    }
}
