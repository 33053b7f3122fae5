/* Rows of two blocks side by side: their values, terms, facts and codes. */
#ifndef GRADTOOL_DIFFERENCE_ROWS_H
#define GRADTOOL_DIFFERENCE_ROWS_H

#include "_storage.h"

/* So many lanes are done at a time, row after row, that their sums and the values of a row stay in the L1 cache. */
enum { PART = 256 };
enum { GAPS, SQUARES_A, SQUARES_B, PRODUCTS, SUMS };
enum { MAX_ABS, MAX_REL, MAX_ULPS, MAXIMA };
enum { DIFFERING, BITS_DIFFER, NOT_CLOSE, ONLY_A, ONLY_B, SAME_NONFINITE, COUNTS };

struct tolerance { double absolute, relative; };

/* A tile of a, and the tile of b that it is compared with. */
struct pair { enum dtype dtype[2]; const char *data[2]; int64_t elements; };

/* Where an element of a side is. */
static const char *at(struct pair pair, int side, int64_t number)
{
    return pair.data[side] + number * ITEMSIZE[pair.dtype[side]];
}

/* What is found in a tile. */
struct difference {
    double sums[SUMS], max_abs, max_rel;
    uint64_t ulps;
    int64_t places[MAXIMA], counts[COUNTS];
};

/* Values of a row, float64 if they are wide and else float32, at any address. */
struct row { const char *x, *y; int is_wide, n; int64_t start; };

/* The values of a row in float64. */
static void widen(struct row row, double *x, double *y)
{
    if (row.is_wide) {
        memcpy(x, row.x, 8 * (size_t)row.n);
        memcpy(y, row.y, 8 * (size_t)row.n);
    } else {
        widen_values(row.x, x, row.n);
        widen_values(row.y, y, row.n);
    }
}

/* Facts of a row: the bits of the largest |x - y|, counts, and whether a quotient may be above the bound. */
struct row_facts { uint64_t largest, differing, bits, far, above; };

/* Adds the terms of a row to the lanes, and looks at its differences. Without a tolerance, none is far. */
HELPER struct row_facts add_and_look(struct row row, double (*restrict lanes)[PART], struct tolerance tolerance,
                                     double bound, int is_wide, int has_tolerance)
{
    double *restrict gaps = lanes[GAPS], *restrict a = lanes[SQUARES_A];
    double *restrict b = lanes[SQUARES_B], *restrict products = lanes[PRODUCTS];
    uint64_t largest = 0, differing = 0, bits = 0, far = 0, above = 0;
    for (int64_t j = 0; j < row.n; j++) {
        double x = value_at(row.x, j, is_wide), y = value_at(row.y, j, is_wide);
        double gap = fabs(x - y), magnitude = fabs(y), least = magnitude * bound;
        uint64_t gap_bits = as_bits64(gap);
        gaps[j] += gap * gap;
        a[j] += x * x;
        b[j] += y * y;
        products[j] += x * y;
        largest = gap_bits > largest ? gap_bits : largest;
        differing += gap != 0;
        bits += as_bits64(x) != as_bits64(y);
        if (has_tolerance) far += gap > tolerance.absolute + tolerance.relative * magnitude;
        above |= (uint64_t)(gap > least);
        /* Near underflow, where values of 32 bits are not, the product may be too large. */
        if (is_wide) above |= (uint64_t)(least < 0x1p-1000) & (uint64_t)(gap != 0);
    }
    struct row_facts facts = {largest, differing, bits, far, above};
    return facts;
}

#define ROW_COMPARE(NAME, IS_WIDE, HAS_TOLERANCE)                                                                      \
    static struct row_facts row_##NAME(struct row row, double (*restrict lanes)[PART],                                 \
                                              struct tolerance tolerance, double bound)                                \
    {                                                                                                                  \
        return add_and_look(row, lanes, tolerance, bound, IS_WIDE, HAS_TOLERANCE);                                     \
    }

ROW_COMPARE(compare32, 0, 0)
ROW_COMPARE(compare64, 1, 0)
ROW_COMPARE(tolerate32, 0, 1)
ROW_COMPARE(tolerate64, 1, 1)

static struct row_facts compare_values(struct row row, double (*lanes)[PART], struct tolerance tolerance, double bound)
{
    int has_tolerance = tolerance.absolute > 0 || tolerance.relative > 0;
    if (has_tolerance) return (row.is_wide ? row_tolerate64 : row_tolerate32)(row, lanes, tolerance, bound);
    struct row_facts facts = (row.is_wide ? row_compare64 : row_compare32)(row, lanes, tolerance, bound);
    facts.far = facts.differing;
    return facts;
}

static void row_relative(const double *restrict x, const double *restrict y, double *restrict quotients, int n)
{
    for (int64_t j = 0; j < n; j++) {
        double gap = fabs(x[j] - y[j]);
        quotients[j] = gap == 0 ? 0 : gap / fabs(y[j]);
    }
}

/* The codes of values rounded to a type, with a sign. */
#define SIGNED_CODES(NAME, NARROW)                                                                                     \
    static void codes_##NAME(const double *restrict values, int32_t *restrict codes, int n)                            \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            int32_t code = (int32_t)(NARROW(fabs(values[j])));                                                         \
            codes[j] = values[j] < 0 ? -code : code;                                                                   \
        }                                                                                                              \
    }
#define NARROW_F32(VALUE) as_bits((float)(VALUE))
#define NARROW_F16(VALUE) float_to_f16(double_to_odd(VALUE))
#define NARROW_BF16(VALUE) float_to_bf16(double_to_odd(VALUE))
#define NARROW_F8_E4M3(VALUE) float_to_f8_e4m3(double_to_odd(VALUE))
#define NARROW_F8_E5M2(VALUE) float_to_f8_e5m2(double_to_odd(VALUE))

SIGNED_CODES(f32, NARROW_F32)
SIGNED_CODES(f16, NARROW_F16)
SIGNED_CODES(bf16, NARROW_BF16)
SIGNED_CODES(f8_e4m3, NARROW_F8_E4M3)
SIGNED_CODES(f8_e5m2, NARROW_F8_E5M2)

static void signed_codes(enum dtype dtype, const double *values, int32_t *codes, int n)
{
    switch (dtype) {
    case F32: codes_f32(values, codes, n); return;
    case F16: codes_f16(values, codes, n); return;
    case BF16: codes_bf16(values, codes, n); return;
    case F8_E4M3: codes_f8_e4m3(values, codes, n); return;
    default: codes_f8_e5m2(values, codes, n); return;
    }
}

/* The same of stored codes, which need no rounding. */
#define STORED_CODES(BITS, TYPE, SIGN)                                                                                 \
    static void stored_##BITS(const char *restrict data, int32_t *restrict codes, int n)                               \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            TYPE code = load##BITS(data + BITS / 8 * j);                                                               \
            int32_t magnitude = (int32_t)(code & (SIGN - 1));                                                          \
            codes[j] = code & SIGN ? -magnitude : magnitude;                                                           \
        }                                                                                                              \
    }

STORED_CODES(32, uint32_t, 0x80000000u)
STORED_CODES(16, uint16_t, 0x8000u)
STORED_CODES(8, uint8_t, 0x80u)

static void stored_codes(enum dtype dtype, const char *data, int32_t *codes, int n)
{
    switch (ITEMSIZE[dtype]) {
    case 4: stored_32(data, codes, n); return;
    case 2: stored_16(data, codes, n); return;
    default: stored_8(data, codes, n); return;
    }
}

static uint32_t row_distances32(const int32_t *restrict a, const int32_t *restrict b,
                                       uint32_t *restrict distances, int n)
{
    uint32_t largest = 0;
    for (int64_t j = 0; j < n; j++) {
        uint32_t x = (uint32_t)a[j], y = (uint32_t)b[j], distance = a[j] > b[j] ? x - y : y - x;
        distances[j] = distance;
        largest = distance > largest ? distance : largest;
    }
    return largest;
}

static uint64_t row_distances64(const double *restrict x, const double *restrict y,
                                       uint64_t *restrict distances, int n)
{
    uint64_t largest = 0;
    for (int64_t j = 0; j < n; j++) {
        uint64_t a = as_bits64(fabs(x[j])), b = as_bits64(fabs(y[j]));
        uint64_t apart = a > b ? a - b : b - a, distance = (x[j] < 0) == (y[j] < 0) ? apart : a + b;
        distances[j] = distance;
        largest = distance > largest ? distance : largest;
    }
    return largest;
}

#endif
