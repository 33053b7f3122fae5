import json
import math

import numpy as np
import pytest
from buffers import f32, lay_out, refused
from support import VALUE_TYPES, bits_of, encode, gradtool, read, snapshot, write_index

from gradtool import BadInputError, SystemRefusedError, UsageError, accumulate, norm


def test_a_new_file_has_the_names_shapes_and_types_of_the_first_gradient(tmp_path):
    first = {"é": encode([[1, 2]], "BF16"), "s": encode(3, "F64"), "none": np.zeros((0, 3), np.float16)}
    second = {"s": encode(0.5, "F64"), "none": np.zeros((0, 3), np.float32), "é": encode([5], "F16")}
    _, grads = lay_out(tmp_path, f32(), first, second, metadata=[{"format": "pt", "step": "7"}, {}])
    result = accumulate(grads, output=tmp_path / "new")
    expected = {"é": encode([[6, 7]], "BF16"), "s": encode(3.5, "F64"), "none": np.zeros((0, 3), np.float16)}
    found = read(tmp_path / "new")
    assert {name: (one.dtype, one.tolist()) for name, one in found.items()} == {
        name: (one.dtype, one.tolist()) for name, one in expected.items()
    }
    assert metadata_of(tmp_path / "new") == {"format": "pt"}
    assert (result.norm_before, result.norm_after) == (None, norm(tmp_path / "new").norm)
    assert (result.output.files_written, result.output.bytes_written) == (1, (tmp_path / "new").stat().st_size)


def metadata_of(path):
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__")


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_a_new_set_has_the_type_that_was_asked_for(tmp_path, dtype):
    _, grads = lay_out(tmp_path, f32(), f32(1.5, -2), f32(0.5, 0))
    accumulate(grads, output=tmp_path / "new", dtype=dtype)
    assert read(tmp_path / "new")["a"].tobytes() == encode([2, -2], dtype).tobytes()
    assert metadata_of(tmp_path / "new") is None


def test_the_type_may_be_given_in_lower_case(tmp_path):
    _, grads = lay_out(tmp_path, f32(), f32(1.5, -2))
    done = gradtool("accumulate", *grads, "--output", tmp_path / "new", "--dtype", "f8_e4m3")
    assert (done.returncode, done.stderr) == (0, "")
    assert read(tmp_path / "new")["a"].tobytes() == encode([1.5, -2], "F8_E4M3").tobytes()
    assert accumulate(grads, output=tmp_path / "wide", dtype="bf16").call.bytes == 4


@pytest.mark.parametrize(("weights", "total"), [(("3", "4"), "7"), (("3", "0.5"), "3.5")])
def test_a_new_set_carries_the_sum_of_the_weights_on(tmp_path, weights, total):
    metadata = [{"n": weights[0], "format": "pt"}, {"n": weights[1]}]
    _, grads = lay_out(tmp_path, f32(), f32(1), f32(1), metadata=metadata)
    accumulate(grads, output=tmp_path / "new", weight_key="n")
    marks = {"gradtool.weight_key": "n", "gradtool.weighted": "sum"}
    assert metadata_of(tmp_path / "new") == {"format": "pt", "n": total} | marks
    assert read(tmp_path / "new")["a"].tolist() == [float(total)]


def test_a_new_set_takes_what_is_selected_of_a_sharded_gradient(tmp_path):
    write_index(tmp_path / "g", {"1.safetensors": {"a": f32(1)}, "2.safetensors": {"b": f32(2), "c": f32(3)}})
    accumulate(tmp_path / "g", output=tmp_path / "new", exclude=["b"])
    assert {name: array.tolist() for name, array in read(tmp_path / "new").items()} == {"a": [1], "c": [3]}


def test_a_gradient_that_is_left_out_still_gives_the_new_set_its_names(tmp_path):
    metadata = [{"n": "3"}, {"n": "4"}]
    _, grads = lay_out(tmp_path, f32(), f32(math.nan, 1), f32(1, 2), metadata=metadata)
    result = accumulate(grads, output=tmp_path / "new", nonfinite="skip", weight_key="n", mean=True)
    assert read(tmp_path / "new")["a"].tolist() == [1, 2]
    marks = {"gradtool.weight_key": "n", "gradtool.weighted": "mean"}
    assert (metadata_of(tmp_path / "new"), result.weight_sum) == ({"n": "4"} | marks, 4)


def test_the_same_command_gives_the_same_bytes_however_often_it_runs(tmp_path):
    path, grads = lay_out(tmp_path, f32(math.nan), f32(1), f32(2), metadata=[{"n": "1"}, {"n": "2"}])
    options = {"mean": True, "weight_key": "n", "output": tmp_path / "new"}
    assert accumulate(grads, **options).output.wrote == (str(tmp_path / "new"),)
    first = (tmp_path / "new").read_bytes()
    accumulate(grads, **options)
    assert (tmp_path / "new").read_bytes() == first
    # Whatever was there, and whoever cannot read it.
    for content in (path.read_bytes(), b"no tensors"):
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").chmod(0)
        accumulate(grads, **options)
        (tmp_path / "new").chmod(0o600)
        assert (tmp_path / "new").read_bytes() == first
    problems = refused(BadInputError, tmp_path, None, grads, no_clobber=True, **options)
    assert problems == [("exists", None, "new")]


def test_a_buffer_must_exist_and_nothing_is_made_by_a_call_that_writes_nothing(tmp_path):
    _, grads = lay_out(tmp_path, f32(1), f32(2))
    assert refused(BadInputError, tmp_path, tmp_path / "new", grads) == [("missing-file", None, "new")]
    for options in ({"dry_run": True}, {"update": False}):
        for output in ({"output": tmp_path / "new"}, {"output_dir": tmp_path / "new"}):
            assert accumulate(grads, **output, **options).output.wrote == ()
            assert not (tmp_path / "new").exists()
    refused(BadInputError, tmp_path, None, grads, output=tmp_path / "missing" / "new")
    assert refused(UsageError, tmp_path, None, grads, output=tmp_path)[0][0] == "usage"


def test_without_an_update_a_file_stays_as_it_is(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(2))
    before = snapshot(tmp_path)
    assert not accumulate(grads, output=path, update=False).updated
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("link", [False, True])
def test_an_output_that_is_a_gradient_is_refused(tmp_path, link):
    _, grads = lay_out(tmp_path, f32(1), f32(2), f32(3))
    target = grads[1]
    if link:
        target = tmp_path / "link"
        target.symlink_to(grads[1])
    for options in ({"output": target}, {"output": target, "into": grads[0]}):
        before = snapshot(tmp_path)
        with pytest.raises(UsageError, match="is an input; use another output"):
            accumulate(grads[1:], **options)
        assert snapshot(tmp_path) == before


def test_the_sum_with_a_buffer_may_be_written_elsewhere_again_and_again(tmp_path):
    path, grads = lay_out(tmp_path, encode([1], "F64"), f32(2), f32(3))
    before = path.read_bytes()
    for _ in range(2):
        accumulate(grads, into=path, output=tmp_path / "new")
        found = read(tmp_path / "new")["a"]
        assert (found.tolist(), found.dtype, path.read_bytes()) == ([6], np.float64, before)
    accumulate(grads, into=path, output=tmp_path / "new", overwrite=True)
    assert read(tmp_path / "new")["a"].tolist() == [5]


def test_a_gradient_without_tensors_makes_an_empty_buffer(tmp_path):
    _, grads = lay_out(tmp_path, f32(), {})
    assert accumulate(grads, output=tmp_path / "new").call.tensors == 0
    assert read(tmp_path / "new") == {}


def test_what_nothing_is_added_to_is_zero_in_a_new_buffer(tmp_path):
    bad = {"a": f32(math.nan, 2), "b": f32(1), "c": f32(5)}
    _, grads = lay_out(tmp_path, f32(), bad, {"c": f32(6)})
    result = accumulate(grads, output=tmp_path / "new", missing="skip", nonfinite="skip")
    assert [(one.code, one.message) for one in result.call.warnings if one.file is None] == [
        ("skipped", "2 tensors only in skipped gradients; zeros in the new set")
    ]
    found = read(tmp_path / "new")
    assert {name: bits_of(array).tolist() for name, array in found.items()} == {
        "a": [0, 0], "b": [0], "c": bits_of(f32(6)).tolist(),
    }  # fmt: skip
    assert (result.zeros, result.norm_after) == (3, norm(tmp_path / "new").norm)


def test_with_no_clobber_a_file_that_appears_meanwhile_is_not_replaced(tmp_path):
    _, grads = lay_out(tmp_path, f32(), f32(1))
    options = {"output": tmp_path / "new", "progress": lambda *_: (tmp_path / "new").write_text("theirs")}
    with pytest.raises(SystemRefusedError, match="another program created it"):
        accumulate(grads, no_clobber=True, **options)
    assert (tmp_path / "new").read_text() == "theirs"
    (tmp_path / "new").unlink()
    accumulate(grads, **options)
    assert read(tmp_path / "new")["a"].tolist() == [1]


def test_a_buffer_that_is_not_made_after_all_holds_nothing(tmp_path):
    _, grads = lay_out(tmp_path, f32(), f32(1, 2, 3))
    result = accumulate(grads, output=tmp_path / "new", update=False)
    assert (result.norm_before, result.norm_after, result.call.tensors, result.call.elements) == (None, 0.0, 0, 0)
    assert not (tmp_path / "new").exists()
