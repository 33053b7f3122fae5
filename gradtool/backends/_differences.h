/* What tells two blocks apart, in one pass over both; differences.py is the plain twin, and says what each figure is. */
#ifndef GRADTOOL_DIFFERENCES_H
#define GRADTOOL_DIFFERENCES_H

#include "_difference_rows.h"

/* ---- maxima, each with its first place --------------------------------------------------------------------------- */

/* Whether a row from `start` on whose largest value is this one has a place for it. */
#define IS_NEW(VALUE, LARGEST, START, PLACE) ((VALUE) > (LARGEST) || ((VALUE) == (LARGEST) && (START) < (PLACE)))

/* The first place of a value in a row, if it is new; there may be none. */
#define TAKE(VALUES, N, VALUE, LARGEST, START, PLACE)                                                                  \
    do {                                                                                                               \
        int first = 0;                                                                                                 \
        while (first < (N) && (VALUES)[first] != (VALUE)) first++;                                                     \
        if (first < (N) && IS_NEW(VALUE, LARGEST, (START) + first, PLACE)) {                                           \
            (LARGEST) = (VALUE);                                                                                       \
            (PLACE) = (START) + first;                                                                                 \
        }                                                                                                              \
    } while (0)

static void take_largest_gap(struct difference *found, struct row row, double largest)
{
    ALIGNED double x[PART], y[PART];
    if (!IS_NEW(largest, found->max_abs, row.start, found->places[MAX_ABS])) return;
    widen(row, x, y);
    for (int64_t j = 0; j < row.n; j++) x[j] = fabs(x[j] - y[j]);
    TAKE(x, row.n, largest, found->max_abs, row.start, found->places[MAX_ABS]);
}

static void take_largest_quotient(struct difference *found, struct row row)
{
    ALIGNED double x[PART], y[PART], quotients[PART];
    double largest = 0;
    if (isinf(found->max_rel) && row.start > found->places[MAX_REL]) return;
    widen(row, x, y);
    row_relative(x, y, quotients, row.n);
    for (int64_t j = 0; j < row.n; j++) largest = quotients[j] > largest ? quotients[j] : largest;
    TAKE(quotients, row.n, largest, found->max_rel, row.start, found->places[MAX_REL]);
}

/* With `drops`, only the values of the row are without NaN and Inf, not what is stored. */
static void take_largest_distance(struct pair pair, struct difference *found, struct row row, int drops)
{
    enum dtype coarser = pair.dtype[0] > pair.dtype[1] ? pair.dtype[0] : pair.dtype[1];
    ALIGNED double x[PART], y[PART];
    ALIGNED int32_t a[PART], b[PART];
    ALIGNED uint32_t distances[PART];
    if (coarser == F64) {
        ALIGNED uint64_t wide[PART];
        widen(row, x, y);
        uint64_t largest = row_distances64(x, y, wide, row.n);
        if (IS_NEW(largest, found->ulps, row.start, found->places[MAX_ULPS]))
            TAKE(wide, row.n, largest, found->ulps, row.start, found->places[MAX_ULPS]);
        return;
    }
    if (pair.dtype[0] == pair.dtype[1] && !drops) {
        stored_codes(coarser, at(pair, 0, row.start), a, row.n);
        stored_codes(coarser, at(pair, 1, row.start), b, row.n);
    } else {
        widen(row, x, y);
        signed_codes(coarser, x, a, row.n);
        signed_codes(coarser, y, b, row.n);
    }
    uint32_t largest = row_distances32(a, b, distances, row.n);
    if (IS_NEW(largest, found->ulps, row.start, found->places[MAX_ULPS]))
        TAKE(distances, row.n, largest, found->ulps, row.start, found->places[MAX_ULPS]);
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Counts the elements that are not finite on both sides, and sets them to 0. */
static void drop_nonfinite(struct pair pair, struct difference *found, double *x, double *y, int n, int64_t start)
{
    int is_one_type = pair.dtype[0] == pair.dtype[1];
    size_t size = (size_t)ITEMSIZE[pair.dtype[0]];
    for (int64_t j = 0; j < n; j++) {
        if (isfinite(x[j]) && isfinite(y[j])) continue;
        int is_same = x[j] == y[j] || (x[j] != x[j] && y[j] != y[j]);
        found->counts[SAME_NONFINITE] += is_same;
        found->counts[DIFFERING] += !is_same;
        found->counts[NOT_CLOSE] += !is_same;
        found->counts[ONLY_A] += !is_same && !isfinite(x[j]);
        found->counts[ONLY_B] += !is_same && !isfinite(y[j]);
        found->counts[BITS_DIFFER] += is_one_type && memcmp(at(pair, 0, start + j), at(pair, 1, start + j), size) != 0;
        x[j] = y[j] = 0;
    }
}

static void compare_row(struct pair pair, struct difference *found, struct row row, struct tolerance tolerance,
                        int drops, double (*lanes)[PART])
{
    /* A quotient above the largest one makes gap > |y| * bound, in spite of the roundings. */
    double bound = isinf(found->max_rel) ? 0 : found->max_rel * (1 - 0x1p-50);
    struct row_facts facts = compare_values(row, lanes, tolerance, bound);
    found->counts[BITS_DIFFER] += (int64_t)facts.bits;
    if (facts.differing == 0) return;
    found->counts[DIFFERING] += (int64_t)facts.differing;
    found->counts[NOT_CLOSE] += (int64_t)facts.far;
    take_largest_gap(found, row, as_double(facts.largest));
    if (facts.above) take_largest_quotient(found, row);
    take_largest_distance(pair, found, row, drops);
}

/* Loads a row; with `drops`, without NaN and Inf, which are counted. `room` is for a row of each side. */
static struct row load_pair(struct pair pair, struct difference *found, int64_t start, int drops, double (*room)[PART])
{
    int n = (int)(pair.elements - start < PART ? pair.elements - start : PART);
    struct row row = {0, 0, drops || pair.dtype[0] == F64 || pair.dtype[1] == F64, n, start};
    row.x = load_values(pair.dtype[0], at(pair, 0, start), row.is_wide, room[0], n);
    row.y = load_values(pair.dtype[1], at(pair, 1, start), row.is_wide, room[1], n);
    if (drops) {
        memmove(room[0], row.x, 8 * (size_t)n);
        memmove(room[1], row.y, 8 * (size_t)n);
        drop_nonfinite(pair, found, room[0], room[1], n, start);
        row.x = (const char *)room[0], row.y = (const char *)room[1];
    }
    return row;
}

/* Folds lanes pairwise, neighbours first, and leaves the sum in the first one. */
static void fold_pairs(double *lanes, int width)
{
    for (; width > 1; width /= 2)
        for (int64_t j = 0; j < width / 2; j++) lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
}

/* All but the exponents of a tile. Unless `drops`, it must have no NaN and no Inf. */
static struct difference compare_rows(struct pair pair, struct tolerance tolerance, int drops)
{
    struct difference found = {{0}, 0, 0, 0, {0}, {0}};
    ALIGNED double lanes[SUMS][PART], room[2][PART];
    double parts[SUMS][LANES / PART] = {{0}};
    for (int part = 0; part < LANES / PART && part * PART < pair.elements; part++) {
        memset(lanes, 0, sizeof lanes);
        for (int64_t start = part * PART; start < pair.elements; start += LANES) {
            struct row row = load_pair(pair, &found, start, drops, room);
            compare_row(pair, &found, row, tolerance, drops, lanes);
        }
        for (int sum = 0; sum < SUMS; sum++) {
            fold_pairs(lanes[sum], PART);
            parts[sum][part] = lanes[sum][0];
        }
    }
    for (int sum = 0; sum < SUMS; sum++) {
        fold_pairs(parts[sum], LANES / PART);
        found.sums[sum] = parts[sum][0];
    }
    if (pair.dtype[0] != pair.dtype[1]) found.counts[BITS_DIFFER] = pair.elements;
    return found;
}

/* The values of an element, 0 unless both are finite. */
static void values_at(struct pair pair, int64_t number, double *x, double *y)
{
    double room[2];
    memcpy(x, load_values(pair.dtype[0], at(pair, 0, number), 1, &room[0], 1), sizeof *x);
    memcpy(y, load_values(pair.dtype[1], at(pair, 1, number), 1, &room[1], 1), sizeof *y);
    if (!isfinite(*x) || !isfinite(*y)) *x = *y = 0;
}

static int32_t exponent_for(double sum, double largest)
{
    if (is_in_range(sum) || largest == 0) return 0;
    return isinf(largest) ? 1023 : exponent_of(largest);
}

/* Sums a tile again whose values must be divided first. Slow, and rarely needed. */
static void sum_divided(struct pair pair, double *sums, const int32_t *exponents)
{
    double lanes[SUMS][LANES] = {{0}}, x, y;
    double k = power_of_two(exponents[0]), m = power_of_two(exponents[1]), n = power_of_two(exponents[2]);
    for (int64_t i = 0; i < pair.elements; i++) {
        values_at(pair, i, &x, &y);
        double gap = exponents[0] ? x / k - y / k : x - y;
        x /= m, y /= n;
        lanes[GAPS][i % LANES] += gap * gap;
        lanes[SQUARES_A][i % LANES] += x * x;
        lanes[SQUARES_B][i % LANES] += y * y;
        lanes[PRODUCTS][i % LANES] += x * y;
    }
    for (int sum = 0; sum < SUMS; sum++) {
        fold_pairs(lanes[sum], LANES);
        sums[sum] = lanes[sum][0];
    }
}

static struct difference compare_tile(struct pair pair, struct tolerance tolerance, int32_t *exponents)
{
    struct difference found = compare_rows(pair, tolerance, 0);
    /* A NaN or Inf is in these sums, too. */
    if (!isfinite(found.sums[SQUARES_A]) || !isfinite(found.sums[SQUARES_B]))
        found = compare_rows(pair, tolerance, 1);
    exponents[0] = exponents[1] = exponents[2] = 0;
    /* Differences, magnitudes and squares of all other types are in range. */
    if (pair.dtype[0] != F64 && pair.dtype[1] != F64) return found;
    if (is_in_range(found.sums[GAPS]) && is_in_range(found.sums[SQUARES_A]) && is_in_range(found.sums[SQUARES_B]))
        return found;
    double largest[2] = {0, 0}, x, y;
    for (int64_t i = 0; i < pair.elements; i++) {
        values_at(pair, i, &x, &y);
        largest[0] = fabs(x) > largest[0] ? fabs(x) : largest[0];
        largest[1] = fabs(y) > largest[1] ? fabs(y) : largest[1];
    }
    exponents[0] = exponent_for(found.sums[GAPS], found.max_abs);
    exponents[1] = exponent_for(found.sums[SQUARES_A], largest[0]);
    exponents[2] = exponent_for(found.sums[SQUARES_B], largest[1]);
    if (exponents[0] || exponents[1] || exponents[2]) sum_divided(pair, found.sums, exponents);
    return found;
}

/* Where the results of tiles go: one entry each, of as many values as its struct has. */
struct results { double *sums, *max_abs, *max_rel; int32_t *exponents; uint64_t *ulps; int64_t *places, *counts; };

static void compare_pieces(const char *a, const char *b, const int64_t *piece, const int64_t *other, int64_t k,
                           struct tolerance tolerance, struct results to)
{
    for (int64_t i = 0, tile = 0; i < k; i++, piece += 3, other += 3) {
        for (int64_t start = 0; start < piece[2]; start += TILE, tile++) {
            struct pair pair = {{(enum dtype)piece[0], (enum dtype)other[0]}, {a + piece[1], b + other[1]}, TILE};
            for (int side = 0; side < 2; side++) pair.data[side] += start * ITEMSIZE[pair.dtype[side]];
            if (piece[2] - start < TILE) pair.elements = piece[2] - start;
            struct difference found = compare_tile(pair, tolerance, to.exponents + 3 * tile);
            memcpy(to.sums + SUMS * tile, found.sums, sizeof found.sums);
            memcpy(to.places + MAXIMA * tile, found.places, sizeof found.places);
            memcpy(to.counts + COUNTS * tile, found.counts, sizeof found.counts);
            to.max_abs[tile] = found.max_abs, to.max_rel[tile] = found.max_rel, to.ulps[tile] = found.ulps;
        }
    }
}

#endif
