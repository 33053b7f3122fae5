/* The backward pass of layer norms: float64 throughout, a chunk of a row at a time. */
#ifndef GRADTOOL_LAYER_NORM_H
#define GRADTOOL_LAYER_NORM_H

#include "_short_rows.h"

struct patch {
    int64_t rows, columns;
    enum dtype x_dtype, y_grad_dtype;
    const char *x, *y_grad;
    const double *mean, *inv_std_dev, *scale, *bias;
};

static void load_wide(enum dtype dtype, const char *source, double *wide, int n)
{
    ALIGNED float row[CHUNK];
    if (dtype == F64) { memcpy(wide, source, 8 * (size_t)n); return; }
    load_row(dtype, source, row, n);
    for (int64_t j = 0; j < n; j++) wide[j] = (double)row[j];
}

static void row_normalize(double *x, double mean, double inv_std_dev, int n)
{
    for (int64_t j = 0; j < n; j++) x[j] = (x[j] - mean) * inv_std_dev;
}

static void row_invert(double *restrict y, const double *restrict bias, const double *restrict scale, int n)
{
    for (int64_t j = 0; j < n; j++) y[j] = (y[j] - bias[j]) / scale[j];
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

static void lanes_add(double *restrict lanes, const double *restrict x, int n)
{
    int whole = n / ROW_LANES * ROW_LANES;
    for (int64_t j = 0; j < whole; j += ROW_LANES)
        for (int lane = 0; lane < ROW_LANES; lane++) lanes[lane] += x[j + lane];
    for (int64_t j = whole; j < n; j++) lanes[j - whole] += x[j];
}

static void row_center_square(double *x, double center, int n)
{
    for (int64_t j = 0; j < n; j++) { double away = x[j] - center; x[j] = away * away; }
}

/* y_grad becomes y_grad·scale, and xh that times xh. */
static void row_weigh(double *restrict xh, double *restrict y_grad, const double *restrict scale, int n)
{
    for (int64_t j = 0; j < n; j++) { y_grad[j] *= scale[j]; xh[j] = y_grad[j] * xh[j]; }
}

static double fold_lanes(double *lanes)
{
    for (int width = ROW_LANES; width > 1; width /= 2)
        for (int64_t j = 0; j < width / 2; j++) lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
    return lanes[0];
}

static int chunk_of(int64_t columns, int64_t column)
{
    return (int)(columns - column < CHUNK ? columns - column : CHUNK);
}

static void sum_rows(const struct patch *patch, const double *center, double *sums)
{
    if (patch->columns <= ROW_LANES) {
        sum_short_rows(patch->x_dtype, patch->x, patch->rows, patch->columns, center, sums);
        return;
    }
    for (int64_t row = 0; row < patch->rows; row++) {
        sums[row] = 0;
        for (int64_t column = 0; column < patch->columns; column += CHUNK) {
            ALIGNED double lanes[ROW_LANES] = {0}, x[CHUNK];
            int n = chunk_of(patch->columns, column);
            load_wide(patch->x_dtype, patch->x + (row * patch->columns + column) * ITEMSIZE[patch->x_dtype], x, n);
            if (center) row_center_square(x, center[row], n);
            lanes_add(lanes, x, n);
            sums[row] += fold_lanes(lanes);
        }
    }
}

static void sum_gradients(const struct patch *patch, double *weighted, double *projected)
{
    for (int64_t row = 0; row < patch->rows; row++) {
        weighted[row] = projected[row] = 0;
        for (int64_t column = 0; column < patch->columns; column += CHUNK) {
            ALIGNED double first[ROW_LANES] = {0}, second[ROW_LANES] = {0}, xh[CHUNK], y_grad[CHUNK];
            int n = chunk_of(patch->columns, column);
            load_chunk(patch, row, column, n, xh, y_grad);
            row_weigh(xh, y_grad, patch->scale + column, n);
            lanes_add(first, y_grad, n);
            lanes_add(second, xh, n);
            weighted[row] += fold_lanes(first);
            projected[row] += fold_lanes(second);
        }
    }
}

/* y_grad becomes the gradient of x, and the gradients of scale and bias are added to. */
static void row_gradients(const double *restrict xh, double *restrict y_grad, const double *restrict scale,
                                 double mean, double projection, double inv_std_dev, double *restrict scale_grad,
                                 double *restrict bias_grad, int n)
{
    for (int64_t j = 0; j < n; j++) {
        double grad = y_grad[j];
        scale_grad[j] += xh[j] * grad;
        bias_grad[j] += grad;
        y_grad[j] = ((grad * scale[j] - mean) - xh[j] * projection) * inv_std_dev;
    }
}

/* Column after column of chunks, so that the sums over the rows stay in the cache. The gradients of scale and bias are
 * (groups, columns), one group for each `height` rows. */
static void differentiate(const struct patch *patch, const double *mean, const double *projection, enum dtype dtype,
                          char *x_grad, int64_t height, double *scale_grad, double *bias_grad)
{
    for (int64_t column = 0; column < patch->columns; column += CHUNK) {
        int n = chunk_of(patch->columns, column);
        for (int64_t row = 0; row < patch->rows; row++) {
            int64_t group = row / height * patch->columns + column;
            ALIGNED double xh[CHUNK], y_grad[CHUNK];
            load_chunk(patch, row, column, n, xh, y_grad);
            row_gradients(xh, y_grad, patch->scale + column, mean[row], projection[row], patch->inv_std_dev[row],
                          scale_grad + group, bias_grad + group, n);
            store_wide(dtype, y_grad, x_grad + (row * patch->columns + column) * ITEMSIZE[dtype], n);
        }
    }
}

#endif
