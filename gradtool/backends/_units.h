/* Units of tensors, such as the rows of a matrix, each multiplied by a factor of its own. */
#ifndef GRADTOOL_UNITS_H
#define GRADTOOL_UNITS_H

#include "_short_rows.h"

/* A piece whose first element is number `phase` of a unit, which has `columns`; that unit's factor is number `first`. */
struct units { int64_t dtype, offset, elements, phase, columns, first; };

/* Whether units are scaled many at a time: a row of F32 or F64 is scaled fast even if it is rather short. */
static int are_short(enum dtype dtype, int64_t columns) { return columns <= (ITEMSIZE[dtype] < 4 ? SHORT_ROW : 24); }

/* Multiplies the rest of a unit, or a row of it. */
static void scale_part(enum dtype dtype, char *data, double factor, int n)
{
    struct job job = {.writes = 1, .limit = INFINITY, .factor = factor};
    scale_row(job, dtype, data, n);
}

/* Multiplies whole units, as many as fit a buffer. Their products are exact in float64, or are of type F64. */
static void scale_short_units(enum dtype dtype, char *data, const double *factors, int64_t count, int64_t columns)
{
    struct job keeps = {.drops = 0};
    ALIGNED double values[CHUNK], each[CHUNK + OVERHANG], rounded[CHUNK];
    int n = (int)(count * columns);
    for (int64_t i = 0; i < count; i++) rounded[i] = dtype == F64 ? factors[i] : (double)(float)factors[i];
    repeat(rounded, count, columns, each);
    load_doubles(keeps, dtype, data, values, n);
    for (int64_t j = 0; j < n; j++) values[j] *= each[j];
    store_wide(dtype, values, data, n);
}

static void scale_units(char *block, const struct units *piece, const double *factors, int64_t k)
{
    for (int64_t i = 0; i < k; i++, piece++) {
        enum dtype dtype = (enum dtype)piece->dtype;
        const double *factor = factors + piece->first;
        int64_t phase = piece->phase, columns = piece->columns;
        for (int64_t at = 0; at < piece->elements;) {
            char *data = block + piece->offset + at * ITEMSIZE[dtype];
            int64_t rest = piece->elements - at, n, units;
            units = phase || !are_short(dtype, columns) ? 0 : rest / columns;
            if (units) {
                if (units > CHUNK / columns) units = CHUNK / columns;
                scale_short_units(dtype, data, factor, units, columns);
                n = units * columns, factor += units;
            } else {
                n = columns - phase < rest ? columns - phase : rest;
                if (n > LANES) n = LANES;
                scale_part(dtype, data, *factor, (int)n);
                phase += n;
                if (phase == columns) phase = 0, factor++;
            }
            at += n;
        }
    }
}

#endif
