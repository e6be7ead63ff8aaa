/* columns.h: rows as columns, four by four. Every x86-64 and aarch64 has the vectors for it, so this is of no level. */
#ifndef PI_COLUMNS_H
#define PI_COLUMNS_H

#include "pi.h"

/* y[d * ld + r] = x[r][d] for four rows and four columns. */
PI_INLINE void pi_turn4(const float *x0, const float *x1, const float *x2, const float *x3, float *y0, float *y1, float *y2, float *y3) {
#if PI_X86
    const __m128 a = _mm_loadu_ps(x0), b = _mm_loadu_ps(x1), c = _mm_loadu_ps(x2), d = _mm_loadu_ps(x3);
    const __m128 ab = _mm_unpacklo_ps(a, b), cd = _mm_unpacklo_ps(c, d), ab2 = _mm_unpackhi_ps(a, b), cd2 = _mm_unpackhi_ps(c, d);
    _mm_storeu_ps(y0, _mm_movelh_ps(ab, cd)), _mm_storeu_ps(y1, _mm_movehl_ps(cd, ab));
    _mm_storeu_ps(y2, _mm_movelh_ps(ab2, cd2)), _mm_storeu_ps(y3, _mm_movehl_ps(cd2, ab2));
#else
    const float *x[4] = {x0, x1, x2, x3};
    float t[4][4];
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++) t[k][i] = x[i][k];
    memcpy(y0, t[0], sizeof t[0]), memcpy(y1, t[1], sizeof t[1]), memcpy(y2, t[2], sizeof t[2]), memcpy(y3, t[3], sizeof t[3]);
#endif
}

/* Rows x[r][0..n) as columns y[d][r], ld floats apart; and back. */
static inline void pi_to_columns(const float *const *x, int64_t rows, int64_t n, float *y, int64_t ld) {
    for (int64_t r = 0; r < rows; r++) {
        float *to = y + r;
        int64_t d = 0;
        if (r % 4 == 0 && r + 4 <= rows)
            for (; d + 4 <= n; d += 4, to += 4 * ld)
                pi_turn4(x[r] + d, x[r + 1] + d, x[r + 2] + d, x[r + 3] + d, to, to + ld, to + 2 * ld, to + 3 * ld);
        else if (r / 4 * 4 + 4 <= rows)
            d = n / 4 * 4, to += d * ld; /* done with the first of the four */
        for (; d < n; d++, to += ld) *to = x[r][d];
    }
}
static inline void pi_to_rows(const float *x, int64_t ld, float *const *y, int64_t rows, int64_t n) {
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r;
        int64_t d = 0;
        if (r % 4 == 0 && r + 4 <= rows)
            for (; d + 4 <= n; d += 4, from += 4 * ld)
                pi_turn4(from, from + ld, from + 2 * ld, from + 3 * ld, y[r] + d, y[r + 1] + d, y[r + 2] + d, y[r + 3] + d);
        else if (r / 4 * 4 + 4 <= rows)
            d = n / 4 * 4, from += d * ld;
        for (; d < n; d++, from += ld) y[r][d] = *from;
    }
}

#endif
