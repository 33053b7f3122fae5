/* Counts of binary exponents: x has the exponent e of frexp, 2^(e-1) <= |x| < 2^e. histogram.py has the reference.
 *
 * The exponent fields of a chunk are laid out as bytes, which compilers vectorize. Most values are not much smaller than the
 * largest one: its field less theirs has four bits, so that two of them are counted at once. All others are counted one by
 * one. */
#ifndef GRADTOOL_HISTOGRAM_H
#define GRADTOOL_HISTOGRAM_H

#include "_storage.h"

/* The bins of a number: the subnormal ones first, by the length of their mantissa, then the others by their exponent field.
 * All types but F64 have the bins of float32. */
enum { SUBNORMAL_BINS32 = 22, BINS32 = SUBNORMAL_BINS32 + 255, SUBNORMAL_BINS64 = 51, BINS64 = SUBNORMAL_BINS64 + 2047 };
/* Fields that are laid out at a time, in a quarter of the L1 cache; the values of a field; tables to count them in. */
enum { FIELD_ROOM = 8192, FIELDS = 256, TABLES = 4 };
/* Pairs of digits that are counted at a time, the values of a digit, and those of a pair; tables to count them in. */
enum { PAIRS = 128, DIGITS = 16, PAIR_VALUES = DIGITS * DIGITS, PAIR_TABLES = 8 };

/* Of some values: the code of the largest finite magnitude and its field, and whether one is subnormal in float32. */
struct extremes { uint32_t largest, field, has_subnormals; };

/* Lays out the exponent fields that values have in float32, where the subnormal values of F16 and F8 are normal. TYPE is
 * that of a code of BITS, MAGNITUDE its bits without the sign; INFINITE is the first code that is not finite, NORMAL the
 * first that is normal in float32. */
#define FIELDS_OF(NAME, TYPE, BITS, MAGNITUDE, INFINITE, NORMAL, FIELD)                                                \
    static struct extremes fields_of_##NAME(const char *restrict source, uint8_t *restrict field, int n)               \
    {                                                                                                                  \
        TYPE largest = 0, subnormal = 0;                                                                               \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            TYPE magnitude = load##BITS(source + BITS / 8 * j) & (TYPE)(MAGNITUDE);                                    \
            TYPE finite = magnitude & (TYPE)-(magnitude < (TYPE)(INFINITE));                                           \
            largest = finite > largest ? finite : largest;                                                             \
            subnormal |= (TYPE)(magnitude - 1) < (TYPE)(NORMAL - 1);                                                   \
            field[j] = (uint8_t)(FIELD(magnitude));                                                                    \
        }                                                                                                              \
        return (struct extremes){largest, (uint8_t)(FIELD(largest)), subnormal};                                       \
    }

/* A subnormal F16 is a whole number of 2^-24. NaN and Inf get a field above the last. */
enum { LAST_FIELD_OF_F16 = 142 };
HELPER uint32_t field_of_f16(uint32_t magnitude)
{
    uint32_t exponent = as_bits((float)(int32_t)magnitude) >> 23, normal = (magnitude >> 10) + 112;
    uint32_t subnormal = (exponent > 24 ? exponent : 24) - 24;
    return magnitude < 0x400u ? subnormal : normal;
}

#define FIELD_OF_F32(MAGNITUDE) ((MAGNITUDE) >> 23)
#define FIELD_OF_BF16(MAGNITUDE) ((MAGNITUDE) >> 7)
#define FIELD_OF_F8_E4M3(MAGNITUDE) (as_bits(f8_e4m3_to_float(MAGNITUDE)) >> 23)
#define FIELD_OF_F8_E5M2(MAGNITUDE) (as_bits(f8_e5m2_to_float(MAGNITUDE)) >> 23)

FIELDS_OF(f32, uint32_t, 32, 0x7fffffff, 0x7f800000, 0x800000, FIELD_OF_F32)
FIELDS_OF(f16, uint16_t, 16, 0x7fff, 0x7c00, 1, field_of_f16)
FIELDS_OF(bf16, uint16_t, 16, 0x7fff, 0x7f80, 0x80, FIELD_OF_BF16)
FIELDS_OF(f8_e4m3, uint8_t, 8, 0x7f, 0x7f, 1, FIELD_OF_F8_E4M3)
FIELDS_OF(f8_e5m2, uint8_t, 8, 0x7f, 0x7c, 1, FIELD_OF_F8_E5M2)

static struct extremes load_fields(enum dtype dtype, const char *source, uint8_t *field, int n)
{
    switch (dtype) {
    case F32: return fields_of_f32(source, field, n);
    case F16: return fields_of_f16(source, field, n);
    case BF16: return fields_of_bf16(source, field, n);
    case F8_E4M3: return fields_of_f8_e4m3(source, field, n);
    default: return fields_of_f8_e5m2(source, field, n);
    }
}

/* Counts in several tables: an increment of the value that was incremented last has to wait. */
static void count_fields(const uint8_t *field, int n, int64_t (*count)[FIELDS])
{
    int j = 0;
    for (; j + 8 <= n; j += 8) {
        uint64_t eight = load64((const char *)field + j);
        for (int k = 0; k < 8; k++) count[k % TABLES][eight >> 8 * k & 0xff]++;
    }
    for (; j < n; j++) count[0][field[j]]++;
}

/* Makes pairs of digits, how far fields are below the largest one. The last digit is that of 0, and of what is not finite
 * unless its field is 255, whose digit is above `largest`. Returns whether another field has none. */
static int pair_digits(const uint8_t *restrict field, uint8_t largest, uint8_t *restrict pair)
{
    const uint8_t last = DIGITS - 1, low = largest > last ? largest - last : 0;
    uint8_t others = 0;
    for (int64_t j = 0; j < PAIRS; j++) {
        uint8_t first = field[j], second = field[PAIRS + j];
        uint8_t a = (uint8_t)(largest - first), b = (uint8_t)(largest - second);
        a = a < last ? a : last;
        b = b < last ? b : last;
        others |= ((uint8_t)(first - 1) < low) | ((uint8_t)(second - 1) < low);
        pair[j] = (uint8_t)(a | b << 4);
    }
    return others;
}

static void count_pairs(const uint8_t *pair, uint16_t (*count)[PAIR_VALUES])
{
    for (int j = 0; j < PAIRS; j += PAIR_TABLES)
        for (int k = 0; k < PAIR_TABLES; k++) count[k][pair[j + k]]++;
}

/* Adds counted pairs to the counts of fields of finite values other than 0. */
static void add_pairs(uint16_t (*pairs)[PAIR_VALUES], uint8_t largest, int64_t *count)
{
    int64_t digits[DIGITS] = {0};
    for (int64_t pair = 0; pair < PAIR_VALUES; pair++) {
        for (int table = 1; table < PAIR_TABLES; table++) pairs[0][pair] += pairs[table][pair];
    }
    for (int64_t pair = 0; pair < PAIR_VALUES; pair++) {
        digits[pair % DIGITS] += pairs[0][pair];
        digits[pair / DIGITS] += pairs[0][pair];
    }
    for (int digit = 0; digit < DIGITS - 1 && digit <= largest; digit++) count[largest - digit] += digits[digit];
}

/* Counts the fields of a chunk: pairs of them, where all are near the largest one or 0. */
static void count_chunk(const uint8_t *field, int n, uint8_t largest, int64_t (*count)[FIELDS])
{
    ALIGNED uint16_t pairs[PAIR_TABLES][PAIR_VALUES];
    ALIGNED uint8_t pair[PAIRS];
    int j = 0;
    memset(pairs, 0, sizeof pairs);
    for (; j + 2 * PAIRS <= n; j += 2 * PAIRS) {
        if (pair_digits(field + j, largest, pair)) count_fields(field + j, 2 * PAIRS, count);
        else count_pairs(pair, pairs);
    }
    if (j) add_pairs(pairs, largest, count[0]);
    count_fields(field + j, n - j, count);
}

/* Counts the values of F32 or BF16 that are subnormal. Called only if there are any. */
static void count_subnormals(enum dtype dtype, const char *data, int n, int64_t *bin)
{
    for (int64_t j = 0; j < n; j++) {
        uint32_t code = dtype == F32 ? load32(data + 4 * j) : (uint32_t)load16(data + 2 * j) << 16;
        uint32_t magnitude = code & 0x7fffffffu;
        if (magnitude - 1 < 0x7fffffu) bin[exponent_of((double)as_float(magnitude)) + 149]++;
    }
}

static double number_of(enum dtype dtype, uint32_t code)
{
    switch (dtype) {
    case F32: return as_float(code);
    case F16: return f16_to_float(code);
    case BF16: return bf16_to_float(code);
    case F8_E4M3: return f8_e4m3_to_float(code);
    default: return f8_e5m2_to_float(code);
    }
}

/* Counts values of any type but F64. Returns the largest finite magnitude; so does the next function. */
static double histogram32(enum dtype dtype, const char *data, int64_t elements, int64_t *bin)
{
    ALIGNED uint8_t field[FIELD_ROOM];
    ALIGNED int64_t count[TABLES][FIELDS];
    uint32_t largest = 0;
    memset(count, 0, sizeof count);
    for (int64_t start = 0; start < elements; start += FIELD_ROOM) {
        int n = (int)(elements - start < FIELD_ROOM ? elements - start : FIELD_ROOM);
        const char *chunk = data + start * ITEMSIZE[dtype];
        struct extremes seen = load_fields(dtype, chunk, field, n);
        largest = seen.largest > largest ? seen.largest : largest;
        if (seen.has_subnormals) count_subnormals(dtype, chunk, n, bin);
        count_chunk(field, n, (uint8_t)seen.field, count);
    }
    /* Field 0 has the zeros, and the subnormals that are counted already. */
    int last = dtype == F16 ? LAST_FIELD_OF_F16 : 254;
    for (int one = 1; one <= last; one++)
        for (int table = 0; table < TABLES; table++) bin[SUBNORMAL_BINS32 + one] += count[table][one];
    return number_of(dtype, largest);
}

static double histogram64(const char *data, int64_t elements, int64_t *bin)
{
    uint64_t largest = 0;
    for (int64_t i = 0; i < elements; i++) {
        uint64_t magnitude = load64(data + 8 * i) & 0x7fffffffffffffffu;
        uint64_t field = magnitude >> 52;
        if (field == 2047 || magnitude == 0) continue;
        bin[field ? SUBNORMAL_BINS64 + (int)field : exponent_of(as_double(magnitude)) + 1074]++;
        largest = magnitude > largest ? magnitude : largest;
    }
    return as_double(largest);
}

/* Where pieces are counted: the bins of one after those of another, and the largest magnitude of each. */
struct histogram { int64_t *bin; double *largest; };

static int64_t bins_of(enum dtype dtype) { return dtype == F64 ? BINS64 : BINS32; }

static void count_tile(enum dtype dtype, const char *data, int64_t elements, int64_t *bin, double *largest)
{
    double own = dtype == F64 ? histogram64(data, elements, bin) : histogram32(dtype, data, elements, bin);
    if (own > *largest) *largest = own;
}

#endif
