import math

import numpy as np
import pytest

from gradtool.reduction import LANES, fold, largest_sum, norm_of, rescue_exponent, tile_count, total


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
    assert total(sums) == total(reversed(sums)) == 10000000000000006.0


def test_a_total_beyond_float64_is_infinite():
    assert total([1.7e308, 1.7e308]) == math.inf


@pytest.mark.parametrize(
    ("total_sum", "norm_type", "exponent", "norm"),
    [(25.0, 2.0, 0, 5.0), (7.0, 1.0, 0, 7.0), (27.0, 3.0, 0, 3.0), (25.0, 2.0, 10, 5120.0), (4.0, 2.0, 1024, math.inf)],
)
def test_a_norm_is_the_root_of_its_sum(total_sum, norm_type, exponent, norm):
    assert norm_of(total_sum, norm_type, exponent) == norm


def test_good_sums_need_no_rescue():
    assert rescue_exponent(12.0, 3.0) == 0
    assert rescue_exponent(0.0, 0.0) == 0
    assert rescue_exponent(math.inf, math.inf) == 0
    assert rescue_exponent(math.nan, math.nan) == 0


@pytest.mark.parametrize(("total_sum", "max_abs"), [(math.inf, 1e200), (0.0, 1e-200), (0.0, 5e-324)])
def test_a_rescued_maximum_is_at_most_1_and_its_square_is_normal(total_sum, max_abs):
    scaled = max_abs * 2.0 ** -rescue_exponent(total_sum, max_abs)
    assert 2.0**-80 < scaled <= 1


def test_the_largest_sum_overflows_to_infinity():
    assert largest_sum(3, 2.0, 2.0) == 12.0
    assert largest_sum(3, 1e200, 2.0) == math.inf
