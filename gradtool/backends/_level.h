/* All kernels, compiled for a level of a processor; included once for each level, with LEVEL the name of its table. */
#include "_differences.h"
#include "_extremes.h"
#include "_histogram.h"
#include "_layer_norm.h"
#include "_order.h"
#include "_sums.h"
#include "_tiles.h"
#include "_units.h"

struct level {
    const char *name;
    void (*run_pieces)(struct job, struct source *, const int64_t *, int64_t, const double *, double *, int32_t *,
                       struct statistics *, struct histogram);
    void (*compare_pieces)(struct source *, const int64_t *, const int64_t *, int64_t, const struct tolerance *,
                           struct results);
    void (*count_extremes)(const char *, int64_t, int64_t, const uint64_t *, int64_t *);
    void (*add_all)(double *, const char *, const struct addend *, const double *, int64_t, int);
    void (*sum_rows)(const struct patch *, double *);
    void (*sum_gradients)(const struct patch *, int64_t, int64_t, double *, double *);
    void (*differentiate)(const struct patch *, const double *, const double *, int, const struct gradients *);
    void (*trim_all)(const struct trim *, double *, const char *, const struct addend *, const double *, int64_t);
    struct unit_counts (*compute_factors)(const struct side *, int64_t, int64_t, struct unit_limits, double *);
    void (*scale_units)(char *, const struct units *, const double *, int64_t, int64_t *);
};

const struct level LEVEL = {
    LEVEL_NAME, run_pieces, compare_pieces, count_extremes, add_all, sum_rows, sum_gradients, differentiate, trim_all,
    compute_factors, scale_units,
};
