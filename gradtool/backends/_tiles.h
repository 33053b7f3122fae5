/* Canonical tile sums, of what is in a block or is written there first. */
#ifndef GRADTOOL_TILES_H
#define GRADTOOL_TILES_H

#include "_storage.h"

/* ---- one row ---------------------------------------------------------------------------------------------------- */

struct stats { double max_abs; int64_t nan, inf, zeros, first; };

/* The largest magnitude ignores NaN. */
VECTOR static void row_stats32(const float *row, int n, struct stats *stats)
{
    uint32_t largest = 0, nan = 0, inf = 0, zeros = 0;
    for (int j = 0; j < n; j++) {
        uint32_t magnitude = as_bits(row[j]) & 0x7fffffffu;
        uint32_t number = -(uint32_t)(magnitude <= 0x7f800000u), kept = magnitude & number;
        nan += 1 + number;
        inf += magnitude == 0x7f800000u;
        zeros += magnitude == 0;
        largest = kept > largest ? kept : largest;
    }
    double max_abs = as_float(largest);
    if (max_abs > stats->max_abs) stats->max_abs = max_abs;
    stats->nan += nan, stats->inf += inf, stats->zeros += zeros;
}

VECTOR static void row_stats64(const double *row, int n, struct stats *stats)
{
    uint64_t largest = 0, nan = 0, inf = 0, zeros = 0, limit = 0x7ff0000000000000u;
    for (int j = 0; j < n; j++) {
        uint64_t magnitude = as_bits64(row[j]) & 0x7fffffffffffffffu;
        uint64_t number = -(uint64_t)(magnitude <= limit), kept = magnitude & number;
        nan += 1 + number;
        inf += magnitude == limit;
        zeros += magnitude == 0;
        largest = kept > largest ? kept : largest;
    }
    double max_abs = as_double(largest);
    if (max_abs > stats->max_abs) stats->max_abs = max_abs;
    stats->nan += (int64_t)nan, stats->inf += (int64_t)inf, stats->zeros += (int64_t)zeros;
}

#define ROW_LOOPS(BITS, REAL, FABS)                                                                                    \
    VECTOR static void row_squares##BITS(const REAL *row, double *lanes, int n)                                       \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) lanes[j] += (double)row[j] * (double)row[j];                                       \
    }                                                                                                                  \
    VECTOR static void row_absolutes##BITS(const REAL *row, double *lanes, int n)                                     \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) lanes[j] += (double)FABS(row[j]);                                                  \
    }                                                                                                                  \
    VECTOR static void row_scale##BITS(REAL *row, REAL factor, int n)                                                 \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) row[j] *= factor;                                                                  \
    }                                                                                                                  \
    VECTOR static void row_drop##BITS(REAL *row, int n)                                                                \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) row[j] = FABS(row[j]) < (REAL)INFINITY ? row[j] : 0;                               \
    }                                                                                                                  \
    VECTOR static void row_clamp##BITS(REAL *row, REAL limit, int n)                                                  \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) {                                                                                  \
            REAL low = row[j] < -limit ? -limit : row[j];                                                              \
            row[j] = low > limit ? limit : low;                                                                        \
        }                                                                                                              \
    }

ROW_LOOPS(32, float, fabsf)
ROW_LOOPS(64, double, fabs)

VECTOR static void row_divide64(double *row, double divisor, int n)
{
    for (int j = 0; j < n; j++) row[j] /= divisor;
}

/* ---- one tile --------------------------------------------------------------------------------------------------- */

/* `wide`, unless NULL, are the float64 values to write, those of one piece after another. */
struct job { enum term term; int writes, drops; double factor, limit; const double *wide; };

/* What is dropped is counted, and then is zero. */
#define ROW(BITS)                                                                                                      \
    do {                                                                                                               \
        if (job.drops) {                                                                                               \
            struct stats raw = {0, 0, 0, 0, -1};                                                                       \
            row_stats##BITS(row, n, &raw);                                                                             \
            row_drop##BITS(row, n);                                                                                    \
            stats->nan += raw.nan, stats->inf += raw.inf;                                                              \
        }                                                                                                              \
        row_stats##BITS(row, n, stats);                                                                                \
        if (job.term == SQUARE) row_squares##BITS(row, lanes, n);                                                      \
        if (job.term == ABSOLUTE) row_absolutes##BITS(row, lanes, n);                                                  \
    } while (0)

/* Multiplies a row, clamps it, stores it, and sets it to the values that were stored. */
static void scale_row(struct job job, enum dtype dtype, float *row, char *data, int n)
{
    float factor = (float)job.factor;
    int clamps = job.limit < INFINITY;
    if (job.drops) row_drop32(row, n);
    if (dtype != F32 && HAS_FMA) {
        struct format format = format_of(dtype);
        if (row_round(row, factor, format, n) < format.bound) {
            if (clamps) row_clamp32(row, (float)job.limit, n);
            put_row(dtype, row, data, n);
            return;
        }
        load_row(dtype, data, row, n);
        if (job.drops) row_drop32(row, n);
    }
    (dtype == F32 ? row_scale32 : row_scale_odd)(row, factor, n);
    if (clamps) row_clamp32(row, (float)job.limit, n);
    store_row(dtype, row, data, n);
}

static void row32(struct job job, enum dtype dtype, char *data, int n, double *lanes, struct stats *stats)
{
    ALIGNED float row[LANES];
    if (job.wide) {
        store_wide32(dtype, job.wide, row, data, n);
    } else {
        load_row(dtype, data, row, n);
    }
    if (job.writes) scale_row(job, dtype, row, data, n);
    ROW(32);
}

static void row64(struct job job, char *data, int n, double *lanes, struct stats *stats)
{
    ALIGNED double row[LANES];
    if (job.wide) {
        ALIGNED uint64_t codes[LANES];
        narrow_f64(job.wide, codes, n);
        memcpy(data, codes, 8 * (size_t)n);
    }
    memcpy(row, data, 8 * (size_t)n);
    if (job.writes) {
        ALIGNED uint64_t codes[LANES];
        if (job.drops) row_drop64(row, n);
        row_scale64(row, job.factor, n);
        if (job.limit < INFINITY) row_clamp64(row, job.limit, n);
        narrow_f64(row, codes, n);
        memcpy(data, codes, 8 * (size_t)n);
        memcpy(row, codes, 8 * (size_t)n);
    }
    ROW(64);
}

/* Lanes without an element are +0, and are left out of a short tile. */
static double fold(double *lanes, int64_t used)
{
    int width = LANES;
    while (width / 2 >= used && width > 1) width /= 2;
    for (; width > 1; width /= 2)
        for (int j = 0; j < width / 2; j++) lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
    return lanes[0];
}

static double tile(struct job job, enum dtype dtype, char *data, int64_t elements, struct stats *stats)
{
    ALIGNED double lanes[LANES];
    memset(lanes, 0, sizeof lanes);
    for (int64_t start = 0; start < elements; start += LANES) {
        int n = (int)(elements - start < LANES ? elements - start : LANES);
        char *row = data + start * ITEMSIZE[dtype];
        if (dtype == F64) row64(job, row, n, lanes, stats);
        else row32(job, dtype, row, n, lanes, stats);
        if (job.wide) job.wide += n;
    }
    return fold(lanes, elements);
}

/* The sum of the stored values of an F64 tile, divided first. */
static double divided_tile(struct job job, const char *data, int64_t elements, double divisor)
{
    ALIGNED double lanes[LANES], row[LANES];
    memset(lanes, 0, sizeof lanes);
    for (int64_t start = 0; start < elements; start += LANES) {
        int n = (int)(elements - start < LANES ? elements - start : LANES);
        memcpy(row, data + 8 * start, 8 * (size_t)n);
        if (job.drops) row_drop64(row, n);
        row_divide64(row, divisor, n);
        if (job.term == SQUARE) row_squares64(row, lanes, n);
        else row_absolutes64(row, lanes, n);
    }
    return fold(lanes, elements);
}

/* The sum and the exponent of a tile. Returns its other facts. */
static struct stats sum_tile(struct job job, enum dtype dtype, char *data, int64_t elements, double *sum,
                             int32_t *exponent)
{
    struct stats stats = {0, 0, 0, 0, -1};
    *sum = tile(job, dtype, data, elements, &stats);
    *exponent = 0;
    /* The magnitudes of all other types, and their squares, are in range. */
    if (dtype != F64 || job.term == MAXIMUM || is_in_range(*sum)) return stats;
    if (stats.max_abs > 0 && (job.drops || stats.nan + stats.inf == 0)) {
        *exponent = exponent_of(stats.max_abs);
        *sum = divided_tile(job, data, elements, power_of_two(*exponent));
    }
    return stats;
}

/* Slow, and called only if there is one. */
static int64_t first_nonfinite(enum dtype dtype, const char *data, int64_t elements)
{
    for (int64_t i = 0; i < elements; i++) {
        const char *at = data + i * ITEMSIZE[dtype];
        double value;
        if (dtype == F64) memcpy(&value, at, sizeof value);
        else { float wide; load_row(dtype, at, &wide, 1); value = wide; }
        if (!isfinite(value)) return i;
    }
    return -1;
}

static void run_pieces(struct job job, char *block, const int64_t *piece, Py_ssize_t k, const double *factors,
                       double *sum, int32_t *exponent, double *max_abs, int64_t *count)
{
    double limit = job.limit;
    for (Py_ssize_t i = 0; i < k; i++, piece += 3, count += 4) {
        enum dtype dtype = (enum dtype)piece[0];
        char *data = block + piece[1];
        int64_t elements = piece[2];
        struct stats stats = {0, 0, 0, 0, -1};
        if (job.writes) job.factor = factors[i], job.limit = round_to(dtype, limit);
        for (int64_t start = 0; start < elements; start += TILE) {
            int64_t size = elements - start < TILE ? elements - start : TILE;
            struct stats own = sum_tile(job, dtype, data + start * ITEMSIZE[dtype], size, sum++, exponent++);
            if (own.max_abs > stats.max_abs) stats.max_abs = own.max_abs;
            stats.nan += own.nan, stats.inf += own.inf, stats.zeros += own.zeros;
            if (job.wide) job.wide += size;
        }
        if (stats.nan + stats.inf) stats.first = first_nonfinite(dtype, data, elements);
        max_abs[i] = stats.max_abs;
        count[0] = stats.nan, count[1] = stats.inf, count[2] = stats.zeros, count[3] = stats.first;
    }
}

#endif
