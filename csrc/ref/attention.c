/* Reference attention pieces over the tiled cache: K [n/16][dim][16], V [n][dim]. NUMERICS.md section 4. */
#include <math.h>

#include "ref.h"

#define SCORES(type, T, WIDEN) \
    void pi_scores_##type##_ref PI_SCORES_ARGS(T) { \
        for (int h = 0; h < heads; h++) \
            for (int64_t t = 0; t < n; t++) { \
                const T *key = k + t / PI_LANES * PI_LANES * dim + t % PI_LANES; \
                float acc = 0.0f; \
                for (int64_t d = 0; d < dim; d++) acc = fmaf(q[h * ldq + d], WIDEN(key[d * PI_LANES]), acc); \
                s[h * lds + t] = acc * scale; \
            } \
    }
SCORES(f32, float, )
SCORES(f16, uint16_t, pi_f32_of_f16)

#define CONTEXT(type, T, WIDEN) \
    void pi_context_##type##_ref PI_CONTEXT_ARGS(T) { \
        for (int h = 0; h < heads; h++) \
            for (int64_t d = 0; d < dim; d++) { \
                float acc = 0.0f; \
                for (int64_t t = 0; t < n; t++) acc = fmaf(p[h * ldp + t], WIDEN(v[t * dim + d]), acc); \
                out[h * ldo + d] = acc; \
            } \
    }
CONTEXT(f32, float, )
CONTEXT(f16, uint16_t, pi_f32_of_f16)
