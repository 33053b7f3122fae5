/* The differences of two blocks, in a single pass over both; differences.py is the reference, and defines each result. */
#ifndef GRADTOOL_DIFFERENCES_H
#define GRADTOOL_DIFFERENCES_H

#include "_difference_rows.h"
#include "_source.h"

enum { MAX_ABS, MAX_REL, MAX_ULPS, MAXIMA, FIRST_DIFFERENCE = MAXIMA, PLACES };
enum { DIFFERING, BITS_DIFFER, NOT_CLOSE, ONLY_A, ONLY_B, SAME_NONFINITE, NOT_NEAR, COUNTS };

/* A tile of a, and the tile of b that it is compared with. With `drops`, what is not finite on both sides is 0. */
struct pair { enum dtype dtype[2]; const char *data[2]; int64_t elements; int drops; };

/* The result for a tile. */
struct difference {
    double sums[SUMS], max_abs, max_rel;
    uint64_t ulps;
    int64_t places[PLACES], counts[COUNTS];
};

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Room for a row of each side. */
struct room { ALIGNED char codes[2][8 * LANES]; };

/* Where an element of a side is. */
static const char *at(struct pair pair, int side, int64_t number)
{
    return pair.data[side] + number * ITEMSIZE[pair.dtype[side]];
}

/* Copies a row without what is not finite on both sides. */
static void drop_nonfinite(struct row *row, struct room *room)
{
    ALIGNED double values[2][LANES];
    for (int side = 0; side < 2; side++) {
        widen(*row, side, values[side]);
        memcpy(room->codes[side], row->data[side], (size_t)(row->n * ITEMSIZE[row->dtype[side]]));
        row->data[side] = room->codes[side];
    }
    for (int64_t j = 0; j < row->n; j++) {
        if (isfinite(values[0][j]) && isfinite(values[1][j])) continue;
        for (int side = 0; side < 2; side++) {
            int64_t size = ITEMSIZE[row->dtype[side]];
            memset(room->codes[side] + j * size, 0, (size_t)size);
        }
    }
}

/* So many elements at most, from `start` on. */
static struct row row_from(struct pair pair, int64_t start, int width, struct room *room)
{
    int n = (int)(pair.elements - start < width ? pair.elements - start : width);
    struct row row = {{pair.dtype[0], pair.dtype[1]}, {at(pair, 0, start), at(pair, 1, start)}, n, start};
    if (pair.drops) drop_nonfinite(&row, room);
    return row;
}

/* Counts the elements that are not finite on both sides. */
static void count_nonfinite(struct pair pair, struct difference *result, int64_t start)
{
    pair.drops = 0;
    struct row row = row_from(pair, start, LANES, NULL);
    ALIGNED double x[LANES], y[LANES];
    size_t size = (size_t)ITEMSIZE[pair.dtype[0]];
    widen(row, 0, x);
    widen(row, 1, y);
    for (int64_t j = 0; j < row.n; j++) {
        if (isfinite(x[j]) && isfinite(y[j])) continue;
        int is_same = x[j] == y[j] || (x[j] != x[j] && y[j] != y[j]);
        result->counts[SAME_NONFINITE] += is_same;
        result->counts[DIFFERING] += !is_same;
        result->counts[NOT_CLOSE] += !is_same;
        result->counts[NOT_NEAR] += !is_same;
        result->counts[ONLY_A] += !is_same && !isfinite(x[j]);
        result->counts[ONLY_B] += !is_same && !isfinite(y[j]);
        if (pair.dtype[0] == pair.dtype[1])
            result->counts[BITS_DIFFER] += memcmp(at(pair, 0, start + j), at(pair, 1, start + j), size) != 0;
    }
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* The first value that differs in the row from `start` on; -1 where only NaN have different codes. */
static int64_t first_difference(struct pair pair, int64_t start)
{
    enum { FEW = 64 };
    ALIGNED double x[FEW], y[FEW];
    int64_t end = pair.elements - start < LANES ? pair.elements : start + LANES;
    pair.drops = 0;
    for (; start < end; start += FEW) {
        struct row row = row_from(pair, start, FEW, NULL);
        widen(row, 0, x);
        widen(row, 1, y);
        for (int j = 0; j < row.n; j++)
            if (x[j] != y[j] && (x[j] == x[j] || y[j] == y[j])) return start + j;
    }
    return -1;
}

/* Distances and counts, row after row. */
static void compare_all_codes(struct pair pair, struct difference *result)
{
    struct room room;
    int64_t row_of_longest = 0, *first = &result->places[FIRST_DIFFERENCE];
    for (int64_t start = 0; start < pair.elements; start += LANES) {
        struct code_summary summary = compare_codes(row_from(pair, start, LANES, &room));
        result->counts[DIFFERING] += summary.differing;
        result->counts[BITS_DIFFER] += summary.bits;
        if (pair.drops) count_nonfinite(pair, result, start);
        if (*first < 0 && result->counts[DIFFERING]) *first = first_difference(pair, start);
        if (summary.longest <= result->ulps) continue;
        result->ulps = summary.longest;
        row_of_longest = start;
    }
    if (result->ulps)
        result->places[MAX_ULPS] = place_of_distance(row_from(pair, row_of_longest, LANES, &room), result->ulps);
}

/* A bound that the wanted quotient is above: the largest so far, or a little less where a quotient as large is wanted too:
 * before its place, and without fma, because the product with the bound is then rounded. */
static double wanted_quotient(const struct difference *result, int64_t start)
{
    int may_be_equal = start < result->places[MAX_REL] || !HAS_FMA;
    if (isinf(result->max_rel)) return 0;
    return may_be_equal ? result->max_rel * (1 - 0x1p-50) : result->max_rel;
}

/* Adds the terms of a row, or of two, to the lanes, and takes their largest values; as the place of the largest gap, where
 * its row begins. */
static void compare_values(struct difference *result, int rows, const struct row *row, struct tolerance tolerance,
                              double (*lanes)[PART])
{
    struct wanted wanted = {tolerance, wanted_quotient(result, row->start)};
    struct row_summary summary = add_part(rows, row, lanes, wanted);
    for (int r = 0; r < rows; r++) {
        double largest = as_double((uint64_t)summary.largest[r]);
        if (summary.above[r] >> 63) take_largest_quotient(row[r], &result->max_rel, &result->places[MAX_REL]);
        if (IS_NEW(largest, result->max_abs, row[r].start, result->places[MAX_ABS]))
            result->max_abs = largest, result->places[MAX_ABS] = row[r].start;
    }
    result->counts[NOT_CLOSE] += summary.not_close;
    result->counts[NOT_NEAR] += summary.not_near;
}

/* Sums and largest values, part after part. */
static void compare_all_values(struct pair pair, struct difference *result, struct tolerance tolerance)
{
    struct room room[AT_ONCE];
    ALIGNED double lanes[SUMS][PART];
    double parts[SUMS][LANES / PART] = {{0}};
    int is_in_halves = pair.dtype[0] == BF16 && pair.dtype[1] == BF16;
    for (int part = 0; part < LANES / PART && part * PART < pair.elements; part++) {
        memset(lanes, 0, sizeof lanes);
        for (int64_t start = part * PART, rows; start < pair.elements; start += rows * LANES) {
            rows = start + (AT_ONCE - 1) * LANES + PART <= pair.elements ? AT_ONCE : 1;
            struct row row[AT_ONCE];
            for (int r = 0; r < rows; r++) row[r] = row_from(pair, start + r * LANES, PART, &room[r]);
            compare_values(result, (int)rows, row, tolerance, lanes);
        }
        for (int sum = 0; sum < SUMS; sum++) parts[sum][part] = (is_in_halves ? fold_halves : fold)(lanes[sum], PART);
    }
    for (int sum = 0; sum < SUMS; sum++) result->sums[sum] = fold(parts[sum], LANES / PART);
    int64_t *place = &result->places[MAX_ABS];
    if (result->max_abs > 0) *place = place_of_gap(row_from(pair, *place, PART, room), result->max_abs);
}

/* All but the exponents of a tile. Unless the pair drops them, it must have no NaN and no Inf. */
static struct difference compare_rows(struct pair pair, struct tolerance tolerance)
{
    struct difference result = {{0}, 0, 0, 0, {0}, {0}};
    result.places[FIRST_DIFFERENCE] = -1;
    compare_all_codes(pair, &result);
    /* Values that do not differ are not counted again, which is faster. */
    if (!result.counts[DIFFERING]) tolerance = (struct tolerance){0, 0, 0};
    compare_all_values(pair, &result, tolerance);
    if (!is_set(tolerance)) result.counts[NOT_CLOSE] = result.counts[NOT_NEAR] = result.counts[DIFFERING];
    if (pair.dtype[0] != pair.dtype[1]) result.counts[BITS_DIFFER] = pair.elements;
    return result;
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
        double gap = isfinite(x - y) ? (x - y) / k : x / k - y / k;
        x /= m, y /= n;
        lanes[GAPS][i % LANES] += gap * gap;
        lanes[SQUARES_A][i % LANES] += x * x;
        lanes[SQUARES_B][i % LANES] += y * y;
        lanes[PRODUCTS][i % LANES] += x * y;
    }
    for (int sum = 0; sum < SUMS; sum++) sums[sum] = fold(lanes[sum], LANES);
}

static struct difference compare_tile(struct pair pair, struct tolerance tolerance, int32_t *exponents)
{
    struct difference result = compare_rows(pair, tolerance);
    /* A NaN or Inf is in these sums, too. */
    if (!isfinite(result.sums[SQUARES_A]) || !isfinite(result.sums[SQUARES_B])) {
        pair.drops = 1;
        result = compare_rows(pair, tolerance);
    }
    exponents[0] = exponents[1] = exponents[2] = 0;
    /* Differences, magnitudes and squares of all other types are in range. */
    if (pair.dtype[0] != F64 && pair.dtype[1] != F64) return result;
    int gaps_in_range = result.max_abs == 0 || is_in_range(result.sums[GAPS]);
    if (gaps_in_range && is_in_range(result.sums[SQUARES_A]) && is_in_range(result.sums[SQUARES_B])) return result;
    double largest[2] = {0, 0}, x, y;
    for (int64_t i = 0; i < pair.elements; i++) {
        values_at(pair, i, &x, &y);
        largest[0] = fabs(x) > largest[0] ? fabs(x) : largest[0];
        largest[1] = fabs(y) > largest[1] ? fabs(y) : largest[1];
    }
    exponents[0] = exponent_for(result.sums[GAPS], result.max_abs);
    exponents[1] = exponent_for(result.sums[SQUARES_A], largest[0]);
    exponents[2] = exponent_for(result.sums[SQUARES_B], largest[1]);
    if (exponents[0] || exponents[1] || exponents[2]) sum_divided(pair, result.sums, exponents);
    return result;
}

/* Where the results of tiles go: an entry for each tile, of as many values as its struct has. */
struct results { double *sums, *max_abs, *max_rel; int32_t *exponents; uint64_t *ulps; int64_t *places, *counts; };

/* Stops where a source does. */
static void compare_pieces(struct source *source, const int64_t *a_piece, const int64_t *b_piece, int64_t k,
                           const struct tolerance *tolerance, struct results to)
{
    for (int64_t i = 0, tile = 0; i < k; i++, a_piece += 3, b_piece += 3, tolerance++) {
        for (int64_t start = 0; start < a_piece[2]; start += TILE, tile++) {
            int64_t elements = a_piece[2] - start < TILE ? a_piece[2] - start : TILE;
            int64_t offset[2] = {a_piece[1], b_piece[1]};
            struct pair pair = {{(enum dtype)a_piece[0], (enum dtype)b_piece[0]}, {NULL, NULL}, elements, 0};
            for (int side = 0; side < 2; side++) {
                int64_t size = ITEMSIZE[pair.dtype[side]];
                pair.data[side] = bytes_of(source + side, offset[side] + start * size, elements * size);
                if (!pair.data[side]) return;
            }
            struct difference result = compare_tile(pair, *tolerance, to.exponents + 3 * tile);
            memcpy(to.sums + SUMS * tile, result.sums, sizeof result.sums);
            memcpy(to.places + PLACES * tile, result.places, sizeof result.places);
            memcpy(to.counts + COUNTS * tile, result.counts, sizeof result.counts);
            to.max_abs[tile] = result.max_abs, to.max_rel[tile] = result.max_rel, to.ulps[tile] = result.ulps;
        }
    }
}

#endif
