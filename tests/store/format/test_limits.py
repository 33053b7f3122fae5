"""Work that grows with what a hostile file says, and not with what there is; counted, not timed."""

import json
import os

import numpy as np
import pytest
from support import snapshot, write, write_index

import gradtool
from gradtool import BadInputError, UsageError
from gradtool.ops.layernorm import placement
from gradtool.store.format import gradset, index, limits, paths

ONES = np.ones(2, np.float32)
LAYER = {"X": np.ones((3, 2), np.float32), "Y_grad": np.ones((3, 2), np.float32), "scale": ONES}


def counted(monkeypatch, module, name):
    """Count the calls of a function of a module; the list of their first arguments."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(
        module, name, lambda first, *rest, **more: calls.append(first) or function(first, *rest, **more)
    )
    return calls


@pytest.mark.parametrize("call", [gradtool.check, gradtool.norm, gradtool.info, gradtool.zero])
def test_no_shard_of_an_index_with_too_many_is_looked_for(tmp_path, monkeypatch, call):
    monkeypatch.setattr(limits, "MAX_SHARDS", 3)
    reads = counted(monkeypatch, gradset, "read_shard")
    path = write_index(tmp_path, {}, {f"w{number}": f"{number}.safetensors" for number in range(4)})
    try:
        (problem,) = call(path).problems
    except BadInputError as error:
        (problem,) = error.problems
    assert (problem.code, problem.file) == ("limit", str(path))
    assert problem.message.startswith("the index exceeds the limit of 3 shards (it names 4)")
    assert reads == []


def test_an_index_of_as_many_shards_as_are_allowed_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_SHARDS", 2)
    path = write_index(tmp_path, {f"{number}.safetensors": {f"w{number}": ONES} for number in range(2)})
    assert gradtool.norm(path).call.files == 2


@pytest.mark.parametrize("call", [gradtool.norm, gradtool.check])
def test_names_of_one_file_in_an_index_are_not_read_again_and_again(tmp_path, monkeypatch, call):
    write(tmp_path / "0.safetensors", {"w0": ONES})
    for number in range(1, 9):
        os.link(tmp_path / "0.safetensors", tmp_path / f"{number}.safetensors")
    path = write_index(tmp_path, {}, {f"w{number}": f"{number}.safetensors" for number in range(9)})
    reads = counted(monkeypatch, gradset, "read_shard")
    try:
        problems = call(path).problems
    except BadInputError as error:
        problems = error.problems
    assert "is the same file as 0.safetensors, and the index" in " ".join(one.message for one in problems)
    assert len(reads) == int(call is gradtool.check)


def test_a_file_that_is_named_again_ends_the_call_at_once(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"w": ONES})
    reads = counted(monkeypatch, gradset, "read_shard")
    (tmp_path / "list").write_text(f"{path}\n" * 99)
    with pytest.raises(BadInputError, match="is named twice: .*entry 1 of .*entry 2 of "):
        gradtool.norm(files_from=tmp_path / "list")
    assert reads == [path, path]


def test_a_path_that_is_named_again_is_listed_once(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": ONES})
    (tmp_path / "list").write_text(f"{path}\n" * 99)
    assert gradtool.info(files_from=tmp_path / "list").files == 1


@pytest.mark.parametrize("call", [gradtool.norm, gradtool.check, gradtool.info])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/" * 4097, "exceeds the limit of 4,096 bytes for each path in a list of paths"),
        ("a/" * 200_000, "exceeds the limit of 4,096 bytes for each path in a list of paths"),
        ("x\n" * 4, "exceeds the limit of 3 paths in a list of paths"),
        ("x\0" * 4, "exceeds the limit of 3 paths in a list of paths"),
    ],
)
def test_lists_are_limited_before_a_path_is_looked_for(tmp_path, monkeypatch, call, text, why):
    monkeypatch.setattr(paths, "MAX_PATHS", 3)
    monkeypatch.setattr(os, "lstat", lambda *_: pytest.fail("a path was looked for"))
    (tmp_path / "list").write_text(text)
    with pytest.raises(BadInputError) as caught:
        call(files_from=tmp_path / "list")
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.message) == ("limit", str(tmp_path / "list"), why)


def test_a_path_is_no_longer_than_the_system_takes():
    with pytest.raises(UsageError, match="a path is 4,097 bytes long, above the limit of 4,096"):
        gradtool.norm("/" * 4097)
    with pytest.raises(BadInputError, match="no such folder"):
        gradtool.norm("/" * 4094 + "x/")


def test_an_index_of_many_names_is_read_once_for_all_layers(tmp_path, monkeypatch):
    files = [
        write(tmp_path / f"{number}.safetensors", {f"{number}.{k}": v for k, v in LAYER.items()}) for number in "12"
    ]
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    for number in range(60):
        os.link(tmp_path / "m.safetensors.index.json", tmp_path / f"m{number}.safetensors.index.json")
    reads = counted(monkeypatch, index, "read_weight_map")
    folders = counted(monkeypatch, placement, "mapped_in")
    assert gradtool.layernorm_backward(files).layers == 2
    assert (len(reads), folders) == (1, [str(tmp_path)])


def test_indexes_of_too_many_bytes_are_not_searched(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", LAYER)
    for number in range(3):
        text = json.dumps({"weight_map": {"a": f"{number}.safetensors"}}, indent=100)
        (tmp_path / f"{number}.safetensors.index.json").write_text(text)
    monkeypatch.setattr(index, "MAX_TEXT", 2 * len(text))
    reads, before = counted(monkeypatch, index, "read_weight_map"), snapshot(tmp_path)
    with pytest.raises(BadInputError) as caught:
        gradtool.layernorm_backward(path)
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, reads) == ("limit", str(tmp_path), [])
    assert problem.message.startswith(f"its indexes together exceed the limit of {2 * len(text):,} bytes")
    assert snapshot(tmp_path) == before
