"""What a command prints: JSON, plain lines, tables, warnings and progress."""

import io
import math
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support import (
    SAMPLES,
    encode,
    gradtool,
    gradtool_json,
    read,
    sample,
    write,
)
from terminal import on_terminal

from gradtool import clip, norm
from gradtool.backends.choose import choose
from gradtool.errors import as_command, size_of
from gradtool.report import progress as progress_module
from gradtool.report.tables import show_tables

CALL_KEYS = [
    "warnings",
    "files",
    "tensors",
    "elements",
    "bytes",
    "backend",
    "backend_why",
    "threads",
    "engine",
    "workers",
    "hosts",
    "retries",
    "seconds",
    "timings",
]
FACT_KEYS = ["norm_type", "max_abs", "nan", "inf", "zeros"]
WRITTEN_KEYS = ["dry_run", "files_written", "bytes_written"]
ONCE_KEYS = ["dry_run", "already_done", "files_written", "bytes_written"]
TIMING_KEYS = [
    "read_bytes", "read_seconds", "read_gb_per_s", "compute_seconds", "compute_gb_per_s", "write_seconds",
    "write_gb_per_s", "commit_seconds", "total_seconds", "total_gb_per_s",
]  # fmt: skip
ROW_KEYS = ["name", "file", "dtype", "shape", "norm", "max_abs", "nan", "inf", "zeros"]
FILE_ROW_KEYS = ["file", "tensors", "elements", "norm", "max_abs", "nan", "inf", "zeros"]
DTYPE_ROW_KEYS = [
    "dtype", "overflow_at_least", "overflow_at_most", "to_subnormal", "to_zero", "min_scale_log2", "max_scale_log2",
    "min_scale_values_log2", "min_scale_norm_log2",
]  # fmt: skip
GROUP_ROW_KEYS = ["group", "tensors", "norm"]
CLIPPED_GROUP_KEYS = ["group", "tensors", "norm_before", "norm_after", "coef", "clipped"]
CLIPPED_ROW_KEYS = ["name", "file", "dtype", "shape", "norm_before", "norm_after", "coef", "clipped"]


def test_the_keys_of_norm_in_json_are_pinned(tmp_path):
    answer = gradtool_json("norm", sample(tmp_path), "--per-tensor", "--by-file", "--histogram", "--group", "a")
    assert list(answer) == ["gradtool", "schema", "command", "status", "exit_code", "data", "errors"]
    assert [answer[key] for key in ("gradtool", "schema", "command", "status", "exit_code", "errors")] == [
        "0.1.0", 1, "norm", "ok", 0, [],
    ]  # fmt: skip
    assert list(answer["data"]) == [
        "norm", "max_abs", "norm_type", "nan", "inf", "zeros", *CALL_KEYS, "histogram", "per_dtype", "per_tensor",
        "per_file", "per_group",
    ]  # fmt: skip
    assert list(answer["data"]["timings"]) == TIMING_KEYS
    assert answer["data"]["histogram"] == [{"exponent": 2, "count": 1}, {"exponent": 3, "count": 1}]
    assert [list(row) for row in answer["data"]["per_dtype"]] == [DTYPE_ROW_KEYS] * 6
    assert [list(row) for row in answer["data"]["per_tensor"]] == [[*ROW_KEYS, "histogram"]] * 2
    assert [list(row) for row in answer["data"]["per_file"]] == [[*FILE_ROW_KEYS, "histogram"]]
    assert [list(row) for row in answer["data"]["per_group"]] == [GROUP_ROW_KEYS] * 2
    assert (answer["data"]["norm"], answer["data"]["zeros"]) == (5.0, 2)


def test_without_a_histogram_rows_have_none(tmp_path):
    data = gradtool_json("norm", sample(tmp_path), "--per-tensor", "--by-file")["data"]
    assert [list(row) for row in data["per_tensor"]] == [ROW_KEYS] * 2
    assert [list(row) for row in data["per_file"]] == [FILE_ROW_KEYS]
    assert (data["histogram"], data["per_dtype"]) == ([], [])


def test_the_keys_of_digest_in_json_are_pinned(tmp_path):
    data = gradtool_json("digest", sample(tmp_path))["data"]
    assert list(data) == ["digest", "same", *CALL_KEYS, "per_tensor"]
    assert list(data["per_tensor"][0]) == ["name", "file", "digest", "dtype", "shape"]
    assert data["same"] is None


def test_the_keys_of_clip_in_json_are_pinned(tmp_path):
    answer = gradtool_json("clip", sample(tmp_path), "--max-norm", "1", "--per-tensor")
    assert list(answer["data"]) == [
        "wrote", "norm_before", "norm_after", "coef", "clipped", *FACT_KEYS, "max_norm", "max_value", "total_norm",
        "unscale", "agc", "units", "units_clipped", "limit", "state", "steps", "zeros_before", *ONCE_KEYS,
        *CALL_KEYS, "per_tensor", "per_group",
    ]  # fmt: skip
    assert [list(row) for row in answer["data"]["per_tensor"]] == [CLIPPED_ROW_KEYS] * 2
    assert answer["data"]["clipped"] is True
    answer = gradtool_json("clip", sample(tmp_path), "--group", "a:1")
    assert [list(row) for row in answer["data"]["per_group"]] == [CLIPPED_GROUP_KEYS] * 2


def test_the_keys_of_accumulate_in_json_are_pinned(tmp_path):
    grad = write(tmp_path / "grad", {"a": encode([1, math.nan], "F32"), "b": encode([0, 0], "F32")})
    good = write(tmp_path / "good", {"a": encode([1, 2], "F32"), "b": encode([0, 0], "F32")})
    answer = gradtool_json(
        "accumulate",
        grad,
        good,
        "--into",
        sample(tmp_path),
        "--nonfinite",
        "skip",
        "--clip-each",
        "9",
        "--per-gradient",
    )
    assert list(answer["data"]) == [
        "wrote", "norm_before", "norm_after", "sum_norm", "coef", "clipped", "taken", "skipped", "weight_sum",
        "updated", *FACT_KEYS, "max_norm", "unscale", "into_weight", "zeros_before", "missing", "extra", "copied",
        *ONCE_KEYS, *CALL_KEYS, "per_gradient", "per_screened",
    ]  # fmt: skip
    assert [list(row) for row in answer["data"]["per_gradient"]] == [
        ["weight", "taken", "norm", "coef", "nan", "inf", "cosine", "distance", "missing", "extra", "screened", "file"]
    ] * 2
    assert [(row["taken"], row["nan"], row["norm"]) for row in answer["data"]["per_gradient"]] == [
        (False, 1, "NaN"), (True, 0, math.sqrt(5)),
    ]  # fmt: skip
    assert (answer["exit_code"], answer["data"]["warnings"][0]["file"]) == (0, str(grad))


def test_what_is_skipped_is_warned_of_and_quiet_keeps_that_back(tmp_path):
    bad = write(tmp_path / "bad", {"a": encode([1, math.nan], "F32"), "b": encode([0, 0], "F32")})
    good = write(tmp_path / "good", {"a": encode([1, 2], "F32"), "b": encode([0, 0], "F32")})
    command = ["accumulate", bad, good, "--into", sample(tmp_path), "--nonfinite", "skip", "--per-gradient"]
    done = gradtool(*command)
    assert (done.returncode, done.stderr) == (
        0,
        f"gradtool: warning: {bad}: tensor 'a': whole gradient skipped: 1 NaN, 0 Inf, the first at [1]\n",
    )
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("gradient\t")]
    assert [(row[2], row[-1]) for row in rows] == [("no", str(bad)), ("yes", str(good))]
    assert gradtool(*command, "--quiet").stderr == ""


def test_a_total_that_is_dropped_is_warned_of_on_stderr_and_in_json(tmp_path):
    metadata = {"n": "5", "gradtool.weight_key": "n", "gradtool.weighted": "sum"}
    path = write(tmp_path / "sum", {"a": encode([1], "F32"), "b": encode([2], "F32")}, metadata)
    message = "total weight removed, because it does not match the new content: 'n' = '5'"
    hint = "use --overwrite to store the next total"
    answer = gradtool_json("zero", path, "--include", "a", "--dry-run")
    assert answer["data"]["warnings"] == [
        {"code": "weight-dropped", "message": message, "file": str(path), "hint": hint}
    ]
    done = gradtool("zero", path, "--include", "a")
    assert (done.returncode, done.stderr) == (0, f"gradtool: warning: {path}: {message}\n  hint: {hint}\n")
    assert "warnings" not in done.stdout


def test_the_keys_of_zero_in_json_are_pinned(tmp_path):
    answer = gradtool_json("zero", sample(tmp_path))
    rest = [key for key in CALL_KEYS if key not in {"elements", "bytes"}]
    assert list(answer["data"]) == ["wrote", "elements", "bytes", *ONCE_KEYS, *rest]
    assert (answer["data"]["elements"], answer["data"]["files_written"]) == (4, 1)


def test_the_keys_of_layernorm_backward_in_json_are_pinned(tmp_path):
    answer = gradtool_json("layernorm-backward", SAMPLES / "layernorm.safetensors", "--output", tmp_path / "grads")
    assert list(answer["data"]) == ["wrote", "layers", "kind", "invertible", *WRITTEN_KEYS, *CALL_KEYS, "per_layer"]
    (row,) = answer["data"]["per_layer"]
    assert list(row) == [
        "shape", "rows", "columns", "x_grad_norm", "scale_grad_norm", "bias_grad_norm", "seconds", "gb_per_s",
        "name", "file",
    ]  # fmt: skip
    assert (row["name"], row["shape"], row["rows"], row["columns"]) == ("blocks.0.norm", [4, 16, 40], 64, 40)
    assert list(read(tmp_path / "grads")) == [f"blocks.0.norm.{name}_grad" for name in ("X", "scale", "bias")]


def test_floats_in_json_read_back_to_the_same_bits(tmp_path):
    path = write(tmp_path / "x", {"a": np.random.default_rng(1).standard_normal(1000)})
    assert gradtool_json("norm", path)["data"]["norm"].hex() == norm(path).norm.hex()


def test_nonfinite_numbers_are_strings_in_json(tmp_path):
    path = write(tmp_path / "x", {"a": encode([1, math.nan, math.inf], "F32")})
    answer = gradtool_json("norm", path, "--top", 1)
    assert (answer["status"], answer["exit_code"]) == ("found", 1)
    assert (answer["data"]["norm"], answer["data"]["max_abs"]) == ("NaN", "Infinity")
    assert answer["errors"] == [
        {"code": "nonfinite", "message": "1 NaN, 1 Inf, the first at [1]", "file": str(path), "tensor": "a", "index": 1}
    ]


def test_plain_lines_are_for_grep_and_awk(tmp_path):
    done = gradtool("norm", sample(tmp_path), "--per-tensor", "--verbose")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    facts = {fields[0]: fields[1] for fields in lines if fields[0] != "tensor"}
    assert (facts["norm"], facts["zeros"], facts["backend"]) == ("5.0", "2", "cpu")
    path = str(tmp_path / "x.safetensors")
    assert [fields for fields in lines if fields[0] == "tensor"] == [
        ["tensor", "F32", "2", "5.0", "4.0", "0", "0", "0", "a", path],
        ["tensor", "BF16", "2", "0.0", "0.0", "0", "0", "2", "b", path],
    ]


def test_a_histogram_off_a_terminal_is_lines(tmp_path):
    path = sample(tmp_path)
    done = gradtool("norm", path, "--histogram", "--per-tensor")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    own = [str(path)]
    assert [fields for fields in lines if fields[0] == "histogram"] == [
        ["histogram", "2", "1"],
        ["histogram", "3", "1"],
        ["histogram", "2", "1", "a", *own],
        ["histogram", "3", "1", "a", *own],
    ]
    assert [fields for fields in lines if fields[:2] == ["dtype", "F16"]] == [
        ["dtype", "F16", "0", "0", "0", "0", "-15", "13", "-15", "-15"]
    ]
    assert [fields for fields in lines if fields[0] == "tensor"] == [
        ["tensor", "F32", "2", "5.0", "4.0", "0", "0", "0", "a", *own],
        ["tensor", "BF16", "2", "0.0", "0.0", "0", "0", "2", "b", *own],
    ]


def test_clip_always_says_before_after_coefficient_and_whether(tmp_path):
    path = sample(tmp_path)
    for max_norm, expected in (("1", {"norm_before": "5.0", "clipped": "yes"}), ("2", {"clipped": "no"})):
        done = gradtool("clip", path, "--max-norm", max_norm)
        facts = dict(line.split("\t") for line in done.stdout.splitlines())
        assert {"norm_before", "norm_after", "coef", "clipped"} <= facts.keys()
        assert facts | expected == facts
    assert float(facts["norm_after"]) == pytest.approx(1, rel=1e-6)


def test_quiet_says_nothing(tmp_path):
    done = gradtool("clip", sample(tmp_path), "--max-norm", "1", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_fail_above(tmp_path):
    path = sample(tmp_path)
    assert gradtool("norm", path, "--fail-above", "5").returncode == 0
    done = gradtool("norm", path, "--fail-above", "4.5")
    assert (done.returncode, done.stderr) == (1, "gradtool: error: the norm 5.0 is above the limit 4.5\n")
    assert "norm\t5.0\n" in done.stdout


def test_names_are_never_printed_raw(tmp_path):
    path = write(tmp_path / "x", {"\x1b[31mred\n\u202e": encode([math.nan], "F32")})
    done = gradtool("norm", path, "--per-tensor")
    assert "\x1b" not in done.stdout + done.stderr
    assert "\u202e" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "\\x1b[31mred\\n\\u202e" in done.stdout


def test_a_terminal_that_lacks_a_letter_gets_it_spelled_out(tmp_path):
    path = write(tmp_path / "x", {"漢": encode([3, 4], "F32")})
    done = gradtool("clip", path, "--max-norm", "1", "--per-tensor", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "\\u6f22" in done.stdout


def test_many_problems_are_cut_off_on_stderr_and_whole_in_json(tmp_path):
    path = write(tmp_path / "x", {f"t{i}": encode([math.nan], "F32") for i in range(50)})
    lines = gradtool("norm", path).stderr.splitlines()
    assert (len(lines), lines[-1]) == (21, "gradtool: error: and 30 more; --json lists them all")
    assert len(gradtool_json("norm", path)["errors"]) == 50


def test_the_result_says_what_computed():
    why = gradtool_json("norm", SAMPLES / "buffer.safetensors")["data"]["backend_why"]
    assert why == as_command(choose().why)


PROGRESS = """
import sys
import gradtool.report.progress as progress
progress.PATIENCE_SECONDS = float(sys.argv.pop(1))
from gradtool.cli import main
main()
"""


@pytest.mark.parametrize(("patience", "shown"), [("0", True), ("3600", False)])
def test_a_progress_bar_shows_on_a_terminal_when_the_work_takes_long(tmp_path, patience, shown):
    path = write(tmp_path / "x", {"a": np.ones(3_000_000, np.float32)})
    code, text = on_terminal("norm", path, "--json", command=[sys.executable, "-P", "-c", PROGRESS, patience])
    assert code == 0
    assert ("━" in text) == shown
    # What rich takes for the total while it knows none.
    assert "0/100 bytes" not in text


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def test_the_rate_of_the_bar_is_that_of_all_passes(monkeypatch):
    times = iter([0.0, 10.0, 20.0, 30.0, 40.0])
    terminal = FakeTerminal()
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(perf_counter=times.__next__))
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    with progress_module.progress("clip", wanted=True) as advance:
        advance("measuring", 3_000_000, 6_400_000)
        advance("measuring", 6_400_000, 6_400_000)
        # The same title and bytes again: another pass.
        advance("measuring", 6_400_000, 6_400_000)
        advance("clipping", 3_200_000, 6_400_000)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    numbers = re.findall(r"(\w+) \S*━\S* (\S+ MB of \S+ MB), (\S+ kB/s)", shown)
    assert list(dict.fromkeys(numbers)) == [
        ("measuring", "3.0 MB of 6.4 MB", "300 kB/s"),
        ("measuring", "6.4 MB of 6.4 MB", "320 kB/s"),
        ("measuring", "6.4 MB of 6.4 MB", "427 kB/s"),
        ("clipping", "3.2 MB of 6.4 MB", "400 kB/s"),
    ]


def test_the_rate_of_a_result_is_that_of_all_passes_too(tmp_path):
    path = write(tmp_path / "x", {"a": np.ones(900_000, np.float32)})
    done, passes = [], set()
    result = clip(path, max_norm=1, progress=lambda title, now, _: (done.append(now), passes.add(title)))
    timings = result.call.timings
    assert passes == {"measuring", "clipping"}
    assert timings.total_gb_per_s * 1e9 * timings.total_seconds == pytest.approx(3_600_000 + path.stat().st_size)
    assert (
        sum(now for now, after in zip(done, [*done[1:], 0], strict=True) if after <= now)
        == 3_600_000 + path.stat().st_size
    )


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (31_552, "31.6 kB"), (99_949, "99.9 kB"), (99_950, "100 kB"),
        (999_499, "999 kB"), (999_950, "1.0 MB"), (6_432_000_000, "6.4 GB"), (0.2, "0 B"), (5e17, "500 PB"),
    ],
)  # fmt: skip
def test_sizes_have_units(nbytes, text):
    assert size_of(nbytes) == text


@pytest.mark.parametrize(("seconds", "shown"), [(0.0994, "total 0.099 s\n"), (0.1, "total 0.100 s (123 MB/s)\n")])
def test_short_work_has_no_rate(tmp_path, capsys, seconds, shown):
    result = norm(sample(tmp_path))
    timings = replace(result.call.timings, total_seconds=seconds, total_gb_per_s=0.1234)
    show_tables("norm", replace(result, call=replace(result.call, timings=timings)), verbose=False)
    assert shown in capsys.readouterr().out


def test_a_dry_run_is_told_once_and_numbers_on_a_terminal_are_for_people(tmp_path):
    path = write(tmp_path / "x", {"a": np.ones(30_000, np.float32)})
    shown = on_terminal("clip", path, "--max-norm", "1", "--dry-run", errors=False)[1]
    assert (shown.count("dry"), shown.count("written")) == (1, 0)
    assert "30,000 elements, 120 kB\n" in shown
    assert "173.205\n" in shown
    lines = gradtool("clip", path, "--max-norm", "1", "--dry-run").stdout.splitlines()
    assert {"dry_run\tyes", "norm_before\t173.20508075688772", "elements\t30000", "bytes\t120000"} <= set(lines)


def test_a_factor_that_is_not_1_does_not_look_like_1(tmp_path):
    path = write(tmp_path / "x", {"a": encode([3, 4], "F32")})
    for max_norm, coef in ((5, "0.999999800000"), (6, "1")):
        shown = on_terminal("clip", path, "--max-norm", max_norm, "--dry-run", errors=False)[1]
        assert re.search(rf"coef +\S*{coef}", shown)


def test_a_cosine_that_is_not_1_does_not_look_like_1(tmp_path):
    a = write(tmp_path / "a", {"t": np.array([1.0, 0.0])})
    for other, cosine in ((1e-4, "0.999999995"), (0.0, r"1\s")):
        b = write(tmp_path / "b", {"t": np.array([1.0, other])})
        assert re.search(rf"cosine +\S*{cosine}", on_terminal("diff", a, b, errors=False)[1]), cosine


def test_off_a_terminal_there_is_no_progress_bar(tmp_path):
    path = write(tmp_path / "x", {"a": np.ones(3_000_000, np.float32)})
    command = [sys.executable, "-P", "-c", PROGRESS, "0", "norm", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_a_terminal_gets_tables(tmp_path):
    path = write(tmp_path / "x", {"a": encode([3, 4], "F32"), "[bold]b": encode([1], "F32")})
    code, shown = on_terminal("norm", path, "--top", "2")
    assert code == 0
    assert "5.09902\n" in shown
    assert "[bold]b" in shown
    code, shown = on_terminal("clip", path, "--max-norm", "1")
    assert code == 0
    for label in ("norm before", "norm after", "coef", "clipped", "yes"):
        assert label in shown
