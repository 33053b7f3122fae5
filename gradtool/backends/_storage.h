/* Rows of stored codes to rows of numbers and back: the conversions of _codes.h in loops that compilers vectorize. */
#ifndef GRADTOOL_STORAGE_H
#define GRADTOOL_STORAGE_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "these kernels need float and double arithmetic without excess precision"
#endif

/* One build runs on every x86-64 machine and uses its widest vectors. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define VECTOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define HAS_FMA __builtin_cpu_supports("x86-64-v3")
#else
#define VECTOR
#endif

/* Whether fmaf is an instruction in VECTOR functions; elsewhere it is slow. */
#ifndef HAS_FMA
#ifdef __FP_FAST_FMAF
#define HAS_FMA 1
#else
#define HAS_FMA 0
#endif
#endif

/* Plain `inline` is not enough: GCC does not inline it into a clone for another processor. */
#if defined(__GNUC__)
#define HELPER static inline __attribute__((always_inline))
#else
#define HELPER static inline
#endif

/* A row on the stack begins at a cache line. Elsewhere its vectors cross lines, which costs up to a fifth of the speed. */
#define ALIGNED _Alignas(64)

#include "_codes.h"

static const int64_t ITEMSIZE[DTYPES] = {8, 4, 2, 2, 1, 1};

#define SMALL(NAME, TYPE)                                                                                              \
    VECTOR static void widen_##NAME(const void *source, float *row, int n)                                            \
    {                                                                                                                  \
        const TYPE *codes = source;                                                                                    \
        for (int j = 0; j < n; j++) row[j] = NAME##_to_float(codes[j]);                                                \
    }                                                                                                                  \
    VECTOR static void narrow_##NAME(const float *row, void *target, int n)                                           \
    {                                                                                                                  \
        TYPE *codes = target;                                                                                          \
        for (int j = 0; j < n; j++) codes[j] = float_to_##NAME(row[j]);                                                \
    }

SMALL(f16, uint16_t)
SMALL(bf16, uint16_t)
SMALL(f8_e4m3, uint8_t)
SMALL(f8_e5m2, uint8_t)

VECTOR static void narrow_f32(float *row, int n)
{
    for (int j = 0; j < n; j++) row[j] = as_float(float_to_f32(row[j]));
}

VECTOR static void narrow_f64(const double *row, void *target, int n)
{
    uint64_t *codes = target;
    for (int j = 0; j < n; j++) codes[j] = double_to_f64(row[j]);
}

/* A tensor can have any address; it is copied to `room` if it is not aligned. */
HELPER const void *aligned(const char *source, void *room, size_t itemsize, int n)
{
    return (uintptr_t)source % itemsize == 0 ? source : memcpy(room, source, itemsize * (size_t)n);
}

static void load_row(enum dtype dtype, const char *source, float *row, int n)
{
    ALIGNED uint16_t codes[LANES];
    switch (dtype) {
    case F32: memcpy(row, source, 4 * (size_t)n); return;
    case F16: widen_f16(aligned(source, codes, 2, n), row, n); return;
    case BF16: widen_bf16(aligned(source, codes, 2, n), row, n); return;
    case F8_E4M3: widen_f8_e4m3(source, row, n); return;
    default: widen_f8_e5m2(source, row, n); return;
    }
}

/* Rounds a row and stores it. */
static void put_row(enum dtype dtype, float *row, char *target, int n)
{
    ALIGNED uint32_t codes[LANES];
    switch (dtype) {
    case F32: narrow_f32(row, n); memcpy(target, row, 4 * (size_t)n); return;
    case F16: narrow_f16(row, codes, n); break;
    case BF16: narrow_bf16(row, codes, n); break;
    case F8_E4M3: narrow_f8_e4m3(row, codes, n); break;
    default: narrow_f8_e5m2(row, codes, n); break;
    }
    memcpy(target, codes, (size_t)(ITEMSIZE[dtype] * n));
}

/* Rounds a row, stores it, and sets it to the values that were stored. */
static void store_row(enum dtype dtype, float *row, char *target, int n)
{
    put_row(dtype, row, target, n);
    if (dtype != F32) load_row(dtype, target, row, n);
}

/* Rounds to odd: an inexact value is truncated and its last bit set, so that the next rounding gives what a single one
 * would; storage.py has the reference. */
HELPER float double_to_odd(double value)
{
    float nearest = (float)value;
    uint32_t bits = as_bits(nearest);
    uint32_t cut = (bits - (uint32_t)(fabs((double)nearest) > fabs(value))) | 1;
    return as_float(nearest == value || value != value ? bits : cut);
}

VECTOR static void row_nearest(const double *wide, float *row, int n)
{
    for (int j = 0; j < n; j++) row[j] = (float)wide[j];
}

VECTOR static void row_odd(const double *wide, float *row, int n)
{
    for (int j = 0; j < n; j++) row[j] = double_to_odd(wide[j]);
}

/* Rounds float64 values once, stores them, and sets `row` to the values that were stored. For all types but F64. */
static void store_wide32(enum dtype dtype, const double *wide, float *row, char *target, int n)
{
    if (dtype == F32) row_nearest(wide, row, n);
    else row_odd(wide, row, n);
    store_row(dtype, row, target, n);
}

/* A number rounded once to a storage type. */
static double round_to(enum dtype dtype, double value)
{
    float rounded;
    char room[sizeof rounded];
    if (dtype == F64) return value;
    store_wide32(dtype, &value, &rounded, room, 1);
    return rounded;
}

/* ---- products, rounded once ------------------------------------------------------------------------------------- */

/* Products rounded to odd. The product of two float32 is exact in float64. */
VECTOR static void row_scale_odd(float *row, float factor, int n)
{
    for (int j = 0; j < n; j++) row[j] = double_to_odd((double)row[j] * (double)factor);
}

/* Sets a row to its products with a factor, rounded once to the values of a type, if the largest magnitude, whose bits
 * it returns, is below the bound of the format. */
VECTOR static uint32_t row_round(float *row, float factor, struct format format, int n)
{
    uint32_t largest = 0;
    for (int j = 0; j < n; j++) {
        uint32_t magnitude = round_product(row[j], factor, format);
        largest = magnitude > largest ? magnitude : largest;
        row[j] = as_float(magnitude | sign_of(row[j] * factor));
    }
    return largest;
}

#endif
