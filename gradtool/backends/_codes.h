/* The storage types, one value at a time; storage.py is the plain twin.
 *
 * Shared by the C and the CUDA kernels, which declare the integer types and memcpy first, and define HELPER as the
 * declaration specifiers of a small function. */
#ifndef GRADTOOL_CODES_H
#define GRADTOOL_CODES_H

enum { LANES = 2048, ROWS = 32, TILE = LANES * ROWS };
/* Row sums: lanes, and the columns whose lanes are folded into one value. */
enum { ROW_LANES = 32, CHUNK = 1024 };
enum dtype { F64, F32, F16, BF16, F8_E4M3, F8_E5M2, DTYPES };
enum term { MAXIMUM, ABSOLUTE, SQUARE };

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

/* Subnormal codes are converted as integers, because float subnormals make multiplication slow. */
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

/* Rounds to nearest even. `overflow` is the code of a value that overflows the type. */
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
    /* Where nothing is infinite, a value that overflows is NaN, too. */
    int is_nan = overflow == nan ? code == nan : magnitude > 0x7f800000u;
    return is_nan ? nan : sign | code;
}

HELPER float f32_to_float(uint32_t code) { return as_float(code); }
HELPER float f16_to_float(uint32_t code) { return as_float(widen_small(code, 5, 10, 0x7c00u)); }
HELPER float bf16_to_float(uint32_t code) { return as_float(code << 16); }
/* E4M3 has no infinity: a value that overflows becomes NaN. */
HELPER float f8_e4m3_to_float(uint32_t code) { return as_float(widen_small(code, 4, 3, 0x7fu)); }
HELPER float f8_e5m2_to_float(uint32_t code) { return as_float(widen_small(code, 5, 2, 0x7cu)); }

HELPER uint16_t float_to_f16(float value) { return (uint16_t)narrow_small(as_bits(value), 5, 10, 0x7c00u, 0x7e00u); }
HELPER uint8_t float_to_f8_e4m3(float value) { return (uint8_t)narrow_small(as_bits(value), 4, 3, 0x7fu, 0x7fu); }
HELPER uint8_t float_to_f8_e5m2(float value) { return (uint8_t)narrow_small(as_bits(value), 5, 2, 0x7cu, 0x7eu); }

HELPER uint16_t float_to_bf16(float value)
{
    uint32_t bits = as_bits(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)rounded;
}

/* Of a type of 16 bits or fewer, as bits of float32: its smallest normal value; k in the exponent, k being by how many
 * bits its mantissa is shorter; and the magnitude from which round_product is no longer right. */
struct format { uint32_t lowest, spare, bound; };

HELPER struct format format_of(enum dtype dtype)
{
    struct format f16 = {113u << 23, 13u << 23, 0x47800000u}, bf16 = {1u << 23, 16u << 23, 0x77800000u};
    struct format f8_e4m3 = {121u << 23, 20u << 23, 0x43f00000u}, f8_e5m2 = {113u << 23, 21u << 23, 0x47800000u};
    return dtype == F16 ? f16 : dtype == BF16 ? bf16 : dtype == F8_E4M3 ? f8_e4m3 : f8_e5m2;
}

/* The smallest normal value of a type. */
HELPER double normal_of(enum dtype dtype)
{
    return dtype == F64 ? 0x1p-1022 : dtype == F32 ? 0x1p-126 : (double)as_float(format_of(dtype).lowest);
}

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

/* The code of a value that needs no rounding; every NaN becomes the quiet one. */
HELPER uint32_t float_to_f32(float value) { return value == value ? as_bits(value) : 0x7fc00000u; }
HELPER uint64_t double_to_f64(double value) { return value == value ? as_bits64(value) : 0x7ff8000000000000u; }

#endif
