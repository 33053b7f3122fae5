import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import VALUE_TYPES, bits_of, build, encode, read, snapshot, write, write_index

from gradtool import BadInputError, NonFiniteError, SystemRefusedError, UsageError, accumulate, norm, tuning


def f32(*values):
    return encode(values, "F32")


def lay_out(folder, old, *grads, metadata=()):
    """A buffer and gradients with one tensor `a` each, or with the given ones."""
    paths = []
    for i, one in enumerate((old, *grads)):
        tensors = one if isinstance(one, dict) else {"a": one}
        own = metadata[i - 1] if i and metadata else None
        paths.append(write(folder / (f"g{i}" if i else "buffer"), tensors, own))
    return paths[0], paths[1:]


def refused(error, folder, path, grads, **options):
    """The problems of a call that must fail and leave every byte alone."""
    before = snapshot(folder)
    with pytest.raises(error) as caught:
        accumulate(path, grads, **options)
    assert snapshot(folder) == before
    return [(one.code, one.tensor, Path(one.file).name if one.file else None) for one in caught.value.problems]


def test_a_known_result(tmp_path):
    path, grads = lay_out(tmp_path, f32(1, 2, 3), f32(4, 5, 6))
    result = accumulate(path, grads[0])
    assert read(path)["a"].tolist() == [5, 7, 9]
    assert (result.norm_before, result.norm_after, result.norm) == (math.sqrt(14), math.sqrt(155), math.sqrt(155))
    assert (result.taken, result.skipped, result.weight_sum, result.updated, result.dry_run) == (1, 0, 1.0, True, False)
    assert (result.sum_norm, result.coef, result.clipped, result.warnings) == (None, None, False, ())
    assert (result.files, result.tensors, result.elements, result.max_abs) == (2, 1, 3, 9.0)
    assert (result.files_written, result.bytes_written) == (1, path.stat().st_size)
    (row,) = result.per_gradient
    assert (row.weight, row.taken, row.norm, row.file) == (1.0, True, None, str(grads[0]))


@pytest.mark.parametrize(
    ("grad", "expected"),
    [
        (f32(10, 20, 30), [[11, 22, 33], [14, 25, 36]]),
        (encode(10, "F32"), [[11, 12, 13], [14, 15, 16]]),
        (encode([[10], [20]], "BF16"), [[11, 12, 13], [24, 25, 26]]),
        (encode([[10, 20, 30]], "F64"), [[11, 22, 33], [14, 25, 36]]),
    ],
)
def test_a_gradient_broadcasts_to_the_shape_of_the_buffer(tmp_path, grad, expected):
    path, grads = lay_out(tmp_path, encode([[1, 2, 3], [4, 5, 6]], "F32"), grad)
    accumulate(path, grads)
    assert read(path)["a"].tolist() == expected


def test_a_gradient_never_broadcasts_the_other_way(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1, 2), "b": f32(1)}, {"a": encode([[1, 2], [3, 4]], "F32"), "b": f32(1)})
    with pytest.raises(BadInputError, match=r"\[2, 2\], which does not broadcast to the buffer's \[2\]") as caught:
        accumulate(path, grads)
    assert caught.value.exit_code == 3
    assert refused(BadInputError, tmp_path, path, grads) == [("shape", "a", "g1")]
    path, grads = lay_out(tmp_path, encode(1, "F32"), f32(1))
    assert refused(BadInputError, tmp_path, path, grads) == [("shape", "a", "g1")]


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), min_size=1, max_size=50))
def test_float32_into_float32_is_a_float32_add_bit_for_bit(tmp_path_factory, pairs):
    old, grad = np.array(pairs, np.float32).T
    path, grads = lay_out(tmp_path_factory.getbasetemp(), old, grad)
    accumulate(path, grads, nonfinite="propagate", fsync=False)
    with np.errstate(all="ignore"):
        expected, found = old + grad, read(path)["a"]
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert np.array_equal(bits_of(found)[~np.isnan(found)], bits_of(expected)[~np.isnan(expected)])


def test_many_small_bf16_gradients_lose_nothing(tmp_path):
    path, grads = lay_out(tmp_path, encode([256], "BF16"), *[encode([0.5], "BF16")] * 64)
    accumulate(path, grads)
    assert read(path)["a"].astype(float).tolist() == [288.0]


def test_the_order_is_the_one_given(tmp_path):
    path, (big, one, minus) = lay_out(tmp_path, np.zeros(1), np.array([1e17]), np.array([1.0]), np.array([-1e17]))
    accumulate(path, [big, minus, one], overwrite=True)
    assert read(path)["a"].tolist() == [1.0]
    accumulate(path, [big, one, minus], overwrite=True)
    assert read(path)["a"].tolist() == [0.0]


@pytest.mark.parametrize("ours", VALUE_TYPES)
@pytest.mark.parametrize("theirs", VALUE_TYPES)
def test_any_type_goes_into_any_type(tmp_path, ours, theirs):
    path, grads = lay_out(tmp_path, encode([1, -2, 0.5], ours), encode([2, 4, 0.25], theirs))
    accumulate(path, grads, weight=[-2])
    assert read(path)["a"].dtype == encode([0], ours).dtype
    assert read(path)["a"].astype(float).tolist() == [-3, -10, 0]


def test_tensors_match_by_name_in_whatever_shard_and_order_they_are(tmp_path):
    old = {f"t{i}": np.full(i + 1, i, np.float32) for i in range(21)}
    grad = {name: encode(array * 10, "F64") for name, array in reversed(old.items())}
    index = write_index(
        tmp_path / "buffer",
        {f"{i}.safetensors": {n: old[n] for n in list(old)[i::7]} for i in (3, 0, 6, 2, 5, 1, 4)},
    )
    kept = index.read_bytes()
    write_index(
        tmp_path / "grad", {f"{i}.safetensors": {n: grad[n] for n in list(grad)[i * 11 : i * 11 + 11]} for i in (1, 0)}
    )
    result = accumulate(tmp_path / "buffer", tmp_path / "grad")
    found = {name: array for file in (tmp_path / "buffer").glob("*.safetensors") for name, array in read(file).items()}
    assert {name: array.tolist() for name, array in found.items()} == {
        name: (array * 11).tolist() for name, array in old.items()
    }
    assert (result.files_written, result.files, index.read_bytes()) == (7, 9, kept)
    assert result.norm_after == norm(tmp_path / "buffer").norm


def test_neighbours_in_the_gradient_that_are_none_in_the_buffer_go_where_they_belong(tmp_path):
    old = {"a": f32(0, 0), "wide": f32(0, 0, 0), "b": f32(0, 0)}
    path, grads = lay_out(tmp_path, old, {"a": f32(1, 2), "b": f32(3, 4), "wide": encode(5, "F32")})
    accumulate(path, grads)
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [1, 2], "wide": [5] * 3, "b": [3, 4]}


def test_what_is_not_added_to_stays_byte_for_byte(tmp_path):
    payload = np.array([0x7FA0_1234, 0x3F80_0000], np.uint32).view(np.float32)
    tensors = {"z": f32(3), "ids": np.arange(5, dtype=np.int32), "a": f32(4), "odd": payload}
    path = write(tmp_path / "x", tensors, {"step": "7", "note": "é"}, padding=5)
    grads = [write(tmp_path / "g", {"a": f32(1), "z": f32(2), "extra": f32(1)})]
    result = accumulate(path, grads, missing="skip", exclude=["ids"])
    assert path.read_bytes() == build(tensors | {"z": f32(5), "a": f32(5)}, {"step": "7", "note": "é"}, padding=5)
    assert math.isnan(result.norm_after)
    assert result.nan == 1


def test_shards_that_nothing_is_added_to_are_not_touched(tmp_path):
    write_index(tmp_path / "buffer", {"1.safetensors": {"a": f32(1)}, "2.safetensors": {"b": f32(1)}})
    grad = write(tmp_path / "g", {"a": f32(1)})
    kept = snapshot(tmp_path)[tmp_path / "buffer" / "2.safetensors"]
    result = accumulate(tmp_path / "buffer", grad, missing="skip")
    assert (result.files_written, result.norm_after) == (1, math.sqrt(5))
    assert snapshot(tmp_path)[tmp_path / "buffer" / "2.safetensors"] == kept


def test_overwrite_drops_the_old_content_even_nan(tmp_path):
    path, grads = lay_out(tmp_path, f32(math.nan, math.inf), f32(1, 2), f32(3, -4))
    result = accumulate(path, grads, overwrite=True)
    assert read(path)["a"].tolist() == [4, -2]
    assert (result.norm_before, result.norm_after) == (None, math.sqrt(20))


def test_overwriting_keeps_the_sign_of_a_zero(tmp_path):
    path, grads = lay_out(tmp_path, f32(5, 5), f32(-0.0, 0.0))
    accumulate(path, grads, overwrite=True)
    assert bits_of(read(path)["a"]).tolist() == [0x8000_0000, 0]


def test_without_update_nothing_is_written_and_that_is_reported(tmp_path):
    path, grads = lay_out(tmp_path, f32(3, 4), f32(math.nan, 1))
    before = snapshot(tmp_path)
    result = accumulate(path, grads, update=False)
    assert snapshot(tmp_path) == before
    assert (result.updated, result.norm_before, result.norm_after) == (False, 5.0, 5.0)
    assert (result.taken, result.files_written, result.bytes_written) == (0, 0, 0)
    assert not result.per_gradient[0].taken
    path, grads = lay_out(tmp_path, f32(3, 4), {"b": f32(1)})
    assert len(refused(BadInputError, tmp_path, path, grads, update=False)) == 2


def test_each_gradient_has_its_weight(tmp_path):
    path, grads = lay_out(tmp_path, f32(100), f32(1), f32(1), f32(1))
    result = accumulate(path, grads, weight=[2, -0.5, 0])
    assert read(path)["a"].tolist() == [101.5]
    assert ([row.weight for row in result.per_gradient], result.weight_sum) == ([2, -0.5, 0], 1.5)
    accumulate(path, grads[0], weight=-1.5)
    assert read(path)["a"].tolist() == [100]


def test_a_mean_divides_the_gradients_and_not_what_was_there(tmp_path):
    path, grads = lay_out(tmp_path, f32(10, 20), f32(3, 6), f32(1, 1))
    accumulate(path, grads, weight=[2, 1], mean=True)
    assert read(path)["a"].tolist() == [np.float32(10 + 7 / 3), np.float32(20 + 13 / 3)]
    accumulate(path, grads, mean=True, overwrite=True)
    assert read(path)["a"].tolist() == [2, 3.5]


def test_weights_come_from_the_metadata_of_the_gradients(tmp_path):
    metadata = [{"tokens": "3"}, {"tokens": "1e0"}]
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(5), metadata=metadata)
    result = accumulate(path, grads, weight_key="tokens", mean=True)
    assert read(path)["a"].tolist() == [2]
    assert ([row.weight for row in result.per_gradient], result.weight_sum) == ([3, 1], 4)


BAD_WEIGHTS = {
    "none there": ([{"n": "1"}, {}], "has no 'n' in its metadata"),
    "no metadata": ([{"n": "1"}, None], "has no 'n' in its metadata"),
    "a word": ([{"n": "1"}, {"n": "many"}], "'n' = 'many' in its metadata, which is no number"),
    "nan": ([{"n": "1"}, {"n": "nan"}], "which is no number"),
    "inf": ([{"n": "1"}, {"n": "1e999"}], "which is no number"),
    "empty": ([{"n": "1"}, {"n": ""}], "which is no number"),
    "digits of another script": ([{"n": "1"}, {"n": "\u0663"}], "which is no number"),
    "digits in groups": ([{"n": "1"}, {"n": "1_000"}], "which is no number"),
    "a space that is not ASCII": ([{"n": "1"}, {"n": "1\xa0"}], "which is no number"),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_a_weight_that_is_no_number_names_the_file(tmp_path, name):
    metadata, message = BAD_WEIGHTS[name]
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(5), metadata=metadata)
    with pytest.raises(BadInputError, match=message):
        accumulate(path, grads, weight_key="n")
    assert refused(BadInputError, tmp_path, path, grads, weight_key="n") == [("weight", None, "g2")]


def test_shards_of_one_set_must_have_the_same_weight(tmp_path):
    path, _ = lay_out(tmp_path, {"a": f32(0), "b": f32(0)})
    write(tmp_path / "set" / "1.safetensors", {"a": f32(1)}, {"n": "2"})
    write(tmp_path / "set" / "2.safetensors", {"b": f32(1)}, {"n": "2.0"})
    accumulate(path, tmp_path / "set", weight_key="n")
    assert read(path)["b"].tolist() == [2]
    write(tmp_path / "set" / "2.safetensors", {"b": f32(1)}, {"n": "3"})
    with pytest.raises(BadInputError, match="'n' = 3 in its metadata, where 1.safetensors of the same set has 2"):
        accumulate(path, tmp_path / "set", weight_key="n")
    assert refused(BadInputError, tmp_path, path, tmp_path / "set", weight_key="n") == [
        ("weight", None, "2.safetensors")
    ]


def test_every_missing_and_extra_tensor_is_listed(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(1), "c": f32(1)}, {"d": f32(1)})
    assert refused(BadInputError, tmp_path, path, grads) == [
        ("missing-tensor", "b", "g1"), ("extra-tensor", "c", "g1"), ("missing-tensor", "a", "g2"),
        ("missing-tensor", "b", "g2"), ("extra-tensor", "d", "g2"),
    ]  # fmt: skip
    assert refused(BadInputError, tmp_path, path, grads, missing="skip") == [("missing-tensor", None, "g2")]
    accumulate(path, grads[:1], missing="skip")
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [2], "b": [1]}


def test_include_and_exclude_choose_on_both_sides(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(1), "c": f32(1)})
    result = accumulate(path, grads, include=["a|b"], exclude=["b"])
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [2], "b": [1]}
    assert (result.tensors, result.norm_after) == (1, 2.0)
    assert refused(BadInputError, tmp_path, path, grads, include=["zzz"]) == [("no-match", None, None)]


def test_create_makes_a_float32_file_with_the_names_and_shapes_of_the_first_gradient(tmp_path):
    first = {"é": encode([[1, 2]], "BF16"), "s": encode(3, "F64"), "none": np.zeros((0, 3), np.float16)}
    second = {"s": encode(0.5, "F64"), "none": np.zeros((0, 3), np.float16), "é": encode([5], "F16")}
    _, grads = lay_out(tmp_path, f32(), first, second, metadata=[{"format": "pt", "step": "7"}, {}])
    result = accumulate(tmp_path / "new", grads, create=True)
    expected = {"é": encode([[6, 7]], "F32"), "s": encode(3.5, "F32"), "none": np.zeros((0, 3), np.float32)}
    found = read(tmp_path / "new")
    assert {name: (one.dtype, one.tolist()) for name, one in found.items()} == {
        name: (one.dtype, one.tolist()) for name, one in expected.items()
    }
    assert metadata_of(tmp_path / "new") == {"format": "pt"}
    assert (result.norm_before, result.norm_after) == (None, norm(tmp_path / "new").norm)
    assert (result.files_written, result.bytes_written) == (1, (tmp_path / "new").stat().st_size)


def metadata_of(path):
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__")


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_a_created_buffer_has_the_type_that_was_asked_for(tmp_path, dtype):
    _, grads = lay_out(tmp_path, f32(), f32(1.5, -2), f32(0.5, 0))
    accumulate(tmp_path / "new", grads, create=True, dtype=dtype)
    assert read(tmp_path / "new")["a"].tobytes() == encode([2, -2], dtype).tobytes()
    assert metadata_of(tmp_path / "new") is None


@pytest.mark.parametrize(("weights", "total"), [(("3", "4"), "7"), (("3", "0.5"), "3.5")])
def test_a_created_buffer_carries_the_sum_of_the_weights_on(tmp_path, weights, total):
    metadata = [{"n": weights[0], "format": "pt"}, {"n": weights[1]}]
    _, grads = lay_out(tmp_path, f32(), f32(1), f32(1), metadata=metadata)
    accumulate(tmp_path / "new", grads, create=True, weight_key="n")
    assert metadata_of(tmp_path / "new") == {"format": "pt", "n": total}
    assert read(tmp_path / "new")["a"].tolist() == [float(total)]


def test_create_takes_what_is_selected_of_a_sharded_gradient(tmp_path):
    write_index(tmp_path / "g", {"1.safetensors": {"a": f32(1)}, "2.safetensors": {"b": f32(2), "c": f32(3)}})
    accumulate(tmp_path / "new", tmp_path / "g", create=True, exclude=["b"])
    assert {name: array.tolist() for name, array in read(tmp_path / "new").items()} == {"a": [1], "c": [3]}


def test_a_gradient_that_is_left_out_still_gives_the_created_buffer_its_names(tmp_path):
    metadata = [{"n": "3"}, {"n": "4"}]
    _, grads = lay_out(tmp_path, f32(), f32(math.nan, 1), f32(1, 2), metadata=metadata)
    result = accumulate(tmp_path / "new", grads, create=True, nonfinite="skip", weight_key="n", mean=True)
    assert read(tmp_path / "new")["a"].tolist() == [1, 2]
    assert (metadata_of(tmp_path / "new"), result.weight_sum) == ({"n": "4"}, 4)


def test_create_refuses_a_buffer_that_is_there_and_everything_else_one_that_is_not(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(2))
    assert refused(BadInputError, tmp_path, path, grads, create=True) == [("exists", None, "buffer")]
    assert refused(BadInputError, tmp_path, tmp_path / "new", grads) == [("missing-file", None, "new")]
    for options in ({"create": True, "dry_run": True}, {"create": True, "update": False}):
        assert accumulate(tmp_path / "new", grads, **options).files_written == 0
        assert not (tmp_path / "new").exists()
    refused(BadInputError, tmp_path, tmp_path / "missing" / "new", grads, create=True)
    refused(UsageError, tmp_path, f"{tmp_path}/new/", grads, create=True)
    refused(UsageError, tmp_path, tmp_path / "x.safetensors.index.json", grads, create=True)


def test_a_sum_beyond_the_type_is_an_error_that_names_the_tensor_unless_it_is_clipped(tmp_path):
    path, grads = lay_out(
        tmp_path, {"fine": f32(1), "hot": encode([1, 60_000], "F16")}, {"fine": f32(1), "hot": encode([0, 6e4], "F16")}
    )
    for options in ({}, {"dry_run": True}, {"nonfinite": "skip"}, {"max_norm": 1e5}):
        assert refused(NonFiniteError, tmp_path, path, grads, **options) == [("overflow", "hot", "buffer")]
    with pytest.raises(NonFiniteError, match="1 results are beyond F16, the first at index 1") as caught:
        accumulate(path, grads)
    assert caught.value.exit_code == 1
    result = accumulate(path, grads, max_norm=1000, eps=0)
    assert (result.sum_norm, result.clipped) == (math.sqrt(120_000**2 + 5), True)
    assert read(path)["hot"][1] == 1000.0


def test_propagate_lets_a_sum_become_infinite(tmp_path):
    path, grads = lay_out(tmp_path, encode([60_000, 1], "F16"), encode([60_000, 1], "F16"))
    result = accumulate(path, grads, nonfinite="propagate")
    assert read(path)["a"].tolist() == [math.inf, 2]
    assert (result.inf, result.norm_after) == (1, math.inf)


@pytest.mark.parametrize(("norm_type", "sum_norm"), [(2, 5.0), (1, 7.0), (math.inf, 4.0)])
def test_the_float64_sum_is_clipped_with_one_rounding(tmp_path, norm_type, sum_norm):
    path, grads = lay_out(tmp_path, encode([1, 1], "BF16"), f32(2, 3))
    result = accumulate(path, grads, max_norm=0.7, norm_type=norm_type, eps=0)
    assert (result.sum_norm, result.coef, result.clipped, result.norm_type) == (
        sum_norm, 0.7 / sum_norm, True, norm_type,
    )  # fmt: skip
    assert read(path)["a"].tobytes() == encode(np.array([3.0, 4.0]) * (0.7 / sum_norm), "BF16").tobytes()
    assert result.norm_after == norm(path, norm_type=norm_type).norm


def test_a_sum_within_the_limit_is_not_clipped(tmp_path):
    path, grads = lay_out(tmp_path, f32(1, 1), f32(2, 3))
    result = accumulate(path, grads, max_norm=6)
    assert (result.sum_norm, result.coef, result.clipped, result.norm_before) == (5.0, 1.0, False, math.sqrt(2))
    assert read(path)["a"].tolist() == [3, 4]


@pytest.mark.parametrize(("eps", "coef"), [(1e-6, 1 / (5 + 1e-6)), (0, 0.2)])
def test_eps(tmp_path, eps, coef):
    path, grads = lay_out(tmp_path, f32(0, 0), f32(3, 4))
    assert accumulate(path, grads, max_norm=1, eps=eps, dry_run=True).coef == coef
    assert accumulate(path, grads, clip_each=1, eps=eps, dry_run=True).per_gradient[0].coef == coef


def test_clip_each_limits_each_gradient_and_weighs_it_then(tmp_path):
    path, grads = lay_out(tmp_path, f32(0, 0), f32(30, 40), f32(0.5, 0.25))
    result = accumulate(path, grads, clip_each=5, eps=0, weight=[-2, 4])
    assert read(path)["a"].tolist() == [-4, -7]
    assert [(row.norm, row.coef) for row in result.per_gradient] == [(50.0, 0.1), (math.sqrt(0.3125), 1.0)]
    assert (result.sum_norm, result.coef, result.clipped) == (None, None, False)


def test_the_norm_of_each_gradient_is_that_of_its_set(tmp_path):
    path, _ = lay_out(tmp_path, {"a": f32(0), "b": f32(0)})
    write_index(tmp_path / "g", {"1.safetensors": {"a": f32(3)}, "2.safetensors": {"b": f32(4)}})
    result = accumulate(path, tmp_path / "g", clip_each=2.5, eps=0)
    assert (result.per_gradient[0].norm, result.per_gradient[0].coef, result.norm_after) == (5.0, 0.5, 2.5)


def test_a_nan_is_named_with_its_file_and_nothing_is_written(tmp_path):
    path, grads = lay_out(
        tmp_path, {"a": f32(1), "b": f32(math.nan)}, {"a": f32(1), "b": f32(1)}, {"a": f32(math.inf), "b": f32(1)}
    )
    for options in ({}, {"dry_run": True}, {"max_norm": 1}, {"weight": [0, 0]}):
        assert sorted(refused(NonFiniteError, tmp_path, path, grads, **options)) == [
            ("nonfinite", "a", "g2"), ("nonfinite", "b", "buffer"),
        ]  # fmt: skip
    assert refused(NonFiniteError, tmp_path, path, grads, clip_each=1) == [("nonfinite", "a", "g2")]


def test_propagate_goes_on(tmp_path):
    path, grads = lay_out(tmp_path, f32(1, math.nan, 3), f32(math.inf, 1, 1))
    result = accumulate(path, grads, nonfinite="propagate")
    assert np.array_equal(read(path)["a"], [math.inf, math.nan, 4], equal_nan=True)
    assert (result.nan, result.inf) == (1, 1)
    result = accumulate(path, grads, nonfinite="propagate", max_norm=1)
    assert math.isnan(result.coef)
    assert np.isnan(read(path)["a"]).all()


def test_skip_leaves_out_a_whole_gradient_and_says_which(tmp_path):
    path, grads = lay_out(
        tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(7), "b": f32(math.nan)}, {"a": f32(2), "b": f32(3)}
    )
    result = accumulate(path, grads, nonfinite="skip", weight=[10, 2], mean=True)
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [3], "b": [4]}
    assert (result.taken, result.skipped, result.weight_sum) == (1, 1, 2)
    assert [(row.taken, row.nan, row.inf) for row in result.per_gradient] == [(False, 1, 0), (True, 0, 0)]
    assert result.per_gradient[1].norm == norm(grads[1]).norm
    (warning,) = result.warnings
    assert (warning.code, warning.file, warning.tensor) == ("skipped", str(grads[0]), "b")
    assert "left out: 1 NaN, 0 Inf, the first at index 0" in warning.message


def test_skipping_every_gradient_is_an_error_and_so_is_a_nan_in_the_buffer(tmp_path):
    path, grads = lay_out(tmp_path, f32(math.nan), f32(math.inf), f32(1))
    assert refused(NonFiniteError, tmp_path, path, grads[:1], nonfinite="skip") == [("nonfinite", "a", "g1")]
    assert refused(NonFiniteError, tmp_path, path, grads, nonfinite="skip") == [("nonfinite", "a", "buffer")]
    accumulate(path, grads, nonfinite="skip", overwrite=True)
    assert read(path)["a"].tolist() == [1]


def test_integers_are_refused_by_name_on_either_side(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1), "ids": np.ones(1, np.int32)}, {"a": f32(1), "ids": f32(1)})
    assert refused(BadInputError, tmp_path, path, grads) == [("dtype", "ids", "buffer")]
    path, grads = lay_out(tmp_path, {"a": f32(1), "ids": f32(1)}, {"a": f32(1), "ids": np.ones(1, np.int32)})
    assert refused(BadInputError, tmp_path, path, grads) == [("dtype", "ids", "g1")]
    accumulate(path, grads, exclude=["ids"])
    assert read(path)["ids"].tolist() == [1]


def test_a_file_is_not_added_to_itself(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(2))
    (tmp_path / "link").symlink_to(path)
    for twice in ([path], [tmp_path / "link"], [grads[0], grads[0]]):
        assert refused(BadInputError, tmp_path, path, twice)[0][0] == "duplicate-file"


@pytest.mark.parametrize(
    "options",
    [
        {"weight": [1]},
        {"weight": [1, 1, 1]},
        {"weight": [1, math.nan]},
        {"weight": [1, math.inf]},
        {"weight": ["much", 1]},
        {"weight": [1, 1], "weight_key": "n"},
        {"dtype": "F32"},
        {"create": True, "dtype": "I32"},
        {"create": True, "output": "out"},
        {"create": True, "output_dir": "out"},
        {"missing": "ignore"},
        {"nonfinite": "zero"},
        {"max_norm": -1},
        {"max_norm": math.nan},
        {"clip_each": -1},
        {"clip_each": math.nan},
        {"norm_type": 0},
        {"max_norm": 1, "eps": -1},
        {"max_norm": 1, "eps": math.inf},
        {"output": "a", "output_dir": "b"},
        {"output": ""},
        {"threads": 0},
        {"include": ["("]},
        {"backend": "tpu"},
    ],
)
def test_arguments_that_make_no_sense_are_usage_errors_and_change_nothing(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    path, grads = lay_out(tmp_path, f32(1), f32(2), f32(3))
    refused(UsageError, tmp_path, tmp_path / "new" if "create" in options else path, grads, **options)


def test_without_a_gradient_there_is_nothing_to_add(tmp_path):
    path, _ = lay_out(tmp_path, f32(1))
    refused(UsageError, tmp_path, path, [])
    refused(UsageError, tmp_path, "", [path])
    refused(UsageError, tmp_path, path, [""])


def test_weights_that_add_up_to_zero_have_no_mean(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(2), f32(3))
    assert refused(BadInputError, tmp_path, path, grads, weight=[1, -1], mean=True) == [("weight", None, None)]
    accumulate(path, grads, weight=[1, -1])
    assert read(path)["a"].tolist() == [0]


def test_gradients_from_a_list_come_after_those_that_are_named(tmp_path):
    path, grads = lay_out(tmp_path, f32(0), f32(1), f32(1), f32(1))
    (tmp_path / "list").write_text(f"{grads[1]}\n{grads[2]}\n")
    result = accumulate(path, grads[:1], weight=[1, 10, 100], files_from=tmp_path / "list")
    assert [row.file for row in result.per_gradient] == [str(grad) for grad in grads]
    assert read(path)["a"].tolist() == [111]


def test_dry_run_says_the_same_and_writes_nothing(tmp_path):
    path, grads = lay_out(tmp_path, encode([3, 4], "BF16"), f32(0.1, 0.2))
    before = snapshot(tmp_path)
    dry = accumulate(path, grads, max_norm=1, dry_run=True)
    assert snapshot(tmp_path) == before
    wet = accumulate(path, grads, max_norm=1)
    assert (dry.norm_before, dry.norm_after, dry.sum_norm, dry.coef, dry.clipped) == (
        wet.norm_before, wet.norm_after, wet.sum_norm, wet.coef, wet.clipped,
    )  # fmt: skip
    assert (dry.dry_run, dry.files_written, dry.bytes_written) == (True, 0, 0)


def test_output_leaves_the_buffer_alone(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(2))
    before = snapshot(tmp_path)
    accumulate(path, grads, output=tmp_path / "out")
    assert read(tmp_path / "out")["a"].tolist() == [3]
    (tmp_path / "out").unlink()
    assert snapshot(tmp_path) == before
    for target in (path, grads[0]):
        refused(UsageError, tmp_path, path, grads, output=target)
    with pytest.raises(NonFiniteError):
        accumulate(path, grads, weight=[1e39], output=tmp_path / "out")
    assert snapshot(tmp_path) == before


def test_output_dir_takes_every_file_of_the_buffer_and_the_index_and_no_gradient(tmp_path):
    shards = {"1.safetensors": {"a": f32(1)}, "2.safetensors": {"ids": np.ones(3, np.int32)}}
    index = write_index(tmp_path / "in", shards)
    write(tmp_path / "g" / "3.safetensors", {"a": f32(2)})
    before = snapshot(tmp_path)
    result = accumulate(index, tmp_path / "g", exclude=["ids"], output_dir=tmp_path / "new" / "out")
    out = tmp_path / "new" / "out"
    assert sorted(path.name for path in out.iterdir()) == ["1.safetensors", "2.safetensors", index.name]
    assert read(out / "1.safetensors")["a"].tolist() == [3]
    assert (out / "2.safetensors").read_bytes() == (tmp_path / "in" / "2.safetensors").read_bytes()
    assert (out / index.name).read_bytes() == index.read_bytes()
    assert (result.files_written, result.norm_after) == (2, 3.0)
    assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before


def test_output_arrives_when_nothing_is_added_too(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), {"a": f32(2)})
    accumulate(path, grads, update=False, output=tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == path.read_bytes()
    before = snapshot(tmp_path)
    result = accumulate(path, grads, update=False)
    assert (result.updated, result.files_written, result.taken, result.norm_after) == (False, 0, 0, 1.0)
    assert snapshot(tmp_path) == before


def test_empty_files_empty_tensors_and_scalars(tmp_path):
    odd = {"none": np.zeros((0, 3), np.float32), "scalar": encode(10, "F32"), "row": np.zeros((1, 0), np.float32)}
    path, grads = lay_out(tmp_path, odd, {name: array.reshape(array.shape) for name, array in odd.items()})
    result = accumulate(path, grads)
    assert (read(path)["scalar"].tolist(), read(path)["scalar"].shape, result.norm_after) == (20.0, (), 20.0)
    path, grads = lay_out(tmp_path, {}, {})
    assert (accumulate(path, grads).norm_after, accumulate(path, grads).files_written) == (0.0, 0)
    path, grads = lay_out(tmp_path, np.zeros(0, np.float32), encode(5, "F32"))
    assert accumulate(path, grads).norm_after == 0.0


def test_two_thousand_tiny_tensors_in_another_order(tmp_path):
    old = {f"t{i}": np.full(i % 5, i, np.float32) for i in range(2000)}
    path, grads = lay_out(tmp_path, old, {name: encode(array, "BF16") * 0 + 1 for name, array in reversed(old.items())})
    accumulate(path, grads)
    assert path.read_bytes() == build({name: array + 1 for name, array in old.items()})


@pytest.mark.parametrize(
    ("old", "grad", "options"),
    [
        ([1e200] * 3, [2e200] * 3, {}),
        ([1e200] * 3, [-1e200, 1e-200, 0], {}),
        ([1e-200] * 3, [1e-200] * 3, {}),
        ([1e200] * 3, [1e200] * 3, {"max_norm": 1e-3}),
        ([1e200] * 3, [1e200] * 3, {"max_norm": 1e199, "norm_type": 1}),
        ([1e150] * 3, [1e150] * 3, {"norm_type": math.inf}),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_the_norms_are_those_of_the_files_even_where_squares_overflow(tmp_path, old, grad, options, dry_run):
    left = np.full(2, 3e190)
    path, grads = lay_out(tmp_path, {"a": np.array(old), "left": left}, {"a": np.array(grad)})
    order = {"norm_type": options.get("norm_type", 2)}
    before = norm(path, **order).norm
    result = accumulate(path, grads, missing="skip", dry_run=dry_run, **options)
    assert result.norm_before == before
    if dry_run:
        accumulate(path, grads, missing="skip", **options)
    assert result.norm_after == norm(path, **order).norm
    assert math.isfinite(result.norm_after)


def test_a_sum_beyond_the_squares_is_clipped_and_not_turned_to_zeros(tmp_path):
    path, grads = lay_out(tmp_path, np.full(4, 1e200), np.full(4, 1e200))
    result = accumulate(path, grads, max_norm=1e200, eps=0)
    assert (result.sum_norm, result.coef) == (4e200, 0.25)
    assert read(path)["a"].tolist() == [5e199] * 4


def test_a_norm_beyond_float64_is_refused_rather_than_clipped_to_zero(tmp_path):
    path, grads = lay_out(tmp_path, np.full(4, 1.7e308), np.zeros(4), np.full(4, 1.7e308))
    refused(BadInputError, tmp_path, path, grads[:1], max_norm=1)
    refused(BadInputError, tmp_path, path, grads[1:], overwrite=True, clip_each=1)


def test_progress_only_grows_and_ends_with_all_bytes(tmp_path):
    path, grads = lay_out(tmp_path, np.ones((3, 70_000), np.float32), np.ones(70_000), np.ones((3, 1)))
    for options in ({}, {"max_norm": 1, "clip_each": 1}, {"output": tmp_path / "out"}):
        told = []
        accumulate(path, grads, progress=lambda *one, told=told: told.append(one), **options)
        assert told == sorted(told)
        assert all(done <= whole for done, whole in told)
        assert told[-1][0] == told[-1][1] > 0


def test_a_buffer_or_gradient_that_changes_during_the_run_is_refused(tmp_path):
    path, grads = lay_out(tmp_path, np.ones(500_000, np.float32), np.ones(500_000, np.float32))
    content = path.read_bytes()
    for changed in (path, grads[0]):
        with pytest.raises(SystemRefusedError, match="changed"):
            accumulate(path, grads, progress=lambda *_, changed=changed: os.utime(changed, ns=(0, 0)), threads=1)
        assert path.read_bytes() == content
        os.utime(changed)
    assert len(list(tmp_path.iterdir())) == 2


# Python's own files, and the two that the call begins with, leave few for the gradients.
FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
import gradtool
print(gradtool.accumulate(sys.argv[1], sys.argv[2:], threads=1, fsync=False).taken)
"""


def test_more_gradients_than_files_may_be_open(tmp_path):
    path, grads = lay_out(tmp_path, np.zeros(300_000, np.float32), *[np.full(300_000, i, "f4") for i in range(64)])
    command = [sys.executable, "-P", "-c", FEW_FILES, str(path), *map(str, grads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "64\n", "")
    assert set(read(path)["a"].tolist()) == {2016.0}


@st.composite
def cases(draw):
    """Shapes of the buffer, types on both sides, and axes along which each gradient is broadcast."""
    sizes = st.sampled_from([(), (0,), (5,), (2049,), (65_537,), (3, 40_001), (2, 3, 7), (300_001,)])
    shapes = draw(st.lists(sizes, min_size=1, max_size=5))
    ours = [draw(st.sampled_from(["F64", "F32"])) for _ in shapes]
    grads = []
    for _ in range(draw(st.integers(1, 3))):
        narrow = [tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in shape) for shape in shapes]
        cut = [draw(st.integers(0, 1)) if one and one[0] == 1 else 0 for one in narrow]
        types = [draw(st.sampled_from(VALUE_TYPES)) for _ in shapes]
        grads.append([(one[skip:], dtype) for one, skip, dtype in zip(narrow, cut, types, strict=True)])
    return shapes, ours, grads


def wide_sum(old, grads, weights, *, overwrite, mean):
    """The contract in numpy: float64, in the order given."""
    total = np.full(old.shape, -0.0) if overwrite or mean else old.astype(np.float64)
    for grad, weight in zip(grads, weights, strict=True):
        total += weight * np.broadcast_to(grad.astype(np.float64), old.shape)
    if mean:
        total = total / math.fsum(weights)
        total = total if overwrite else total + old.astype(np.float64)
    return total.astype(old.dtype)


# Files of the buffer, threads, tiles in a block, bytes of a batch, elements of a window.
LAYOUTS = ((1, 1, 4, 2 << 20, 1 << 18), (2, 2, 1, 1, 1000), (3, 8, 3, 100_000, 1))


@settings(max_examples=30)
@given(case=cases(), seed=st.integers(0, 9), overwrite=st.booleans(), mean=st.booleans())
def test_the_same_bits_for_any_threads_blocks_and_shards(tmp_path_factory, case, seed, overwrite, mean):
    shapes, ours, theirs = case
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("bits")
    old = {f"t{i}": encode(rng.standard_normal(shape), ours[i]) for i, shape in enumerate(shapes)}
    grads = [{f"t{i}": encode(rng.standard_normal(s) * 4, t) for i, (s, t) in enumerate(one)} for one in theirs]
    weights = [0.3, -1.7, 2.0][: len(grads)]
    expected = {
        name: wide_sum(array, [one[name] for one in grads], weights, overwrite=overwrite, mean=mean).tobytes()
        for name, array in old.items()
    }
    clipped = None
    for count, threads, tiles, batch, window in LAYOUTS:
        home = folder / str(count)
        places = [sharded(home / f"g{k}", dict(reversed(one.items())), 1 + k % 2) for k, one in enumerate(grads)]
        options = {"weight": weights, "overwrite": overwrite, "mean": mean, "threads": threads, "fsync": False}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "SUM_TILES", tiles)
            patch.setattr(tuning, "BATCH_BYTES", batch)
            patch.setattr(tuning, "WINDOW_ELEMENTS", window)
            buffer = sharded(home / "buffer", old, count)
            before = norm(buffer).norm
            result = accumulate(buffer, places, max_norm=1, clip_each=9, output_dir=home / "clipped", **options)
            clipped = clipped or (result.norm_after, result.sum_norm, result.coef, values_in(home / "clipped"))
            found = (result.norm_after, result.sum_norm, result.coef, values_in(home / "clipped"))
            assert found == clipped
            result = accumulate(buffer, places, **options)
        assert values_in(buffer) == expected
        assert result.norm_before == (None if overwrite else before)
        assert result.norm_after == norm(buffer).norm


def sharded(folder, tensors, count):
    names = list(tensors)
    write_index(folder, {f"{i}.safetensors": {n: tensors[n] for n in names[i::count]} for i in range(count)})
    index = folder / "model.safetensors.index.json"
    if len(names) < count:
        index.unlink()  # A shard without a tensor is in no index.
    return folder


def values_in(folder):
    return {name: array.tobytes() for file in folder.glob("*.safetensors") for name, array in read(file).items()}


@pytest.mark.parametrize("mean", [False, True])
def test_weights_that_add_up_to_more_than_float64_are_refused_before_a_byte_is_written(tmp_path, mean):
    path, grads = lay_out(tmp_path, f32(1), encode([1e-300], "F64"), encode([1e-300], "F64"))
    assert refused(BadInputError, tmp_path, path, grads, weight=[1e308, 1e308], mean=mean) == [("weight", None, None)]


@pytest.mark.parametrize("weight", [np.array([2.0]), np.float32(2), 2, np.array(2.0), (2,)])
def test_a_weight_may_be_any_kind_of_number(tmp_path, weight):
    path, grads = lay_out(tmp_path, f32(1), f32(3))
    accumulate(path, grads, weight=weight)
    assert read(path)["a"].tolist() == [7]


@pytest.mark.parametrize(
    "options", [{"weight": "2"}, {"weight": [None]}, {"weight_key": ""}, {"weight_key": ["n"]}, {"missing": ["skip"]}]
)
def test_arguments_of_a_wrong_kind_are_usage_errors(tmp_path, options):
    path, grads = lay_out(tmp_path, f32(1), f32(3))
    assert refused(UsageError, tmp_path, path, grads, **options)[0][0] == "usage"


@pytest.mark.parametrize("dtype", ["", "float32", ["F32"]])
def test_a_type_that_is_none_is_a_usage_error(tmp_path, dtype):
    _, grads = lay_out(tmp_path, f32(), f32(1))
    assert refused(UsageError, tmp_path, tmp_path / "new", grads, create=True, dtype=dtype)[0][0] == "usage"
    assert not (tmp_path / "new").exists()


def test_a_gradient_without_tensors_makes_an_empty_buffer(tmp_path):
    _, grads = lay_out(tmp_path, f32(), {})
    assert accumulate(tmp_path / "new", grads, create=True).tensors == 0
    assert read(tmp_path / "new") == {}


def test_what_nothing_is_added_to_is_zero_in_a_new_buffer(tmp_path):
    bad = {"a": f32(math.nan, 2), "b": f32(1), "c": f32(5)}
    _, grads = lay_out(tmp_path, f32(), bad, {"c": f32(6)})
    result = accumulate(tmp_path / "new", grads, create=True, missing="skip", nonfinite="skip")
    found = read(tmp_path / "new")
    assert {name: bits_of(array).tolist() for name, array in found.items()} == {
        "a": [0, 0], "b": [0], "c": bits_of(f32(6)).tolist(),
    }  # fmt: skip
    assert (result.zeros, result.norm_after) == (3, norm(tmp_path / "new").norm)


def test_clipping_the_sum_is_about_what_is_added_to(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(3), "z": f32(math.nan)}, {"a": f32(1)})
    result = accumulate(path, grads, missing="skip", max_norm=1, eps=0)
    assert (result.sum_norm, result.coef, read(path)["a"].tolist()) == (4.0, 0.25, [1.0])
    assert math.isnan(result.norm_after)


def test_an_overflow_is_told_of_the_tensors_that_have_one(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(3e38), "z": f32(math.nan)}, {"a": f32(3e38)})
    assert refused(NonFiniteError, tmp_path, path, grads, missing="skip") == [("overflow", "a", "buffer")]


def test_an_infinite_limit_limits_nothing_whatever_the_norm(tmp_path):
    huge = np.full(4, 1.7e308)
    path, grads = lay_out(tmp_path, huge, np.zeros(4))
    assert accumulate(path, grads, max_norm=math.inf).coef == 1.0
    assert read(path)["a"].tolist() == huge.tolist()
    assert refused(BadInputError, tmp_path, path, grads, max_norm=1) == [("input", None, None)]
    assert refused(BadInputError, tmp_path, grads[0], path, clip_each=1) == [("input", None, "buffer")]
    assert accumulate(grads[0], path, clip_each=math.inf).per_gradient[0].coef == 1.0


def test_a_buffer_that_appears_while_it_is_made_is_not_overwritten(tmp_path):
    _, grads = lay_out(tmp_path, f32(), f32(1))
    with pytest.raises(SystemRefusedError, match="another program made it"):
        accumulate(tmp_path / "new", grads, create=True, progress=lambda *_: (tmp_path / "new").write_text("theirs"))
    assert (tmp_path / "new").read_text() == "theirs"


def test_a_gradient_that_has_nothing_of_the_buffer_is_refused_even_with_skip(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), {"a": f32(1)}, {"module.a": f32(1)})
    assert refused(BadInputError, tmp_path, path, grads, missing="skip") == [("missing-tensor", None, "g2")]


@pytest.mark.parametrize("threads", [1, 2, 4, 16])
@pytest.mark.parametrize("limit", [20, 12])
def test_a_low_limit_of_open_files_is_enough_for_any_number_of_threads(tmp_path, threads, limit):
    old = {"a": np.zeros(70_000, np.float32), "b": np.zeros(200_000, np.float32)}
    path, grads = lay_out(tmp_path, old, *[{name: array + 1 for name, array in old.items()}] * 30)
    call = f"gradtool.accumulate({str(path)!r}, {[str(grad) for grad in grads]!r}, threads={threads}, fsync=False)"
    code = f"import resource, gradtool; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); {call}"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
    assert (read(path)["b"] == 30).all()


def test_an_index_that_is_read_is_not_written_over(tmp_path):
    for name, file in (("buffer", "1.safetensors"), ("grad", "2.safetensors")):
        write_index(tmp_path / name, {file: {"a": f32(1)}})
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="is an input"):
        accumulate(tmp_path / "buffer", tmp_path / "grad", output_dir=tmp_path / "grad")
    assert snapshot(tmp_path) == before


def test_a_gradient_whose_tensors_are_all_excluded_is_refused_with_skip_too(tmp_path):
    path, grads = lay_out(tmp_path, {"a": f32(1), "b": f32(1)}, {"a": f32(4)}, {"b": f32(9)})
    options = {"missing": "skip", "include": ["a"], "mean": True}
    assert refused(BadInputError, tmp_path, path, grads, **options) == [("missing-tensor", None, "g2")]


def test_progress_knows_from_the_first_what_is_copied(tmp_path):
    path, grads = lay_out(tmp_path, {"big": np.ones(3_000_000, np.float32), "s": f32(1)}, {"s": f32(2)})
    seen = []
    accumulate(path, grads, missing="skip", output=tmp_path / "out", progress=lambda *both: seen.append(both))
    assert all(whole >= path.stat().st_size for _, whole in seen)
    assert len(seen) > 3


def test_a_buffer_that_is_not_made_after_all_holds_nothing(tmp_path):
    _, grads = lay_out(tmp_path, f32(), f32(1, 2, 3))
    result = accumulate(tmp_path / "new", grads, create=True, update=False)
    assert (result.norm_before, result.norm_after, result.tensors, result.elements) == (None, 0.0, 0, 0)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_was_made_in_vain_goes_again(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(math.nan))
    assert refused(NonFiniteError, tmp_path, path, grads, output_dir=tmp_path / "new" / "sub")[0][0] == "nonfinite"
    assert not (tmp_path / "new").exists()
