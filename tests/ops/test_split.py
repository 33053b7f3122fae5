"""Tensors that lie in pieces in several files: every result has the bits that it has for the uncut file."""

import itertools
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from same_results import facts_of
from split import joined, write_split
from support import encode, gaussian, read, write
from tiers import PARTS, examples

import gradtool
from gradtool import tuning
from gradtool.backends.values import NormSpec
from gradtool.engines.cluster import wire, work
from gradtool.engines.cluster.remote_files import RemoteFiles
from gradtool.ops.passes import Measure
from gradtool.reduction import TILE
from gradtool.store import fs
from gradtool.store.io.destination import DISCARD
from gradtool.store.transaction.inputs import Inputs

# More than a block, and of several tiles, of which none begins where a row does.
TALL, WIDE = (1031, 517), (3, 70_001)
CUTS = {
    "rows": {"a": [[1, 2, 500], []], "b": [[2], []], "c": [[3]], "s": []},
    "columns": {"a": [[], [16, 17]], "b": [[], [1, 65_536]], "c": [[0, 4]]},
    "rows and columns": {"a": [[257, 258], [100, 333]], "b": [[1], [40_000]]},
    "empty pieces": {"a": [[0, 7, 7], [0, 517, 517]], "b": [[3], [9]], "e": [[0], []]},
    "one piece": {"a": [[], []], "s": []},
}


def tensors(seed, dtype="F32"):
    """Two large tensors, a small one, an empty one, and some that no cut is for."""
    shapes = {"a": TALL, "b": WIDE, "c": (7,), "e": (0, 4), "s": (), "whole": (70_000,), "last": (3,)}
    arrays = {name: gaussian(int(np.prod(shape)), dtype, seed + n) for n, (name, shape) in enumerate(shapes.items())}
    return {name: array.reshape(shapes[name]) for name, array in arrays.items()}


@pytest.fixture(params=CUTS)
def cut(request, tmp_path):
    """Write the same tensors cut and uncut; return both paths."""

    def written(name, content):
        path = write(tmp_path / f"{name}.safetensors", content)
        return write_split(tmp_path / name, content, CUTS[request.param]), path

    return written


WAYS = pytest.mark.parametrize("way", ["replace", "inplace"])


def facts(result):
    """All figures of a result but those that depend on files and their order, and the warning; rows by name."""
    left_out = {
        "files",
        "files_written",
        "bytes_written",
        "warnings",
        "first_differing_tensor",
        "first_differing_index",
    }
    found = {key: value for key, value in facts_of(result).items() if key not in left_out}
    for name in [key for key in found if key.startswith("per_")]:
        found[name] = sorted(found[name], key=str)
    return found


def same(one, other):
    """Whether sets hold the same bits: one cut, the other a file."""
    cut, whole = joined(one), read(other)
    assert cut.keys() == whole.keys()
    return all(cut[name].tobytes() == whole[name].tobytes() for name in whole)


@pytest.mark.parametrize("backend", ["cpu", "numpy"])
def test_norm(cut, backend, monkeypatch):
    if backend == "numpy":
        monkeypatch.setenv("GRADTOOL_KERNELS", "numpy")
    there, path = cut("x", tensors(0))
    for options in ({"per_tensor": True}, {"norm_type": 1.0}, {"norm_type": float("inf")}, {"histogram": True}):
        assert facts(gradtool.norm(there, **options)) == facts(gradtool.norm(path, **options))


@pytest.mark.parametrize("dtype", ["F64", "BF16", "F8_E4M3"])
def test_norm_of_other_types(cut, dtype):
    there, path = cut("x", tensors(0, dtype))
    assert facts(gradtool.norm(there)) == facts(gradtool.norm(path))


def test_diff(cut):
    (a, a_path), (b, b_path) = cut("a", tensors(0)), cut("b", tensors(50))
    expected = facts(gradtool.diff(a_path, b_path, per_tensor=True))
    for pair in ((a, b), (a, b_path), (a_path, b)):
        assert facts(gradtool.diff(*pair, per_tensor=True)) == expected


@pytest.mark.parametrize("elsewhere", [False, True])
def test_clip(cut, tmp_path, elsewhere):
    there, path = cut("x", tensors(0))
    options = {"max_norm": 1.0, "group": ["^a|c:0.5"]} if not elsewhere else {"max_norm": 1.0}
    before = joined(there)
    if elsewhere:
        expected = gradtool.clip(path, output=tmp_path / "y.safetensors", **options)
        result = gradtool.clip(there, output_dir=tmp_path / "y", **options)
        assert same(tmp_path / "y", tmp_path / "y.safetensors")
        assert all(joined(there)[name].tobytes() == array.tobytes() for name, array in before.items())
    else:
        result, expected = gradtool.clip(there, **options), gradtool.clip(path, **options)
        assert same(there, path)
    assert facts(result) == facts(expected)


@WAYS
def test_clip_of_some_tensors_leaves_the_others(cut, way):
    there, path = cut("x", tensors(0))
    for include in ("^a$", "^b|whole$", "last|c"):
        options = {"max_norm": 1e-3, "include": [include], "write": way}
        assert facts(gradtool.clip(there, **options)) == facts(gradtool.clip(path, **options))
        assert same(there, path)


def test_clip_adaptively(cut):
    (there, path), (params, params_path) = cut("x", tensors(0)), cut("w", tensors(9))
    for params_of in (params, params_path):
        result = gradtool.clip(there, agc=1e-2, params=params_of)
        assert facts(result) | {"params": ""} == facts(gradtool.clip(path, agc=1e-2, params=params_of)) | {"params": ""}
        assert same(there, path)


@WAYS
def test_accumulate_as_input_and_as_buffer(cut, way):
    (grads, grads_path), (buffer, buffer_path) = cut("g", tensors(0, "BF16")), cut("b", tensors(50))
    write(other := grads.parent / "other.safetensors", tensors(70))
    options = {"weight": [2.0, -0.5], "into_weight": 0.9, "per_gradient": True, "write": way}
    for _ in range(2):
        result = gradtool.accumulate([grads, other], into=buffer, **options)
        assert facts(result) == facts(gradtool.accumulate([grads_path, other], into=buffer_path, **options))
        assert same(buffer, buffer_path)
    gradtool.accumulate([grads_path], into=buffer, reduce="mean", max_norm=1.0)
    gradtool.accumulate([grads_path], into=buffer_path, reduce="mean", max_norm=1.0)
    assert same(buffer, buffer_path)
    gradtool.accumulate([grads, buffer], output=grads.parent / "new", reduce="median")
    gradtool.accumulate([grads_path, buffer_path], output=grads.parent / "expected", reduce="median")
    new, expected = read(grads.parent / "new"), read(grads.parent / "expected")
    assert all(new[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_a_gradient_that_broadcasts(cut, tmp_path):
    buffer, path = cut("b", tensors(0))
    row = write(tmp_path / "row", {"a": encode(range(517), "F16"), "b": encode([[1], [2], [3]], "F32")})
    for into in (buffer, path):
        gradtool.accumulate([row], into=into, missing="skip")
    assert same(buffer, path)
    wide = write(tmp_path / "wide", {"c": np.ones((5, 7), np.float32), "s": np.zeros((2, 3), np.float32)})
    for number, grads in enumerate(cut("g", tensors(3))):
        gradtool.accumulate([grads], into=wide, missing="skip", output=tmp_path / f"out{number}")
    assert (tmp_path / "out0").read_bytes() == (tmp_path / "out1").read_bytes()


@WAYS
@pytest.mark.parametrize("include", [None, ["^a$"], ["b|last"]])
def test_zero(cut, include, way):
    there, path = cut("x", tensors(0))
    options = {"write": way} | ({} if include is None else {"include": include})
    assert facts(gradtool.zero(there, **options)) == facts(gradtool.zero(path, **options))
    assert same(there, path)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@WAYS
@pytest.mark.parametrize("name", ["rows", "rows and columns"])
def test_a_kill_leaves_all_old_or_all_new(tmp_path, monkeypatch, name, way):
    # Pieces lie between whole tensors, so close that these are read in one block.
    small = {f"{letter}{n}": gaussian(300 + n, "F32", n) for letter in "bz" for n in range(3)}
    content = {"a": gaussian(9 * 517, "F32").reshape(9, 517)} | small
    content = {key: content[key] for key in ("b0", "b1", "b2", "a", "z0", "z1", "z2")}
    cuts = {"a": [[1, 2], []] if name == "rows" else [[2, 5], [100, 333]]}
    states = set()
    for step in itertools.count(1):
        there = write_split(tmp_path / str(step), content, cuts)
        monkeypatch.setattr(fs, "steps", itertools.count(1))
        monkeypatch.setenv("GRADTOOL_FAULT", f"kill@{step}")
        if (child := os.fork()) == 0:
            gradtool.clip(there, max_norm=1e-3, write=way, threads=1)
            os._exit(0)
        ended = os.waitpid(child, 0)[1] == 0
        monkeypatch.delenv("GRADTOOL_FAULT")
        gradtool.recover(there)
        states.add(gradtool.norm(there).norm)
        if ended:
            break
    assert len(states) == 2, states
    assert step > 20


def test_nan_is_named_where_it_is_in_the_whole_tensor(cut):
    content = tensors(0)
    content["a"][1000, 516] = np.nan
    there, path = cut("x", content)
    (problem,), (expected,) = gradtool.norm(there).problems, gradtool.norm(path).problems
    assert (problem.message, problem.tensor) == (expected.message, "a")
    with pytest.raises(gradtool.NonFiniteError):
        gradtool.clip(there, max_norm=1)
    assert same(there, path)


def test_a_file_that_changes_is_noticed(tmp_path):
    there = write_split(tmp_path / "x", tensors(0), CUTS["rows"])
    piece = there / "shard-00002-model-00001-of-00001.safetensors"

    def change(*_):
        piece.write_bytes(piece.read_bytes())

    with pytest.raises(gradtool.SystemRefusedError, match="changed by another program") as error:
        gradtool.norm(there, progress=change, threads=1)
    assert error.value.problems[0].file == str(piece)


def test_workers_do_not_write_it(tmp_path):
    there = write_split(tmp_path / "x", tensors(0), CUTS["rows"])
    staging = SimpleNamespace(output=SimpleNamespace(sets=Inputs([str(there)]).open().sets))
    with pytest.raises(gradtool.UsageError, match="workers cannot write tensors that are split over files"):
        RemoteFiles(staging)


@PARTS
def test_any_cut_into_boxes_gives_the_same_bits(tmp_path_factory, part):
    content = tensors(0) | {"d": gaussian(3 * TILE, "F32", 4).reshape(4, 3, TILE // 4)}
    path = write(tmp_path_factory.mktemp("whole") / "x.safetensors", content)
    expected = facts(gradtool.norm(path, per_tensor=True))
    clipped = facts(gradtool.clip(path, max_norm=1.0))

    @examples(60, part)
    @given(st.data())
    def check(data):
        cuts = {
            name: [data.draw(st.lists(st.integers(0, size), max_size=3)) for size in array.shape]
            for name, array in content.items()
            if data.draw(st.booleans(), label=name)
        }
        there = write_split(tmp_path_factory.mktemp("cut") / "x", content, cuts, files=data.draw(st.integers(1, 4)))
        assert facts(gradtool.norm(there, per_tensor=True)) == expected
        assert facts(gradtool.clip(there, max_norm=1.0, fsync=False)) == clipped
        assert same(there, path)

    check()


def test_parts_of_a_pass_are_read_by_other_processes(tmp_path, monkeypatch):
    content = tensors(0)
    path, there = write(tmp_path / "x.safetensors", content), write_split(tmp_path / "x", content, CUTS["columns"])
    monkeypatch.setattr(tuning, "PART_BYTES", 16 * TILE)
    norms = []
    for opened in (Inputs([str(one)]).open() for one in (path, there)):
        measure = Measure(opened.selected, NormSpec())
        tally, parts = measure.tally(), list(measure.parts(DISCARD))
        assert len(parts) > 2
        for part in parts:
            call = work.call_for(work.Job(part._replace(places=()), None, None, 1, None))
            outcome = wire.unpacked(pickle.loads(call), work.empty_outcome(part))  # noqa: S301 - of this process
            assert outcome.fingerprints == [work.fingerprint(shard) for shard in part.reads]
            tally.merge_part(part.places, outcome.tally)
        norms.append(tally.norms().whole)
    assert {Path(shard.name).name for part in parts for shard in part.reads} == {path.name for path in there.iterdir()}
    assert norms == [gradtool.norm(path).norm] * 2
