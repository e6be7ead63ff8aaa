/* Vectors of 4 lanes for the kernels of simd/. */
#define V 4
typedef float32x4_t vf;
typedef int32x4_t vi;

PI_INLINE vf v_set1(float x) { return vdupq_n_f32(x); }
PI_INLINE vf v_load(const float *p) { return vld1q_f32(p); }
PI_INLINE vf v_load_n(const float *p, int n) {
    float t[4] = {0};
    for (int i = 0; i < n; i++) t[i] = p[i];
    return vld1q_f32(t);
}
PI_INLINE void v_store(float *p, vf x) { vst1q_f32(p, x); }
PI_INLINE void v_store_n(float *p, vf x, int n) {
    float t[4];
    vst1q_f32(t, x);
    for (int i = 0; i < n; i++) p[i] = t[i];
}
PI_INLINE vf v_load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
PI_INLINE vf v_load_n_f16(const uint16_t *p, int n) {
    uint16_t t[4] = {0};
    for (int i = 0; i < n; i++) t[i] = p[i];
    return v_load_f16(t);
}
PI_INLINE void v_store_f16(uint16_t *p, vf x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
PI_INLINE void v_store_f16_n(uint16_t *p, vf x, int n) {
    uint16_t t[4];
    v_store_f16(t, x);
    for (int i = 0; i < n; i++) p[i] = t[i];
}
PI_INLINE vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
PI_INLINE vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
PI_INLINE vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
PI_INLINE vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
PI_INLINE vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
PI_INLINE vf v_max(vf a, vf b) { return vmaxq_f32(a, b); }
PI_INLINE vf v_min(vf a, vf b) { return vminq_f32(a, b); }
PI_INLINE float v_max_across(vf x) { return vmaxvq_f32(x); }
PI_INLINE vf v_abs(vf x) { return vabsq_f32(x); }
PI_INLINE vf v_neg(vf x) { return vnegq_f32(x); }
PI_INLINE vf v_rint(vf x) { return vrndnq_f32(x); }
PI_INLINE vi v_to_int(vf x) { return vcvtnq_s32_f32(x); }
PI_INLINE int32_t v_sum(vi x) { return vaddvq_s32(x); }
PI_INLINE void v_store_codes(int8_t *q, int16_t *q16, vi x) { /* no level here reads q16 */
    const int16x4_t w = vmovn_s32(x);
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(w, w))), 0);
    (void)q16;
    memcpy(q, &four, 4);
}
PI_INLINE vf v_pow2(vi k) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(k, vdupq_n_s32(127)), 23)); }
/* y * 2^n, n whole; as two factors, of which the first is exact: one rounding, also to a subnormal. */
PI_INLINE vf v_scale2(vf y, vf n) {
    const vi k = v_to_int(n), half = vshrq_n_s32(k, 1);
    return v_mul(v_mul(y, v_pow2(half)), v_pow2(vsubq_s32(k, half)));
}

/* Which lanes, and what they choose. */
typedef uint32x4_t vm;
PI_INLINE vi v_load_int(const int32_t *p) { return vld1q_s32(p); }
PI_INLINE vm v_between(vi lo, int32_t x, vi hi) { /* lo <= x < hi */
    return vandq_u32(vcleq_s32(lo, vdupq_n_s32(x)), vcltq_s32(vdupq_n_s32(x), hi));
}
PI_INLINE vm v_small(vf x, vf y) { return vandq_u32(vcltq_f32(x, y), vcgtq_f32(x, vdupq_n_f32(0.0f))); } /* 0 < x < y */
PI_INLINE bool v_any(vm m) { return vmaxvq_u32(m) != 0; }
PI_INLINE vf v_select(vm m, vf yes, vf no) { return vbslq_f32(m, yes, no); }

/* Integers: vi are int32 lanes, vb bytes. */
typedef uint8x16_t vb;
PI_INLINE vi v_addi(vi a, vi b) { return vaddq_s32(a, b); }
PI_INLINE vf v_from_int(vi x) { return vcvtq_f32_s32(x); }
PI_INLINE vb vb_set1(uint8_t x) { return vdupq_n_u8(x); }
PI_INLINE vb vb_load(const uint8_t *p) { return vld1q_u8(p); }
PI_INLINE void vb_store(uint8_t *p, vb v) { vst1q_u8(p, v); }
PI_INLINE vb vb_and(vb a, vb b) { return vandq_u8(a, b); }
PI_INLINE vb vb_or(vb a, vb b) { return vorrq_u8(a, b); }
PI_INLINE vb vb_shr(vb v, int n) { PI_SHIFT(vshrq_n_u8, v, n); }
PI_INLINE vb vb_shl(vb v, int n) { PI_SHIFT(vshlq_n_u8, v, n); }
PI_INLINE vb vb_lookup(const int8_t *table, vb v) { return vqtbl1q_u8(vreinterpretq_u8_s8(vld1q_s8(table)), v); }

/* Scales of 4 rows from bytes. */
PI_INLINE uint32x4_t v_bytes(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}
PI_INLINE vf v_load_u8(const uint8_t *p) { return vcvtq_f32_u32(v_bytes(p)); }
PI_INLINE vf v_load_s8(const uint8_t *p) {
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u32(v_bytes(p)), 24), 24));
}
PI_INLINE vf v_load_u4(const uint8_t *p, int from) {
    return vcvtq_f32_u32(vandq_u32(from ? vshrq_n_u32(v_bytes(p), 4) : v_bytes(p), vdupq_n_u32(15)));
}
PI_INLINE vf v_load_e8m0(const uint8_t *p) { /* 2^(e - 128); e below 2 gives a subnormal */
    const uint32x4_t e = v_bytes(p), normal = vshlq_n_u32(vsubq_u32(e, vdupq_n_u32(1)), 23);
    const uint32x4_t low = vshlq_u32(vdupq_n_u32(0x200000), vreinterpretq_s32_u32(vminq_u32(e, vdupq_n_u32(1))));
    return vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(e, vdupq_n_u32(2)), low, normal));
}
PI_INLINE vf v_load_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }

PI_INLINE vf v_set1_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(*p))); }
/* simd/matmul_float.h names loads by type. */
#define v_load_f32 v_load

/* 32 registers hold the sums of a block of simd/attention.h: query rows by tiles of keys, and by vectors of value dimensions. */
#define SCORE_ROWS 6
#define SCORE_TILES 1
#define SCORE_TILES_4 1
#define SCORE_TILES_2 2
#define CONTEXT_ROWS 6
#define CONTEXT_VECTORS 4
#define CONTEXT_VECTORS_4 4
#define CONTEXT_VECTORS_2 8
/* And of simd/attention_rows.h: three vectors of rows by so many columns. */
#define ROW_COLUMNS 8
