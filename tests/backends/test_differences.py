"""What every backend finds between two blocks, against Python floats, `math.nextafter` and lists of all codes."""

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import NUMPY_TYPES, VALUE_TYPES, bits_of, block_of, canonical_tile_sums, encode, gaussian, rounded_once

from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import Piece, Tolerance
from gradtool.reduction import TILE

MAX_ABS, MAX_REL, ULPS, FIRST = range(4)
DIFFERING, BITS, NOT_CLOSE, ONLY_A, ONLY_B, SAME, NOT_NEAR = range(7)


NONE = Tolerance()


def compare(backend, a, b, tolerance=NONE, lead=(0, 0)):
    """What a backend finds between two lists of arrays, or two arrays."""
    blocks = [
        block_of(*([side] if isinstance(side, np.ndarray) else side), lead=at)
        for side, at in zip((a, b), lead, strict=True)
    ]
    result = backend.differences(*blocks[0], *blocks[1], [tolerance] * len(blocks[0][1]))
    shapes = {"sums": (-1, 4), "exponents": (-1, 3), "places": (-1, 4), "counts": (-1, 7)}
    return result._replace(
        **{name: np.array(field).reshape(shapes.get(name, -1)) for name, field in result._asdict().items()}
    )


def near(array, dtype, seed=7):
    """Values that mostly differ a little from those of an array."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        moved = array.astype(np.float64) * (1 + rng.normal(0, 1e-3, array.size) * (rng.random(array.size) < 0.7))
    return encode(moved, dtype)


def ordered(dtype):
    """Every number of a type in order, -0 and 0 as one, and one more on either end for what overflows."""
    codes = np.arange(2 ** (8 * NUMPY_TYPES[dtype].itemsize)).astype(STORAGE[dtype].bits)
    with np.errstate(all="ignore"):
        values = codes.view(NUMPY_TYPES[dtype]).astype(np.float64)
    values = np.unique(values[np.isfinite(values)] + 0.0)
    return [-math.inf, *values.tolist(), math.inf]


def steps(low, high, most=200):
    """How many float64 steps there are from one number to another."""
    count = 0
    while low != high and count < most:
        low, count = math.nextafter(low, high), count + 1
    return count


@pytest.mark.parametrize("a_type", VALUE_TYPES)
@pytest.mark.parametrize("b_type", VALUE_TYPES)
@pytest.mark.parametrize("elements", [37, 257, 2049])
def test_sums_maxima_and_counts_are_those_of_python_floats(backend, a_type, b_type, elements):
    check(backend, a_type, b_type, elements)


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16"])
def test_sums_maxima_and_counts_of_several_tiles(backend, dtype):
    check(backend, dtype, dtype, TILE + 2051)


def check(backend, a_type, b_type, elements):
    a = gaussian(elements, a_type)
    b = near(a, b_type)
    result = compare(backend, a, b, Tolerance(1e-4, 1e-3, 2e-3), lead=(3, 5))
    x, y = (side.astype(np.float64).tolist() for side in (a, b))
    pairs = list(zip(x, y, strict=True))
    terms = [(p - q) ** 2 for p, q in pairs], [p * p for p in x], [q * q for q in y], [p * q for p, q in pairs]
    assert result.sums.T.tolist() == [canonical_tile_sums(column) for column in terms]
    assert not result.exponents.any()
    for tile in range(len(result.sums)):
        tile_pairs = pairs[tile * TILE : (tile + 1) * TILE]
        gaps = [abs(p - q) for p, q in tile_pairs]
        quotients = [gap and (gap / abs(q) if q else math.inf) for gap, (_, q) in zip(gaps, tile_pairs, strict=True)]
        assert result.max_abs[tile] == max(gaps)
        assert result.max_rel[tile] == max(quotients)
        assert result.places[tile, MAX_ABS] == gaps.index(max(gaps))
        assert result.places[tile, MAX_REL] == quotients.index(max(quotients))
        assert result.counts[tile, DIFFERING] == sum(p != q for p, q in tile_pairs)
        assert result.counts[tile, NOT_CLOSE] == sum(abs(p - q) > 1e-4 + 1e-3 * abs(q) for p, q in tile_pairs)
        part = slice(tile * TILE, (tile + 1) * TILE)
        bits = np.count_nonzero(bits_of(a[part]) != bits_of(b[part])) if a_type == b_type else len(tile_pairs)
        assert result.counts[tile, BITS] == bits
        assert result.counts[tile, ONLY_A:NOT_NEAR].tolist() == [0, 0, 0]
        assert result.counts[tile, NOT_NEAR] == sum(abs(p - q) > 2e-3 * abs(q) for p, q in tile_pairs)
        assert result.places[tile, FIRST] == next((at for at, gap in enumerate(gaps) if gap), -1)


@pytest.mark.parametrize("dtype", [name for name in VALUE_TYPES if NUMPY_TYPES[name].itemsize < 4])
@pytest.mark.parametrize("b_type", VALUE_TYPES)
def test_ulps_count_the_values_of_the_coarser_type(backend, dtype, b_type):
    coarser = max(dtype, b_type, key=VALUE_TYPES.index)
    if NUMPY_TYPES[coarser].itemsize > 2:
        pytest.skip("has no list of all values")
    line = ordered(coarser)
    place = {value: number for number, value in enumerate(line)}
    rng = np.random.default_rng(5)
    a = gaussian(5000, dtype)
    wide = a.astype(np.float64) * rng.choice([1, 1, 1.01, 3, -1, 0, 1e9], 5000)
    limit = {"F16": 65504, "F8_E4M3": 448, "F8_E5M2": 57344}.get(b_type, 3e38)
    b = encode(np.clip(wide, -limit, limit), b_type)
    result = compare(backend, a, b)

    def numbers(values):
        wide = values.astype(np.float64)
        rounded = rounded_once(np.abs(wide), coarser).astype(np.float64)
        # What overflows a type without infinity is NaN.
        signed = np.copysign(np.where(np.isnan(rounded), math.inf, rounded), wide) + 0.0
        return [place[value] for value in signed.tolist()]

    distances = [abs(p - q) for p, q in zip(numbers(a), numbers(b), strict=True)]
    assert result.ulps.tolist() == [max(distances)]
    assert result.places[0, ULPS] == distances.index(max(distances))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 5e-324, -1e-310, 2.0**-1022, 1.7e308, 0.1])
def test_ulps_of_f64_are_steps_of_nextafter(backend, value):
    for count in (0, 1, 7, 150):
        lower = value
        for _ in range(count):
            lower = math.nextafter(lower, -math.inf)
        result = compare(backend, np.array([value]), np.array([lower]))
        assert result.ulps.tolist() == [count] == [steps(lower, value)]


def test_ulps_of_f32_are_steps_of_nextafter(backend):
    rng = np.random.default_rng(2)
    a = gaussian(3000, "F32")
    b, counts = a.copy(), rng.integers(0, 40, 3000)
    for number in range(40):
        b = np.where(counts > number, np.nextafter(b, np.float32(np.inf)), b)
    result = compare(backend, a, b)
    assert (result.ulps[0], result.places[0, ULPS]) == (counts.max(), counts.argmax())
    # F64 is rounded to F32 first; what overflows it is one step above its largest value.
    wide = np.array([1.0 + 2.0**-24, 1.0 + 2.0**-23, 1e300, -1e300])
    largest = np.finfo(np.float32).max
    for p, q, distance in zip(wide, [1, 1, largest, -largest], [0, 1, 1, 1], strict=True):
        assert compare(backend, np.array([p]), encode([q], "F32")).ulps.tolist() == [distance]


def test_the_longest_distances(backend):
    for dtype in VALUE_TYPES:
        largest = STORAGE[dtype].bits.type({"F64": 0x7FEF << 48 | 0xFFFF_FFFF_FFFF, "F32": 0x7F7F_FFFF, "BF16": 0x7F7F}
                                           .get(dtype, STORAGE[dtype].overflow - 1))  # fmt: skip
        a = np.array([largest], STORAGE[dtype].bits).view(NUMPY_TYPES[dtype])
        assert compare(backend, a, -a).ulps.tolist() == [2 * int(largest)]
        assert compare(backend, a, a * 0).ulps.tolist() == [int(largest)]


@pytest.mark.parametrize("dtype", [name for name in VALUE_TYPES if name != "F8_E4M3"])
@pytest.mark.parametrize("at", [0, 3000, TILE - 1])
def test_nan_and_inf_count_as_nothing_but_are_counted(backend, dtype, at):
    a = gaussian(TILE, dtype)
    b = near(a, dtype)
    inf, nan = math.inf, math.nan
    pairs = [(nan, nan), (inf, inf), (-inf, -inf), (nan, 1), (2, nan), (inf, 1), (3, -inf), (inf, -inf), (nan, inf)]
    x, y = a.copy(), b.copy()
    places = (at + 7000 * np.arange(len(pairs))) % TILE
    x[places], y[places] = encode([p for p, _ in pairs], dtype), encode([q for _, q in pairs], dtype)
    a[places] = b[places] = 0
    result, expected = compare(backend, x, y), compare(backend, a, b)
    assert result.counts[0, ONLY_A:NOT_NEAR].tolist() == [4, 4, 3]
    for count in (DIFFERING, NOT_CLOSE, NOT_NEAR):
        assert result.counts[0, count] == expected.counts[0, count] + 6
    assert result.counts[0, BITS] == np.count_nonzero(bits_of(x) != bits_of(y))
    for field in ("sums", "exponents", "max_abs", "max_rel", "ulps"):
        assert getattr(result, field).tolist() == getattr(expected, field).tolist(), field
    assert result.places[0, :FIRST].tolist() == expected.places[0, :FIRST].tolist()
    assert result.places[0, FIRST] == min(at for at in (expected.places[0, FIRST], *places[3:]) if at >= 0)


def test_f8_e4m3_has_a_nan_only(backend):
    result = compare(backend, encode([math.nan, math.nan, 1], "F8_E4M3"), encode([math.nan, 2, math.nan], "F8_E4M3"))
    assert result.counts[0, ONLY_A:NOT_NEAR].tolist() == [1, 1, 1]
    assert not result.sums.any()


def test_a_nan_is_the_same_whatever_its_payload_but_has_other_bits(backend):
    a, b = (np.array([code, 0x3F800000], np.uint32).view(np.float32) for code in (0x7FC00000, 0xFFC00001))
    result = compare(backend, a, b)
    assert result.counts.tolist() == [[0, 1, 0, 0, 0, 1, 0]]
    assert result.places.tolist() == [[0, 0, 0, -1]]


def test_zeros_of_both_signs_are_equal_and_have_other_bits(backend):
    for dtype in VALUE_TYPES:
        result = compare(backend, encode([0.0, -0.0, 0.0], dtype), encode([-0.0, 0.0, 0.0], dtype))
        assert result.counts.tolist() == [[0, 2, 0, 0, 0, 0, 0]]
        assert (result.ulps.tolist(), result.max_rel.tolist()) == ([0], [0.0])


def test_a_difference_from_zero_is_infinite_relatively(backend):
    result = compare(backend, encode([0, 5, 0, 1e-3], "F32"), encode([0, 4, 0, 0], "F32"))
    assert (result.max_rel.tolist(), result.places[0, MAX_REL]) == ([math.inf], 3)
    assert (result.max_abs.tolist(), result.places[0, MAX_ABS]) == ([1.0], 1)


def test_a_relative_difference_beyond_float64_is_infinite(backend):
    a, b = np.ones(700), np.ones(700)
    a[0] = 4
    a[600], b[600] = 1.7e308, -1.7e308
    result = compare(backend, a, b)
    assert (result.max_rel.tolist(), result.places.tolist()) == ([math.inf], [[600, 600, 600, 0]])


def test_the_first_of_equal_maxima_is_named(backend):
    """Behind the lanes that are looked at first, too."""
    for places in ([300, 2100], [2100, 300], [5, 2048 + 5], [2047, 2048], [60_000, 4096 + 1, 9000]):
        a, b = np.zeros(TILE, np.float32), np.zeros(TILE, np.float32)
        b[:] = 1
        a[:] = 1
        a[places] = 1.5
        assert compare(backend, a, b).places.tolist() == [[min(places)] * 4]
        b[places] = 0
        assert compare(backend, a, b).places.tolist() == [[min(places)] * 4]


def test_quotients_of_subnormals(backend):
    rng = np.random.default_rng(8)
    a, b = (rng.integers(-9, 9, 4096).astype(np.uint64).astype(np.int64) * 5e-324 for _ in range(2))
    result = compare(backend, a, b)
    with np.errstate(all="ignore"):
        quotients = np.where(a == b, 0, np.abs(a - b) / np.abs(b))
    assert (result.max_rel[0], result.places[0, MAX_REL]) == (quotients.max(), quotients.argmax())


RANGES = {"huge": 1e300, "largest": 1.7e308, "tiny": 1e-200, "subnormal": 1e-310, "ordinary": 1.0}


@pytest.mark.parametrize("a_range", RANGES)
@pytest.mark.parametrize("b_range", RANGES)
def test_sums_out_of_range_are_those_of_values_that_are_divided(backend, a_range, b_range):
    rng = np.random.default_rng(6)
    a, b = ((2 * rng.random(5000) - 1) * RANGES[scale] for scale in (a_range, b_range))
    result = compare(backend, a, b)
    expected = compare(NumpyBackend(), a, b)
    for field in result._fields:
        assert getattr(result, field).tolist() == getattr(expected, field).tolist(), field
    gaps, m, n = (int(exponent) for exponent in result.exponents[0])
    for exponent, values in ((m, a), (n, b)):
        squares = canonical_tile_sums([x * x for x in values.tolist()])[0]
        assert exponent == (0 if 2.0**-900 <= squares <= 2.0**1000 else math.frexp(np.abs(values).max())[1] - 1)
    x, y = (values / 2.0**exponent for values, exponent in ((a, m), (b, n)))
    with np.errstate(over="ignore"):
        apart = np.where(np.isfinite(a - b), (a - b) / 2.0**gaps, a / 2.0**gaps - b / 2.0**gaps)
    terms = [column.tolist() for column in (apart * apart, x * x, y * y, x * y)]
    assert result.sums[0].tolist() == [canonical_tile_sums(column)[0] for column in terms]
    assert np.isfinite(result.sums).all()


def test_a_difference_beyond_float64_is_infinite_and_its_sum_is_not(backend):
    result = compare(backend, np.array([1.7e308, 1.0]), np.array([-1.7e308, 1.0]))
    assert result.max_abs.tolist() == [math.inf]
    assert result.exponents[0].tolist() == [1023, 1023, 1023]
    assert result.sums[0, 0] == (3.4 * (1e308 / 2.0**1023)) ** 2


@pytest.mark.parametrize(
    ("a", "b", "exponent"),
    [([1.0, 0.0], [1.0, 5e-324], -1074), ([1e10, 1e-300], [1e10, 2e-300], -997), ([1.7e308, 1], [1.7e308, 1], 0)],
)
def test_a_tiny_difference_beside_large_elements_is_divided_and_not_they(backend, a, b, exponent):
    result = compare(backend, np.array(a), np.array(b))
    assert result.exponents[0, 0] == exponent
    assert result.sums[0, 0] == ((a[1] - b[1]) / 2.0**exponent) ** 2


def extreme(rng):
    """A tile of float64 values of any magnitude, beside values that are near, equal, opposite or of others."""
    count, (low, high) = int(rng.integers(1, 40)), np.sort(rng.choice([-1074, 1024, *rng.integers(-1074, 1024, 3)], 2))
    a, unrelated = (
        np.ldexp(rng.uniform(-1, 1, count), rng.integers(low, high + 1, count)) * (rng.random(count) < 0.9)
        for _ in range(2)
    )
    beside = [a, a, -a, np.nextafter(a, 0), a * (1 - 2.0**-30), a + 5e-324, unrelated]
    return a, np.choose(rng.integers(0, rng.integers(2, 8), count), beside)


@functools.cache
def extreme_tiles():
    """Hundreds of them, with the exact sums of each."""
    rng, tiles = np.random.default_rng(4), []
    for _ in range(400):
        a, b = extreme(rng)
        x, y = ([Fraction(value) for value in side.tolist()] for side in (a, b))
        pairs = list(zip(x, y, strict=True))
        exact = [(p - q) ** 2 for p, q in pairs], [p * p for p in x], [q * q for q in y], [p * q for p, q in pairs]
        tiles.append((a, b, list(map(sum, exact))))
    return tiles


def test_sums_of_extreme_tiles_are_those_of_exact_arithmetic(backend):
    tiles = extreme_tiles()
    result = compare(backend, [a for a, _, _ in tiles], [b for _, b, _ in tiles])
    expected = compare(NumpyBackend(), [a for a, _, _ in tiles], [b for _, b, _ in tiles])
    for field in result._fields:
        assert getattr(result, field).tolist() == getattr(expected, field).tolist(), field
    for (_, _, exact), sums, (k, m, n) in zip(tiles, result.sums.tolist(), result.exponents.tolist(), strict=True):
        of_gaps, of_a, of_b, products = (
            Fraction(sum_) * Fraction(2) ** scale
            for sum_, scale in zip(sums, (2 * k, 2 * m, 2 * n, m + n), strict=True)
        )
        for square, truth in zip((of_gaps, of_a, of_b), exact, strict=False):
            assert abs(square - truth) <= truth / 10**14
        # By the inequality of Cauchy and Schwarz, what is lost is small beside both norms.
        assert (products - exact[3]) ** 2 <= exact[1] * exact[2] / 10**28
    assert {int(np.sign(exponent)) for exponent in result.exponents[:, 0]} == {-1, 0, 1}
    assert 1023 in result.exponents[:, 0]


SHAPES = st.lists(
    st.tuples(
        st.sampled_from(VALUE_TYPES), st.sampled_from(VALUE_TYPES), st.sampled_from([0, 1, 37, 257, 2049, 65_537])
    ),
    max_size=3,
)


@given(shapes=SHAPES, seed=st.integers(0, 99))
def test_every_backend_finds_what_the_reference_finds(backend, shapes, seed):
    rng = np.random.default_rng(seed)

    def anything(count, dtype):
        return rng.integers(0, 256, count * NUMPY_TYPES[dtype].itemsize, np.uint8).view(NUMPY_TYPES[dtype])

    a = [anything(count, dtype) for dtype, _, count in shapes]
    b = [anything(count, dtype) for _, dtype, count in shapes]
    for a_array, b_array in zip(a, b, strict=True):
        if a_array.dtype == b_array.dtype and seed % 2:
            b_array[: b_array.size // 2] = a_array[: a_array.size // 2]
    tolerance = Tolerance(0.1 * (seed % 3), 0.5 * (seed % 4), 0.3 * (seed % 5))
    result, expected = (compare(which, a, b, tolerance, lead=(1, 2)) for which in (backend, NumpyBackend()))
    for field in result._fields:
        assert getattr(result, field).dtype == getattr(expected, field).dtype
        assert getattr(result, field).tolist() == getattr(expected, field).tolist(), field


def test_pieces_may_be_none_or_empty(backend):
    nothing = memoryview(bytearray(8))
    for pieces in ([], [Piece("F32", 0, 0)]):
        assert backend.differences(nothing, pieces, nothing, pieces, [Tolerance()] * len(pieces)).sums.tolist() == []


def test_each_piece_is_compared_by_its_tolerance(backend):
    a, b = [encode([1.25, 1.5, 3], dtype) for dtype in ("F32", "F16")], [encode([1, 1, 1], "F32")] * 2
    blocks = block_of(*a, lead=0), block_of(*b, lead=0)
    tolerances = [Tolerance(0.25, 0.0, 0.5), Tolerance(0.0, 2.0, 0.25)]
    counts = np.array(backend.differences(*blocks[0], *blocks[1], tolerances).counts).reshape(-1, 7)
    assert counts[:, [NOT_CLOSE, NOT_NEAR]].tolist() == [[2, 1], [0, 2]]
    counts = np.array(backend.differences(*blocks[0], *blocks[1], tolerances[::-1]).counts).reshape(-1, 7)
    assert counts[:, [NOT_CLOSE, NOT_NEAR]].tolist() == [[0, 2], [2, 1]]
    # Without any tolerance, what differs is neither close nor near.
    counts = np.array(backend.differences(*blocks[0], *blocks[1], [NONE] * 2).counts).reshape(-1, 7)
    assert counts[:, [NOT_CLOSE, NOT_NEAR]].tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize("at", [0, 63, 64, 2047, 2048, 40_000, TILE - 1])
def test_the_first_difference_is_that_of_values_behind_other_bits(backend, at):
    for dtype in VALUE_TYPES:
        a, b = gaussian(TILE, dtype), gaussian(TILE, dtype)
        a[: at // 2], b[: at // 2] = encode([math.nan], dtype), encode([math.nan], dtype)
        a[at // 2 : at], b[at // 2 : at] = encode([0.0], dtype), encode([-0.0], dtype)
        assert compare(backend, a[:at], b[:at]).places.reshape(-1, 4)[:, FIRST].tolist() == [-1] * (at > 0)
        a[at], b[at] = encode([1.0], dtype)[0], encode([math.nan], dtype)[0]
        assert compare(backend, a, b).places[0, FIRST] == at
