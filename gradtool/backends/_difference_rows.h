/* Rows of two tiles side by side, as values: their terms, and the places of the largest differences. */
#ifndef GRADTOOL_DIFFERENCE_ROWS_H
#define GRADTOOL_DIFFERENCE_ROWS_H

#include "_difference_codes.h"
#include "_tiles.h"

/* So many lanes are done at a time, row after row, that their sums stay in the L1 cache. */
enum { PART = 512 };
/* Rows that are done at once, where there are as many. */
enum { AT_ONCE = 2 };
enum { GAPS, SQUARES_A, SQUARES_B, PRODUCTS, SUMS };

struct tolerance { double absolute, relative, near; };

/* Whether there is a tolerance at all; without one, all values that differ are neither close nor near. */
HELPER int is_set(struct tolerance tolerance)
{
    return tolerance.absolute > 0 || tolerance.relative > 0 || tolerance.near > 0;
}

/* A quotient that is larger is looked for, if there may be one. */
struct wanted { struct tolerance tolerance; double quotient; };

/* A summary of a row, or of two: the bits of the largest |x - y| of each, whether a quotient may be above the wanted
 * quotient, and how many elements are neither close nor near. */
struct row_summary { int64_t largest[AT_ONCE]; uint64_t above[AT_ONCE]; int64_t not_close, not_near; };

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
HELPER struct terms add_terms(struct terms terms, double x, double y, struct wanted wanted, struct row_summary *summary,
                              int64_t row, int is_wide, int has_tolerance)
{
    double gap = fabs(x - y), magnitude = fabs(y);
    /* The first has the sign of the exact result. Of the second, `wanted` leaves room for the rounding. */
    double under = HAS_FMA ? fma(wanted.quotient, magnitude, -gap) : wanted.quotient * magnitude - gap;
    int64_t gap_bits = (int64_t)as_bits64(gap);
    summary->largest[row] = gap_bits > summary->largest[row] ? gap_bits : summary->largest[row];
    summary->above[row] |= as_bits64(under);
    /* Near underflow, either may have been rounded to zero, and an infinity less an infinity has no sign; the gaps of other
     * types are in between. */
    if (is_wide) summary->above[row] |= (uint64_t)(((gap < 0x1p-900) & (gap != 0)) | (gap > DBL_MAX)) << 63;
    if (has_tolerance) {
        summary->not_close += gap > wanted.tolerance.absolute + wanted.tolerance.relative * magnitude;
        summary->not_near += gap > wanted.tolerance.near * magnitude;
    }
    terms.gaps += gap * gap;
    terms.a = add_product(terms.a, x, x, is_wide);
    terms.b = add_product(terms.b, y, y, is_wide);
    terms.products = add_product(terms.products, x, y, is_wide);
    return terms;
}

/* Add the parts of a row to the lanes, or of two whole rows at once, the second `step` bytes behind the first on
 * each side: with two, the lanes are loaded and stored half as often. */
HELPER struct row_summary add_rows64(int rows, const char *restrict x, const char *restrict y, const int64_t *step,
                                   double (*restrict lanes)[PART], struct wanted wanted, int n, int has_tolerance)
{
    struct row_summary summary = {{0}, {0}, 0, 0};
    for (int64_t j = 0; j < n; j++) {
        struct terms terms = terms_of(lanes, j);
        for (int64_t r = 0; r < rows; r++) {
            double a = as_double(load64(x + 8 * j + r * step[0])), b = as_double(load64(y + 8 * j + r * step[1]));
            terms = add_terms(terms, a, b, wanted, &summary, r, 1, has_tolerance);
        }
        set_terms(lanes, j, terms);
    }
    return summary;
}

HELPER struct row_summary add_rows32(int rows, const char *restrict x, const char *restrict y, const int64_t *step,
                                   double (*restrict lanes)[PART], struct wanted wanted, int n, int has_tolerance)
{
    struct row_summary summary = {{0}, {0}, 0, 0};
    for (int64_t j = 0; j < n; j++) {
        struct terms terms = terms_of(lanes, j);
        for (int64_t r = 0; r < rows; r++) {
            double a = as_float(load32(x + 4 * j + r * step[0])), b = as_float(load32(y + 4 * j + r * step[1]));
            terms = add_terms(terms, a, b, wanted, &summary, r, 0, has_tolerance);
        }
        set_terms(lanes, j, terms);
    }
    return summary;
}

/* Of BF16, two values of each side are the halves of a word; the lanes of even numbers come before all odd lanes. */
HELPER struct row_summary add_rows16(int rows, const char *restrict x, const char *restrict y, const int64_t *step,
                                   double (*restrict lanes)[PART], struct wanted wanted, int n, int has_tolerance)
{
    struct row_summary summary = {{0}, {0}, 0, 0};
    for (int64_t j = 0; j < n / 2; j++) {
        struct terms lower = terms_of(lanes, j), upper = terms_of(lanes, PART / 2 + j);
        for (int64_t r = 0; r < rows; r++) {
            uint32_t a = load32(x + 4 * j + r * step[0]), b = load32(y + 4 * j + r * step[1]);
            double first = as_float(a << 16), second = as_float(b << 16);
            lower = add_terms(lower, first, second, wanted, &summary, r, 0, has_tolerance);
            first = as_float(a & 0xffff0000u), second = as_float(b & 0xffff0000u);
            upper = add_terms(upper, first, second, wanted, &summary, r, 0, has_tolerance);
        }
        set_terms(lanes, j, lower);
        set_terms(lanes, PART / 2 + j, upper);
    }
    return summary;
}

/* A loop for each number of rows, with and without a tolerance. */
#define ADD_ROWS(BITS)                                                                                                 \
    static struct row_summary add_part##BITS(int rows, const char *x, const char *y, const int64_t *step,                \
                                           double (*lanes)[PART], struct wanted wanted, int n)                         \
    {                                                                                                                  \
        int has_tolerance = is_set(wanted.tolerance);                                                                  \
        if (rows > 1 && has_tolerance) return add_rows##BITS(AT_ONCE, x, y, step, lanes, wanted, PART, 1);             \
        if (rows > 1) return add_rows##BITS(AT_ONCE, x, y, step, lanes, wanted, PART, 0);                              \
        if (has_tolerance) return add_rows##BITS(1, x, y, step, lanes, wanted, n, 1);                                  \
        return add_rows##BITS(1, x, y, step, lanes, wanted, n, 0);                                                     \
    }

ADD_ROWS(64)
ADD_ROWS(32)
ADD_ROWS(16)

static int is_bf16(struct row row)
{
    return row.dtype[0] == BF16 && row.dtype[1] == BF16;
}

/* Two rows are both whole parts; the second begins LANES elements behind the first. */
static struct row_summary add_part(int rows, const struct row *row, double (*lanes)[PART], struct wanted wanted)
{
    ALIGNED double room[2][AT_ONCE][PART];
    int is_wide = row->dtype[0] == F64 || row->dtype[1] == F64, n = row->n;
    const char *data[2][AT_ONCE];
    int64_t step[2] = {0, 0};
    for (int side = 0; side < 2; side++) {
        for (int r = 0; r < rows; r++) {
            double *space = room[side][r];
            data[side][r] = is_bf16(*row) ? load_codes(BF16, row[r].data[side], (char *)space, n)
                                          : load_values(row->dtype[side], row[r].data[side], is_wide, space, n);
        }
        if (rows > 1) step[side] = data[side][1] - data[side][0];
    }
    const char *x = data[0][0], *y = data[1][0];
    if (is_bf16(*row)) return add_part16(rows, x, y, step, lanes, wanted, whole_groups(n));
    return (is_wide ? add_part64 : add_part32)(rows, x, y, step, lanes, wanted, n);
}

/* ---- largest values, each with its first place --------------------------------------------------------------------- */

/* Whether a row from `start` on has a new largest value, or the same at an earlier place. */
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
static void take_largest_quotient(struct row row, double *maximum, int64_t *place)
{
    ALIGNED double x[PART], y[PART], quotients[PART];
    int64_t j = 0;
    if (isinf(*maximum) && row.start > *place) return;
    widen(row, 0, x);
    widen(row, 1, y);
    double largest = as_double((uint64_t)row_relative(x, y, quotients, row.n));
    if (!IS_NEW(largest, *maximum, row.start, *place)) return;
    while (j < row.n - 1 && quotients[j] != largest) j++;
    if (!IS_NEW(largest, *maximum, row.start + j, *place)) return;
    *maximum = largest;
    *place = row.start + j;
}

#endif
