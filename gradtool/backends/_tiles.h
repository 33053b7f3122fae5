/* Canonical tile sums, of what is in a block or is written there first. */
#ifndef GRADTOOL_TILES_H
#define GRADTOOL_TILES_H

#include "_lanes.h"
#include "_source.h"

/* ---- one row ---------------------------------------------------------------------------------------------------- */

/* The bits of the largest magnitude, in which infinity is above all numbers and NaN above infinity; and the zeros. */
struct seen { uint64_t largest; int64_t zeros; };

static const uint64_t INFINITY32 = 0x7f800000u, INFINITY64 = 0x7ff0000000000000u;

HELPER void see(struct seen *seen, uint64_t largest, int64_t zeros)
{
    if (largest > seen->largest) seen->largest = largest;
    seen->zeros += zeros;
}

/* The square of a float is exact in float64, so to round it in between, or not, gives the same bits. */
HELPER double add_square(double sum, double x) { return HAS_FMA ? fma(x, x, sum) : sum + x * x; }
HELPER double add_square64(double sum, double x) { return sum + x * x; }
HELPER double add_absolute(double sum, double x) { return sum + fabs(x); }

/* Each loop adds a term of every value to its lane, and looks at the value. That of BF16 takes two values at a time, as
 * the halves of a word; its lanes of even numbers come before all of odd ones. */
#define ROW_SUMS(TERM, ADD, ADD64)                                                                                     \
    static void sum_##TERM##64(const char *restrict source, double *restrict lanes, struct seen *seen, int n)          \
    {                                                                                                                  \
        int64_t largest = 0, zeros = 0;                                                                                \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            int64_t magnitude = (int64_t)(load64(source + 8 * j) & 0x7fffffffffffffffu);                               \
            double x = as_double(load64(source + 8 * j));                                                              \
            largest = magnitude > largest ? magnitude : largest;                                                       \
            zeros += magnitude == 0;                                                                                   \
            lanes[j] = ADD64(lanes[j], x);                                                                             \
        }                                                                                                              \
        see(seen, (uint64_t)largest, zeros);                                                                           \
    }                                                                                                                  \
    static void sum_##TERM##32(const char *restrict source, double *restrict lanes, struct seen *seen, int n)          \
    {                                                                                                                  \
        uint32_t largest = 0, zeros = 0;                                                                               \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            uint32_t code = load32(source + 4 * j), magnitude = code & 0x7fffffffu;                                    \
            double x = (double)as_float(code);                                                                         \
            largest = magnitude > largest ? magnitude : largest;                                                       \
            zeros += magnitude == 0;                                                                                   \
            lanes[j] = ADD(lanes[j], x);                                                                               \
        }                                                                                                              \
        see(seen, largest, zeros);                                                                                     \
    }                                                                                                                  \
    static void sum_##TERM##16(const char *restrict source, double *restrict lanes, struct seen *seen, int words)      \
    {                                                                                                                  \
        double *restrict odd = lanes + LANES / 2;                                                                      \
        uint32_t largest = 0, zeros = 0;                                                                               \
        for (int64_t j = 0; j < words; j++) {                                                                          \
            uint32_t word = load32(source + 4 * j), lower = word << 16, upper = word & 0xffff0000u;                    \
            uint32_t first = lower & 0x7fffffffu, second = upper & 0x7fffffffu;                                        \
            double x = (double)as_float(lower);                                                                        \
            lanes[j] = ADD(lanes[j], x);                                                                               \
            x = (double)as_float(upper);                                                                               \
            odd[j] = ADD(odd[j], x);                                                                                   \
            largest = first > largest ? first : largest;                                                               \
            largest = second > largest ? second : largest;                                                             \
            zeros += (first == 0) + (second == 0);                                                                     \
        }                                                                                                              \
        see(seen, largest, zeros);                                                                                     \
    }

ROW_SUMS(squares, add_square, add_square64)
ROW_SUMS(absolutes, add_absolute, add_absolute)

/* A row of BF16 as words; if its number is odd, in a room where a zero makes the last one whole. */
static const char *whole_words(const char *source, char *room, int n)
{
    if (n % 2 == 0) return source;
    memcpy(room, source, 2 * (size_t)n);
    store16(room + 2 * n, 0);
    return room;
}

static void sum_bf16(enum term term, const char *source, double *lanes, struct seen *seen, int n)
{
    char room[2 * LANES];
    (term == SQUARE ? sum_squares16 : sum_absolutes16)(whole_words(source, room, n), lanes, seen, n / 2 + n % 2);
    seen->zeros -= n % 2;
}

/* Adds the terms of a row to its lanes. */
static void sum_row(enum term term, enum dtype dtype, const char *source, double *lanes, struct seen *seen, int n)
{
    ALIGNED float row[LANES];
    if (dtype == BF16) { sum_bf16(term, source, lanes, seen, n); return; }
    if (dtype == F64) { (term == SQUARE ? sum_squares64 : sum_absolutes64)(source, lanes, seen, n); return; }
    if (dtype != F32) load_row(dtype, source, row, n), source = (const char *)row;
    (term == SQUARE ? sum_squares32 : sum_absolutes32)(source, lanes, seen, n);
}

#define ROW_LOOPS(BITS, REAL, FABS)                                                                                    \
    static void row_scale##BITS(REAL *row, REAL factor, int n)                                                         \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) row[j] *= factor;                                                              \
    }                                                                                                                  \
    static void row_drop##BITS(REAL *row, int n)                                                                       \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) row[j] = FABS(row[j]) < (REAL)INFINITY ? row[j] : 0;                           \
    }                                                                                                                  \
    static void row_clamp##BITS(REAL *row, REAL limit, int n)                                                          \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            REAL low = row[j] < -limit ? -limit : row[j];                                                              \
            row[j] = low > limit ? limit : low;                                                                        \
        }                                                                                                              \
    }

ROW_LOOPS(32, float, fabsf)
ROW_LOOPS(64, double, fabs)

static void row_divide64(double *row, double divisor, int n)
{
    for (int64_t j = 0; j < n; j++) row[j] /= divisor;
}

/* `wide`, unless NULL, are the float64 values to write, those of one piece after another. */
struct job { enum term term; int writes, drops; double factor, limit; const double *wide; };

static void scale_row64(struct job job, char *data, int n)
{
    ALIGNED double row[LANES];
    memcpy(row, data, 8 * (size_t)n);
    if (job.drops) row_drop64(row, n);
    row_scale64(row, job.factor, n);
    if (job.limit < INFINITY) row_clamp64(row, job.limit, n);
    narrow_f64(row, data, n);
}

/* The code of a product, rounded once, in the upper half of a word. */
HELPER uint32_t scale_half(uint32_t half, float factor, uint32_t limit, struct format format, uint32_t *largest)
{
    uint32_t magnitude = round_product(as_float(half), factor, format);
    *largest = magnitude > *largest ? magnitude : *largest;
    return (magnitude < limit ? magnitude : limit) | sign_of(as_float(half) * factor);
}

/* Multiplies and clamps words of two BF16 values. Returns the largest magnitude of a product, as row_round does. */
static uint32_t scale_words(const char *restrict source, char *restrict target, float factor, uint32_t limit, int words)
{
    struct format format = format_of(BF16);
    uint32_t largest = 0;
    for (int64_t j = 0; j < words; j++) {
        uint32_t word = load32(source + 4 * j);
        uint32_t lower = scale_half(word << 16, factor, limit, format, &largest);
        uint32_t upper = scale_half(word & 0xffff0000u, factor, limit, format, &largest);
        store32(target + 4 * j, lower >> 16 | upper);
    }
    return largest;
}

/* Scales a row of BF16; whether it could. */
static int scale_bf16(struct job job, char *data, int n)
{
    ALIGNED char room[2 * LANES], scaled[2 * LANES];
    const char *source = whole_words(data, room, n);
    uint32_t limit = as_bits((float)job.limit);
    if (!HAS_FMA || job.drops) return 0;
    if (scale_words(source, scaled, (float)job.factor, limit, n / 2 + n % 2) >= format_of(BF16).bound) return 0;
    memcpy(data, scaled, 2 * (size_t)n);
    return 1;
}

/* Multiplies a row, clamps it, and stores it; each value is rounded once. */
static void scale_row32(struct job job, enum dtype dtype, char *data, int n)
{
    ALIGNED float row[LANES];
    float factor = (float)job.factor;
    struct format format = format_of(dtype);
    if (dtype == BF16 && scale_bf16(job, data, n)) return;
    load_row(dtype, data, row, n);
    if (job.drops) row_drop32(row, n);
    if (dtype == F32) {
        row_scale32(row, factor, n);
    } else if (!HAS_FMA || row_round(row, factor, format, n) >= format.bound) {
        load_row(dtype, data, row, n);
        if (job.drops) row_drop32(row, n);
        row_scale_odd(row, factor, n);
    }
    if (job.limit < INFINITY) row_clamp32(row, (float)job.limit, n);
    store_row(dtype, row, data, n);
}

/* ---- one tile --------------------------------------------------------------------------------------------------- */

static int row_of(int64_t elements, int64_t start)
{
    return (int)(elements - start < LANES ? elements - start : LANES);
}

static double tile(struct job job, enum dtype dtype, char *data, int64_t elements, struct seen *seen)
{
    ALIGNED double lanes[LANES] = {0};
    for (int64_t start = 0; start < elements; start += LANES) {
        int n = row_of(elements, start);
        char *row = data + start * ITEMSIZE[dtype];
        if (job.wide) store_wide(dtype, job.wide + start, row, n);
        if (job.writes && dtype == F64) scale_row64(job, row, n);
        if (job.writes && dtype != F64) scale_row32(job, dtype, row, n);
        sum_row(job.term, dtype, row, lanes, seen, n);
    }
    return dtype == BF16 ? fold_halves(lanes, LANES) : fold(lanes, LANES);
}

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
    if (job.drops) row_drop64(values, n);
}

/* The sum of the stored values of a tile, divided first. */
static double divided_tile(struct job job, enum dtype dtype, const char *data, int64_t elements, double divisor)
{
    ALIGNED double lanes[LANES] = {0}, row[LANES];
    struct seen seen = {0, 0};
    for (int64_t start = 0; start < elements; start += LANES) {
        int n = row_of(elements, start);
        load_doubles(job, dtype, data + start * ITEMSIZE[dtype], row, n);
        row_divide64(row, divisor, n);
        sum_row(job.term, F64, (const char *)row, lanes, &seen, n);
    }
    return fold(lanes, LANES);
}

struct stats { double max_abs; int64_t nan, inf, zeros, first; };

/* Counts what is not finite in a tile, and finds the largest magnitude of the rest. */
static void count(struct job job, enum dtype dtype, const char *data, int64_t elements, struct stats *stats)
{
    struct job keeps = {.drops = 0};
    double row[LANES], largest = 0;
    for (int64_t start = 0; start < elements; start += LANES) {
        int n = row_of(elements, start);
        load_doubles(keeps, dtype, data + start * ITEMSIZE[dtype], row, n);
        for (int64_t j = 0; j < n; j++) {
            double magnitude = fabs(row[j]);
            stats->nan += row[j] != row[j];
            stats->inf += magnitude == INFINITY;
            if (magnitude > largest && (magnitude < INFINITY || !job.drops)) largest = magnitude;
        }
    }
    stats->max_abs = largest;
    /* What is dropped is counted, and then is zero. */
    if (job.drops) stats->zeros += stats->nan + stats->inf;
}

/* The sum and the exponent of a tile. Returns its other facts. */
static struct stats sum_tile(struct job job, enum dtype dtype, char *data, int64_t elements, double *sum,
                             int32_t *exponent)
{
    struct seen seen = {0, 0};
    *sum = tile(job, dtype, data, elements, &seen);
    *exponent = 0;
    double max_abs = dtype == F64 ? as_double(seen.largest) : as_float((uint32_t)seen.largest);
    struct stats stats = {max_abs, 0, 0, seen.zeros, -1};
    if (seen.largest >= (dtype == F64 ? INFINITY64 : INFINITY32)) {
        count(job, dtype, data, elements, &stats);
        if (job.drops) *sum = divided_tile(job, dtype, data, elements, 1);
    }
    if (job.term == MAXIMUM) *sum = 0;
    /* The magnitudes of all other types, and their squares, are in range. */
    if (dtype != F64 || job.term == MAXIMUM || is_in_range(*sum)) return stats;
    if (stats.max_abs > 0 && (job.drops || stats.nan + stats.inf == 0)) {
        *exponent = exponent_of(stats.max_abs);
        *sum = divided_tile(job, dtype, data, elements, power_of_two(*exponent));
    }
    return stats;
}

/* Slow, and called only if there is one. */
static int64_t first_nonfinite(enum dtype dtype, const char *data, int64_t elements)
{
    for (int64_t i = 0; i < elements; i++) {
        struct job keeps = {.drops = 0};
        double value;
        load_doubles(keeps, dtype, data + i * ITEMSIZE[dtype], &value, 1);
        if (!isfinite(value)) return i;
    }
    return -1;
}

/* Stops where the source does. */
static void run_pieces(struct job job, struct source *source, const int64_t *piece, int64_t k, const double *factors,
                       double *sum, int32_t *exponent, double *max_abs, int64_t *count)
{
    double limit = job.limit;
    for (int64_t i = 0; i < k; i++, piece += 3, count += 4) {
        enum dtype dtype = (enum dtype)piece[0];
        int64_t elements = piece[2], itemsize = ITEMSIZE[dtype];
        struct stats stats = {0, 0, 0, 0, -1};
        if (job.writes) job.factor = factors[i], job.limit = round_to(dtype, limit);
        for (int64_t start = 0; start < elements; start += TILE) {
            int64_t size = elements - start < TILE ? elements - start : TILE;
            char *data = bytes_of(source, piece[1] + start * itemsize, size * itemsize);
            if (!data) return;
            struct stats own = sum_tile(job, dtype, data, size, sum++, exponent++);
            if (own.max_abs > stats.max_abs) stats.max_abs = own.max_abs;
            stats.nan += own.nan, stats.inf += own.inf, stats.zeros += own.zeros;
            if (stats.first < 0 && own.nan + own.inf) stats.first = start + first_nonfinite(dtype, data, size);
            if (job.wide) job.wide += size;
        }
        max_abs[i] = stats.max_abs;
        count[0] = stats.nan, count[1] = stats.inf, count[2] = stats.zeros, count[3] = stats.first;
    }
}

#endif
