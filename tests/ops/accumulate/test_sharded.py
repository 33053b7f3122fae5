"""New sets that are a folder of files."""

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
    options = {"mean": True, "weight_key": "n", "dtype": dtype}
    alone = accumulate(grads, output=tmp_path / "alone", **options)
    expected = load_file(tmp_path / "alone") if dtype == "F32" else None
    for number, how in enumerate(({"shard_like": like}, {"max_shard_size": 60}, {})):
        folder = tmp_path / f"new{number}"
        result = accumulate(grads, output_dir=folder, **options, **how)
        measured = norm(folder)
        assert result.norm_after.hex() == measured.norm.hex() == alone.norm_after.hex()
        assert (result.call.tensors, result.call.elements, result.call.bytes) == (
            3,
            30,
            30 * NUMPY_TYPES[dtype].itemsize,
        )
        files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
        assert result.output.files_written == measured.call.files == len(files)
        assert (folder / INDEX).exists() == (len(files) > 1)
        assert result.output.bytes_written == sum(path.stat().st_size for path in files)
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
    assert (result.norm_after, result.output.files_written) == (2 * result.norm_before, 2)


def test_a_folder_may_exist_if_it_is_empty_and_those_above_it_are_made(tmp_path, grads):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "x" / "y"):
        done = gradtool("accumulate", *grads, "--output-dir", f"{folder}/", "--max-shard-size", "1kib")
        assert (done.returncode, done.stderr) == (0, "")
        assert list(contents(folder)) == ["model.safetensors"]


@pytest.mark.parametrize("how", ["max_shard_size", "shard_like", None])
def test_a_set_is_replaced_as_a_whole_and_has_the_same_bytes_each_time(tmp_path, grads, like, how):
    options = {"output_dir": tmp_path / "new", "mean": True}
    options |= {how: {"max_shard_size": 60, "shard_like": like}[how]} if how else {}
    accumulate(grads, **options)
    first = contents(tmp_path / "new")
    (tmp_path / "new" / "README.md").write_text("stays")
    for number, path in enumerate((tmp_path / "new").iterdir()):
        path.write_bytes(b"other" * (number % 2) if path.suffix != ".md" else b"stays")
    accumulate(grads, **options)
    assert contents(tmp_path / "new") == first | {"README.md": b"stays"}
    before = snapshot(tmp_path)
    assert {one[0] for one in refused(BadInputError, tmp_path, None, grads, no_clobber=True, **options)} == {"exists"}
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("there", "how"),
    [
        ("stranger.safetensors", {}),
        ("model.safetensors", {"max_shard_size": 60}),
        (NAMES[0], {}),
        (INDEX, {}),
        ("other.safetensors.index.json", {"max_shard_size": 60}),
    ],
)
def test_a_folder_with_parts_of_another_set_is_refused(tmp_path, grads, there, how):
    path = write(tmp_path / "new" / there, {"a": f32(1)})
    for options in (how, how | {"dry_run": True}):
        assert refused(BadInputError, tmp_path, None, grads, output_dir=path.parent, **options) == [
            ("exists", None, "new")
        ]
    with pytest.raises(BadInputError, match=f"has {there}, which the new set does not have; move"):
        accumulate(grads, output_dir=path.parent, **how)


def test_a_smaller_set_does_not_leave_shards_of_a_larger_one(tmp_path, grads):
    accumulate(grads, output_dir=tmp_path / "new", max_shard_size=60)
    with pytest.raises(BadInputError, match=f"has {NAMES[0]} and 3 more, which the new set does not have"):
        accumulate(grads, output_dir=tmp_path / "new")
    assert list(contents(tmp_path / "new")) == [*NAMES, INDEX]


def test_the_set_that_it_is_sharded_as_is_not_replaced(tmp_path, grads, like):
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="is a file of shard_like, which would be replaced; write to another file"):
        accumulate(grads, output_dir=like, shard_like=like)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"into": "g1", "max_shard_size": 1}, "max_shard_size requires a new set, without into"),
        ({"into": "g1", "output_dir": "new", "shard_like": "model"}, "shard_like requires a new set, without into"),
        ({"output": "new", "shard_like": "model"}, "shard_like requires output_dir"),
        ({"output_dir": "new", "shard_like": "model", "max_shard_size": 1}, "exclude each other"),
        ({"output_dir": "g1"}, 'output_dir="g1" is not a folder'),
        ({"output": "new/"}, 'output="new/" is a folder or an index, not a file; use output_dir'),
        ({"output": f"new/{INDEX}"}, "is a folder or an index, not a file; use output_dir"),
        ({"output_dir": "new", "max_shard_size": 1, "write": "inplace"}, "write=.inplace. cannot be combined"),
    ],
)
def test_options_that_contradict_each_other_are_usage_errors(tmp_path, monkeypatch, grads, like, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        accumulate(grads[1:], **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g1", "g3", like.name]


def test_a_set_that_cannot_be_read_or_lacks_a_tensor_is_bad_input(tmp_path, grads):
    other = write(tmp_path / "other", {"b": f32(1)})
    new = tmp_path / "new"
    assert refused(BadInputError, tmp_path, None, grads, output_dir=new, shard_like=other) == [
        ("extra-tensor", "a", "g1"), ("extra-tensor", "c", "g1"),
    ]  # fmt: skip
    missing = tmp_path / "missing"
    assert refused(BadInputError, tmp_path, None, grads, output_dir=new, shard_like=missing) == [
        ("missing-file", None, "missing")
    ]
    # What is not selected needs no place.
    assert accumulate(grads, output_dir=new, shard_like=other, include="b").output.files_written == 1
    assert list(contents(new)) == ["other"]


def test_a_dry_run_and_a_call_without_an_update_make_nothing(tmp_path, grads, like):
    before = snapshot(tmp_path)
    for options in ({"dry_run": True}, {"update": False}):
        assert accumulate(grads, output_dir=tmp_path / "new", shard_like=like, **options).output.files_written == 0
        assert snapshot(tmp_path) == before
        assert not (tmp_path / "new").exists()


def test_an_error_leaves_no_folder(tmp_path, like):
    _, bad = lay_out(
        tmp_path, f32(), {"a": np.zeros((2, 5), np.float32), "b": f32(*[math.nan] * 15), "c": f32(*[1] * 5)}
    )
    answer = gradtool_json("accumulate", *bad, "--output-dir", tmp_path / "x" / "new", "--shard-like", like)
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


def test_two_runs_do_not_make_the_same_folder(tmp_path, grads):
    # Without the index, they would have no file in common.
    command = ["accumulate", *grads, "--output-dir", tmp_path / "new", "--max-shard-size", "1GB"]
    answers = []
    accumulate(
        grads, output_dir=tmp_path / "new", max_shard_size=1, progress=lambda *_: answers.append(gradtool(*command))
    )
    assert {one.returncode for one in answers} == {5}
    assert "in use by PID" in answers[0].stderr
    assert list(contents(tmp_path / "new")) == [*NAMES, INDEX]


@pytest.mark.parametrize("name", [NAMES[1], INDEX])
def test_with_no_clobber_a_file_that_another_program_makes_meanwhile_is_not_replaced(tmp_path, grads, name):
    theirs = tmp_path / "new" / name
    options = {"output_dir": tmp_path / "new", "max_shard_size": 1}
    with pytest.raises(OSError, match="another program created it"):
        accumulate(grads, **options, no_clobber=True, progress=lambda *_: theirs.write_text("theirs"))
    assert contents(tmp_path / "new") == {name: b"theirs"}
