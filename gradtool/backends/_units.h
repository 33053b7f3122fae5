/* Units of tensors, such as the rows of a matrix, each multiplied by a factor of its own. */
#ifndef GRADTOOL_UNITS_H
#define GRADTOOL_UNITS_H

#include "_tiles.h"

/* A piece whose first element is number `phase` of a unit, which has `columns`; that unit's factor is number `first`. */
struct units { int64_t dtype, offset, elements, phase, columns, first; };

static void scale_units(char *block, const struct units *piece, const double *factors, int64_t k)
{
    struct job job = {.writes = 1, .limit = INFINITY};
    for (int64_t i = 0; i < k; i++, piece++) {
        enum dtype dtype = (enum dtype)piece->dtype;
        const double *factor = factors + piece->first;
        int64_t phase = piece->phase;
        for (int64_t at = 0; at < piece->elements;) {
            int64_t left = piece->columns - phase < piece->elements - at ? piece->columns - phase : piece->elements - at;
            int n = (int)(left < LANES ? left : LANES);
            char *data = block + piece->offset + at * ITEMSIZE[dtype];
            job.factor = *factor;
            scale_row(job, dtype, data, n);
            at += n, phase += n;
            if (phase == piece->columns) phase = 0, factor++;
        }
    }
}

#endif
