import errno
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    NUMPY_TYPES,
    QUIET_NANS,
    SAMPLES,
    VALUE_TYPES,
    bits_of,
    build,
    encode,
    gaussian,
    gradtool,
    gradtool_json,
    read,
    rounded_once,
    snapshot,
    write,
    write_index,
)

from gradtool import BadInputError, NonFiniteError, SystemRefusedError, UsageError, clip, norm, tuning
from gradtool.backends.storage import STORAGE


def one_file(folder, **tensors):
    return write(folder / "x.safetensors", tensors)


def test_a_known_result(tmp_path):
    arrays = {"a": [1, 2, 3], "b": [4, 5, 6, 7], "c": [8, 9, 10, 11, 12]}
    path = one_file(tmp_path, **{name: encode(values, "F32") for name, values in arrays.items()})
    result = clip(path, max_norm=12)
    assert result.norm_before == math.sqrt(650)
    assert result.coef == 12 / (math.sqrt(650) + 1e-6)
    assert result.clipped
    assert read(path)["a"] == pytest.approx([0.4706787, 0.9413574, 1.4120361], abs=2**-23)
    assert result.norm_after == norm(path).norm == pytest.approx(12, rel=1e-7)
    assert (result.output.files_written, result.output.bytes_written) == (1, path.stat().st_size)


def test_300_in_f16_clips_to_1(tmp_path):
    path = one_file(tmp_path, a=encode([300], "F16"))
    assert clip(path, max_norm=1).norm_after == 1.0
    assert read(path)["a"].tolist() == [1.0]


@pytest.mark.parametrize(("dtype", "value"), [("F32", 1e20), ("F64", 1e200), ("F64", 1e-200)])
def test_extreme_values_are_clipped_and_not_turned_to_zeros(tmp_path, dtype, value):
    path = one_file(tmp_path, a=encode([value] * 4, dtype))
    result = clip(path, max_norm=value, eps=0)
    assert read(path)["a"].tolist() == pytest.approx([value / 2] * 4, rel=1e-6)
    assert result.norm_after == pytest.approx(value, rel=1e-6)
    assert result.norm_after == norm(path).norm


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_every_element_is_an_exact_product_rounded_once(tmp_path, dtype):
    array = encode(np.random.default_rng(6).standard_normal(100_000) * 3, dtype)
    path = one_file(tmp_path, a=array)
    result = clip(path, max_norm=7.5)
    coef = result.coef if dtype == "F64" else float(np.float32(result.coef))
    expected = rounded_once(array.astype(np.float64) * coef, dtype)
    assert np.array_equal(bits_of(read(path)["a"]), bits_of(expected))
    assert result.norm_after == norm(path).norm


@pytest.mark.parametrize("max_norm", [5.0, 7.5, math.inf])
def test_nothing_to_clip_leaves_inode_mtime_and_bytes_alone(tmp_path, max_norm):
    path = one_file(tmp_path, a=encode([3, 4], "F32"))
    before = snapshot(tmp_path)
    result = clip(path, max_norm=max_norm, eps=0)
    assert snapshot(tmp_path) == before
    assert (result.clipped, result.norm_before, result.norm_after) == (False, 5.0, 5.0)
    assert (result.coef, result.output.bytes_written) == (None if max_norm == math.inf else 1.0, 0)


def test_a_coefficient_that_rounds_to_1_writes_nothing(tmp_path):
    path = one_file(tmp_path, a=encode([3, 4], "F32"))
    before = snapshot(tmp_path)
    result = clip(path, max_norm=5.0, eps=1e-9)
    assert (result.coef, result.clipped) == (1.0, False)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(("eps", "coef"), [(1e-6, 1 / (5 + 1e-6)), (1e-7, 1 / (5 + 1e-7)), (0, 0.2)])
def test_eps(tmp_path, eps, coef):
    assert clip(one_file(tmp_path, a=encode([3, 4], "F32")), max_norm=1, eps=eps, dry_run=True).coef == coef


def test_a_limit_of_zero_makes_zeros_that_keep_their_sign(tmp_path):
    path = one_file(tmp_path, a=encode([3, -4], "F32"))
    assert clip(path, max_norm=0).norm_after == 0.0
    assert bits_of(read(path)["a"]).tolist() == [0, 0x8000_0000]


def test_zeros_have_nothing_to_clip(tmp_path):
    path = one_file(tmp_path, a=np.zeros(3, np.float32))
    result = clip(path, max_norm=0, eps=0)
    assert (result.clipped, result.coef) == (False, 1.0)


def test_untouched_tensors_metadata_header_and_order_stay_as_they_were(tmp_path):
    tensors = {
        "z": encode([3.0], "F32"),
        "ids": np.arange(5, dtype=np.int32),
        "a": encode([4.0], "F32"),
        "kept": encode([1.5, math.nan], "BF16"),
    }
    path = write(tmp_path / "x", tensors, {"step": "7", "note": "é"}, padding=5)
    clip(path, max_norm=1, eps=0, exclude=["ids", "kept"])
    factor = np.float32(0.2)
    tensors |= {"z": np.array([3], np.float32) * factor, "a": np.array([4], np.float32) * factor}
    assert path.read_bytes() == build(tensors, {"step": "7", "note": "é"}, padding=5)


def test_all_sets_of_a_call_are_one_vector(tmp_path):
    write_index(
        tmp_path / "set", {"1.safetensors": {"a": encode([2], "F32")}, "2.safetensors": {"b": encode([4], "F32")}}
    )
    other = write(tmp_path / "other", {"a": encode([4], "F32")})
    result = clip([tmp_path / "set", other], max_norm=3, eps=0, concat=True)
    assert (result.norm_before, result.coef, result.call.files) == (6.0, 0.5, 3)
    assert read(tmp_path / "set" / "1.safetensors")["a"].tolist() == [1.0]
    assert read(tmp_path / "set" / "2.safetensors")["b"].tolist() == [2.0]
    assert read(other)["a"].tolist() == [2.0]


def test_a_file_without_a_change_is_not_touched(tmp_path):
    changed = write(tmp_path / "changed", {"a": encode([3], "F32")})
    write(tmp_path / "kept", {"b": encode([4], "F32")})
    kept = snapshot(tmp_path)[tmp_path / "kept"]
    result = clip([changed, tmp_path / "kept"], max_norm=1, include=["a"])
    assert result.output.files_written == 1
    assert snapshot(tmp_path)[tmp_path / "kept"] == kept


def test_per_tensor_clips_each_by_its_own_norm(tmp_path):
    path = one_file(tmp_path, big=encode([30, 40], "F32"), small=encode([0.3, 0.4], "F32"), tiny=np.full(4, 1e-200))
    result = clip(path, max_norm=5, eps=0, per_tensor=True)
    assert read(path)["big"].tolist() == pytest.approx([3, 4])
    assert read(path)["small"].tolist() == encode([0.3, 0.4], "F32").tolist()
    big, small, tiny = result.per_tensor
    assert (big.norm_before, big.coef, big.clipped, small.clipped) == (50.0, 0.1, True, False)
    assert big.norm_after == pytest.approx(5)
    assert small.norm_after == small.norm_before
    assert tiny.norm_before == tiny.norm_after == 2e-200
    assert result.coef is None
    assert result.clipped
    assert result.norm_after == norm(path).norm


def test_huge_tensors_that_are_not_clipped_still_count_in_the_norm_after(tmp_path):
    path = one_file(tmp_path, huge=np.full(4, 1e200), vast=np.full(4, 3e201))
    result = clip(path, max_norm=1e201, per_tensor=True)
    assert [row.clipped for row in result.per_tensor] == [False, True]
    assert result.norm_after == norm(path).norm == pytest.approx(math.hypot(2e200, 1e201))


def test_a_nan_elsewhere_does_not_keep_a_huge_tensor_from_its_rescue(tmp_path):
    path = one_file(tmp_path, bad=np.array([math.nan, 1.0]), huge=np.full(4, 1e200))
    result = clip(path, max_norm=1e200, eps=0, per_tensor=True, nonfinite="propagate")
    assert result.per_tensor[1].norm_before == 2e200
    assert read(path)["huge"].tolist() == [5e199] * 4


MIXED = {
    "unchanged tiny, changed to tiny": ({"a": [1e-190], "b": [1.0]}, {"max_norm": 1e-190, "per_tensor": True}),
    "an empty tensor beside tiny ones": ({"a": [1e-200] * 3, "e": []}, {"max_norm": 1e-201}),
    "clamped from beyond the squares": ({"a": [1e200] * 4, "b": [1e260] * 4}, {"max_value": 1e250}),
    "huge, per tensor": ({"a": [1e200] * 4, "b": [1e260] * 4}, {"max_norm": 1e250, "per_tensor": True}),
    "a high order": ({"a": [1e-9], "b": [1e-8] * 4}, {"max_norm": 1e-8, "norm_type": 50}),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dry_run", [False, True])
def test_the_norm_after_is_that_of_the_result_whatever_needed_a_rescue(tmp_path, name, dry_run):
    values, options = MIXED[name]
    path = one_file(tmp_path, **{key: np.array(one) for key, one in values.items()})
    options = options | ({"eps": 0} if "max_norm" in options else {})
    result = clip(path, dry_run=dry_run, **options)
    if dry_run:
        clip(path, **options)
    fresh = norm(path, norm_type=options.get("norm_type", 2), per_tensor=True)
    assert result.norm_after == fresh.norm > 0
    if result.per_tensor:
        assert [row.norm_after for row in result.per_tensor] == [row.norm for row in fresh.per_tensor]


def test_a_coefficient_and_a_loss_scale_that_cancel_change_nothing_and_say_so(tmp_path):
    path = one_file(tmp_path, a=np.array([0.6, 0.8]))
    before = snapshot(tmp_path)
    result = clip(path, unscale=0.5, max_norm=1, eps=0, per_tensor=True)
    assert snapshot(tmp_path) == before
    assert (result.norm_before, result.norm_after, result.clipped) == (2.0, 1.0, True)
    assert (result.per_tensor[0].norm_before, result.per_tensor[0].norm_after) == (2.0, 1.0)


def test_an_infinite_limit_changes_nothing_not_even_beside_an_infinity(tmp_path):
    path = one_file(tmp_path, a=encode([1, math.inf], "F32"))
    before = snapshot(tmp_path)
    assert not clip(path, max_norm=math.inf, nonfinite="propagate").clipped
    assert snapshot(tmp_path) == before


def test_numpy_scalars_are_taken_as_numbers(tmp_path):
    path = one_file(tmp_path, a=np.full(100, 3e36, np.float32))
    result = clip(path, max_norm=np.float32(1.0), unscale=np.float32(1.0), eps=np.float64(0))
    assert type(result.coef) is type(result.norm_before) is float
    assert read(path)["a"].tolist() == pytest.approx([0.1] * 100, rel=1e-5)


def test_empty_files_empty_tensors_and_scalars(tmp_path):
    empty = write(tmp_path / "empty", {})
    odd = write(tmp_path / "odd", {"none": np.zeros((0, 3), np.float32), "scalar": encode(10, "F32")})
    result = clip([empty, odd], max_norm=5, eps=0)
    assert (result.norm_before, result.output.files_written) == (10.0, 1)
    assert read(odd)["scalar"] == 5.0
    assert read(odd)["scalar"].shape == ()
    assert clip(empty, max_norm=1).norm_after == 0.0


def test_two_thousand_tiny_tensors(tmp_path):
    path = one_file(tmp_path, **{f"t{i}": np.full(i % 5, 2, np.float32) for i in range(2000)})
    result = clip(path, max_norm=1, eps=0)
    assert result.norm_after == pytest.approx(1)
    expected = float(np.float32(2) * np.float32(result.coef))
    assert {value for array in read(path).values() for value in array.tolist()} == {expected}


def test_a_disk_that_fills_up_in_the_middle_changes_nothing(tmp_path, monkeypatch):
    paths = [write(tmp_path / f"{i}", {"a": np.ones(800_000, np.float32)}) for i in range(3)]
    before = snapshot(tmp_path)
    written = []

    def fill_up(_fd, views, at):
        written.append(at)
        if len(written) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return sum(map(len, views))

    monkeypatch.setattr(os, "pwritev", fill_up)
    with pytest.raises(SystemRefusedError, match="No space left"):
        clip(paths, max_norm=1, concat=True, threads=1)
    assert snapshot(tmp_path) == before


def test_an_input_that_changes_during_the_run_makes_no_output(tmp_path):
    path, output = one_file(tmp_path, a=np.ones(2_000_000, np.float32)), tmp_path / "out"

    def change(title, done, whole):
        if title == "clipping" and done >= whole // 2:
            os.utime(path, ns=(0, 0))

    with pytest.raises(SystemRefusedError, match="changed"):
        clip(path, max_norm=1, output=output, progress=change, threads=1)
    assert not output.exists()


def test_f8_e4m3_results_beyond_its_range_are_an_error_though_they_are_no_infinity(tmp_path):
    path = one_file(tmp_path, a=encode([400, 1], "F8_E4M3"))
    with pytest.raises(NonFiniteError, match="1 result overflows F8_E4M3"):
        clip(path, max_norm=1e6, unscale=0.5)


@pytest.mark.parametrize("value", [448, -448])
def test_f8_e4m3_results_beyond_its_range_propagate_as_the_one_nan(tmp_path, value):
    path = one_file(tmp_path, a=encode([value, 1], "F8_E4M3"))
    clip(path, max_norm=math.inf, unscale=0.5, nonfinite="propagate")
    assert bits_of(read(path)["a"]).tolist() == [0x7F, 0x40]


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_a_nan_is_written_without_sign_and_payload_and_left_alone_where_nothing_is_written(tmp_path, dtype):
    array = encode([1, 1, 1], dtype)
    bits_of(array)[:2] = QUIET_NANS[dtype]
    bits_of(array)[1] |= 1 << (8 * array.dtype.itemsize - 1)
    path = one_file(tmp_path, a=array)
    clip(path, max_norm=math.inf, nonfinite="propagate")
    assert read(path)["a"].tobytes() == array.tobytes()
    clip(path, max_norm=math.inf, unscale=2, nonfinite="propagate")
    assert bits_of(read(path)["a"]).tolist() == [*[QUIET_NANS[dtype]] * 2, int(bits_of(encode([0.5], dtype))[0])]


def test_max_value_is_rounded_once_to_the_type_of_the_tensor(tmp_path):
    path = one_file(tmp_path, **{dtype: encode([3.0, -3.0], dtype) for dtype in VALUE_TYPES})
    limit = 1.0004882812509095
    clip(path, max_value=limit)
    found = {name: array.astype(float).tolist() for name, array in read(path).items()}
    rounded = {"F64": limit, "F32": 1.00048828125, "F16": 1.0009765625, "BF16": 1.0, "F8_E4M3": 1.0, "F8_E5M2": 1.0}
    assert found == {dtype: [value, -value] for dtype, value in rounded.items()}


def test_a_limit_of_minus_zero_is_zero(tmp_path):
    path = one_file(tmp_path, a=encode([5, -5], "F32"))
    clip(path, max_value=-0.0)
    assert bits_of(read(path)["a"]).tolist() == [0, 0x8000_0000]


def test_the_loss_scale_counts_in_whether_a_value_is_clamped(tmp_path):
    path = one_file(tmp_path, a=encode([8, 2], "F32"))
    assert clip(path, max_value=8, unscale=1.0, dry_run=True).clipped is False
    assert clip(path, max_value=3, unscale=4, dry_run=True).clipped is False
    assert clip(path, max_value=1, unscale=4, dry_run=True).clipped is True


def test_max_value_clamps(tmp_path):
    path = one_file(tmp_path, a=encode([0.25, -3, 0.5, 7, -0.0], "BF16"), b=encode([0.1], "F32"))
    result = clip(path, max_value=0.5)
    assert read(path)["a"].astype(float).tolist() == [0.25, -0.5, 0.5, 0.5, -0.0]
    assert read(path)["b"].tolist() == encode([0.1], "F32").tolist()
    assert (result.clipped, result.coef, result.max_abs) == (True, None, 7.0)
    assert result.norm_after == norm(path).norm


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_clamping_twice_writes_once(tmp_path, dtype):
    path = one_file(tmp_path, a=encode([1, -2, 0.01], dtype))
    assert clip(path, max_value=0.1).clipped
    before = snapshot(tmp_path)
    again = clip(path, max_value=0.1)
    assert (again.clipped, again.output.bytes_written) == (False, 0)
    assert snapshot(tmp_path) == before


def test_a_given_total_norm_takes_the_place_of_the_measured_one(tmp_path):
    path = one_file(tmp_path, a=encode([3, 4], "F32"))
    result = clip(path, max_norm=1, total_norm=10, eps=0)
    assert (result.norm_before, result.total_norm, result.coef) == (5.0, 10, 0.1)
    assert result.norm_after == pytest.approx(0.5)


@pytest.mark.parametrize(("max_norm", "clipped", "after"), [(100, False, [3.0, 4.0]), (2.5, True, [1.5, 2.0])])
def test_unscale_divides_in_the_norm_and_in_the_result_even_without_clipping(tmp_path, max_norm, clipped, after):
    path = one_file(tmp_path, a=encode([3 * 1024, 4 * 1024], "F16"))
    result = clip(path, max_norm=max_norm, unscale=1024, eps=0)
    assert (result.norm_before, result.max_abs, result.clipped) == (5.0, 4.0, clipped)
    assert read(path)["a"].tolist() == after
    assert result.norm_after == norm(path).norm


def test_unscale_goes_before_the_clamp(tmp_path):
    path = one_file(tmp_path, a=encode([8, 2], "F16"))
    clip(path, max_value=1, unscale=4)
    assert read(path)["a"].tolist() == [1.0, 0.5]


def poisoned(folder):
    return one_file(folder, good=encode([3, 4], "F32"), bad=encode([1, math.nan, math.inf, -math.inf], "F32"))


def test_nonfinite_error_writes_nothing_and_names_the_tensors(tmp_path):
    path = poisoned(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(NonFiniteError) as caught:
        clip(path, max_norm=1)
    assert snapshot(tmp_path) == before
    (problem,) = caught.value.problems
    assert (problem.file, problem.tensor) == (str(path), "bad")
    assert problem.message == "1 NaN, 2 Inf, the first at [1]"
    assert caught.value.exit_code == 1


def test_nonfinite_propagate_does_what_torch_does(tmp_path):
    path = poisoned(tmp_path)
    result = clip(path, max_norm=1, nonfinite="propagate")
    assert math.isnan(result.coef)
    assert result.clipped
    assert all(np.isnan(array).all() for array in read(path).values())

    path = one_file(tmp_path, a=encode([3, math.inf], "F32"))
    result = clip(path, max_norm=1, nonfinite="propagate")
    assert (result.coef, read(path)["a"][0]) == (0.0, 0.0)
    assert np.isnan(read(path)["a"][1])


def test_nonfinite_zero_takes_them_as_zero(tmp_path):
    path = poisoned(tmp_path)
    result = clip(path, max_norm=100, nonfinite="zero")
    assert (result.norm_before, result.nan, result.inf) == (math.sqrt(26), 1, 2)
    assert not result.clipped
    assert read(path)["bad"].tolist() == [1, 0, 0, 0]
    assert read(path)["good"].tolist() == [3, 4]
    assert clip(poisoned(tmp_path), max_norm=1, nonfinite="zero").norm_after == pytest.approx(1)


def test_a_result_that_its_type_cannot_hold_is_an_error_that_names_it(tmp_path):
    path = one_file(tmp_path, fine=encode([1], "F16"), hot=encode([1, 60_000], "F16"))
    before = snapshot(tmp_path)
    for options in ({}, {"dry_run": True}, {"nonfinite": "zero"}):
        with pytest.raises(NonFiniteError) as caught:
            clip(path, max_norm=1e6, unscale=0.5, **options)
        (problem,) = caught.value.problems
        assert (problem.code, problem.tensor) == ("overflow", "hot")
        assert problem.message == "1 result overflows F16, the first at [1]"
    assert snapshot(tmp_path) == before
    clip(path, max_norm=1e6, unscale=0.5, nonfinite="propagate")
    assert read(path)["hot"].tolist() == [2, math.inf]


def test_a_norm_beyond_float64_is_refused_rather_than_clipped_to_zero(tmp_path):
    path = one_file(tmp_path, a=np.full(4, 1.7e308))
    with pytest.raises(BadInputError, match="overflows float64; nothing written; use max_value"):
        clip(path, max_norm=1)
    clip(path, max_value=1e300)
    assert clip(path, max_norm=1).norm_after == pytest.approx(1)


def test_a_norm_beyond_float64_matters_only_where_the_coefficient_is_made_of_it(tmp_path):
    path = one_file(tmp_path, a=np.full(4, 1.7e308))
    assert not clip(path, max_norm=math.inf).clipped
    assert clip(path, max_norm=1e300, total_norm=1e308, dry_run=True).clipped
    result = clip(path, max_norm=1e10, unscale=1e10, dry_run=True)
    assert result.norm_before == pytest.approx(3.4e298)
    assert clip(path, max_value=1e300, unscale=1e10).norm_before == pytest.approx(3.4e298)


@pytest.mark.parametrize(
    ("array", "options"),
    [
        (np.array([1e300, 2e300]), {"unscale": 1e-10}),
        (np.ones(2, np.float32), {"unscale": 1e-310}),
        (np.full(2, 1e30, np.float32), {"unscale": 1e60, "max_norm": 1e9}),
        (np.full(2, 1e37, np.float32), {"max_norm": 1e-10}),
        (np.full(4, 1e30, np.float32), {"max_norm": 1e-12}),
        (np.full(4, 1e300), {"max_norm": 1e-30}),
        (np.full(4, 1e300), {"max_norm": 1e-8}),
        (np.full(4, 1e300), {"max_norm": 1e-30, "per_tensor": True}),
        (np.full(4, 1e300), {"max_norm": 1e-30, "unscale": 1e-200}),
        (np.full(4, 1e300), {"max_norm": 1e-30, "norm_type": math.inf}),
        (np.ones(2), {"max_norm": 1e-30, "total_norm": 1e300}),
        (np.ones(2), {"max_norm": 1, "total_norm": 1e308, "eps": 1.7e308}),
        (np.ones(2), {"max_norm": math.inf, "unscale": 1e308}),
        (np.ones(2, np.float32), {"max_norm": math.inf, "unscale": 2e38}),
        (np.ones(2, np.float32), {"max_norm": None, "max_value": 1, "unscale": 2e38}),
        (encode([1, 1], "F16"), {"max_norm": math.inf, "unscale": 2e38}),
        (encode([1, 1], "F8_E5M2"), {"max_norm": 1e-38}),
    ],
)
def test_a_coefficient_that_its_type_holds_only_in_part_is_refused(tmp_path, array, options):
    path = one_file(tmp_path, a=array)
    before = snapshot(tmp_path)
    with pytest.raises(BadInputError, match="out of range for float|overflows float64") as caught:
        clip(path, **({"max_norm": 1} | options))
    assert snapshot(tmp_path) == before
    assert caught.value.exit_code == 3


def test_a_coefficient_is_refused_only_where_a_tensor_needs_it_in_a_type_that_is_too_small(tmp_path):
    path = one_file(tmp_path, wide=np.full(4, 1e30), narrow=encode([1], "BF16"))
    with pytest.raises(BadInputError, match="5e-43 is out of range for float32 .*its type for BF16 tensors") as caught:
        clip(path, max_norm=1e-12, eps=0)
    assert caught.value.problems[0].tensor == "narrow"
    result = clip(path, max_norm=1e-12, eps=0, exclude=["narrow"])
    assert result.norm_after == pytest.approx(1e-12, rel=1e-15)
    path = one_file(tmp_path, wide=np.full(4, 1e30), narrow=encode([1], "BF16"))
    rows = clip(path, max_norm=1e-12, eps=0, per_tensor=True).per_tensor
    assert [row.norm_after for row in rows] == pytest.approx([1e-12, 1e-12], rel=2.0**-8)


@pytest.mark.parametrize(("dtype", "smallest"), [("F64", 2.0**-1022), ("F32", 2.0**-126), ("F16", 2.0**-126)])
def test_the_smallest_coefficient_is_the_smallest_normal_number(tmp_path, dtype, smallest):
    path = one_file(tmp_path, a=encode([1], dtype))
    result = clip(path, max_norm=smallest, eps=0)
    assert (result.coef, result.norm_after) == (smallest, 0.0 if dtype == "F16" else smallest)
    path = one_file(tmp_path, a=encode([1], dtype))
    with pytest.raises(BadInputError, match="out of range"):
        clip(path, max_norm=smallest * (1 - 2.0**-20), eps=0)


@pytest.mark.parametrize("value", [3.0, 1e300])
def test_a_coefficient_of_zero_is_that_of_a_limit_of_zero(tmp_path, value):
    path = one_file(tmp_path, a=np.array([value]))
    result = clip(path, max_norm=0)
    assert (result.coef, read(path)["a"].tolist()) == (0.0, [0.0])


def test_clipping_in_two_steps_reaches_what_one_step_cannot(tmp_path):
    path = one_file(tmp_path, a=np.full(4, 1e300))
    clip(path, max_norm=1e100)
    assert clip(path, max_norm=1e-30).norm_after == pytest.approx(1e-30, rel=1e-15)


def test_a_path_that_ends_in_a_slash_is_a_folder(tmp_path):
    path = one_file(tmp_path, a=encode([3], "F32"))
    with pytest.raises(BadInputError, match="no such folder"):
        clip(f"{path}/", max_norm=1)
    with pytest.raises(UsageError, match="is a folder or an index"):
        clip(path, max_norm=1, output=f"{tmp_path}/new/")


def test_dry_run_says_the_same_and_writes_nothing(tmp_path):
    path = one_file(tmp_path, a=encode([3, 4], "BF16"), b=np.arange(100_000, dtype=np.float32))
    before = snapshot(tmp_path)
    dry = clip(path, max_norm=1, dry_run=True)
    assert snapshot(tmp_path) == before
    wet = clip(path, max_norm=1)
    assert (dry.norm_before, dry.norm_after, dry.coef, dry.clipped) == (
        wet.norm_before, wet.norm_after, wet.coef, wet.clipped,
    )  # fmt: skip
    assert (dry.output.dry_run, dry.output.bytes_written, dry.output.files_written) == (True, 0, 0)


def test_output_leaves_the_input_alone(tmp_path):
    path = one_file(tmp_path / "in", a=encode([3, 4], "F32"))
    before = snapshot(tmp_path / "in")
    clip(path, max_norm=1, eps=0, output=tmp_path / "out.safetensors")
    assert snapshot(tmp_path / "in") == before
    assert read(tmp_path / "out.safetensors")["a"].tolist() == pytest.approx([0.6, 0.8])


def test_output_is_written_though_nothing_is_clipped(tmp_path):
    path = one_file(tmp_path, a=encode([3, 4], "F32"))
    result = clip(path, max_norm=100, output=tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == path.read_bytes()
    assert (result.clipped, result.output.files_written) == (False, 1)


def test_output_dir_takes_every_file_and_the_index(tmp_path):
    shards = {"1.safetensors": {"a": encode([30], "F32")}, "2.safetensors": {"ids": np.ones(3, np.int32)}}
    index = write_index(tmp_path / "in", shards)
    before = snapshot(tmp_path / "in")
    clip(index, max_norm=1, exclude=["ids"], output_dir=tmp_path / "new" / "out")
    assert snapshot(tmp_path / "in") == before
    out = tmp_path / "new" / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in before)
    assert (out / index.name).read_bytes() == index.read_bytes()
    assert (out / "2.safetensors").read_bytes() == (index.parent / "2.safetensors").read_bytes()
    assert norm(out, exclude=["ids"]).norm == pytest.approx(1)


def test_a_failed_run_leaves_no_output(tmp_path):
    with pytest.raises(NonFiniteError):
        clip(poisoned(tmp_path), max_norm=1, output=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_norm": 1, "max_value": 1},
        {"max_norm": -1},
        {"max_norm": math.nan},
        {"max_value": -0.5},
        {"max_value": math.nan},
        {"max_norm": 1, "eps": -1},
        {"max_norm": 1, "eps": math.nan},
        {"max_norm": 1, "unscale": 0},
        {"max_norm": 1, "unscale": math.inf},
        {"max_norm": 1, "total_norm": math.inf},
        {"max_norm": 1, "total_norm": -1},
        {"max_norm": 1, "norm_type": 0},
        {"max_norm": 1, "nonfinite": "ignore"},
        {"max_norm": 1, "per_tensor": True, "total_norm": 1},
        {"max_value": 1, "per_tensor": True},
        {"max_norm": 1, "output": "a", "output_dir": "b"},
        {"max_norm": 1, "threads": 0},
        {"max_norm": "much"},
        {"max_norm": 10**400},
        {"max_norm": 1, "include": 5},
        {"max_norm": 1, "output": ""},
        {"max_norm": 1, "output_dir": ""},
        {"max_norm": 1, "output": "a\0b"},
    ],
)
def test_arguments_that_make_no_sense_are_usage_errors_and_change_nothing(tmp_path, arguments):
    path = one_file(tmp_path, a=encode([3, 4], "F32"))
    before = snapshot(tmp_path)
    with pytest.raises(UsageError):
        clip(path, **arguments)
    assert snapshot(tmp_path) == before


def test_outputs_that_do_not_fit_the_inputs_are_usage_errors(tmp_path):
    one = write(tmp_path / "1" / "x.safetensors", {"a": encode([3], "F32")})
    two = write(tmp_path / "2" / "x.safetensors", {"a": encode([3], "F32")})
    with pytest.raises(UsageError, match="single input"):
        clip([one, two], max_norm=1, concat=True, output=tmp_path / "out")
    with pytest.raises(UsageError, match="two inputs"):
        clip([one, two], max_norm=1, concat=True, output_dir=tmp_path / "out")
    with pytest.raises(UsageError, match="is a folder"):
        clip(one, max_norm=1, output=tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="not a regular file"):
        clip(one, max_norm=1, output=tmp_path / "fifo")
    index = write_index(tmp_path / "3", {"1.safetensors": {"a": encode([3], "F32")}})
    with pytest.raises(UsageError, match="single input"):
        clip(index, max_norm=1, output=tmp_path / "out")
    with pytest.raises(UsageError, match="is not a folder"):
        clip(one, max_norm=1, output_dir=two)
    for option in ({"output": one}, {"output_dir": one.parent}):
        with pytest.raises(UsageError, match="is an input"):
            clip(one, max_norm=1, **option)


SIZES = st.sampled_from([0, 1, 2049, 65_537, 300_001])
TENSORS = st.lists(st.tuples(st.sampled_from(VALUE_TYPES), SIZES), min_size=1, max_size=7)


@settings(max_examples=12)
@given(tensors=TENSORS, seed=st.integers(0, 9), max_norm=st.floats(0.01, 100))
def test_the_same_bits_for_any_threads_blocks_and_shards(tmp_path_factory, tensors, seed, max_norm):
    folder = tmp_path_factory.mktemp("bits")
    rng = np.random.default_rng(seed)
    arrays = {f"t{i}": encode(rng.standard_normal(n), dtype) for i, (dtype, n) in enumerate(tensors)}
    one = write(folder / "one", arrays)
    expected = clip(one, max_norm=max_norm, threads=1)
    values = {name: array.tobytes() for name, array in read(one).items()}
    usual = tuning.BLOCK_BYTES
    for count, threads, block_bytes in ((1, 2, 512 << 10), (2, 1, 3_000_000), (7, 8, usual)):
        tuning.BLOCK_BYTES = block_bytes
        try:
            index = write_index(
                folder / str(count),
                {f"{i}.safetensors": {name: arrays[name] for name in list(arrays)[i::count]} for i in range(count)},
            )
            result = clip(index, max_norm=max_norm, threads=threads)
        finally:
            tuning.BLOCK_BYTES = usual
        assert (result.norm_before, result.norm_after) == (expected.norm_before, expected.norm_after)
        for file in Path(folder / str(count)).glob("*.safetensors"):
            assert all(array.tobytes() == values[name] for name, array in read(file).items())


@given(
    values=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=50),
    max_norm=st.floats(1e-3, 1e3),
    dtype=st.sampled_from(["F64", "F32", "BF16"]),
)
def test_the_norm_is_limited_and_the_direction_kept(tmp_path_factory, values, max_norm, dtype):
    array = encode(values, dtype)
    path = write(tmp_path_factory.getbasetemp() / "direction", {"a": array})
    result = clip(path, max_norm=max_norm)
    # Half a unit in the last place for each element, and float32's half for the coefficient.
    slack = {"F64": 1e-15, "F32": 2.0**-23, "BF16": 2.0**-8}[dtype]
    assert result.norm_after <= max(max_norm * (1 + slack), 1e-30)
    after = read(path)["a"].astype(np.float64)
    assert (np.sign(after) * np.sign(array.astype(np.float64)) >= 0).all()


def test_zeros_are_those_of_what_was_written_and_what_was_lost_is_a_warning(tmp_path):
    path = SAMPLES / "loss_scaled_f16.safetensors"
    answer = gradtool_json("clip", path, "--unscale", 1024, "--max-norm", 1, "--output", tmp_path / "y")
    data = answer["data"]
    assert (data["zeros"], data["zeros_before"]) == (652, 570)
    assert norm(tmp_path / "y").zeros == 652
    message = "of 27,081 values other than 0, 82 became 0 and 1,154 more than before are subnormal: too small for F16"
    hint = "use --dtype F32 with --output or --output-dir to keep them"
    assert data["warnings"] == [{"code": "underflow", "message": message, "hint": hint}]
    done = gradtool("clip", path, "--unscale", 1024, "--max-norm", 1, "--dry-run")
    assert done.stderr == f"gradtool: warning: {message}\n  hint: {hint}\n"
    assert "zeros\t652\nzeros_before\t570\n" in done.stdout


@pytest.mark.parametrize(
    ("count", "options", "warns"),
    [
        # One in a thousand is allowed, and no more.
        (1, {"unscale": 2.0, "max_norm": 1e9}, False),
        (2, {"unscale": 2.0, "max_norm": 1e9}, True),
        # What was subnormal before is nothing new.
        (3, {"max_norm": 1e9, "nonfinite": "zero"}, False),
        # Zeros that were asked for.
        (3, {"max_norm": 0}, False),
        (3, {"max_value": 0}, False),
    ],
)
def test_only_values_that_underflow_count_and_more_than_one_in_a_thousand(tmp_path, count, options, warns):
    values = np.ones(2000)
    values[:count] = 2.0**-24
    values[1000:] = 0
    path = one_file(tmp_path, a=encode(values, "F16"))
    result = clip(path, dry_run=True, **options)
    assert [one.code for one in result.call.warnings] == ["underflow"] * warns
    assert result.zeros_before == 1000


@pytest.mark.parametrize(("dtype", "remedy"), [("BF16", "F64"), ("F32", "F64"), ("F8_E4M3", "F32")])
def test_the_warning_names_a_type_that_has_smaller_values(tmp_path, dtype, remedy):
    path = one_file(tmp_path, a=encode([2e-38 if dtype != "F8_E4M3" else 2.0**-9, 0], dtype))
    (warning,) = clip(path, unscale=256, max_norm=1, dry_run=True).call.warnings
    assert warning.hint == f'use dtype="{remedy}" with output or output_dir to keep them'


def test_units_that_underflow_are_a_warning(tmp_path):
    path = one_file(tmp_path, w=encode(np.full((4, 9), 2.0**-14), "F16"))
    params = write(tmp_path / "p", {"w": encode(np.full((4, 9), 1e-6), "F32")})
    result = clip(path, agc=1.0, agc_eps=0.0, params=params, dry_run=True)
    assert (result.zeros, result.zeros_before, len(result.call.warnings)) == (0, 0, 1)
    assert (
        "of 36 values other than 0, 0 became 0 and 36 more than before are subnormal" in result.call.warnings[0].message
    )
    zeroed = clip(path, agc=1e-4, agc_eps=0.0, params=params, dry_run=True)
    assert (zeroed.zeros, zeroed.zeros_before) == (36, 0)


def test_dropped_values_were_no_zeros(tmp_path):
    path = one_file(tmp_path, a=encode([0, math.nan, math.inf, 2], "F32"))
    result = clip(path, max_norm=1, nonfinite="zero")
    assert (result.zeros, result.zeros_before) == (3, 1)


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_with_eps_0_a_second_run_has_nothing_to_do(tmp_path, dtype):
    for seed in range(8):
        path = one_file(tmp_path, a=gaussian(5000, dtype, seed=seed), b=gaussian(300, dtype, seed=seed + 100))
        # Rounding may leave the norm of wide types a hair above the limit, once.
        runs = [clip(path, max_norm=1, eps=0, fsync=False) for _ in range(3)]
        before = snapshot(tmp_path)
        again = clip(path, max_norm=1, eps=0)
        assert runs[0].clipped
        assert (again.clipped, again.coef, again.output.files_written) == (False, 1.0, 0)
        assert again.norm_after == again.norm_before == runs[-1].norm_after
        assert snapshot(tmp_path) == before


def test_a_second_run_with_the_eps_of_torch_clips_again(tmp_path):
    path = one_file(tmp_path, a=encode([3, 4], "F32"))
    first, second = (clip(path, max_norm=1) for _ in range(2))
    assert first.coef == 1 / (5 + 1e-6)
    assert (second.clipped, second.coef) == (True, 1 / (first.norm_after + 1e-6))
    assert second.coef < 1


@pytest.mark.parametrize("dtype", [name for name in VALUE_TYPES if NUMPY_TYPES[name].itemsize < 4])
def test_a_coefficient_that_rounds_to_1_in_a_type_would_change_no_value_of_it(tmp_path, dtype):
    codes = np.arange(2 ** (8 * NUMPY_TYPES[dtype].itemsize)).astype(STORAGE[dtype].bits)
    with np.errstate(all="ignore"):
        wide = codes.view(NUMPY_TYPES[dtype]).astype(np.float64)
    values = codes[np.isfinite(wide)].view(NUMPY_TYPES[dtype])
    coef = 1 - 2.0 ** -(STORAGE[dtype].mantissa_bits + 2)
    assert np.array_equal(bits_of(rounded_once(values.astype(np.float64) * coef, dtype)), bits_of(values))
    path = one_file(tmp_path, a=values)
    for limit, is_clipped in ((coef, False), (math.nextafter(coef, 0), True)):
        result = clip(path, max_norm=limit, total_norm=1.0, eps=0, dry_run=True)
        assert (result.clipped, result.coef) == (is_clipped, limit if is_clipped else 1.0)
    # A loss scale is applied with the coefficient, in a single rounding.
    result = clip(path, max_norm=coef, total_norm=1.0, eps=0, unscale=2, dry_run=True)
    assert (result.clipped, result.coef) == (True, coef)


def test_no_coefficient_below_1_comes_with_nothing_clipped(tmp_path):
    path = one_file(tmp_path, a=encode([3, 4], "F32"), b=encode([3, 4], "BF16"), c=encode([3, 4], "F64"))
    result = clip(path, max_norm=5, per_tensor=True, eps=1e-9, dry_run=True)
    assert [(row.name, row.coef, row.clipped) for row in result.per_tensor] == [
        ("a", 1.0, False), ("b", 1.0, False), ("c", 5 / (5 + 1e-9), True),
    ]  # fmt: skip
    assert (result.coef, result.clipped) == (None, True)
    result = clip(path, group=".:8", eps=1e-3, dry_run=True)
    norm_before = result.norm_before
    assert (result.per_group[0].coef, result.per_group[0].clipped) == (8 / (norm_before + 1e-3), True)
    data = gradtool_json("clip", path, "--max-norm", "inf", "--dry-run")["data"]
    assert (data["coef"], data["clipped"]) == (None, False)
    assert "coef" not in gradtool("clip", path, "--max-norm", "inf", "--dry-run").stdout
    assert "coef\t1.0\n" in gradtool("clip", path, "--max-norm", "100", "--dry-run").stdout
