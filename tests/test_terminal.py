"""What a terminal shows: nothing that matters is broken, at any width."""

import math
import re

import numpy as np
import pytest
from support import SAMPLES, encode, write
from terminal import on_terminal

import gradtool

# Names as models have them, in a folder that is deep.
NAMES = [f"model.language_model.layers.{i}.self_attn.q_proj.lora_A.default.weight" for i in range(8)]
NORMS = [3.0 * 2.0**i for i in range(8)]


@pytest.fixture
def grads(tmp_path):
    folder = tmp_path / "experiments" / "2026-11-22_a_run_with_a_long_name" / "step_000100"
    folder.mkdir(parents=True)
    tensors = {name: encode([norm, 0], "BF16") for name, norm in zip(NAMES, NORMS, strict=True)}
    for number in range(2):
        part = {name: tensors[name] for name in NAMES[number::2]}
        write(folder / f"gradients-0000{number + 1}-of-00002.safetensors", part)
    return folder


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("columns", [30, 40, 59, 60, 80, 100, 200])
@pytest.mark.parametrize(
    "arguments",
    [["norm", "--top", "5"], ["clip", "--max-norm", "1", "--per-tensor", "--dry-run"], ["norm", "--verbose"]],
    ids=" ".join,
)
def test_no_line_is_wider_than_the_terminal_and_no_number_is_broken(grads, columns, arguments):
    code, shown = on_terminal(*arguments, grads, columns=columns, errors=False)
    lines = plain(shown).splitlines()
    assert code == 0
    assert max(len(line) for line in lines if line not in NAMES) <= columns
    words = re.findall(r"\S+", "\n".join(lines))
    assert f"{np.sqrt(np.sum(np.square(NORMS))):.6g}" in words
    if "--top" in arguments:
        assert {"384", "192", "96", "48", "24"} <= set(words)


@pytest.mark.parametrize(
    ("columns", "shown", "left_out"),
    [
        (200, ["name", "file", "dtype", "shape", "norm", "max abs", "nan", "inf", "zeros"], []),
        (130, ["name", "file", "dtype", "norm", "max abs"], ["in all rows: shape 2, nan 0, inf 0, zeros 1"]),
        (96, ["name", "file", "norm", "max abs"], ["in all rows: dtype BF16, shape 2, nan 0, inf 0, zeros 1"]),
        (
            86,
            ["name", "file", "norm"],
            ["in all rows: dtype BF16, shape 2, nan 0, inf 0, zeros 1", "not shown (see --json): max abs"],
        ),
    ],
)
def test_columns_are_left_out_by_importance_and_named(grads, columns, shown, left_out):
    lines = plain(on_terminal("norm", "--top", "2", grads, columns=columns, errors=False)[1]).splitlines()
    (heading,) = [line for line in lines if re.match(r"name\s+(file|dtype|norm)", line)]
    assert re.split(r"\s{2,}", heading.strip()) == shown
    assert lines[len(lines) - len(left_out) :] == left_out
    assert len([line for line in lines if line.startswith(("not shown", "in all rows"))]) == len(left_out)


@pytest.mark.parametrize(
    ("columns", "files"),
    [
        (180, ["…/gradients-00002-of-00002.safetensors", "…/gradients-00001-of-00002.safetensors"]),
        (130, ["…/gradients-00002…", "…/gradients-00001…"]),
        (96, ["…00002…", "…00001…"]),
    ],
)
def test_paths_lose_what_they_share_and_names_nothing(grads, columns, files):
    lines = plain(on_terminal("norm", "--top", "2", grads, columns=columns, errors=False)[1]).splitlines()
    rows = [line.split()[:2] for line in lines if "…" in line]
    assert rows == [[name, file] for name, file in zip([NAMES[7], NAMES[6]], files, strict=True)]


@pytest.mark.parametrize("columns", [40, 80, 120, 200])
def test_the_file_is_left_out_if_one_was_read_and_told_once_if_all_rows_have_it(grads, columns):
    file = "gradients-00002-of-00002.safetensors"
    for path, told in ((grads / file, 0), (grads, 1)):
        shown = plain(on_terminal("norm", path, "--top", 2, "--include", "[1357]", columns=columns, errors=False)[1])
        text = shown[shown.index(NAMES[7]) :]
        assert (text.count("safetensors"), text.count("in all rows: file")) == (told, told)
        assert text.count("2.safetensors") == told


def client(tmp_path, number, values):
    return write(
        tmp_path / "clients_of_the_round" / f"client_{number:02}_update.safetensors", {"a": encode(values, "F32")}
    )


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_cosine_norm_and_who_was_skipped_are_seen_at_any_width(tmp_path, columns):
    paths = [client(tmp_path, 1, [3, 4]), client(tmp_path, 2, [4, 3]), client(tmp_path, 3, [math.nan, 1])]
    arguments = ["accumulate", *paths, "--output", tmp_path / "new", "--nonfinite", "skip", "--per-gradient"]
    shown = on_terminal(*arguments, columns=columns, errors=False)[1]
    lines = plain(shown).splitlines()
    if columns == 40:
        begin = lines.index("…/client_01_update.safetensors")
        assert lines[begin + 1 : begin + 3] == [
            "  taken yes  norm 5 ████████  nan 0",
            "  cosine 0.989949  distance 5",
        ]
        assert lines[-2:] == ["in all rows: weight 1, inf 0, missing 0,", "extra 0"]
        assert "\x1b[33mtaken no\x1b[0m" in shown
        assert "\x1b[31mnan 1\x1b[0m" in shown
        return
    head = next(number for number, line in enumerate(lines) if line.startswith("file "))
    assert {"file", "taken", "norm", "cosine"} <= set(lines[head].split())
    short = {60: "…{:02}…", 80: "…/client_{:02}…"}.get(columns, "…/client_{:02}_update.safetensors")
    assert [line.split()[0] for line in lines[head + 2 : head + 5]] == [short.format(number) for number in (1, 2, 3)]


def test_a_gradient_that_was_not_measured_has_no_bar(tmp_path):
    paths = [client(tmp_path, number, [3, 4]) for number in (1, 2)]
    paths[1].write_bytes(paths[1].read_bytes()[:-3])
    arguments = ["accumulate", *paths, "--output", tmp_path / "new", "--screen", "readable", "--per-gradient"]
    code, shown = on_terminal(*arguments, columns=120, errors=False)
    first, second = [line for line in plain(shown).splitlines() if line.startswith("…")]
    assert (code, first.count("█"), second.count("█"), second.split()[-1]) == (0, 8, 0, "readable")
    # The whole row is in colour.
    assert f"\x1b[33m{second.split()[0]}" in shown


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_turned_off(variables):
    arguments = ["norm", SAMPLES / "nan.safetensors", "--top", "3"]
    shown = on_terminal(*arguments, columns=120, **variables)[1]
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", shown)
    shown = on_terminal(*arguments, columns=120)[1]
    assert "\x1b[31m1,926 NaN\x1b[0m" in shown


def test_a_file_that_is_the_name_of_its_row_is_never_left_out(grads):
    for columns in (60, 80, 200):
        lines = plain(on_terminal("norm", "--by-file", grads, columns=columns, errors=False)[1]).splitlines()
        (heading,) = [line for line in lines if line.startswith("file ")]
        assert heading.split()[-1] in {"norm", "abs", "zeros", "inf"}
        assert "norm" in heading.split()


def test_names_that_leave_no_room_for_a_table_head_a_few_lines(grads):
    lines = plain(on_terminal("norm", "--top", "2", grads, columns=64, errors=False)[1]).splitlines()
    at = lines.index(NAMES[7])
    assert lines[at + 1 : at + 3] == ["…/gradients-00002-of-00002.safetensors", "  norm 384 ████████  max abs 384"]
    assert lines[-1] == "in all rows: dtype BF16, shape 2, nan 0, inf 0, zeros 1"


def test_below_60_columns_a_row_is_a_few_lines(tmp_path):
    path = write(tmp_path / "x", {"a.weight": encode([3, 4], "F32")})
    lines = plain(on_terminal("norm", "--per-tensor", path, columns=40, errors=False)[1]).splitlines()
    assert lines[-3] == "a.weight"
    assert lines[-2:] == ["  dtype F32  shape 2  norm 5  max abs 4", "  nan 0  inf 0  zeros 0"]


def test_what_was_written_comes_first(grads, tmp_path):
    lines = plain(on_terminal("clip", grads, "--max-norm", "1", columns=200, errors=False)[1]).splitlines()
    assert lines[0].split() == ["wrote", str(grads)]
    lines = plain(
        on_terminal("clip", grads, "--max-norm", "9", "--output-dir", tmp_path / "new", columns=200, errors=False)[1]
    ).splitlines()
    assert lines[0].split() == ["wrote", str(tmp_path / "new")]
    lines = plain(on_terminal("clip", grads, "--max-norm", "9", columns=200, errors=False)[1]).splitlines()
    assert lines[0].split() == ["wrote", "nothing"]


def test_errors_are_coloured_and_wrapped_between_words(tmp_path):
    path = write(tmp_path / "x", {"a": encode([1], "F32")})
    arguments = ["clip", path, "--max-norm", "1", "--max-value", "2", "--output-dir", "a", "--threads", "0"]
    code, shown = on_terminal(*arguments, columns=40)
    assert (code, shown) == (2, "gradtool: \x1b[1;31merror:\x1b[0m --threads must be at\n    least 1, not 0\n")
    code, shown = on_terminal(*arguments, NO_COLOR="1", columns=40)
    assert (code, shown) == (2, "gradtool: error: --threads must be at\n    least 1, not 0\n")


def test_a_path_is_not_wrapped(grads):
    missing = grads / "missing-because-it-was-never-written.safetensors"
    shown = on_terminal("norm", missing, columns=40)[1]
    assert str(missing) in shown


@pytest.mark.parametrize("columns", [40, 60])
def test_facts_in_words_are_broken_between_words_and_not_shortened(tmp_path, columns):
    code, shown = on_terminal("doctor", tmp_path, columns=columns, errors=False)
    facts = gradtool.doctor(tmp_path)
    assert code == 0
    assert max(len(line) for line in plain(shown).splitlines()) <= columns
    words = plain(shown).split()
    for fact in (facts.system, facts.cpu_backend, facts.cpu_features, facts.gpu):
        assert set((fact or "").split()) <= set(words)


@pytest.mark.parametrize("columns", ["²", "٣", "9" * 5000, "99999999999", "0", "-1", ""])
def test_a_width_that_is_no_number_of_columns_is_ignored(tmp_path, columns):
    path = write(tmp_path / "x", {"a": encode([1, 0], "F32")})
    code, shown = on_terminal("norm", path, "--per-tensor", columns=80, COLUMNS=columns, LINES=columns)
    assert code == 0
    assert max(len(line) for line in plain(shown).splitlines()) <= 80


def test_one_zero_is_told_in_the_singular(tmp_path):
    path = write(tmp_path / "x", {"a": encode([1, 0], "F32")})
    assert "0 NaN, 0 Inf, 1 zero\n" in plain(on_terminal("norm", path, columns=80, errors=False)[1])
