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
PI_INLINE int32_t v_sum(vi x) { return _mm512_reduce_add_epi32(x); }
/* As int8; and as int16, each four in the order 0 2 1 3. */
PI_INLINE void v_store_codes(int8_t *q, int16_t *q16, vi x) {
    const __m256i w = _mm512_cvtepi32_epi16(x);
    _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(x));
    _mm256_storeu_si256((__m256i *)q16, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(w, 0xd8), 0xd8));
}
PI_INLINE vf v_scale2(vf y, vf n) { return _mm512_scalef_ps(y, n); } /* y * 2^n, one rounding, also to a subnormal */

/* Which lanes, and what they choose. */
typedef __mmask16 vm;
PI_INLINE vi v_load_int(const int32_t *p) { return _mm512_loadu_si512(p); }
PI_INLINE vm v_between(vi lo, int32_t x, vi hi) { /* lo <= x < hi */
    return _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask(lo, _mm512_set1_epi32(x)), hi, _mm512_set1_epi32(x));
}
PI_INLINE vm v_small(vf x, vf y) { /* 0 < x < y */
    return _mm512_mask_cmp_ps_mask(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), x, _mm512_setzero_ps(), _CMP_NEQ_OQ);
}
PI_INLINE bool v_any(vm m) { return m != 0; }
PI_INLINE vf v_select(vm m, vf yes, vf no) { return _mm512_mask_mov_ps(no, m, yes); }

/* Integers: vi are int32 lanes, vb the same register seen as bytes or int16. */
typedef __m512i vb;
PI_INLINE vi v_set1i(int32_t x) { return _mm512_set1_epi32(x); }
PI_INLINE vi v_addi(vi a, vi b) { return _mm512_add_epi32(a, b); }
PI_INLINE vf v_from_int(vi x) { return _mm512_cvtepi32_ps(x); }
PI_INLINE vb vb_set1(uint8_t x) { return _mm512_set1_epi8((char)x); }
PI_INLINE vb vb_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
PI_INLINE void vb_store(uint8_t *p, vb v) { _mm512_storeu_si512(p, v); }
PI_INLINE vb vb_four(const void *p) { return _mm512_set1_epi32((int)*(const pi_u32 *)p); }
PI_INLINE vb vb_and(vb a, vb b) { return _mm512_and_si512(a, b); }
PI_INLINE vb vb_or(vb a, vb b) { return _mm512_or_si512(a, b); }
PI_INLINE vb vb_xor(vb a, vb b) { return _mm512_xor_si512(a, b); }
PI_INLINE vb vb_shr(vb v, int n) { PI_SHIFT(_mm512_srli_epi16, v, n); }
PI_INLINE vb vb_shl(vb v, int n) { PI_SHIFT(_mm512_slli_epi16, v, n); }
PI_INLINE vb vb_lookup(const int8_t *table, vb v) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), v);
}
PI_INLINE vb vb_maddubs(vb u, vb s) { return _mm512_maddubs_epi16(u, s); }
PI_INLINE vi v_madd(vb a, vb b) { return _mm512_madd_epi16(a, b); }
PI_INLINE vb v_add16(vb a, vb b) { return _mm512_add_epi16(a, b); }
PI_INLINE vb v_set16(int16_t x) { return _mm512_set1_epi16(x); }
PI_INLINE vb v_low8(vb v) { return _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8); } /* signed bytes of even index as int16 */
PI_INLINE vb v_high8(vb v) { return _mm512_srai_epi16(v, 8); }                      /* of odd index */

/* Scales of 16 rows from bytes. */
PI_INLINE vi v_bytes(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
PI_INLINE vf v_load_u8(const uint8_t *p) { return _mm512_cvtepi32_ps(v_bytes(p)); }
PI_INLINE vf v_load_s8(const uint8_t *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
PI_INLINE vf v_load_u4(const uint8_t *p, int from) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(from ? _mm512_srli_epi32(v_bytes(p), 4) : v_bytes(p), v_set1i(15)));
}
PI_INLINE vf v_load_e8m0(const uint8_t *p) { /* 2^(e - 128); e below 2 gives a subnormal */
    const vi e = v_bytes(p), normal = _mm512_slli_epi32(_mm512_sub_epi32(e, v_set1i(1)), 23), low = _mm512_sllv_epi32(v_set1i(0x200000), e);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(e, v_set1i(2)), low));
}
PI_INLINE vf v_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

PI_INLINE vf v_set1_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_set1_epi16((short)*p)); }
/* simd/matmul_float.h names loads by type. */
#define v_load_f32 v_load

/* 32 registers hold the sums of a block of simd/attention.h: query rows by tiles of keys, and by vectors of value dimensions. */
#define SCORE_ROWS 12
#define SCORE_TILES 2
#define SCORE_TILES_4 4
#define SCORE_TILES_2 8
#define CONTEXT_ROWS 12
#define CONTEXT_VECTORS 2
#define CONTEXT_VECTORS_4 4
#define CONTEXT_VECTORS_2 8
/* And of simd/attention_rows.h: three vectors of rows by so many columns. */
#define ROW_COLUMNS 8
