"""Weights in a list, which may also name the gradients, and comments in lists of paths."""

import pytest
from buffers import f32, lay_out
from support import gradtool_json, read

from gradtool import BadInputError, accumulate, norm


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, f32(0), f32(1), f32(10))
    return tmp_path


def listed(folder, text):
    (folder / "list").write_text(text)
    return "list"


def test_weights_belong_to_paths_in_any_order_and_spelling(here):
    (here / "g1").rename(here / "g 1")
    text = f"# samples of round 7\n\n{here}/g2\t3\r\n  ./g 1   2e0\n"
    result = accumulate([f"{here}/g2", "g 1"], into="buffer", weights=listed(here, text), mean=True, per_gradient=True)
    assert read(here / "buffer")["a"].tolist() == pytest.approx([6.4])
    assert ([row.weight for row in result.per_gradient], result.weight_sum) == ([3, 2], 5)


def test_a_list_of_weights_alone_names_the_gradients(here):
    result = accumulate(output="sum", weights=listed(here, "g2 2\ng1 1\n"), per_gradient=True)
    assert [(row.file, row.weight) for row in result.per_gradient] == [("g2", 2), ("g1", 1)]
    assert read(here / "sum")["a"].tolist() == [21]
    data = gradtool_json("accumulate", "--output", "sum", "--weights", "-", cwd=here, input="g1 4\n")["data"]
    assert data["weight_sum"] == 4.0
    (here / "paths").write_text("g1\n")
    assert accumulate(output="sum", files_from="paths", weights=listed(here, "g1 5\n")).weight_sum == 5


BAD_LISTS = {
    "twice": ("g1 1\n./g1 2\n", "list: names g1 twice"),
    "unknown": ("g1 1\ng2 1\ng3 1\n", "list: names g3, which is not among the gradients"),
    "missing": ("g1 1\n", "g2: has no weight in list"),
    "no number": ("g1 1\ng2\n", "g2: has no weight in list"),
    "a word": ("g1 1\ng2 many\n", "g2: 'many' is not a weight in list"),
    "nan": ("g1 nan\ng2 1\n", "g1: 'nan' is not a weight in list"),
    "too large": ("g1 1e999\ng2 1\n", "g1: '1e999' is not a weight in list"),
    "comments": ("# g1 1\n", "list: lists no paths"),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_what_is_wrong_with_a_list_of_weights_is_named(here, name):
    text, message = BAD_LISTS[name]
    with pytest.raises(BadInputError, match=message):
        accumulate(["g1", "g2"], into="buffer", weights=listed(here, text))
    assert read(here / "buffer")["a"].tolist() == [0]


def test_a_client_without_a_weight_is_left_out_if_asked(here):
    text = listed(here, "g1 many\ng2 3\n")
    result = accumulate(into="buffer", weights=text, screen=["weighted", "readable"], mean=True)
    assert [(row.rule, row.file, row.reason) for row in result.per_screened] == [
        ("weighted", "g1", "'many' is not a weight in list")
    ]
    assert (read(here / "buffer")["a"].tolist(), result.weight_sum) == ([10], 3)
    # A client that a list names and that has sent nothing is unreadable, not unweighted.
    result = accumulate(into="buffer", weights=listed(here, "g0 1\ng2 3\n"), screen=["weighted", "readable"])
    assert [(row.rule, row.file) for row in result.per_screened] == [("readable", "g0")]


def test_lines_that_begin_with_a_number_sign_are_comments_in_lists_of_lines(here):
    (here / "g2").rename(here / "#2")
    assert norm(files_from=listed(here, "# honest\ng1\n#2\n"), concat=True).call.files == 1
    assert norm(files_from=listed(here, "#\n./#2\n")).norm == 10
    assert norm(files_from=listed(here, "#2\0"), concat=True).norm == 10
