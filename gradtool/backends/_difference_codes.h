/* Rows of two tiles side by side, as codes: how far they are apart, and how many differ. */
#ifndef GRADTOOL_DIFFERENCE_CODES_H
#define GRADTOOL_DIFFERENCE_CODES_H

#include "_storage.h"

/* A row of stored codes of each side, which begins with element number `start` of their tiles. */
struct row { enum dtype dtype[2]; const char *data[2]; int n; int64_t start; };

/* Of a row: the longest distance, and how many values and how many stored codes differ. */
struct code_summary { uint64_t longest; int64_t differing, bits; };

/* How many codes lie between two of the same sign, or on both sides of zero; -0 is 0. Counts of a row fit 16 bits; bytes are
 * widened for that. */
#define COMPARE_CODES(NAME, BITS, STORED)                                                                              \
    HELPER uint##BITS##_t distance_##NAME(const char *a, const char *b, int64_t j)                                     \
    {                                                                                                                  \
        uint##STORED##_t x = load##STORED(a + STORED / 8 * j), y = load##STORED(b + STORED / 8 * j);                   \
        const uint##STORED##_t magnitude = (uint##STORED##_t)((uint##STORED##_t)-1 >> 1);                              \
        int##BITS##_t p = x & magnitude, q = y & magnitude, gap = (int##BITS##_t)(p - q);                              \
        uint##BITS##_t sum = (uint##BITS##_t)((uint##BITS##_t)p + (uint##BITS##_t)q);                                  \
        gap = (int##BITS##_t)(gap < 0 ? -gap : gap);                                                                   \
        return (int##STORED##_t)(x ^ y) < 0 ? sum : (uint##BITS##_t)gap;                                               \
    }                                                                                                                  \
    static struct code_summary compare_##NAME(const char *a, const char *b, int n)                                       \
    {                                                                                                                  \
        uint##BITS##_t longest = 0, differing = 0, bits = 0;                                                           \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            uint##BITS##_t distance = distance_##NAME(a, b, j);                                                        \
            longest = distance > longest ? distance : longest;                                                         \
            differing += distance != 0;                                                                                \
            bits += load##STORED(a + STORED / 8 * j) != load##STORED(b + STORED / 8 * j);                              \
        }                                                                                                              \
        return (struct code_summary){longest, (int64_t)differing, (int64_t)bits};                                        \
    }                                                                                                                  \
    static int64_t first_##NAME(const char *a, const char *b, int n, uint64_t distance)                                \
    {                                                                                                                  \
        int64_t j = 0, size = STORED / 8;                                                                              \
        while (j + SIDE_BY_SIDE < n && compare_##NAME(a + size * j, b + size * j, SIDE_BY_SIDE).longest < distance)    \
            j += SIDE_BY_SIDE;                                                                                         \
        while (j < n - 1 && distance_##NAME(a, b, j) != distance) j++;                                                 \
        return j;                                                                                                      \
    }

COMPARE_CODES(codes64, 64, 64)
COMPARE_CODES(codes32, 32, 32)
COMPARE_CODES(codes16, 16, 16)
COMPARE_CODES(codes8, 16, 8)

/* Codes in 32 bits of values that are rounded to a type. */
#define ROUND_CODES(NAME, CODE)                                                                                        \
    static void round_##NAME(const double *restrict values, uint32_t *restrict codes, int n)                           \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            double magnitude = fabs(values[j]);                                                                        \
            codes[j] = (uint32_t)(CODE) | (values[j] < 0 ? 0x80000000u : 0);                                           \
        }                                                                                                              \
    }
#define ROUND_SMALL(DTYPE, NAME, ...) ROUND_CODES(NAME, float_to_##NAME(double_to_odd(magnitude)))

ROUND_CODES(f32, as_bits((float)magnitude))
SMALL_TYPES(ROUND_SMALL)

static void round_codes(enum dtype dtype, const double *values, uint32_t *codes, int n)
{
    switch (dtype) {
#define ROUND_ROW(DTYPE, NAME, ...) case DTYPE: round_##NAME(values, codes, n); return;
    SMALL_TYPES(ROUND_ROW)
    default: round_f32(values, codes, n); return;
    }
}

/* The values of a side in float64. */
static void widen(struct row row, int side, double *values)
{
    const char *loaded = load_values(row.dtype[side], row.data[side], 1, values, row.n);
    if (loaded != (const char *)values) memcpy(values, loaded, 8 * (size_t)row.n);
}

/* The codes of both sides, those of different types in the coarser type; for these, how many values differ. */
static int64_t codes_in_one_type(struct row row, uint32_t (*codes)[LANES])
{
    enum dtype coarser = row.dtype[0] > row.dtype[1] ? row.dtype[0] : row.dtype[1];
    ALIGNED double values[2][LANES];
    int64_t differing = 0;
    for (int side = 0; side < 2; side++) {
        widen(row, side, values[side]);
        round_codes(coarser, values[side], codes[side], row.n);
    }
    for (int64_t j = 0; j < row.n; j++) differing += values[0][j] != values[1][j];
    return differing;
}

/* Compares codes; those of different types are rounded to the coarser type, and all their bits differ. */
static struct code_summary compare_codes(struct row row)
{
    const char *a = row.data[0], *b = row.data[1];
    ALIGNED uint32_t codes[2][LANES];
    if (row.dtype[0] != row.dtype[1]) {
        int64_t differing = codes_in_one_type(row, codes);
        return (struct code_summary){compare_codes32((char *)codes[0], (char *)codes[1], row.n).longest, differing, row.n};
    }
    switch (ITEMSIZE[row.dtype[0]]) {
    case 8: return compare_codes64(a, b, row.n);
    case 4: return compare_codes32(a, b, row.n);
    case 2: return compare_codes16(a, b, row.n);
    default: return compare_codes8(a, b, row.n);
    }
}

/* The first place of a distance that occurs. */
static int64_t place_of_distance(struct row row, uint64_t distance)
{
    const char *a = row.data[0], *b = row.data[1];
    ALIGNED uint32_t codes[2][LANES];
    if (row.dtype[0] != row.dtype[1]) {
        codes_in_one_type(row, codes);
        return row.start + first_codes32((char *)codes[0], (char *)codes[1], row.n, distance);
    }
    switch (ITEMSIZE[row.dtype[0]]) {
    case 8: return row.start + first_codes64(a, b, row.n, distance);
    case 4: return row.start + first_codes32(a, b, row.n, distance);
    case 2: return row.start + first_codes16(a, b, row.n, distance);
    default: return row.start + first_codes8(a, b, row.n, distance);
    }
}

#endif
