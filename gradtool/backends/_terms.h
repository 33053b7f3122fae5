/* Sums of rows, lane by lane; they look at every value, too. */
#ifndef GRADTOOL_TERMS_H
#define GRADTOOL_TERMS_H

#include "_lanes.h"

/* The code of the largest magnitude, where infinity is above all numbers and NaN above infinity; and the zeros. 8-bit
 * types have the codes of load_codes. */
struct seen { uint64_t largest; int64_t zeros; };

HELPER void see(struct seen *seen, uint64_t largest, int64_t zeros)
{
    if (largest > seen->largest) seen->largest = largest;
    seen->zeros += zeros;
}

static double largest_seen(enum dtype dtype, struct seen seen)
{
    if (dtype == F64) return as_double(seen.largest);
    uint32_t code = (uint32_t)seen.largest;
    if (dtype == F32) return f32_to_float(code);
    if (dtype == BF16) return bf16_to_float(code);
    return f16_to_float(code) * (float)power_of_two(halves_exponent(dtype));
}

/* The square of a float is exact in float64, so to round it in between, or not, gives the same bits. */
HELPER double add_term(enum term term, double sum, double x)
{
    if (term != SQUARE) return sum + fabs(x);
    return HAS_FMA ? fma(x, x, sum) : sum + x * x;
}
HELPER double add_term64(enum term term, double sum, double x) { return sum + (term == SQUARE ? x * x : fabs(x)); }

/* Add a row, or two whole rows at once. With two, the lanes are loaded and stored half as often, and two
 * comparisons do not wait for each other, because each row has its own largest magnitude. */
HELPER void add_terms_f64(enum term term, int rows, const char *restrict source, double *restrict lanes,
                           struct seen *seen, int n)
{
    int64_t largest[2] = {0}, zeros[2] = {0};
    for (int64_t j = 0; j < n; j++) {
        double sum = lanes[j];
        for (int64_t r = 0; r < rows; r++) {
            uint64_t code = load64(source + 8 * (j + r * LANES));
            int64_t magnitude = (int64_t)(code & 0x7fffffffffffffffu);
            largest[r] = magnitude > largest[r] ? magnitude : largest[r];
            zeros[r] += magnitude == 0;
            sum = add_term64(term, sum, as_double(code));
        }
        lanes[j] = sum;
    }
    for (int r = 0; r < 2; r++) see(seen, (uint64_t)largest[r], zeros[r]);
}

HELPER void add_terms_f32(enum term term, int rows, const char *restrict source, double *restrict lanes,
                           struct seen *seen, int n)
{
    uint32_t largest[2] = {0}, zeros[2] = {0};
    for (int64_t j = 0; j < n; j++) {
        double sum = lanes[j];
        for (int64_t r = 0; r < rows; r++) {
            uint32_t code = load32(source + 4 * (j + r * LANES)), magnitude = code & 0x7fffffffu;
            largest[r] = magnitude > largest[r] ? magnitude : largest[r];
            zeros[r] += magnitude == 0;
            sum = add_term(term, sum, (double)as_float(code));
        }
        lanes[j] = sum;
    }
    for (int r = 0; r < 2; r++) see(seen, largest[r], zeros[r]);
}

/* Finds the largest magnitude and the zeros of 16-bit codes, of which a vector has more than of converted values. Their
 * two halves are compared side by side. */
static void look(const char *restrict source, struct seen *seen, int n)
{
    int16_t largest[2] = {0}, zeros[2] = {0};
    for (int64_t j = 0; j < n / 2; j++)
        for (int64_t r = 0; r < 2; r++) {
            int16_t magnitude = (int16_t)(load16(source + 2 * j + r * n) & 0x7fffu);
            largest[r] = magnitude > largest[r] ? magnitude : largest[r];
            zeros[r] = (int16_t)(zeros[r] + (magnitude == 0));
        }
    for (int r = 0; r < 2; r++) see(seen, (uint64_t)largest[r], zeros[r]);
}

/* So many F16 values are converted at a time. */
enum { CONVERTED = 128 };

HELPER void add_terms_f16(enum term term, int rows, const char *restrict source, double *restrict lanes,
                           struct seen *seen, int n)
{
    look(source, seen, rows * n);
    for (int64_t start = 0; start < n; start += CONVERTED) {
        ALIGNED float x[2][CONVERTED];
        int width = n - start < CONVERTED ? (int)(n - start) : CONVERTED;
        for (int64_t r = 0; r < rows; r++) widen_f16(source + 2 * (start + r * LANES), x[r], width);
        for (int64_t j = 0; j < width; j++) {
            double sum = lanes[start + j];
            for (int64_t r = 0; r < rows; r++) sum = add_term(term, sum, (double)x[r][j]);
            lanes[start + j] = sum;
        }
    }
}

/* Two values are the halves of a word; the lanes of even numbers come before all odd lanes. */
HELPER void add_terms_bf16(enum term term, int rows, const char *restrict source, double *restrict lanes,
                            struct seen *seen, int n)
{
    double *restrict odd = lanes + LANES / 2;
    look(source, seen, rows * n);
    for (int64_t j = 0; j < n / 2; j++) {
        double lower = lanes[j], upper = odd[j];
        for (int64_t r = 0; r < rows; r++) {
            uint32_t word = load32(source + 4 * j + 2 * r * LANES);
            lower = add_term(term, lower, (double)as_float(word << 16));
            upper = add_term(term, upper, (double)as_float(word & 0xffff0000u));
        }
        lanes[j] = lower, odd[j] = upper;
    }
}

/* A loop for each term and number of rows. */
#define SUM(NAME)                                                                                                      \
    static void sum_##NAME(enum term term, const char *source, double *lanes, struct seen *seen, int n)                \
    {                                                                                                                  \
        if (n > LANES && term == SQUARE) add_terms_##NAME(SQUARE, 2, source, lanes, seen, LANES);                      \
        else if (n > LANES) add_terms_##NAME(ABSOLUTE, 2, source, lanes, seen, LANES);                                 \
        else if (term == SQUARE) add_terms_##NAME(SQUARE, 1, source, lanes, seen, n);                                  \
        else add_terms_##NAME(ABSOLUTE, 1, source, lanes, seen, n);                                                    \
    }

SUM(f64)
SUM(f32)
SUM(f16)
SUM(bf16)

/* Adds the terms of a row, or of two whole rows, to their lanes. */
static void sum_terms(enum term term, enum dtype dtype, const char *source, double *lanes, struct seen *seen, int n)
{
    ALIGNED char room[2 * 2 * LANES];
    if (dtype == F64) { sum_f64(term, source, lanes, seen, n); return; }
    if (dtype == F32) { sum_f32(term, source, lanes, seen, n); return; }
    const char *codes = load_codes(dtype, source, room, n);
    (dtype == BF16 ? sum_bf16 : sum_f16)(term, codes, lanes, seen, whole_groups(n));
    seen->zeros -= whole_groups(n) - n;
}

/* The sum of the lanes; those of an 8-bit type are of its F16 codes. */
static double fold_terms(enum term term, enum dtype dtype, double *lanes)
{
    if (dtype == BF16) return fold_halves(lanes, LANES);
    return fold(lanes, LANES) * power_of_two(halves_exponent(dtype) * (term == SQUARE ? 2 : 1));
}

#endif
