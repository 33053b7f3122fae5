"""`norm --histogram`: exponents against Python's frexp, and what storage types would do against their own rounding."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import NUMPY_TYPES, VALUE_TYPES, encode, gaussian, rounded_once, snapshot, write, write_index

from gradtool import norm, tuning
from gradtool.backends.choose import choose
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import NormSpec
from gradtool.engines.cluster.wire import packed, unpacked
from gradtool.engines.threads import Threads
from gradtool.ops.histogram import CountExponents, Histograms, storage_ranges
from gradtool.store.io.destination import DISCARD
from gradtool.store.transaction.inputs import Inputs


def truth(*arrays):
    """How many values of the arrays have which exponent."""
    counts = {}
    for value in [one for array in arrays for one in array.astype(np.float64).ravel().tolist()]:
        if value and math.isfinite(value):
            exponent = math.frexp(value)[1]
            counts[exponent] = counts.get(exponent, 0) + 1
    return counts


def counts_of(rows):
    """Rows as a mapping; they are in the order of their exponents."""
    exponents = [row.exponent for row in rows]
    assert exponents == sorted(set(exponents))
    return {row.exponent: row.count for row in rows}


def test_a_known_histogram(tmp_path):
    path = write(tmp_path / "x", {"a": encode([1, -1, 1.5, 2, 0.5, 0.75, 0, -0.0, math.nan, math.inf], "F32")})
    result = norm(path, histogram=True)
    assert [(row.exponent, row.count) for row in result.histogram] == [(0, 2), (1, 3), (2, 1)]
    assert sum(row.count for row in result.histogram) + result.zeros + result.nan + result.inf == result.call.elements


def test_a_backend_that_reads_counts_what_one_that_is_given_blocks_does(tmp_path, monkeypatch):
    arrays = {dtype: gaussian(700_001, dtype, seed=i) for i, dtype in enumerate(VALUE_TYPES)}
    path = write(tmp_path / "x", arrays)
    found = [norm(path, histogram=True, threads=threads) for threads in (1, 3)]
    monkeypatch.setattr(type(choose("cpu").backend), "reads_files", lambda *_: False)
    expected = norm(path, histogram=True)
    for one in found:
        assert (one.histogram, one.per_dtype, one.norm) == (expected.histogram, expected.per_dtype, expected.norm)
        assert (
            one.call.timings.read_bytes
            == expected.call.timings.read_bytes
            == sum(array.nbytes for array in arrays.values())
        )


def test_the_whole_each_tensor_and_each_path_have_their_own(tmp_path):
    arrays = {dtype: gaussian(70_000 + 7 * i, dtype, seed=i) for i, dtype in enumerate(VALUE_TYPES)}
    arrays["F32"][5:9] = 1e-42, -1e-45, math.nan, -math.inf
    names = list(arrays)
    one = write(tmp_path / "one", {name: arrays[name] for name in names[:4]})
    other = write(tmp_path / "other", {name: arrays[name] for name in names[4:]})
    result = norm([one, other], histogram=True, per_tensor=True, by_file=True)
    assert counts_of(result.histogram) == truth(*arrays.values())
    assert {row.name: counts_of(row.histogram) for row in result.per_tensor} == {
        name: truth(array) for name, array in arrays.items()
    }
    assert [counts_of(row.histogram) for row in result.per_file] == [
        truth(*(arrays[name] for name in some)) for some in (names[:4], names[4:])
    ]


def test_the_norm_is_the_same_with_a_histogram_and_without(tmp_path):
    path = write(tmp_path / "x", {"a": gaussian(200_001, "F64"), "b": gaussian(3, "BF16")})
    for norm_type in (1, 2, 3, math.inf):
        with_it = norm(path, histogram=True, norm_type=norm_type, per_tensor=True)
        without = norm(path, norm_type=norm_type, per_tensor=True)
        assert (with_it.norm, with_it.max_abs, with_it.zeros) == (without.norm, without.max_abs, without.zeros)
        assert [row.norm for row in with_it.per_tensor] == [row.norm for row in without.per_tensor]
        assert (without.histogram, without.per_dtype) == ((), ())
        assert not any(hasattr(row, "histogram") for row in without.per_tensor)


def test_empty_tensors_between_others_do_not_shift_the_counts(tmp_path):
    arrays = {"a": encode([1], "F32"), "b": encode([], "F64"), "c": encode([4, 4], "F16"), "d": encode([], "F32")}
    result = norm(write(tmp_path / "x", arrays), histogram=True, per_tensor=True)
    assert [counts_of(row.histogram) for row in result.per_tensor] == [{1: 1}, {}, {3: 2}, {}]


def test_top_and_selection_leave_out_what_they_do_not_name(tmp_path):
    path = write(tmp_path / "x", {"a": encode([1], "F32"), "b": encode([4, 4], "F32"), "c": encode([9], "F32")})
    result = norm(path, histogram=True, top=1, exclude="c")
    assert [(row.name, counts_of(row.histogram)) for row in result.per_tensor] == [("b", {3: 2})]
    assert counts_of(result.histogram) == {1: 1, 3: 2}


SIZES = st.sampled_from([0, 1, 5, 2049, 65_537, 300_001])
TENSORS = st.lists(st.tuples(st.sampled_from(VALUE_TYPES), SIZES), min_size=1, max_size=6)


@settings(max_examples=15)
@given(tensors=TENSORS, order=st.randoms(use_true_random=False))
def test_the_same_counts_for_any_threads_blocks_order_and_shards(tmp_path_factory, tensors, order):
    folder = tmp_path_factory.mktemp("counts")
    arrays = {f"t{i}": gaussian(n, dtype, seed=i) for i, (dtype, n) in enumerate(tensors)}
    expected = truth(*arrays.values())
    shuffled = order.sample(list(arrays), len(arrays))
    block_bytes = tuning.BLOCK_BYTES
    for count, threads, nbytes in ((1, 1, block_bytes), (2, 8, 512 << 10), (3, 2, 16 << 20)):
        shards = {f"{i}.safetensors": {name: arrays[name] for name in shuffled[i::count]} for i in range(count)}
        index = write_index(folder / str(count), shards)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "BLOCK_BYTES", nbytes)
            assert counts_of(norm(index, histogram=True, threads=threads).histogram) == expected


def test_nothing_is_changed(tmp_path):
    path = write(tmp_path / "x", {"a": np.ones(100_000, np.float32)})
    before = snapshot(tmp_path)
    norm(path, histogram=True)
    assert snapshot(tmp_path) == before


def test_no_values_have_no_exponents_and_fit_everywhere(tmp_path):
    for array in (np.zeros((3, 0), np.float32), np.zeros(9), encode([math.nan], "F16")):
        result = norm(write(tmp_path / "x", {"a": array}), histogram=True, per_tensor=True)
        assert (result.histogram, result.per_tensor[0].histogram) == ((), ())
        assert [vars(row) for row in result.per_dtype] == [
            {
                "dtype": dtype,
                "overflow_at_least": 0,
                "overflow_at_most": 0,
                "to_subnormal": 0,
                "to_zero": 0,
                "min_scale_log2": None,
                "max_scale_log2": None,
                "min_scale_values_log2": None,
                "min_scale_norm_log2": None,
            }
            for dtype in VALUE_TYPES
        ]
    assert norm(write(tmp_path / "none", {}), histogram=True).histogram == ()


def ranges(values):
    """The row of each storage type, for some float64 values."""
    values = np.abs(np.array(values, np.float64))
    largest = float(values[np.isfinite(values)].max(initial=0))
    return {row.dtype: row for row in storage_ranges(truth(values), largest, 0.0)}


@pytest.mark.parametrize(
    ("dtype", "value", "overflows"),
    [
        ("F16", 65519.99, False),
        ("F16", 65520.0, True),
        ("F16", math.nextafter(65520.0, 0), False),
        ("F8_E5M2", 61440.0, True),
        ("F8_E5M2", math.nextafter(61440.0, 0), False),
        # Halfway between 448 and the code that is NaN; 448 is even.
        ("F8_E4M3", 464.0, False),
        ("F8_E4M3", math.nextafter(464.0, 500), True),
        ("BF16", math.nextafter(float.fromhex("0x1.ffp127"), 0), False),
        ("BF16", float.fromhex("0x1.ffp127"), True),
        ("F32", math.nextafter(float.fromhex("0x1.ffffffp127"), 0), False),
        ("F32", float.fromhex("0x1.ffffffp127"), True),
        ("F64", 1.7976931348623157e308, False),
    ],
)
def test_what_overflows_is_decided_as_rounding_does(dtype, value, overflows):
    row = ranges([value, value / 1e4])[dtype]
    assert (row.overflow_at_least, row.overflow_at_most) == (overflows, overflows)
    assert row.max_scale_log2 == (-1 if overflows else 0)
    with np.errstate(all="ignore"):
        stored = rounded_once(np.array([value]), dtype).astype(np.float64)
    assert np.isfinite(stored[0]) == (not overflows)


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    small=st.lists(st.floats(-70_000, 70_000, width=32), max_size=30),
)
def test_what_types_would_do_is_what_they_do(values, small):
    array = np.array([one for one in values + small if one], np.float64)
    for dtype, row in ranges(array).items():
        kind, range_ = NUMPY_TYPES[dtype], STORAGE[dtype]
        with np.errstate(all="ignore"):
            stored = rounded_once(array, dtype).astype(np.float64)
        overflowed = int((~np.isfinite(stored)).sum())
        assert row.overflow_at_least <= overflowed <= row.overflow_at_most
        assert (overflowed == 0) == (row.overflow_at_most == 0)
        # Half of the least number is rounded to 0 too, but has the exponent of what is rounded up.
        half, normal = 2.0 ** (range_.least - 2), 2.0 ** (range_.normal - 1)
        assert row.to_zero == int((np.abs(array) < half).sum()) if half else row.to_zero == 0
        assert row.to_subnormal == int(((np.abs(array) >= half) & (np.abs(array) < normal)).sum())
        if kind.itemsize < 4:
            assert (stored[np.abs(array) < half] == 0).all()
            assert (stored[np.abs(array) > half] != 0).all()


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_the_range_of_loss_scales_ends_where_it_says(dtype):
    normal = 2.0 ** (STORAGE[dtype].normal - 1)
    for seed in range(20):
        values = np.abs(gaussian(200, "F32", seed).astype(np.float64))
        values = values[values > 0][: 3 + seed]
        row = ranges(values)[dtype]
        with np.errstate(all="ignore"):
            most, more = (
                rounded_once(values * 2.0**k, dtype).astype(float) for k in (row.max_scale_log2, row.max_scale_log2 + 1)
            )
        assert np.isfinite(most).all()
        assert not np.isfinite(more).all()
        assert (values * 2.0**row.min_scale_log2 >= normal).all()
        assert not (values * 2.0 ** (row.min_scale_log2 - 1) >= normal).all()


def test_the_largest_finite_value_decides_where_there_is_an_inf(tmp_path):
    path = write(tmp_path / "x", {"a": encode([math.inf, 65519.0], "F32"), "b": encode([math.nan, 1], "F32")})
    rows = {row.dtype: row for row in norm(path, histogram=True).per_dtype}
    assert (rows["F16"].overflow_at_most, rows["F16"].max_scale_log2) == (0, 0)


def test_bounds_where_exponents_do_not_tell():
    row = ranges([40_000.0, 65_504.0, 65_530.0, 70_000.0, 1e6])["F16"]
    assert (row.overflow_at_least, row.overflow_at_most) == (2, 5)


@pytest.fixture
def opened(tmp_path):
    arrays = {"a": gaussian(200_001, "BF16"), "b": gaussian(9, "F64"), "c": gaussian(70_000, "F16")}
    index = write_index(
        tmp_path / "set",
        {"0.safetensors": {"a": arrays["a"], "b": arrays["b"]}, "1.safetensors": {"c": arrays["c"]}},
    )
    return Inputs([str(index)]).open()


def test_parts_are_put_where_they_belong(opened):
    profile = CountExponents(opened.selected, NormSpec())
    put = profile.tally()
    for part in profile.parts(DISCARD):
        put.merge_part(part.places, unpacked(packed(counted(part.pass_).compact()), part.pass_.tally()))
    counts = [put.exponents(number, number + 1) for number in range(3)]
    assert [sum(one.values()) for one in counts] == [
        one.tensor.elements - int(put.zeros[number]) for number, one in enumerate(opened.selected)
    ]
    assert put.largest_finite.tolist() == put.max_abs.tolist()
    assert put.counts.tobytes() == counted(profile).counts.tobytes()


def counted(profile):
    return Threads(choose("cpu").backend).run(profile)


def test_empty_bins_are_not_sent(opened):
    found = counted(CountExponents(opened.selected[:2], NormSpec()))
    sent = packed(found)
    assert len(sent) < 4000 < 8 * len(found.counts)
    assert unpacked(sent, Histograms(opened.selected[:2], NormSpec())).counts.tobytes() == found.counts.tobytes()


def test_histograms_of_something_else_are_not_put_anywhere(opened):
    found, whole = Histograms(opened.selected, NormSpec()), [(0, 0), (1, 0), (2, 0)]
    wrong = [Histograms(opened.selected, NormSpec()) for _ in range(2)]
    wrong[0].largest_finite, wrong[1].counts = np.ones(1), np.ones(5, np.int64)
    for other, places in [
        (Histograms(opened.selected, NormSpec()), whole[:2]),
        (Histograms(opened.selected, NormSpec()), [(1, 0), (0, 0), (2, 0)]),
        (wrong[0], whole),
        (wrong[1], whole),
        ("histograms", whole[:1]),
    ]:
        with pytest.raises(ValueError, match="of other tensors"):
            found.merge_part(places, other)
    assert not any(found.counts)
    assert not any(found.largest_finite)


@settings(max_examples=60)
@given(
    exponents=st.lists(st.integers(-60, 20), min_size=1, max_size=40),
    copies=st.lists(st.integers(1, 3000), min_size=40, max_size=40),
    known=st.booleans(),
)
def test_scales_keep_what_they_say(exponents, copies, known):
    values = np.concatenate([np.full(n, 1.5 * 2.0**e) for e, n in zip(exponents, copies, strict=False)])
    exact = math.sqrt(math.fsum((values**2).tolist()))
    for row in storage_ranges(truth(values), values.max(), exact if known else 0.0):
        normal = 2.0 ** (STORAGE[row.dtype].normal - 1)
        lost = values[values * 2.0**row.min_scale_values_log2 < normal]
        assert 1000 * len(lost) <= len(values)
        # With the next smaller scale, more would be lost.
        assert 1000 * np.count_nonzero(values * 2.0 ** (row.min_scale_values_log2 - 1) < normal) > len(values)
        lost = values[values * 2.0**row.min_scale_norm_log2 < normal]
        assert math.fsum((lost**2).tolist()) <= 1e-4 * exact**2
        more = values[values * 2.0 ** (row.min_scale_norm_log2 - 1) < normal]
        # Squares of this exponent are taken to be 4 / 2.25 of what they are, and the sum a quarter of that at least.
        assert math.fsum((more**2).tolist()) > 1e-4 * exact**2 * (2.25 / 4 if known else 2.25 / 16)
        assert row.min_scale_norm_log2 <= row.min_scale_log2


def test_the_scale_for_the_norm_is_guaranteed_whatever_the_norm_is(tmp_path):
    # 1.99 has four times the square of 1: the exact norm tells.
    path = write(tmp_path / "x", {"a": encode([1.99] * 100 + [2.0**-6.5] * 100, "F32")})
    rows = {p: norm(path, histogram=True, norm_type=p).per_dtype[1] for p in (1, 2, math.inf)}
    assert [row.min_scale_norm_log2 for row in rows.values()] == [-119, -126, -119]
    path = write(tmp_path / "y", {"a": encode([1.99] * 100 + [2.0**-6.5] * 100 + [math.inf], "F32")})
    assert norm(path, histogram=True).per_dtype[1].min_scale_norm_log2 == -119
    path = write(tmp_path / "z", {"a": np.array([1.7e308, 1.7e308])})
    assert norm(path, histogram=True).per_dtype[0].min_scale_norm_log2 == -1022 - 1023
