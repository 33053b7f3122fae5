import numpy as np
import pytest
from support import NUMPY_TYPES, QUIET_NANS, VALUE_TYPES, bits_of, rounded_once

from gradtool.backends.storage import STORAGE

SMALL_TYPES = [dtype for dtype in VALUE_TYPES if NUMPY_TYPES[dtype].itemsize < 4]


def all_codes(dtype):
    storage = STORAGE[dtype]
    return np.arange(2 ** (8 * storage.bits.itemsize)).astype(storage.bits)


@pytest.mark.parametrize("dtype", SMALL_TYPES)
def test_every_code_widens_to_the_value_that_others_give_it(dtype):
    codes = all_codes(dtype)
    result, expected = STORAGE[dtype].widen(codes), codes.view(NUMPY_TYPES[dtype]).astype(np.float32)
    assert np.array_equal(np.isnan(result), np.isnan(expected))
    numbers = ~np.isnan(result)
    assert np.array_equal(bits_of(result)[numbers], bits_of(expected)[numbers])


@pytest.mark.parametrize("dtype", SMALL_TYPES)
def test_every_code_survives_widening_and_narrowing(dtype):
    codes = all_codes(dtype)
    values = STORAGE[dtype].widen(codes)
    numbers = ~np.isnan(values)
    assert np.array_equal(STORAGE[dtype].narrow(values)[numbers], codes[numbers])


def hard_to_round(dtype):
    """Every value, every midpoint of two neighbours, and the float32 on either side of each midpoint; and any bits."""
    values = STORAGE[dtype].widen(all_codes(dtype))
    values = np.unique(values[np.isfinite(values)]).astype(np.float64)
    midpoints = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    beyond = np.float32(values[-1]) * np.array([1, 1.01, 1.03, 1.0625, 1.07, 2, 1e30], np.float32)
    around = [midpoints, np.nextafter(midpoints, np.float32(np.inf)), np.nextafter(midpoints, np.float32(-np.inf))]
    rng = np.random.default_rng(5)
    return np.concatenate([*around, beyond, -beyond, rng.integers(0, 2**32, 1 << 18, np.uint32).view(np.float32)])


@pytest.mark.parametrize("dtype", SMALL_TYPES)
def test_narrowing_rounds_to_nearest_even_as_others_do(dtype):
    with np.errstate(all="ignore"):
        values = hard_to_round(dtype)
        values = values[~np.isnan(values)]
        expected = rounded_once(values.astype(np.float64), dtype)
        result = STORAGE[dtype].narrow(values)
    assert np.array_equal(result, bits_of(expected))


@pytest.mark.parametrize("dtype", SMALL_TYPES)
def test_values_that_float32_holds_are_rounded_as_others_do(dtype):
    """The truth that all tests of rounding share, against numpy and ml_dtypes."""
    with np.errstate(all="ignore"):
        values = hard_to_round(dtype)
        expected = values.astype(NUMPY_TYPES[dtype])
        result = rounded_once(values.astype(np.float64), dtype)
        numbers = ~np.isnan(expected.astype(np.float64))
    assert np.array_equal(bits_of(result)[numbers], bits_of(expected)[numbers])
    assert (bits_of(result)[~numbers] == QUIET_NANS[dtype]).all()


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_every_nan_is_written_as_the_one_quiet_nan(dtype):
    storage = STORAGE[dtype]
    values = np.array([np.nan, -np.nan, 1.0], storage.work)
    bits = values.view(f"u{storage.work.itemsize}")
    bits[0] |= bits.dtype.type(0b101)  # A payload, which must not come through.
    codes = storage.narrow(values)
    assert codes[0] == codes[1] == storage.quiet_nan
    assert np.isnan(codes.view(NUMPY_TYPES[dtype])[0])


@pytest.mark.parametrize(
    ("dtype", "value", "stored"),
    [
        ("F64", 0.1, 0.1),
        ("F32", 0.1, 0.10000000149011612),
        ("BF16", 0.1, 0.10009765625),
        ("F16", 1e6, np.inf),
        # Just above the middle of two values, by less than float32 can tell.
        ("F16", 1.0004882812509095, 1.0009765625),
        ("BF16", 1.00390625 + 2.0**-40, 1.0078125),
        ("F8_E4M3", 1.0625 + 2.0**-40, 1.125),
        ("F8_E5M2", 1.125 + 2.0**-40, 1.25),
    ],
)
def test_rounded_is_what_a_number_becomes_in_storage(dtype, value, stored):
    assert STORAGE[dtype].rounded(value) == stored
