"""Counts by binary exponent on every backend, against Python's frexp; the ranges of the types, against ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import NUMPY_TYPES, VALUE_TYPES, block_of, gaussian

from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import NormSpec, Piece

SMALL_TYPES = [dtype for dtype in VALUE_TYPES if NUMPY_TYPES[dtype].itemsize < 4]


def truth(array):
    """The exponents of a type's values and how often each occurs, one value at a time; and the largest finite one."""
    counts, largest = {}, 0.0
    with np.errstate(invalid="ignore"):
        values = array.astype(np.float64).tolist()
    for value in values:
        if value and math.isfinite(value):
            exponent = math.frexp(value)[1]
            counts[exponent] = counts.get(exponent, 0) + 1
            largest = max(largest, abs(value))
    return counts, largest


def histogram(backend, block, pieces):
    return backend.histogram(block, pieces, NormSpec())[1]


def counted(backend, *arrays, lead=0):
    """What a backend counts in each array."""
    block, pieces = block_of(*arrays, lead=lead)
    result, at, counts = histogram(backend, block, pieces), 0, []
    for piece in pieces:
        bins = STORAGE[piece.dtype].bins
        piece_counts = result.counts[at : at + len(bins)].tolist()
        counts.append({exponent: count for exponent, count in zip(bins, piece_counts, strict=True) if count})
        at += len(bins)
    assert at == len(result.counts)
    return list(zip(counts, result.largest.tolist(), strict=True))


@pytest.mark.parametrize("dtype", SMALL_TYPES)
def test_every_code_of_the_small_types_is_counted_where_frexp_puts_it(backend, dtype):
    size = NUMPY_TYPES[dtype].itemsize
    codes = np.arange(2 ** (8 * size)).astype(f"u{size}").view(NUMPY_TYPES[dtype])
    assert counted(backend, codes) == [truth(codes)]


@pytest.mark.parametrize("dtype", ["F64", "F32"])
def test_any_bits_are_counted_where_frexp_puts_them(backend, dtype):
    kind = NUMPY_TYPES[dtype]
    codes = np.random.default_rng(5).integers(0, 256, 70_001 * kind.itemsize, np.uint8).view(f"u{kind.itemsize}")
    # The exponent field is cleared in a third of them, which are then subnormal or zero.
    fraction = np.dtype(f"u{kind.itemsize}").type((1 << {"F64": 52, "F32": 23}[dtype]) - 1)
    codes[::3] &= fraction
    codes[:40] = [(fraction + 1) >> bit for bit in range(20)] * 2
    codes[40:43] = 0, fraction, fraction + 1
    array = codes.view(kind)
    assert counted(backend, array, lead=3) == [truth(array)]


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("elements", [0, 1, 7, 8191, 8192, 8193, 65_537])
def test_any_number_of_values_is_counted(backend, dtype, elements):
    array = gaussian(elements, dtype)
    assert counted(backend, array, lead=1) == [truth(array)]


def test_pieces_of_all_types_are_counted_apart(backend):
    arrays = [gaussian(9_000 + 13 * i, dtype, seed=i) for i, dtype in enumerate([*VALUE_TYPES, *VALUE_TYPES])]
    assert counted(backend, *arrays, lead=5) == [truth(array) for array in arrays]
    assert counted(backend) == []


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_what_is_zero_or_not_finite_is_in_no_bin(backend, dtype):
    values = [0.0, -0.0, math.nan, *([] if dtype == "F8_E4M3" else [math.inf, -math.inf]), 1.5]
    array = np.array(values * 3000).astype(NUMPY_TYPES[dtype])
    assert counted(backend, array) == [({1: 3000}, 1.5)]
    assert counted(backend, array[:-1]) == [({1: 2999}, 1.5)]
    assert counted(backend, array[np.isnan(array)]) == [({}, 0.0)]


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("span", [1, 14, 15, 16, 40])
def test_values_of_any_span_are_counted(backend, dtype, span):
    """Of the largest exponent, of one far below it, and what is in no bin; from the least values of a type on."""
    least = STORAGE[dtype].least - 1
    largest = min(least + span, STORAGE[dtype].top - 1)
    values = [2.0**largest, 2.0 ** (largest - 1), 2.0**least, 2.0 ** (least + 1), 0.0, math.nan]
    array = np.array([-values[0], *values * 700]).astype(NUMPY_TYPES[dtype])
    assert counted(backend, array) == [truth(array)]
    if dtype != "F8_E4M3":
        array[::5] = math.inf
        assert counted(backend, array, lead=1) == [truth(array)]


@given(values=st.lists(st.floats(width=32), max_size=50))
def test_any_float32_is_counted(values):
    from support import compiled

    array = np.array(values, np.float32)
    assert counted(NumpyBackend(), array) == [truth(array)]
    assert counted(compiled(), array) == [truth(array)]


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_a_block_on_the_device_is_counted_there(backend, dtype):
    array = gaussian(70_001, dtype)
    block, pieces = block_of(array)
    expected, data = histogram(backend, block, pieces), backend.to_device(block)
    result = histogram(backend, data, pieces)
    assert [field.tobytes() for field in result] == [field.tobytes() for field in expected]


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_ranges_are_those_of_the_types(dtype):
    info = ml_dtypes.finfo(NUMPY_TYPES[dtype])
    numbers = info.max, info.smallest_normal, info.smallest_subnormal
    storage, exponents = STORAGE[dtype], [math.frexp(float(number))[1] for number in numbers]
    assert [storage.top, storage.normal, storage.least] == exponents


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_subnormal_values_are_those_below_the_smallest_normal_one(dtype):
    array = gaussian(50_000, dtype)
    least = 2.0 ** (STORAGE[dtype].normal - 1)
    array[:2] = least, -least
    array[2:9] = np.array([least * (1 - 2.0**-bit) for bit in range(1, 8)]).astype(array.dtype)
    magnitudes = np.abs(array.astype(np.float64))
    block, pieces = block_of(array)
    counts = histogram(NumpyBackend(), block, pieces).counts
    below = sum(counts[: STORAGE[dtype].normal - STORAGE[dtype].bins.start])
    assert below == ((magnitudes > 0) & (magnitudes < least)).sum() > 0


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_what_is_counted_is_summed_as_ever(backend, order):
    block, pieces = block_of(gaussian(70_001, "F32"), gaussian(5, "F64"), gaussian(0, "BF16"), gaussian(9, "F16"))
    spec = NormSpec(order)
    sums, counts = backend.histogram(block, pieces, spec)
    assert vars(sums) == vars(backend.tile_sums(block, pieces, spec))
    assert counts == histogram(NumpyBackend(), block, pieces)


def test_a_piece_may_begin_anywhere(backend):
    array = gaussian(9000, "F16")
    data = memoryview(bytearray(b"\xff" + array.tobytes()))
    assert sum(histogram(backend, data, [Piece("F16", 1, 9000)]).counts) == sum(truth(array)[0].values())
