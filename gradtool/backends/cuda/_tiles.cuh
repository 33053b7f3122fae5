// Canonical tile sums, of what is in a block or is written there first. A thread block sums a tile.

// A thread has eight neighbouring lanes of the 2,048, and folds them before the threads of a warp fold theirs.
enum { THREADS = LANES / WIDTH, WARPS = THREADS / 32 };
static_assert(WIDTH == 8 && WARPS == 8, "fold_eight folds both");
// Any other order of norm.
enum { POWER = SQUARE + 1 };

struct Piece {
    long long offset, elements, first_block, first_sum, number;
    double factor;
};

// What a write has lost of a piece: how many values became 0, and how many more than before are subnormal.
struct Losses {
    unsigned long long zeros, subnormals;
};

// The statistics of a piece, as in values.py. `first` is NEVER minus the index of the first value that is not finite, or 0
// if all are.
struct Statistics {
    unsigned long long max_abs, nan, inf, zeros, first;
    Losses losses;
};
#define NEVER (1ull << 62)

// A limit above clamps nothing.
#define LARGEST 1.7976931348623157e308

struct TilesJob {
    char *block;
    double *sums;
    long long *exponents;
    Statistics *statistics;
    const Piece *piece;
    double limit, order;
    long long drops, pieces;
};

DEVICE uint32_t magnitude_bits(float value) { return as_bits(value) & 0x7fffffffu; }
DEVICE uint64_t magnitude_bits(double value) { return as_bits64(value) & 0x7fffffffffffffffu; }
DEVICE double magnitude_of(uint32_t bits) { return (double)as_float(bits); }
DEVICE double magnitude_of(uint64_t bits) { return as_double(bits); }
template <class Work> struct Special;
template <> struct Special<float> { typedef uint32_t Bits; static const uint32_t INFINITE = 0x7f800000u; };
template <> struct Special<double> { typedef uint64_t Bits; static const uint64_t INFINITE = 0x7ff0000000000000u; };

static __device__ __noinline__ double power_of(double value, double order) { return pow(fabs(value), order); }

template <int TERM> DEVICE double term_of(double value, double order)
{
    if (TERM == SQUARE) return value * value;
    if (TERM == ABSOLUTE) return fabs(value);
    return power_of(value, order);
}

DEVICE int is_subnormal(double value, double normal) { return value != 0 && fabs(value) < normal; }

// Adds what a thread has counted. A negative number wraps around, and so does the sum.
DEVICE void add_losses(Losses *losses, int zeros, int subnormals)
{
    if (zeros) atomicAdd(&losses->zeros, (unsigned long long)zeros);
    if (subnormals) atomicAdd(&losses->subnormals, (unsigned long long)(long long)subnormals);
}

// What a thread has summed and counted. `largest` are the bits of the largest magnitude, with NaN and Inf. What is lost
// is only counted by kernels that write.
template <class Work> struct Seen {
    typename Special<Work>::Bits largest;
    unsigned zeros;
    // New zeros in the lower half, of which a thread sees fewer than 2^16, and new subnormals in the upper.
    int losses;
    double lanes[WIDTH];
};

// Adds eight values to `seen`, or fewer unless FULL.
template <int DTYPE, int TERM, bool WRITES, bool FULL>
DEVICE void visit(const TilesJob &job, const Piece &piece, typename Storage<DTYPE>::Code (&codes)[WIDTH], int count,
                  Seen<typename Storage<DTYPE>::Work> &seen)
{
    typedef Storage<DTYPE> S;
    typedef typename S::Work Work;
    typedef typename Special<Work>::Bits Bits;
    const Bits infinite = Special<Work>::INFINITE;
    #pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        if (!FULL && i >= count) continue;
        Work value = S::widen(codes[i]);
        if (WRITES) {
            if (job.drops && magnitude_bits(value) >= infinite) value = 0;
            const Work limit = (Work)job.limit, factor = (Work)piece.factor;
            // In bits, for which fewer registers are needed. Less 1, 0 is the largest number of all.
            const Bits normal = magnitude_bits((Work)normal_of((enum dtype)DTYPE)) - 1;
            const Bits was = factor == 0 ? 0 : magnitude_bits(value);
            const bool was_subnormal = (Bits)(was - 1) < normal, was_nonzero = was != 0;
            value = S::product(value, factor);
            // Comparisons keep NaN and the sign of zeros.
            if (job.limit <= LARGEST) {
                value = value < -limit ? -limit : value;
                value = value > limit ? limit : value;
            }
            codes[i] = S::narrow(value);
            value = S::widen(codes[i]);
            const Bits is = magnitude_bits(value);
            seen.losses += (was_nonzero && is == 0) + (((int)((Bits)(is - 1) < normal) - was_subnormal) << 16);
        }
        Bits magnitude = magnitude_bits(value);
        seen.largest = magnitude > seen.largest ? magnitude : seen.largest;
        if (job.drops && magnitude >= infinite) magnitude = 0, value = 0;
        seen.zeros += magnitude == 0;
        if (TERM != MAXIMUM) seen.lanes[i] += term_of<TERM>((double)value, job.order);
    }
}

// Counts the values of a tile that are not finite. Called only if there are any, so not inlined.
template <int DTYPE>
static __device__ __noinline__ void count_nonfinite(const TilesJob &job, const Piece &piece, const char *data,
                                                    long long start, int elements)
{
    typedef Storage<DTYPE> S;
    typedef typename S::Work Work;
    typedef typename Special<Work>::Bits Bits;
    const Bits infinite = Special<Work>::INFINITE;
    Statistics local = {};
    for (int i = (int)threadIdx.x * WIDTH; i < elements; i += LANES) {
        typename S::Code codes[WIDTH];
        int count = elements - i < WIDTH ? elements - i : WIDTH;
        load(data + i * (long long)sizeof codes[0], count, codes);
        for (int j = 0; j < count; j++) {
            Bits magnitude = magnitude_bits(S::widen(codes[j]));
            unsigned long long left = NEVER - (unsigned long long)(start + i + j);
            if (magnitude >= infinite && left > local.first) local.first = left;
            local.nan += magnitude > infinite;
            local.inf += magnitude == infinite;
            if (magnitude > infinite || (job.drops && magnitude == infinite)) continue;
            unsigned long long bits = as_bits64(magnitude_of(magnitude));
            local.max_abs = bits > local.max_abs ? bits : local.max_abs;
        }
    }
    Statistics *statistics = job.statistics + piece.number;
    atomicMax(&statistics->max_abs, local.max_abs);
    if (local.nan) atomicAdd(&statistics->nan, local.nan);
    if (local.inf) atomicAdd(&statistics->inf, local.inf);
    if (local.first) atomicMax(&statistics->first, local.first);
}

template <int DTYPE, int TERM, bool WRITES> DEVICE void sum_tile(const TilesJob &job)
{
    typedef typename Storage<DTYPE>::Code Code;
    typedef typename Storage<DTYPE>::Work Work;
    typedef typename Special<Work>::Bits Bits;
    // Each thread has 64 bytes in flight, to hide the latency of memory; fewer where the code would be too long.
    enum { ROWS_AT_ONCE = TERM == POWER ? 1 : sizeof(Code) == 1 ? 4 : 8 / sizeof(Code) };
    const Piece piece = piece_of(job.piece, job.pieces, blockIdx.x);
    const long long tile = blockIdx.x - piece.first_block, start = tile * TILE;
    const int elements = (int)(piece.elements - start < TILE ? piece.elements - start : TILE);
    char *data = job.block + piece.offset + start * (long long)sizeof(Code);

    Seen<Work> seen = {};
    int row = (int)threadIdx.x * WIDTH;
    for (; row + (ROWS_AT_ONCE - 1) * LANES + WIDTH <= elements; row += ROWS_AT_ONCE * LANES) {
        Code codes[ROWS_AT_ONCE][WIDTH];
        #pragma unroll
        for (int k = 0; k < ROWS_AT_ONCE; k++) load(data + (row + k * LANES) * (long long)sizeof(Code), WIDTH, codes[k]);
        #pragma unroll
        for (int k = 0; k < ROWS_AT_ONCE; k++) {
            visit<DTYPE, TERM, WRITES, true>(job, piece, codes[k], WIDTH, seen);
            if (WRITES) store(data + (row + k * LANES) * (long long)sizeof(Code), WIDTH, codes[k]);
        }
    }
    for (; row < elements; row += LANES) {
        Code codes[WIDTH];
        const int count = elements - row < WIDTH ? elements - row : WIDTH;
        load(data + row * (long long)sizeof(Code), count, codes);
        visit<DTYPE, TERM, WRITES, false>(job, piece, codes, count, seen);
        if (WRITES) store(data + row * (long long)sizeof(Code), count, codes);
    }

    const int new_zeros = seen.losses & 0xffff;
    if (WRITES) add_losses(&job.statistics[piece.number].losses, new_zeros, (seen.losses - new_zeros) / 65536);
    __shared__ double sums[WARPS];
    __shared__ Bits largest[WARPS];
    __shared__ unsigned zeros[WARPS];
    double sum = fold_warp(fold_eight(seen.lanes));
    for (int step = 16; step; step /= 2) {
        Bits neighbour = __shfl_down_sync(0xffffffffu, seen.largest, step);
        seen.largest = neighbour > seen.largest ? neighbour : seen.largest;
        seen.zeros += __shfl_down_sync(0xffffffffu, seen.zeros, step);
    }
    const int warp = (int)threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) sums[warp] = sum, largest[warp] = seen.largest, zeros[warp] = seen.zeros;
    __syncthreads();

    Bits maximum = largest[0];
    for (int i = 1; i < WARPS; i++) maximum = largest[i] > maximum ? largest[i] : maximum;
    if (threadIdx.x == 0) {
        unsigned long long zero = 0;
        for (int i = 0; i < WARPS; i++) zero += zeros[i];
        job.sums[piece.first_sum + tile] = fold_eight(sums);
        if (zero) atomicAdd(&job.statistics[piece.number].zeros, zero);
        if (maximum < Special<Work>::INFINITE)
            atomicMax(&job.statistics[piece.number].max_abs, (unsigned long long)as_bits64(magnitude_of(maximum)));
    }
    // The barrier has made the writes of the other threads visible.
    if (maximum >= Special<Work>::INFINITE) count_nonfinite<DTYPE>(job, piece, data, start, elements);
}

#ifdef GRADTOOL_STORAGE

#define TILES(NAME, TERM)                                                                                              \
    KERNEL(THREADS, measure_##NAME, TilesJob) { sum_tile<GRADTOOL_STORAGE, TERM, false>(job); }                        \
    KERNEL(THREADS, scale_##NAME, TilesJob) { sum_tile<GRADTOOL_STORAGE, TERM, true>(job); }

TILES(maximum, MAXIMUM)
TILES(absolute, ABSOLUTE)
TILES(square, SQUARE)
TILES(power, POWER)

#endif
