/* Vectors of 16 lanes for the kernels of simd/. */
#define V 16
typedef __m512 vf;
typedef __m512i vi;

PI_INLINE __mmask16 v_lanes(int n) { return (__mmask16)((1u << n) - 1); }

PI_INLINE vf v_set1(float x) { return _mm512_set1_ps(x); }
PI_INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
PI_INLINE vf v_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(v_lanes(n), p); }
PI_INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
PI_INLINE void v_store_n(float *p, vf x, int n) { _mm512_mask_storeu_ps(p, v_lanes(n), x); }
PI_INLINE vf v_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
PI_INLINE vf v_load_n_f16(const uint16_t *p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(v_lanes(n), p)); }
PI_INLINE void v_store_f16(uint16_t *p, vf x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
PI_INLINE void v_store_f16_n(uint16_t *p, vf x, int n) {
    _mm256_mask_storeu_epi16(p, v_lanes(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
PI_INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
PI_INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
PI_INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
PI_INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
PI_INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
PI_INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
PI_INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
PI_INLINE float v_max_across(vf x) { return _mm512_reduce_max_ps(x); }
PI_INLINE vf v_abs(vf x) { return _mm512_abs_ps(x); }
PI_INLINE vf v_neg(vf x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }
PI_INLINE vf v_rint(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PI_INLINE vi v_to_int(vf x) { return _mm512_cvtps_epi32(x); }
PI_INLINE void v_storei(int32_t *p, vi x) { _mm512_storeu_si512(p, x); }
PI_INLINE vi v_half(vi k) { return _mm512_srai_epi32(k, 1); }
PI_INLINE vi v_subi(vi a, vi b) { return _mm512_sub_epi32(a, b); }
PI_INLINE vf v_pow2(vi k) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(k, _mm512_set1_epi32(127)), 23)); }

/* The kernels of simd/attention.h name loads by the cache's type. */
#define v_load_f32 v_load
#define v_load_n_f32 v_load_n

/* 32 registers: accumulators of a block of scores, heads to a block. */
#define SCORE_VECTORS 4
#define SCORE_HEADS 4
#define CONTEXT_HEADS 4
