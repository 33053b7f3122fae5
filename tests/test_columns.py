"""Which columns a table keeps where there is little room, which paths are shortened, and what is coloured."""

import pytest

from gradtool.report.columns import colour_of, fit, fit_blocks, needed
from gradtool.report.paths import least_width, middle, shortened_paths

SHARDS = [f"forty/model-gradients-{number:05}-of-00040.safetensors" for number in range(1, 41)]
GRADIENTS = {
    "file": ["c/a.safetensors", "c/b.safetensors", "c/c.safetensors"],
    "weight": ["1", "1", "1"],
    "taken": ["yes", "no", "yes"],
    "norm": ["5.01", "NaN", "7.125"],
    "coef": ["-", "-", "-"],
    "nan": ["0", "4", "0"],
    "inf": ["0", "0", "0"],
    "cosine": ["0.99", "-", "0.123456"],
    "distance": ["0.25", "-", "0.125"],
    "missing": ["0", "0", "0"],
}
DIFFERENCES = {
    "name": ["layers.0.weight", "layers.1.weight"],
    "file": ["a/1", "a/2"],
    "dtype_a": ["BF16", "F32"],
    "dtype_b": ["BF16", "BF16"],
    "shape": ["2x3", "2x4"],
    "rel_l2": ["0.125", "0.25"],
    "max_abs_diff": ["4", "9"],
    "differing": ["2", "3"],
    "not_close": ["1", "2"],
    "norm_a": ["11.25", "12.25"],
    "nonfinite_both": ["0", "0"],
}
COUNTS = {
    "dtype": ["F32", "BF16"],
    "tensors": ["80", "1"],
    "elements": ["83,200", "1,000"],
    "bytes": ["333 kB", "2.0 kB"],
    "nan": ["2", "0"],
    "zeros": ["12", "0"],
    "saturated": ["0", "1"],
}


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (46, "…/model-gradients-{:05}-of-00040.safetensors"),
        (43, "…/model-gradients-{:05}…"),
        (24, "…/model-gradients-{:05}…"),
        (23, "…{:05}…"),
        (7, "…{:05}…"),
        (6, "…{:02}…"),
        (4, "…{:02}…"),
    ],
)
def test_paths_lose_first_what_all_of_them_share(width, shown):
    assert shortened_paths(SHARDS, 80) == SHARDS
    assert shortened_paths(SHARDS, width) == [shown.format(number) for number in range(1, 41)]


@pytest.mark.parametrize(
    ("paths", "width", "shown"),
    [
        (["x.safetensors", "x2.safetensors"], 12, ["x…", "x2…"]),
        (["clients/a/g.safetensors", "clients/b2/g.safetensors"], 12, ["…/a…", "…/b2…"]),
        (["a/x", "a/x.y"], 4, ["…", "….y"]),
        (["a_1_bbbbbbbb_1", "a_2_bbbbbbbb_1", "a_1_bbbbbbbb_2"], 8, ["…1_…bb_1", "…2_…bb_1", "…1_…bb_2"]),
        (["a/very/long/way/to/model.safetensors"], 20, ["…/model.safetensors"]),
        (["same.safetensors"] * 2, 12, ["sam…ensors"] * 2),
    ],
)
def test_paths_that_differ_stay_different(paths, width, shown):
    short = shortened_paths(paths, width)
    assert [len(text) <= width for text in short] == [True] * len(paths)
    if paths[0] == "same.safetensors":
        assert len(set(short)) == 1
    else:
        assert short == shown


def test_where_the_usual_cut_loses_the_difference_another_is_used():
    # Sites and rounds differ at both ends, and clients in the middle.
    paths = [f"site-{site}.{'x' * 20}.client-{client}.{'y' * 20}.round-{site}" for site in "ab" for client in "12"]
    assert len(set(shortened_paths(paths, 40))) == 4
    assert middle("abcdefghij", 5) == "ab…ij"[:2] + "…" + "ij"
    assert middle("abcdefghij", 5, 1.0) == "…ghij"
    assert middle("abcdefghij", 5, 0.0) == "abcd…"


def test_paths_need_the_room_of_what_differs():
    assert least_width(SHARDS) == 7
    assert least_width(SHARDS, with_names=True) == 24
    assert least_width(["a" * 40 + str(number) for number in range(2)]) == 24


@pytest.mark.parametrize(
    ("width", "shown", "same", "left_out"),
    [
        (200, [key for key in GRADIENTS if key != "coef"], {}, []),
        (74, [key for key in GRADIENTS if key != "coef"], {}, []),
        (58, ["file", "weight", "taken", "norm", "nan", "cosine", "distance"], {"inf": "0", "missing": "0"}, []),
        (49, ["file", "taken", "norm", "nan", "cosine", "distance"], {"weight": "1", "inf": "0", "missing": "0"}, []),
        (40, ["file", "taken", "norm", "nan", "cosine"], {"weight": "1", "inf": "0", "missing": "0"}, ["distance"]),
        (30, ["file", "norm", "cosine"], {"weight": "1", "inf": "0", "missing": "0"}, ["taken", "nan", "distance"]),
        (
            16,
            ["file", "cosine"],
            {"weight": "1", "inf": "0", "missing": "0"},
            ["taken", "norm", "nan", "distance"],
        ),
    ],
)
def test_columns_with_one_value_go_first_and_cosine_and_norm_last(width, shown, same, left_out):
    fitting = fit(GRADIENTS, "accumulate", width)
    assert (list(fitting.columns), fitting.same, fitting.left_out) == (shown, same, left_out)
    assert needed(fitting.columns) <= width


def test_of_differences_those_remain_that_show_what_differs():
    fitting = fit(DIFFERENCES, "diff", 63)
    assert list(fitting.columns) == ["name", "rel_l2", "max_abs_diff", "differing", "not_close"]
    assert fitting.same == {"dtype_b": "BF16", "nonfinite_both": "0"}
    assert list(fit(DIFFERENCES, "diff", 20).columns) == ["name", "rel_l2"]


def test_of_counts_those_remain_that_show_what_is_wrong():
    assert list(fit(COUNTS, "check", 30).columns) == ["dtype", "nan", "saturated"]
    assert fit(COUNTS, "check", 30).left_out == ["tensors", "elements", "bytes", "zeros"]
    assert list(fit(COUNTS, "info", 30).columns) == ["dtype", "nan", "zeros", "saturated"]


def test_the_file_that_all_rows_have_is_told_once_and_a_single_row_keeps_its_columns():
    columns = {"name": ["a", "b"], "file": ["x", "x"], "norm": ["1", "1"]}
    assert fit(columns, "norm", 200) == ({"name": ["a", "b"], "norm": ["1", "1"]}, {"file": "x"}, [])
    assert fit_blocks(columns) == ({"name": ["a", "b"]}, {"file": "x", "norm": "1"}, [])
    single = {key: texts[:1] for key, texts in columns.items()}
    assert fit(single, "norm", 200) == fit_blocks(single) == (single, {}, [])


@pytest.mark.parametrize(
    ("key", "text", "colour"),
    [
        ("nan", "3", "red"), ("nan", "0", ""), ("inf", "-", ""), ("norm", "NaN", "red"), ("max_abs", "Infinity", "red"),
        ("norm", "3", ""), ("clipped", "yes", "yellow"), ("clipped", "no", ""), ("taken", "no", "yellow"),
        ("taken", "yes", ""), ("skipped", "2", "yellow"), ("skipped", "0", ""), ("faults", "1", "red"),
        ("sound", "no", "red"), ("sound", "yes", ""), ("screened", "finite", "yellow"), ("screened", "-", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_red_and_what_was_changed_or_left_out_is_yellow(key, text, colour):
    assert colour_of(key, text) == colour
