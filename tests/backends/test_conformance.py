"""What every backend must do to the last bit, against Python floats, ml_dtypes and numpy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    LOSSES,
    NUMPY_TYPES,
    QUIET_NANS,
    STATISTICS,
    VALUE_TYPES,
    bits_of,
    block_of,
    canonical_tile_sums,
    encode,
    gaussian,
    rounded_once,
    stored,
)

from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import NormSpec

pytestmark = pytest.mark.installed
# Odd on purpose: around a lane, a row, a tile; and sizes that are a multiple of nothing.
SIZES = [1, 2, 37, 199, 760, 2047, 2048, 2049, 4096, 65_535, 65_536, 65_537, 131_072, 200_003]


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_tile_sums_are_the_canonical_ones(backend, dtype, elements, norm_type):
    array = gaussian(elements, dtype)
    block, pieces = block_of(array)
    result = backend.tile_sums(block, pieces, NormSpec(norm_type))
    values = np.abs(array.astype(np.float64)).tolist()
    expected = canonical_tile_sums([x * x if norm_type == 2 else x for x in values])
    assert result.sums.tolist() == expected
    assert result.max_abs.tolist() == [max(values)]
    assert result.zeros.tolist() == [values.count(0.0)]
    assert result.nan.tolist() == result.inf.tolist() == [0]
    assert result.first_nonfinite.tolist() == [-1]


@pytest.mark.parametrize("norm_type", [0.5, 3.0, 7.25])
def test_other_orders_are_within_1e_12_of_the_truth(backend, norm_type):
    array = gaussian(70_000, "F32")
    block, pieces = block_of(array)
    sums = backend.tile_sums(block, pieces, NormSpec(norm_type)).sums
    truth = math.fsum(abs(x) ** norm_type for x in array.astype(float).tolist())
    assert math.fsum(sums) == pytest.approx(truth, rel=1e-12, abs=0)


def test_the_maximum_norm_sums_nothing_and_still_finds_the_maximum(backend):
    block, pieces = block_of(encode([3, -7, 2], "BF16"))
    result = backend.tile_sums(block, pieces, NormSpec(math.inf))
    assert result.max_abs.tolist() == [7.0]
    assert result.sums.tolist() == [0.0]


SMALL_TYPES = [dtype for dtype in VALUE_TYPES if NUMPY_TYPES[dtype].itemsize < 4]


def every_value(dtype):
    """As float64, by code."""
    codes = np.arange(2 ** (8 * STORAGE[dtype].bits.itemsize)).astype(STORAGE[dtype].bits)
    with np.errstate(invalid="ignore"):
        return codes.view(NUMPY_TYPES[dtype]).astype(np.float64)


@pytest.mark.parametrize("dtype", SMALL_TYPES)
@pytest.mark.parametrize("factor", [0.377, 1 / 3, 1e-4, 0.9999999, 0.0, 2.0**-126, 41.5, 1e30, math.nan])
@pytest.mark.parametrize("is_finite", [True, False])
def test_scaling_is_an_exact_product_rounded_once_for_every_bit_pattern(backend, dtype, factor, is_finite):
    codes = np.arange(2 ** (8 * STORAGE[dtype].bits.itemsize)).astype(STORAGE[dtype].bits)
    array, values = codes.view(NUMPY_TYPES[dtype]), every_value(dtype)
    # Kernels may do rows of numbers faster than those with NaN or Inf among them.
    order = np.argsort(~np.isfinite(values), kind="stable") if is_finite else np.argsort(codes % 251, kind="stable")
    block, pieces = block_of(array[order])
    backend.scale(block, pieces, [factor], math.inf, NormSpec())
    with np.errstate(all="ignore"):
        # Exact in float64, because both have 24 bits at most.
        expected = rounded_once(values[order] * float(np.float32(factor)), dtype)
    assert np.array_equal(bits_of(stored(block, pieces[0])), bits_of(expected))


# By type: a factor, and how many products a rounding to float32 before the last one would get wrong.
TWICE = {"F16": (0.6257861852645874, 32), "BF16": (0.7191780805587769, 254), "F8_E4M3": (1 / 6, 2)}
TWICE |= {"F8_E5M2": (0.0875, 1)}


@pytest.mark.parametrize("dtype", TWICE)
@pytest.mark.parametrize("sign", [1, -1])
def test_no_product_is_rounded_to_float32_first(backend, dtype, sign):
    factor, count = TWICE[dtype]
    values = every_value(dtype)
    array = encode(sign * values[np.isfinite(values) & ~np.signbit(values)], dtype)
    block, pieces = block_of(array)
    backend.scale(block, pieces, [factor], math.inf, NormSpec())
    products = array.astype(np.float64) * float(np.float32(factor))
    once, twice = (rounded_once(exact, dtype) for exact in (products, products.astype(np.float32).astype(np.float64)))
    assert np.count_nonzero(bits_of(once) != bits_of(twice)) == count
    assert np.array_equal(bits_of(stored(block, pieces[0])), bits_of(once))


@pytest.mark.parametrize("dtype", SMALL_TYPES)
def test_what_overflows_is_infinite_and_f8_e4m3_has_a_nan_without_a_sign_instead(backend, dtype):
    values = every_value(dtype)
    largest = float(values[np.isfinite(values)].max())
    block, pieces = block_of(encode([largest, -largest, math.nan, -math.nan, 1, -1], dtype))
    result = backend.scale(block, pieces, [2.0], math.inf, NormSpec())
    nan, two = QUIET_NANS[dtype], encode([2.0, -2.0], dtype)
    overflow = [nan, nan] if dtype == "F8_E4M3" else bits_of(encode([math.inf, -math.inf], dtype)).tolist()
    assert bits_of(stored(block, pieces[0])).tolist() == [*overflow, nan, nan, *bits_of(two).tolist()]
    assert (result.nan[0], result.inf[0]) == ((4, 0) if dtype == "F8_E4M3" else (2, 2))


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_scaling_wide_types_is_one_product(backend, dtype):
    rng = np.random.default_rng(11)
    bits = rng.integers(0, 2**64, 300_000, np.uint64)
    array = bits.view(np.float64) if dtype == "F64" else bits.view(np.float32)
    block, pieces = block_of(array)
    backend.scale(block, pieces, [0.1], math.inf, NormSpec())
    with np.errstate(all="ignore"):
        expected = array * array.dtype.type(0.1)
    result, numbers = stored(block, pieces[0]), ~np.isnan(array)
    assert np.array_equal(bits_of(result)[numbers], bits_of(expected)[numbers])
    assert (bits_of(result)[~numbers] == STORAGE[dtype].quiet_nan).all()


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_subnormals_are_not_flushed_and_minus_zero_stays(backend, dtype):
    codes = np.array([1, 2, 3], STORAGE[dtype].bits)
    array = np.concatenate([codes.view(NUMPY_TYPES[dtype]), encode([-0.0, 0.0], dtype)])
    block, pieces = block_of(array)
    result = backend.scale(block, pieces, [1.0], math.inf, NormSpec())
    assert stored(block, pieces[0]).tobytes() == array.tobytes()
    assert result.max_abs[0] == float(array[2].astype(np.float64)) > 0
    assert result.zeros[0] == 2


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_the_limit_clamps_and_leaves_nan_alone(backend, dtype):
    array = encode([0.1, -0.3, 0.5, -0.75, 3, -4, np.nan, 0.0], dtype)
    block, pieces = block_of(array)
    backend.scale(block, pieces, [1.0], 0.5, NormSpec())
    result = stored(block, pieces[0]).astype(np.float64)
    expected = np.clip(array.astype(np.float64), -0.5, 0.5)
    assert np.array_equal(result, expected, equal_nan=True)


# In F16 the nearest of the first is 1.0009765625, but that of its nearest float32 is 1.
LIMITS = [1.0004882812509095, 0.1, 3.0000001, 1e-8, 65_519.9, 1e6, 1e300, 1e-300, 459.0, 0.0]


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("limit", [*LIMITS, *(1.0 + step / 2**12 + 2.0**-40 for step in range(0, 4096, 255))])
def test_the_limit_is_rounded_once_to_the_type(backend, dtype, limit):
    array = encode([300, -300, 0.0, 2.0**-9, math.nan], dtype)
    block, pieces = block_of(array)
    backend.scale(block, pieces, [1.0], limit, NormSpec())
    bound = float(rounded_once(np.array([limit]), dtype).astype(np.float64)[0])
    bound = math.inf if math.isnan(bound) else bound
    expected = np.clip(array.astype(np.float64), -bound, bound)
    assert np.array_equal(stored(block, pieces[0]).astype(np.float64), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("term", [1.0, 2.0, 3.0, math.inf])
def test_the_sums_of_a_write_are_those_of_what_was_written(backend, dtype, term):
    array = gaussian(70_001, dtype)
    block, pieces = block_of(array)
    written = backend.scale(block, pieces, [0.377], 0.25, NormSpec(term))
    again = backend.tile_sums(block, pieces, NormSpec(term))
    for statistic in STATISTICS:
        assert getattr(written, statistic).tolist() == getattr(again, statistic).tolist()


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E5M2"])
def test_nonfinite_values_are_counted_and_the_first_is_found(backend, dtype):
    values = np.ones(70_000)
    values[[66_000, 66_001, 69_999]] = [np.inf, np.nan, -np.inf]
    block, pieces = block_of(encode(np.ones(5), dtype), encode(values, dtype), lead=1)
    result = backend.tile_sums(block, pieces, NormSpec())
    assert result.nan.tolist() == [0, 1]
    assert result.inf.tolist() == [0, 2]
    assert result.first_nonfinite.tolist() == [-1, 66_000]
    assert result.max_abs.tolist() == [1.0, math.inf]
    assert math.isnan(result.sums[2])


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "F8_E5M2"])
def test_dropped_values_are_counted_but_summed_and_written_as_zero(backend, dtype):
    block, pieces = block_of(encode([3, np.nan, 4, np.inf], dtype))
    spec = NormSpec(drop_nonfinite=True)
    result = backend.tile_sums(block, pieces, spec)
    assert result.sums.tolist() == [25.0]
    assert (result.nan[0], result.inf[0], result.max_abs[0]) == (1, 1, 4.0)
    written = backend.scale(block, pieces, [0.5], math.inf, spec)
    assert stored(block, pieces[0]).astype(float).tolist() == [1.5, 0.0, 2.0, 0.0]
    assert (written.sums[0], written.nan[0], written.inf[0]) == (6.25, 0, 0)


@pytest.mark.parametrize("dtype", SMALL_TYPES)
@pytest.mark.parametrize("drops", [True, False])
def test_rows_with_and_without_nan_are_scaled_alike(backend, dtype, drops):
    # Kernels do two rows of 2,048 at once; the third is short.
    array = gaussian(2 * 2048 + 37, dtype)
    array[[2100, 3000]] = encode([math.nan, -math.nan], dtype)
    block, pieces = block_of(array)
    result = backend.scale(block, pieces, [0.377], 1.5, NormSpec(drop_nonfinite=drops))
    values = array.astype(np.float64)
    if drops:
        values[np.isnan(values)] = 0
    expected = np.clip(rounded_once(values * float(np.float32(0.377)), dtype).astype(np.float64), -1.5, 1.5)
    assert np.array_equal(stored(block, pieces[0]).astype(np.float64), expected, equal_nan=True)
    assert (result.nan[0], result.max_abs[0]) == (0 if drops else 2, float(np.nanmax(np.abs(expected))))
    assert result.zeros[0] == np.count_nonzero(expected == 0)


def test_a_piece_may_lie_at_any_address(backend):
    arrays = [gaussian(n, dtype) for n, dtype in ((5, "F8_E4M3"), (2100, "F64"), (3, "BF16"), (70_001, "F32"))]
    for lead in range(1, 9):
        block, pieces = block_of(*arrays, lead=lead)
        result = backend.scale(block, pieces, [0.5] * 4, math.inf, NormSpec())
        assert len(result.sums) == 5
        for piece, array in zip(pieces, arrays, strict=True):
            expected = (array.astype(np.float64) * 0.5).astype(array.dtype)
            assert stored(block, piece).tobytes() == expected.tobytes()


def test_pieces_do_not_touch_what_lies_between_them(backend):
    block, pieces = block_of(np.ones(3, np.float32), np.ones(3, np.float32), np.ones(3, np.float32))
    backend.scale(block, [pieces[0], pieces[2]], [0.5, 0.25], math.inf, NormSpec())
    assert np.frombuffer(block, np.float32).tolist() == [0.5] * 3 + [1.0] * 3 + [0.25] * 3


@pytest.mark.parametrize("dtype", ["F64", "F32"])
def test_a_signalling_nan_is_a_nan_like_any_other(backend, dtype):
    bits = {"F64": [0x7FF0_0000_0000_0001, 0x4014_0000_0000_0000], "F32": [0x7F80_0001, 0x40A0_0000]}[dtype]
    array = np.array(bits, STORAGE[dtype].bits).view(NUMPY_TYPES[dtype])
    block, pieces = block_of(array)
    result = backend.tile_sums(block, pieces, NormSpec())
    assert (result.max_abs[0], result.nan[0]) == (5.0, 1)
    backend.scale(block, pieces, [1.0], 1.0, NormSpec())
    assert bits_of(stored(block, pieces[0])).tolist() == [
        STORAGE[dtype].quiet_nan,
        int(bits_of(np.ones(1, array.dtype))[0]),
    ]


def test_a_limit_of_zero_keeps_the_sign(backend):
    block, pieces = block_of(encode([-0.5, -0.0, 0.0, 0.5], "F64"), encode([-0.5, -0.0, 0.0, 0.5], "BF16"))
    backend.scale(block, pieces, [1.0, 1.0], 0.0, NormSpec())
    for piece in pieces:
        assert np.signbit(stored(block, piece).astype(float)).tolist() == [True, True, False, False]


def losses_of(result):
    return [getattr(result, statistic).tolist() for statistic in LOSSES]


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_a_write_says_how_many_values_it_loses(backend, dtype):
    normal, least = (float(np.array([code], STORAGE[dtype].bits).view(NUMPY_TYPES[dtype])[0]) for code in CODES[dtype])
    # Two become zero, one of which was subnormal; two normal values become subnormal, and the last one stays normal.
    values = np.zeros(5000)
    values[[7, 2048, 2049, 3000, 4999]] = [least, -normal / 2, normal, -1.5 * normal, 8 * normal]
    block, pieces = block_of(encode(values, dtype), encode(values, dtype), lead=1)
    result = backend.scale(block, pieces, [0.25, 0.0], math.inf, NormSpec())
    after = stored(block, pieces[0]).astype(float)
    subnormal = np.count_nonzero((after != 0) & (np.abs(after) < normal))
    zeros = 5 - np.count_nonzero(after)
    assert subnormal > 0
    assert zeros > 0
    # What is multiplied by 0 is meant to be 0.
    assert losses_of(result) == [[zeros, 0], [subnormal - 2, 0]]


# Of each type, the codes of the smallest normal value and of the smallest one.
CODES = {dtype: (storage.bounds[0], 1) for dtype, storage in STORAGE.items()}


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_what_only_looks_and_what_keeps_its_size_loses_nothing(backend, dtype):
    block, pieces = block_of(np.arange(2000).astype(STORAGE[dtype].bits).view(NUMPY_TYPES[dtype]))
    assert losses_of(backend.tile_sums(block, pieces, NormSpec())) == [[0], [0]]
    assert losses_of(backend.scale(block, pieces, [1.0], math.inf, NormSpec())) == [[0], [0]]


def test_a_limit_and_dropped_values_are_no_losses_but_a_limit_that_is_rounded_to_zero_is_one(backend):
    block, pieces = block_of(encode([1, math.nan, -math.inf, 0.5, 0], "F16"))
    spec = NormSpec(drop_nonfinite=True)
    assert losses_of(backend.scale(block, pieces, [0.5], 0.25, spec)) == [[0], [0]]
    assert losses_of(backend.scale(block, pieces, [1.0], 1e-5, spec)) == [[0], [2]]
    assert losses_of(backend.scale(block, pieces, [1.0], 1e-9, spec)) == [[2], [-2]]


PIECES = st.lists(st.tuples(st.sampled_from(VALUE_TYPES), st.sampled_from([0, 1, 37, 2049, 65_537])), max_size=4)


@given(shapes=PIECES, seed=st.integers(0, 99), norm_type=st.sampled_from([1.0, 2.0, math.inf]), limit=st.floats(0, 4))
def test_every_backend_gives_the_bits_of_the_reference(backend, shapes, seed, norm_type, limit):
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 256, n * NUMPY_TYPES[d].itemsize, np.uint8).view(NUMPY_TYPES[d]) for d, n in shapes]
    factors, spec = [float(rng.random())] * len(arrays), NormSpec(norm_type, drop_nonfinite=seed % 2 == 1)
    expected_block, pieces = block_of(*arrays, lead=3)
    expected = NumpyBackend().scale(expected_block, pieces, factors, limit, spec)
    block, pieces = block_of(*arrays, lead=3)
    result = backend.scale(block, pieces, factors, limit, spec)
    assert bytes(block) == bytes(expected_block)
    for statistic in (*STATISTICS, *LOSSES):
        assert np.array_equal(getattr(result, statistic), getattr(expected, statistic), equal_nan=True), statistic
