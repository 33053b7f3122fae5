"""Buffers that are created as a folder of files."""

import json
import math
import stat

import numpy as np
import pytest
from buffers import f32, lay_out, refused
from safetensors import safe_open
from safetensors.numpy import load_file
from support import NUMPY_TYPES, encode, gradtool, gradtool_json, snapshot, write, write_index

from gradtool import BadInputError, UsageError, accumulate, norm

NAMES = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def grads(tmp_path):
    """Two gradients of three tensors of 40, 60 and 20 bytes."""
    rng = np.random.default_rng(9)
    shapes = {"a": (2, 5), "b": (15,), "c": (5,)}
    return [
        write(
            tmp_path / f"g{number}",
            {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()},
            {"n": str(number), "format": "pt", "step": "7"},
        )
        for number in (1, 3)
    ]


@pytest.fixture
def like(tmp_path):
    """A model with the same tensors, of another type, in another order."""
    b, a, c = (np.zeros(shape, np.float16) for shape in ((15,), (2, 5), (5,)))
    write_index(tmp_path / "model", {"two.safetensors": {"c": c}, "one.safetensors": {"b": b, "a": a}})
    return tmp_path / "model"


# How a mean is marked that has a total weight.
MARKS = {"gradtool.weight_key": "n", "gradtool.weighted": "mean"}


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_the_files_hold_what_one_file_would(tmp_path, grads, like, dtype):
    options = {"create": True, "mean": True, "weight_key": "n", "dtype": dtype}
    alone = accumulate(grads, into=tmp_path / "alone", **options)
    expected = load_file(tmp_path / "alone") if dtype == "F32" else None
    for number, how in enumerate(({"shard_like": like}, {"max_shard_size": 60}, {"max_shard_size": "1GB"})):
        folder = tmp_path / f"new{number}"
        result = accumulate(grads, into=folder, **options, **how)
        measured = norm(folder)
        assert result.norm_after.hex() == measured.norm.hex() == alone.norm_after.hex()
        assert (result.tensors, result.elements, result.bytes) == (3, 30, 30 * NUMPY_TYPES[dtype].itemsize)
        files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
        assert result.files_written == measured.files == len(files)
        assert (folder / INDEX).exists() == (len(files) > 1)
        assert result.bytes_written == sum(path.stat().st_size for path in files)
        for path in files:
            with safe_open(path, "numpy") as opened:
                assert opened.metadata() == {"format": "pt", "n": "4"} | MARKS
            for name, array in load_file(path).items() if expected else ():
                assert array.tobytes() == expected[name].tobytes()


def test_the_index_is_right(tmp_path, grads, like):
    accumulate(grads, output_dir=tmp_path / "new", max_shard_size="0.06KB", threads=1)
    assert list(contents(tmp_path / "new")) == [*NAMES, INDEX]
    assert json.loads((tmp_path / "new" / INDEX).read_text()) == {
        "metadata": {"total_size": 120}, "weight_map": dict(zip("abc", NAMES, strict=True)),
    }  # fmt: skip
    accumulate(grads, output_dir=tmp_path / "same", shard_like=like / INDEX)
    assert json.loads((tmp_path / "same" / INDEX).read_text()) == {
        "metadata": {"total_size": 120},
        "weight_map": {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"},
    }
    # A later call adds to it as to any set.
    result = accumulate(tmp_path / "new", into=tmp_path / "same")
    assert (result.norm_after, result.files_written) == (2 * result.norm_before, 2)


def test_a_folder_may_exist_if_it_is_empty_and_those_above_it_are_made(tmp_path, grads):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "x" / "y"):
        done = gradtool("accumulate", f"{folder}/", *grads, "--create", "--max-shard-size", "1kib")
        assert (done.returncode, done.stderr) == (0, "")
        assert list(contents(folder)) == ["model.safetensors"]


def test_one_that_has_files_is_refused(tmp_path, grads, like):
    for options in ({"shard_like": like}, {"max_shard_size": 1}, {"max_shard_size": 1, "dry_run": True}):
        assert refused(BadInputError, tmp_path, like, grads, create=True, **options) == [("exists", None, "model")]
    file = write(tmp_path / "file", {})
    assert refused(BadInputError, tmp_path, file, grads, create=True, max_shard_size=1) == [("exists", None, "file")]
    (tmp_path / "empty").mkdir()
    assert refused(BadInputError, tmp_path, tmp_path / "empty", grads, create=True) == [("exists", None, "empty")]


@pytest.mark.parametrize(
    ("buffer", "options", "message"),
    [
        ("new", {"max_shard_size": 1}, "create=True makes"),
        ("new", {"shard_like": "model"}, "create=True makes"),
        ("new", {"create": True, "shard_like": "model", "max_shard_size": 1}, "exclude each other"),
        ("new.safetensors", {"create": True, "max_shard_size": 1}, "names a file"),
        (f"new/{INDEX}", {"create": True, "shard_like": "model"}, "names a file"),
        ("new", {"create": True, "max_shard_size": 1, "write": "inplace"}, "write=.inplace. changes"),
        ("new", {"create": True, "max_shard_size": 1, "output_dir": "x"}, "create=True writes buffer itself"),
        ("new/", {"create": True}, "max_shard_size makes a folder"),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(
    tmp_path, monkeypatch, grads, like, buffer, options, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        accumulate(grads, into=buffer, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g1", "g3", like.name]


def test_a_set_that_cannot_be_read_or_lacks_a_tensor_is_bad_input(tmp_path, grads):
    other = write(tmp_path / "other", {"b": f32(1)})
    new = tmp_path / "new"
    assert refused(BadInputError, tmp_path, new, grads, create=True, shard_like=other) == [
        ("extra-tensor", "a", "g1"), ("extra-tensor", "c", "g1"),
    ]  # fmt: skip
    missing = tmp_path / "missing"
    assert refused(BadInputError, tmp_path, new, grads, create=True, shard_like=missing) == [
        ("missing-file", None, "missing")
    ]
    # What is not selected needs no place.
    assert accumulate(grads, output_dir=new, shard_like=other, include="b").files_written == 1
    assert list(contents(new)) == ["other"]


def test_a_dry_run_and_a_call_without_an_update_make_nothing(tmp_path, grads, like):
    before = snapshot(tmp_path)
    for options in ({"dry_run": True}, {"update": False}):
        assert accumulate(grads, output_dir=tmp_path / "new", shard_like=like, **options).files_written == 0
        assert snapshot(tmp_path) == before
        assert not (tmp_path / "new").exists()


def test_an_error_leaves_no_folder(tmp_path, like):
    _, bad = lay_out(
        tmp_path, f32(), {"a": np.zeros((2, 5), np.float32), "b": f32(*[math.nan] * 15), "c": f32(*[1] * 5)}
    )
    answer = gradtool_json("accumulate", tmp_path / "x" / "new", *bad, "--create", "--shard-like", like)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (1, "nonfinite")
    assert not (tmp_path / "x").exists()


def test_no_file_can_be_read_by_more_than_the_gradients_can(tmp_path, grads, like):
    grads[1].chmod(0o600)
    accumulate(grads, output_dir=tmp_path / "new", shard_like=like)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
    assert modes == {"one.safetensors": 0o600, "two.safetensors": 0o600, INDEX: 0o600}


def test_the_sum_is_clipped_over_all_files(tmp_path, grads):
    result = accumulate(grads, output_dir=tmp_path / "new", max_shard_size=1, max_norm=1, threads=2)
    assert result.clipped
    assert norm(tmp_path / "new").norm == result.norm_after == pytest.approx(1, rel=1e-6)


def test_what_nothing_is_added_to_is_zero_in_files_of_its_own(tmp_path):
    first = {"a": f32(math.nan), "b": encode([1, 2], "F32")}
    _, grads = lay_out(tmp_path, f32(), first, {"b": f32(3, 4)})
    accumulate(grads, output_dir=tmp_path / "new", max_shard_size=1, missing="skip", nonfinite="skip")
    files = contents(tmp_path / "new")
    assert len(files) == 3
    a, b = (load_file(tmp_path / "new" / name) for name in list(files)[:2])
    assert (a["a"].tolist(), b["b"].tolist()) == ([0], [3, 4])


def test_two_runs_do_not_create_the_same_folder(tmp_path, grads):
    command = ["accumulate", tmp_path / "new", *grads, "--create", "--max-shard-size", "1GB"]
    answers = []
    accumulate(
        grads, output_dir=tmp_path / "new", max_shard_size=1, progress=lambda *_: answers.append(gradtool(*command))
    )
    assert {one.returncode for one in answers} == {5}
    assert "in use by PID" in answers[0].stderr
    assert list(contents(tmp_path / "new")) == [*NAMES, INDEX]


@pytest.mark.parametrize("name", [NAMES[1], INDEX])
def test_a_file_that_another_program_makes_meanwhile_is_not_overwritten(tmp_path, grads, name):
    theirs = tmp_path / "new" / name
    with pytest.raises(OSError, match="another program created it"):
        accumulate(
            grads, output_dir=tmp_path / "new", max_shard_size=1, progress=lambda *_: theirs.write_text("theirs")
        )
    assert contents(tmp_path / "new") == {name: b"theirs"}
