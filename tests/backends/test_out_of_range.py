"""Tiles whose sums leave float64, or would lose terms in it, against exact arithmetic."""

import functools
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import STATISTICS, block_of, canonical_tile_sums, encode, stored

from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.values import Addend, AddMode, NormSpec
from gradtool.reduction import norm_of

TILE = 65_536
# Around a row of lanes, and a tile.
SIZES = [1, 37, 2049, 65_536, 70_001]


def spread(elements, exponent, seed=3, width=20):
    """Values of both signs, the largest of about 2^exponent and the others up to 2^width times smaller.

    They have 12 bits, so that a sum of them has rounding errors only where they are far apart.
    """
    rng = np.random.default_rng(seed)
    values = (rng.integers(0, 1 << 11, elements) / 2**11 + 1) * rng.choice([-1.0, 1.0], elements)
    return np.ldexp(values, np.maximum(exponent - 1 - rng.integers(0, width + 1, elements), -1100))


def measured(backend, array, spec):
    block, pieces = block_of(array)
    return backend.tile_sums(block, pieces, spec)


def norm_from(result, order):
    return norm_of(result.sums, result.exponents, order)


def integers(array):
    """Float64 values in units of 2^-1074."""
    ratios = [value.as_integer_ratio() for value in np.abs(array).tolist()]
    return [(numerator << 1074) // denominator for numerator, denominator in ratios]


def assert_within_one_ulp(norm, array, order):
    """That a norm is off by one unit in its last place at most."""
    whole, unit = sum(value ** int(order) for value in integers(array)), Fraction(1, 2**1074)
    below, above = (max(Fraction(norm) + sign * Fraction(math.ulp(norm)), 0) / unit for sign in (-1, 1))
    assert below ** int(order) <= whole <= above ** int(order)


@pytest.mark.parametrize("order", [1.0, 2.0])
@pytest.mark.parametrize("exponent", [-1074, -1060, -1022, -900, -700, -540, -470, -451, 499, 505, 700, 1000, 1023])
@pytest.mark.parametrize("elements", [1, 2049, 70_001])
def test_norms_are_within_one_unit_in_the_last_place(backend, order, exponent, elements):
    # Of more than some values near the end of float64, the norm is beyond it.
    array = spread(1 if exponent == 1023 else elements, exponent)
    result = measured(backend, array, NormSpec(order))
    assert_within_one_ulp(norm_from(result, order), array, order)


CASES = {
    "sizes": st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
    "exponents": st.lists(st.integers(-1074, 1000), min_size=3, max_size=3),
    "width": st.sampled_from([0, 20, 900, 2000]),
    "seed": st.integers(0, 99),
}


@settings(max_examples=40)
@given(order=st.sampled_from([1.0, 2.0]), factor=st.sampled_from([1.0, 0.3, 2.0**-600, 1e200]), **CASES)
def test_every_backend_gives_the_bits_of_the_reference(backend, sizes, exponents, width, seed, order, factor):
    arrays = [spread(n, e, seed, width) for n, e in zip(sizes, exponents, strict=False)]
    spec = NormSpec(order, drop_nonfinite=seed % 2 == 1)
    for limit in (math.inf, 1e160):
        expected_block, pieces = block_of(*arrays, lead=5)
        expected = NumpyBackend().scale(expected_block, pieces, [factor] * len(pieces), limit, spec)
        block, pieces = block_of(*arrays, lead=5)
        result = backend.scale(block, pieces, [factor] * len(pieces), limit, spec)
        assert bytes(block) == bytes(expected_block)
        again = backend.tile_sums(block, pieces, spec._replace(drop_nonfinite=False))
        for statistic in STATISTICS:
            assert np.array_equal(getattr(result, statistic), getattr(expected, statistic), equal_nan=True), statistic
            assert any(result.inf) or np.array_equal(getattr(result, statistic), getattr(again, statistic)), statistic


@settings(max_examples=40)
@given(order=st.sampled_from([1.0, 2.0]), **CASES)
def test_a_split_changes_nothing(backend, sizes, exponents, width, seed, order):
    array = np.concatenate([spread(n, e, seed, width) for n, e in zip(sizes, exponents, strict=False)])
    whole = measured(backend, array, NormSpec(order))
    parts = [measured(backend, array[at : at + TILE], NormSpec(order)) for at in range(0, array.size, TILE)]
    assert whole.sums.tolist() == [part.sums[0] for part in parts]
    assert whole.exponents.tolist() == [part.exponents[0] for part in parts]
    if order == 2 or width <= 20:
        assert_within_one_ulp(norm_from(whole, order), array, order)


@pytest.mark.parametrize("order", [1.0, 2.0])
@pytest.mark.parametrize("exponent", [-1000, 1005])
@pytest.mark.parametrize("elements", [37, 70_001])
def test_the_sums_are_the_canonical_ones_of_the_divided_values(backend, order, exponent, elements):
    array = np.ldexp(np.random.default_rng(5).standard_normal(elements), exponent)
    result = measured(backend, array, NormSpec(order))
    for tile, (sum_, scale) in enumerate(zip(result.sums.tolist(), result.exponents.tolist(), strict=True)):
        values = np.abs(array[tile * TILE : (tile + 1) * TILE])
        assert scale == math.frexp(values.max())[1] - 1 != 0
        divided = [value / 2.0**scale for value in values.tolist()]
        assert [sum_] == canonical_tile_sums([x * x if order == 2 else x for x in divided])


@pytest.mark.parametrize(("order", "lowest", "highest"), [(1.0, -900, 1000), (2.0, -450, 500)])
def test_only_what_is_out_of_range_gets_an_exponent(backend, order, lowest, highest):
    for value, exponent in (
        (2.0**lowest, 0),
        (math.nextafter(2.0**lowest, 0), lowest - 1),
        (2.0**highest, 0),
        # Half a unit more, and the square is rounded back to the end of the range.
        (2.0**highest * (1 + 2.0**-51), highest),
        (0.0, 0),
    ):
        result = measured(backend, np.array([-value, 0.0]), NormSpec(order))
        assert result.exponents.tolist() == [exponent]
        assert result.sums.tolist() == [(value / 2.0**exponent) ** order]


@pytest.mark.parametrize("value", [5e-324, 3e-310, 1e-200, 1e200, 1.7976931348623157e308])
def test_the_exponent_is_that_of_the_largest_magnitude(backend, value):
    mantissa, exponent = math.frexp(value)
    result = measured(backend, np.array([0.0, -value]), NormSpec(2.0))
    assert result.exponents.tolist() == [exponent - 1]
    assert result.sums.tolist() == [(2 * mantissa) ** 2]


def test_every_exponent_there_is_divides_to_1(backend):
    exponents = range(-1074, 1024)
    block, pieces = block_of(*(np.array([math.ldexp(1, k)]) for k in exponents))
    result = backend.tile_sums(block, pieces, NormSpec())
    for k, sum_, exponent in zip(exponents, result.sums.tolist(), result.exponents.tolist(), strict=True):
        assert (sum_, exponent) == ((4.0**k, 0) if -450 <= k <= 500 else (1.0, k))


def test_the_maximum_norm_has_no_exponents(backend):
    assert measured(backend, np.array([1e200]), NormSpec(math.inf)).exponents.tolist() == [0]


@pytest.mark.parametrize("odd", [math.nan, math.inf])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
def test_a_tile_that_is_not_finite_is_not_summed_again_unless_that_is_dropped(backend, odd, order):
    array = np.concatenate([spread(TILE, 1005), spread(TILE, -960), spread(10, 0)])
    dropped = array.copy()
    array[[5, TILE + 5]], dropped[[5, TILE + 5]] = odd, 0
    result = measured(backend, array, NormSpec(order))
    assert result.exponents.tolist() == [0, 0, 0]
    assert np.isfinite(result.sums).tolist() == [False, False, True]
    result = measured(backend, array, NormSpec(order, drop_nonfinite=True))
    expected = measured(backend, dropped, NormSpec(order))
    assert result.exponents.tolist() == expected.exponents.tolist()
    assert [exponent != 0 for exponent in result.exponents] == [True, True, False]
    assert result.sums.tolist() == expected.sums.tolist()


@pytest.mark.parametrize("factor", [1e-160, 1e-250, 1.0])
def test_only_written_values_decide_whether_a_sum_is_out_of_range(backend, factor):
    block, pieces = block_of(spread(70_001, 0), spread(40, 300))
    result = backend.scale(block, pieces, [factor, factor], math.inf, NormSpec())
    written = np.concatenate([stored(block, piece) for piece in pieces])
    assert_within_one_ulp(norm_from(result, 2.0), written, 2.0)
    assert bool(result.exponents[0]) == (factor < 1e-130)


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("order", [1.0, 2.0])
def test_sums_that_are_added_up_are_measured_alike(backend, rounds, order):
    old, grad = spread(70_001, 700), spread(70_001, 705, seed=4)
    answers = []
    for tested in (NumpyBackend(), backend):
        block, pieces = block_of(old, spread(9, -800))
        sources = [(block_of(grad)[0], [Addend("F64", 0, grad.size, 0, 0.5)])]
        result = tested.accumulate(block, pieces, iter(sources), AddMode(rounds=rounds), NormSpec(order))
        answers.append([getattr(result, statistic).tolist() for statistic in STATISTICS])
    assert answers[0] == answers[1]
    assert [exponent != 0 for exponent in result.exponents] == [order == 2] * 3
    added = np.concatenate([old + 0.5 * grad, spread(9, -800)])
    assert_within_one_ulp(norm_from(result, order), added, order)


def test_float64_sums_of_small_types_are_scaled(backend):
    block, pieces = block_of(encode([1, 2], "F16"))
    sources = [(block_of(np.array([3e200, -4e200]))[0], [Addend("F64", 0, 2, 0, 1.0)])]
    result = backend.accumulate(block, pieces, iter(sources), AddMode(rounds=False), NormSpec())
    assert norm_from(result, 2.0) == pytest.approx(5e200, rel=1e-15)


def true_norm(array, order):
    """To 40 digits, whatever the order."""
    return _true_norm(tuple(array.astype(np.float64).tolist()), order)


@functools.cache
def _true_norm(values, order):
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = 40, 10**17, -(10**17)
        magnitudes = [abs(Decimal(value)) for value in values if value]
        largest, order = max(magnitudes), Decimal(order)
        return float(largest * sum((value / largest) ** order for value in magnitudes) ** (1 / order))


@pytest.mark.parametrize("dtype", ["F64", "F32", "F8_E5M2"])
@pytest.mark.parametrize("order", [0.9, 3.0, 50.0, 511.5, 512.5, 1e6, 1e300])
def test_other_orders_are_within_1e_12_of_the_truth(backend, dtype, order):
    for exponent in {"F64": [-1074, -800, -12, 0, 800, 1024], "F32": [-140, 120]}.get(dtype, [0, 12]):
        array = encode(spread(50, exponent, width=2), dtype)
        result = measured(backend, array, NormSpec(order))
        assert norm_from(result, order) == pytest.approx(true_norm(array, order), rel=1e-12, abs=1e-323)


@pytest.mark.parametrize("order", [0.01, 0.010000001, 0.0103, 0.011, 0.0127, 0.0155, 0.0211, 0.037, 0.07])
def test_orders_near_the_smallest_are_within_1e_12_of_the_truth(backend, order):
    """Where the rounding errors of a sum count up to a hundred times; of more values, the norm is beyond float64."""
    for seed, exponent in enumerate((-1073, -1000, -400, 0)):
        count = min(int(2 ** ((900 - exponent) * order)), 1000)
        for size in {1, 2, count // 2 + 1, count}:
            array = spread(size, exponent, seed, width=40 if exponent > -1000 else 1)
            result = measured(backend, array, NormSpec(order))
            assert norm_from(result, order) == pytest.approx(true_norm(array, order), rel=1e-12, abs=1e-323)


@pytest.mark.parametrize("order", [3.0, 100.0, 2000.0])
def test_tiles_of_another_order_are_merged_within_1e_12(backend, order):
    array = np.concatenate([np.full(TILE, 3e200), np.full(TILE, -2.9e200), np.full(7, 1e-200), np.zeros(5)])
    result = measured(backend, array, NormSpec(order))
    ratio = (2.9 / 3) ** order
    expected = 3e200 * (TILE * (1 + ratio)) ** (1 / order)
    assert norm_from(result, order) == pytest.approx(expected, rel=1e-12, abs=0)
