/* The storage types: how a row of codes becomes a row of numbers, and how numbers are rounded back to codes.
 *
 * Written once, with bit operations that a compiler turns into vector code; storage.py is the plain twin. */
#ifndef GRADTOOL_STORAGE_H
#define GRADTOOL_STORAGE_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "these kernels need float and double arithmetic without excess precision"
#endif

enum { LANES = 2048, ROWS = 32, TILE = LANES * ROWS };
enum dtype { F64, F32, F16, BF16, F8_E4M3, F8_E5M2, DTYPES };
enum term { MAXIMUM, ABSOLUTE, SQUARE };

static const int64_t ITEMSIZE[DTYPES] = {8, 4, 2, 2, 1, 1};

/* One build runs on every x86-64 machine and still uses its widest vectors. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define VECTOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTOR
#endif

/* Plain `inline` is not enough: GCC keeps a helper out of a clone that is built for another processor. */
#if defined(__GNUC__)
#define HELPER static inline __attribute__((always_inline))
#else
#define HELPER static inline
#endif

HELPER float as_float(uint32_t bits) { float value; memcpy(&value, &bits, sizeof value); return value; }
HELPER uint32_t as_bits(float value) { uint32_t bits; memcpy(&bits, &value, sizeof bits); return bits; }
HELPER uint64_t as_bits64(double value) { uint64_t bits; memcpy(&bits, &value, sizeof bits); return bits; }

/* Subnormal codes go through an integer conversion, so that no float subnormal slows the multiplier down. */
HELPER uint32_t widen_small(uint32_t code, int exponent_bits, int mantissa_bits, uint32_t first_special)
{
    int bias = (1 << (exponent_bits - 1)) - 1, shift = 23 - mantissa_bits;
    uint32_t sign = (code >> (exponent_bits + mantissa_bits)) << 31;
    uint32_t magnitude = code & ((1u << (exponent_bits + mantissa_bits)) - 1);
    uint32_t normal = (magnitude << shift) + ((uint32_t)(127 - bias) << 23);
    float ulp = as_float((uint32_t)(127 + 1 - bias - mantissa_bits) << 23);
    uint32_t subnormal = as_bits((float)(int32_t)magnitude * ulp);
    uint32_t special = (magnitude << shift) | 0x7f800000u;
    uint32_t finite = magnitude < (1u << mantissa_bits) ? subnormal : normal;
    return sign | (magnitude >= first_special ? special : finite);
}

/* Nearest even. `overflow` is the code that everything beyond the largest finite value becomes. */
HELPER uint32_t narrow_small(uint32_t bits, int exponent_bits, int mantissa_bits, uint32_t overflow, uint32_t nan)
{
    int bias = (1 << (exponent_bits - 1)) - 1, shift = 23 - mantissa_bits;
    uint32_t sign = (bits >> 31) << (exponent_bits + mantissa_bits);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t rebias = (uint32_t)(127 - bias) << 23;
    uint32_t half = (1u << (shift - 1)) - 1 + ((magnitude >> shift) & 1);
    uint32_t normal = (magnitude + half - rebias) >> shift;
    uint32_t anchor = (uint32_t)(127 + 1 - bias - mantissa_bits + 23) << 23;
    uint32_t subnormal = as_bits(as_float(magnitude) + as_float(anchor)) - anchor;
    uint32_t code = magnitude < rebias + (1u << 23) ? subnormal : (normal > overflow ? overflow : normal);
    return magnitude > 0x7f800000u ? nan : sign | code;
}

#define SMALL(NAME, TYPE, EXP, MAN, FIRST_SPECIAL, OVERFLOW_CODE, NAN_CODE)                                            \
    VECTOR static void widen_##NAME(const void *source, float *row, int n)                                            \
    {                                                                                                                  \
        const TYPE *codes = source;                                                                                    \
        for (int j = 0; j < n; j++) row[j] = as_float(widen_small(codes[j], EXP, MAN, FIRST_SPECIAL));                 \
    }                                                                                                                  \
    VECTOR static void narrow_##NAME(const float *row, void *target, int n)                                           \
    {                                                                                                                  \
        TYPE *codes = target;                                                                                          \
        for (int j = 0; j < n; j++) codes[j] = (TYPE)narrow_small(as_bits(row[j]), EXP, MAN, OVERFLOW_CODE, NAN_CODE); \
    }

SMALL(f16, uint16_t, 5, 10, 0x7c00u, 0x7c00u, 0x7e00u)
SMALL(f8_e5m2, uint8_t, 5, 2, 0x7cu, 0x7cu, 0x7eu)
/* E4M3 has no infinity: its one special code is a NaN, and that is what an overflow becomes. */
SMALL(f8_e4m3, uint8_t, 4, 3, 0x7fu, 0x7fu, 0x7fu)

VECTOR static void widen_bf16(const void *source, float *row, int n)
{
    const uint16_t *codes = source;
    for (int j = 0; j < n; j++) row[j] = as_float((uint32_t)codes[j] << 16);
}

VECTOR static void narrow_bf16(const float *row, void *target, int n)
{
    uint16_t *codes = target;
    for (int j = 0; j < n; j++) {
        uint32_t bits = as_bits(row[j]);
        uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
        codes[j] = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)rounded;
    }
}

VECTOR static void narrow_f32(float *row, int n)
{
    for (int j = 0; j < n; j++) row[j] = row[j] == row[j] ? row[j] : as_float(0x7fc00000u);
}

VECTOR static void narrow_f64(const double *row, void *target, int n)
{
    uint64_t *codes = target;
    for (int j = 0; j < n; j++) codes[j] = row[j] == row[j] ? as_bits64(row[j]) : 0x7ff8000000000000u;
}

/* A tensor may lie at any address; where it lies badly, it is copied to `room` first. */
HELPER const void *aligned(const char *source, void *room, size_t itemsize, int n)
{
    return (uintptr_t)source % itemsize == 0 ? source : memcpy(room, source, itemsize * (size_t)n);
}

static void load_row(enum dtype dtype, const char *source, float *row, int n)
{
    uint16_t codes[LANES];
    switch (dtype) {
    case F32: memcpy(row, source, 4 * (size_t)n); return;
    case F16: widen_f16(aligned(source, codes, 2, n), row, n); return;
    case BF16: widen_bf16(aligned(source, codes, 2, n), row, n); return;
    case F8_E4M3: widen_f8_e4m3(source, row, n); return;
    default: widen_f8_e5m2(source, row, n); return;
    }
}

/* Rounds the row to storage, and leaves in `row` the values that were stored. */
static void store_row(enum dtype dtype, float *row, char *target, int n)
{
    uint32_t codes[LANES];
    switch (dtype) {
    case F32: narrow_f32(row, n); memcpy(target, row, 4 * (size_t)n); return;
    case F16: narrow_f16(row, codes, n); break;
    case BF16: narrow_bf16(row, codes, n); break;
    case F8_E4M3: narrow_f8_e4m3(row, codes, n); break;
    default: narrow_f8_e5m2(row, codes, n); break;
    }
    memcpy(target, codes, (size_t)(ITEMSIZE[dtype] * n));
    load_row(dtype, (const char *)codes, row, n);
}


VECTOR static void row_nearest(const double *wide, float *row, int n)
{
    for (int j = 0; j < n; j++) row[j] = (float)wide[j];
}

/* Rounded to odd: what is inexact is cut off and gets an odd last place, so that the next rounding is as good as the
 * only one. */
VECTOR static void row_odd(const double *wide, float *row, int n)
{
    for (int j = 0; j < n; j++) {
        float nearest = (float)wide[j];
        uint32_t bits = as_bits(nearest);
        uint32_t cut = (bits - (uint32_t)(fabs((double)nearest) > fabs(wide[j]))) | 1;
        row[j] = as_float(nearest == wide[j] || wide[j] != wide[j] ? bits : cut);
    }
}

/* Rounds float64 values to storage once, and leaves in `row` those that were stored. Not for F64. */
static void store_wide32(enum dtype dtype, const double *wide, float *row, char *target, int n)
{
    if (dtype == F32) row_nearest(wide, row, n);
    else row_odd(wide, row, n);
    store_row(dtype, row, target, n);
}

#endif
