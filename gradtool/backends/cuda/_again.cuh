// Tiles whose sums are out of range are summed again, divided by a power of two; reduction.py says why.

// As MAX_SUM_ORDER of reduction.py: of larger orders, a tile's norm takes the place of its sum.
#define MAX_SUM_ORDER 512

// The largest magnitude of a tile, known to all threads; NaN and Inf count too, unless they are dropped.
template <int DTYPE, class Bits> DEVICE Bits largest_of(const TilesJob &job, const char *data, int elements)
{
    typedef Storage<DTYPE> S;
    const Bits infinite = Special<typename S::Work>::INFINITE;
    Bits largest = 0;
    for (int i = (int)threadIdx.x * WIDTH; i < elements; i += LANES) {
        typename S::Code codes[WIDTH];
        load(data + i * (long long)sizeof codes[0], elements - i < WIDTH ? elements - i : WIDTH, codes);
        for (int j = 0; j < WIDTH; j++) {
            const Bits magnitude = magnitude_bits(S::widen(codes[j]));
            if (magnitude > largest && !(job.drops && magnitude >= infinite)) largest = magnitude;
        }
    }
    for (int step = 16; step; step /= 2) {
        const Bits neighbour = __shfl_down_sync(0xffffffffu, largest, step);
        largest = neighbour > largest ? neighbour : largest;
    }
    __shared__ Bits shared[WARPS];
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) largest = shared[i] > largest ? shared[i] : largest;
    return largest;
}

// The sum of a tile whose values are divided first, known to all threads.
template <int DTYPE, int TERM>
DEVICE double divided_sum(const TilesJob &job, const char *data, int elements, double divisor)
{
    typedef Storage<DTYPE> S;
    double lanes[WIDTH] = {};
    for (int i = (int)threadIdx.x * WIDTH; i < elements; i += LANES) {
        typename S::Code codes[WIDTH];
        load(data + i * (long long)sizeof codes[0], elements - i < WIDTH ? elements - i : WIDTH, codes);
        for (int j = 0; j < WIDTH; j++) {
            typename S::Work value = S::widen(codes[j]);
            // Dropped: a tile that keeps NaN or Inf is not summed again.
            if (magnitude_bits(value) >= Special<typename S::Work>::INFINITE) value = 0;
            lanes[j] += term_of<TERM>((double)value / divisor, job.order);
        }
    }
    __shared__ double sums[WARPS];
    const double sum = fold_warp(fold_eight(lanes));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    return fold_eight(sums);
}

// Sums a tile again, divided, if its sum is out of range. A separate kernel, launched after the one that sums the tiles,
// which would need more registers otherwise.
template <int DTYPE, int TERM> DEVICE void sum_again(const TilesJob &job)
{
    typedef Storage<DTYPE> S;
    typedef typename Special<typename S::Work>::Bits Bits;
    const Piece piece = piece_of(job.piece, job.pieces, blockIdx.x);
    const long long tile = blockIdx.x - piece.first_block, start = tile * TILE, number = piece.first_sum + tile;
    const bool is_norm = TERM == POWER && job.order > MAX_SUM_ORDER;
    if (!is_norm && is_in_range(job.sums[number])) return;

    const int elements = (int)(piece.elements - start < TILE ? piece.elements - start : TILE);
    const char *data = job.block + piece.offset + start * (long long)sizeof(typename S::Code);
    const Bits bits = largest_of<DTYPE, Bits>(job, data, elements);
    if (bits == 0 || bits >= Special<typename S::Work>::INFINITE) return;

    const double largest = magnitude_of(bits);
    const int exponent = is_norm ? 0 : exponent_of(largest);
    const double sum = divided_sum<DTYPE, TERM>(job, data, elements, is_norm ? largest : power_of_two(exponent));
    if (threadIdx.x != 0) return;
    job.sums[number] = is_norm ? largest * pow(sum, 1 / job.order) : sum;
    job.exponents[number] = exponent;
}

#ifdef GRADTOOL_STORAGE

KERNEL(THREADS, again_power, TilesJob) { sum_again<GRADTOOL_STORAGE, POWER>(job); }
// The magnitudes of all other types, and their squares, are in range.
#if GRADTOOL_STORAGE == 0
KERNEL(THREADS, again_absolute, TilesJob) { sum_again<F64, ABSOLUTE>(job); }
KERNEL(THREADS, again_square, TilesJob) { sum_again<F64, SQUARE>(job); }
#endif

#endif
