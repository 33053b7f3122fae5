"""Counts of subnormal and saturated values, against what numpy and ml_dtypes know of the types."""

import ml_dtypes
import numpy as np
import pytest
from support import NUMPY_TYPES, VALUE_TYPES, bits_of, block_of, encode, gaussian

from gradtool.backends.storage import STORAGE
from gradtool.backends.values import Piece

SIZES = [1, 7, 8, 37, 2047, 2048, 2049, 65_535, 65_537, 131_072, 200_003]


def counted(array):
    """How many are subnormal, and how many as large as any finite value, by their values."""
    limits = ml_dtypes.finfo(array.dtype)
    magnitudes = np.abs(array.astype(np.float64))
    subnormal = (magnitudes > 0) & (magnitudes < float(limits.smallest_normal))
    return int(subnormal.sum()), int((magnitudes == float(limits.max)).sum())


def found_in(backend, *arrays, lead=0):
    block, pieces = block_of(*arrays, lead=lead)
    result = backend.extremes(block, pieces)
    assert result.subnormal.typecode == result.saturated.typecode == "q"
    return list(zip(result.subnormal.tolist(), result.saturated.tolist(), strict=True))


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_the_bounds_are_those_of_the_type(dtype):
    limits = ml_dtypes.finfo(NUMPY_TYPES[dtype])
    bounds = np.array([limits.smallest_normal, limits.max]).astype(NUMPY_TYPES[dtype])
    assert bits_of(bounds).tolist() == list(STORAGE[dtype].bounds)


@pytest.mark.parametrize("dtype", [name for name in VALUE_TYPES if NUMPY_TYPES[name].itemsize < 4])
def test_every_code_is_counted_as_what_it_is(backend, dtype):
    kind = NUMPY_TYPES[dtype]
    array = np.arange(2 ** (8 * kind.itemsize)).astype(f"u{kind.itemsize}").view(kind)
    with np.errstate(invalid="ignore"):
        expected = counted(array)
    assert expected == (2 * (2 ** ml_dtypes.finfo(kind).nmant - 1), 2)
    assert found_in(backend, array) == [expected]


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_the_edges_of_wide_types_are_on_the_right_side(backend, dtype):
    kind = NUMPY_TYPES[dtype].type
    limits = np.finfo(kind)
    edges = [0, limits.smallest_subnormal, np.nextafter(limits.tiny, kind(0)), limits.tiny]
    edges += [np.nextafter(limits.max, kind(0)), limits.max, np.inf, np.nan]
    array = np.array([*edges, *(-np.array(edges))], kind)
    assert found_in(backend, array) == [(4, 2)]


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("elements", SIZES)
def test_any_number_of_values_at_any_address_is_counted(backend, dtype, elements):
    limits = ml_dtypes.finfo(NUMPY_TYPES[dtype])
    array = gaussian(elements, dtype)
    array[::5] = encode([float(limits.smallest_normal) / 2], dtype)
    array[1::7] = encode([-float(limits.max)], dtype)
    f8 = encode([1, 0, -0.0], "F8_E5M2")
    assert found_in(backend, f8, array, f8, lead=3) == [(0, 0), counted(array), (0, 0)]


def test_no_pieces_and_empty_pieces_count_nothing(backend):
    assert backend.extremes(memoryview(bytearray(8)), []).subnormal.tolist() == []
    result = backend.extremes(memoryview(bytearray(8)), [Piece("F32", 4, 0)])
    assert (result.subnormal.tolist(), result.saturated.tolist()) == ([0], [0])


@pytest.mark.parametrize(
    ("pieces", "bounds", "counts"),
    [
        ([(1, 0, 5)], (1, 2), (1, 2)),
        ([(1, -4, 1)], (1, 2), (1, 2)),
        ([(6, 0, 1)], (1, 2), (1, 2)),
        ([(1, 0, 4)], (2, 2), (1, 2)),
        ([(1, 0, 4)], (1, 2), (0, 2)),
    ],
)
def test_the_kernel_refuses_what_lies_outside_its_buffers(pieces, bounds, counts):
    kernels = pytest.importorskip("gradtool.backends._kernels", reason="the compiled kernels were not built")
    with pytest.raises(ValueError, match="piece|storage type"):
        kernels.extremes(
            bytearray(16), np.array(pieces, np.int64), np.zeros(bounds, np.uint64), np.zeros(counts, np.int64)
        )
