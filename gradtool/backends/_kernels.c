/* The canonical sums and the elementwise kernels of the CPU backend, compiled.
 *
 * Every function here has a plain numpy twin in cpu.py that defines the bits; this file exists because the twin takes
 * several passes over memory where one will do. It must never differ from it: products and sums are separate roundings
 * (-ffp-contract=off), lanes are added in order, and a written NaN is the one quiet NaN of its type.
 *
 * A tile is worked on a row of 2,048 elements at a time: the row is widened into a buffer that stays in the L1 cache,
 * and the loops over that buffer are simple enough for the compiler to turn into vector code.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
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

/* ---- storage types: a code of EXP exponent and MAN mantissa bits below the sign --------------------------------- */

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

/* ---- one row ---------------------------------------------------------------------------------------------------- */

struct stats { double max_abs; int64_t nan, inf, zeros, first; };

/* The largest magnitude leaves NaN out, so that it still says something about the tensor. */
VECTOR static void row_stats32(const float *row, int n, struct stats *stats)
{
    uint32_t largest = 0, nan = 0, inf = 0, zeros = 0;
    for (int j = 0; j < n; j++) {
        uint32_t magnitude = as_bits(row[j]) & 0x7fffffffu;
        uint32_t number = -(uint32_t)(magnitude <= 0x7f800000u), kept = magnitude & number;
        nan += 1 + number;
        inf += magnitude == 0x7f800000u;
        zeros += magnitude == 0;
        largest = kept > largest ? kept : largest;
    }
    double max_abs = as_float(largest);
    if (max_abs > stats->max_abs) stats->max_abs = max_abs;
    stats->nan += nan, stats->inf += inf, stats->zeros += zeros;
}

VECTOR static void row_stats64(const double *row, int n, struct stats *stats)
{
    uint64_t largest = 0, nan = 0, inf = 0, zeros = 0, limit = 0x7ff0000000000000u;
    for (int j = 0; j < n; j++) {
        uint64_t magnitude = as_bits64(row[j]) & 0x7fffffffffffffffu;
        uint64_t number = -(uint64_t)(magnitude <= limit), kept = magnitude & number;
        nan += 1 + number;
        inf += magnitude == limit;
        zeros += magnitude == 0;
        largest = kept > largest ? kept : largest;
    }
    double max_abs;
    memcpy(&max_abs, &largest, sizeof max_abs);
    if (max_abs > stats->max_abs) stats->max_abs = max_abs;
    stats->nan += (int64_t)nan, stats->inf += (int64_t)inf, stats->zeros += (int64_t)zeros;
}

#define ROW_LOOPS(BITS, REAL, FABS)                                                                                    \
    VECTOR static void row_squares##BITS(const REAL *row, double *lanes, int n)                                       \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) lanes[j] += (double)row[j] * (double)row[j];                                       \
    }                                                                                                                  \
    VECTOR static void row_absolutes##BITS(const REAL *row, double *lanes, int n)                                     \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) lanes[j] += (double)FABS(row[j]);                                                  \
    }                                                                                                                  \
    VECTOR static void row_scale##BITS(REAL *row, REAL factor, int n)                                                 \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) row[j] *= factor;                                                                  \
    }                                                                                                                  \
    VECTOR static void row_drop##BITS(REAL *row, int n)                                                                \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) row[j] = FABS(row[j]) < (REAL)INFINITY ? row[j] : 0;                               \
    }                                                                                                                  \
    VECTOR static void row_clamp##BITS(REAL *row, REAL limit, int n)                                                  \
    {                                                                                                                  \
        for (int j = 0; j < n; j++) {                                                                                  \
            REAL low = row[j] < -limit ? -limit : row[j];                                                              \
            row[j] = low > limit ? limit : low;                                                                        \
        }                                                                                                              \
    }

ROW_LOOPS(32, float, fabsf)
ROW_LOOPS(64, double, fabs)

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

VECTOR static void row_add32(double *restrict sums, const float *restrict row, double weight, int n)
{
    for (int j = 0; j < n; j++) sums[j] += weight * (double)row[j];
}

VECTOR static void row_add64(double *restrict sums, const double *restrict row, double weight, int n)
{
    for (int j = 0; j < n; j++) sums[j] += weight * row[j];
}

VECTOR static void row_put32(double *restrict sums, const float *restrict row, double weight, int n)
{
    for (int j = 0; j < n; j++) sums[j] = weight * (double)row[j];
}

VECTOR static void row_put64(double *restrict sums, const double *restrict row, double weight, int n)
{
    for (int j = 0; j < n; j++) sums[j] = weight * row[j];
}

static void row_add(double *sums, enum dtype dtype, const char *source, double weight, int n, int fresh)
{
    double room[LANES];
    if (dtype == F64) {
        const double *row = aligned(source, room, 8, n);
        (fresh ? row_put64 : row_add64)(sums, row, weight, n);
    } else {
        const float *row = (const float *)room;
        if (dtype == F32) row = aligned(source, room, 4, n);
        else load_row(dtype, source, (float *)room, n);
        (fresh ? row_put32 : row_add32)(sums, row, weight, n);
    }
}

/* ---- one tile --------------------------------------------------------------------------------------------------- */

/* With `wide`, what is written comes from there, float64 values that run on from piece to piece. */
struct job { enum term term; int writes, drops; double factor, limit; const double *wide; };

/* What is dropped is counted first, and then takes part as a zero. */
#define ROW(BITS)                                                                                                      \
    do {                                                                                                               \
        if (job.drops) {                                                                                               \
            struct stats raw = {0, 0, 0, 0, -1};                                                                       \
            row_stats##BITS(row, n, &raw);                                                                             \
            row_drop##BITS(row, n);                                                                                    \
            stats->nan += raw.nan, stats->inf += raw.inf;                                                              \
        }                                                                                                              \
        row_stats##BITS(row, n, stats);                                                                                \
        if (job.term == SQUARE) row_squares##BITS(row, lanes, n);                                                      \
        if (job.term == ABSOLUTE) row_absolutes##BITS(row, lanes, n);                                                  \
    } while (0)

static void row32(struct job job, enum dtype dtype, char *data, int n, double *lanes, struct stats *stats)
{
    float row[LANES];
    if (job.wide) {
        if (dtype == F32) row_nearest(job.wide, row, n);
        else row_odd(job.wide, row, n);
        store_row(dtype, row, data, n);
    } else {
        load_row(dtype, data, row, n);
    }
    if (job.writes) {
        if (job.drops) row_drop32(row, n);
        row_scale32(row, (float)job.factor, n);
        if (job.limit < INFINITY) row_clamp32(row, (float)job.limit, n);
        store_row(dtype, row, data, n);
    }
    ROW(32);
}

static void row64(struct job job, char *data, int n, double *lanes, struct stats *stats)
{
    double row[LANES];
    if (job.wide) {
        uint64_t codes[LANES];
        narrow_f64(job.wide, codes, n);
        memcpy(data, codes, 8 * (size_t)n);
    }
    memcpy(row, data, 8 * (size_t)n);
    if (job.writes) {
        uint64_t codes[LANES];
        if (job.drops) row_drop64(row, n);
        row_scale64(row, job.factor, n);
        if (job.limit < INFINITY) row_clamp64(row, job.limit, n);
        narrow_f64(row, codes, n);
        memcpy(data, codes, 8 * (size_t)n);
        memcpy(row, codes, 8 * (size_t)n);
    }
    ROW(64);
}

/* Lanes that hold no element are +0 and change nothing, so a short tensor folds only the lanes it has. */
static double fold(double *lanes, int64_t used)
{
    int width = LANES;
    while (width / 2 >= used && width > 1) width /= 2;
    for (; width > 1; width /= 2)
        for (int j = 0; j < width / 2; j++) lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
    return lanes[0];
}

static double tile(struct job job, enum dtype dtype, char *data, int64_t elements, struct stats *stats)
{
    double lanes[LANES];
    memset(lanes, 0, sizeof lanes);
    for (int64_t start = 0; start < elements; start += LANES) {
        int n = (int)(elements - start < LANES ? elements - start : LANES);
        char *row = data + start * ITEMSIZE[dtype];
        if (dtype == F64) row64(job, row, n, lanes, stats);
        else row32(job, dtype, row, n, lanes, stats);
        if (job.wide) job.wide += n;
    }
    return fold(lanes, elements);
}

/* Only looked for in a piece that is known to hold one, so its cost does not matter. */
static int64_t first_nonfinite(enum dtype dtype, const char *data, int64_t elements)
{
    for (int64_t i = 0; i < elements; i++) {
        const char *at = data + i * ITEMSIZE[dtype];
        double value;
        if (dtype == F64) memcpy(&value, at, sizeof value);
        else { float wide; load_row(dtype, at, &wide, 1); value = wide; }
        if (!isfinite(value)) return i;
    }
    return -1;
}

/* ---- layer norm: float64 throughout, a chunk of a row at a time --------------------------------------------------- */

enum { ROW_LANES = 32, CHUNK = 1024 };

struct patch {
    int64_t rows, columns;
    enum dtype x_dtype, y_grad_dtype;
    const char *x, *y_grad;
    const double *mean, *inv_std_dev, *scale, *bias;
};

VECTOR static void row_widen(const float *restrict row, double *restrict wide, int n)
{
    for (int j = 0; j < n; j++) wide[j] = (double)row[j];
}

static void load_wide(enum dtype dtype, const char *source, double *wide, int n)
{
    float row[LANES];
    if (dtype == F64) { memcpy(wide, source, 8 * (size_t)n); return; }
    load_row(dtype, source, row, n);
    row_widen(row, wide, n);
}

VECTOR static void row_normalize(double *x, double mean, double inv_std_dev, int n)
{
    for (int j = 0; j < n; j++) x[j] = (x[j] - mean) * inv_std_dev;
}

VECTOR static void row_invert(double *restrict y, const double *restrict bias, const double *restrict scale, int n)
{
    for (int j = 0; j < n; j++) y[j] = (y[j] - bias[j]) / scale[j];
}

/* The normalized input and the gradient of a chunk of a row. */
static void load_chunk(const struct patch *patch, int64_t row, int64_t column, int n, double *xh, double *y_grad)
{
    int64_t at = row * patch->columns + column;
    load_wide(patch->x_dtype, patch->x + at * ITEMSIZE[patch->x_dtype], xh, n);
    load_wide(patch->y_grad_dtype, patch->y_grad + at * ITEMSIZE[patch->y_grad_dtype], y_grad, n);
    if (patch->bias) row_invert(xh, patch->bias + column, patch->scale + column, n);
    else row_normalize(xh, patch->mean[row], patch->inv_std_dev[row], n);
}

VECTOR static void lanes_add(double *restrict lanes, const double *restrict x, int n)
{
    int whole = n / ROW_LANES * ROW_LANES;
    for (int j = 0; j < whole; j += ROW_LANES)
        for (int lane = 0; lane < ROW_LANES; lane++) lanes[lane] += x[j + lane];
    for (int j = whole; j < n; j++) lanes[j - whole] += x[j];
}

VECTOR static void row_center_square(double *x, double center, int n)
{
    for (int j = 0; j < n; j++) { double away = x[j] - center; x[j] = away * away; }
}

/* y_grad becomes y_grad·scale, and xh that times xh. */
VECTOR static void row_weigh(double *restrict xh, double *restrict y_grad, const double *restrict scale, int n)
{
    for (int j = 0; j < n; j++) { y_grad[j] *= scale[j]; xh[j] = y_grad[j] * xh[j]; }
}

static double fold_lanes(double *lanes)
{
    for (int width = ROW_LANES; width > 1; width /= 2)
        for (int j = 0; j < width / 2; j++) lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
    return lanes[0];
}

static int chunk_of(int64_t columns, int64_t column)
{
    return (int)(columns - column < CHUNK ? columns - column : CHUNK);
}

static void sum_rows(const struct patch *patch, const double *center, double *sums)
{
    for (int64_t row = 0; row < patch->rows; row++) {
        double lanes[ROW_LANES] = {0}, x[CHUNK];
        for (int64_t column = 0; column < patch->columns; column += CHUNK) {
            int n = chunk_of(patch->columns, column);
            load_wide(patch->x_dtype, patch->x + (row * patch->columns + column) * ITEMSIZE[patch->x_dtype], x, n);
            if (center) row_center_square(x, center[row], n);
            lanes_add(lanes, x, n);
        }
        sums[row] = fold_lanes(lanes);
    }
}

static void sum_gradients(const struct patch *patch, double *weighted, double *projected)
{
    for (int64_t row = 0; row < patch->rows; row++) {
        double first[ROW_LANES] = {0}, second[ROW_LANES] = {0}, xh[CHUNK], y_grad[CHUNK];
        for (int64_t column = 0; column < patch->columns; column += CHUNK) {
            int n = chunk_of(patch->columns, column);
            load_chunk(patch, row, column, n, xh, y_grad);
            row_weigh(xh, y_grad, patch->scale + column, n);
            lanes_add(first, y_grad, n);
            lanes_add(second, xh, n);
        }
        weighted[row] = fold_lanes(first);
        projected[row] = fold_lanes(second);
    }
}

/* y_grad becomes the gradient of x, and the gradients of scale and bias are added to. */
VECTOR static void row_gradients(const double *restrict xh, double *restrict y_grad, const double *restrict scale,
                                 double mean, double projection, double inv_std_dev, double *restrict scale_grad,
                                 double *restrict bias_grad, int n)
{
    for (int j = 0; j < n; j++) {
        double grad = y_grad[j];
        scale_grad[j] += xh[j] * grad;
        bias_grad[j] += grad;
        y_grad[j] = ((grad * scale[j] - mean) - xh[j] * projection) * inv_std_dev;
    }
}

static void store_wide(enum dtype dtype, const double *wide, char *target, int n)
{
    if (dtype == F64) {
        uint64_t codes[CHUNK];
        narrow_f64(wide, codes, n);
        memcpy(target, codes, 8 * (size_t)n);
        return;
    }
    float row[LANES];
    if (dtype == F32) row_nearest(wide, row, n);
    else row_odd(wide, row, n);
    store_row(dtype, row, target, n);
}

/* Column after column of chunks, so that the sums over the rows stay in the cache. */
static void differentiate(const struct patch *patch, const double *mean, const double *projection, enum dtype dtype,
                          char *x_grad, double *scale_grad, double *bias_grad)
{
    for (int64_t column = 0; column < patch->columns; column += CHUNK) {
        int n = chunk_of(patch->columns, column);
        for (int64_t row = 0; row < patch->rows; row++) {
            double xh[CHUNK], y_grad[CHUNK];
            load_chunk(patch, row, column, n, xh, y_grad);
            row_gradients(xh, y_grad, patch->scale + column, mean[row], projection[row], patch->inv_std_dev[row],
                          scale_grad + column, bias_grad + column, n);
            store_wide(dtype, y_grad, x_grad + (row * patch->columns + column) * ITEMSIZE[dtype], n);
        }
    }
}

/* ---- Python ----------------------------------------------------------------------------------------------------- */

/* run(block, pieces, factors, wide, limit, term, drops, sums, max_abs, counts): pieces is int64 (k, 3) of dtype code, byte
 * offset and elements; factors float64 (k,), or None to multiply nothing; wide float64, one for each element, to be
 * rounded into the block first, or None; sums float64, one a tile; max_abs float64 (k,); counts int64 (k, 4) of NaN, Inf,
 * zeros and the first non-finite index or -1. The caller is trusted for everything but the bounds. */
static void run_pieces(struct job job, char *block, const int64_t *piece, Py_ssize_t k, const double *factors,
                       double *sum, double *max_abs, int64_t *count)
{
    for (Py_ssize_t i = 0; i < k; i++, piece += 3, count += 4) {
        enum dtype dtype = (enum dtype)piece[0];
        char *data = block + piece[1];
        int64_t elements = piece[2];
        struct stats stats = {0, 0, 0, 0, -1};
        if (job.writes) job.factor = factors[i];
        for (int64_t start = 0; start < elements; start += TILE) {
            int64_t left = elements - start;
            *sum++ = tile(job, dtype, data + start * ITEMSIZE[dtype], left < TILE ? left : TILE, &stats);
            if (job.wide) job.wide += left < TILE ? left : TILE;
        }
        if (stats.nan + stats.inf) stats.first = first_nonfinite(dtype, data, elements);
        max_abs[i] = stats.max_abs;
        count[0] = stats.nan, count[1] = stats.inf, count[2] = stats.zeros, count[3] = stats.first;
    }
}

/* What is wrong with one row of a table of pieces, or NULL. */
static const char *check_piece(const Py_buffer *block, const int64_t *piece)
{
    if (piece[0] < 0 || piece[0] >= DTYPES) return "no such storage type";
    if (piece[1] < 0 || piece[1] > block->len || piece[2] < 0) return "a piece lies outside its block";
    if (piece[2] > (block->len - piece[1]) / ITEMSIZE[piece[0]]) return "a piece lies outside its block";
    return NULL;
}

/* What is wrong with the sizes of the arguments, or NULL. */
static const char *check(const Py_buffer *block, const int64_t *piece, Py_ssize_t k, Py_ssize_t sums, const Py_buffer *wide)
{
    Py_ssize_t tiles = 0, elements = 0;
    for (Py_ssize_t i = 0; i < k; i++, piece += 3) {
        const char *problem = check_piece(block, piece);
        if (problem) return problem;
        tiles += (Py_ssize_t)((piece[2] + TILE - 1) / TILE);
        elements += (Py_ssize_t)piece[2];
    }
    if (wide->buf && wide->len != 8 * elements) return "one wide value an element is needed";
    return sums == tiles ? NULL : "one sum a tile is needed";
}

static PyObject *done(const char *problem)
{
    if (!problem) Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, problem);
    return NULL;
}

static PyObject *run(PyObject *self, PyObject *args)
{
    Py_buffer block, pieces, factors, wide, sums, max_abs, counts;
    struct job job = {SQUARE, 0, 0, 1, INFINITY, NULL};
    int term;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*y*z*z*dipw*w*w*", &block, &pieces, &factors, &wide, &job.limit, &term, &job.drops, &sums,
                          &max_abs, &counts))
        return NULL;

    job.term = (enum term)term;
    job.writes = factors.buf != NULL;
    job.wide = wide.buf;
    Py_ssize_t k = pieces.len / 24;
    const char *problem = check(&block, pieces.buf, k, sums.len / 8, &wide);
    if (job.writes && factors.len != 8 * k) problem = "one factor a piece is needed";
    if ((job.writes || job.wide) && block.readonly) problem = "a writable block is needed";
    if (max_abs.len != 8 * k || counts.len != 32 * k) problem = "one entry a piece is needed";
    if (!problem) {
        Py_BEGIN_ALLOW_THREADS
        run_pieces(job, block.buf, pieces.buf, k, factors.buf, sums.buf, max_abs.buf, counts.buf);
        Py_END_ALLOW_THREADS
    }

    Py_buffer *const all[] = {&block, &pieces, &factors, &wide, &sums, &max_abs, &counts};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return done(problem);
}

struct addend { int64_t dtype, offset, elements, at; };

/* Addends of the same sums are taken together, row by row, so that the row of sums stays in the cache. */
static void add_all(double *sums, const char *source, const struct addend *addend, const double *weight, Py_ssize_t k,
                    int fresh)
{
    for (Py_ssize_t i = 0, same; i < k; i += same) {
        const struct addend *first = addend + i;
        for (same = 1; i + same < k; same++)
            if (first[same].at != first->at || first[same].elements != first->elements) break;
        for (int64_t start = 0; start < first->elements; start += LANES) {
            int n = (int)(first->elements - start < LANES ? first->elements - start : LANES);
            for (Py_ssize_t one = 0; one < same; one++) {
                enum dtype dtype = (enum dtype)first[one].dtype;
                const char *row = source + first[one].offset + start * ITEMSIZE[dtype];
                row_add(sums + first->at + start, dtype, row, weight[i + one], n, fresh);
            }
        }
    }
}

/* add(sums, source, addends, weights, fresh): addends is int64 (k, 4) of dtype code, byte offset in the source, elements,
 * and index into the sums; weights float64 (k,). Fresh sums are set to what would have been added. */
static PyObject *add(PyObject *self, PyObject *args)
{
    Py_buffer sums, source, addends, weights;
    (void)self;
    int fresh;
    if (!PyArg_ParseTuple(args, "w*y*y*y*p", &sums, &source, &addends, &weights, &fresh)) return NULL;

    Py_ssize_t k = addends.len / 32;
    const char *problem = weights.len == 8 * k ? NULL : "one weight an addend is needed";
    const int64_t *addend = addends.buf;
    for (Py_ssize_t i = 0; i < k && !problem; i++) {
        problem = check_piece(&source, addend + 4 * i);
        int64_t at = addend[4 * i + 3];
        if (at < 0 || at > sums.len / 8 || addend[4 * i + 2] > sums.len / 8 - at) problem = "an addend lies outside the sums";
    }
    if (!problem) {
        Py_BEGIN_ALLOW_THREADS
        add_all(sums.buf, source.buf, addends.buf, weights.buf, k, fresh);
        Py_END_ALLOW_THREADS
    }

    Py_buffer *const all[] = {&sums, &source, &addends, &weights};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return done(problem);
}

/* Fills a patch from its buffers; what is wrong with their sizes, or NULL. */
static const char *patch_of(struct patch *patch, const Py_buffer *x, int x_dtype, const Py_buffer *y_grad,
                            int y_grad_dtype, const Py_buffer *rows, const Py_buffer *columns)
{
    if (x_dtype < 0 || x_dtype >= DTYPES || y_grad_dtype < 0 || y_grad_dtype >= DTYPES) return "no such storage type";
    if (patch->rows < 0 || patch->columns < 0) return "a number of rows and of columns is needed";
    if (patch->columns && patch->rows > x->len / patch->columns) return "the input does not fit";
    int64_t elements = patch->rows * patch->columns;
    if (x->len != elements * ITEMSIZE[x_dtype]) return "the input does not fit";
    if (y_grad->len != elements * ITEMSIZE[y_grad_dtype]) return "the gradient does not fit";
    for (int i = 0; i < 2; i++) {
        if (rows[i].buf && rows[i].len != 8 * patch->rows) return "one value a row is needed";
        if (columns[i].buf && columns[i].len != 8 * patch->columns) return "one value a column is needed";
    }
    patch->x = x->buf, patch->x_dtype = (enum dtype)x_dtype;
    patch->y_grad = y_grad->buf, patch->y_grad_dtype = (enum dtype)y_grad_dtype;
    patch->mean = rows[0].buf, patch->inv_std_dev = rows[1].buf;
    patch->scale = columns[0].buf, patch->bias = columns[1].buf;
    return NULL;
}

/* sum_rows(x, dtype, rows, columns, center, sums): center and sums float64 (rows,); without a center the plain sums. */
static PyObject *row_sums(PyObject *self, PyObject *args)
{
    Py_buffer x, center, sums;
    struct patch patch = {0};
    int dtype;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*iLLz*w*", &x, &dtype, &patch.rows, &patch.columns, &center, &sums)) return NULL;
    Py_buffer rows[2] = {center, sums}, none[2] = {{0}, {0}};
    const char *problem = patch_of(&patch, &x, dtype, &x, dtype, rows, none);
    if (!problem) {
        Py_BEGIN_ALLOW_THREADS
        sum_rows(&patch, center.buf, sums.buf);
        Py_END_ALLOW_THREADS
    }
    Py_buffer *const all[] = {&x, &center, &sums};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return done(problem);
}

/* layer_norm(x, x_dtype, y_grad, y_grad_dtype, rows, columns, mean, inv_std_dev, scale, bias, first, second, x_grad, dtype,
 * scale_grad, bias_grad): without x_grad, the row sums go to first and second; with it they are the row means, and the
 * gradients are written and added to. */
static PyObject *layer_norm(PyObject *self, PyObject *args)
{
    Py_buffer x, y_grad, rows[2], columns[2], sums[2], x_grad, grads[2];
    struct patch patch = {0};
    int x_dtype, y_grad_dtype, dtype;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*iy*iLLz*y*y*z*w*w*z*iz*z*", &x, &x_dtype, &y_grad, &y_grad_dtype, &patch.rows,
                          &patch.columns, &rows[0], &rows[1], &columns[0], &columns[1], &sums[0], &sums[1], &x_grad,
                          &dtype, &grads[0], &grads[1]))
        return NULL;
    const char *problem = patch_of(&patch, &x, x_dtype, &y_grad, y_grad_dtype, rows, columns);
    if (!problem && !patch.mean && !patch.bias) problem = "a mean or a bias is needed";
    for (int i = 0; i < 2 && !problem; i++) {
        if (sums[i].len != 8 * patch.rows) problem = "one sum a row is needed";
        if (x_grad.buf && grads[i].len != 8 * patch.columns) problem = "one gradient a column is needed";
        if (x_grad.buf && (grads[i].readonly || x_grad.readonly)) problem = "writable gradients are needed";
    }
    if (!problem && (dtype < 0 || dtype >= DTYPES)) problem = "no such storage type";
    if (!problem && x_grad.buf && x_grad.len != patch.rows * patch.columns * ITEMSIZE[dtype])
        problem = "room for the result is needed";
    if (!problem) {
        Py_BEGIN_ALLOW_THREADS
        if (x_grad.buf)
            differentiate(&patch, sums[0].buf, sums[1].buf, (enum dtype)dtype, x_grad.buf, grads[0].buf, grads[1].buf);
        else
            sum_gradients(&patch, sums[0].buf, sums[1].buf);
        Py_END_ALLOW_THREADS
    }
    Py_buffer *const all[] = {&x,       &y_grad,  &rows[0], &rows[1], &columns[0], &columns[1],
                              &sums[0], &sums[1], &x_grad,  &grads[0], &grads[1]};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) PyBuffer_Release(all[i]);
    return done(problem);
}

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, "Work through the pieces of one block."},
    {"add", add, METH_VARARGS, "Add weighted values to float64 sums."},
    {"row_sums", row_sums, METH_VARARGS, "The sums of rows, or of their squares about a center."},
    {"layer_norm", layer_norm, METH_VARARGS, "The row sums of a layer-norm's backward pass, or its gradients."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
