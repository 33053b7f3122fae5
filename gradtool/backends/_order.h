/* Means of the middle values of columns, which a sorting network (sorting_network in cpu.py) puts in order.
 *
 * A row has the values of an addend, for some columns. The network exchanges whole rows, as minima and maxima, so that the
 * compiler can vectorize it. */
#ifndef GRADTOOL_ORDER_H
#define GRADTOOL_ORDER_H

#include "_sums.h"

/* Columns that are sorted at once. Fewer waste vectors; a network of hundreds of rows still fits the cache. */
enum { COLUMNS = 128 };

/* Of `count` values the `dropped` smallest and largest are left out. A magnitude above the limit makes its column NaN.
 * A network is `pairs` pairs of rows. The scratch has room for `count` rows of doubles. */
struct trim {
    int64_t count, dropped;
    int finite;
    const int32_t *pair;
    int64_t pairs;
    double *scratch;
};

#define TRIMMED(NAME, TYPE, LARGEST)                                                                                   \
    /* Adding zero makes -0 the same as 0. */                                                                          \
    static void check_##NAME(TYPE *restrict row, TYPE *restrict poison, int finite, int n)                             \
    {                                                                                                                  \
        TYPE limit = finite ? LARGEST : (TYPE)INFINITY;                                                                \
        for (int j = 0; j < n; j++) {                                                                                  \
            TYPE value = row[j] + (TYPE)0, size = value < 0 ? -value : value;                                          \
            row[j] = value;                                                                                            \
            poison[j] = size <= limit ? poison[j] : (TYPE)NAN;                                                         \
        }                                                                                                              \
    }                                                                                                                  \
    static void exchange_##NAME(TYPE *restrict low, TYPE *restrict high)                                               \
    {                                                                                                                  \
        for (int j = 0; j < COLUMNS; j++) {                                                                            \
            TYPE a = low[j], b = high[j];                                                                              \
            low[j] = a < b ? a : b;                                                                                    \
            high[j] = a < b ? b : a;                                                                                   \
        }                                                                                                              \
    }                                                                                                                  \
    static void finish_##NAME(const TYPE *rows, const TYPE *poison, const struct trim *trim, double *restrict values,  \
                              int n)                                                                                   \
    {                                                                                                                  \
        double left = (double)(trim->count - 2 * trim->dropped);                                                       \
        const TYPE *row = rows + trim->dropped * COLUMNS;                                                              \
        for (int j = 0; j < n; j++) values[j] = (double)row[j];                                                        \
        for (int64_t i = trim->dropped + 1; i < trim->count - trim->dropped; i++) {                                    \
            row += COLUMNS;                                                                                            \
            for (int j = 0; j < n; j++) values[j] += (double)row[j];                                                   \
        }                                                                                                              \
        for (int j = 0; j < n; j++) values[j] = values[j] / left + (double)poison[j];                                  \
    }                                                                                                                  \
    static void sort_##NAME(TYPE *rows, const TYPE *poison, const struct trim *trim, double *values, int n)            \
    {                                                                                                                  \
        for (int64_t k = 0; k < trim->pairs; k++)                                                                      \
            exchange_##NAME(rows + trim->pair[2 * k] * COLUMNS, rows + trim->pair[2 * k + 1] * COLUMNS);               \
        finish_##NAME(rows, poison, trim, values, n);                                                                  \
    }

TRIMMED(single, float, FLT_MAX)
TRIMMED(wide, double, DBL_MAX)

static const char *at_column(const char *source, const struct addend *addend, int64_t start)
{
    return source + addend->offset + start * ITEMSIZE[addend->dtype];
}

/* Columns whose values are float32 and have no weight. */
static void trim_single(const struct trim *trim, const char *source, const struct addend *addend, int64_t start,
                        double *values, int n)
{
    ALIGNED float poison[COLUMNS] = {0};
    float *rows = (float *)trim->scratch;
    for (int64_t i = 0; i < trim->count; i++) {
        float *row = rows + i * COLUMNS;
        load_row((enum dtype)addend[i].dtype, at_column(source, addend + i, start), row, n);
        /* What lies behind the last column is sorted too, but never read. */
        memset(row + n, 0, sizeof *row * (size_t)(COLUMNS - n));
        check_single(row, poison, trim->finite, n);
    }
    sort_single(rows, poison, trim, values, n);
}

/* Columns of float64 values, weighted. */
static void trim_wide(const struct trim *trim, const char *source, const struct addend *addend, const double *weight,
                      int64_t start, double *values, int n)
{
    ALIGNED double poison[COLUMNS] = {0};
    for (int64_t i = 0; i < trim->count; i++) {
        double *row = trim->scratch + i * COLUMNS;
        memset(row, 0, sizeof *row * (size_t)COLUMNS);
        row_add(row, (enum dtype)addend[i].dtype, at_column(source, addend + i, start), weight[i], n, 1);
        check_wide(row, poison, trim->finite, n);
    }
    sort_wide(trim->scratch, poison, trim, values, n);
}

/* Sets values to the trimmed means of `groups` groups of `count` addends, each of adjacent columns. */
static void trim_all(const struct trim *trim, double *values, const char *source, const struct addend *addend,
                     const double *weight, int64_t groups)
{
    for (int64_t g = 0; g < groups; g++, addend += trim->count, weight += trim->count) {
        int is_single = 1;
        for (int64_t i = 0; i < trim->count; i++) is_single &= addend[i].dtype != F64 && weight[i] == 1;
        for (int64_t start = 0; start < addend->elements; start += COLUMNS) {
            int64_t left = addend->elements - start;
            int n = (int)(left < COLUMNS ? left : COLUMNS);
            double *to = values + addend->at + start;
            if (is_single) trim_single(trim, source, addend, start, to, n);
            else trim_wide(trim, source, addend, weight, start, to, n);
        }
    }
}

#endif
