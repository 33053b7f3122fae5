"""Units that are multiplied by a factor of their own: every backend against the same products one by one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import FACTS, NUMPY_TYPES, VALUE_TYPES, block_of, gaussian, rounded_once, stored

from gradtool.backends import NormSpec, Units
from gradtool.backends.cpu import NumpyBackend


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("size", [1, 9, 25, 129, 2048, 2049, 70_000])
def test_each_element_is_multiplied_by_the_factor_of_its_unit(backend, dtype, size):
    array = gaussian(5000, dtype)
    start = 3 * size // 2
    factors = np.random.default_rng(1).random((start + 5000) // size + 1)
    block, pieces = block_of(array, lead=3)
    units = [Units(size, start % size, start // size)]
    found = backend.scale_units(block, pieces, units, factors, NormSpec())
    own = factors if dtype == "F64" else factors.astype(np.float32).astype(np.float64)
    products = array.astype(np.float64) * own[np.arange(start, start + 5000) // size]
    assert stored(block, pieces[0]).tobytes() == rounded_once(products, dtype).tobytes()
    again = backend.tile_sums(block, pieces, NormSpec())
    assert found.sums.tobytes() == again.sums.tobytes()


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
    for one in (NumpyBackend(), backend):
        block, pieces = block_of(*arrays, lead=1)
        found = one.scale_units(block, pieces, units, factors, NormSpec())
        facts = [bytes(block), *(getattr(found, fact).tobytes() for fact in FACTS[1:])]
        expected = expected or (facts, found.sums)
        assert facts == expected[0]
        assert np.array_equal(found.sums, expected[1], equal_nan=True)
