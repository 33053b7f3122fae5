import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtool.reduction import LANES, fold, norm_of, rescue_divisor, tile_count, total


def test_a_tile_has_65536_elements():
    assert [tile_count(n) for n in (0, 1, 65_536, 65_537)] == [0, 1, 1, 2]


def test_lanes_are_folded_neighbours_first():
    # 2^53 swallows a 1 that meets it alone, but not two that have met each other.
    lanes = np.zeros((1, LANES))
    lanes[0, :4] = [2.0**53, 0, 1, 1]
    assert fold(lanes).tolist() == [2.0**53 + 2]
    lanes[0, :4] = [2.0**53, 1, 1, 0]
    assert fold(lanes).tolist() == [2.0**53]


def test_the_total_is_correctly_rounded_in_any_order():
    sums = [1e16, 1.0, 1e-16, 1.0, 3.0]
    assert total(sums) == total(sums[::-1]) == 10000000000000006.0


@given(
    count=st.sampled_from([1, 255, 256, 300, 5000]),
    spread=st.sampled_from([0, 3, 60, 300, 2000]),
    seed=st.integers(0, 999),
)
def test_the_total_of_many_sums_is_correctly_rounded_too(count, spread, seed):
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-min(1070, spread), min(1000, spread) + 1, count)
    values = np.ldexp(rng.random(count), exponents) * (rng.random(count) < 0.9)
    assert total(values) == float(sum(map(Fraction, values.tolist()))) == math.fsum(values)


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1.7e308])
def test_the_total_of_many_sums_keeps_what_is_not_finite(odd):
    values = np.ones(1000)
    values[[3, 900]] = odd
    assert math.isnan(total(values)) if math.isnan(odd) else total(values) == math.inf


def test_a_total_beyond_float64_is_infinite():
    assert total([1.7e308, 1.7e308]) == math.inf


@pytest.mark.parametrize(
    ("total_sum", "norm_type", "divisor", "norm"),
    [(25.0, 2.0, 1.0, 5.0), (7.0, 1.0, 1.0, 7.0), (27.0, 3.0, 1.0, 3.0), (25.0, 2.0, 1024.0, 5120.0)],
)
def test_a_norm_is_the_root_of_its_sum(total_sum, norm_type, divisor, norm):
    assert norm_of(total_sum, norm_type, divisor) == norm


def test_a_norm_beyond_float64_is_infinite():
    assert norm_of(4.0, 2.0, 2.0**1023) == math.inf
    assert norm_of(1e300, 0.5) == math.inf


def test_good_sums_need_no_rescue():
    assert rescue_divisor(12.0, 3.0, 2.0) == 1
    assert rescue_divisor(2.0**-900, 2.0**-450, 2.0) == 1
    assert rescue_divisor(2.0**1000, 2.0**500, 2.0) == 1
    assert rescue_divisor(0.0, 0.0, 2.0) == 1
    assert rescue_divisor(math.inf, math.inf, 2.0) == 1
    assert rescue_divisor(math.nan, math.nan, 2.0) == 1


EXTREMES = [
    (math.inf, 1e200),
    (math.inf, 1.7e308),
    (2.0**1001, 1e150),
    (0.0, 1e-200),
    (0.0, 5e-324),
    (2.0**-901, 1e-140),
]


@pytest.mark.parametrize(("total_sum", "max_abs"), EXTREMES)
@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_the_divisor_is_the_power_of_two_that_brings_the_maximum_between_1_and_2(total_sum, max_abs, norm_type):
    divisor = rescue_divisor(total_sum, max_abs, norm_type)
    assert math.frexp(divisor)[0] == 0.5
    assert 1 <= max_abs / divisor < 2


def test_other_orders_divide_by_the_maximum_itself():
    assert rescue_divisor(0.0, 0.6, 2000.0) == 0.6
