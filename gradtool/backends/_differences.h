/* What tells two blocks apart, in one pass over both; differences.py is the plain twin, and says what each figure is. */
#ifndef GRADTOOL_DIFFERENCES_H
#define GRADTOOL_DIFFERENCES_H

#include "_storage.h"

#ifndef VECTOR
#define VECTOR
#endif

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

/* ---- rows -------------------------------------------------------------------------------------------------------- */

VECTOR static void widen_row(const float *restrict row, double *restrict values, int n)
{
    for (int j = 0; j < n; j++) values[j] = row[j];
}

/* F32 at any address. */
VECTOR static void widen_bytes(const char *restrict data, double *restrict values, int n)
{
    for (int j = 0; j < n; j++) {
        float value;
        memcpy(&value, data + 4 * j, sizeof value);
        values[j] = value;
    }
}

static void load_values(enum dtype dtype, const char *data, double *values, int n)
{
    ALIGNED float row[PART];
    if (dtype == F64) {
        memcpy(values, data, 8 * (size_t)n);
    } else if (dtype == F32) {
        widen_bytes(data, values, n);
    } else {
        load_row(dtype, data, row, n);
        widen_row(row, values, n);
    }
}

/* Facts of a row: the bits of the largest |x - y|, counts, and whether a quotient may be above the bound. */
struct row_facts { uint64_t largest, differing, bits, far, above; };

/* Adds the terms of a row to the lanes, and looks at its differences. */
VECTOR static struct row_facts row_compare(const double *restrict x, const double *restrict y, int n,
                                           double (*restrict lanes)[PART], struct tolerance tolerance, double bound)
{
    double *restrict gaps = lanes[GAPS], *restrict a = lanes[SQUARES_A];
    double *restrict b = lanes[SQUARES_B], *restrict products = lanes[PRODUCTS];
    uint64_t largest = 0, differing = 0, bits = 0, far = 0, above = 0;
    for (int j = 0; j < n; j++) {
        double gap = fabs(x[j] - y[j]), magnitude = fabs(y[j]), least = magnitude * bound;
        uint64_t gap_bits = as_bits64(gap);
        gaps[j] += gap * gap;
        a[j] += x[j] * x[j];
        b[j] += y[j] * y[j];
        products[j] += x[j] * y[j];
        largest = gap_bits > largest ? gap_bits : largest;
        differing += gap != 0;
        bits += as_bits64(x[j]) != as_bits64(y[j]);
        far += gap > tolerance.absolute + tolerance.relative * magnitude;
        /* Near underflow the product may be too large. */
        above |= (uint64_t)(gap > least) | ((uint64_t)(least < 0x1p-1000) & (uint64_t)(gap != 0));
    }
    struct row_facts facts = {largest, differing, bits, far, above};
    return facts;
}

VECTOR static void row_relative(const double *restrict x, const double *restrict y, double *restrict quotients, int n)
{
    for (int j = 0; j < n; j++) {
        double gap = fabs(x[j] - y[j]);
        quotients[j] = gap == 0 ? 0 : gap / fabs(y[j]);
    }
}

/* The codes of values rounded to a type, with a sign. */
#define SIGNED_CODES(NAME, NARROW)                                                                                     \
    VECTOR static void codes_##NAME(const double *restrict values, int32_t *restrict codes, int n)                    \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) {                                                                                  \
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
#define STORED_CODES(NAME, TYPE, SIGN)                                                                                 \
    VECTOR static void stored_##NAME(const char *restrict data, int32_t *restrict codes, int n)                       \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) {                                                                                  \
            TYPE code;                                                                                                 \
            memcpy(&code, data + (int)sizeof code * j, sizeof code);                                                   \
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

VECTOR static uint32_t row_distances32(const int32_t *restrict a, const int32_t *restrict b,
                                       uint32_t *restrict distances, int n)
{
    uint32_t largest = 0;
    for (int j = 0; j < n; j++) {
        uint32_t x = (uint32_t)a[j], y = (uint32_t)b[j], distance = a[j] > b[j] ? x - y : y - x;
        distances[j] = distance;
        largest = distance > largest ? distance : largest;
    }
    return largest;
}

VECTOR static uint64_t row_distances64(const double *restrict x, const double *restrict y,
                                       uint64_t *restrict distances, int n)
{
    uint64_t largest = 0;
    for (int j = 0; j < n; j++) {
        uint64_t a = as_bits64(fabs(x[j])), b = as_bits64(fabs(y[j]));
        uint64_t apart = a > b ? a - b : b - a, distance = (x[j] < 0) == (y[j] < 0) ? apart : a + b;
        distances[j] = distance;
        largest = distance > largest ? distance : largest;
    }
    return largest;
}

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

static void take_largest_gap(struct difference *found, const double *x, const double *y, int n, int64_t start,
                             double largest)
{
    ALIGNED double gaps[PART];
    if (!IS_NEW(largest, found->max_abs, start, found->places[MAX_ABS])) return;
    for (int j = 0; j < n; j++) gaps[j] = fabs(x[j] - y[j]);
    TAKE(gaps, n, largest, found->max_abs, start, found->places[MAX_ABS]);
}

static void take_largest_quotient(struct difference *found, const double *x, const double *y, int n, int64_t start)
{
    ALIGNED double quotients[PART];
    double largest = 0;
    if (isinf(found->max_rel) && start > found->places[MAX_REL]) return;
    row_relative(x, y, quotients, n);
    for (int j = 0; j < n; j++) largest = quotients[j] > largest ? quotients[j] : largest;
    TAKE(quotients, n, largest, found->max_rel, start, found->places[MAX_REL]);
}

static void take_largest_distance(struct pair pair, struct difference *found, const double *x, const double *y, int n,
                                  int64_t start, int drops)
{
    enum dtype coarser = pair.dtype[0] > pair.dtype[1] ? pair.dtype[0] : pair.dtype[1];
    if (coarser == F64) {
        ALIGNED uint64_t distances[PART];
        uint64_t largest = row_distances64(x, y, distances, n);
        if (IS_NEW(largest, found->ulps, start, found->places[MAX_ULPS]))
            TAKE(distances, n, largest, found->ulps, start, found->places[MAX_ULPS]);
        return;
    }
    ALIGNED int32_t a[PART], b[PART];
    ALIGNED uint32_t distances[PART];
    /* What was dropped is only in the values. */
    if (pair.dtype[0] == pair.dtype[1] && !drops) {
        stored_codes(coarser, at(pair, 0, start), a, n);
        stored_codes(coarser, at(pair, 1, start), b, n);
    } else {
        signed_codes(coarser, x, a, n);
        signed_codes(coarser, y, b, n);
    }
    uint32_t largest = row_distances32(a, b, distances, n);
    if (IS_NEW(largest, found->ulps, start, found->places[MAX_ULPS]))
        TAKE(distances, n, largest, found->ulps, start, found->places[MAX_ULPS]);
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Counts the elements that are not finite on both sides, and sets them to 0. */
static void drop_nonfinite(struct pair pair, struct difference *found, double *x, double *y, int n, int64_t start)
{
    int is_one_type = pair.dtype[0] == pair.dtype[1];
    size_t size = (size_t)ITEMSIZE[pair.dtype[0]];
    for (int j = 0; j < n; j++) {
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

static void compare_row(struct pair pair, struct difference *found, const double *x, const double *y, int n,
                        int64_t start, struct tolerance tolerance, int drops, double (*lanes)[PART])
{
    /* A quotient above the largest one makes gap > |y| * bound, in spite of the roundings. */
    double bound = isinf(found->max_rel) ? 0 : found->max_rel * (1 - 0x1p-50);
    struct row_facts facts = row_compare(x, y, n, lanes, tolerance, bound);
    found->counts[BITS_DIFFER] += (int64_t)facts.bits;
    if (facts.differing == 0) return;
    found->counts[DIFFERING] += (int64_t)facts.differing;
    found->counts[NOT_CLOSE] += (int64_t)facts.far;
    take_largest_gap(found, x, y, n, start, as_double(facts.largest));
    if (facts.above) take_largest_quotient(found, x, y, n, start);
    take_largest_distance(pair, found, x, y, n, start, drops);
}

/* Folds lanes pairwise, neighbours first, and leaves the sum in the first one. */
static void fold_pairs(double *lanes, int width)
{
    for (; width > 1; width /= 2)
        for (int j = 0; j < width / 2; j++) lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
}

/* All but the exponents of a tile. Unless `drops`, it must have no NaN and no Inf. */
static struct difference compare_values(struct pair pair, struct tolerance tolerance, int drops)
{
    struct difference found = {{0}, 0, 0, 0, {0}, {0}};
    ALIGNED double lanes[SUMS][PART], x[PART], y[PART];
    double parts[SUMS][LANES / PART] = {{0}};
    for (int part = 0; part < LANES / PART && part * PART < pair.elements; part++) {
        memset(lanes, 0, sizeof lanes);
        for (int64_t start = part * PART; start < pair.elements; start += LANES) {
            int n = (int)(pair.elements - start < PART ? pair.elements - start : PART);
            load_values(pair.dtype[0], at(pair, 0, start), x, n);
            load_values(pair.dtype[1], at(pair, 1, start), y, n);
            if (drops) drop_nonfinite(pair, &found, x, y, n, start);
            compare_row(pair, &found, x, y, n, start, tolerance, drops, lanes);
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
    load_values(pair.dtype[0], at(pair, 0, number), x, 1);
    load_values(pair.dtype[1], at(pair, 1, number), y, 1);
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
    struct difference found = compare_values(pair, tolerance, 0);
    /* A NaN or Inf is in these sums, too. */
    if (!isfinite(found.sums[SQUARES_A]) || !isfinite(found.sums[SQUARES_B]))
        found = compare_values(pair, tolerance, 1);
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

static void compare_pieces(const char *a, const char *b, const int64_t *piece, const int64_t *other, Py_ssize_t k,
                           struct tolerance tolerance, struct results to)
{
    for (Py_ssize_t i = 0, tile = 0; i < k; i++, piece += 3, other += 3) {
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
