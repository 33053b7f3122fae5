import math
from array import array
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradtool import reduction
from gradtool.reduction import LANES, TileSums, exponent_of, fold, is_in_range, scaled_total, tile_count, total


def norm_of(sums, exponents, order, unscale=1.0):
    return reduction.norm_of(array("d", sums), array("i", exponents), order, unscale)


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
def test_the_total_of_many_sums_is_correctly_rounded(count, spread, seed):
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


def norm_of_ordinary(sums, order, unscale=1.0):
    return norm_of(np.array(sums), np.zeros(len(sums), np.int32), order, unscale)


@pytest.mark.parametrize(
    ("sums", "order", "norm"), [([25.0], 2.0, 5.0), ([7.0], 1.0, 7.0), ([27.0], 3.0, 3.0), ([9.0, 16.0], 2.0, 5.0)]
)
def test_a_norm_is_the_root_of_the_sum(sums, order, norm):
    assert norm_of_ordinary(sums, order) == norm
    assert norm_of_ordinary(sums, order, unscale=4.0) == norm / 4


def test_a_norm_beyond_float64_is_infinite():
    assert norm_of_ordinary([1e300], 0.5) == math.inf
    assert norm_of_ordinary([1.7e308, 1.7e308], 1.0) == math.inf
    assert norm_of(np.array([1.0, 4.0]), np.array([0, 1023], np.int32), 2.0) == math.inf


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 2000.0])
def test_nan_and_inf_go_through_whatever_the_exponents(order):
    for exponent in (0, 700, -700):
        exponents = np.array([0, exponent], np.int32)
        assert math.isnan(norm_of(np.array([math.nan, 1.0]), exponents, order))
        assert norm_of(np.array([math.inf, 1.0]), exponents, order) == math.inf


def test_a_total_beyond_float64_need_not_have_an_infinite_norm():
    # Of tiles whose own sums are in range, there must be 2^24.
    assert norm_of_ordinary([2.0**1023] * 8, 2.0) == 2.0**513
    assert norm_of_ordinary([2.0**1023] * 8, 3.0) == pytest.approx(2.0**342, rel=1e-12)
    many = np.concatenate([np.full(7, 2.0**1023), [1.5]])
    assert norm_of(many, np.array([0] * 7 + [600], np.int32), 2.0) == math.sqrt(1.5) * 2.0**600


def exact_sum(sums, exponents, order):
    return sum(Fraction(s) * Fraction(2) ** (k * order) for s, k in zip(sums, exponents, strict=True))


def assert_within_one_ulp(norm, squares):
    """That a norm is as near to the root of a sum of squares as float64 allows, or next to that."""
    ulp = Fraction(math.ulp(norm))
    assert max(Fraction(norm) - ulp, 0) ** 2 <= squares <= (Fraction(norm) + ulp) ** 2


TILES = st.lists(
    st.tuples(st.floats(2.0**-900, 2.0**1000), st.just(0)) | st.tuples(st.floats(1, 2.0**18), st.integers(-1074, 1000)),
    min_size=1,
    max_size=9,
)


@given(tiles=TILES, seed=st.randoms(use_true_random=False))
def test_sums_with_exponents_are_added_exactly_and_in_any_order(tiles, seed):
    shuffled = seed.sample(tiles, len(tiles))
    for order in (1, 2):
        norm, other = (
            norm_of(np.array([s for s, _ in some]), np.array([k for _, k in some], np.int32), float(order))
            for some in (tiles, shuffled)
        )
        assert norm == other
        exact = exact_sum(*zip(*tiles, strict=True), order)
        if order == 2:
            assert_within_one_ulp(norm, exact)
        elif exact >= 2.0**-1022:
            assert norm == float(exact)


def test_the_last_bit_of_a_small_tile_decides_a_tie():
    # 1 + 2^-53 is half way to the next number; the third tile is too small for float64 beside the first.
    sums, exponents = np.array([1.0, 1.0, 1.0]), np.array([600, 547, -900], np.int32)
    assert norm_of(sums, exponents, 1.0) == math.ldexp(1 + 2.0**-52, 600)
    assert norm_of(sums[:2], exponents[:2], 1.0) == math.ldexp(1, 600)


@given(
    count=st.sampled_from([2, 300, 3000]),
    seed=st.integers(0, 99),
    exponents=st.lists(st.integers(-800, 800), min_size=1),
)
def test_many_tiles_with_exponents_are_added_exactly(count, seed, exponents):
    rng = np.random.default_rng(seed)
    sums = rng.random(count) + 1
    chosen = rng.choice(np.array(exponents, np.int32), count)
    assert norm_of(sums, chosen, 1.0) == float(exact_sum(sums.tolist(), chosen.tolist(), 1))


def test_a_tile_of_zeros_has_no_say_in_the_scale():
    assert norm_of(np.array([0.0, 4.0]), np.array([0, -1074], np.int32), 2.0) == 2 * 5e-324


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(("exponent", "unscale"), [(-1000, 1e-320), (1000, 1e300), (-500, 65536.0), (1023, 3.0)])
def test_dividing_by_a_loss_scale_neither_overflows_nor_underflows_on_the_way(order, exponent, unscale):
    norm = norm_of(np.array([2.0**order]), np.array([exponent], np.int32), order, unscale)
    assert norm == pytest.approx(float(Fraction(2) ** (exponent + 1) / Fraction(unscale)), rel=1e-15, abs=0)


@pytest.mark.parametrize("order", [0.9, 3.0, 50.0, 512.0])
def test_other_orders_merge_tiles_within_1e_12(order):
    sums, exponents = np.array([1.5, 2.0, 3.0, 1.0]), np.array([-700, -699, -699, -701], np.int32)
    truth = math.fsum(s * 2.0 ** ((k + 700) * order) for s, k in zip(sums, exponents.tolist(), strict=True))
    assert norm_of(sums, exponents, order) == pytest.approx(math.ldexp(truth ** (1 / order), -700), rel=1e-12, abs=0)


@pytest.mark.parametrize("order", [513.0, 2000.0, 1e9, 1e300])
def test_for_large_orders_the_norms_of_tiles_take_the_place_of_their_sums(order):
    assert norm_of_ordinary([3.0, 3.0, 1.0], order) == pytest.approx(3 * 2 ** (1 / order), rel=1e-12)
    assert norm_of_ordinary([1.7e308, 5e-324], order) == 1.7e308
    assert norm_of_ordinary([0.0, 5e-324], order) == 5e-324
    assert norm_of_ordinary([], order) == norm_of_ordinary([0.0], order) == 0


def test_sums_are_in_range_up_to_its_ends():
    assert is_in_range(2.0**-900)
    assert is_in_range(2.0**1000)
    assert not any(map(is_in_range, (0.0, math.nextafter(2.0**-900, 0), math.nextafter(2.0**1000, 2.0**1001))))
    assert not any(map(is_in_range, (math.inf, math.nan)))


@pytest.mark.parametrize("magnitude", [1.0, 1.999, 2.0, 5e-324, 2.0**-1022, 1.7e308, 1e-310])
def test_the_exponent_brings_a_magnitude_between_1_and_2(magnitude):
    assert 1 <= magnitude / math.ldexp(1, exponent_of(magnitude)) < 2


def tile_sums(values, exponents, order, number=0):
    found = TileSums(order)
    found.extend([number] * len(values), array("d", values), array("i", exponents))
    return found


@given(
    count=st.sampled_from([1, 9, 300, 4096]),
    spread=st.sampled_from([0, 3, 300]),
    order=st.sampled_from([1.0, 2.0, 3.0, 600.0]),
    scaled=st.booleans(),
    seed=st.integers(0, 999),
)
def test_condensed_sums_have_the_norm_of_all(count, spread, order, scaled, seed):
    rng = np.random.default_rng(seed)
    values = np.ldexp(rng.random(count), rng.integers(-spread, spread + 1, count)) * (rng.random(count) < 0.9)
    exponents = (rng.integers(-3, 4, count) * 100 * (values > 0) * scaled).astype(np.int32)
    cuts = slice(0, count // 3), slice(count // 3, None)
    some, others = (tile_sums(values[cut], exponents[cut], order) for cut in cuts)
    some.condense()
    others.extend(some.numbers, some.sums, some.exponents)
    assert others.norm() == norm_of(values, exponents, order)
    others.condense()
    assert others.norm() == norm_of(values, exponents, order)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
def test_sums_are_few_however_many_were_added_and_no_bit_changes(monkeypatch, order):
    """Of two tensors, in any order, with and without exponents."""
    monkeypatch.setattr(reduction, "_MAX_SUMS", 256)
    rng = np.random.default_rng(3)
    values = np.ldexp(1 + rng.random(256), rng.integers(-200, 200, 256))
    exponents = np.zeros(256, np.int32)
    exponents[:4], values[:4] = [700, 700, -900, 3], 1.5
    found, again = TileSums(order), TileSums(order)
    for turn in range(16):
        found.extend([turn % 2] * 256, values, exponents)
        again.extend([1 - turn % 2] * 256, reversed(values), reversed(exponents))
        assert max(len(found.sums), len(again.sums)) <= 256
    assert found.norm() == again.norm() == norm_of(np.tile(values, 16), np.tile(exponents, 16), order)
    half = norm_of(np.tile(values, 8), np.tile(exponents, 8), order)
    for number in range(2):
        some, same = (one.between(number, number + 1) for one in (found, again))
        assert some.norm() == half
        assert (some.sums.tobytes(), some.exponents.tobytes()) == (same.sums.tobytes(), same.exponents.tobytes())


def test_thousands_of_ordinary_sums_condense_to_a_few():
    found = tile_sums(np.random.default_rng(1).random(4096), [0] * 4096, 2.0)
    found.condense()
    assert len(found.sums) == len(found.exponents) == len(found.numbers) <= 4


def test_tiles_of_zeros_are_not_stored_for_long():
    for order in (2.0, 600.0):
        found = tile_sums([0.0] * 300, [0] * 300, order)
        found.condense()
        assert (len(found.sums), found.norm()) == (0, 0.0)


def test_no_sum_is_stored_for_a_norm_that_needs_none():
    assert len(tile_sums([0.0, 0.0], [0, 0], math.inf).sums) == 0


def test_norms_of_large_orders_condense_to_norms_once_they_are_many():
    found, count = TileSums(600.0), (1 << 20) + 1
    found.extend([0] * count, array("d", [3.0]) * count, array("i", [0]) * count)
    assert len(found.sums) == 1
    assert found.norm() == pytest.approx(3 * count ** (1 / 600), rel=1e-14)


def test_huge_sums_are_condensed_though_their_total_is_beyond_float64():
    values = np.append(np.full(4000, 2.0**1015), np.ldexp(1.0, np.arange(-200, -100)))
    found = tile_sums(values, [0] * len(values), 2.0)
    found.condense()
    assert len(found.sums) < 100
    assert scaled_total(found.sums, found.exponents) == scaled_total(values.tolist(), [0] * len(values))
    assert found.norm() == norm_of(values, [0] * len(values), 2.0)


def test_negative_sums_are_condensed_exactly():
    values = np.array([2.0**60, -1.5, -(2.0**60), 2.0**-70] * 500)
    found = tile_sums(values, [0] * 2000, 1.0)
    found.condense()
    assert found.sums.tolist() == [-750.0, 500 * 2.0**-70]
    assert sum(map(Fraction, found.sums)) == sum(map(Fraction, values.tolist()))


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_of_sums_that_are_not_finite_the_worst_stays(odd):
    values = np.ones(1000)
    values[7] = odd
    found = tile_sums(values, [0] * 1000, 2.0)
    found.condense()
    assert (len(found.sums), repr(found.norm())) == (1, repr(odd))
