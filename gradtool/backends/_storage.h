/* Rows of stored codes to rows of numbers and back: the conversions of _codes.h in loops that compilers vectorize. */
#ifndef GRADTOOL_STORAGE_H
#define GRADTOOL_STORAGE_H

#include "_half.h"

#define WIDEN(NAME, BITS)                                                                                              \
    static void widen_##NAME(const char *restrict source, float *restrict row, int n)                                  \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) row[j] = NAME##_to_float(load##BITS(source + BITS / 8 * j));                   \
    }

#define NARROW(NAME, BITS)                                                                                             \
    static void narrow_##NAME(const float *restrict row, char *restrict target, int n)                                 \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) store##BITS(target + BITS / 8 * j, float_to_##NAME(row[j]));                   \
    }

WIDEN(f32, 32)
NARROW(f32, 32)
WIDEN(bf16, 16)
NARROW(bf16, 16)
#define NARROW_BYTES(DTYPE, NAME, ...) NARROW(NAME, 8)
BYTE_TYPES(NARROW_BYTES)

/* Loads a row of any type but F64. */
static void load_row(enum dtype dtype, const char *source, float *row, int n)
{
    switch (dtype) {
#define WIDEN_ROW(DTYPE, NAME, ...) case DTYPE: widen_##NAME(source, row, n); return;
    SMALL_TYPES(WIDEN_ROW)
    default: widen_f32(source, row, n); return;
    }
}

/* One of many values at any address, float64 if they are wide and else float32. */
HELPER double value_at(const char *values, int64_t j, int is_wide)
{
    return is_wide ? as_double(load64(values + 8 * j)) : (double)as_float(load32(values + 4 * j));
}

static void widen_values(const char *restrict row, double *restrict values, int n)
{
    for (int64_t j = 0; j < n; j++) values[j] = value_at(row, j, 0);
}

/* The values of elements: where they are, if no conversion is needed, else in `room`. */
static const char *load_values(enum dtype dtype, const char *data, int is_wide, double *room, int n)
{
    ALIGNED float row[LANES];
    if (dtype == F64 || (dtype == F32 && !is_wide)) return data;
    if (dtype != F32) load_row(dtype, data, is_wide ? row : (float *)room, n);
    if (is_wide) widen_values(dtype == F32 ? data : (const char *)row, room, n);
    return (const char *)room;
}

/* Rounds a row and stores it. */
static void store_row(enum dtype dtype, const float *row, char *target, int n)
{
    switch (dtype) {
#define NARROW_ROW(DTYPE, NAME, ...) case DTYPE: narrow_##NAME(row, target, n); return;
    SMALL_TYPES(NARROW_ROW)
    default: narrow_f32(row, target, n); return;
    }
}

/* Rounds to odd: an inexact value is truncated and its last bit set, so that the next rounding gives what a single
 * rounding would; storage.py has the reference. */
HELPER float double_to_odd(double value)
{
    float nearest = (float)value;
    uint32_t bits = as_bits(nearest);
    uint32_t cut = (bits - (uint32_t)(fabs((double)nearest) > fabs(value))) | 1;
    return as_float(nearest == value || value != value ? bits : cut);
}

/* The nearest number of a range; all are positive. GCC has single instructions for minima and maxima of integers with
 * AVX-512, and of numbers elsewhere. */
HELPER double clamp(double value, double lowest, double highest)
{
#ifdef __AVX512F__
    int64_t bits = (int64_t)as_bits64(value), low = (int64_t)as_bits64(lowest), high = (int64_t)as_bits64(highest);
    bits = bits > low ? bits : low;
    return as_double((uint64_t)(bits < high ? bits : high));
#else
    value = value > lowest ? value : lowest;
    return value < highest ? value : highest;
#endif
}

/* The value of a type of 16 bits or fewer that is nearest to a float64 value, before overflow.
 *
 * As in round_product, the last place of anchor + value is that of the type, and the sum is rounded once. The anchor is
 * one and a half times a power of two, so that a negative value does not change that place. Above 2^512 the place is
 * another, but all of these values overflow. */
HELPER float round_wide(double value, double lowest, double factor)
{
    double power = as_double(as_bits64(value) & 0x7ff0000000000000u);
    double anchor = clamp(power, lowest, 0x1p512) * factor, rounded = (value + anchor) - anchor;
    return (float)as_double(as_bits64(rounded) | (as_bits64(value) & 0x8000000000000000u));
}

static void row_round_wide(const double *restrict wide, float *restrict row, struct format format, int n)
{
    double lowest = (double)as_float(format.lowest), factor = 1.5 * power_of_two((int)(format.spare >> 23) + 52 - 23);
    for (int64_t j = 0; j < n; j++) row[j] = round_wide(wide[j], lowest, factor);
}

static void narrow_nearest(const double *restrict wide, char *restrict target, int n)
{
    for (int64_t j = 0; j < n; j++) store32(target + 4 * j, float_to_f32((float)wide[j]));
}

static void narrow_f64(const double *restrict wide, char *restrict target, int n)
{
    for (int64_t j = 0; j < n; j++) store64(target + 8 * j, double_to_f64(wide[j]));
}

/* Rounds float64 values to float32, and these to BF16; whether that gives the bits of a single rounding. It may not where a
 * float32 is in the middle of two BF16 values, which one of 65,536 random values is. */
static int narrow_twice(const double *restrict wide, char *restrict target, int n)
{
    uint32_t middles = 0;
    for (int64_t j = 0; j < n; j++) {
        float value = (float)wide[j];
        middles |= (as_bits(value) & 0xffffu) == 0x8000u;
        store16(target + 2 * j, float_to_bf16(value));
    }
    return !middles;
}

/* Rounds float64 values once and stores them. */
static void store_wide(enum dtype dtype, const double *wide, char *target, int n)
{
    ALIGNED float row[LANES];
    if (dtype == F64) { narrow_f64(wide, target, n); return; }
    if (dtype == F32) { narrow_nearest(wide, target, n); return; }
    if (dtype == BF16 && narrow_twice(wide, target, n)) return;
    row_round_wide(wide, row, format_of(dtype), n);
    store_row(dtype, row, target, n);
}

/* A number rounded once to a storage type. */
static double round_to(enum dtype dtype, double value)
{
    char code[sizeof value];
    float rounded;
    if (dtype == F64) return value;
    store_wide(dtype, &value, code, 1);
    load_row(dtype, code, &rounded, 1);
    return rounded;
}

/* ---- products, rounded once ------------------------------------------------------------------------------------- */

/* Products rounded to odd. The product of two float32 is exact in float64. */
static void row_scale_odd(float *row, float factor, int n)
{
    for (int64_t j = 0; j < n; j++) row[j] = double_to_odd((double)row[j] * (double)factor);
}

#endif
