"""A file that is named twice: the message has both ways by which it was."""

import os

import numpy as np
import pytest
from support import gradtool, write, write_index

from gradtool import BadInputError, accumulate, norm

ONES = np.ones(2, np.float32)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_index(tmp_path / "data", {"1.safetensors": {"a": ONES}, "2.safetensors": {"b": ONES}})
    write(tmp_path / "data/other.safetensors", {"a": ONES})
    write(tmp_path / "folder/x.safetensors", {"a": ONES})
    (tmp_path / "link").symlink_to("folder/x.safetensors")
    os.link("folder/x.safetensors", "hard")
    (tmp_path / "list").write_text("data/other.safetensors\n\ndata/1.safetensors\n")
    (tmp_path / "list0").write_text("folder\0data/1.safetensors\0data/1.safetensors\0")


INDEX = "data/model.safetensors.index.json"
FIRST = "data/1.safetensors"
PATH = f"the path {FIRST}"
X = "folder/x.safetensors"


@pytest.mark.parametrize(
    ("paths", "listed", "line"),
    [
        ([X, X], None, f"{X}: is named twice: both times by the path {X}"),
        (
            [INDEX, "data/1.safetensors"],
            None,
            f"data/1.safetensors: is named twice: by the index {INDEX} and by the path data/1.safetensors",
        ),
        (
            ["data/2.safetensors", "data"],
            None,
            "data/2.safetensors: is named twice: by the path data/2.safetensors and by the folder data",
        ),
        ([INDEX, "data"], None, f"data/1.safetensors: is named twice: by the index {INDEX} and by the folder data"),
        (["folder/", X], None, f"{X}: is named twice: by the folder folder/ and by the path {X}"),
        (
            [X, "link"],
            None,
            f"link: is the same file as {X} and is named twice: by the path {X} and by the path link",
        ),
        (
            ["hard", "folder"],
            None,
            f"{X}: is the same file as hard and is named twice: by the path hard and by the folder folder",
        ),
        (
            [INDEX],
            "list",
            f"{FIRST}: is named twice: by the index {INDEX} and by the path {FIRST} (entry 2 of list)",
        ),
        (
            [X],
            "list0",
            f"{X}: is named twice: by the path {X} and by the folder folder (entry 1 of list0)",
        ),
        (
            [],
            "list0",
            f"{FIRST}: is named twice: by {PATH} (entry 2 of list0) and by {PATH} (entry 3 of list0)",
        ),
    ],
)
def test_a_file_that_is_named_twice_is_named_with_both_ways(paths, listed, line):
    with pytest.raises(BadInputError) as caught:
        norm(paths, files_from=listed)
    assert str(caught.value) == f"{line}; name each file once"
    assert caught.value.problems[0].code == "duplicate-file"


def test_a_list_on_standard_input_is_called_so():
    done = gradtool("norm", X, "--files-from", "-", input=f"{X}\n", cwd=".")
    assert done.returncode == 3
    way = f"by the path {X} and by the path {X} (entry 1 of standard input)"
    assert done.stderr == f"gradtool: error: {X}: is named twice: {way}\n  hint: name each file once\n"


def test_a_buffer_that_is_also_a_gradient_is_named_twice():
    with pytest.raises(BadInputError) as caught:
        accumulate(["data/other.safetensors", "folder"], into=X)
    assert str(caught.value) == f"{X}: is named twice: by the path {X} and by the folder folder; name each file once"


def test_an_index_with_two_names_of_one_file_is_to_be_corrected(tmp_path):
    index = write_index(tmp_path / "i", {"1.safetensors": {"a": ONES}}, {"a": "1.safetensors", "b": "2.safetensors"})
    os.link("i/1.safetensors", "i/2.safetensors")
    with pytest.raises(BadInputError) as caught:
        norm(index)
    said = f"is the same file as 1.safetensors, and the index {index.name} names both; correct the index"
    assert str(caught.value) == f"{tmp_path}/i/2.safetensors: {said}"
