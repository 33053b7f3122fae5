/* Rows of two tiles side by side, as values: their terms, and the places of the largest differences. */
#ifndef GRADTOOL_DIFFERENCE_ROWS_H
#define GRADTOOL_DIFFERENCE_ROWS_H

#include "_difference_codes.h"
#include "_tiles.h"

/* So many lanes are done at a time, row after row, that their sums stay in the L1 cache. */
enum { PART = 512 };
enum { GAPS, SQUARES_A, SQUARES_B, PRODUCTS, SUMS };

struct tolerance { double absolute, relative; };

/* A quotient that is larger is looked for, if there may be one. */
struct wanted { struct tolerance tolerance; double quotient; };

/* Facts of a row: the bits of the largest |x - y|; how many are far; and whether a quotient may be above the wanted one. */
struct row_facts { int64_t largest, far; uint64_t above; };

/* The terms of a lane. */
struct terms { double gaps, a, b, products; };

HELPER struct terms terms_of(double (*lanes)[PART], int64_t j)
{
    return (struct terms){lanes[GAPS][j], lanes[SQUARES_A][j], lanes[SQUARES_B][j], lanes[PRODUCTS][j]};
}

HELPER void set_terms(double (*lanes)[PART], int64_t j, struct terms terms)
{
    lanes[GAPS][j] = terms.gaps, lanes[SQUARES_A][j] = terms.a;
    lanes[SQUARES_B][j] = terms.b, lanes[PRODUCTS][j] = terms.products;
}

HELPER double add_product(double sum, double x, double y, int is_wide)
{
    /* That of two floats is exact in float64, so to round it in between, or not, gives the same bits. */
    return HAS_FMA && !is_wide ? fma(x, y, sum) : sum + x * y;
}

/* Adds the terms of an element, and looks at it. */
HELPER struct terms add_terms(struct terms terms, double x, double y, struct wanted wanted, struct row_facts *facts,
                              int is_wide, int has_tolerance)
{
    double gap = fabs(x - y), magnitude = fabs(y);
    /* The first has the sign of the exact result. Of the second, `wanted` leaves room for the rounding. */
    double under = HAS_FMA ? fma(wanted.quotient, magnitude, -gap) : wanted.quotient * magnitude - gap;
    int64_t gap_bits = (int64_t)as_bits64(gap);
    facts->largest = gap_bits > facts->largest ? gap_bits : facts->largest;
    facts->above |= as_bits64(under);
    /* Near underflow either may have been rounded to zero, and an infinity less an infinity has no sign; the gaps of other
     * types are in between. */
    if (is_wide) facts->above |= (uint64_t)(((gap < 0x1p-900) & (gap != 0)) | (gap > DBL_MAX)) << 63;
    if (has_tolerance) facts->far += gap > wanted.tolerance.absolute + wanted.tolerance.relative * magnitude;
    terms.gaps += gap * gap;
    terms.a = add_product(terms.a, x, x, is_wide);
    terms.b = add_product(terms.b, y, y, is_wide);
    terms.products = add_product(terms.products, x, y, is_wide);
    return terms;
}

/* Adds the terms of a row to the lanes. That of two BF16 rows takes two values of each at a time, as the halves of a word;
 * its lanes of even numbers come before all of odd ones. */
#define ROW_TERMS(NAME, HAS_TOLERANCE)                                                                                 \
    static struct row_facts NAME##64(const char *restrict x, const char *restrict y, double (*restrict lanes)[PART],   \
                                     struct wanted wanted, int n)                                                      \
    {                                                                                                                  \
        struct row_facts facts = {0, 0, 0};                                                                            \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            double first = as_double(load64(x + 8 * j)), second = as_double(load64(y + 8 * j));                        \
            set_terms(lanes, j, add_terms(terms_of(lanes, j), first, second, wanted, &facts, 1, HAS_TOLERANCE));       \
        }                                                                                                              \
        return facts;                                                                                                  \
    }                                                                                                                  \
    static struct row_facts NAME##32(const char *restrict x, const char *restrict y, double (*restrict lanes)[PART],   \
                                     struct wanted wanted, int n)                                                      \
    {                                                                                                                  \
        struct row_facts facts = {0, 0, 0};                                                                            \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            double first = as_float(load32(x + 4 * j)), second = as_float(load32(y + 4 * j));                          \
            set_terms(lanes, j, add_terms(terms_of(lanes, j), first, second, wanted, &facts, 0, HAS_TOLERANCE));       \
        }                                                                                                              \
        return facts;                                                                                                  \
    }                                                                                                                  \
    static struct row_facts NAME##16(const char *restrict x, const char *restrict y, double (*restrict lanes)[PART],   \
                                     struct wanted wanted, int words)                                                  \
    {                                                                                                                  \
        struct row_facts facts = {0, 0, 0};                                                                            \
        for (int64_t j = 0; j < words; j++) {                                                                          \
            uint32_t a = load32(x + 4 * j), b = load32(y + 4 * j);                                                     \
            double first = as_float(a << 16), second = as_float(b << 16);                                              \
            set_terms(lanes, j, add_terms(terms_of(lanes, j), first, second, wanted, &facts, 0, HAS_TOLERANCE));       \
            int64_t odd = PART / 2 + j;                                                                                \
            first = as_float(a & 0xffff0000u), second = as_float(b & 0xffff0000u);                                     \
            set_terms(lanes, odd, add_terms(terms_of(lanes, odd), first, second, wanted, &facts, 0, HAS_TOLERANCE));   \
        }                                                                                                              \
        return facts;                                                                                                  \
    }

ROW_TERMS(add_row, 0)
ROW_TERMS(tolerate_row, 1)

static int is_bf16(struct row row)
{
    return row.dtype[0] == BF16 && row.dtype[1] == BF16;
}

static struct row_facts add_words(struct row row, double (*lanes)[PART], struct wanted wanted, int has_tolerance)
{
    char room[2][2 * PART];
    const char *x = load_codes(BF16, row.data[0], room[0], row.n), *y = load_codes(BF16, row.data[1], room[1], row.n);
    return (has_tolerance ? tolerate_row16 : add_row16)(x, y, lanes, wanted, (row.n + 1) / 2);
}

static struct row_facts add_row(struct row row, double (*lanes)[PART], struct wanted wanted)
{
    int has_tolerance = wanted.tolerance.absolute > 0 || wanted.tolerance.relative > 0;
    ALIGNED double room[2][PART];
    if (is_bf16(row)) return add_words(row, lanes, wanted, has_tolerance);
    int is_wide = row.dtype[0] == F64 || row.dtype[1] == F64;
    const char *x = load_values(row.dtype[0], row.data[0], is_wide, room[0], row.n);
    const char *y = load_values(row.dtype[1], row.data[1], is_wide, room[1], row.n);
    if (is_wide) return (has_tolerance ? tolerate_row64 : add_row64)(x, y, lanes, wanted, row.n);
    return (has_tolerance ? tolerate_row32 : add_row32)(x, y, lanes, wanted, row.n);
}

/* ---- largest values, each with its first place --------------------------------------------------------------------- */

/* Whether a row from `start` on whose largest value is this one has a place for it. */
#define IS_NEW(VALUE, LARGEST, START, PLACE) ((VALUE) > (LARGEST) || ((VALUE) == (LARGEST) && (START) < (PLACE)))

/* The first place of the largest |x - y| of a row. */
static int64_t place_of_gap(struct row row, double largest)
{
    ALIGNED double x[PART], y[PART];
    int64_t j = 0;
    widen(row, 0, x);
    widen(row, 1, y);
    while (j < row.n - 1 && fabs(x[j] - y[j]) != largest) j++;
    return row.start + j;
}

static int64_t row_relative(const double *restrict x, const double *restrict y, double *restrict quotients, int n)
{
    int64_t largest = 0;
    for (int64_t j = 0; j < n; j++) {
        double gap = fabs(x[j] - y[j]);
        quotients[j] = gap == 0 ? 0 : gap / fabs(y[j]);
        int64_t bits = (int64_t)as_bits64(quotients[j]);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Takes the largest quotient of a row and its first place, if it is new. */
static void take_largest_quotient(struct row row, double *most, int64_t *place)
{
    ALIGNED double x[PART], y[PART], quotients[PART];
    int64_t j = 0;
    if (isinf(*most) && row.start > *place) return;
    widen(row, 0, x);
    widen(row, 1, y);
    double largest = as_double((uint64_t)row_relative(x, y, quotients, row.n));
    if (!IS_NEW(largest, *most, row.start, *place)) return;
    while (j < row.n - 1 && quotients[j] != largest) j++;
    if (!IS_NEW(largest, *most, row.start + j, *place)) return;
    *most = largest;
    *place = row.start + j;
}

#endif
