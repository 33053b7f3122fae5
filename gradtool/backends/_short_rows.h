/* Sums of rows of which many fit a buffer, so that a loop runs over the values of many rows. */
#ifndef GRADTOOL_SHORT_ROWS_H
#define GRADTOOL_SHORT_ROWS_H

#include "_tiles.h"

/* Longer rows are summed row by row. */
enum { SHORT_ROW = CHUNK / 8 };

/* What repeat may write behind its last value. */
enum { OVERHANG = 8 };

/* Writes each value `times` times, a vector at a time, so that some copies are overwritten by the next value. */
static void repeat(const double *restrict values, int64_t count, int64_t times, double *restrict target)
{
    for (int64_t i = 0; i < count; i++, target += times)
        for (int64_t start = 0; start < times; start += OVERHANG)
            for (int64_t j = 0; j < OVERHANG; j++) target[start + j] = values[i];
}

static int are_zeros(const double *values, int64_t n)
{
    int has_nonzero = 0;
    for (int64_t i = 0; i < n; i++) has_nonzero |= values[i] != 0;
    return !has_nonzero;
}

/* What is summed of values: themselves, or their squares, about centers if there are any. Adding zero makes -0 the same as
 * 0, as in a lane that starts at 0. */
#define TERMS(NAME, IS_WIDE)                                                                                           \
    static void terms_of_##NAME(const char *restrict values, int squares, const double *restrict center,               \
                                double *restrict terms, int64_t n)                                                     \
    {                                                                                                                  \
        if (!squares) {                                                                                                \
            for (int64_t j = 0; j < n; j++) terms[j] = value_at(values, j, IS_WIDE) + 0.0;                             \
        } else if (!center) {                                                                                          \
            for (int64_t j = 0; j < n; j++) terms[j] = value_at(values, j, IS_WIDE) * value_at(values, j, IS_WIDE);    \
        } else {                                                                                                       \
            for (int64_t j = 0; j < n; j++) {                                                                          \
                double away = value_at(values, j, IS_WIDE) - center[j];                                                \
                terms[j] = away * away;                                                                                \
            }                                                                                                          \
        }                                                                                                              \
    }

TERMS(singles, 0)
TERMS(doubles, 1)

HELPER double fold2(const double *x) { return x[0] + x[1]; }
HELPER double fold4(const double *x) { return fold2(x) + fold2(x + 2); }
HELPER double fold8(const double *x) { return fold4(x) + fold4(x + 4); }
HELPER double fold16(const double *x) { return fold8(x) + fold8(x + 8); }

/* The sum of the first n lanes of a row, where all others are 0. What is folded with zeros alone stays as it is, so each
 * bit of n stands for a fold of as many lanes. */
HELPER double fold_lanes(const double *lanes, int64_t n)
{
    double sum = 0;
    if (n == ROW_LANES) return fold16(lanes) + fold16(lanes + 16);
    if (n & 1) sum = lanes[n -= 1];
    if (n & 2) sum = fold2(lanes + (n -= 2)) + sum;
    if (n & 4) sum = fold4(lanes + (n -= 4)) + sum;
    if (n & 8) sum = fold8(lanes + (n -= 8)) + sum;
    return n ? fold16(lanes) + sum : sum;
}

/* Adds up the terms of a row that has a term for each lane, or more. */
static void set_lanes(const double *restrict terms, int64_t columns, double *restrict lanes)
{
    memcpy(lanes, terms, 8 * ROW_LANES);
    int64_t at = ROW_LANES;
    for (; at + ROW_LANES <= columns; at += ROW_LANES)
        for (int64_t j = 0; j < ROW_LANES; j++) lanes[j] += terms[at + j];
    for (int64_t j = 0; at + j < columns; j++) lanes[j] += terms[at + j];
}

/* The sums of rows from their terms: lanes are folded many rows at a time, and few of them, which takes less, row by row. */
static void sum_terms_of_rows(const double *terms, int64_t rows, int64_t columns, double *sums)
{
    ALIGNED double lanes[CHUNK], room[CHUNK / 2], *from = lanes, *to = room;
    if (columns <= ROW_LANES) {
        for (int64_t row = 0; row < rows; row++) sums[row] = fold_lanes(terms + row * columns, columns);
        return;
    }
    for (int64_t row = 0; row < rows; row++) set_lanes(terms + row * columns, columns, lanes + row * ROW_LANES);
    for (int64_t left = rows * ROW_LANES; left > rows;) {
        double *folded = to;
        halve(from, to, (int)(left /= 2));
        to = from, from = folded;
    }
    memcpy(sums, from, 8 * (size_t)rows);
}

/* The sums of rows of SHORT_ROW columns at most, or of their squares about centers. */
static void sum_short_rows(enum dtype dtype, const char *data, int64_t rows, int64_t columns, const double *center,
                           double *sums)
{
    ALIGNED double room[CHUNK], terms[CHUNK], centers[CHUNK + OVERHANG];
    int64_t height = columns ? CHUNK / columns : CHUNK;
    for (int64_t row = 0; row < rows; row += height) {
        int64_t count = rows - row < height ? rows - row : height, n = count * columns;
        const char *values = load_values(dtype, data + row * columns * ITEMSIZE[dtype], dtype == F64, room, (int)n);
        int is_centered = center && !are_zeros(center + row, count);
        if (is_centered) repeat(center + row, count, columns, centers);
        (dtype == F64 ? terms_of_doubles : terms_of_singles)(values, !!center, is_centered ? centers : NULL, terms, n);
        sum_terms_of_rows(terms, count, columns, sums + row);
    }
}

#endif
