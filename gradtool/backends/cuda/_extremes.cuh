// Subnormal and saturated values, counted by their bits. A thread block counts those of a tile.

// The codes of the smallest normal value and of the largest finite value; `counts` has two counts for each piece.
struct ExtremesJob {
    const char *block;
    unsigned long long *counts;
    const Piece *piece;
    long long normal, largest, pieces;
};

template <int DTYPE> DEVICE void count_extremes(const ExtremesJob &job)
{
    typedef typename Storage<DTYPE>::Code Code;
    const Code mask = (Code)((Code)~0ull >> 1), below = (Code)(job.normal - 1), highest = (Code)job.largest;
    const Piece piece = piece_of(job.piece, job.pieces, blockIdx.x);
    const long long start = (blockIdx.x - piece.first_block) * TILE;
    const int elements = (int)(piece.elements - start < TILE ? piece.elements - start : TILE);
    const char *data = job.block + piece.offset + start * (long long)sizeof(Code);
    unsigned subnormal = 0, saturated = 0;
    for (int row = (int)threadIdx.x * WIDTH; row < elements; row += LANES) {
        Code codes[WIDTH];
        const int count = elements - row < WIDTH ? elements - row : WIDTH;
        load(data + row * (long long)sizeof(Code), count, codes);
        for (int i = 0; i < count; i++) {
            const Code magnitude = (Code)(codes[i] & mask);
            // For a zero, 0 - 1 is the largest number there is.
            subnormal += (Code)(magnitude - 1) < below;
            saturated += magnitude == highest;
        }
    }
    for (int step = 16; step; step /= 2) {
        subnormal += __shfl_down_sync(0xffffffffu, subnormal, step);
        saturated += __shfl_down_sync(0xffffffffu, saturated, step);
    }
    if (threadIdx.x % 32) return;
    if (subnormal) atomicAdd(&job.counts[2 * piece.number], (unsigned long long)subnormal);
    if (saturated) atomicAdd(&job.counts[2 * piece.number + 1], (unsigned long long)saturated);
}

#ifdef GRADTOOL_STORAGE

KERNEL(THREADS, extremes, ExtremesJob) { count_extremes<GRADTOOL_STORAGE>(job); }

#endif
