"""Names and words out of files that a terminal would act upon: they are never printed as they are."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from support import encode, gradtool, with_header, write, write_index
from terminal import on_terminal

from gradtool.errors import printable
from gradtool.report.messages import without_commands

# Colours, a title, a cleared screen, 8-bit controls, right-to-left, what is invisible, and what ends a line.
HOSTILE = "\x1b[31m\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200f\u200b\ufeff\x7f\b\r\n\u2028\u0085\x00end"
SPELLED_OUT = r"\x1b[31m\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u200f\u200b\ufeff\x7f\x08\r\n\u2028\x85\x00end"
# What a file may be called; a NUL or a newline cannot be, or not be told from two paths.
IN_A_PATH = HOSTILE.replace("\x00", "").replace("\n", "")
RAW = set(HOSTILE) - set("[31m]0;owned2Jend")


def refuse_raw(text, allowed="\n"):
    found = {character for character in text if character in RAW and character not in allowed}
    assert not found, text


def with_nan(folder):
    return [write(folder / "x.safetensors", {HOSTILE: encode([np.nan], "F32")})]


def truncated(folder):
    path = folder / "x.safetensors"
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    path.write_bytes(with_header({HOSTILE: entry, "z": entry | {"data_offsets": [4, 8]}}, bytes(6)))
    return [path]


def integers(folder):
    return [write(folder / "x.safetensors", {HOSTILE: np.ones(1, np.int32)})]


def bad_offsets(folder):
    path = folder / "x.safetensors"
    path.write_bytes(with_header({HOSTILE: {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)))
    return [path]


def bad_type(folder):
    path = folder / "x.safetensors"
    path.write_bytes(with_header({"a": {"dtype": HOSTILE, "shape": [2], "data_offsets": [0, 8]}}, bytes(8)))
    return [path]


def long_name(folder):
    return [write(folder / "x.safetensors", {HOSTILE + "x" * 5000: np.ones(1, np.float32)})]


def missing_file(folder):
    return [folder / IN_A_PATH]


def bad_file(folder):
    (folder / IN_A_PATH).write_text("nothing")
    return [folder / IN_A_PATH]


def missing_shard(folder):
    return [write_index(folder, {}, {"a": IN_A_PATH})]


def shard_elsewhere(folder):
    return [write_index(folder, {}, {HOSTILE: "../" + HOSTILE})]


def shard_without_it(folder):
    return [write_index(folder, {"1.safetensors": {"a": np.ones(1, np.float32)}}, {HOSTILE: "1.safetensors"})]


def key_twice(folder):
    path = folder / "m.safetensors.index.json"
    path.write_text("{" + ",".join([f"{json.dumps(HOSTILE)}:1"] * 2) + "}")
    return [path]


def two_indexes(folder):
    for name in ("a", IN_A_PATH):
        (folder / f"{name}.safetensors.index.json").write_text("{}")
    return [folder]


def no_pattern(folder):
    return [write(folder / "x", {"a": np.ones(1, np.float32)}), "--include", f"({IN_A_PATH}"]


def no_option(_folder):
    return ["x", f"--{IN_A_PATH}"]


MAKERS = [
    *(with_nan, truncated, integers, bad_offsets, bad_type, long_name, missing_file, bad_file, missing_shard),
    *(shard_elsewhere, shard_without_it, key_twice, two_indexes, no_pattern, no_option),
]


@pytest.mark.parametrize("make", MAKERS)
def test_an_error_spells_out_what_a_terminal_would_act_upon(tmp_path, make):
    done = gradtool("norm", *make(tmp_path), "--quiet")
    assert done.returncode in {1, 2, 3}
    refuse_raw(done.stdout + done.stderr)
    message, *hints = done.stderr.splitlines()
    assert message.startswith("gradtool: error: ")
    assert [hint[:8] for hint in hints] in ([], ["  hint: "])
    assert "end" in done.stderr
    assert "\\u202e" in done.stderr
    as_json = gradtool("norm", *make(tmp_path), "--json").stdout
    assert as_json.isascii()
    refuse_raw(as_json)
    assert "end" in json.loads(as_json)["errors"][0]["message"] + str(json.loads(as_json)["errors"][0])


def lay_out(folder):
    """A set of which everything has a hostile name: its folder, its file, its tensor, its metadata."""
    tensors = {HOSTILE: encode([3, 4], "F32"), "b": encode([0], "F32")}
    return write(folder / IN_A_PATH / f"{IN_A_PATH}.safetensors", tensors, {"n": HOSTILE, HOSTILE: "1"})


def test_plain_lines_spell_out_names(tmp_path):
    done = gradtool("norm", lay_out(tmp_path), "--per-tensor")
    assert done.returncode == 0
    refuse_raw(done.stdout)
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("tensor\t")]
    names = [row[-2] for row in rows if len(row) == 10]
    assert names == [SPELLED_OUT, "b"]
    assert done.stderr == ""


def test_json_holds_names_as_they_are_in_plain_ascii(tmp_path):
    path = lay_out(tmp_path)
    done = gradtool("clip", path, "--max-norm", "1", "--per-tensor", "--json")
    assert done.stdout.isascii()
    refuse_raw(done.stdout)
    row = json.loads(done.stdout)["data"]["per_tensor"][0]
    assert (row["name"], row["file"]) == (HOSTILE, str(path))


def test_metadata_that_is_no_number_is_spelled_out(tmp_path):
    path = lay_out(tmp_path)
    buffer = write(tmp_path / "buffer", {HOSTILE: encode([0, 0], "F32"), "b": encode([0], "F32")})
    done = gradtool("accumulate", path, "--into", buffer, "--weight-key", "n")
    assert done.returncode == 3
    refuse_raw(done.stderr)
    assert "owned" in done.stderr


@pytest.mark.parametrize("arguments", [["norm", "--per-tensor"], ["clip", "--max-norm", "1", "--per-tensor"]])
def test_tables_spell_out_names(tmp_path, arguments):
    code, shown = on_terminal(*arguments, lay_out(tmp_path), columns=400, TERM="dumb")
    assert code == 0
    refuse_raw(shown)
    assert SPELLED_OUT in shown


def test_an_error_on_a_terminal_is_spelled_out(tmp_path):
    code, shown = on_terminal("norm", *with_nan(tmp_path), columns=400, TERM="dumb")
    assert code == 1
    refuse_raw(shown)
    assert "\\u202e" in shown


def test_what_is_long_is_spelled_out_and_cut_in_the_middle():
    assert printable(HOSTILE) == SPELLED_OUT
    assert printable("plain é 漢") == "plain é 漢"
    code = "from gradtool import errors; from gradtool.report.messages import print_problems as p; "
    code += "p([errors.Problem('x', M)])"
    code = code.replace("M", "'a' * 9_000_000 + chr(27) + 'b' * 9_000_000")
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.startswith("gradtool: error: aaa")
    assert "a…b" in done.stderr
    assert len(done.stderr) < 21_000


# What a runner of CI jobs takes for a command: at the beginning of a line, and where an error is wrapped.
COMMANDS = ["::error::pwned", "a ::warning file=x::pwned", "b    ##[group]pwned"]


def commands_in(shown):
    """The lines that a runner would act upon, which takes off blanks; escape sequences and a frame count as such."""
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
    return [line for line in lines if re.match(r"[\W_]*?(::|##\[)", line)]


def lay_out_commands(folder):
    tensors = {name: encode([np.nan, 4], "F32") for name in COMMANDS}
    return write(folder / "x.safetensors", tensors, {"::debug::pwned": "1"})


@pytest.mark.parametrize("columns", [30, 40, 50, 60, 80, 200])
@pytest.mark.parametrize("arguments", [["norm", "--top", "3"], ["info"], ["clip", "--max-norm", "1"], ["check"]])
def test_no_line_on_a_terminal_is_a_command_to_a_runner_of_jobs(tmp_path, arguments, columns):
    code, shown = on_terminal(*arguments, lay_out_commands(tmp_path), columns=columns)
    assert code in {0, 1}
    assert "pwned" in shown
    assert commands_in(shown) == []


def test_the_commands_of_the_format_github_are_printed_and_no_others(tmp_path):
    code, shown = on_terminal("norm", lay_out_commands(tmp_path), "--top", "3", "--format", "github", columns=200)
    assert code == 1
    assert [line.split("::")[1].split()[0] for line in commands_in(shown)] == ["error"] * 3


def test_json_on_a_terminal_holds_names_as_they_are(tmp_path):
    path = lay_out_commands(tmp_path)
    for form in ("json", "jsonl"):
        shown = on_terminal("norm", path, "--top", "3", "--format", form, errors=False)[1]
        assert commands_in(shown) == []
        names = {row["name"] for line in shown.splitlines() for row in rows_in(json.loads(line))}
        assert names == set(COMMANDS)


def rows_in(document):
    return [document] if "name" in document else document["data"].get("per_tensor", [])


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("::error::x\n", ":\\x3aerror::x\n"),
        ("a::b\n \t::c::d\r::e", "a::b\n \t:\\x3ac::d\r:\\x3ae"),
        ("\x1b[1m\x1b[0m│ ::x", "\x1b[1m\x1b[0m│ :\\x3ax"),
        ("##[group]\n\n####\n x ##[", "#\\x23[group]\n\n####\n x #\\x23["),
        ("a ###[b] ##vso[c] ## [d]", "a ##\\x23[b] #\\x23vso[c] ## [d]"),
    ],
)
def test_what_begins_a_line_as_a_command_is_escaped(text, printed):
    assert without_commands(text) == printed
