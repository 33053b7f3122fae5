/* F16 by the processor's own conversions where it has them, and 8-bit types by way of F16; all are exact. */
#ifndef GRADTOOL_HALF_H
#define GRADTOOL_HALF_H

#include "_codes.h"

#define BYTES_OF(DTYPE, NAME, BITS, ...) BITS / 8,
static const int64_t ITEMSIZE[DTYPES] = {STORAGE_TYPES(BYTES_OF)};

#if defined(__F16C__)
#include <immintrin.h>

/* One instruction that narrows and stores takes up to twice as long (Zen 5) as the two that the empty assembly keeps
 * apart. Rounding is to nearest even. */
#if defined(HAS_512)
enum { STEP = 16 };
HELPER void widen_step(const char *source, float *row)
{
    _mm512_storeu_ps(row, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)source)));
}
HELPER void narrow_step(const float *row, char *target)
{
    __m256i halves = _mm512_cvtps_ph(_mm512_loadu_ps(row), _MM_FROUND_TO_NEAREST_INT);
    __asm__("" : "+x"(halves));
    _mm256_storeu_si256((__m256i *)target, halves);
}
#else
enum { STEP = 8 };
HELPER void widen_step(const char *source, float *row)
{
    _mm256_storeu_ps(row, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)source)));
}
HELPER void narrow_step(const float *row, char *target)
{
    __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(row), _MM_FROUND_TO_NEAREST_INT);
    __asm__("" : "+x"(halves));
    _mm_storeu_si128((__m128i *)target, halves);
}
#endif

#elif defined(__aarch64__) && defined(__ARM_FP16_FORMAT_IEEE)

enum { STEP = 1 };
HELPER void widen_step(const char *source, float *row)
{
    __fp16 half;
    memcpy(&half, source, sizeof half);
    *row = (float)half;
}
HELPER void narrow_step(const float *row, char *target)
{
    __fp16 half = (__fp16)*row;
    memcpy(target, &half, sizeof half);
}

#else

enum { STEP = 1 };
HELPER void widen_step(const char *source, float *row) { *row = f16_to_float(load16(source)); }
HELPER void narrow_step(const float *row, char *target) { store16(target, float_to_f16(*row)); }

#endif

HELPER void widen_f16(const char *restrict source, float *restrict row, int n)
{
    int64_t j = 0;
    for (; j <= n - STEP; j += STEP) widen_step(source + 2 * j, row + j);
    for (; STEP > 1 && j < n; j++) row[j] = f16_to_float(load16(source + 2 * j));
}

static void narrow_f16(const float *restrict row, char *restrict target, int n)
{
    int64_t j = 0;
    for (; j <= n - STEP; j += STEP) narrow_step(row + j, target + 2 * j);
    for (; STEP > 1 && j < n; j++) store16(target + 2 * j, float_to_f16(row[j]));
    /* Processors keep the sign and the upper bits of a NaN. */
    for (j = 0; j < n; j++) {
        uint16_t code = load16(target + 2 * j);
        store16(target + 2 * j, (code & 0x7fffu) > 0x7c00u ? 0x7e00u : code);
    }
}

/* k, where a value of an 8-bit type is 2^k times the value of its F16 code: the difference of the biases. */
#define HALVES_EXPONENT(EXPONENT) (15 - ((1 << (EXPONENT - 1)) - 1))

HELPER int halves_exponent(enum dtype dtype)
{
#define HALVES_EXPONENT_OF(DTYPE, NAME, BITS, EXPONENT, ...) if (dtype == DTYPE) return HALVES_EXPONENT(EXPONENT);
    BYTE_TYPES(HALVES_EXPONENT_OF)
    return 0;
}

/* Codes of an 8-bit type as those of F16, which has another bias; and back, for values of the type. */
#define HALVES(DTYPE, NAME, BITS, EXPONENT, MANTISSA, HAS_INFINITY)                                                    \
    static void NAME##_to_halves(const char *restrict source, char *restrict halves, int n)                            \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            uint16_t code = load8(source + j), magnitude = code & 0x7fu;                                               \
            uint16_t half = (uint16_t)(magnitude << (10 - MANTISSA));                                                  \
            if (EXPONENT < 5 && magnitude >= overflow_of(EXPONENT, MANTISSA, HAS_INFINITY))                            \
                half = HAS_INFINITY ? half | 0x7c00u : 0x7e00u;                                                        \
            store16(halves + 2 * j, (uint16_t)((code & 0x80u) << 8 | half));                                           \
        }                                                                                                              \
    }                                                                                                                  \
    static void halves_to_##NAME(const char *restrict halves, char *restrict target, int n)                            \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            uint16_t half = load16(halves + 2 * j);                                                                    \
            store8(target + j, (uint8_t)((half >> 8 & 0x80u) | (half >> (10 - MANTISSA) & 0x7fu)));                    \
        }                                                                                                              \
    }                                                                                                                  \
    static void widen_##NAME(const char *restrict source, float *restrict row, int n)                                  \
    {                                                                                                                  \
        ALIGNED char halves[2 * LANES];                                                                                \
        NAME##_to_halves(source, halves, n);                                                                           \
        widen_f16(halves, row, n);                                                                                     \
        for (int64_t j = 0; j < n && HALVES_EXPONENT(EXPONENT); j++) row[j] *= 1 << HALVES_EXPONENT(EXPONENT);         \
    }

BYTE_TYPES(HALVES)

/* Loops over 16-bit codes take whole groups of them, so that none is left over after the last step or word. */
enum { GROUP = 16 };

HELPER int whole_groups(int n) { return (n + GROUP - 1) / GROUP * GROUP; }

/* The 16-bit codes of a row, those of an 8-bit type as F16: where they are, or, followed by zeros up to a whole group,
 * in the room. */
static const char *load_codes(enum dtype dtype, const char *source, char *room, int n)
{
    int whole = whole_groups(n);
    switch (dtype) {
#define TO_HALVES(DTYPE, NAME, ...) case DTYPE: NAME##_to_halves(source, room, n); break;
    BYTE_TYPES(TO_HALVES)
    default:
        if (whole == n) return source;
        memcpy(room, source, 2 * (size_t)n);
    }
    memset(room + 2 * n, 0, 2 * (size_t)(whole - n));
    return room;
}

/* Stores codes that load_codes has returned. */
static void store_codes(enum dtype dtype, const char *codes, char *target, int n)
{
    switch (dtype) {
#define FROM_HALVES(DTYPE, NAME, ...) case DTYPE: halves_to_##NAME(codes, target, n); return;
    BYTE_TYPES(FROM_HALVES)
    default:
        if (codes != target) memcpy(target, codes, 2 * (size_t)n);
    }
}

#endif
