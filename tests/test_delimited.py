"""Tables with a header line: `--format tsv`, `--format csv` and `--columns`."""

import csv
import io
import json
import math
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
from support import COMMAND, SAMPLES, encode, gradtool, gradtool_json, sample, snapshot, write
from terminal import on_terminal

from gradtool.ops.results import is_rows

NAN = float("nan")
SHARDED, MICRO, BUFFER = SAMPLES / "sharded", SAMPLES / "micro_0.safetensors", SAMPLES / "buffer.safetensors"
# Differ from call to call.
TIMES = {"seconds", "gb_per_s", "free_bytes"}
ROWS = {
    "norm --per-tensor": (["norm", SHARDED, "--per-tensor"], "per_tensor"),
    "norm --top": (["norm", SHARDED, "--top", "3"], "per_tensor"),
    "norm --by-file": (["norm", MICRO, "--by-file"], "per_file"),
    "norm --group": (["norm", SHARDED, "--group", "patch", "--group", "norm"], "per_group"),
    "norm --histogram": (["norm", MICRO, "--histogram"], "histogram"),
    "diff --top": (["diff", MICRO, BUFFER, "--top", "2"], "per_tensor"),
    "check": (["check", SAMPLES / "nan.safetensors"], "per_finding"),
    "digest": (["digest", MICRO], "per_tensor"),
    "info": (["info", MICRO], "per_tensor"),
    "clip --per-tensor": (["clip", SHARDED, "--max-norm", "1", "--per-tensor", "--dry-run"], "per_tensor"),
    "clip --group": (["clip", SHARDED, "--group", "patch:0.1", "--dry-run"], "per_group"),
    "accumulate": (["accumulate", MICRO, "--into", BUFFER, "--per-gradient", "--dry-run"], "per_gradient"),
    "layernorm-backward": (["layernorm-backward", SAMPLES / "layernorm.safetensors", "--dry-run"], "per_layer"),
}
RESULTS = {
    "norm": ["norm", SHARDED],
    "diff": ["diff", MICRO, BUFFER],
    "clip": ["clip", SHARDED, "--max-norm", "1", "--dry-run"],
    "accumulate": ["accumulate", MICRO, "--into", BUFFER, "--dry-run"],
    "zero": ["zero", SHARDED, "--dry-run"],
    "doctor": ["doctor", SAMPLES],
}


def tsv(text):
    """The header and the rows of TSV."""
    lines = [line.split("\t") for line in text.removesuffix("\n").split("\n")]
    return lines[0], lines[1:]


def cell(value):
    """A value of JSON as a cell has it."""
    if isinstance(value, list):
        return "x".join(map(str, value)) or "scalar"
    return {None: "", True: "true", False: "false"}[value] if value is None or value is True or value is False else (
        value if isinstance(value, str) else repr(value)
    )  # fmt: skip


def columns_of(row):
    return [key for key, value in row.items() if not (isinstance(value, (dict, list)) and key != "shape")]


def assert_same(line, row, columns):
    for key, text in zip(columns, line, strict=True):
        assert text == cell(row[key]) or key in TIMES, key


@pytest.mark.parametrize(("arguments", "field"), ROWS.values(), ids=ROWS)
def test_the_rows_that_were_requested_have_a_header_and_the_values_of_json(arguments, field):
    rows = json.loads(gradtool(*arguments, "--json").stdout)["data"][field]
    done = gradtool(*arguments, "--format", "tsv")
    header, lines = tsv(done.stdout)
    assert header == columns_of(rows[0])
    assert len(lines) == len(rows) > 0
    for line, row in zip(lines, rows, strict=True):
        assert_same(line, row, header)
    assert done.returncode == (1 if arguments[0] == "check" else 0)


@pytest.mark.parametrize("arguments", RESULTS.values(), ids=RESULTS)
def test_without_rows_the_result_is_one_line_with_the_fields_of_json_in_their_order(arguments):
    data = gradtool_json(*arguments)["data"]
    header, [line] = tsv(gradtool(*arguments, "--format", "tsv").stdout)
    assert header == [key for key in columns_of(data) if not is_rows(key)]
    assert_same(line, data, header)


def test_columns_are_chosen_and_ordered():
    done = gradtool("norm", SHARDED, "--top", "2", "--format", "tsv", "--columns", "norm,name", "--columns", "nan")
    rows = gradtool_json("norm", SHARDED, "--top", "2")["data"]["per_tensor"]
    expected = [["norm", "name", "nan"], *([repr(row["norm"]), row["name"], "0"] for row in rows)]
    assert done.stdout == "".join("\t".join(line) + "\n" for line in expected)
    assert gradtool("norm", SHARDED, "--format", "csv", "--columns", "norm").stdout == "norm\n2.770171426938526\n"
    done = gradtool("norm", SHARDED, "--columns", "tensors,norm", env={"GRADTOOL_FORMAT": "CSV"})
    assert done.stdout == "tensors,norm\n28,2.770171426938526\n"


def test_columns_select_a_table():
    def header_and_first(*arguments):
        header, lines = tsv(gradtool(*arguments, "--format", "tsv").stdout)
        return header, lines[0]

    assert header_and_first("info", SHARDED, "--columns", "dtype,tensors") == (["dtype", "tensors"], ["F32", "28"])
    assert header_and_first("info", SHARDED, "--columns", "dtype,name")[1] == ["F32", "blocks.0.fc1.bias"]
    assert header_and_first("info", SHARDED, "--columns", "files,tensors")[1] == ["2", "28"]
    assert header_and_first("norm", BUFFER, "--histogram", "--columns", "dtype,to_zero")[1] == ["F64", "0"]
    assert header_and_first("norm", SHARDED, "--per-tensor", "--columns", "elements")[1] == ["27651"]
    both = ["norm", SHARDED, "--per-tensor", "--by-file"]
    assert header_and_first(*both, "--columns", "elements,norm")[1] == ["27651", "2.770171426938526"]
    assert header_and_first(*both, "--columns", "name")[1] == ["blocks.0.fc1.bias"]


@pytest.mark.parametrize(
    ("arguments", "message", "hints"),
    [
        (
            ["--columns", "nrom"],
            "--columns: there is no column 'nrom'",
            ["did you mean norm", "result: norm, max_abs,"],
        ),
        (
            ["--columns", "norm,name"],
            "--columns: there is no column 'name'",
            ["--per-tensor adds it; columns of result"],
        ),
        (["--top", "1", "--columns", "coef"], "--columns: there is no column 'coef'", ["tensor: name, file, dtype,"]),
        (["--top", "1", "--columns", "name,bytes"], "--columns: no table has all of name, bytes", ["; result: norm"]),
        (
            ["--top", "1", "--by-file", "--columns", "norm,file"],
            "rows of several kinds are requested (tensor, file), but a table has rows of only one kind",
            ["request one kind, or name columns that only it has with --columns"],
        ),
        (["--columns", "norm,norm"], "--columns must be different names, separated by commas, not 'norm,norm'", []),
        (["--columns", "norm,"], "--columns must be different names, separated by commas, not 'norm,'", []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0].startswith("--") else "",
)
def test_columns_that_there_are_not_are_refused_before_anything_is_read(tmp_path, arguments, message, hints):
    for form in (["--format", "csv"], []):
        done = gradtool("norm", tmp_path / "missing", *arguments, *form)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[0] == f"gradtool: error: {message}"
        assert all(hint in done.stderr.partition("hint: ")[2] for hint in hints)


@pytest.mark.parametrize(
    ("arguments", "environment", "name"),
    [
        (["--json"], {}, "json"),
        (["--format", "jsonl"], {}, "jsonl"),
        (["--format", "github"], {}, "github"),
        ([], {"GRADTOOL_FORMAT": "json"}, "json"),
    ],
    ids=str,
)
def test_columns_are_refused_where_there_is_no_table_and_nothing_is_done(tmp_path, arguments, environment, name):
    sample(tmp_path)
    before = snapshot(tmp_path)
    call = ["clip", tmp_path, "--max-norm", "1", "--columns", "norm_before"]
    done = gradtool(*call, *arguments, env=environment)
    assert done.returncode == 2
    message = f"gradtool: error: --columns cannot be combined with the format {name}\n"
    assert done.stderr == f"{message}  hint: use --format tsv, or remove --columns\n"
    done = gradtool("clip", tmp_path, "--max-norm", "1", "--columns", "norm")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean norm_before or norm_after or norm_type? " in done.stderr
    assert snapshot(tmp_path) == before


def test_floats_keep_their_bits_and_others_are_as_in_json(tmp_path):
    tiny = write(tmp_path / "tiny", {"a": encode([5e-324], "F64"), "b": encode([0.1], "F64"), "s": encode(3.0, "F64")})
    header, lines = tsv(gradtool("norm", tiny, "--per-tensor", "--columns", "max_abs,shape").stdout)
    assert (header, [line[1] for line in lines]) == (["max_abs", "shape"], ["1", "1", "scalar"])
    assert [struct.pack("<d", float(line[0])) for line in lines] == [struct.pack("<d", x) for x in (5e-324, 0.1, 3.0)]
    bad = write(tmp_path / "bad", {"a": encode([NAN], "F32"), "b": encode([math.inf], "F32")})
    done = gradtool("norm", bad, "--per-tensor", "--columns", "norm,name")
    assert (done.returncode, done.stdout) == (1, "norm\tname\nNaN\ta\nInfinity\tb\n")
    assert len(done.stderr.splitlines()) == 2
    done = gradtool("clip", tiny, "--max-value", "1", "--dry-run", "--columns", "coef,clipped,dry_run")
    assert done.stdout == "coef\tclipped\tdry_run\n\ttrue\ttrue\n"
    assert done.returncode == 0


def test_names_are_escaped_in_tsv_and_quoted_in_csv(tmp_path):
    names = ['a"b,c', "tab\there", "line\nbreak", "::error::x", ",::y", "##[z]", "é"]
    path = write(tmp_path / "x", dict.fromkeys(names, np.ones(1, np.float32)))
    escaped = ['a"b,c', "tab\\there", "line\\nbreak", ":\\x3aerror::x", ",:\\x3ay", "#\\x23[z]", "é"]
    call = ["norm", path, "--per-tensor", "--columns", "name,norm"]
    done = gradtool(*call)
    assert done.stdout.splitlines()[1:] == [f"{name}\t1.0" for name in escaped]
    done = gradtool(*call, "--format", "csv")
    assert list(csv.reader(io.StringIO(done.stdout))) == [["name", "norm"], *([name, "1.0"] for name in escaped)]
    assert done.stdout.splitlines()[1] == '"a""b,c",1.0'
    assert "\r" not in done.stdout
    # A line of one empty cell is not an empty line, which readers skip.
    done = gradtool("norm", path, "--group", "a", "--columns", "group", "--format", "csv")
    assert done.stdout == 'group\na\n""\n'


@pytest.mark.parametrize("form", ["tsv", "csv"])
def test_on_failure_and_if_quiet_stdout_is_empty(tmp_path, form):
    bad = write(tmp_path / "bad", {"a": encode([NAN], "F32")})
    for arguments, code in (
        (["norm", tmp_path / "missing"], 3),
        (["clip", bad, "--max-norm", "1"], 1),
        (["clop"], 2),
        (["norm", bad, "--quiet"], 1),
    ):
        done = gradtool(*arguments, "--format", form)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith("gradtool: error: ")


def test_no_rows_are_a_header_alone(tmp_path):
    assert gradtool("check", MICRO, "--columns", "severity,code").stdout == "severity\tcode\n"
    assert gradtool("recover", tmp_path, "--format", "csv").stdout == "outcome,files,pid,file\n"
    assert gradtool("recover", tmp_path, "--format", "csv", "--columns", "finished").stdout == "finished\n0\n"


def test_thousands_of_rows_are_written_in_parts_and_a_closed_pipe_is_an_error(tmp_path):
    path = write(tmp_path / "x", {f"{i}." + "n" * 1000: np.ones(1, np.float32) for i in range(300)})
    call = [*COMMAND, "norm", str(path), "--per-tensor", "--columns", "name"]
    whole = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    assert len(whole.splitlines()) == 301
    reads_a_bit = f"import subprocess as s; p = s.Popen({call!r}, stdout=s.PIPE); p.stdout.read(1); p.stdout.close()"
    done = subprocess.run(
        [sys.executable, "-c", f"{reads_a_bit}; print(p.wait())"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "5\n"
    assert "cannot print the result on stdout" in done.stderr


def test_a_terminal_shows_only_the_table_with_the_columns_in_their_order():
    code, shown = on_terminal("norm", SHARDED, "--top", "2", "--columns", "norm,nan,name", columns=80, errors=False)
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()]
    assert code == 0
    assert lines[0] == ["norm", "nan", "name"]
    assert lines[2:] == [["1.36655", "0", "blocks.0.qkv.weight"], ["0.9903", "0", "patch_embed.bias"]]
    shown = on_terminal("norm", SHARDED, "--columns", "norm,tensors", columns=40, errors=False)[1]
    assert "2.77017" in shown
    assert "elements" not in shown
    # A format that was given is the same on a terminal.
    shown = on_terminal("norm", SHARDED, "--format", "tsv", "--columns", "norm,tensors", errors=False)[1]
    assert shown == "norm\ttensors\n2.770171426938526\t28\n"


@pytest.mark.parametrize("arguments", [*(call for call, _ in ROWS.values()), *RESULTS.values()], ids=[*ROWS, *RESULTS])
def test_csv_has_the_same_cells_as_tsv(arguments):
    header, lines = tsv(gradtool(*arguments, "--format", "tsv").stdout)
    rows = csv.DictReader(io.StringIO(gradtool(*arguments, "--format", "csv").stdout))
    assert [[row[key] for key in header if key not in TIMES] for row in rows] == [
        [text for key, text in zip(header, line, strict=True) if key not in TIMES] for line in lines
    ]
    assert list(rows.fieldnames) == header


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_chosen_column_is_left_out_on_a_narrow_terminal(width):
    names = ["name", "rel_l2", "cosine", "max_ulp", "norm_a", "norm_b", "nonfinite_both", "file"]
    call = ["diff", MICRO, BUFFER, "--top", "2", "--columns", ",".join(names)]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(*call, columns=width, errors=False)[1])
    first = gradtool_json("diff", MICRO, BUFFER, "--top", "2")["data"]["per_tensor"][0]
    assert {key for key in names if key.replace("_", " ") in shown} | {"name", "file"} == set(names)
    assert all(f"{first[key]:.6g}" in shown for key in ("rel_l2", "cosine", "norm_a", "norm_b"))
    assert "not shown" not in shown
    assert "in all rows" not in shown
