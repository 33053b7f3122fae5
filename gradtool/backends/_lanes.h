/* Lanes: partial sums that are folded pairwise, neighbors first. */
#ifndef GRADTOOL_LANES_H
#define GRADTOOL_LANES_H

#include "_storage.h"

HELPER void halve(const double *restrict lanes, double *restrict sums, int width)
{
    for (int64_t j = 0; j < width; j++) sums[j] = lanes[2 * j] + lanes[2 * j + 1];
}

/* The sum of up to LANES lanes, a power of two; they are overwritten. */
static double fold(double *lanes, int width)
{
    ALIGNED double room[LANES / 2];
    double *from = lanes, *to = room;
    while (width > 1) {
        double *folded = to;
        halve(from, to, width /= 2);
        to = from, from = folded;
    }
    return *from;
}

/* The same, where the even lanes come before all odd lanes. */
static double fold_halves(double *lanes, int width)
{
    for (int64_t j = 0; j < width / 2; j++) lanes[j] += lanes[width / 2 + j];
    return fold(lanes, width / 2);
}

/* The sum of the lanes of a row. Their number is written out, so that the compiler unrolls it all. */
static double fold_row(const double *lanes)
{
    ALIGNED double sums[ROW_LANES / 2], room[ROW_LANES / 4];
    halve(lanes, sums, 16);
    halve(sums, room, 8);
    halve(room, sums, 4);
    halve(sums, room, 2);
    return room[0] + room[1];
}

#endif
