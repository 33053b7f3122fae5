/* The backward pass of layer norms: float64 throughout, a chunk of a row at a time. */
#ifndef GRADTOOL_LAYER_NORM_H
#define GRADTOOL_LAYER_NORM_H

#include "_lanes.h"
#include "_short_rows.h"

struct patch {
    int64_t rows, columns;
    enum dtype x_dtype, y_grad_dtype;
    const char *x, *y_grad;
    const double *mean, *inv_std_dev, *scale, *bias;
};

/* Part of a row: its values, float64 if they are wide and else float32, and the parameters of its row and columns. */
struct chunk {
    const char *x, *y_grad;
    int is_wide, n;
    double mean, inv_std_dev;
    const double *scale, *bias;
};

/* The two means over a row that the gradient of x takes. */
struct means { double weighted, projected; };

/* Runs a statement for each element j of n and its lane. */
#define FOR_LANES(N, STATEMENT)                                                                                        \
    do {                                                                                                               \
        int64_t whole = (N) / ROW_LANES * ROW_LANES;                                                                   \
        for (int64_t start = 0; start < whole; start += ROW_LANES)                                                     \
            for (int64_t lane = 0, j = start; lane < ROW_LANES; lane++, j++) STATEMENT;                                \
        for (int64_t lane = 0, j = whole; j < (N); lane++, j++) STATEMENT;                                             \
    } while (0)

/* ---- sums over a chunk of a row --------------------------------------------------------------------------------- */

HELPER double term_of(struct chunk chunk, int64_t j, int is_wide, int centers)
{
    double x = value_at(chunk.x, j, is_wide), away = x - chunk.mean;
    return centers ? away * away : x;
}

#define TERM_SUM(NAME, IS_WIDE, CENTERS)                                                                               \
    static double chunk_##NAME(struct chunk chunk)                                                                     \
    {                                                                                                                  \
        ALIGNED double lanes[ROW_LANES] = {0};                                                                         \
        FOR_LANES(chunk.n, lanes[lane] += term_of(chunk, j, IS_WIDE, CENTERS));                                        \
        return fold_row(lanes);                                                                                        \
    }

TERM_SUM(values32, 0, 0)
TERM_SUM(values64, 1, 0)
TERM_SUM(squares32, 0, 1)
TERM_SUM(squares64, 1, 1)

/* The normalized input. */
HELPER double normalized(struct chunk chunk, int64_t j, int is_wide, int inverts)
{
    double x = value_at(chunk.x, j, is_wide);
    return inverts ? (x - chunk.bias[j]) / chunk.scale[j] : (x - chunk.mean) * chunk.inv_std_dev;
}

HELPER void add_products(struct chunk chunk, int64_t j, int is_wide, int inverts, double *weighted, double *projected)
{
    double product = value_at(chunk.y_grad, j, is_wide) * chunk.scale[j];
    *weighted += product;
    *projected += product * normalized(chunk, j, is_wide, inverts);
}

#define PRODUCT_SUMS(NAME, IS_WIDE, INVERTS)                                                                           \
    static struct means chunk_##NAME(struct chunk chunk)                                                               \
    {                                                                                                                  \
        ALIGNED double weighted[ROW_LANES] = {0}, projected[ROW_LANES] = {0};                                          \
        FOR_LANES(chunk.n, add_products(chunk, j, IS_WIDE, INVERTS, weighted + lane, projected + lane));               \
        struct means sums = {fold_row(weighted), fold_row(projected)};                                                 \
        return sums;                                                                                                   \
    }

PRODUCT_SUMS(products32, 0, 0)
PRODUCT_SUMS(products64, 1, 0)
PRODUCT_SUMS(inverted, 1, 1)

/* ---- gradients of a chunk of a row ------------------------------------------------------------------------------ */

/* Writes the gradient of x, in the bits of a float32 or float64, and adds to the gradients of scale and bias. */
#define GRADIENTS(NAME, IS_WIDE, INVERTS, BITS, ROUND)                                                                 \
    static void write_##NAME(struct chunk chunk, struct means means, char *restrict x_grad,                            \
                             double *restrict scale_grad, double *restrict bias_grad)                                  \
    {                                                                                                                  \
        for (int64_t j = 0; j < chunk.n; j++) {                                                                        \
            double xh = normalized(chunk, j, IS_WIDE, INVERTS), y_grad = value_at(chunk.y_grad, j, IS_WIDE);           \
            double centered = (y_grad * chunk.scale[j] - means.weighted) - xh * means.projected;                       \
            scale_grad[j] += xh * y_grad;                                                                              \
            bias_grad[j] += y_grad;                                                                                    \
            store##BITS(x_grad + BITS / 8 * j, ROUND(centered * chunk.inv_std_dev));                                   \
        }                                                                                                              \
    }
#define TO_SINGLE(VALUE) float_to_f32((float)(VALUE))

GRADIENTS(singles32, 0, 0, 32, TO_SINGLE)
GRADIENTS(doubles32, 0, 0, 64, double_to_f64)
GRADIENTS(doubles64, 1, 0, 64, double_to_f64)
GRADIENTS(inverted, 1, 1, 64, double_to_f64)

/* Writes the gradient of x in its type. */
static void write_gradients(struct chunk chunk, struct means means, enum dtype dtype, char *x_grad, double *scale_grad,
                            double *bias_grad)
{
    ALIGNED double room[CHUNK];
    char *wide = dtype == F64 ? x_grad : (char *)room;
    if (dtype == F32 && !chunk.is_wide) { write_singles32(chunk, means, x_grad, scale_grad, bias_grad); return; }
    if (chunk.bias) write_inverted(chunk, means, wide, scale_grad, bias_grad);
    else (chunk.is_wide ? write_doubles64 : write_doubles32)(chunk, means, wide, scale_grad, bias_grad);
    if (dtype != F64) store_wide(dtype, room, x_grad, chunk.n);
}

/* ---- all chunks of a patch -------------------------------------------------------------------------------------- */

/* A chunk without its gradient, which begins in a column. Its values may be put into `room`. */
static struct chunk load_x(const struct patch *patch, int64_t row, int64_t column, int is_wide, double *room)
{
    const char *x = patch->x + (row * patch->columns + column) * ITEMSIZE[patch->x_dtype];
    int64_t left = patch->columns - column;
    struct chunk chunk = {.is_wide = is_wide, .n = (int)(left < CHUNK ? left : CHUNK)};
    if (patch->mean) chunk.mean = patch->mean[row];
    chunk.x = load_values(patch->x_dtype, x, is_wide, room, chunk.n);
    return chunk;
}

/* The inverted form is wide whatever its types are. */
static struct chunk load_chunk(const struct patch *patch, int64_t row, int64_t column, double (*room)[CHUNK])
{
    const char *y_grad = patch->y_grad + (row * patch->columns + column) * ITEMSIZE[patch->y_grad_dtype];
    int is_wide = patch->x_dtype == F64 || patch->y_grad_dtype == F64 || patch->bias;
    struct chunk chunk = load_x(patch, row, column, is_wide, room[0]);
    chunk.y_grad = load_values(patch->y_grad_dtype, y_grad, is_wide, room[1], chunk.n);
    chunk.inv_std_dev = patch->inv_std_dev[row];
    chunk.scale = patch->scale + column;
    if (patch->bias) chunk.bias = patch->bias + column;
    return chunk;
}

/* The sums of rows, or of their squared distances from their means if there are any. */
static void sum_rows(const struct patch *patch, double *sums)
{
    int is_wide = patch->x_dtype == F64;
    if (patch->columns <= SHORT_ROW) {
        sum_short_rows(patch->x_dtype, patch->x, patch->rows, patch->columns, patch->mean, sums);
        return;
    }
    for (int64_t row = 0; row < patch->rows; row++) {
        sums[row] = 0;
        for (int64_t column = 0; column < patch->columns; column += CHUNK) {
            ALIGNED double room[CHUNK];
            struct chunk chunk = load_x(patch, row, column, is_wide, room);
            if (patch->mean) sums[row] += (is_wide ? chunk_squares64 : chunk_squares32)(chunk);
            else sums[row] += (is_wide ? chunk_values64 : chunk_values32)(chunk);
        }
    }
}

/* The sums of rows `begin` to `end`. */
static void sum_gradients(const struct patch *patch, int64_t begin, int64_t end, double *weighted, double *projected)
{
    for (int64_t row = begin; row < end; row++) {
        struct means total = {0, 0};
        for (int64_t column = 0; column < patch->columns; column += CHUNK) {
            ALIGNED double room[2][CHUNK];
            struct chunk chunk = load_chunk(patch, row, column, room);
            struct means sums;
            if (chunk.bias) sums = chunk_inverted(chunk);
            else sums = (chunk.is_wide ? chunk_products64 : chunk_products32)(chunk);
            total.weighted += sums.weighted, total.projected += sums.projected;
        }
        weighted[row - begin] = total.weighted, projected[row - begin] = total.projected;
    }
}

/* Where the gradients go: that of x in a type, and those of scale and bias as (groups, columns), a group for each
 * `height` rows. */
struct gradients { enum dtype dtype; char *x; int64_t height; double *scale, *bias; };

/* Column after column of chunks, so that the sums over the rows stay in the L1 cache. */
static void differentiate_rows(const struct patch *patch, int64_t begin, int64_t end, const double *weighted,
                               const double *projected, const struct gradients *grads)
{
    for (int64_t column = 0; column < patch->columns; column += CHUNK) {
        for (int64_t row = begin; row < end; row++) {
            int64_t group = row / grads->height * patch->columns + column;
            ALIGNED double room[2][CHUNK];
            struct chunk chunk = load_chunk(patch, row, column, room);
            struct means means = {weighted[row - begin], projected[row - begin]};
            char *x_grad = grads->x + (row * patch->columns + column) * ITEMSIZE[grads->dtype];
            write_gradients(chunk, means, grads->dtype, x_grad, grads->scale + group, grads->bias + group);
        }
    }
}

/* At most so many elements and rows are summed and then differentiated while they are in the L2 cache. */
enum { BLOCK_ELEMENTS = 1 << 15, BLOCK_ROWS = 1 << 8 };

/* The means over the rows are computed unless given; RMS norm has only the second. */
static void differentiate(const struct patch *patch, const double *weighted, const double *projected, int is_rms,
                          const struct gradients *grads)
{
    int64_t fitting = BLOCK_ELEMENTS / (patch->columns ? patch->columns : 1);
    int64_t height = fitting < 1 ? 1 : fitting < BLOCK_ROWS ? fitting : BLOCK_ROWS;
    if (weighted) {
        differentiate_rows(patch, 0, patch->rows, weighted, projected, grads);
        return;
    }
    for (int64_t begin = 0; begin < patch->rows; begin += height) {
        int64_t end = patch->rows - begin < height ? patch->rows : begin + height;
        double means[2][BLOCK_ROWS];
        sum_gradients(patch, begin, end, means[0], means[1]);
        for (int64_t i = 0; i < end - begin; i++) {
            means[0][i] = is_rms ? 0 : means[0][i] / (double)patch->columns;
            means[1][i] /= (double)patch->columns;
        }
        differentiate_rows(patch, begin, end, means[0], means[1], grads);
    }
}

#endif
