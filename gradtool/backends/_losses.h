/* What a write loses: how many values become 0, and how many more than before are subnormal. tiles.py has the reference. */
#ifndef GRADTOOL_LOSSES_H
#define GRADTOOL_LOSSES_H

#include "_scaling.h"

/* A factor as values of a type are multiplied by it: float32, except for F64. */
HELPER double round_factor(double factor, int is_wide) { return is_wide ? factor : (double)(float)factor; }

/* Loads a row as float64, which is as good as its own type for what is done with few rows. */
static void load_doubles(struct job job, enum dtype dtype, const char *data, double *values, int n)
{
    ALIGNED float row[LANES];
    if (dtype == F64) {
        memcpy(values, data, 8 * (size_t)n);
    } else {
        load_row(dtype, data, row, n);
        for (int64_t j = 0; j < n; j++) values[j] = (double)row[j];
    }
    if (job.drops) drop64((char *)values, n);
}

/* The code of the smallest magnitude above 0, or 0 if there is none. For a zero, 0 - 1 is the largest number there is. */
#define SMALLEST(BITS)                                                                                                 \
    static uint##BITS##_t smallest_code##BITS(const char *row, int n)                                                  \
    {                                                                                                                  \
        uint##BITS##_t least = UINT##BITS##_MAX;                                                                       \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            uint##BITS##_t below = (uint##BITS##_t)((load##BITS(row + BITS / 8 * j) & (UINT##BITS##_MAX >> 1)) - 1);   \
            least = below < least ? below : least;                                                                     \
        }                                                                                                              \
        return (uint##BITS##_t)(least + 1);                                                                            \
    }

SMALLEST(8)
SMALLEST(16)
SMALLEST(32)
SMALLEST(64)

/* The smallest magnitude above 0 of a row; infinite if there is none. */
static double smallest(enum dtype dtype, const char *row, int n)
{
    int size = ITEMSIZE[dtype];
    uint64_t bits = size == 8   ? smallest_code64(row, n)
                    : size == 4 ? smallest_code32(row, n)
                    : size == 2 ? smallest_code16(row, n)
                                : smallest_code8(row, n);
    uint32_t code = (uint32_t)bits;
    if (!bits) return INFINITY;
    switch (dtype) {
#define VALUE_OF(DTYPE, NAME, ...) case DTYPE: return NAME##_to_float(code);
    FLOAT_TYPES(VALUE_OF)
    default: return as_double(bits);
    }
}

HELPER int is_subnormal(double value, double normal) { return (value != 0) & (fabs(value) < normal); }

/* `before` are stored values, or sums that are rounded, of which a subnormal sum loses nothing if it is exact. */
static void count_losses(enum dtype dtype, const double *before, const double *after, int rounds, int n, int64_t *losses)
{
    double normal = normal_of(dtype);
    for (int64_t j = 0; j < n; j++) {
        int small = is_subnormal(after[j], normal);
        losses[0] += (before[j] != 0) & (after[j] == 0);
        losses[1] += small - (rounds ? small & (after[j] == before[j]) : is_subnormal(before[j], normal));
    }
}

/* Scales a row, and adds to the losses of its piece. Few rows have values that are small enough to be looked at. */
static void scale_counted(struct job job, enum dtype dtype, char *data, int n, int64_t *losses)
{
    ALIGNED double before[LANES], after[LANES];
    struct job keeps = {.drops = 0};
    double normal = normal_of(dtype), least = smallest(dtype, data, n), factor = round_factor(job.factor, dtype == F64);
    int may_lose = n > 0 && factor != 0 && !(least >= normal && least * fabs(factor) >= normal && job.limit >= normal);
    if (may_lose) load_doubles(job, dtype, data, before, n);
    scale_row(job, dtype, data, n);
    if (!may_lose) return;
    load_doubles(keeps, dtype, data, after, n);
    count_losses(dtype, before, after, 0, n, losses);
}

/* The same of float64 values that are rounded and stored. */
static void store_counted(enum dtype dtype, const double *wide, char *data, int n, int64_t *losses)
{
    ALIGNED double after[LANES];
    struct job keeps = {.drops = 0};
    store_wide(dtype, wide, data, n);
    if (dtype == F64 || smallest(F64, (const char *)wide, n) >= normal_of(dtype)) return;
    load_doubles(keeps, dtype, data, after, n);
    count_losses(dtype, wide, after, 1, n, losses);
}

#endif
