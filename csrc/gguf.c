/* Where the strings of an array begin: vocabularies and merges are most of a GGUF header. */
#include "pi.h"

int pi_string_starts(const void *data, int64_t bytes, int64_t count, int64_t *starts, int64_t *found) {
    if (!data || bytes < 0 || count < 0 || !starts || !found) return PI_EINVAL;
    int64_t i = 0, pos = 0;
    for (uint64_t length; i < count; i++, pos += (int64_t)(sizeof length + length)) {
        starts[i] = pos;
        if (bytes - pos < (int64_t)sizeof length) break;
        memcpy(&length, (const char *)data + pos, sizeof length);
        if (length > (uint64_t)bytes - (uint64_t)pos - sizeof length) break;
    }
    if (i == count) starts[i] = pos;
    *found = i;
    return PI_OK;
}
