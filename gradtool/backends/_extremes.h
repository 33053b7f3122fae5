/* Values at the ends of what a storage type holds; extremes.py is the plain twin, and gives the codes of the bounds. */
#ifndef GRADTOOL_EXTREMES_H
#define GRADTOOL_EXTREMES_H

#include "_storage.h"

/* Adds the subnormal and the saturated values of a row. For a zero, 0 - 1 is the largest number there is. */
#define EXTREMES(BITS)                                                                                                 \
    VECTOR static void row_extremes##BITS(const void *row, int n, uint64_t normal, uint64_t largest, int64_t *found)   \
    {                                                                                                                  \
        const uint##BITS##_t *codes = row, mask = (uint##BITS##_t)(UINT##BITS##_MAX >> 1);                             \
        const uint##BITS##_t below = (uint##BITS##_t)(normal - 1), most = (uint##BITS##_t)largest;                     \
        int subnormal = 0, saturated = 0;                                                                              \
        for (int j = 0; j < n; j++) {                                                                                  \
            uint##BITS##_t magnitude = codes[j] & mask;                                                                \
            subnormal += (uint##BITS##_t)(magnitude - 1) < below;                                                      \
            saturated += magnitude == most;                                                                            \
        }                                                                                                              \
        found[0] += subnormal, found[1] += saturated;                                                                  \
    }

EXTREMES(8)
EXTREMES(16)
EXTREMES(32)
EXTREMES(64)

/* Counts those of a piece; its bytes may begin anywhere. */
static void count_extremes(const char *data, int64_t itemsize, int64_t elements, uint64_t normal, uint64_t largest,
                           int64_t *found)
{
    ALIGNED char row[8 * LANES];
    for (int64_t start = 0; start < elements; start += LANES) {
        int n = (int)(elements - start < LANES ? elements - start : LANES);
        memcpy(row, data + start * itemsize, (size_t)(n * itemsize));
        if (itemsize == 8) row_extremes64(row, n, normal, largest, found);
        else if (itemsize == 4) row_extremes32(row, n, normal, largest, found);
        else if (itemsize == 2) row_extremes16(row, n, normal, largest, found);
        else row_extremes8(row, n, normal, largest, found);
    }
}

#endif
