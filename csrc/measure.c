/* What this machine can do, for `pyinfer bench` to hold results against: bytes read per second, multiply-adds per second. The
 * loops compute nothing of use. */
#include "arm/arm.h"
#include "ctx.h"

enum { CHAINS = 10 }; /* independent sums: two multipliers with a latency of four or five cycles are kept busy */

#define USED(v) __asm__ volatile("" : PI_VECTOR(v))

/* `steps` times a multiply-add `next` of vectors x and y onto each of CHAINS sums. */
#define PEAK(name, T, x_, next) \
    static void name(int64_t steps) { \
        T sum[CHAINS], x = x_, y = x_; \
        PI_UNROLL for (int i = 0; i < CHAINS; i++) sum[i] = x; \
        while (steps-- > 0) \
            PI_UNROLL for (int i = 0; i < CHAINS; i++) { \
                PI_KEEP(x); /* else a product that needs no sum is done once, before the loop */ \
                sum[i] = next(sum[i], x, y); \
                PI_KEEP(sum[i]); \
            } \
        PI_UNROLL for (int i = 0; i < CHAINS; i++) USED(sum[i]); \
    }

typedef struct {
    const char *level;
    void (*f32)(int64_t), (*int8)(int64_t);
    int f32_lanes, int8_lanes; /* multiply-adds of one step of one chain */
} peak;

#if PI_X86
PI_BEGIN("avx2,fma")
#define F32(s, x, y) _mm256_fmadd_ps(x, y, s)
#define INT8(s, x, y) _mm256_add_epi16(s, _mm256_maddubs_epi16(x, y))
PEAK(f32_avx2, __m256, _mm256_set1_ps(0.5f), F32)
PEAK(int8_avx2, __m256i, _mm256_set1_epi8(1), INT8)
#undef F32
#undef INT8
PI_END
PI_BEGIN("avx512f,avx512bw")
#define F32(s, x, y) _mm512_fmadd_ps(x, y, s)
#define INT8(s, x, y) _mm512_add_epi16(s, _mm512_maddubs_epi16(x, y))
PEAK(f32_avx512, __m512, _mm512_set1_ps(0.5f), F32)
PEAK(int8_avx512, __m512i, _mm512_set1_epi8(1), INT8)
PI_END
PI_BEGIN("avx512f,avx512vnni")
PEAK(int8_avx512vnni, __m512i, _mm512_set1_epi8(1), _mm512_dpbusd_epi32)
PI_END
static const peak peaks[] = {
    {"avx2", f32_avx2, int8_avx2, 8, 32},
    {"avx512", f32_avx512, int8_avx512, 16, 64},
    {"avx512vnni", f32_avx512, int8_avx512vnni, 16, 64},
};
#elif PI_ARM
static void int8_neon(int64_t steps) {
    int16x8_t sum[CHAINS];
    int8x8_t x = vdup_n_s8(1);
    PI_UNROLL for (int i = 0; i < CHAINS; i++) sum[i] = vdupq_n_s16(0);
    while (steps-- > 0)
        PI_UNROLL for (int i = 0; i < CHAINS; i++) {
            sum[i] = vmlal_s8(sum[i], x, x);
            PI_KEEP(sum[i]);
        }
    PI_UNROLL for (int i = 0; i < CHAINS; i++) USED(sum[i]);
}
PEAK(f32_neon, float32x4_t, vdupq_n_f32(0.5f), vfmaq_f32)
PI_BEGIN(PI_I8MM)
#define BYTES vreinterpretq_s8_s32
#define SDOT(s, x, y) vdotq_s32(s, BYTES(x), BYTES(y))
#define SMMLA(s, x, y) vmmlaq_s32(s, BYTES(x), BYTES(y))
PEAK(int8_dotprod, int32x4_t, vdupq_n_s32(1), SDOT)
PEAK(int8_i8mm, int32x4_t, vdupq_n_s32(1), SMMLA)
PI_END
static const peak peaks[] = {
    {"neon", f32_neon, int8_neon, 4, 8},
    {"dotprod", f32_neon, int8_dotprod, 4, 16},
    {"i8mm", f32_neon, int8_i8mm, 4, 32},
};
#endif

typedef struct {
    void (*loop)(int64_t);
    int64_t steps;
} multiply_job;

static void multiply_task(void *arg, int64_t lo, int64_t hi, int slot) {
    const multiply_job *j = arg;
    (void)slot;
    j->loop(j->steps * (hi - lo));
}

int pi_measure_multiply(pi_ctx *c, int type, int64_t units, int64_t steps, int64_t *macs) {
    if (!c || (type != PI_F32 && type != PI_Q8_0) || units < 0 || steps < 0 || !macs || (units && steps > INT64_MAX / 1024 / units))
        return PI_EINVAL;
    *macs = 0;
    for (size_t i = 0; i < sizeof peaks / sizeof *peaks; i++)
        if (!strcmp(peaks[i].level, pi_levels[c->level].name)) {
            const peak *p = &peaks[i];
            multiply_job j = {type == PI_F32 ? p->f32 : p->int8, steps};
            *macs = units * steps * CHAINS * (type == PI_F32 ? p->f32_lanes : p->int8_lanes);
            pi_fpenv env = pi_enter(c);
            pi_pool_run(c->pool, units, 1, multiply_task, &j);
            return pi_leave(c, env, PI_OK);
        }
    return PI_OK;
}

typedef uint64_t words __attribute__((vector_size(64), aligned(1), may_alias));
enum { STRIPE = 1 << 16 }; /* bytes to a unit */

typedef struct {
    const uint8_t *data;
    _Atomic uint64_t sum;
} read_job;

static void read_task(void *arg, int64_t lo, int64_t hi, int slot) {
    read_job *j = arg;
    words s[4] = {{0}};
    uint64_t all = 0;
    (void)slot;
    for (const uint8_t *p = j->data + lo * STRIPE, *end = j->data + hi * STRIPE; p < end; p += sizeof s)
        PI_UNROLL for (int i = 0; i < 4; i++) s[i] ^= *(const words *)(p + i * sizeof *s);
    for (int i = 0; i < 8; i++) all ^= s[0][i] ^ s[1][i] ^ s[2][i] ^ s[3][i];
    j->sum ^= all;
}

int pi_measure_read(pi_ctx *c, const void *data, int64_t bytes, uint64_t *sum) {
    if (!c || !data || !sum || bytes < 0 || bytes % STRIPE) return PI_EINVAL;
    read_job j = {.data = data};
    pi_fpenv env = pi_enter(c);
    pi_pool_run(c->pool, bytes / STRIPE, 16, read_task, &j);
    *sum = j.sum;
    return pi_leave(c, env, PI_OK);
}
