/* quant.h: the weight types, and how a quantised one is packed. A type is one line of PI_QUANTISED; the kernels of every
 * level, the packing and the table entries derive from it. NUMERICS.md section 3.
 *
 * A row group is 16 rows interleaved; the last one is padded with zero rows. F32, F16, BF16: [cols][16] values. The others
 * hold, per block of 32 columns, planes of bits, each a few vectors of [16 rows][4 codes]; vector k of a plane that is
 * one byte to a code holds codes 4k..4k+3 of each row. A code is the sum of its type's planes:
 *
 *   byte     8 vectors    code k in vector k
 *   nibble   4 vectors    codes k and k + 4 in vector k, low and high
 *   two      2 vectors    codes 4v .. 4v+3 in vector v, two bits each, from the low end
 *   one      1 vector     codes 0 .. 7, one bit each, from the low end
 *
 * (k counts vectors of four codes), so one 64-byte load holds codes of all 16 rows, and no kernel needs a horizontal sum. After
 * the codes of all blocks come the scales: per 256 columns what a super-block shares, then what each of its blocks has. */
#ifndef PI_QUANT_H
#define PI_QUANT_H

/* Scales, in vectors of 16 rows:       shared by 256       a block of 32                 s_g, m_g                        */
enum {
    PI_SCALE_D,    /*                                        f16 d                         d                               */
    PI_SCALE_DM,   /*                                        f16 d, f16 m                  d, m                            */
    PI_SCALE_E8M0, /*                                        u8 e                          2^(e - 128)                     */
    PI_SCALE_S8,   /*                    f16 d               s8 sc                         d * sc                          */
    PI_SCALE_S8X2, /*                    f16 d               s8 sc of each half            d * sc                          */
    PI_SCALE_U8M,  /*                    f16 d, f16 dmin     u8 sc, u8 mn                  d * sc, -(dmin * mn)            */
    PI_SCALE_U4M,  /*                    f16 d, f16 dmin     u8 sc | mn << 4, each half    d * sc, -(dmin * mn)            */
};

enum { PI_NO_TABLE, PI_TABLE_NL, PI_TABLE_E2M1 };

/* X(stem, TYPE, bits, offset, table, scales, spread): integer code = code as stored - offset, or table[code as stored]; as what it
 * is folded once its codes are bytes and its scales floats (simd/matmul_quant.h), a type above it or itself */
#define PI_QUANTISED(X) \
    X(q4_0, Q4_0, 4, 8, PI_NO_TABLE, PI_SCALE_D, q4_0) \
    X(q4_1, Q4_1, 4, 0, PI_NO_TABLE, PI_SCALE_DM, q4_1) \
    X(q5_0, Q5_0, 5, 16, PI_NO_TABLE, PI_SCALE_D, q5_0) \
    X(q5_1, Q5_1, 5, 0, PI_NO_TABLE, PI_SCALE_DM, q5_1) \
    X(q8_0, Q8_0, 8, 0, PI_NO_TABLE, PI_SCALE_D, q8_0) \
    X(q2_k, Q2_K, 2, 0, PI_NO_TABLE, PI_SCALE_U4M, q2_k) \
    X(q3_k, Q3_K, 3, 4, PI_NO_TABLE, PI_SCALE_S8X2, q3_k) \
    X(q4_k, Q4_K, 4, 0, PI_NO_TABLE, PI_SCALE_U8M, q4_1) \
    X(q5_k, Q5_K, 5, 0, PI_NO_TABLE, PI_SCALE_U8M, q5_1) \
    X(q6_k, Q6_K, 6, 32, PI_NO_TABLE, PI_SCALE_S8X2, q6_k) \
    X(iq4_nl, IQ4_NL, 4, 0, PI_TABLE_NL, PI_SCALE_D, q8_0) \
    X(iq4_xs, IQ4_XS, 4, 0, PI_TABLE_NL, PI_SCALE_S8, q8_0) \
    X(mxfp4, MXFP4, 4, 0, PI_TABLE_E2M1, PI_SCALE_E8M0, q5_0)
#define PI_FLOAT(X) X(f32, F32) X(f16, F16) X(bf16, BF16)

/* One line of PI_QUANTISED as a value: kernels take it as a constant and the compiler folds it away. */
typedef struct {
    int bits, offset, table, scales;
} pi_format;
#define PI_FORMAT(stem, TYPE, bits, offset, table, scales, spread) ((pi_format){bits, offset, table, scales})

static const int8_t pi_table_nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t pi_table_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Which planes make the code, and where its two-bit and one-bit planes put their bits. */
#define PI_HAS_NIBBLE(f) ((f).bits >= 4 && (f).bits <= 6)
#define PI_HAS_TWO(f) ((f).bits == 2 || (f).bits == 3 || (f).bits == 6)
#define PI_HAS_ONE(f) ((f).bits == 3 || (f).bits == 5)
enum { PI_VECTOR_BYTES = 64 };
/* bytes of a group's codes in a block; of the planes that come before `two` and `one` */
#define PI_CODE_BYTES(f) ((f).bits * PI_VECTOR_BYTES)
#define PI_TWO_AT(f) (PI_HAS_NIBBLE(f) ? 4 * PI_VECTOR_BYTES : 0)
#define PI_ONE_AT(f) (PI_CODE_BYTES(f) - PI_VECTOR_BYTES)
#define PI_TWO_SHIFT(f) (PI_HAS_NIBBLE(f) ? 4 : 0)
#define PI_ONE_SHIFT(f) ((f).bits - 1)

/* Scale groups to a block of 32. */
#define PI_SCALE_GROUPS(f) ((f).scales == PI_SCALE_S8X2 || (f).scales == PI_SCALE_U4M ? 2 : 1)
#define PI_HAS_MIN(f) ((f).scales == PI_SCALE_DM || (f).scales == PI_SCALE_U8M || (f).scales == PI_SCALE_U4M)
#define PI_HAS_SUPER(f) ((f).scales >= PI_SCALE_S8)
#define PI_SUPER_BYTES(f) (!PI_HAS_SUPER(f) ? 0 : PI_HAS_MIN(f) ? 64 : 32)
#define PI_SUB_BYTES(f) ((f).scales == PI_SCALE_DM ? 64 : (f).scales == PI_SCALE_E8M0 || (f).scales == PI_SCALE_S8 ? 16 : 32)

#endif
