/* pack.h: what is known of each weight type, and its way from GGUF rows into row groups. */
#ifndef PI_PACK_H
#define PI_PACK_H

#include "pi.h"

typedef struct pi_weight_type {
    int type;                /* PI_F32 .. */
    int block, src_bytes;    /* columns of a block of the file, its bytes */
    bool quantised;
    pi_format format;        /* of a quantised type; else its bits */
    void (*pack)(const uint8_t *const rows[PI_LANES], int64_t cols, uint8_t *group);
    void (*row)(const uint8_t *group, int64_t cols, int r, float *y); /* dequantises row r of a group */
} pi_weight_type;

const pi_weight_type *pi_find_type(int type); /* NULL: no such type here */
/* Row groups g0..g1 of a matrix, packed from w->src to `out`. */
void pi_pack_groups(const pi_weight *w, int64_t g0, int64_t g1, uint8_t *out);
int64_t pi_group_bytes(const pi_weight_type *t, int64_t cols); /* of a packed row group, a multiple of 64 */

#endif
