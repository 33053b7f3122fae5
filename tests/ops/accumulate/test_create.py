import json
import math

import numpy as np
import pytest
from buffers import f32, lay_out, refused
from support import VALUE_TYPES, bits_of, encode, gradtool, read, write_index

from gradtool import BadInputError, SystemRefusedError, UsageError, accumulate, norm


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


def test_the_type_may_be_given_in_lower_case(tmp_path):
    _, grads = lay_out(tmp_path, f32(), f32(1.5, -2))
    done = gradtool("accumulate", tmp_path / "new", *grads, "--create", "--dtype", "f8_e4m3")
    assert (done.returncode, done.stderr) == (0, "")
    assert read(tmp_path / "new")["a"].tobytes() == encode([1.5, -2], "F8_E4M3").tobytes()
    assert accumulate(tmp_path / "wide", grads, create=True, dtype="bf16").bytes == 4


@pytest.mark.parametrize(("weights", "total"), [(("3", "4"), "7"), (("3", "0.5"), "3.5")])
def test_a_created_buffer_carries_the_sum_of_the_weights_on(tmp_path, weights, total):
    metadata = [{"n": weights[0], "format": "pt"}, {"n": weights[1]}]
    _, grads = lay_out(tmp_path, f32(), f32(1), f32(1), metadata=metadata)
    accumulate(tmp_path / "new", grads, create=True, weight_key="n")
    marks = {"gradtool.weight_key": "n", "gradtool.weighted": "sum"}
    assert metadata_of(tmp_path / "new") == {"format": "pt", "n": total} | marks
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
    marks = {"gradtool.weight_key": "n", "gradtool.weighted": "mean"}
    assert (metadata_of(tmp_path / "new"), result.weight_sum) == ({"n": "4"} | marks, 4)


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


def test_a_buffer_that_appears_while_it_is_made_is_not_overwritten(tmp_path):
    _, grads = lay_out(tmp_path, f32(), f32(1))
    with pytest.raises(SystemRefusedError, match="another program created it"):
        accumulate(tmp_path / "new", grads, create=True, progress=lambda *_: (tmp_path / "new").write_text("theirs"))
    assert (tmp_path / "new").read_text() == "theirs"


def test_a_buffer_that_is_not_made_after_all_holds_nothing(tmp_path):
    _, grads = lay_out(tmp_path, f32(), f32(1, 2, 3))
    result = accumulate(tmp_path / "new", grads, create=True, update=False)
    assert (result.norm_before, result.norm_after, result.tensors, result.elements) == (None, 0.0, 0, 0)
    assert not (tmp_path / "new").exists()
