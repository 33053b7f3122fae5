"""Stored values as float64 and back, on every backend."""

from array import array

import ml_dtypes
import numpy as np
import pytest
from support import NUMPY_TYPES, QUIET_NANS, VALUE_TYPES, bits_of, encode, rounded_once

from gradtool.backends.storage import STORAGE

# Of 1, in the types of 16 bits and fewer.
ULPS = {
    dtype: float(ml_dtypes.finfo(NUMPY_TYPES[dtype]).eps) for dtype in VALUE_TYPES if NUMPY_TYPES[dtype].itemsize < 4
}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.5]


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_values_are_widened_without_rounding(backend, dtype):
    stored = encode([*SPECIAL, *np.random.default_rng(7).standard_normal(3000)], dtype)
    result = backend.widen(memoryview(stored.tobytes()), dtype)
    assert isinstance(result, array)
    expected = stored.astype(np.float64)
    assert np.where(np.isnan(result), 0, result).tobytes() == np.where(np.isnan(expected), 0, expected).tobytes()
    assert np.isnan(result).tolist() == np.isnan(expected).tolist()


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_an_offset_is_added_to_what_is_widened(backend, dtype):
    stored = encode([-0.0, 0.0, 1.0, -2.0], dtype)
    assert np.signbit(backend.widen(memoryview(stored.tobytes()), dtype, 0.0)).tolist() == [False, False, False, True]
    assert backend.widen(memoryview(stored.tobytes()), dtype, 0.1).tolist() == [0.1, 0.1, 1.1, -1.9]


def test_nothing_is_widened_or_narrowed_to_nothing(backend):
    assert len(backend.widen(memoryview(b""), "F32")) == 0
    assert bytes(backend.narrow(array("d"), "F32")) == b""


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_values_are_narrowed_as_others_do(backend, dtype):
    values = np.random.default_rng(8).standard_normal(3000) * 3
    assert bytes(backend.narrow(array("d", values), dtype)) == bits_of(encode(values, dtype)).tobytes()


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_nan_is_narrowed_to_the_quiet_one(backend, dtype):
    codes = np.frombuffer(backend.narrow(array("d", [-np.nan, np.nan]), dtype), STORAGE[dtype].bits)
    assert codes.tolist() == [QUIET_NANS[dtype]] * 2


@pytest.mark.parametrize("dtype", ULPS)
def test_values_are_narrowed_with_one_rounding(backend, dtype):
    """Just above and below the middle of two values, by less than float32 can tell; each alone and among others."""
    ulp = ULPS[dtype]
    middles = [
        sign * (1 + ulp * odd / 2 + away) for sign in (1, -1) for odd in (1, 3) for away in (-(2**-40), 0, 2**-40)
    ]
    for values in (*([middle] for middle in middles), middles * 100 + [0.3] * 1000):
        expected = rounded_once(np.array(values), dtype).tobytes()
        assert bytes(backend.narrow(array("d", values), dtype)) == expected
