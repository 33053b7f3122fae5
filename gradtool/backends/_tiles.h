/* Canonical tile sums, of what is in a block or is written there first. */
#ifndef GRADTOOL_TILES_H
#define GRADTOOL_TILES_H

#include "_histogram.h"
#include "_losses.h"
#include "_source.h"
#include "_terms.h"

/* ---- a tile ----------------------------------------------------------------------------------------------------- */

static int row_of(int64_t elements, int64_t start)
{
    return (int)(elements - start < LANES ? elements - start : LANES);
}

static void write_row(struct job job, enum dtype dtype, const double *wide, char *data, int n)
{
    if (wide) store_counted(dtype, wide, data, n, job.losses);
    if (job.writes) scale_counted(job, dtype, data, n, job.losses);
}

/* The sum of a tile, two rows at a time. */
static double tile(struct job job, enum dtype dtype, char *data, int64_t elements, struct seen *seen)
{
    ALIGNED double lanes[LANES] = {0};
    for (int64_t start = 0; start < elements;) {
        char *rows = data + start * ITEMSIZE[dtype];
        int n = elements - start < 2 * LANES ? row_of(elements, start) : 2 * LANES;
        for (int at = 0; at < n; at += LANES) {
            const double *wide = job.wide ? job.wide + start + at : NULL;
            write_row(job, dtype, wide, rows + at * ITEMSIZE[dtype], row_of(n, at));
        }
        sum_terms(job.term, dtype, rows, lanes, seen, n);
        start += n;
    }
    return fold_terms(job.term, dtype, lanes);
}

/* The sum of the stored values of a tile, divided first. */
static double divided_tile(struct job job, enum dtype dtype, const char *data, int64_t elements, double divisor)
{
    ALIGNED double lanes[LANES] = {0}, row[LANES];
    struct seen seen = {0, 0};
    for (int64_t start = 0; start < elements; start += LANES) {
        int n = row_of(elements, start);
        load_doubles(job, dtype, data + start * ITEMSIZE[dtype], row, n);
        for (int64_t j = 0; j < n; j++) row[j] /= divisor;
        sum_terms(job.term, F64, (const char *)row, lanes, &seen, n);
    }
    return fold(lanes, LANES);
}

/* As Statistics of values.py. Losses are counted where `job.losses` says. */
struct statistics { double max_abs; int64_t nan, inf, zeros, first, losses[2]; };

/* Counts what is not finite in a tile, and finds the largest magnitude of all that is. */
static void count(struct job job, enum dtype dtype, const char *data, int64_t elements, struct statistics *statistics)
{
    struct job keeps = {.drops = 0};
    double row[LANES], largest = 0;
    for (int64_t start = 0; start < elements; start += LANES) {
        int n = row_of(elements, start);
        load_doubles(keeps, dtype, data + start * ITEMSIZE[dtype], row, n);
        for (int64_t j = 0; j < n; j++) {
            double magnitude = fabs(row[j]);
            statistics->nan += row[j] != row[j];
            statistics->inf += magnitude == INFINITY;
            if (magnitude > largest && (magnitude < INFINITY || !job.drops)) largest = magnitude;
        }
    }
    statistics->max_abs = largest;
    /* What is dropped is counted, and then is zero. */
    if (job.drops) statistics->zeros += statistics->nan + statistics->inf;
}

/* The sum and the exponent of a tile. Returns its statistics. */
static struct statistics sum_tile(struct job job, enum dtype dtype, char *data, int64_t elements, double *sum,
                             int32_t *exponent)
{
    struct seen seen = {0, 0};
    *sum = tile(job, dtype, data, elements, &seen);
    *exponent = 0;
    struct statistics statistics = {.max_abs = largest_seen(dtype, seen), .zeros = seen.zeros, .first = -1};
    if (!isfinite(statistics.max_abs)) {
        count(job, dtype, data, elements, &statistics);
        if (job.drops) *sum = divided_tile(job, dtype, data, elements, 1);
    }
    if (job.term == MAXIMUM) *sum = 0;
    /* The magnitudes of all other types, and their squares, are in range. */
    if (dtype != F64 || job.term == MAXIMUM || is_in_range(*sum)) return statistics;
    if (statistics.max_abs > 0 && (job.drops || statistics.nan + statistics.inf == 0)) {
        *exponent = exponent_of(statistics.max_abs);
        *sum = divided_tile(job, dtype, data, elements, power_of_two(*exponent));
    }
    return statistics;
}

/* Slow, and called only if a value is not finite. */
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

/* Stops where the source does. If there are bins, counts each tile in them while it is in the cache. */
static void run_pieces(struct job job, struct source *source, const int64_t *piece, int64_t k, const double *factors,
                       double *sum, int32_t *exponent, struct statistics *statistics, struct histogram to)
{
    double limit = job.limit;
    for (int64_t i = 0; i < k; i++, piece += 3, statistics++) {
        enum dtype dtype = (enum dtype)piece[0];
        int64_t elements = piece[2], itemsize = ITEMSIZE[dtype];
        statistics->first = -1;
        if (job.writes) job.factor = factors[i], job.limit = round_to(dtype, limit);
        job.losses = statistics->losses;
        for (int64_t start = 0; start < elements; start += TILE) {
            int64_t size = elements - start < TILE ? elements - start : TILE;
            char *data = bytes_of(source, piece[1] + start * itemsize, size * itemsize);
            if (!data) return;
            struct statistics tile = sum_tile(job, dtype, data, size, sum++, exponent++);
            if (tile.max_abs > statistics->max_abs) statistics->max_abs = tile.max_abs;
            statistics->nan += tile.nan, statistics->inf += tile.inf, statistics->zeros += tile.zeros;
            if (statistics->first < 0 && tile.nan + tile.inf) statistics->first = start + first_nonfinite(dtype, data, size);
            if (job.wide) job.wide += size;
            if (to.bin) count_tile(dtype, data, size, to.bin, to.largest + i);
        }
        if (to.bin) to.bin += bins_of(dtype);
    }
}

#endif
