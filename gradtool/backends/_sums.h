/* Float64 sums of weighted values, addend after addend. */
#ifndef GRADTOOL_SUMS_H
#define GRADTOOL_SUMS_H

#include "_storage.h"

/* Weighted values of a row are added to sums, or set them. */
#define ADDITIONS(NAME, ASSIGN)                                                                                        \
    static void NAME##_f64(double *restrict sums, const char *restrict source, double weight, int n)                   \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) sums[j] ASSIGN weight * as_double(load64(source + 8 * j));                     \
    }                                                                                                                  \
    static void NAME##_f32(double *restrict sums, const char *restrict source, double weight, int n)                   \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) sums[j] ASSIGN weight * (double)as_float(load32(source + 4 * j));              \
    }                                                                                                                  \
    static void NAME##_bf16(double *restrict sums, const char *restrict source, double weight, int n)                  \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) sums[j] ASSIGN weight * (double)bf16_to_float(load16(source + 2 * j));         \
    }

ADDITIONS(add, +=)
ADDITIONS(set, =)

static void row_add(double *sums, enum dtype dtype, const char *source, double weight, int n, int fresh)
{
    ALIGNED float row[LANES];
    switch (dtype) {
    case F64: (fresh ? set_f64 : add_f64)(sums, source, weight, n); return;
    case F32: (fresh ? set_f32 : add_f32)(sums, source, weight, n); return;
    case BF16: (fresh ? set_bf16 : add_bf16)(sums, source, weight, n); return;
    default: load_row(dtype, source, row, n);
    }
    (fresh ? set_f32 : add_f32)(sums, (const char *)row, weight, n);
}

struct addend { int64_t dtype, offset, elements, at; };

/* Addends of the same sums are added together, row by row, so that the row of sums stays in the cache. */
static void add_all(double *sums, const char *source, const struct addend *addend, const double *weight, int64_t k,
                    int fresh)
{
    for (int64_t i = 0, same; i < k; i += same) {
        const struct addend *first = addend + i;
        for (same = 1; i + same < k; same++)
            if (first[same].at != first->at || first[same].elements != first->elements) break;
        for (int64_t start = 0; start < first->elements; start += LANES) {
            int n = (int)(first->elements - start < LANES ? first->elements - start : LANES);
            for (int64_t j = 0; j < same; j++) {
                enum dtype dtype = (enum dtype)first[j].dtype;
                const char *row = source + first[j].offset + start * ITEMSIZE[dtype];
                row_add(sums + first->at + start, dtype, row, weight[i + j], n, fresh);
            }
        }
    }
}

#endif
