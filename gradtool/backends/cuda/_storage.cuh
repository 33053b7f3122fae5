// The storage types on the device: eight neighbouring values at a time, or a single value.

template <int DTYPE> struct Storage;

// Rounds to odd: an inexact value is truncated and its last bit set, so that the next rounding gives what a single one
// would. NaN stays NaN.
DEVICE float cut_to_odd(double value)
{
    float cut = __double2float_rz(value);
    return as_float(as_bits(cut) | (uint32_t)((double)cut != value));
}

#define SMALL(DTYPE, NAME, BITS, ...)                                                                                  \
    template <> struct Storage<DTYPE> {                                                                                \
        typedef uint##BITS##_t Code;                                                                                   \
        typedef float Work;                                                                                            \
        DEVICE float widen(Code code) { return NAME##_to_float(code); }                                                \
        DEVICE Code narrow(float value) { return float_to_##NAME(value); }                                             \
        DEVICE Code narrow_wide(double value) { return narrow(cut_to_odd(value)); }                                    \
        DEVICE float product(float value, float factor)                                                                \
        {                                                                                                              \
            const uint32_t magnitude = round_product(value, factor, format_of(DTYPE));                                 \
            if (magnitude < format_of(DTYPE).bound) return as_float(magnitude | sign_of(value * factor));              \
            return cut_to_odd((double)value * (double)factor);                                                         \
        }                                                                                                              \
    };

SMALL_TYPES(SMALL)

template <> struct Storage<F32> {
    typedef uint32_t Code;
    typedef float Work;
    DEVICE float widen(uint32_t code) { return as_float(code); }
    DEVICE uint32_t narrow(float value) { return float_to_f32(value); }
    DEVICE uint32_t narrow_wide(double value) { return narrow((float)value); }
    DEVICE float product(float value, float factor) { return value * factor; }
};

template <> struct Storage<F64> {
    typedef uint64_t Code;
    typedef double Work;
    DEVICE double widen(uint64_t code) { return as_double(code); }
    DEVICE uint64_t narrow(double value) { return double_to_f64(value); }
    DEVICE uint64_t narrow_wide(double value) { return narrow(value); }
    DEVICE double product(double value, double factor) { return value * factor; }
};

// ---- eight neighbours -----------------------------------------------------------------------------------------------

enum { WIDTH = 8 };

// The type of an access: 16 bytes, or eight values if these are fewer.
template <int BYTES> struct Unit { typedef uint4 type; };
template <> struct Unit<8> { typedef uint2 type; };

// A tensor can have any address. Values that are not aligned, or fewer than eight, are moved byte by byte. That is rare,
// so it is not inlined.
template <class Code> static __device__ __noinline__ Code load_bytes(const char *source)
{
    Code code;
    for (int byte = 0; byte < (int)sizeof code; byte++) ((char *)&code)[byte] = source[byte];
    return code;
}

template <class Code> static __device__ __noinline__ void store_bytes(char *target, Code code)
{
    for (int byte = 0; byte < (int)sizeof code; byte++) target[byte] = ((const char *)&code)[byte];
}

template <class Code> DEVICE void load(const char *source, int count, Code (&codes)[WIDTH])
{
    typedef typename Unit<WIDTH * sizeof(Code)>::type Access;
    enum { ACCESSES = WIDTH * sizeof(Code) / sizeof(Access) };
    if (count == WIDTH && (uintptr_t)source % sizeof(Access) == 0) {
        Access units[ACCESSES];
        #pragma unroll
        for (int i = 0; i < ACCESSES; i++) units[i] = ((const Access *)source)[i];
        memcpy(codes, units, sizeof codes);
        return;
    }
    #pragma unroll
    for (int i = 0; i < WIDTH; i++) codes[i] = i < count ? load_bytes<Code>(source + i * (int)sizeof(Code)) : (Code)0;
}

template <class Code> DEVICE void store(char *target, int count, const Code (&codes)[WIDTH])
{
    typedef typename Unit<WIDTH * sizeof(Code)>::type Access;
    enum { ACCESSES = WIDTH * sizeof(Code) / sizeof(Access) };
    if (count == WIDTH && (uintptr_t)target % sizeof(Access) == 0) {
        Access units[ACCESSES];
        memcpy(units, codes, sizeof codes);
        #pragma unroll
        for (int i = 0; i < ACCESSES; i++) ((Access *)target)[i] = units[i];
        return;
    }
    #pragma unroll
    for (int i = 0; i < WIDTH; i++)
        if (i < count) store_bytes(target + i * (int)sizeof(Code), codes[i]);
}

template <int DTYPE> DEVICE void load_wide(const char *source, long long at, int count, double (&values)[WIDTH])
{
    typename Storage<DTYPE>::Code codes[WIDTH];
    load(source + at * (long long)sizeof codes[0], count, codes);
    #pragma unroll
    for (int i = 0; i < WIDTH; i++) values[i] = (double)Storage<DTYPE>::widen(codes[i]);
}

// Eight values of any type, from number `at` on.
DEVICE void load_any(long long dtype, const char *source, long long at, double (&values)[WIDTH])
{
    switch (dtype) {
#define LOAD_ANY(DTYPE, ...) case DTYPE: load_wide<DTYPE>(source, at, WIDTH, values); return;
    STORAGE_TYPES(LOAD_ANY)
    default: return;
    }
}

// One value of any type, at any address.
static __device__ __noinline__ double load_one(long long dtype, const char *source, long long at)
{
    switch (dtype) {
#define LOAD_ONE(DTYPE, NAME, BITS, ...)                                                                               \
    case DTYPE: return (double)Storage<DTYPE>::widen(load_bytes<uint##BITS##_t>(source + BITS / 8 * at));
    STORAGE_TYPES(LOAD_ONE)
    default: return 0;
    }
}

// ---- a value --------------------------------------------------------------------------------------------------------

// The values of an aligned buffer, as float64.
template <int DTYPE> struct Typed {
    typedef typename Storage<DTYPE>::Code Code;
    DEVICE long long itemsize(long long) { return sizeof(Code); }
    DEVICE double get(long long, const char *buffer, long long i)
    {
        return (double)Storage<DTYPE>::widen(((const Code *)buffer)[i]);
    }
    DEVICE void put(long long, char *buffer, long long i, double value)
    {
        ((Code *)buffer)[i] = Storage<DTYPE>::narrow_wide(value);
    }
};

struct Untyped {
    DEVICE long long itemsize(long long dtype)
    {
        switch (dtype) {
#define ITEMSIZE_OF(DTYPE, NAME, BITS, ...) case DTYPE: return BITS / 8;
        STORAGE_TYPES(ITEMSIZE_OF)
        default: return 0;
        }
    }
    DEVICE double get(long long dtype, const char *buffer, long long i)
    {
        switch (dtype) {
#define GET(DTYPE, ...) case DTYPE: return Typed<DTYPE>::get(dtype, buffer, i);
        STORAGE_TYPES(GET)
        default: return 0;
        }
    }
    DEVICE void put(long long dtype, char *buffer, long long i, double value)
    {
        switch (dtype) {
#define PUT(DTYPE, ...) case DTYPE: Typed<DTYPE>::put(dtype, buffer, i, value); return;
        STORAGE_TYPES(PUT)
        default: return;
        }
    }
};

// ---- the piece of a block --------------------------------------------------------------------------------------------

// The piece of a thread block: the last piece whose first block is not after it. No piece is empty.
template <class Piece> DEVICE const Piece &piece_of(const Piece *pieces, long long count, long long block)
{
    long long low = 0;
    for (long long high = count; high - low > 1;) {
        long long middle = (low + high) / 2;
        if (pieces[middle].first_block <= block) low = middle;
        else high = middle;
    }
    return pieces[low];
}

// The values of 32 lanes, folded pairwise, neighbours first; the sum is in lane 0.
DEVICE double fold_warp(double value)
{
    for (int step = 1; step < 32; step *= 2) value += __shfl_down_sync(0xffffffffu, value, step);
    return value;
}

DEVICE double fold_eight(const double *x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }
