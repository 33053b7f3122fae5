/* Rows multiplied by a factor, clamped and stored in place; each value is rounded once. */
#ifndef GRADTOOL_SCALING_H
#define GRADTOOL_SCALING_H

#include "_terms.h"

/* `wide`, unless NULL, are the float64 values to write, piece after piece. `losses` are added to: how many
 * values become 0, and how many more are subnormal. */
struct job { enum term term; int writes, drops; double factor, limit; const double *wide; int64_t *losses; };

/* A limit that is infinite, or NaN, clamps nothing. */
#define STORED_ROWS(BITS, REAL, FABS, VALUE, CODE)                                                                     \
    static void drop##BITS(char *data, int n)                                                                          \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            REAL value = VALUE(load##BITS(data + BITS / 8 * j));                                                       \
            store##BITS(data + BITS / 8 * j, CODE(FABS(value) < (REAL)INFINITY ? value : 0));                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void scale##BITS(char *data, REAL factor, REAL limit, int n)                                                \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            REAL value = VALUE(load##BITS(data + BITS / 8 * j)) * factor;                                              \
            value = value < -limit ? -limit : value;                                                                   \
            store##BITS(data + BITS / 8 * j, CODE(value > limit ? limit : value));                                     \
        }                                                                                                              \
    }

STORED_ROWS(32, float, fabsf, as_float, float_to_f32)
STORED_ROWS(64, double, fabs, as_double, double_to_f64)

/* The bits of a product, rounded once and clamped. */
HELPER uint32_t scale_value(float value, float factor, uint32_t limit, struct format format)
{
    uint32_t magnitude = round_product(value, factor, format);
    return (magnitude < limit ? magnitude : limit) | sign_of(value * factor);
}

/* Sets NaN and Inf to zero. */
static void drop_codes(char *codes, uint16_t infinity, int n)
{
    for (int64_t j = 0; j < n; j++) {
        uint16_t code = load16(codes + 2 * j);
        store16(codes + 2 * j, (code & 0x7fffu) < infinity ? code : 0);
    }
}

/* Multiplies and clamps words of two BF16 values. */
static void scale_words(char *codes, float factor, uint32_t limit, struct format format, int words)
{
    for (int64_t j = 0; j < words; j++) {
        uint32_t word = load32(codes + 4 * j);
        uint32_t lower = scale_value(as_float(word << 16), factor, limit, format);
        uint32_t upper = scale_value(as_float(word & 0xffff0000u), factor, limit, format);
        store32(codes + 4 * j, lower >> 16 | upper);
    }
}

/* The same of F16 codes, as load_codes has them. */
static void scale_halves(char *codes, float factor, uint32_t limit, struct format format, int n)
{
    for (int64_t j = 0; j < n; j += STEP) {
        float x[STEP];
        widen_step(codes + 2 * j, x);
/* A loop that is unrolled is not vectorized. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC unroll 1
#endif
        for (int k = 0; k < STEP; k++) x[k] = as_float(scale_value(x[k], factor, limit, format));
        narrow_step(x, codes + 2 * j);
    }
}

/* Scales a row of a type of 16 bits or fewer, if its largest product is below the bound of the format; returns whether
 * it did. */
static int scale_codes(struct job job, enum dtype dtype, char *data, int n)
{
    ALIGNED char room[2 * LANES];
    struct seen seen = {0, 0};
    struct format format = format_of(dtype);
    float factor = (float)job.factor, limit = (float)job.limit;
    if (!HAS_FMA) return 0;
    /* They are in the row itself or in the room. */
    char *codes = (char *)load_codes(dtype, data, room, n);
    uint32_t exponent = (uint32_t)halves_exponent(dtype);
    format.lowest -= exponent << 23, format.bound -= exponent << 23, limit /= (float)(1u << exponent);
    if (job.drops) drop_codes(codes, dtype == BF16 ? 0x7f80u : 0x7c00u, whole_groups(n));
    look(codes, &seen, whole_groups(n));
    float largest = dtype == BF16 ? bf16_to_float((uint32_t)seen.largest) : f16_to_float((uint32_t)seen.largest);
    if (round_product(largest, factor, format) >= format.bound) return 0;
    if (dtype == BF16) scale_words(codes, factor, as_bits(limit), format, whole_groups(n) / 2);
    else scale_halves(codes, factor, as_bits(limit), format, whole_groups(n));
    store_codes(dtype, codes, data, n);
    return 1;
}

/* The same of any row, more slowly. */
static void scale_any_codes(struct job job, enum dtype dtype, char *data, int n)
{
    ALIGNED float row[LANES];
    load_row(dtype, data, row, n);
    if (job.drops) drop32((char *)row, n);
    row_scale_odd(row, (float)job.factor, n);
    scale32((char *)row, 1, (float)job.limit, n); /* clamps only */
    store_row(dtype, row, data, n);
}

static void scale_row(struct job job, enum dtype dtype, char *data, int n)
{
    if (job.drops && dtype == F64) drop64(data, n);
    if (job.drops && dtype == F32) drop32(data, n);
    if (dtype == F64) scale64(data, job.factor, job.limit, n);
    else if (dtype == F32) scale32(data, (float)job.factor, (float)job.limit, n);
    else if (!scale_codes(job, dtype, data, n)) scale_any_codes(job, dtype, data, n);
}

#endif
