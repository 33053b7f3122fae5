/* Values at the ends of what a storage type holds; tiles.py is the reference, storage.py has the codes of the bounds. */
#ifndef GRADTOOL_EXTREMES_H
#define GRADTOOL_EXTREMES_H

#include "_storage.h"

/* The codes of the smallest normal value and of the largest finite value. */
struct bounds { uint64_t normal, largest; };

/* Adds the subnormal and the saturated values of a row. For a zero, 0 - 1 is the largest number there is. */
#define EXTREMES(BITS)                                                                                                 \
    static void row_extremes##BITS(const char *row, int n, struct bounds bounds, int64_t *counts)                      \
    {                                                                                                                  \
        const uint##BITS##_t mask = (uint##BITS##_t)(UINT##BITS##_MAX >> 1);                                           \
        const uint##BITS##_t below = (uint##BITS##_t)(bounds.normal - 1), highest = (uint##BITS##_t)bounds.largest;       \
        int subnormal = 0, saturated = 0;                                                                              \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            uint##BITS##_t magnitude = load##BITS(row + BITS / 8 * j) & mask;                                          \
            subnormal += (uint##BITS##_t)(magnitude - 1) < below;                                                      \
            saturated += magnitude == highest;                                                                            \
        }                                                                                                              \
        counts[0] += subnormal, counts[1] += saturated;                                                                \
    }

EXTREMES(8)
EXTREMES(16)
EXTREMES(32)
EXTREMES(64)

/* Counts those of a piece. */
static void count_extremes(const char *data, int64_t itemsize, int64_t elements, const uint64_t *bound, int64_t *counts)
{
    struct bounds bounds = {bound[0], bound[1]};
    for (int64_t start = 0; start < elements; start += LANES) {
        int n = (int)(elements - start < LANES ? elements - start : LANES);
        const char *row = data + start * itemsize;
        if (itemsize == 8) row_extremes64(row, n, bounds, counts);
        else if (itemsize == 4) row_extremes32(row, n, bounds, counts);
        else if (itemsize == 2) row_extremes16(row, n, bounds, counts);
        else row_extremes8(row, n, bounds, counts);
    }
}

#endif
