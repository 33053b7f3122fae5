"""Units that are multiplied by a factor of their own: every backend against the same products one by one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import LOSSES, NUMPY_TYPES, STATISTICS, VALUE_TYPES, block_of, encode, gaussian, rounded_once, stored

from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.values import NormSpec, TypedView, UnitLimits, Units


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("size", [1, 9, 25, 129, 2048, 2049, 70_000])
def test_each_element_is_multiplied_by_the_factor_of_its_unit(backend, dtype, size):
    values = gaussian(5000, dtype)
    start = 3 * size // 2
    factors = np.random.default_rng(1).random((start + 5000) // size + 1)
    block, pieces = block_of(values, lead=3)
    units = [Units(size, start % size, start // size)]
    result = backend.scale_units(block, pieces, units, memoryview(factors), NormSpec())
    unit_factors = factors if dtype == "F64" else factors.astype(np.float32).astype(np.float64)
    products = values.astype(np.float64) * unit_factors[np.arange(start, start + 5000) // size]
    assert stored(block, pieces[0]).tobytes() == rounded_once(products, dtype).tobytes()
    again = backend.tile_sums(block, pieces, NormSpec())
    assert result.sums.tobytes() == again.sums.tobytes()


@pytest.mark.parametrize("size", [1, 7, 300])
def test_what_units_lose_is_counted_for_each_piece(backend, size):
    values = np.full(1200, 2.0**-14)
    values[::2] = 2.0**-24
    block, pieces = block_of(encode([1.0], "F32"), encode(values, "F16"), encode(values, "F32"))
    # In units 0 and 2 of the second, what is subnormal becomes 0, and all else subnormal; unit 1 is meant to be 0.
    factors = np.array([1.0, 0.3, 0.0, *[0.3] * 1200])
    units = [Units(1, 0, 0), Units(size, 0, 1), Units(size, 0, 1)]
    result = backend.scale_units(block, pieces, units, memoryview(factors), NormSpec())
    lost = np.arange(1200) // size != 1
    became_zero, is_subnormal = int(lost[::2].sum()), int(lost[1::2].sum())
    assert result.new_zeros.tolist() == [0, became_zero, 0]
    assert result.new_subnormals.tolist() == [0, is_subnormal - became_zero, 0]


PIECES = st.lists(
    st.tuples(st.sampled_from(VALUE_TYPES), st.sampled_from([0, 1, 37, 2049]), st.sampled_from([1, 7, 24, 100, 3000])),
    min_size=1, max_size=3,
)  # fmt: skip


@given(shapes=PIECES, seed=st.integers(0, 99))
def test_every_backend_gives_the_bits_of_the_reference(backend, shapes, seed):
    rng = np.random.default_rng(seed)
    arrays = [
        rng.integers(0, 256, count * NUMPY_TYPES[dtype].itemsize, np.uint8).view(NUMPY_TYPES[dtype])
        for dtype, count, _ in shapes
    ]
    units, count = [], 0
    for _, elements, size in shapes:
        phase = int(rng.integers(size))
        units.append(Units(size, phase, count))
        count += (phase + elements) // size + 1
    factors = rng.choice([0.0, 1.0, 0.377, 1e-30, math.nan, 2.0], count)
    expected = None
    for tested in (NumpyBackend(), backend):
        block, pieces = block_of(*arrays, lead=1)
        result = tested.scale_units(block, pieces, units, memoryview(factors), NormSpec())
        results = [bytes(block), *(getattr(result, name).tobytes() for name in (*STATISTICS[1:], *LOSSES))]
        expected = expected or (results, result.sums)
        assert results == expected[0]
        assert np.array_equal(result.sums, expected[1], equal_nan=True)


def sides_of(dtypes, rows, size, seed):
    """Gradients and parameters in their types; some units are 0, and some are out of range, or not finite."""
    rng = np.random.default_rng(seed)
    sides = []
    for dtype in dtypes:
        values = rng.standard_normal((rows, size)) * rng.choice([0.0, 1e-3, 1.0, 30.0], (rows, 1))
        if seed % 3 == 0:
            with np.errstate(all="ignore"):
                values[rng.random(rows) < 0.1] *= rng.choice([1e-200, 1e200, np.inf, np.nan])
        with np.errstate(all="ignore"):
            sides.append(TypedView(memoryview(encode(values, dtype).tobytes()), dtype))
    return sides


@given(
    dtypes=st.tuples(*[st.sampled_from(VALUE_TYPES)] * 2),
    rows=st.sampled_from([0, 1, 5, 255, 256, 700]),
    size=st.sampled_from([1, 2, 9, 33, 128, 129, 1100]),
    limits=st.sampled_from([UnitLimits(0.1, 1e-3, 1.0), UnitLimits(1.0, 0.0, 1.0), UnitLimits(1e30, 1e10, 3.0)]),
    seed=st.integers(0, 99),
)
def test_factors_have_the_bits_of_the_reference(backend, dtypes, rows, size, limits, seed):
    sides = sides_of(dtypes, rows, size, seed)
    expected, result = (factors_of(tested, sides, size, limits) for tested in (NumpyBackend(), backend))
    assert result[1] == expected[1]
    assert np.array_equal(result[0], expected[0], equal_nan=True)


def factors_of(backend, sides, size, limits):
    """The factors and the counts of units."""
    itemsize = NUMPY_TYPES[sides[0].dtype].itemsize
    factors = np.full(len(sides[0].view) // itemsize // size, 9.0)
    counts = backend.unit_factors(*sides, size, limits, memoryview(factors))
    return factors, counts


@pytest.mark.parametrize("dtype", ["F64", "F32"])
def test_factors_and_counts_by_hand(backend, dtype):
    grads = encode([[3, 4], [0, 0], [30, 40], [3e-3, 4e-3], [math.inf, 0], [math.nan, 0]], dtype)
    params = encode([[30, 40], [1, 1], [0, 0], [3, 4], [1, 0], [math.inf, 0]], "F32")
    sides = [TypedView(memoryview(array.tobytes()), name) for array, name in ((grads, dtype), (params, "F32"))]
    factors, counts = factors_of(backend, sides, 2, UnitLimits(0.05, 2.0, 1.0))
    # Limits are 2.5, 0.1, 0.1, 0.25, 0.1 and infinite.
    assert factors.tolist()[:5] == [0.5, 1, 0.1 / 50, 1, 0]
    assert math.isnan(factors[5])
    assert counts == (4, 4, 1, -1)


def test_the_first_factor_that_is_out_of_range_is_told(backend):
    grads = encode([[1.0], [1e30], [1e35], [1e36]], "F32")
    params = TypedView(memoryview(encode([[1.0], [1e-5], [1e-5], [1e-5]], "F32").tobytes()), "F32")
    for dtype, beyond in (("F32", 2), ("F64", -1)):
        sides = TypedView(memoryview(grads.astype(NUMPY_TYPES[dtype]).tobytes()), dtype), params
        assert factors_of(backend, sides, 1, UnitLimits(1.0, 0.0, 2.0))[1] == (3, 4, 0, beyond)
