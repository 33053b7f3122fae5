/* Counts of binary exponents: x has the exponent e of frexp, 2^(e-1) <= |x| < 2^e. tiles.py has the reference.
 *
 * The exponent fields of a chunk are laid out as bytes, of which compilers compare many at once. Most values are not much
 * smaller than the largest one, so field after field is counted, from the largest down, until none is left. */
#ifndef GRADTOOL_HISTOGRAM_H
#define GRADTOOL_HISTOGRAM_H

#include "_storage.h"

/* The bins of a number: first subnormal numbers, by the length of their mantissa, then all others by their exponent field.
 * All types but F64 have the bins of float32. */
enum { SUBNORMAL_BINS32 = 22, BINS32 = SUBNORMAL_BINS32 + 255, SUBNORMAL_BINS64 = 51, BINS64 = SUBNORMAL_BINS64 + 2047 };
/* Values whose fields are laid out at a time, in a quarter of the L1 cache or less. */
enum { CHUNK_ROOM = 8192 };
/* The values of a byte; tables to count them in; the fields that are counted at once, of all others together. */
enum { FIELDS = 256, TABLES = 4, NEAR = 24 };
/* Field 0 is that of zeros and subnormal values, the last field that of values that are not finite. */
enum { NOT_FINITE = FIELDS - 1 };

/* The code of the largest finite magnitude of values, and whether any but 0 is below all fields. */
struct extremes { uint64_t largest; int has_small; };

/* Lays out the exponent fields that values have in float32, where the subnormal values of F16 are normal. INFINITE is the
 * first code that is not finite, NORMAL the first that is normal in float32; FIELD is the field of a magnitude. */
#define FIELDS_OF(NAME, BITS, INFINITE, NORMAL, FIELD)                                                                 \
    static struct extremes fields_of_##NAME(const char *restrict source, uint8_t *restrict field, int n)               \
    {                                                                                                                  \
        uint##BITS##_t largest = 0, small = 0;                                                                         \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            uint##BITS##_t code = load##BITS(source + BITS / 8 * j);                                                   \
            uint##BITS##_t magnitude = code & (uint##BITS##_t)((uint##BITS##_t)-1 >> 1);                               \
            uint##BITS##_t finite = magnitude & (uint##BITS##_t)-(magnitude < (uint##BITS##_t)(INFINITE));             \
            largest = finite > largest ? finite : largest;                                                             \
            small |= (uint##BITS##_t)(magnitude - 1) < (uint##BITS##_t)(NORMAL - 1);                                   \
            field[j] = (uint8_t)(FIELD(magnitude));                                                                    \
        }                                                                                                              \
        return (struct extremes){largest, small != 0};                                                                 \
    }

#define FIELD_OF_F32(MAGNITUDE) ((MAGNITUDE) >> 23)
#define FIELD_OF_BF16(MAGNITUDE) ((MAGNITUDE) >> 7)

/* A subnormal F16 is a whole number of 2^-24. NaN and Inf get a field above all others. */
HELPER uint32_t field_of_f16(uint32_t magnitude)
{
    uint32_t exponent = as_bits((float)(int32_t)magnitude) >> 23, normal = (magnitude >> 10) + 112;
    uint32_t subnormal = (exponent > 24 ? exponent : 24) - 24;
    return magnitude < 0x400u ? subnormal : normal;
}

FIELDS_OF(f32, 32, 0x7f800000, 0x800000, FIELD_OF_F32)
FIELDS_OF(f16, 16, 0x7c00, 1, field_of_f16)
FIELDS_OF(bf16, 16, 0x7f80, 0x80, FIELD_OF_BF16)

/* Values of F16, or of an 8-bit type by its F16 codes. */
static struct extremes fields_of_halves(enum dtype dtype, const char *source, uint8_t *field, int n)
{
    ALIGNED char room[2 * LANES];
    struct extremes all = {0, 0};
    for (int start = 0; start < n; start += LANES) {
        int width = n - start < LANES ? n - start : LANES;
        const char *codes = load_codes(dtype, source + start * ITEMSIZE[dtype], room, width);
        uint64_t largest = fields_of_f16(codes, field + start, width).largest;
        if (largest > all.largest) all.largest = largest;
    }
    return all;
}

/* Field 1 is that of the exponent field `base`; the last field is that of NaN and Inf. All are in the upper halves. */
static struct extremes fields_of_f64(const char *restrict source, uint8_t *restrict field, int n, int *base)
{
    int32_t highest = 0;
    uint32_t lowest = 0, small = 0;
    for (int64_t j = 0; j < n; j++) {
        int32_t high = (int32_t)(load64(source + 8 * j) >> 32) & 0x7fffffff, finite = high < 0x7ff00000 ? high : 0;
        highest = finite > highest ? finite : highest;
    }
    int below = (highest >> 20) - (NOT_FINITE - 1);
    if (below < 0) below = 0;
    *base = below + 1;
    for (int64_t j = 0; j < n; j++) {
        uint64_t code = load64(source + 8 * j);
        int32_t high = (int32_t)(code >> 32) & 0x7fffffff, number = (high >> 20) - below, is_above = -(number > 0);
        uint32_t low = (uint32_t)code, is_highest = -(uint32_t)(high == highest);
        small |= (uint32_t)~is_above & (low | (uint32_t)high);
        lowest = (low & is_highest) > lowest ? low & is_highest : lowest;
        number = number < NOT_FINITE ? number : NOT_FINITE;
        field[j] = (uint8_t)(number & is_above);
    }
    return (struct extremes){(uint64_t)highest << 32 | lowest, small != 0};
}

/* How many bytes have a value: SIDE_BY_SIDE of them at a time, whose counts are bytes, too. They are
 * CHUNK_ROOM at most. */
static int64_t count_byte(const uint8_t *restrict bytes, int n, uint8_t value)
{
    ALIGNED uint8_t lanes[SIDE_BY_SIDE] = {0};
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += SIDE_BY_SIDE)
        for (int64_t j = 0; j < SIDE_BY_SIDE; j++) lanes[j] = (uint8_t)(lanes[j] + (bytes[start + j] == value));
    for (int64_t j = 0; j < SIDE_BY_SIDE; j++) count += lanes[j];
    return count;
}

/* Counts the fields up to `last`, in several tables: an increment of the value that was incremented last has to wait. */
static void count_all(const uint8_t *field, int n, int last, int64_t *count)
{
    int64_t tables[TABLES][FIELDS] = {{0}};
    for (int j = 0; j < n; j += 8) {
        uint64_t eight = load64((const char *)field + j);
        for (int k = 0; k < 8; k++) tables[k % TABLES][eight >> 8 * k & 0xff]++;
    }
    for (int i = 1; i <= last; i++)
        for (int table = 0; table < TABLES; table++) count[i] += tables[table][i];
}

/* Counts the fields of a chunk, which has CHUNK_ROOM bytes. */
static void count_chunk(uint8_t *field, int n, int largest, int64_t *count)
{
    int whole = (n + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE * SIDE_BY_SIDE, last = largest;
    memset(field + n, 0, (size_t)(whole - n));
    int64_t left = whole - count_byte(field, whole, 0);
    for (; left && last > 0 && last > largest - NEAR; last--) {
        int64_t same = count_byte(field, whole, (uint8_t)last);
        count[last] += same, left -= same;
    }
    if (left && last > 0) count_all(field, whole, last, count);
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

/* Counts a chunk of any type but F64. Returns the largest finite magnitude; so does the next function. */
static double histogram32(enum dtype dtype, const char *data, uint8_t *field, int n, int64_t *bin)
{
    int64_t *count = bin + SUBNORMAL_BINS32;
    if (dtype != F32 && dtype != BF16) {
        int exponent = halves_exponent(dtype);
        uint32_t largest = as_bits(f16_to_float((uint32_t)fields_of_halves(dtype, data, field, n).largest));
        count_chunk(field, n, (int)(largest >> 23), count + exponent);
        return (double)as_float(largest) * power_of_two(exponent);
    }
    struct extremes seen = (dtype == F32 ? fields_of_f32 : fields_of_bf16)(data, field, n);
    uint32_t largest = (uint32_t)seen.largest << (dtype == F32 ? 0 : 16);
    if (seen.has_small) count_subnormals(dtype, data, n, bin);
    count_chunk(field, n, (int)(largest >> 23), count);
    return (double)as_float(largest);
}

static double histogram64(const char *data, uint8_t *field, int n, int64_t *bin)
{
    int base;
    struct extremes seen = fields_of_f64(data, field, n, &base);
    count_chunk(field, n, (int)(seen.largest >> 52) - (base - 1), bin + SUBNORMAL_BINS64 + base - 1);
    for (int64_t j = 0; j < n && seen.has_small; j++) {
        uint64_t magnitude = load64(data + 8 * j) & 0x7fffffffffffffffu;
        int number = (int)(magnitude >> 52);
        if (magnitude && number < base) bin[number ? SUBNORMAL_BINS64 + number : exponent_of(as_double(magnitude)) + 1074]++;
    }
    return as_double(seen.largest);
}

/* Where pieces are counted: bins after bins, and the largest magnitude of each. */
struct histogram { int64_t *bin; double *largest; };

static int64_t bins_of(enum dtype dtype) { return dtype == F64 ? BINS64 : BINS32; }

static void count_tile(enum dtype dtype, const char *data, int64_t elements, int64_t *bin, double *largest)
{
    ALIGNED uint8_t field[CHUNK_ROOM];
    for (int64_t start = 0; start < elements; start += CHUNK_ROOM, data += CHUNK_ROOM * ITEMSIZE[dtype]) {
        int n = (int)(elements - start < CHUNK_ROOM ? elements - start : CHUNK_ROOM);
        double piece_largest = dtype == F64 ? histogram64(data, field, n, bin) : histogram32(dtype, data, field, n, bin);
        if (piece_largest > *largest) *largest = piece_largest;
    }
}

#endif
