"""The trimmed means of every backend against numpy's median, Python's sort and exact fractions, and the networks."""

import itertools
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import NUMPY_TYPES, VALUE_TYPES, block_of, gaussian

from gradtool.backends.cpu import NumpyBackend, sorting_network
from gradtool.backends.values import Addend, Trim

MEDIAN = Trim()


def means(backend, arrays, trim=MEDIAN, weights=None):
    """The trimmed means of arrays of the same length, each with a weight."""
    weights = weights or [1.0] * len(arrays)
    block, pieces = block_of(*arrays, lead=1)
    addends = [Addend(p.dtype, p.offset, p.elements, 0, w) for p, w in zip(pieces, weights, strict=True)]
    return backend.trimmed_means(block, addends, trim, len(arrays[0]))


@pytest.mark.parametrize("count", range(1, 11))
def test_a_network_puts_the_middle_in_order(count):
    """Of every row of zeros and ones, which proves it for all values."""
    for dropped in range((count + 1) // 2):
        pairs = sorting_network(count, dropped).tolist()
        for row in itertools.product((0, 1), repeat=count):
            values = list(row)
            for low, high in pairs:
                values[low], values[high] = sorted((values[low], values[high]))
            assert values[dropped : count - dropped] == sorted(row)[dropped : count - dropped]


def test_a_network_leaves_out_what_the_middle_does_not_depend_on():
    assert len(sorting_network(9, 0)) == 26
    assert len(sorting_network(9, 4)) == 22
    assert sorting_network(1, 0).tolist() == []


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 16, 33, 100, 257])
@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_the_median_is_that_of_numpy(backend, dtype, count):
    arrays = [gaussian(300 if count < 100 else 37, dtype, seed=seed) for seed in range(count)]
    expected = np.median(np.stack(arrays).astype(np.float64), axis=0) + 0.0
    assert means(backend, arrays).tobytes() == expected.tobytes()


@pytest.mark.parametrize("elements", [1, 15, 16, 17, 255, 256, 257, 2049])
def test_any_number_of_elements(backend, elements):
    arrays = [gaussian(elements, "F32", seed=seed) for seed in range(5)]
    expected = [statistics.median(column) for column in zip(*(array.tolist() for array in arrays), strict=True)]
    assert means(backend, arrays).tolist() == expected


@pytest.mark.parametrize("dropped", [0, 1, 3, 4])
def test_a_trimmed_mean_adds_what_is_left_in_ascending_order(backend, dropped):
    arrays = [gaussian(100, "F64", seed=seed) for seed in range(9)]
    expected = []
    for column in zip(*(array.tolist() for array in arrays), strict=True):
        total, *following = sorted(column)[dropped : 9 - dropped]
        for value in following:
            total += value
        expected.append(total / (9 - 2 * dropped))
    result = means(backend, arrays, Trim(dropped)).tolist()
    assert result == expected
    for mean, column in zip(result, zip(*arrays, strict=True), strict=True):
        left = sorted(map(Fraction, column))[dropped : 9 - dropped]
        assert abs(Fraction(mean) - sum(left) / len(left)) < 9 * Fraction(2) ** -50


def test_types_and_weights_may_differ(backend):
    arrays = [np.array([1.0, -4]), np.array([2, 3], np.float32), gaussian(2, "BF16")]
    arrays[2][:] = [8, 1]
    assert means(backend, arrays, weights=[3.0, 1.0, 0.25]).tolist() == [2.0, 0.25]
    assert means(backend, arrays, weights=[1.0, -1.0, 1.0]).tolist() == [1.0, -3.0]


def test_a_nan_makes_the_median_nan_and_infinities_are_in_order(backend):
    inf, nan = math.inf, math.nan
    arrays = [np.array(row, np.float32) for row in ([nan, inf, inf, inf], [1, -inf, inf, -inf], [2, 5, 0, -inf])]
    result = means(backend, arrays)
    assert np.array_equal(result, [nan, 5, inf, -inf], equal_nan=True)
    assert np.array_equal(result, np.median(np.stack(arrays), axis=0), equal_nan=True)
    both = means(backend, arrays, Trim(0))
    assert np.array_equal(both, [nan, nan, inf, nan], equal_nan=True)


@pytest.mark.parametrize("dtype", ["F32", "F64", "F16"])
def test_if_all_must_be_finite_any_other_value_makes_the_mean_nan(backend, dtype):
    largest = float(np.finfo(NUMPY_TYPES[dtype]).max)
    rows = [[math.inf, math.nan, 1, largest], [2, 2, 2, largest], [-math.inf, 3, 3, -largest]]
    arrays = [np.array(row, NUMPY_TYPES[dtype]) for row in rows]
    result = means(backend, arrays, Trim(None, finite=True))
    assert np.array_equal(result, [math.nan, math.nan, 2, largest], equal_nan=True)


@pytest.mark.parametrize("order", [(0.0, -0.0, -0.0), (-0.0, 0.0, -0.0), (-0.0, -0.0, 0.0)])
def test_minus_zero_counts_as_zero_in_any_order(backend, order):
    for dtype in (np.float32, np.float64):
        result = means(backend, [np.array([value], dtype) for value in order])
        assert math.copysign(1, result[0]) == 1
    smallest = means(backend, [np.array([-5e-324]), np.array([0.0]), np.array([0.0])], Trim(0))
    assert math.copysign(1, smallest[0]) == 1


def test_elements_that_fewer_have_are_means_of_fewer_and_those_of_none_are_zero(backend):
    block, pieces = block_of(*[np.array([value, value], np.float32) for value in (5, 1, 3)])
    first, second, third = (Addend("F32", piece.offset, 2, 0, 1.0) for piece in pieces)
    later = [first._replace(at=4), second._replace(at=4, elements=2)]
    result = backend.trimmed_means(block, [first, second, third, *later, third._replace(at=6)], Trim(), 9)
    assert result.tolist() == [3, 3, 0, 0, 3, 3, 3, 3, 0]


@given(
    count=st.sampled_from([1, 2, 3, 6, 9, 17]),
    elements=st.sampled_from([1, 37, 300]),
    dtypes=st.lists(st.sampled_from(VALUE_TYPES), min_size=1, max_size=3),
    weight=st.sampled_from([1.0, 0.3]),
    finite=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_backend_gives_the_bits_of_the_reference(backend, count, elements, dtypes, weight, finite, seed):
    rng = np.random.default_rng(seed)
    types = [NUMPY_TYPES[dtypes[i % len(dtypes)]] for i in range(count)]
    arrays = [rng.integers(0, 256, elements * kind.itemsize, np.uint8).view(kind) for kind in types]
    trim = Trim([None, 0, (count - 1) // 2, (count - 1) // 3][seed % 4], finite=finite)
    expected = means(NumpyBackend(), arrays, trim, [weight] * count)
    result = means(backend, arrays, trim, [weight] * count)
    assert np.array_equal(result, expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert result[numbers].tobytes() == expected[numbers].tobytes()
