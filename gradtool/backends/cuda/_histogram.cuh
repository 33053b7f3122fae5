// Counts of values by binary exponent. A thread block counts a tile in shared memory.

// The bins of float32, which all types but F64 have, and those of F64; storage.py says what they are.
enum { BINS32 = 277, BINS64 = 2098 };

// `first_sum` of a piece is its first bin. `largest` are the bits of float64 magnitudes.
struct HistogramJob {
    const char *block;
    unsigned long long *counts, *largest;
    const Piece *piece;
    long long pieces;
};

template <int DTYPE> DEVICE void count_tile(const HistogramJob &job)
{
    typedef Storage<DTYPE> S;
    typedef typename S::Code Code;
    typedef typename Special<typename S::Work>::Bits Bits;
    enum { BINS = DTYPE == F64 ? BINS64 : BINS32, LOWEST = DTYPE == F64 ? -1074 : -149 };
    const Piece piece = piece_of(job.piece, job.pieces, blockIdx.x);
    const long long start = (blockIdx.x - piece.first_block) * TILE;
    const int elements = (int)(piece.elements - start < TILE ? piece.elements - start : TILE);
    const char *data = job.block + piece.offset + start * (long long)sizeof(Code);

    __shared__ unsigned counts[BINS];
    for (int i = (int)threadIdx.x; i < BINS; i += THREADS) counts[i] = 0;
    __syncthreads();

    Bits largest = 0;
    for (int i = (int)threadIdx.x * WIDTH; i < elements; i += LANES) {
        Code codes[WIDTH];
        const int count = elements - i < WIDTH ? elements - i : WIDTH;
        load(data + i * (long long)sizeof(Code), count, codes);
        for (int j = 0; j < count; j++) {
            const Bits magnitude = magnitude_bits(S::widen(codes[j]));
            if (magnitude == 0 || magnitude >= Special<typename S::Work>::INFINITE) continue;
            atomicAdd(&counts[exponent_of(magnitude_of(magnitude)) - LOWEST], 1u);
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    for (int step = 16; step; step /= 2) {
        const Bits neighbour = __shfl_down_sync(0xffffffffu, largest, step);
        largest = neighbour > largest ? neighbour : largest;
    }
    if (threadIdx.x % 32 == 0)
        atomicMax(&job.largest[piece.number], (unsigned long long)as_bits64(magnitude_of(largest)));
    __syncthreads();
    for (int i = (int)threadIdx.x; i < BINS; i += THREADS)
        if (counts[i]) atomicAdd(&job.counts[piece.first_sum + i], (unsigned long long)counts[i]);
}

#ifdef GRADTOOL_STORAGE

KERNEL(THREADS, histogram, HistogramJob) { count_tile<GRADTOOL_STORAGE>(job); }

#endif
