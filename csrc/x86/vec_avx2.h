/* Vectors of 8 lanes for the kernels of simd/. */
#define V 8
typedef __m256 vf;
typedef __m256i vi;

/* A window of eight into this has its first n lanes set. */
static const int32_t v_window[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
PI_INLINE __m256i v_lanes(int n) { return _mm256_loadu_si256((const __m256i *)(v_window + 8 - n)); }

PI_INLINE vf v_set1(float x) { return _mm256_set1_ps(x); }
PI_INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
PI_INLINE vf v_load_n(const float *p, int n) { return _mm256_maskload_ps(p, v_lanes(n)); }
PI_INLINE void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
PI_INLINE void v_store_n(float *p, vf x, int n) { _mm256_maskstore_ps(p, v_lanes(n), x); }
PI_INLINE vf v_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
PI_INLINE vf v_load_n_f16(const uint16_t *p, int n) {
    uint16_t t[8] = {0};
    for (int i = 0; i < n; i++) t[i] = p[i];
    return v_load_f16(t);
}
PI_INLINE void v_store_f16(uint16_t *p, vf x) { _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
PI_INLINE void v_store_f16_n(uint16_t *p, vf x, int n) {
    uint16_t t[8];
    v_store_f16(t, x);
    for (int i = 0; i < n; i++) p[i] = t[i];
}
PI_INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
PI_INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
PI_INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
PI_INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
PI_INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
PI_INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
PI_INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
PI_INLINE float v_max_across(vf x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
PI_INLINE vf v_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
PI_INLINE vf v_neg(vf x) { return _mm256_xor_ps(x, _mm256_set1_ps(-0.0f)); }
PI_INLINE vf v_rint(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PI_INLINE vi v_to_int(vf x) { return _mm256_cvtps_epi32(x); }
PI_INLINE int32_t v_sum(vi x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
/* As int8; and as int16, each four in the order 0 2 1 3. */
PI_INLINE void v_store_codes(int8_t *q, int16_t *q16, vi x) {
    const __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i *)q, _mm_packs_epi16(w, w));
    _mm_storeu_si128((__m128i *)q16, _mm_shufflehi_epi16(_mm_shufflelo_epi16(w, 0xd8), 0xd8));
}
PI_INLINE vf v_pow2(vi k) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(k, _mm256_set1_epi32(127)), 23)); }
/* y * 2^n, n whole; as two factors, of which the first is exact: one rounding, also to a subnormal. */
PI_INLINE vf v_scale2(vf y, vf n) {
    const vi k = v_to_int(n), half = _mm256_srai_epi32(k, 1);
    return v_mul(v_mul(y, v_pow2(half)), v_pow2(_mm256_sub_epi32(k, half)));
}

/* Which lanes, and what they choose. */
typedef __m256 vm;
PI_INLINE vi v_load_int(const int32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
PI_INLINE vm v_between(vi lo, int32_t x, vi hi) { /* lo <= x < hi */
    const vi at = _mm256_set1_epi32(x);
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(lo, at), _mm256_cmpgt_epi32(hi, at)));
}
PI_INLINE vm v_small(vf x, vf y) { /* 0 < x < y */
    return _mm256_and_ps(_mm256_cmp_ps(x, y, _CMP_LT_OQ), _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ));
}
PI_INLINE bool v_any(vm m) { return _mm256_movemask_ps(m) != 0; }
PI_INLINE vf v_select(vm m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, m); }

/* Integers: vi are int32 lanes, vb the same register seen as bytes or int16. */
typedef __m256i vb;
PI_INLINE vi v_set1i(int32_t x) { return _mm256_set1_epi32(x); }
PI_INLINE vi v_addi(vi a, vi b) { return _mm256_add_epi32(a, b); }
PI_INLINE vf v_from_int(vi x) { return _mm256_cvtepi32_ps(x); }
PI_INLINE vb vb_set1(uint8_t x) { return _mm256_set1_epi8((char)x); }
PI_INLINE vb vb_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
PI_INLINE void vb_store(uint8_t *p, vb v) { _mm256_storeu_si256((__m256i *)p, v); }
PI_INLINE vb vb_four(const void *p) { return _mm256_set1_epi32((int)*(const pi_u32 *)p); }
PI_INLINE vb vb_and(vb a, vb b) { return _mm256_and_si256(a, b); }
PI_INLINE vb vb_or(vb a, vb b) { return _mm256_or_si256(a, b); }
PI_INLINE vb vb_shr(vb v, int n) { PI_SHIFT(_mm256_srli_epi16, v, n); }
PI_INLINE vb vb_shl(vb v, int n) { PI_SHIFT(_mm256_slli_epi16, v, n); }
PI_INLINE vb vb_lookup(const int8_t *table, vb v) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), v);
}
PI_INLINE vb vb_maddubs(vb u, vb s) { return _mm256_maddubs_epi16(u, s); }
PI_INLINE vi v_madd(vb a, vb b) { return _mm256_madd_epi16(a, b); }
PI_INLINE vb v_add16(vb a, vb b) { return _mm256_add_epi16(a, b); }
PI_INLINE vb v_set16(int16_t x) { return _mm256_set1_epi16(x); }
PI_INLINE vb v_low8(vb v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); } /* signed bytes of even index as int16 */
PI_INLINE vb v_high8(vb v) { return _mm256_srai_epi16(v, 8); }                      /* of odd index */

/* Scales of 8 rows from bytes. */
PI_INLINE vi v_bytes(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
PI_INLINE vf v_load_u8(const uint8_t *p) { return _mm256_cvtepi32_ps(v_bytes(p)); }
PI_INLINE vf v_load_s8(const uint8_t *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
PI_INLINE vf v_load_u4(const uint8_t *p, int from) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(from ? _mm256_srli_epi32(v_bytes(p), 4) : v_bytes(p), v_set1i(15)));
}
PI_INLINE vf v_load_e8m0(const uint8_t *p) { /* 2^(e - 128); e below 2 gives a subnormal */
    const vi e = v_bytes(p), normal = _mm256_slli_epi32(_mm256_sub_epi32(e, v_set1i(1)), 23), low = _mm256_sllv_epi32(v_set1i(0x200000), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, low, _mm256_cmpgt_epi32(v_set1i(2), e)));
}
PI_INLINE vf v_load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

PI_INLINE vf v_set1_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_set1_epi16((short)*p)); }
/* simd/matmul_float.h names loads by type. */
#define v_load_f32 v_load

/* 16 registers hold the sums of a block of simd/attention.h: query rows by tiles of keys, and by vectors of value dimensions. */
#define SCORE_ROWS 4
#define SCORE_TILES 1
#define SCORE_TILES_4 1
#define SCORE_TILES_2 1
#define CONTEXT_ROWS 4
#define CONTEXT_VECTORS 2
#define CONTEXT_VECTORS_4 2
#define CONTEXT_VECTORS_2 4
/* And of simd/attention_rows.h: three vectors of rows by so many columns. */
#define ROW_COLUMNS 4
