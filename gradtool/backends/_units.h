/* Units of tensors, such as the rows of a matrix, each with its norm and its factor.
 * units.py has the reference. */
#ifndef GRADTOOL_UNITS_H
#define GRADTOOL_UNITS_H

#include "_layer_norm.h"

/* ---- their factors ---------------------------------------------------------------------------------------------- */

/* Units of a side, as rows. */
struct side { const char *data; enum dtype dtype; };

struct unit_limits { double ratio, eps, unscale; };

/* The counts of UnitFactors; and whether the sum of a unit is out of range, so that all is to be done another way. */
struct unit_counts { int64_t clipped, changed, nonfinite, beyond; int out_of_range; };

/* Units whose norms are compared at once. */
enum { UNITS_AT_ONCE = 256 };

/* Sets the norms of units from number `first` on. Returns whether a sum is out of range, which only those of F64 can be. */
static int set_norms(struct side side, int64_t first, int64_t count, int64_t size, double *norms)
{
    static const double about_zero[UNITS_AT_ONCE] = {0};
    const char *data = side.data + first * size * ITEMSIZE[side.dtype];
    struct patch patch = {.rows = count, .columns = size, .x_dtype = side.dtype, .x = data, .mean = about_zero};
    int out_of_range = 0;
    sum_rows(&patch, norms);
    for (int64_t i = 0; i < count && side.dtype == F64; i++) {
        if (is_in_range(norms[i])) continue;
        ALIGNED double row[CHUNK];
        for (int64_t at = 0; at < size && !out_of_range; at += CHUNK) {
            int64_t n = size - at < CHUNK ? size - at : CHUNK;
            memcpy(row, data + 8 * (i * size + at), 8 * (size_t)n);
            out_of_range = !are_zeros(row, n);
        }
    }
    for (int64_t i = 0; i < count; i++) norms[i] = sqrt(norms[i]);
    return out_of_range;
}

/* Sets the factors of units with these norms. */
static void set_factors(const double *grads, const double *params, int64_t count, struct unit_limits limits, double *factors)
{
    for (int64_t i = 0; i < count; i++) {
        double grad = grads[i] / limits.unscale, param = params[i];
        double limit = limits.ratio * (param > limits.eps || param != param ? param : limits.eps), above = limit / grad;
        factors[i] = (grad <= limit ? 1 : above) / limits.unscale;
    }
}

HELPER int is_beyond(double factor, int is_wide)
{
    double magnitude = fabs(round_factor(factor, is_wide)), tiny = is_wide ? DBL_MIN : (double)FLT_MIN;
    return ((magnitude < tiny) & (factor != 0)) | (magnitude == INFINITY);
}

static void count_factors(const double *factors, const double *params, int64_t count, int is_wide, double unscale,
                          int64_t first, struct unit_counts *counts)
{
    double unclipped = round_factor(1 / unscale, is_wide);
    int64_t clipped = 0, changed = 0, nonfinite = 0, beyond = 0;
    for (int64_t i = 0; i < count; i++) {
        double rounded = round_factor(factors[i], is_wide);
        clipped += rounded != unclipped;
        changed += rounded != 1;
        nonfinite += !(params[i] < INFINITY);
        beyond += is_beyond(factors[i], is_wide);
    }
    counts->clipped += clipped, counts->changed += changed, counts->nonfinite += nonfinite;
    for (int64_t i = 0; i < count && beyond && counts->beyond < 0; i++)
        if (is_beyond(factors[i], is_wide)) counts->beyond = first + i;
}

static struct unit_counts compute_factors(const struct side *side, int64_t units, int64_t size, struct unit_limits limits,
                                     double *factors)
{
    struct unit_counts counts = {.beyond = -1};
    for (int64_t first = 0; first < units && !counts.out_of_range; first += UNITS_AT_ONCE) {
        ALIGNED double norms[2][UNITS_AT_ONCE];
        int64_t count = units - first < UNITS_AT_ONCE ? units - first : UNITS_AT_ONCE;
        for (int i = 0; i < 2; i++) counts.out_of_range |= set_norms(side[i], first, count, size, norms[i]);
        set_factors(norms[0], norms[1], count, limits, factors + first);
        count_factors(factors + first, norms[1], count, side->dtype == F64, limits.unscale, first, &counts);
    }
    return counts;
}

/* ---- their products --------------------------------------------------------------------------------------------- */

/* A piece whose first element is number `phase` of a unit, which has `columns`; that unit's factor is number `first`. */
struct units { int64_t dtype, offset, elements, phase, columns, first; };

/* Whether units are scaled many at a time: a row of F32 or F64 is scaled fast even if it is rather short. */
static int are_short(enum dtype dtype, int64_t columns) { return columns <= (ITEMSIZE[dtype] < 4 ? SHORT_ROW : 24); }

/* Multiplies a unit from an element on, or a row of it. */
static void scale_part(enum dtype dtype, char *data, double factor, int n, int64_t *losses)
{
    struct job job = {.writes = 1, .limit = INFINITY, .factor = factor};
    scale_counted(job, dtype, data, n, losses);
}

/* Multiplies whole units, as many as fit a buffer. Their products are exact in float64, or are of type F64. */
static void scale_short_units(enum dtype dtype, char *data, const double *factors, int64_t count, int64_t columns,
                              int64_t *losses)
{
    struct job keeps = {.drops = 0};
    ALIGNED double values[CHUNK], each[CHUNK + OVERHANG], rounded[CHUNK], before[CHUNK];
    double normal = normal_of(dtype);
    int n = (int)(count * columns), may_lose = 0;
    for (int64_t i = 0; i < count; i++) rounded[i] = round_factor(factors[i], dtype == F64);
    repeat(rounded, count, columns, each);
    load_doubles(keeps, dtype, data, values, n);
    for (int64_t j = 0; j < n; j++) {
        before[j] = each[j] == 0 ? 0 : values[j];
        values[j] *= each[j];
        may_lose |= (before[j] != 0) & !((fabs(before[j]) >= normal) & (fabs(values[j]) >= normal));
    }
    store_wide(dtype, values, data, n);
    if (!may_lose) return;
    load_doubles(keeps, dtype, data, values, n);
    count_losses(dtype, before, values, 0, n, losses);
}

/* Adds to two losses of each piece. */
static void scale_units(char *block, const struct units *piece, const double *factors, int64_t k, int64_t *losses)
{
    for (int64_t i = 0; i < k; i++, piece++, losses += 2) {
        enum dtype dtype = (enum dtype)piece->dtype;
        const double *factor = factors + piece->first;
        int64_t phase = piece->phase, columns = piece->columns;
        for (int64_t at = 0; at < piece->elements;) {
            char *data = block + piece->offset + at * ITEMSIZE[dtype];
            int64_t left = piece->elements - at, n, units;
            units = phase || !are_short(dtype, columns) ? 0 : left / columns;
            if (units) {
                if (units > CHUNK / columns) units = CHUNK / columns;
                scale_short_units(dtype, data, factor, units, columns, losses);
                n = units * columns, factor += units;
            } else {
                n = columns - phase < left ? columns - phase : left;
                if (n > LANES) n = LANES;
                scale_part(dtype, data, *factor, (int)n, losses);
                phase += n;
                if (phase == columns) phase = 0, factor++;
            }
            at += n;
        }
    }
}

#endif
