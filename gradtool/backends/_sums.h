/* Float64 sums of weighted values, addend after addend. */
#ifndef GRADTOOL_SUMS_H
#define GRADTOOL_SUMS_H

#include "_storage.h"

VECTOR static void row_add32(double *restrict sums, const float *restrict row, double weight, int n)
{
    for (int j = 0; j < n; j++) sums[j] += weight * (double)row[j];
}

VECTOR static void row_add64(double *restrict sums, const double *restrict row, double weight, int n)
{
    for (int j = 0; j < n; j++) sums[j] += weight * row[j];
}

VECTOR static void row_put32(double *restrict sums, const float *restrict row, double weight, int n)
{
    for (int j = 0; j < n; j++) sums[j] = weight * (double)row[j];
}

VECTOR static void row_put64(double *restrict sums, const double *restrict row, double weight, int n)
{
    for (int j = 0; j < n; j++) sums[j] = weight * row[j];
}

static void row_add(double *sums, enum dtype dtype, const char *source, double weight, int n, int fresh)
{
    double room[LANES];
    if (dtype == F64) {
        const double *row = aligned(source, room, 8, n);
        (fresh ? row_put64 : row_add64)(sums, row, weight, n);
    } else {
        const float *row = (const float *)room;
        if (dtype == F32) row = aligned(source, room, 4, n);
        else load_row(dtype, source, (float *)room, n);
        (fresh ? row_put32 : row_add32)(sums, row, weight, n);
    }
}

struct addend { int64_t dtype, offset, elements, at; };

/* Addends of the same sums are added together, row by row, so that the row of sums stays in the cache. */
static void add_all(double *sums, const char *source, const struct addend *addend, const double *weight, Py_ssize_t k,
                    int fresh)
{
    for (Py_ssize_t i = 0, same; i < k; i += same) {
        const struct addend *first = addend + i;
        for (same = 1; i + same < k; same++)
            if (first[same].at != first->at || first[same].elements != first->elements) break;
        for (int64_t start = 0; start < first->elements; start += LANES) {
            int n = (int)(first->elements - start < LANES ? first->elements - start : LANES);
            for (Py_ssize_t one = 0; one < same; one++) {
                enum dtype dtype = (enum dtype)first[one].dtype;
                const char *row = source + first[one].offset + start * ITEMSIZE[dtype];
                row_add(sums + first->at + start, dtype, row, weight[i + one], n, fresh);
            }
        }
    }
}

#endif
