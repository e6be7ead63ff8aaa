/* msl.h: the part of the Metal Shading Language that pyinfer's kernels use, for clang's C++14. The compiler driver (mslc.py) includes it
 * before the preprocessed source, whose attributes are gone by then.
 *
 * Vectors are clang's own, with their swizzles; a constructor `float4(a, b)` comes as mh_make<float4>(a, b). Math is what Metal promises
 * without fast-math: one rounding to an operation. Sums whose order Metal leaves open are taken in a random one. */
#ifndef MH_SYNTAX
#include "runtime.h"
extern "C" {
__attribute__((visibility("default"))) mh_calls mh_calls_of;
}
#define MH_NUMERIC_HALF _Float16
#define device
#define threadgroup
#define thread
#define constant const
#else /* a pass that only looks at address spaces, which clang knows from another language: OpenCL's C++ */
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define threadgroup __local
#define thread __private
#define constant __constant
#endif
#define kernel static __attribute__((noinline))

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.40282347e+38f
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong, size_t;
#ifndef MH_SYNTAX
typedef _Float16 half;
#endif
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;

template <typename V> struct mh_vector { typedef V scalar; enum { size = 1 }; };
#define MH_VECTOR(T, N) \
    typedef T T##N __attribute__((ext_vector_type(N))); \
    template <> struct mh_vector<T##N> { typedef T scalar; enum { size = N }; };
#define MH_VECTORS(T) MH_VECTOR(T, 2) MH_VECTOR(T, 3) MH_VECTOR(T, 4)
MH_VECTORS(char) MH_VECTORS(uchar) MH_VECTORS(short) MH_VECTORS(ushort) MH_VECTORS(int) MH_VECTORS(uint) MH_VECTORS(long) MH_VECTORS(ulong)
MH_VECTORS(float) MH_VECTORS(half)
#undef MH_VECTORS
#undef MH_VECTOR

#define MH_INLINE static inline __attribute__((always_inline))

/* ---- constructors of vectors ------------------------------------------------------------------------------------ */
template <int N> struct mh_put {
    template <typename V, typename A> MH_INLINE void from(thread V &v, int at, A a) {
        for (int i = 0; i < N; i++) v[at + i] = static_cast<typename mh_vector<V>::scalar>(a[i]);
    }
};
template <> struct mh_put<1> {
    template <typename V, typename A> MH_INLINE void from(thread V &v, int at, A a) { v[at] = static_cast<typename mh_vector<V>::scalar>(a); }
};
template <typename V> MH_INLINE void mh_fill(thread V &, int) {}
template <typename V, typename A, typename... Rest> MH_INLINE void mh_fill(thread V &v, int at, A a, Rest... rest) {
    mh_put<mh_vector<A>::size>::from(v, at, a);
    mh_fill(v, at + mh_vector<A>::size, rest...);
}
template <typename... A> struct mh_count { enum { all = 0 }; };
template <typename A, typename... Rest> struct mh_count<A, Rest...> { enum { all = mh_vector<A>::size + mh_count<Rest...>::all }; };
template <typename V, typename... A> MH_INLINE V mh_make(A... a) {
    static_assert(mh_count<A...>::all == mh_vector<V>::size, "a vector's constructor takes one scalar, or as many components as it has");
    V v;
    mh_fill(v, 0, a...);
    return v;
}
template <typename V, typename A, int N> struct mh_make_one {
    MH_INLINE V of(A a) {
        static_assert(N == mh_vector<V>::size, "vectors of different sizes");
        V v;
        mh_fill(v, 0, a);
        return v;
    }
};
template <typename V, typename A> struct mh_make_one<V, A, 1> {
    MH_INLINE V of(A a) {
        V v;
        for (int i = 0; i < mh_vector<V>::size; i++) v[i] = static_cast<typename mh_vector<V>::scalar>(a);
        return v;
    }
};
template <typename V, typename A> MH_INLINE V mh_make(A a) { return mh_make_one<V, A, mh_vector<A>::size>::of(a); }
template <typename V> MH_INLINE V mh_make() { return V(0); }

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
MH_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
enum memory_order { memory_order_relaxed };

#ifndef MH_SYNTAX
MH_INLINE void threadgroup_barrier(mem_flags f) { mh_calls_of.barrier(int(f)); }
MH_INLINE void simdgroup_barrier(mem_flags f) { mh_calls_of.simd(nullptr, nullptr, int(f)); }
#else
void threadgroup_barrier(mem_flags f);
void simdgroup_barrier(mem_flags f);
#endif

/* ---- bits and math ---------------------------------------------------------------------------------------------- */
template <typename To, typename From> MH_INLINE To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type: of one size");
    return __builtin_bit_cast(To, from);
}

#define MH_MIN_MAX(T) \
    MH_INLINE T min(T a, T b) { return b < a ? b : a; } \
    MH_INLINE T max(T a, T b) { return a < b ? b : a; } \
    MH_INLINE T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
MH_MIN_MAX(char) MH_MIN_MAX(uchar) MH_MIN_MAX(short) MH_MIN_MAX(ushort) MH_MIN_MAX(int) MH_MIN_MAX(uint) MH_MIN_MAX(long) MH_MIN_MAX(ulong)
#undef MH_MIN_MAX
MH_INLINE int abs(int x) { return x < 0 ? -x : x; }
template <typename T> MH_INLINE T select(T a, T b, bool second) { return second ? b : a; }

#ifndef MH_SYNTAX
#define MH_FUNCTION(T, name, expression) MH_INLINE T name(T x) { return expression; }
#define MH_FUNCTION_2(T, name, expression) MH_INLINE T name(T x, T y) { return expression; }
#else
#define MH_FUNCTION(T, name, expression) T name(T x);
#define MH_FUNCTION_2(T, name, expression) T name(T x, T y);
#endif
MH_FUNCTION(float, rint, __builtin_rintf(x))
MH_FUNCTION(float, floor, __builtin_floorf(x))
MH_FUNCTION(float, ceil, __builtin_ceilf(x))
MH_FUNCTION(float, trunc, __builtin_truncf(x))
MH_FUNCTION(float, fabs, __builtin_fabsf(x))
MH_FUNCTION(float, abs, __builtin_fabsf(x))
MH_FUNCTION(float, sqrt, __builtin_sqrtf(x))
MH_FUNCTION_2(float, min, __builtin_fminf(x, y))
MH_FUNCTION_2(float, max, __builtin_fmaxf(x, y))
MH_FUNCTION_2(float, fmin, __builtin_fminf(x, y))
MH_FUNCTION_2(float, fmax, __builtin_fmaxf(x, y))
MH_FUNCTION_2(float, copysign, __builtin_copysignf(x, y))
MH_FUNCTION_2(half, min, half(__builtin_fminf(float(x), float(y))))
MH_FUNCTION_2(half, max, half(__builtin_fmaxf(float(x), float(y))))
namespace precise {
MH_FUNCTION(float, sqrt, __builtin_sqrtf(x))
}
#undef MH_FUNCTION
#undef MH_FUNCTION_2
MH_INLINE float clamp(float x, float lo, float hi) { return min(max(x, lo), hi); }
MH_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MH_INLINE bool isnan(float x) { return x != x; }
MH_INLINE uint popcount(uint x) { return uint(__builtin_popcount(x)); }
template <typename V, int N> struct mh_fma { /* of vectors, lane by lane */
    MH_INLINE V of(V a, V b, V c) {
        V r;
        for (int i = 0; i < N; i++) r[i] = fma(a[i], b[i], c[i]);
        return r;
    }
};
MH_INLINE float2 fma(float2 a, float2 b, float2 c) { return mh_fma<float2, 2>::of(a, b, c); }
MH_INLINE float3 fma(float3 a, float3 b, float3 c) { return mh_fma<float3, 3>::of(a, b, c); }
MH_INLINE float4 fma(float4 a, float4 b, float4 c) { return mh_fma<float4, 4>::of(a, b, c); }

/* ---- atomics ---------------------------------------------------------------------------------------------------- */
#ifdef MH_SYNTAX
#define atomic_uint mh_atomic_uint /* the other language has one of its own */
#endif
struct atomic_uint {
    uint mh_value;
};
#ifndef MH_SYNTAX
/* Looked at for where they are, not for who else is there. */
#ifdef MH_CHECK
#define MH_ATOMIC(expression) (mh_calls_of.access(p, sizeof *p, 2), expression)
#else
#define MH_ATOMIC(expression) expression
#endif
#define MH_APART static __attribute__((noinline, unused, no_sanitize("coverage")))
MH_APART void atomic_store_explicit(device atomic_uint *p, uint v, memory_order) { MH_ATOMIC(__atomic_store_n(&p->mh_value, v, __ATOMIC_RELAXED)); }
MH_APART uint atomic_load_explicit(const device atomic_uint *p, memory_order) { return MH_ATOMIC(__atomic_load_n(&p->mh_value, __ATOMIC_RELAXED)); }
MH_APART uint atomic_fetch_or_explicit(device atomic_uint *p, uint v, memory_order) { return MH_ATOMIC(__atomic_fetch_or(&p->mh_value, v, __ATOMIC_RELAXED)); }
MH_APART uint atomic_fetch_add_explicit(device atomic_uint *p, uint v, memory_order) { return MH_ATOMIC(__atomic_fetch_add(&p->mh_value, v, __ATOMIC_RELAXED)); }
#else
void atomic_store_explicit(device atomic_uint *p, uint v, memory_order);
uint atomic_load_explicit(const device atomic_uint *p, memory_order);
uint atomic_fetch_or_explicit(device atomic_uint *p, uint v, memory_order);
uint atomic_fetch_add_explicit(device atomic_uint *p, uint v, memory_order);
#endif

/* ---- SIMD groups ------------------------------------------------------------------------------------------------- */
#ifndef MH_SYNTAX
template <typename T> struct mh_simd_of {
    template <typename F> MH_INLINE T reduce(void *const *lanes, int n, const unsigned char *order, F f) {
        T r = *(T *)lanes[order[0]];
        for (int i = 1; i < n; i++) r = f(r, *(T *)lanes[order[i]]);
        for (int i = 0; i < n; i++) *(T *)lanes[i] = r;
        return r;
    }
    static void sum(void *const *lanes, int n, const unsigned char *order) { reduce(lanes, n, order, [](T a, T b) { return T(a + b); }); }
    static void most(void *const *lanes, int n, const unsigned char *order) { reduce(lanes, n, order, [](T a, T b) { return max(a, b); }); }
    static void least(void *const *lanes, int n, const unsigned char *order) { reduce(lanes, n, order, [](T a, T b) { return min(a, b); }); }
    static void either(void *const *lanes, int n, const unsigned char *order) { reduce(lanes, n, order, [](T a, T b) { return T(a | b); }); }
    static void both(void *const *lanes, int n, const unsigned char *order) { reduce(lanes, n, order, [](T a, T b) { return T(a & b); }); }
    struct moved {
        T value, got;
        int from; /* a lane */
    };
    static void shuffle(void *const *lanes, int n, const unsigned char *) {
        for (int i = 0; i < n; i++) {
            moved &m = *(moved *)lanes[i];
            if (m.from >= 0 && m.from < n) m.got = ((moved *)lanes[m.from])->value;
            else __builtin_memset(&m.got, 0xff, sizeof m.got); /* undefined */
        }
    }
};
#define MH_REDUCTION(name, op) \
    template <typename T> MH_INLINE T name(T x) { \
        mh_calls_of.simd(mh_simd_of<T>::op, &x, 0); \
        return x; \
    }
MH_REDUCTION(simd_sum, sum) MH_REDUCTION(simd_max, most) MH_REDUCTION(simd_min, least) MH_REDUCTION(simd_or, either) MH_REDUCTION(simd_and, both)
#undef MH_REDUCTION
MH_INLINE bool simd_any(bool x) { return simd_or(uint(x)) != 0; }
MH_INLINE bool simd_all(bool x) { return simd_and(uint(x)) != 0; }
template <typename T> MH_INLINE T simd_shuffle(T x, ushort from) {
    typename mh_simd_of<T>::moved m = {x, x, from};
    mh_calls_of.simd(mh_simd_of<T>::shuffle, &m, 0);
    return m.got;
}
template <typename T> MH_INLINE T simd_broadcast(T x, ushort from) { return simd_shuffle(x, from); }
template <typename T> MH_INLINE T simd_broadcast_first(T x) { return simd_shuffle(x, 0); }
template <typename T> MH_INLINE T simd_shuffle_xor(T x, ushort mask) { return simd_shuffle(x, ushort(mh_calls_of.lane() ^ mask)); }
template <typename T> MH_INLINE T simd_shuffle_down(T x, ushort by) { return simd_shuffle(x, ushort(mh_calls_of.lane() + by)); }
template <typename T> MH_INLINE T simd_shuffle_up(T x, ushort by) { return simd_shuffle(x, ushort(mh_calls_of.lane() - by)); }
#else
template <typename T> T simd_sum(T x);
template <typename T> T simd_max(T x);
template <typename T> T simd_min(T x);
template <typename T> T simd_or(T x);
template <typename T> T simd_and(T x);
bool simd_any(bool x);
bool simd_all(bool x);
template <typename T> T simd_shuffle(T x, ushort from);
template <typename T> T simd_broadcast(T x, ushort from);
template <typename T> T simd_broadcast_first(T x);
template <typename T> T simd_shuffle_xor(T x, ushort mask);
template <typename T> T simd_shuffle_down(T x, ushort by);
template <typename T> T simd_shuffle_up(T x, ushort by);
#endif

/* ---- 8x8 matrices: two elements to a lane, and no one may know which ------------------------------------------------ */
template <typename T, int C, int R> struct simdgroup_matrix {
    static_assert(C == 8 && R == 8, "simdgroup matrices are 8x8");
    T mh_two[2];
    simdgroup_matrix() {}
    explicit simdgroup_matrix(T diagonal);
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;

#ifndef MH_SYNTAX
struct mh_where { /* of a lane's two elements */
    int row[2], column[2];
};
MH_INLINE mh_where mh_elements() {
    const unsigned char *e = mh_calls_of.elements();
    const int lane = mh_calls_of.lane();
    mh_where w;
    for (int i = 0; i < 2; i++) w.row[i] = e[lane * 2 + i] / 8, w.column[i] = e[lane * 2 + i] % 8;
    return w;
}
template <typename T, int C, int R> simdgroup_matrix<T, C, R>::simdgroup_matrix(T diagonal) {
    const mh_where w = mh_elements();
    for (int i = 0; i < 2; i++) mh_two[i] = w.row[i] == w.column[i] ? diagonal : T(0);
}
template <typename T, int C, int R> MH_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, C, R> m;
    m.mh_two[0] = m.mh_two[1] = value;
    return m;
}
/* `origin`: column, row. */
template <typename T> MH_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8> &d, const T *from, ulong row = 8, ulong2 origin = ulong2(0), bool transpose = false) {
    const mh_where w = mh_elements();
    for (int i = 0; i < 2; i++) {
        const ulong r = ulong(transpose ? w.column[i] : w.row[i]), c = ulong(transpose ? w.row[i] : w.column[i]);
        d.mh_two[i] = from[(origin[1] + r) * row + origin[0] + c];
    }
}
template <typename T> MH_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8> &s, T *to, ulong row = 8, ulong2 origin = ulong2(0), bool transpose = false) {
    const mh_where w = mh_elements();
    for (int i = 0; i < 2; i++) {
        const ulong r = ulong(transpose ? w.column[i] : w.row[i]), c = ulong(transpose ? w.row[i] : w.column[i]);
        to[(origin[1] + r) * row + origin[0] + c] = s.mh_two[i];
    }
}
template <typename D, typename A, typename B, typename C> struct mh_product {
    D d[2];
    A a[2];
    B b[2];
    C c[2];
    /* d = a b + c: products added in a random order, c among them anywhere, and rounded or not before they are added. */
    static void all(void *const *lanes, int n, const unsigned char *order) {
#pragma clang fp contract(off)
        const unsigned char *e = mh_calls_of.elements();
        float a[8][8], b[8][8], c[8][8], d[8][8];
        if (n != 32) mh_calls_of.fail("a simdgroup matrix in a SIMD group of fewer than 32 lanes");
        for (int i = 0; i < 64; i++) {
            const mh_product &p = *(const mh_product *)lanes[i / 2];
            a[e[i] / 8][e[i] % 8] = float(p.a[i % 2]), b[e[i] / 8][e[i] % 8] = float(p.b[i % 2]), c[e[i] / 8][e[i] % 8] = float(p.c[i % 2]);
        }
        const int last = order[40] & 1, fused = order[40] & 2;
        for (int i = 0; i < 8; i++)
            for (int j = 0; j < 8; j++) d[i][j] = last ? 0.0f : c[i][j];
        for (int m = 0; m < 8; m++) {
            const int k = order[32 + m] - 32;
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++) {
                    const float product = a[i][k] * b[k][j];
                    d[i][j] = fused ? __builtin_fmaf(a[i][k], b[k][j], d[i][j]) : d[i][j] + product;
                }
        }
        for (int i = 0; i < 64; i++) {
            const float r = d[e[i] / 8][e[i] % 8];
            ((mh_product *)lanes[i / 2])->d[i % 2] = D(last ? r + c[e[i] / 8][e[i] % 8] : r);
        }
    }
};
template <typename D, typename A, typename B, typename C>
MH_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
                                             simdgroup_matrix<C, 8, 8> c) {
    mh_product<D, A, B, C> p = {{}, {a.mh_two[0], a.mh_two[1]}, {b.mh_two[0], b.mh_two[1]}, {c.mh_two[0], c.mh_two[1]}};
    mh_calls_of.simd(mh_product<D, A, B, C>::all, &p, 0);
    d.mh_two[0] = p.d[0], d.mh_two[1] = p.d[1];
}
template <typename D, typename A, typename B>
MH_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}
#else
template <typename T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value);
#define MH_MOVES(T, space) \
    void simdgroup_load(thread simdgroup_matrix<T, 8, 8> &d, const space T *from, ulong row = 8, ulong2 origin = ulong2(0), bool transpose = false); \
    void simdgroup_store(const thread simdgroup_matrix<T, 8, 8> &s, space T *to, ulong row = 8, ulong2 origin = ulong2(0), bool transpose = false);
MH_MOVES(float, device) MH_MOVES(float, threadgroup) MH_MOVES(half, device) MH_MOVES(half, threadgroup)
#undef MH_MOVES
template <typename D, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8> &d, const thread simdgroup_matrix<A, 8, 8> &a, const thread simdgroup_matrix<B, 8, 8> &b,
                                   const thread simdgroup_matrix<C, 8, 8> &c);
template <typename D, typename A, typename B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8> &d, const thread simdgroup_matrix<A, 8, 8> &a, const thread simdgroup_matrix<B, 8, 8> &b);
#endif
} // namespace metal
