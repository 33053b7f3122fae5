/* F16 rows by the processor's own conversions where it has them, and 8-bit rows by way of F16; all are exact. */
#ifndef GRADTOOL_HALF_H
#define GRADTOOL_HALF_H

#if defined(__F16C__)
#include <immintrin.h>

enum { STEP = 8 };
HELPER void widen_step(const char *source, float *row)
{
    _mm256_storeu_ps(row, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)source)));
}
HELPER void narrow_step(const float *row, char *target)
{
    __m256 values = _mm256_loadu_ps(row), nan = _mm256_set1_ps(as_float(0x7fc00000u));
    values = _mm256_blendv_ps(values, nan, _mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    _mm_storeu_si128((__m128i *)target, _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
#define HAS_HALF

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
    store16(target, *row == *row ? load16((const char *)&half) : 0x7e00u);
}
#define HAS_HALF

#endif

#ifdef HAS_HALF
static void widen_f16(const char *restrict source, float *restrict row, int n)
{
    int j = 0;
    for (; j <= n - STEP; j += STEP) widen_step(source + 2 * j, row + j);
    for (; j < n; j++) row[j] = f16_to_float(load16(source + 2 * j));
}

static void narrow_f16(const float *restrict row, char *restrict target, int n)
{
    int j = 0;
    for (; j <= n - STEP; j += STEP) narrow_step(row + j, target + 2 * j);
    for (; j < n; j++) store16(target + 2 * j, float_to_f16(row[j]));
}

/* The upper half of an F16 code. */
static void widen_f8_e5m2(const char *restrict source, float *restrict row, int n)
{
    ALIGNED char halves[2 * LANES];
    for (int64_t j = 0; j < n; j++) store16(halves + 2 * j, (uint16_t)(load8(source + j) << 8));
    widen_f16(halves, row, n);
}

/* An F16 code with an exponent that is 8 too small. */
static void widen_f8_e4m3(const char *restrict source, float *restrict row, int n)
{
    ALIGNED char halves[2 * LANES];
    for (int64_t j = 0; j < n; j++) {
        uint16_t code = load8(source + j), magnitude = code & 0x7fu;
        uint16_t half = magnitude == 0x7fu ? 0x7e00u : (uint16_t)(magnitude << 7);
        store16(halves + 2 * j, (uint16_t)((code & 0x80u) << 8 | half));
    }
    widen_f16(halves, row, n);
    for (int64_t j = 0; j < n; j++) row[j] *= 256;
}
#endif

#endif
