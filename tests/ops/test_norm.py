import errno
import math
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import VALUE_TYPES, canonical_norm, encode, snapshot, write, write_index

from gradtool import BadInputError, SystemRefusedError, UsageError, norm, tuning
from gradtool.backends.choose import choose


def one_file(folder, **tensors):
    return write(folder / "x.safetensors", tensors)


def test_a_known_result(tmp_path):
    arrays = {"a": [1, 2, 3], "b": [4, 5, 6, 7], "c": [8, 9, 10, 11, 12]}
    path = one_file(tmp_path, **{name: encode(values, "F32") for name, values in arrays.items()})
    result = norm(path)
    assert result.norm == math.sqrt(650) == pytest.approx(25.4950976, abs=5e-8)
    assert (result.max_abs, result.call.files, result.call.tensors, result.call.elements, result.call.bytes) == (
        12.0,
        1,
        3,
        12,
        48,
    )
    assert (result.nan, result.inf, result.zeros, result.problems, result.per_tensor) == (0, 0, 0, (), ())


@pytest.mark.parametrize(
    ("norm_type", "expected"), [(1, 78.0), (2, math.sqrt(650)), (math.inf, 12.0), (3, 6084 ** (1 / 3))]
)
def test_the_order_of_the_norm(tmp_path, norm_type, expected):
    path = one_file(tmp_path, a=encode(range(1, 13), "F32"))
    assert norm(path, norm_type=norm_type).norm == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("norm_type", [0.5, 2.5, 7])
def test_any_order_is_within_1e_12_of_float64_truth(tmp_path, norm_type):
    values = np.random.default_rng(2).standard_normal(100_000)
    truth = math.fsum(abs(x) ** norm_type for x in values.tolist()) ** (1 / norm_type)
    assert norm(one_file(tmp_path, a=values), norm_type=norm_type).norm == pytest.approx(truth, rel=1e-12)


def test_5120_ones_in_bf16_have_an_l1_norm_of_5120(tmp_path):
    assert norm(one_file(tmp_path, a=np.ones(5120, ml_dtypes.bfloat16)), norm_type=1).norm == 5120.0


def test_300_in_f16_has_a_norm_of_300(tmp_path):
    assert norm(one_file(tmp_path, a=encode([300], "F16"))).norm == 300.0


@pytest.mark.parametrize(
    ("dtype", "value"), [("F32", 1e20), ("F32", 1e-40), ("F64", 1e200), ("F64", 1e-200), ("F64", 5e-324)]
)
def test_a_finite_gradient_has_a_finite_norm_that_is_not_zero(tmp_path, dtype, value):
    array = encode([value] * 4, dtype)
    result = norm(one_file(tmp_path, a=array), per_tensor=True)
    assert result.norm == result.per_tensor[0].norm == 2 * float(array[0])


def test_a_rescue_of_one_tensor_leaves_the_others_exact(tmp_path):
    result = norm(one_file(tmp_path, tiny=np.full(4, 1e-200), usual=np.array([3.0, 4.0])), per_tensor=True)
    assert result.norm == 5.0
    assert [row.norm for row in result.per_tensor] == [2e-200, 5.0]


def test_high_orders_neither_overflow_nor_underflow(tmp_path):
    path = one_file(tmp_path, a=encode([1e30, 1e30], "F32"), b=encode([1e-30], "F32"))
    result = norm(path, norm_type=20, per_tensor=True)
    assert result.norm == pytest.approx(1e30 * 2 ** (1 / 20), rel=1e-6)
    assert result.per_tensor[1].norm == pytest.approx(1e-30, rel=1e-6)


HIGH_ORDERS = [("F32", 0.6, 2000), ("F32", 2.0, 1100), ("F64", 1.7e308, 50), ("F64", 5e-324, 50), ("F64", 1e-300, 7)]


@pytest.mark.parametrize(("dtype", "value", "norm_type"), HIGH_ORDERS)
def test_no_order_is_too_high(tmp_path, dtype, value, norm_type):
    array = encode([value] * 4, dtype)
    expected = float(array[0]) * 4 ** (1 / norm_type)
    assert norm(one_file(tmp_path, a=array), norm_type=norm_type).norm == pytest.approx(expected, rel=1e-12, abs=0)


def test_a_norm_beyond_float64_is_infinite(tmp_path):
    assert norm(one_file(tmp_path, a=np.full(4, 1.7e308))).norm == math.inf


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_the_bits_are_those_of_the_contract(tmp_path, dtype):
    rng = np.random.default_rng(8)
    arrays = [encode(rng.standard_normal(n), dtype) for n in (1, 2049, 70_000)]
    path = one_file(tmp_path, **{f"t{i}": array for i, array in enumerate(arrays)})
    assert norm(path).norm == canonical_norm(arrays)


SIZES = st.sampled_from([0, 1, 5, 2048, 2049, 65_536, 65_537, 300_001])
TENSORS = st.lists(st.tuples(st.sampled_from(VALUE_TYPES), SIZES), min_size=1, max_size=8)


@settings(max_examples=25)
@given(tensors=TENSORS, seed=st.integers(0, 9), order=st.randoms(use_true_random=False))
def test_the_same_bits_for_any_threads_blocks_order_and_shards(tmp_path_factory, tensors, seed, order):
    folder = tmp_path_factory.mktemp("bits")
    rng = np.random.default_rng(seed)
    arrays = {f"t{i}": encode(rng.standard_normal(n), dtype) for i, (dtype, n) in enumerate(tensors)}
    expected = norm(write(folder / "one", arrays), threads=1).norm
    shuffled = order.sample(list(arrays), len(arrays))
    for count in (1, 2, 7):
        shards = {f"{i}.safetensors": {name: arrays[name] for name in shuffled[i::count]} for i in range(count)}
        index = write_index(folder / str(count), shards)
        files = [folder / str(count) / file for file in shards]
        for threads in (1, 2, 8):
            assert norm(index, threads=threads).norm.hex() == expected.hex()
        assert norm(order.sample(files, len(files)), threads=2).norm.hex() == expected.hex()


@pytest.mark.parametrize("block_bytes", [512 << 10, 1 << 20, 3_000_000, 16 << 20])
def test_the_same_bits_for_any_block_size(tmp_path, monkeypatch, block_bytes):
    rng = np.random.default_rng(4)
    path = one_file(tmp_path, a=rng.standard_normal(700_000), b=rng.standard_normal(3).astype(np.float32))
    expected = norm(path)
    monkeypatch.setattr(tuning, "BLOCK_BYTES", block_bytes)
    assert norm(path, threads=2).norm == expected.norm


def test_per_tensor_gives_every_tensor_in_file_order(tmp_path):
    path = one_file(tmp_path, b=encode([[3, 0], [4, -0.0]], "F32"), a=encode(-2, "BF16"))
    first, second = norm(path, per_tensor=True).per_tensor
    assert (first.name, first.file, first.dtype, first.shape) == ("b", str(path), "F32", (2, 2))
    assert (first.norm, first.max_abs, first.nan, first.inf, first.zeros) == (5.0, 4.0, 0, 0, 2)
    assert (second.name, second.shape, second.norm) == ("a", (), 2.0)


def test_top_gives_the_largest_first_and_nan_before_all(tmp_path):
    path = one_file(
        tmp_path, **{name: encode([value], "F32") for name, value in zip("abcd", [1, 9, math.nan, 4], strict=True)}
    )
    assert [row.name for row in norm(path, top=3).per_tensor] == ["c", "b", "d"]


def test_nonfinite_values_are_problems_with_counts_and_a_place(tmp_path):
    values = np.ones((300, 300), np.float32)
    values[250, 7], values[250, 8], values[299, 0] = math.inf, math.nan, math.nan
    result = norm(one_file(tmp_path, good=np.ones(3, np.float32), bad=values))
    assert math.isnan(result.norm)
    assert (result.nan, result.inf, result.max_abs) == (2, 1, math.inf)
    (problem,) = result.problems
    assert (problem.code, problem.tensor) == ("nonfinite", "bad")
    assert problem.message == "2 NaN, 1 Inf, the first at [250, 7]"
    assert problem.index == 75007


def test_nan_is_found_whatever_the_order(tmp_path):
    path = one_file(tmp_path, a=encode([1, math.nan, 3], "F16"))
    for norm_type in (1, 2, 3, math.inf):
        assert math.isnan(norm(path, norm_type=norm_type).norm)


@pytest.mark.parametrize(("limit", "problems"), [(5.1, []), (5.0, []), (4.9, ["above-limit"]), (math.inf, [])])
def test_fail_above(tmp_path, limit, problems):
    result = norm(one_file(tmp_path, a=encode([3, 4], "F32")), fail_above=limit)
    assert [problem.code for problem in result.problems] == problems


def test_nothing_is_changed(tmp_path):
    path = one_file(tmp_path, a=np.ones(100_000, np.float32))
    before = snapshot(tmp_path)
    norm(path)
    assert snapshot(tmp_path) == before


def test_no_tensors_and_no_elements_have_a_norm_of_zero(tmp_path):
    assert norm(write(tmp_path / "none", {})).norm == 0.0
    result = norm(write(tmp_path / "empty", {"a": np.zeros((3, 0), np.float32)}), per_tensor=True)
    assert (result.norm, result.call.elements, result.per_tensor[0].norm) == (0.0, 0, 0.0)


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("block_bytes", [512 << 10, 2 << 20])
def test_the_facts_of_a_tensor_are_gathered_from_all_its_blocks(tmp_path, monkeypatch, threads, block_bytes):
    monkeypatch.setattr(tuning, "BLOCK_BYTES", block_bytes)
    values = np.ones(2_000_000, np.float32)
    values[[100_000, 700_000, 1_900_000]] = 0
    values[[600_001, 1_400_000]] = math.nan
    values[[600_002, 1_800_000, 1_999_999]] = -math.inf
    values[650_000] = 9
    path = one_file(tmp_path, first=np.ones(100, np.float32), a=values, last=np.zeros(5, np.float32))
    result = norm(path, per_tensor=True, threads=threads)
    row = result.per_tensor[1]
    assert (row.nan, row.inf, row.zeros, row.max_abs) == (2, 3, 3, math.inf)
    assert result.problems[0].message == "2 NaN, 3 Inf, the first at [600001]"
    finite = np.where(np.isfinite(values), values, 1)
    for place in (10, 650_000, 1_950_000):
        finite[place] = 50
        assert norm(one_file(tmp_path, a=finite), norm_type=math.inf, threads=threads).norm == 50.0
        finite[place] = 1


def once(done, change):
    """A progress function that makes a change when it is called for the given time."""
    calls = []

    def count(*_):
        calls.append(1)
        if len(calls) == done:
            change()

    return count


@pytest.mark.parametrize("norm_type", [2, 3])
@pytest.mark.parametrize("done", [1, 3])
def test_a_file_that_changes_while_it_is_measured_is_refused(tmp_path, monkeypatch, done, norm_type):
    monkeypatch.setattr(tuning, "BLOCK_BYTES", 512 << 10)
    path = one_file(tmp_path, a=np.ones(2_000_000, np.float32))
    with pytest.raises(SystemRefusedError, match="changed"):
        norm(path, progress=once(done, lambda: os.utime(path, ns=(0, 0))), threads=1, norm_type=norm_type)


@pytest.mark.parametrize("norm_type", [2, 3])
def test_a_file_that_is_cut_short_while_it_is_measured_is_refused(tmp_path, monkeypatch, norm_type):
    monkeypatch.setattr(tuning, "BLOCK_BYTES", 512 << 10)
    path = one_file(tmp_path, a=np.ones(2_000_000, np.float32))
    with pytest.raises(SystemRefusedError, match="became shorter while it was read; run the command again") as caught:
        norm(path, progress=once(1, lambda: os.truncate(path, 5_000_000)), threads=1, norm_type=norm_type)
    assert [problem.file for problem in caught.value.problems] == [str(path)]


def test_a_read_that_fails_names_the_file(tmp_path, monkeypatch):
    path = one_file(tmp_path, a=np.ones(10, np.float32))

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(type(choose("cpu").backend), "reads_files", lambda *_: False)
    with pytest.raises(SystemRefusedError, match="Input/output error") as caught:
        norm(path)
    assert [problem.file for problem in caught.value.problems] == [str(path)]


def test_a_backend_that_reads_finds_what_one_that_is_given_blocks_does(tmp_path, monkeypatch):
    rng, values = np.random.default_rng(9), np.ones(3_000_001)
    values[2_500_000:] = np.ldexp(rng.standard_normal(500_001), 700)
    path = one_file(tmp_path, a=values, b=encode(rng.standard_normal(70_001), "F16"), c=encode([1, math.nan], "BF16"))
    found = [norm(path, per_tensor=True, threads=threads) for threads in (1, 2, 4)]
    monkeypatch.setattr(type(choose("cpu").backend), "reads_files", lambda *_: False)
    expected = norm(path, per_tensor=True)
    for one in found:
        assert [row.norm for row in one.per_tensor[:2]] == [row.norm for row in expected.per_tensor[:2]]
        assert (one.problems, one.call.timings.read_bytes) == (expected.problems, expected.call.timings.read_bytes)


def test_a_single_pattern_is_one_pattern(tmp_path):
    path = one_file(tmp_path, weight=encode([3], "F32"), bias=encode([4], "F32"))
    assert norm(path, include="weight").norm == 3.0
    assert norm(path, exclude="weight").norm == 4.0


def test_fail_above_takes_a_nan_for_too_much(tmp_path):
    path = one_file(tmp_path, a=encode([math.nan], "F32"))
    assert [problem.code for problem in norm(path, fail_above=1e9).problems] == ["nonfinite", "above-limit"]


@pytest.mark.parametrize("paths", ["", b"", None, 5, [None], ["a\0b"], ["a\ud800b"]])
def test_paths_that_are_none_are_usage_errors(paths):
    with pytest.raises(UsageError):
        norm(paths)


def test_two_thousand_tiny_tensors(tmp_path):
    path = one_file(tmp_path, **{f"t{i}": np.full(i % 5, 2, np.float32) for i in range(2000)})
    assert norm(path).norm == math.sqrt(4 * 4000)


def test_a_selection(tmp_path):
    path = one_file(tmp_path, a=encode([3], "F32"), b=encode([4], "F32"), ids=np.ones(2, np.int32))
    assert norm(path, exclude=["ids"]).norm == 5.0
    assert norm(path, include=["a"]).norm == 3.0
    with pytest.raises(BadInputError, match="'ids': unsupported dtype I32"):
        norm(path)


@pytest.mark.parametrize(
    "arguments",
    [
        {"norm_type": 0},
        {"norm_type": math.nextafter(0.01, 0)},
        {"norm_type": -1},
        {"norm_type": math.nan},
        {"top": 0},
        {"fail_above": math.nan},
        {"threads": 0},
        {"threads": "2.0"},
        {"top": 1.5},
        {"norm_type": "x"},
    ],
)
def test_arguments_that_make_no_sense_are_usage_errors(tmp_path, arguments):
    with pytest.raises(UsageError):
        norm(one_file(tmp_path, a=np.ones(1, np.float32)), **arguments)


def test_timings_and_bytes_add_up(tmp_path):
    result = norm(one_file(tmp_path, a=np.ones(500_000, np.float32)), threads=2)
    assert result.call.timings.read_bytes == result.call.bytes == 2_000_000
    assert result.call.timings.write_gb_per_s == 0
    assert 0 < result.call.timings.read_seconds + result.call.timings.compute_seconds < result.call.seconds


def test_progress_ends_at_the_whole(tmp_path):
    calls = []
    norm(one_file(tmp_path, a=np.ones(900_000)), progress=lambda *call: calls.append(call))
    assert calls[-1] == ("measuring", 7_200_000, 7_200_000)


def test_the_first_of_many_missing_files_is_the_only_one_that_is_looked_at(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(os.path, "realpath", lambda path, find=os.path.realpath: looked.append(path) or find(path))
    with pytest.raises(BadInputError, match="0: no such file"):
        norm([tmp_path / str(number) for number in range(1000)])
    # From the root folder, where each way begins.
    assert set(looked) - {os.sep} == {str(tmp_path / "0")}
