/* The storage types, a value at a time; storage.py is the reference.
 *
 * Shared by the C and the CUDA kernels. HELPER, the declaration specifiers of a small function, is defined in _base.h for C,
 * and in _device.cuh for CUDA, which precedes this text in every module. */
#ifndef GRADTOOL_CODES_H
#define GRADTOOL_CODES_H

#ifndef HELPER
#include "_base.h"
#endif

enum { LANES = 2048, ROWS = 32, TILE = LANES * ROWS };
/* Row sums: lanes, and the columns whose lanes are folded into a value. */
enum { ROW_LANES = 32, CHUNK = 1024 };
enum term { MAXIMUM, ABSOLUTE, SQUARE };

/* The storage types, as storage.py has them: number, name, bits of a code, of its exponent and of its mantissa, and whether
 * it can be infinite. All else follows from this table. The 8-bit types must have values of F16, times a power of two. */
#define BYTE_TYPES(X) X(F8_E4M3, f8_e4m3, 8, 4, 3, 0) X(F8_E5M2, f8_e5m2, 8, 5, 2, 1)
#define SMALL_TYPES(X) X(F16, f16, 16, 5, 10, 1) X(BF16, bf16, 16, 8, 7, 1) BYTE_TYPES(X)
#define FLOAT_TYPES(X) X(F32, f32, 32, 8, 23, 1) SMALL_TYPES(X)
#define STORAGE_TYPES(X) X(F64, f64, 64, 11, 52, 1) FLOAT_TYPES(X)

#define NUMBER_OF(DTYPE, ...) DTYPE,
enum dtype { STORAGE_TYPES(NUMBER_OF) DTYPES };

HELPER float as_float(uint32_t bits) { float value; memcpy(&value, &bits, sizeof value); return value; }
HELPER double as_double(uint64_t bits) { double value; memcpy(&value, &bits, sizeof value); return value; }
HELPER uint32_t as_bits(float value) { uint32_t bits; memcpy(&bits, &value, sizeof bits); return bits; }
HELPER uint64_t as_bits64(double value) { uint64_t bits; memcpy(&bits, &value, sizeof bits); return bits; }

/* As is_in_range of reduction.py. */
HELPER int is_in_range(double sum) { return 0x1p-900 <= sum && sum <= 0x1p1000; }

/* The k of a finite magnitude m * 2^k above 0, with 1 <= m < 2. */
HELPER int exponent_of(double magnitude)
{
    int is_subnormal = as_bits64(magnitude) >> 52 == 0;
    uint64_t bits = as_bits64(is_subnormal ? magnitude * 0x1p52 : magnitude);
    return (int)(bits >> 52) - 1023 - (is_subnormal ? 52 : 0);
}

/* 2^k, of any k that a magnitude can have. */
HELPER double power_of_two(int exponent)
{
    return as_double(exponent < -1022 ? (uint64_t)1 << (exponent + 1074) : (uint64_t)(exponent + 1023) << 52);
}

HELPER int bias_of(int exponent_bits) { return (1 << (exponent_bits - 1)) - 1; }

/* The first code that is infinite or NaN, which is that of a value that overflows, too; and the quiet NaN. */
HELPER uint32_t overflow_of(int exponent_bits, int mantissa_bits, int has_infinity)
{
    return (1u << (exponent_bits + mantissa_bits)) - (has_infinity ? 1u << mantissa_bits : 1u);
}

HELPER uint32_t quiet_nan_of(int exponent_bits, int mantissa_bits, int has_infinity)
{
    return overflow_of(exponent_bits, mantissa_bits, has_infinity) + (has_infinity ? 1u << (mantissa_bits - 1) : 0);
}

/* Subnormal codes are converted as integers, because float subnormals make multiplication slow. With the exponents of
 * float32, a code is the upper part of a float32. */
HELPER uint32_t widen_small(uint32_t code, int exponent_bits, int mantissa_bits, int has_infinity)
{
    int bias = bias_of(exponent_bits), shift = 23 - mantissa_bits;
    if (exponent_bits == 8) return code << shift;
    uint32_t sign = (code >> (exponent_bits + mantissa_bits)) << 31;
    uint32_t magnitude = code & ((1u << (exponent_bits + mantissa_bits)) - 1);
    uint32_t normal = (magnitude << shift) + ((uint32_t)(127 - bias) << 23);
    float ulp = as_float((uint32_t)(127 + 1 - bias - mantissa_bits) << 23);
    uint32_t subnormal = as_bits((float)(int32_t)magnitude * ulp);
    uint32_t special = (magnitude << shift) | 0x7f800000u;
    uint32_t finite = magnitude < (1u << mantissa_bits) ? subnormal : normal;
    return sign | (magnitude >= overflow_of(exponent_bits, mantissa_bits, has_infinity) ? special : finite);
}

/* Rounds to nearest even. */
HELPER uint32_t narrow_small(uint32_t bits, int exponent_bits, int mantissa_bits, int has_infinity)
{
    int bias = bias_of(exponent_bits), shift = 23 - mantissa_bits;
    uint32_t overflow = overflow_of(exponent_bits, mantissa_bits, has_infinity);
    uint32_t nan = quiet_nan_of(exponent_bits, mantissa_bits, has_infinity);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half = (1u << (shift - 1)) - 1 + ((bits >> shift) & 1);
    if (exponent_bits == 8) return magnitude > 0x7f800000u ? nan : (bits + half) >> shift;
    uint32_t sign = (bits >> 31) << (exponent_bits + mantissa_bits);
    uint32_t rebias = (uint32_t)(127 - bias) << 23;
    uint32_t normal = (magnitude + half - rebias) >> shift;
    uint32_t anchor = (uint32_t)(127 + 1 - bias - mantissa_bits + 23) << 23;
    uint32_t subnormal = as_bits(as_float(magnitude) + as_float(anchor)) - anchor;
    uint32_t code = magnitude < rebias + (1u << 23) ? subnormal : (normal > overflow ? overflow : normal);
    /* Where nothing is infinite, a value that overflows is NaN, too. */
    int is_nan = has_infinity ? magnitude > 0x7f800000u : code == nan;
    return is_nan ? nan : sign | code;
}

#define CONVERSIONS(DTYPE, NAME, BITS, ...)                                                                            \
    HELPER float NAME##_to_float(uint32_t code) { return as_float(widen_small(code, __VA_ARGS__)); }                   \
    HELPER uint##BITS##_t float_to_##NAME(float value)                                                                 \
    {                                                                                                                  \
        return (uint##BITS##_t)narrow_small(as_bits(value), __VA_ARGS__);                                              \
    }

SMALL_TYPES(CONVERSIONS)
HELPER float f32_to_float(uint32_t code) { return as_float(code); }

/* As bits of float32: a type's smallest normal value; k in the exponent, k being by how many bits its mantissa is shorter;
 * and the magnitude from which round_product is no longer right, because the value or the anchor overflows. */
struct format { uint32_t lowest, spare, bound; };

HELPER struct format format_from(int exponent_bits, int mantissa_bits, int has_infinity)
{
    uint32_t rebias = (uint32_t)(127 - bias_of(exponent_bits)) << 23, shift = (uint32_t)(23 - mantissa_bits);
    uint32_t overflow = (overflow_of(exponent_bits, mantissa_bits, has_infinity) << shift) + rebias;
    uint32_t highest = (255 - shift) << 23;
    struct format format = {rebias + (1u << 23), shift << 23, overflow < highest ? overflow : highest};
    return format;
}

/* Of any type but F64. */
HELPER struct format format_of(enum dtype dtype)
{
#define FORMAT_OF(DTYPE, NAME, BITS, ...) if (dtype == DTYPE) return format_from(__VA_ARGS__);
    SMALL_TYPES(FORMAT_OF)
    return format_from(8, 23, 1);
}

/* The smallest normal value of a type. */
HELPER double normal_of(enum dtype dtype) { return dtype == F64 ? 0x1p-1022 : (double)as_float(format_of(dtype).lowest); }

HELPER uint32_t sign_of(float value) { return as_bits(value) & 0x80000000u; }

/* The magnitude, in bits, of the product of two numbers rounded once to the values of a type, if it is below the bound.
 *
 * The anchor is a power of two, 2^k times the product's, or times the smallest normal value if that is larger. The unit
 * in the last place of anchor + product is that of the type, and fmaf rounds this sum once. */
HELPER uint32_t round_product(float value, float factor, struct format format)
{
    uint32_t exponent = as_bits(value * factor) & 0x7f800000u;
    float anchor = as_float((exponent > format.lowest ? exponent : format.lowest) + format.spare);
    return as_bits(fmaf(fabsf(value), fabsf(factor), anchor) - anchor);
}

/* The code of a value that needs no rounding; every NaN becomes the quiet NaN. */
HELPER uint32_t float_to_f32(float value) { return value == value ? as_bits(value) : 0x7fc00000u; }
HELPER uint64_t double_to_f64(double value) { return value == value ? as_bits64(value) : 0x7ff8000000000000u; }

#endif
