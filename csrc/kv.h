/* kv.h: where a view's rows lie (api.h, pi_kv_view). */
#ifndef PI_KV_H
#define PI_KV_H

#include "pi.h"

/* Far beyond any model; within them no count or size overflows. */
enum { PI_MAX_HEAD_DIM = 1024, PI_MAX_HEADS = 4096, PI_MAX_SEQS = 65536, PI_MAX_TOKENS = INT32_MAX };

/* Whether the view can be used, and has room for `more` tokens. */
bool pi_kv_view_ok(const pi_kv_view *v, int64_t more);

/* Bytes of a row of head_dim values; a K tile is 16 rows. */
PI_INLINE int64_t pi_kv_row_bytes(const pi_kv_view *v) {
    const int64_t dim = v->head_dim;
    return v->dtype == PI_F32 ? 4 * dim : v->dtype == PI_F16 ? 2 * dim : dim + dim / PI_BLOCK * 2;
}

/* Head h of the block that token t lies in, and t's place in it; of tiles. */
PI_INLINE uint8_t *pi_kv_head(const pi_kv_view *v, void *const *blocks, int64_t t, int64_t h) {
    return (uint8_t *)blocks[t / v->block] + h * v->head_stride;
}

/* The V row of token t; and, in rows, the K row. */
PI_INLINE uint8_t *pi_kv_row(const pi_kv_view *v, void *const *blocks, int64_t t, int64_t h) {
    return pi_kv_head(v, blocks, t, h) + t % v->block * (v->layout == PI_TILES ? pi_kv_row_bytes(v) : v->row_stride);
}

/* The K tile of token t, of tiles. */
PI_INLINE uint8_t *pi_kv_tile(const pi_kv_view *v, int64_t t, int64_t h) {
    return pi_kv_head(v, v->k, t, h) + t % v->block / PI_LANES * PI_LANES * pi_kv_row_bytes(v);
}

#endif
