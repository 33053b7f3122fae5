"""A folder without a safetensors file: the message says what is there instead."""

import numpy as np
import pytest
from support import write

from gradtool import BadInputError, norm
from gradtool.store.format import filetypes
from gradtool.store.format.filetypes import DISTRIBUTED

NAME_ONE = "name one or more of them"
ONES = np.ones(2, np.float32)


def said_of(folder):
    with pytest.raises(BadInputError) as caught:
        norm(folder)
    (problem,) = caught.value.problems
    assert (problem.file, problem.code) == (str(folder), "missing-file")
    return "; ".join(filter(None, (problem.message, problem.hint)))


def recipe(name):
    return f"convert them as `gradtool help convert` shows under '{name}'"


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ("", "has no .safetensors file: it is empty"),
        (".hidden.safetensors", "has no .safetensors file: it is empty"),
        ("a.bin", f"has no .safetensors file, but 1 .bin file; {recipe('From .pt')}"),
        ("a.bin b.bin c.bin", f"has no .safetensors file, but 3 .bin files; {recipe('From .pt')}"),
        ("a.pt b.json", f"has no .safetensors file, but 1 .json file and 1 .pt file; {recipe('From .pt')}"),
        ("a.npz b.npz README", f"has no .safetensors file, but 2 .npz files and 1 other; {recipe('From .npz')}"),
        (
            "a.x b.x c.x d.y e.y f.z g.z h.w LICENSE README",
            "has no .safetensors file, but 3 .x files, 2 .y files, 2 .z files and 3 others; check the path",
        ),
        ("a.safetensors.gz", "has no .safetensors file, but 1 .gz file; decompress them with gunzip"),
        (
            "__0_0.distcp __1_0.distcp",
            f"has no .safetensors file, but 2 .distcp files; {DISTRIBUTED}",
        ),
        ("sub/a.txt", "has no .safetensors file, but 1 other; check the path"),
    ],
)
def test_a_folder_without_safetensors_says_what_is_there(tmp_path, names, line):
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert said_of(tmp_path) == line


@pytest.mark.parametrize(
    ("subfolders", "line"),
    [
        ("a", "has no .safetensors file, but its subfolder {0}/a has; name that folder"),
        ("a b", f"has no .safetensors file, but its subfolders {{0}}/a and {{0}}/b have; {NAME_ONE}"),
        (
            "e a b c d",
            f"has no .safetensors file, but its subfolders {{0}}/a, {{0}}/b, {{0}}/c and 2 others have; {NAME_ONE}",
        ),
    ],
)
def test_a_folder_of_folders_names_those_that_have_some(tmp_path, subfolders, line):
    for name in subfolders.split():
        write(tmp_path / name / "x.safetensors", {"a": ONES})
    (tmp_path / "none").mkdir()
    (tmp_path / "a.bin").touch()
    assert said_of(tmp_path) == line.format(tmp_path)


def test_of_a_large_folder_only_a_part_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(filetypes, "_MAX_ENTRIES", 10)
    for number in range(12):
        (tmp_path / f"{number}.x").touch()
    assert said_of(tmp_path) == "has no .safetensors file, but 10 .x files among its first 10 entries; check the path"


def test_of_many_subfolders_only_some_are_looked_into(tmp_path, monkeypatch):
    monkeypatch.setattr(filetypes, "_MAX_SUBFOLDERS", 2)
    for name in "abc":
        (tmp_path / name).mkdir()
    write(tmp_path / "c" / "x.safetensors", {"a": ONES})
    assert said_of(tmp_path) == "has no .safetensors file, but 3 others; check the path"


def test_a_folder_that_is_called_like_a_file_is_a_folder(tmp_path):
    write(tmp_path / "x.safetensors" / "1.safetensors", {"a": ONES})
    assert norm(tmp_path / "x.safetensors").call.tensors == 1
    with pytest.raises(BadInputError) as caught:
        norm(tmp_path)
    line = "is a folder, not a file; name the folder itself, or rename it"
    assert str(caught.value) == f"{tmp_path}/x.safetensors: {line}"
