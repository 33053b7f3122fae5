// The differences of two blocks; differences.py defines each result. A thread block compares a tile.

enum { GAPS, SQUARES_A, SQUARES_B, PRODUCTS, SUMS };
enum { MAX_ABS, MAX_REL, MAX_ULPS, MAXIMA, FIRST_DIFFERENCE = MAXIMA, PLACES };
enum { DIFFERING, BITS_DIFFER, NOT_CLOSE, ONLY_A, ONLY_B, SAME_NONFINITE, NOT_NEAR, COUNTS };

// A piece of a, the piece of b that it is compared with, and their tolerance.
struct Pair {
    long long dtype_a, offset_a, dtype_b, offset_b, elements, first_block;
    double absolute, relative, near;
};

struct Difference {
    double sums[SUMS];
    long long exponents[3];
    double max_abs, max_rel;
    unsigned long long ulps, places[PLACES], counts[COUNTS];
};

struct DifferencesJob {
    const char *a, *b;
    const Pair *pair;
    Difference *results;
    long long pairs;
};

// A tile: where it is in its piece, and how long it is.
struct TilePair {
    Pair pair;
    long long start;
    int elements;
};

DEVICE TilePair tile_of(const DifferencesJob &job)
{
    const Pair pair = piece_of(job.pair, job.pairs, blockIdx.x);
    const long long start = (blockIdx.x - pair.first_block) * TILE;
    const TilePair tile = {pair, start, (int)(pair.elements - start < TILE ? pair.elements - start : TILE)};
    return tile;
}

DEVICE bool is_finite(double value) { return fabs(value) <= LARGEST; }

DEVICE void load_pair(const DifferencesJob &job, const TilePair &tile, int i, double &x, double &y)
{
    x = load_one(tile.pair.dtype_a, job.a + tile.pair.offset_a, tile.start + i);
    y = load_one(tile.pair.dtype_b, job.b + tile.pair.offset_b, tile.start + i);
}

// The code of a magnitude, rounded to a type.
static __device__ __noinline__ unsigned long long code_of(long long dtype, double magnitude)
{
    switch (dtype) {
#define CODE_OF(DTYPE, ...) case DTYPE: return Storage<DTYPE>::narrow_wide(magnitude);
    STORAGE_TYPES(CODE_OF)
    default: return 0;
    }
}

DEVICE unsigned long long ulps_between(long long dtype, double x, double y)
{
    const unsigned long long a = code_of(dtype, fabs(x)), b = code_of(dtype, fabs(y));
    if ((x < 0) != (y < 0)) return a + b;
    return a > b ? a - b : b - a;
}

// Whether an element has the same bytes on both sides, which have the same type.
static __device__ __noinline__ bool has_same_bytes(const DifferencesJob &job, const TilePair &tile, int i)
{
    const long long itemsize = Untyped::itemsize(tile.pair.dtype_a), at = (tile.start + i) * itemsize;
    bool is_same = true;
    for (long long byte = 0; byte < itemsize; byte++)
        is_same = is_same && job.a[tile.pair.offset_a + at + byte] == job.b[tile.pair.offset_b + at + byte];
    return is_same;
}

// Keeps the larger of two values, or of equal values that with the smaller index.
template <class Value> DEVICE void keep(Value value, unsigned long long at, Value &largest, unsigned long long &place)
{
    if (value > largest || (value == largest && at < place)) largest = value, place = at;
}

DEVICE void keep_first(unsigned long long at, Difference &result)
{
    if (at < result.places[FIRST_DIFFERENCE]) result.places[FIRST_DIFFERENCE] = at;
}

// The maxima and counts of 256 threads, in the first of them.
DEVICE void fold_maxima(Difference &result)
{
    __shared__ double gaps[WARPS], quotients[WARPS];
    __shared__ unsigned long long ulps[WARPS], places[PLACES][WARPS], counts[COUNTS][WARPS];
    for (int step = 16; step; step /= 2) {
        const double gap = __shfl_down_sync(0xffffffffu, result.max_abs, step);
        const double quotient = __shfl_down_sync(0xffffffffu, result.max_rel, step);
        const unsigned long long distance = __shfl_down_sync(0xffffffffu, result.ulps, step);
        unsigned long long at[PLACES];
        for (int i = 0; i < PLACES; i++) at[i] = __shfl_down_sync(0xffffffffu, result.places[i], step);
        keep(gap, at[MAX_ABS], result.max_abs, result.places[MAX_ABS]);
        keep(quotient, at[MAX_REL], result.max_rel, result.places[MAX_REL]);
        keep(distance, at[MAX_ULPS], result.ulps, result.places[MAX_ULPS]);
        keep_first(at[FIRST_DIFFERENCE], result);
    }
    for (int i = 0; i < COUNTS; i++)
        for (int step = 16; step; step /= 2) result.counts[i] += __shfl_down_sync(0xffffffffu, result.counts[i], step);
    const int warp = (int)threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
        gaps[warp] = result.max_abs, quotients[warp] = result.max_rel, ulps[warp] = result.ulps;
        for (int i = 0; i < PLACES; i++) places[i][warp] = result.places[i];
        for (int i = 0; i < COUNTS; i++) counts[i][warp] = result.counts[i];
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < WARPS; i++) {
        keep(gaps[i], places[MAX_ABS][i], result.max_abs, result.places[MAX_ABS]);
        keep(quotients[i], places[MAX_REL][i], result.max_rel, result.places[MAX_REL]);
        keep(ulps[i], places[MAX_ULPS][i], result.ulps, result.places[MAX_ULPS]);
        keep_first(places[FIRST_DIFFERENCE][i], result);
        for (int count = 0; count < COUNTS; count++) result.counts[count] += counts[count][i];
    }
}

// The sums of all threads, in the first of them. A thread has eight neighbouring lanes.
DEVICE void fold_sums(double (&lanes)[SUMS][WIDTH], double (&sums)[SUMS])
{
    __shared__ double shared[SUMS][WARPS];
    for (int i = 0; i < SUMS; i++) {
        const double sum = fold_warp(fold_eight(lanes[i]));
        if (threadIdx.x % 32 == 0) shared[i][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    for (int i = 0; i < SUMS; i++) sums[i] = fold_eight(shared[i]);
}

DEVICE void add_terms(double (&lanes)[SUMS][WIDTH], int lane, double gap, double x, double y)
{
    lanes[GAPS][lane] += gap * gap;
    lanes[SQUARES_A][lane] += x * x;
    lanes[SQUARES_B][lane] += y * y;
    lanes[PRODUCTS][lane] += x * y;
}

// Counts an element that is not finite on both sides.
DEVICE void count_nonfinite(const DifferencesJob &job, const TilePair &tile, int i, double x, double y,
                            Difference &result)
{
    const bool is_same = x == y || (x != x && y != y);
    result.counts[SAME_NONFINITE] += is_same;
    result.counts[DIFFERING] += !is_same;
    result.counts[NOT_CLOSE] += !is_same;
    result.counts[NOT_NEAR] += !is_same;
    if (!is_same) keep_first((unsigned long long)i, result);
    result.counts[ONLY_A] += !is_same && !is_finite(x);
    result.counts[ONLY_B] += !is_same && !is_finite(y);
    if (tile.pair.dtype_a == tile.pair.dtype_b) result.counts[BITS_DIFFER] += !has_same_bytes(job, tile, i);
}

DEVICE void compare_one(const DifferencesJob &job, const TilePair &tile, int i, int lane,
                        double (&lanes)[SUMS][WIDTH], Difference &result)
{
    double x, y;
    load_pair(job, tile, i, x, y);
    if (tile.pair.dtype_a != tile.pair.dtype_b) result.counts[BITS_DIFFER]++;
    if (!is_finite(x) || !is_finite(y)) {
        count_nonfinite(job, tile, i, x, y, result);
        return;
    }
    const double gap = fabs(x - y);
    add_terms(lanes, lane, gap, x, y);
    if (tile.pair.dtype_a == tile.pair.dtype_b) result.counts[BITS_DIFFER] += as_bits64(x) != as_bits64(y);
    if (gap == 0) return;
    const unsigned long long at = (unsigned long long)i;
    const long long coarser = tile.pair.dtype_a > tile.pair.dtype_b ? tile.pair.dtype_a : tile.pair.dtype_b;
    result.counts[DIFFERING]++;
    result.counts[NOT_CLOSE] += gap > tile.pair.absolute + tile.pair.relative * fabs(y);
    result.counts[NOT_NEAR] += gap > tile.pair.near * fabs(y);
    keep_first(at, result);
    keep(gap, at, result.max_abs, result.places[MAX_ABS]);
    keep(gap / fabs(y), at, result.max_rel, result.places[MAX_REL]);
    keep(ulps_between(coarser, x, y), at, result.ulps, result.places[MAX_ULPS]);
}

#ifndef GRADTOOL_STORAGE

// All but the exponents of each tile.
KERNEL(THREADS, differences, DifferencesJob)
{
    const TilePair tile = tile_of(job);
    double lanes[SUMS][WIDTH] = {};
    Difference result = {};
    for (int i = 0; i < PLACES; i++) result.places[i] = TILE;
    for (int row = (int)threadIdx.x * WIDTH; row < tile.elements; row += LANES)
        for (int lane = 0; lane < WIDTH && row + lane < tile.elements; lane++)
            compare_one(job, tile, row + lane, lane, lanes, result);
    fold_sums(lanes, result.sums);
    fold_maxima(result);
    if (threadIdx.x != 0) return;
    // Where nothing differs.
    for (int i = 0; i < PLACES; i++)
        if (result.places[i] == TILE) result.places[i] = i == FIRST_DIFFERENCE ? ~0ull : 0;
    job.results[blockIdx.x] = result;
}

// The largest magnitudes of a and b in a tile, known to all threads.
DEVICE void largest_pair(const DifferencesJob &job, const TilePair &tile, double (&largest)[2])
{
    __shared__ double shared[2][WARPS];
    largest[0] = largest[1] = 0;
    for (int i = (int)threadIdx.x; i < tile.elements; i += THREADS) {
        double x, y;
        load_pair(job, tile, i, x, y);
        if (!is_finite(x) || !is_finite(y)) continue;
        largest[0] = fabs(x) > largest[0] ? fabs(x) : largest[0];
        largest[1] = fabs(y) > largest[1] ? fabs(y) : largest[1];
    }
    for (int side = 0; side < 2; side++) {
        for (int step = 16; step; step /= 2) {
            const double neighbour = __shfl_down_sync(0xffffffffu, largest[side], step);
            largest[side] = neighbour > largest[side] ? neighbour : largest[side];
        }
        if (threadIdx.x % 32 == 0) shared[side][threadIdx.x / 32] = largest[side];
    }
    __syncthreads();
    for (int side = 0; side < 2; side++) {
        largest[side] = 0;
        for (int i = 0; i < WARPS; i++) largest[side] = shared[side][i] > largest[side] ? shared[side][i] : largest[side];
    }
}

DEVICE int exponent_for(double sum, double largest)
{
    if (is_in_range(sum) || largest == 0) return 0;
    return largest <= LARGEST ? exponent_of(largest) : 1023;
}

// Sums those tiles again whose values must be divided first. Launched after the kernel above, where a type is F64.
KERNEL(THREADS, differences_again, DifferencesJob)
{
    Difference &result = job.results[blockIdx.x];
    if (is_in_range(result.sums[GAPS]) && is_in_range(result.sums[SQUARES_A]) && is_in_range(result.sums[SQUARES_B])) return;
    const TilePair tile = tile_of(job);
    // The magnitudes, differences and squares of all other types are in range.
    if (tile.pair.dtype_a != F64 && tile.pair.dtype_b != F64) return;
    double largest[2], lanes[SUMS][WIDTH] = {}, sums[SUMS];
    largest_pair(job, tile, largest);
    const int k = exponent_for(result.sums[GAPS], result.max_abs);
    const int m = exponent_for(result.sums[SQUARES_A], largest[0]);
    const int n = exponent_for(result.sums[SQUARES_B], largest[1]);
    if (!k && !m && !n) return;
    const double divisor = power_of_two(k), divisor_a = power_of_two(m), divisor_b = power_of_two(n);
    for (int row = (int)threadIdx.x * WIDTH; row < tile.elements; row += LANES)
        for (int lane = 0; lane < WIDTH && row + lane < tile.elements; lane++) {
            double x, y;
            load_pair(job, tile, row + lane, x, y);
            if (!is_finite(x) || !is_finite(y)) continue;
            const double gap = is_finite(x - y) ? (x - y) / divisor : x / divisor - y / divisor;
            add_terms(lanes, lane, gap, x / divisor_a, y / divisor_b);
        }
    fold_sums(lanes, sums);
    if (threadIdx.x != 0) return;
    for (int i = 0; i < SUMS; i++) result.sums[i] = sums[i];
    result.exponents[0] = k, result.exponents[1] = m, result.exponents[2] = n;
}

#endif
