/* Sums of rows that have one value at most for each lane, which are folded many rows at a time. */
#ifndef GRADTOOL_SHORT_ROWS_H
#define GRADTOOL_SHORT_ROWS_H

#include "_tiles.h"

/* Sets the lanes of rows to their values, or squares about a center. Lanes that a row has no value for are 0; what stands
 * behind its last value can be read. Adding zero makes -0 the same as 0, as in a lane that starts at 0. */
HELPER void set_lanes(const double *restrict x, const double *restrict center, int64_t rows, int64_t columns,
                      double *restrict lanes, int64_t width)
{
    for (int64_t row = 0; row < rows; row++) {
        double middle = center ? center[row] : 0;
        for (int64_t j = 0; j < width; j++) {
            double value = x[row * columns + j], away = value - middle;
            double term = center ? away * away : value + 0.0;
            lanes[row * width + j] = j < columns ? term : 0;
        }
    }
}

#define SET_LANES(NAME, WIDTH)                                                                                         \
    static void NAME(const double *restrict x, const double *restrict center, int64_t rows, int64_t columns,           \
                     double *restrict lanes)                                                                           \
    {                                                                                                                  \
        if (center) set_lanes(x, center, rows, columns, lanes, WIDTH);                                                 \
        else set_lanes(x, NULL, rows, columns, lanes, WIDTH);                                                          \
    }

SET_LANES(set_lanes8, 8)
SET_LANES(set_lanes16, 16)
SET_LANES(set_lanes32, ROW_LANES)

/* Columns are ROW_LANES at most. All other lanes are 0, so that folding as many as there are values gives the same bits. */
static void sum_short_rows(enum dtype dtype, const char *data, int64_t rows, int64_t columns, const double *center,
                           double *sums)
{
    struct job keeps = {.drops = 0};
    ALIGNED double x[CHUNK + ROW_LANES] = {0}, lanes[CHUNK], room[CHUNK / 2];
    int64_t width = columns <= 8 ? 8 : columns <= 16 ? 16 : ROW_LANES, height = CHUNK / width;
    for (int64_t row = 0; row < rows; row += height) {
        int64_t count = rows - row < height ? rows - row : height, left = count * width;
        load_doubles(keeps, dtype, data + row * columns * ITEMSIZE[dtype], x, (int)(count * columns));
        (width == 8 ? set_lanes8 : width == 16 ? set_lanes16 : set_lanes32)(x, center ? center + row : NULL, count,
                                                                           columns, lanes);
        double *from = lanes, *to = room;
        while (left > count) {
            double *folded = to;
            halve(from, to, (int)(left /= 2));
            to = from, from = folded;
        }
        memcpy(sums + row, from, 8 * (size_t)count);
    }
}

#endif
