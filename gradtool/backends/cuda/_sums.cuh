// Float64 sums of weighted values, addend after addend, and their single rounding.

enum { FIRST = 1, LAST = 2, KEEPS = 4, DIVIDES = 8, MULTIPLIES = 16, ROUNDS = 32 };

// A piece that is added to; its sums begin at number `at`.
struct Target {
    long long offset, elements, first_block, at, first_addend, addends, number;
};

// `elements` values from byte `offset` of the source on, to add to those of its target from number `start` on.
struct Addend {
    long long dtype, offset, start, elements;
    double weight;
};

struct AddJob {
    char *block;
    const char *source;
    double *sums;
    Losses *losses;
    const Target *target;
    const Addend *addend;
    double divisor, factor, weight;  // of the old values
    long long flags, targets;
};

// Adds to eight sums of a target, from number `at` on.
DEVICE void add(const Addend &addend, const char *source, long long at, double (&sums)[WIDTH])
{
    double values[WIDTH];
    const long long first = at - addend.start, left = addend.elements - first;
    if (first <= -WIDTH || left <= 0) return;
    if (first >= 0 && left >= WIDTH) {
        load_any(addend.dtype, source + addend.offset, first, values);
        #pragma unroll
        for (int i = 0; i < WIDTH; i++) sums[i] += addend.weight * values[i];
        return;
    }
    // The addend begins or ends among the eight.
    #pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        if (first + i < 0 || i >= left) continue;
        sums[i] += addend.weight * load_one(addend.dtype, source + addend.offset, first + i);
    }
}

// `sums` carries the sums from one batch of addends to the next.
template <int DTYPE> DEVICE void add_tile(const AddJob &job)
{
    typedef Storage<DTYPE> S;
    const Target target = piece_of(job.target, job.targets, blockIdx.x);
    const long long start = (blockIdx.x - target.first_block) * TILE;
    const long long end = target.elements - start < TILE ? target.elements : start + TILE;
    const long long flags = job.flags;
    int zeros = 0, subnormals = 0;
    for (long long at = start + (long long)threadIdx.x * WIDTH; at < end; at += LANES) {
        const int count = (int)(end - at < WIDTH ? end - at : WIDTH);
        char *data = job.block + target.offset + at * (long long)sizeof(typename S::Code);
        double sums[WIDTH], old[WIDTH];
        if (flags & KEEPS) load_wide<DTYPE>(data, 0, count, old);
        #pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            // -0 + x is x for every x; 0 + -0 would be 0.
            if (flags & FIRST) sums[i] = (flags & KEEPS) && !(flags & DIVIDES) ? job.weight * old[i] : -0.0;
            else sums[i] = i < count ? job.sums[target.at + at + i] : 0;
        }
        for (long long k = 0; k < target.addends; k++)
            add(job.addend[target.first_addend + k], job.source, at, sums);
        typename S::Code codes[WIDTH];
        #pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            if (flags & LAST) {
                if (flags & DIVIDES) sums[i] /= job.divisor;
                if ((flags & DIVIDES) && (flags & KEEPS)) sums[i] += job.weight * old[i];
                if (flags & MULTIPLIES) sums[i] *= job.factor;
            }
            codes[i] = S::narrow_wide(sums[i]);
            if (i < count && !(flags & ROUNDS)) job.sums[target.at + at + i] = sums[i];
            const double stored = (double)S::widen(codes[i]);
            zeros += i < count && sums[i] != 0 && stored == 0;
            subnormals += i < count && stored != sums[i] && is_subnormal(stored, normal_of((enum dtype)DTYPE));
        }
        if (flags & ROUNDS) store(data, count, codes);
    }
    if (flags & ROUNDS) add_losses(job.losses + target.number, zeros, subnormals);
}

#ifdef GRADTOOL_STORAGE

KERNEL(THREADS, accumulate, AddJob) { add_tile<GRADTOOL_STORAGE>(job); }

#endif
