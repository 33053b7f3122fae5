// The storage types on the device: eight neighbouring values at a time, or one.

template <int DTYPE> struct Storage;

// Rounds to odd: an inexact value is truncated and its last bit set, so that the next rounding gives what a single one
// would. NaN stays NaN.
DEVICE float cut_to_odd(double value)
{
    float cut = __double2float_rz(value);
    return as_float(as_bits(cut) | (uint32_t)((double)cut != value));
}

#define SMALL(DTYPE, CODE, NAME)                                                                                       \
    template <> struct Storage<DTYPE> {                                                                                \
        typedef CODE Code;                                                                                             \
        typedef float Work;                                                                                            \
        DEVICE float widen(CODE code) { return NAME##_to_float(code); }                                                \
        DEVICE CODE narrow(float value) { return float_to_##NAME(value); }                                             \
        DEVICE CODE narrow_wide(double value) { return narrow(cut_to_odd(value)); }                                    \
        DEVICE float product(float value, float factor)                                                                \
        {                                                                                                              \
            const uint32_t magnitude = round_product(value, factor, format_of(DTYPE));                                 \
            if (magnitude < format_of(DTYPE).bound) return as_float(magnitude | sign_of(value * factor));              \
            return cut_to_odd((double)value * (double)factor);                                                         \
        }                                                                                                              \
    };

SMALL(F16, uint16_t, f16)
SMALL(BF16, uint16_t, bf16)
SMALL(F8_E4M3, uint8_t, f8_e4m3)
SMALL(F8_E5M2, uint8_t, f8_e5m2)

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

// The type of one access: 16 bytes, or eight values if these are fewer.
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
    case F64: load_wide<F64>(source, at, WIDTH, values); return;
    case F32: load_wide<F32>(source, at, WIDTH, values); return;
    case F16: load_wide<F16>(source, at, WIDTH, values); return;
    case BF16: load_wide<BF16>(source, at, WIDTH, values); return;
    case F8_E4M3: load_wide<F8_E4M3>(source, at, WIDTH, values); return;
    default: load_wide<F8_E5M2>(source, at, WIDTH, values); return;
    }
}

// One value of any type, at any address.
static __device__ __noinline__ double load_one(long long dtype, const char *source, long long at)
{
    switch (dtype) {
    case F64: return as_double(load_bytes<uint64_t>(source + 8 * at));
    case F32: return as_float(load_bytes<uint32_t>(source + 4 * at));
    case F16: return f16_to_float(load_bytes<uint16_t>(source + 2 * at));
    case BF16: return bf16_to_float(load_bytes<uint16_t>(source + 2 * at));
    case F8_E4M3: return f8_e4m3_to_float((uint8_t)source[at]);
    default: return f8_e5m2_to_float((uint8_t)source[at]);
    }
}

// ---- one value ------------------------------------------------------------------------------------------------------

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
    DEVICE long long itemsize(long long dtype) { return dtype == F64 ? 8 : dtype == F32 ? 4 : dtype <= BF16 ? 2 : 1; }
    DEVICE double get(long long dtype, const char *buffer, long long i)
    {
        switch (dtype) {
        case F64: return Typed<F64>::get(dtype, buffer, i);
        case F32: return Typed<F32>::get(dtype, buffer, i);
        case F16: return Typed<F16>::get(dtype, buffer, i);
        case BF16: return Typed<BF16>::get(dtype, buffer, i);
        case F8_E4M3: return Typed<F8_E4M3>::get(dtype, buffer, i);
        default: return Typed<F8_E5M2>::get(dtype, buffer, i);
        }
    }
    DEVICE void put(long long dtype, char *buffer, long long i, double value)
    {
        switch (dtype) {
        case F64: Typed<F64>::put(dtype, buffer, i, value); return;
        case F32: Typed<F32>::put(dtype, buffer, i, value); return;
        case F16: Typed<F16>::put(dtype, buffer, i, value); return;
        case BF16: Typed<BF16>::put(dtype, buffer, i, value); return;
        case F8_E4M3: Typed<F8_E4M3>::put(dtype, buffer, i, value); return;
        default: Typed<F8_E5M2>::put(dtype, buffer, i, value); return;
        }
    }
};

// ---- finding one's work ---------------------------------------------------------------------------------------------

// The piece of a thread block: the last one whose first block is not after it. No piece is empty.
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
