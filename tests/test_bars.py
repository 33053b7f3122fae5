"""Bars and histograms on a terminal, at its widths and with its letters."""

import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support import encode, write
from terminal import on_terminal

from gradtool import norm
from gradtool.report.histogram import bar, norm_bars


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def shown(*arguments, **options):
    code, text = on_terminal(*arguments, errors=False, **options)
    assert code == 0
    return plain(text).splitlines()


@pytest.mark.parametrize(
    ("part", "utf8", "ascii_"),
    [
        (1.0, "████", "####"),
        (0.5, "██", "##"),
        (0.28, "█▏", "#"),
        (0.001, "▏", "#"),
        (0.0, "", ""),
        (math.nan, "", ""),
        (7.0, "████", "####"),
    ],
)
def test_a_bar_is_as_long_as_its_part_and_what_is_there_is_seen(monkeypatch, part, utf8, ascii_):
    for encoding, expected in (("utf-8", utf8), ("ascii", ascii_)):
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding=encoding))
        assert bar(part, 4) == expected


def test_bars_of_norms_are_beside_the_largest_finite_one(monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(encoding="utf-8"))
    assert norm_bars([4.0, 2.0, 0.0, math.nan, math.inf], 4) == ["████", "██", "", "", "████"]
    assert norm_bars([0.0, math.nan], 4) == ["", ""]


@pytest.fixture
def path(tmp_path):
    values = [2.0**-20, 1, 1, 1, 2, 2, *[5] * 1000, 0, 0]
    return write(tmp_path / "x", {"first.weight": encode(values, "F32"), "b": encode([1.5], "BF16")})


def test_a_histogram_has_a_line_for_each_exponent_and_a_mark_for_those_that_are_skipped(path):
    lines = shown("norm", path, "--histogram", columns=80)
    at = lines.index("exponent e: 2^(e-1) <= |x| < 2^e")
    assert lines[at + 1 : at + 8] == [
        "  e  count  bars on a log scale",
        "-19      1  █████",
        "  ⋮",
        "  1      4  ███████████▋",
        "  2      2  ████████",
        "  3  1,000  ██████████████████████████████████████████████████",
        "",
    ]
    head, line, *rows = lines[at + 8 : at + 16]
    assert head.split() == ["stored", "as", "overflow", "subnormal", "zero", "loss", "scale", "99.9", "%", "norm^2"]
    assert set(line) == {"─"}
    assert [row.split() for row in rows] == [
        ["F64", *"000", "2^-1002", "to", "2^1021", "2^-1022", "2^-1022"],
        ["F32", *"000", "2^-106", "to", "2^125", "2^-126", "2^-126"],
        ["F16", *"010", "2^6", "to", "2^13", "2^-14", "2^-14"],
        ["BF16", *"000", "2^-106", "to", "2^125", "2^-126", "2^-126"],
        ["F8_E4M3", *"001", "up", "to", "2^6", "2^-6", "2^-6"],
        ["F8_E5M2", *"001", "2^6", "to", "2^13", "2^-14", "2^-14"],
    ]


@pytest.mark.parametrize("columns", [20, 40, 59, 60, 80, 200])
def test_no_line_of_bars_is_longer_than_the_terminal(path, columns):
    lines = shown("norm", path, "--histogram", "--per-tensor", columns=columns)
    drawn = [line for line in lines if "█" in line]
    assert len(drawn) >= 8
    assert max(map(len, drawn)) <= columns


def test_a_terminal_without_blocks_gets_hashes(path):
    lines = shown("norm", path, "--histogram", columns=40, PYTHONIOENCODING="ascii")
    assert "  3  1,000  " + "#" * 27 in lines
    assert "  :" in lines
    assert not any("\\u" in line for line in lines)


def test_each_tensor_that_is_named_has_a_histogram_of_its_own(path):
    lines = shown("norm", path, "--histogram", "--per-tensor", columns=40)
    assert lines.count("exponent e: 2^(e-1) <= |x| < 2^e") == 3
    at = max(number for number, line in enumerate(lines) if line == "b")
    assert lines[at + 2 :] == ["e  count  bars on a log scale", "1      1  " + "█" * 29]


def test_norms_of_several_rows_have_bars_beside_them(tmp_path):
    arrays = {"a": encode([4], "F32"), "b": encode([2], "F32"), "c": encode([math.nan], "F32"), "d": np.zeros(1)}
    path = write(tmp_path / "x", arrays)
    for columns in (80, 40):
        code, text = on_terminal("norm", path, "--top", "4", columns=columns, errors=False)
        assert code == 1
        lines = plain(text).splitlines()
        assert [re.findall(r"(?<=[\d] )\s*[▏▎▍▌▋▊▉█]+", line) for line in lines if "█" in line] in (
            [["  ████████"], ["  ████"]],
            [["████████"], ["████"]],
        )
    assert not any("█" in line for line in shown("norm", path, "--top", "1", "--include", "a"))


def test_a_histogram_of_nothing_says_that_any_scale_does(tmp_path):
    lines = shown("norm", write(tmp_path / "x", {"a": np.zeros(3)}), "--histogram", columns=80)
    assert [line.split() for line in lines if line.startswith("F16")] == [["F16", "0", "0", "0", *["any"] * 3]]
    assert "exponent e: 2^(e-1) <= |x| < 2^e" not in lines


def test_bounds_are_shown_where_exponents_do_not_tell(tmp_path):
    path = write(tmp_path / "x", {"a": encode([40_000, 65_530, 1e6], "F32")})
    lines = shown("norm", path, "--histogram", columns=80)
    assert [line.split()[1:4] for line in lines if line.startswith("F16")] == [["1", "to", "3"]]


def bars_of(path, columns=80):
    """The lines of the histogram of all values."""
    lines = shown("norm", path, "--histogram", columns=columns)
    begin = next(number for number, line in enumerate(lines) if line.startswith("exponent"))
    return lines[begin : lines.index("", begin)]


def test_a_histogram_of_more_exponents_than_fit_a_screen_is_folded(tmp_path):
    values = np.repeat(2.0 ** np.arange(-40, 0), 1000)
    values = np.concatenate([values, 2.0 ** np.arange(-80, -45)])
    lines = bars_of(write(tmp_path / "x", {"a": values}))
    assert lines[:3] == [
        "exponents up to e: 2^(e-2) <= |x| < 2^e",
        "  e  count  bars on a log scale",
        "below 2^-40: 35",
    ]
    rows = [line.split()[:2] for line in lines[3:]]
    assert rows == [[f"{exponent}", "2,000"] for exponent in range(-38, 2, 2)]
    # JSON and plain lines have all of them.
    exponents = norm(tmp_path / "x", histogram=True).histogram
    assert [row.exponent for row in exponents] == [*range(-79, -44), *range(-39, 1)]


@pytest.mark.parametrize(
    ("exponents", "lines", "step"), [(24, 24, 1), (25, 13, 2), (46, 23, 2), (47, 12, 4), (2000, 16, 128)]
)
def test_no_histogram_has_more_than_24_lines(tmp_path, exponents, lines, step):
    values = 2.0 ** (np.arange(exponents, dtype=np.float64) - 1000)
    shown_lines = bars_of(write(tmp_path / "x", {"a": values}))
    name = "exponent e" if step == 1 else "exponents up to e"
    assert shown_lines[0] == f"{name}: 2^(e-{step}) <= |x| < 2^e"
    tail = 1 if exponents > 1000 else 0
    assert len(shown_lines) - 2 - tail == lines
    assert sum(int(line.split()[1]) for line in shown_lines[2 + tail :]) == exponents - 2 * tail


def test_exponents_with_gaps_between_them_are_folded_where_the_marks_take_too_many_lines(tmp_path):
    lines = bars_of(write(tmp_path / "x", {"a": 2.0 ** (3.0 * np.arange(20))}))
    assert lines[0] == "exponents up to e: 2^(e-4) <= |x| < 2^e"
    assert len(lines) <= 26
    assert "  ⋮" not in lines
