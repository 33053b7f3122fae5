import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import (
    COMMAND,
    NUMPY_TYPES,
    SAMPLES,
    encode,
    gradtool,
    gradtool_json,
    read,
    snapshot,
    with_header,
    write,
    write_index,
)
from tiers import EXHAUSTIVE

from gradtool import norm
from gradtool.backends import choose

ONES = np.ones(2, np.float32)


def sample(folder):
    return write(folder / "x.safetensors", {"a": encode([3, 4], "F32"), "b": encode([0, 0], "BF16")})


def test_version():
    done = gradtool("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, "gradtool 0.1.0\n", "")


COMMANDS = {
    "norm": "--fail-above",
    "clip": "--max-value",
    "accumulate": "--weight-key",
    "zero": "--include",
    "layernorm-backward": "--inv-std-dev",
}


def test_help_names_every_command():
    done = gradtool("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {command} " in done.stdout for command in COMMANDS)
    assert "..." not in done.stdout.split("Commands:")[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_its_options_and_an_example(command):
    done = gradtool(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"gradtool {command} [OPTIONS]" in done.stdout.splitlines()[0]
    assert COMMANDS[command] in done.stdout
    assert f"Examples:\n    gradtool {command} " in done.stdout


@pytest.mark.parametrize("command", [*COMMANDS, "recover"])
def test_help_has_a_heading_for_each_group_of_options_and_fits_80_columns(command):
    lines = gradtool(command, "--help").stdout.splitlines()
    groups = {
        "norm": ["Options", "Selection", "Compute"],
        "zero": ["Selection", "Output", "Compute"],
        "recover": ["Options"],
    }.get(command, ["Options", "Selection", "Output", "Compute"])
    headings = [line for line in lines if re.fullmatch(r"\w+:", line)]
    assert headings == [f"{title}:" for title in ("Arguments", *groups, "General")]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("columns", [40, 60])
@pytest.mark.parametrize("command", ["", *COMMANDS, "recover"])
def test_help_on_a_narrow_terminal_breaks_lines_between_words(command, columns):
    arguments = [command, "--help"] if command else ["--help"]
    wide, narrow = (gradtool(*arguments, env={"COLUMNS": str(width)}).stdout for width in (80, columns))
    # The name of the command stays whole, and so do examples, which are to be copied.
    text = re.sub(r"(?s)^Usage: .*?\n|Examples:.*?\n\n", "", narrow)
    assert max(map(len, text.splitlines())) <= columns
    assert narrow.split() == wide.split()


def test_without_a_command_the_help_is_shown():
    assert gradtool().stdout == gradtool("--help").stdout


CALL_KEYS = ["files", "tensors", "elements", "bytes", "backend", "backend_why", "threads", "seconds", "timings"]
NORM_KEYS = ["norm_type", "norm", "max_abs", "nan", "inf", "zeros"]
CLIP_KEYS = [
    "max_norm", "max_value", "total_norm", "unscale", "norm_before", "norm_after", "coef", "clipped", "dry_run",
    "files_written", "bytes_written",
]  # fmt: skip
ROW_KEYS = ["name", "file", "dtype", "shape", "norm", "max_abs", "nan", "inf", "zeros"]
CLIPPED_ROW_KEYS = ["name", "file", "dtype", "shape", "norm_before", "norm_after", "coef", "clipped"]


def test_the_keys_of_norm_in_json_are_pinned(tmp_path):
    answer = gradtool_json("norm", sample(tmp_path), "--per-tensor")
    assert list(answer) == ["gradtool", "schema", "command", "status", "exit_code", "data", "errors"]
    assert [answer[key] for key in ("gradtool", "schema", "command", "status", "exit_code", "errors")] == [
        "0.1.0", 1, "norm", "ok", 0, [],
    ]  # fmt: skip
    assert list(answer["data"]) == [*NORM_KEYS, *CALL_KEYS, "per_tensor"]
    assert [list(row) for row in answer["data"]["per_tensor"]] == [ROW_KEYS] * 2
    assert (answer["data"]["norm"], answer["data"]["zeros"]) == (5.0, 2)


def test_the_keys_of_clip_in_json_are_pinned(tmp_path):
    answer = gradtool_json("clip", sample(tmp_path), "--max-norm", "1", "--per-tensor")
    assert list(answer["data"]) == [*NORM_KEYS, *CLIP_KEYS, *CALL_KEYS, "per_tensor"]
    assert [list(row) for row in answer["data"]["per_tensor"]] == [CLIPPED_ROW_KEYS] * 2
    assert answer["data"]["clipped"] is True


WRITTEN_KEYS = ["dry_run", "files_written", "bytes_written"]


def test_the_keys_of_accumulate_in_json_are_pinned(tmp_path):
    grad = write(tmp_path / "grad", {"a": encode([1, math.nan], "F32"), "b": encode([0, 0], "F32")})
    good = write(tmp_path / "good", {"a": encode([1, 2], "F32"), "b": encode([0, 0], "F32")})
    answer = gradtool_json("accumulate", sample(tmp_path), grad, good, "--nonfinite", "skip", "--clip-each", "9")
    assert list(answer["data"]) == [
        *NORM_KEYS, "norm_before", "norm_after", "max_norm", "sum_norm", "coef", "clipped", "taken", "skipped",
        "weight_sum", "updated", *WRITTEN_KEYS, "warnings", *CALL_KEYS, "per_gradient",
    ]  # fmt: skip
    assert [list(row) for row in answer["data"]["per_gradient"]] == [
        ["weight", "taken", "norm", "coef", "nan", "inf", "file"]
    ] * 2
    assert [(row["taken"], row["nan"], row["norm"]) for row in answer["data"]["per_gradient"]] == [
        (False, 1, "NaN"), (True, 0, math.sqrt(5)),
    ]  # fmt: skip
    assert (answer["exit_code"], answer["data"]["warnings"][0]["file"]) == (0, str(grad))


def test_what_is_skipped_is_warned_of_and_quiet_keeps_that_back(tmp_path):
    bad = write(tmp_path / "bad", {"a": encode([1, math.nan], "F32"), "b": encode([0, 0], "F32")})
    good = write(tmp_path / "good", {"a": encode([1, 2], "F32"), "b": encode([0, 0], "F32")})
    command = ["accumulate", sample(tmp_path), bad, good, "--nonfinite", "skip"]
    done = gradtool(*command)
    assert (done.returncode, done.stderr) == (
        0,
        f"gradtool: warning: {bad}: tensor 'a': whole gradient skipped: 1 NaN, 0 Inf, the first at index 1\n",
    )
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("gradient\t")]
    assert [(row[2], row[-1]) for row in rows] == [("no", str(bad)), ("yes", str(good))]
    assert gradtool(*command, "--quiet").stderr == ""


def test_the_keys_of_zero_in_json_are_pinned(tmp_path):
    answer = gradtool_json("zero", sample(tmp_path))
    assert list(answer["data"]) == [*WRITTEN_KEYS, *CALL_KEYS]
    assert (answer["data"]["elements"], answer["data"]["files_written"]) == (4, 1)


def test_the_keys_of_layernorm_backward_in_json_are_pinned(tmp_path):
    answer = gradtool_json("layernorm-backward", SAMPLES / "layernorm.safetensors", "--output", tmp_path / "grads")
    assert list(answer["data"]) == ["kind", "invertible", "layers", *WRITTEN_KEYS, *CALL_KEYS, "per_layer"]
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
        {"code": "nonfinite", "message": "1 NaN, 1 Inf, the first at index 1", "file": str(path), "tensor": "a"}
    ]


def test_plain_lines_are_for_grep_and_awk(tmp_path):
    done = gradtool("norm", sample(tmp_path), "--per-tensor")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    facts = {fields[0]: fields[1] for fields in lines if fields[0] != "tensor"}
    assert (facts["norm"], facts["zeros"], facts["backend"]) == ("5.0", "2", "cpu")
    path = str(tmp_path / "x.safetensors")
    assert [fields for fields in lines if fields[0] == "tensor"] == [
        ["tensor", "F32", "2", "5.0", "4.0", "0", "0", "0", "a", path],
        ["tensor", "BF16", "2", "0.0", "0.0", "0", "0", "2", "b", path],
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


def test_a_path_that_is_no_text_works(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"gr\xffad.safetensors")  # noqa: PTH118 - bytes
    Path(os.fsdecode(path)).write_bytes(sample(tmp_path).read_bytes())
    assert gradtool("norm", os.fsdecode(path), "--top", "1").returncode == 0
    assert gradtool_json("norm", os.fsdecode(path))["data"]["norm"] == 5.0


def test_files_from_standard_input(tmp_path):
    paths = [write(tmp_path / f"{i} .safetensors", {"a": encode([2], "F32")}) for i in range(4)]
    text = "\0".join(map(str, paths)) + "\0"
    assert gradtool_json("norm", "--files-from", "-", input=text)["data"]["norm"] == 4.0


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def lay_out_bad_inputs(folder):
    good = sample(folder)
    (folder / "truncated").write_bytes(good.read_bytes()[:-3])
    (folder / "trailing").write_bytes(good.read_bytes() + b"\0")
    (folder / "text").write_text("not a tensor in sight")
    (folder / "over").write_bytes(with_header({}, length=2**40))
    (folder / "overlap").write_bytes(with_header({"a": GOOD, "b": GOOD | {"data_offsets": [4, 12]}}, bytes(12)))
    write(folder / "integers", {"ids": np.ones(2, np.int32)})
    write_index(folder / "lost", {"1.safetensors": {"a": ONES}}, {"a": "1.safetensors", "b": "2.safetensors"})
    write_index(folder / "unheld", {"1.safetensors": {"a": ONES}}, {"a": "1.safetensors", "b": "1.safetensors"})
    write_index(folder / "unmapped", {"1.safetensors": {"a": ONES, "b": ONES}}, {"a": "1.safetensors"})
    for name in ("1", "2"):
        write(folder / "twice" / f"{name}.safetensors", {"a": ONES})
    (folder / "empty").mkdir()
    write(folder / "larger", {"a": np.ones((2, 2), np.float32), "b": encode([0, 0], "BF16")})
    write(folder / "fewer", {"a": ONES}, {"num_tokens": "many"})
    write(folder / "norm", {"X": np.ones((2, 3)), "Y_grad": np.ones((2, 3)), "scale": np.ones(4)})


# By what is wrong: the arguments, the exit code, and what the message says.
BAD_INPUTS = {
    "no safetensors file": ("text", 3, "not a safetensors file"),
    "truncated": ("truncated", 3, "truncated: the header says"),
    "trailing bytes": ("trailing", 3, "trailing bytes"),
    "header over the limit": ("over", 3, "over the limit"),
    "overlapping offsets": ("overlap", 3, "bad offsets"),
    "index names a missing shard": ("lost", 3, "2.safetensors, which does not exist"),
    "index names a missing tensor": ("unheld", 3, "does not hold it"),
    "index leaves a tensor out": ("unmapped", 3, "does not map it"),
    "same file twice": ("x.safetensors x.safetensors", 3, "same file"),
    "same name twice": ("twice", 3, "is in 1.safetensors too"),
    "unsupported type": ("integers", 3, "--exclude"),
    "pattern without a match": ("x.safetensors --include zzz", 3, "matches no tensor"),
    "pattern that is none": ("x.safetensors --include (", 2, "not a regular expression"),
    "NaN limit": ("x.safetensors --max-norm nan", 2, "not nan"),
    "negative limit": ("x.safetensors --max-norm -1", 2, "0 or more"),
    "no number": ("x.safetensors --max-norm x", 2, "--max-norm"),
    "unknown option": ("x.safetensors --nope", 2, "--nope"),
    "unknown policy": ("x.safetensors --nonfinite x", 2, "--nonfinite"),
    "no path": ("", 2, "no path"),
    "missing file": ("missing", 3, "no such file"),
    "missing folder": ("missing/x", 3, "no such file"),
    "folder without safetensors": ("empty", 3, "no .safetensors file"),
    "missing list": ("x.safetensors --files-from missing", 3, "no such file"),
    "backend that is not there": ("x.safetensors --backend cuda", 4, "CUDA"),
    "backend that is none": ("x.safetensors --backend tpu", 2, "tpu"),
    "output into nowhere": ("x.safetensors --output missing/x", 3, "no such folder"),
}


# The same for the commands that came later, whose ways to the files are the same.
BAD_CALLS = {f"clip --max-norm 1 {arguments}": expected for arguments, *expected in BAD_INPUTS.values()} | {
    "accumulate": (2, "BUFFER"),
    "accumulate x.safetensors": (2, "no gradient is given"),
    "accumulate missing x.safetensors": (3, "--create makes it"),
    "accumulate x.safetensors fewer --create": (3, "already exists"),
    "accumulate x.safetensors truncated": (3, "truncated: the header says"),
    "accumulate truncated x.safetensors": (3, "truncated: the header says"),
    "accumulate x.safetensors x.safetensors": (3, "same file"),
    "accumulate x.safetensors larger": (3, "[2, 2] does not broadcast to the buffer's [2]"),
    "accumulate x.safetensors fewer": (3, "is only in the buffer"),
    "accumulate fewer x.safetensors": (3, "is not in the buffer"),
    "accumulate fewer integers --missing skip": (3, "has type I32"),
    "accumulate x.safetensors larger --weight 1 --weight 2": (2, "--weight is given 2 times"),
    "accumulate x.safetensors larger --weight nan": (2, "finite"),
    "accumulate x.safetensors fewer --missing skip --weight-key num_tokens": (3, "'many'"),
    "accumulate x.safetensors fewer --missing skip --weight-key steps": (3, "no 'steps' in its metadata"),
    "accumulate x.safetensors fewer --missing skip --mean --weight 0": (3, "add up to 0"),
    "accumulate x.safetensors fewer --dtype F32": (2, "--create"),
    "accumulate x.safetensors fewer --clip-each -1": (2, "0 or more"),
    "zero truncated": (3, "truncated: the header says"),
    "zero lost": (3, "which does not exist"),
    "zero x.safetensors --include zzz": (3, "matches no tensor"),
    "zero x.safetensors --backend cuda": (4, "CUDA"),
    "zero": (2, "no path"),
    "layernorm-backward truncated": (3, "truncated: the header says"),
    "layernorm-backward x.safetensors": (3, "no tensor name ends in Y_grad"),
    "layernorm-backward norm": (3, "has shape [4], needs [3]"),
    "layernorm-backward norm --axis 2": (3, "no axis 2"),
    "layernorm-backward norm --prefix nope": (3, "'nope'"),
    "layernorm-backward norm --kind batchnorm": (2, "--kind"),
    "layernorm-backward norm --invertible": (3, "--y names it"),
    "layernorm-backward norm --x-grad-in-place --output new": (2, "--x-grad-in-place"),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_input_is_one_clear_line_an_exit_code_and_no_changed_byte(tmp_path, call):
    lay_out_bad_inputs(tmp_path)
    exit_code, message = BAD_CALLS[call]
    before = snapshot(tmp_path)
    done = gradtool(*call.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("gradtool: error: ")
    assert message in done.stderr

    answer = gradtool_json(*call.split(), cwd=tmp_path)
    assert (answer["status"], answer["exit_code"], answer["data"]) == ("error", exit_code, {})
    assert message in answer["errors"][0]["message"]
    assert snapshot(tmp_path) == before


def test_nan_is_named_tensor_by_tensor_and_nothing_is_written(tmp_path):
    path = tmp_path / "nan.safetensors"
    path.write_bytes((SAMPLES / "nan.safetensors").read_bytes())
    before = snapshot(tmp_path)
    done = gradtool("clip", path, "--max-norm", "1")
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == f"gradtool: error: {path}: tensor 'blocks.0.fc1.bias': 46 NaN, 0 Inf, the first at index 1"
    assert lines[-1].startswith("gradtool: error: input contains NaN or Inf; nothing written")
    assert len(lines) == 4
    assert snapshot(tmp_path) == before


# A dry run imports everything first, for another user may not be able to read this environment.
AS_NOBODY = """
import os, sys
import gradtool.cli
gradtool.cli.app(["clip", sys.argv.pop(), "--max-norm", "1", "--dry-run", "--quiet"])
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
sys.argv = ["gradtool", *sys.argv[1:]]
gradtool.cli.main()
"""


def kept(path):
    """What must not change about a file that may not be read."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode


@pytest.mark.parametrize("sealed", ["folder", "file"])
def test_no_permission_is_exit_5_and_no_changed_byte(tmp_path, sealed):
    path = sample(tmp_path / "data")
    path.chmod(0o600 if sealed == "file" and os.geteuid() == 0 else 0o000 if sealed == "file" else 0o644)
    path.parent.chmod(0o755 if os.geteuid() == 0 else 0o555)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    before = kept(path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", AS_NOBODY, "clip", str(path), "--max-norm", "1", str(sample(tmp_path / "other"))],
        capture_output=True,
        text=True,
        check=False,
    )
    path.parent.chmod(0o755)
    assert (done.returncode, done.stdout) == (5, "")
    refused = path.parent if sealed == "folder" else path
    assert done.stderr == (
        f"gradtool: error: {refused}: Permission denied; check the permissions of the file and its folder\n"
    )
    assert kept(path) == before
    assert len(list(path.parent.iterdir())) == 1


def test_a_closed_pipe_on_stdout_is_noticed_before_a_byte_changes(tmp_path):
    path = sample(tmp_path)
    before = snapshot(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    done = gradtool("clip", path, "--max-norm", "1", stdout=writer)
    os.close(writer)
    assert done.returncode == 5
    assert done.stderr == "gradtool: error: cannot print the result on stdout: its reader is gone\n"
    assert snapshot(tmp_path) == before


def test_a_full_stdout_is_exit_5_without_a_traceback(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = gradtool("norm", sample(tmp_path), stdout=full)
    assert done.returncode == 5
    assert (
        done.stderr
        == "gradtool: error: cannot print the result on stdout: No space left on device; the work itself is done\n"
    )


def test_closed_standard_streams_never_become_data_files(tmp_path):
    path = sample(tmp_path)
    before = snapshot(tmp_path)
    command = f"exec {sys.executable} -P -m gradtool clip {path} --max-norm 1 <&- >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", command], check=False).returncode == 5
    assert snapshot(tmp_path) == before
    command = f"exec {sys.executable} -P -m gradtool clip {path} --max-norm 1 --quiet <&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", command], check=False).returncode == 0
    assert read(path)["a"].tolist() == pytest.approx([0.6, 0.8])


# Says when the first block is about to be written, and holds it until the signal has come.
SLOW_WRITES = """
import os, signal, sys, time
from gradtool import process
from gradtool.store import signals
from gradtool.store.io.channel import Channel
signal.signal(signal.SIGINT, signal.SIG_DFL)
write = Channel.write
def slowly(*arguments):
    os.write(2, b"writing\\n")
    while process.pending is None and not signals.pending:
        time.sleep(0.01)
    write(*arguments)
Channel.write = slowly
from gradtool.cli import main
sys.argv = ["gradtool", *sys.argv[1:]]
main()
"""


SIGNALS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
WRITERS = [
    ["clip", "x", "--max-norm", "1", "--threads", "1"],
    ["clip", "x", "--max-norm", "1", "--threads", "2"],
    ["accumulate", "x", "x2"],
    ["accumulate", "new", "x", "x2", "--create"],
    ["zero", "x", "--exclude", "X"],
    ["layernorm-backward", "x"],
    ["layernorm-backward", "x", "--output-dir", "new"],
]


@pytest.mark.parametrize(("number", "exit_code", "word"), [SIGNALS[0], pytest.param(*SIGNALS[1], marks=EXHAUSTIVE)])
@pytest.mark.parametrize("arguments", WRITERS, ids=" ".join)
def test_ctrl_c_in_the_middle_removes_temporaries_and_changes_nothing(tmp_path, number, exit_code, word, arguments):
    matrix = np.ones((500, 2000), np.float32)
    for name in ("x", "x2"):
        write(tmp_path / name, {"X": matrix, "Y_grad": matrix, "scale": matrix[0], "mean": matrix[:, 0]})
    before = snapshot(tmp_path)
    command = [sys.executable, "-P", "-c", SLOW_WRITES, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    with subprocess.Popen(command, **pipes) as running:
        assert running.stderr.readline() == "writing\n"
        assert len(list(tmp_path.glob("**/.gradtool-*.tmp"))) == 1
        running.send_signal(number)
        stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == exit_code
    assert stdout == ""
    said = [line for line in stderr.splitlines() if line != "writing"]
    assert said == [f"gradtool: error: {word}; no file was changed"]
    assert snapshot(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 2


# Where the signal comes: while all is imported, or while Typer is at work.
EARLY_SIGNAL = """
import os, sys, gradtool
from gradtool import cli, streams
number, where = int(sys.argv[1]), sys.argv[2]
def strike(*_, **__):
    os.kill(os.getpid(), number)
if where == "import":
    gradtool.__getattr__ = strike
else:
    streams.require_stdout = strike
sys.argv = ["gradtool", "norm", "x"]
cli.main()
"""


@pytest.mark.parametrize(("number", "exit_code", "word"), SIGNALS)
@pytest.mark.parametrize("where", ["import", "typer"])
def test_a_signal_before_the_work_begins_is_told_of_as_any_other(number, exit_code, word, where):
    command = [sys.executable, "-P", "-c", EARLY_SIGNAL, str(int(number)), where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "", f"gradtool: error: {word}\n")


def test_a_second_signal_does_not_disturb_the_clean_up(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": np.ones(2_000_000, np.float32)})
    before = snapshot(tmp_path)
    command = [sys.executable, "-P", "-c", SLOW_WRITES, "clip", str(path), "--max-norm", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr.readline() == "writing\n"
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            running.send_signal(number)
        _, stderr = running.communicate(timeout=60)
    assert running.returncode in (129, 130, 143)
    assert "no file was changed" in stderr
    assert snapshot(tmp_path) == before


# Says when the result is about to be printed, and when a signal has come then; waits for another one, if told to.
SLOW_PRINTING = """
import os, signal, sys, time
from gradtool import process, report
signal.signal(signal.SIGINT, signal.SIG_DFL)
show, waits = report.show, sys.argv.pop(1) == "wait"
def slowly(*arguments, **options):
    os.write(2, b"printing\\n")
    while not process.was_spared:
        time.sleep(0.01)
    os.write(2, b"spared\\n")
    while waits:
        time.sleep(0.01)
    show(*arguments, **options)
report.show = slowly
from gradtool.cli import main
sys.argv = ["gradtool", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("command", [["clip", "--max-norm", "1"], ["norm"]])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_work_is_done_changes_nothing(tmp_path, number, command):
    path = sample(tmp_path)
    command = [sys.executable, "-P", "-c", SLOW_PRINTING, "go on", command[0], str(path), *command[1:], "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr.readline() == "printing\n"
        running.send_signal(number)
        stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stderr) == (0, "spared\n")
    assert json.loads(stdout)["status"] == "ok"


def test_a_second_signal_ends_a_result_that_nobody_reads(tmp_path):
    path = sample(tmp_path)
    command = [sys.executable, "-P", "-c", SLOW_PRINTING, "wait", "clip", str(path), "--max-norm", "1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr.readline() == "printing\n"
        running.terminate()
        assert running.stderr.readline() == "spared\n"
        running.terminate()
        stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stdout) == (143, "")
    assert stderr == "gradtool: error: terminated; the work itself is done\n"
    assert norm(path).norm == pytest.approx(1)


def test_sigkill_in_the_middle_leaves_every_file_as_it_was(tmp_path):
    paths = [write(tmp_path / f"{i}.safetensors", {"a": np.ones(1_000_000, np.float32)}) for i in range(3)]
    before = snapshot(tmp_path)
    command = [sys.executable, "-P", "-c", SLOW_WRITES, "clip", *map(str, paths), "--max-norm", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as running:
        assert running.stderr.readline() == b"writing\n"
        running.kill()
    assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before


def test_json_says_so_when_terminated(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": np.ones(2_000_000, np.float32)})
    command = [sys.executable, "-P", "-c", SLOW_WRITES, "clip", str(path), "--max-norm", "1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr.readline() == "writing\n"
        running.terminate()
        stdout, _ = running.communicate(timeout=60)
    answer = json.loads(stdout)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (143, "interrupted")


REMOVED_FOLDER = ["sh", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "-", *COMMAND]


def test_in_a_folder_that_is_gone_a_path_from_the_root_works_and_another_is_missing(tmp_path):
    path = sample(tmp_path)
    done = subprocess.run([*REMOVED_FOLDER, "norm", path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for call in (["norm", "x"], ["clip", "x", "--max-norm", "1"]):
        done = subprocess.run([*REMOVED_FOLDER, *call], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (3, "gradtool: error: x: no such file\n")
    call = ["clip", path, "--max-norm", "1", "--output", "y"]
    done = subprocess.run([*REMOVED_FOLDER, *call], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr == "gradtool: error: the current folder is gone; change to another one\n"


# What the system refuses where nobody looks for it.
UNFORESEEN = """
import errno, gradtool.ops.norm as norm, os
def refuse(*_, **__):
    number, *file = {error!r}.split()
    raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)), *file)
norm.Measure = refuse
from gradtool.cli import main
main()
"""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("EIO", "the system refused: Input/output error"),
        ("EIO /some/file", "/some/file: Input/output error"),
        ("ENOMEM /some/file", "/some/file: Cannot allocate memory; raise the limit on memory (ulimit -v or -d)"),
    ],
)
def test_what_the_system_refuses_is_not_put_down_to_stdout(tmp_path, error, message):
    command = [sys.executable, "-P", "-c", UNFORESEEN.format(error=error), "norm"]
    done = subprocess.run([*command, sample(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (5, f"gradtool: error: {message}\n")


OPEN_FILES = """
import resource, sys
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
{call}
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536)
"""


@pytest.mark.parametrize(
    ("call", "raised"),
    [
        ("import gradtool.cli\ntry: gradtool.cli.main()\nexcept SystemExit as done: assert not done.code", True),
        ("import gradtool; gradtool.norm(sys.argv[2])", False),
    ],
)
def test_the_command_and_not_the_function_may_have_more_files_open(tmp_path, call, raised):
    command = [sys.executable, "-P", "-c", OPEN_FILES.format(call=call), "norm", sample(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    soft, most = map(int, done.stdout.split()[-2:])
    assert soft == (most if raised else 64)


def test_a_terminal_that_lacks_a_letter_gets_it_spelled_out(tmp_path):
    path = write(tmp_path / "x", {"漢": encode([3, 4], "F32")})
    done = gradtool("clip", path, "--max-norm", "1", "--per-tensor", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "\\u6f22" in done.stdout


def test_an_unset_variable_is_no_folder(tmp_path):
    path = sample(tmp_path)
    before = snapshot(tmp_path)
    done = gradtool("clip", "", "--max-norm", "1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "gradtool: error: a path is empty; is a shell variable unset?\n")
    assert gradtool("clip", path, "--max-norm", "1", "--output-dir", "", cwd=tmp_path).returncode == 2
    assert snapshot(tmp_path) == before


def test_many_problems_are_cut_off_on_stderr_and_whole_in_json(tmp_path):
    path = write(tmp_path / "x", {f"t{i}": encode([math.nan], "F32") for i in range(50)})
    lines = gradtool("norm", path).stderr.splitlines()
    assert (len(lines), lines[-1]) == (21, "gradtool: error: and 30 more; --json names them all")
    assert len(gradtool_json("norm", path)["errors"]) == 50


def test_the_result_says_what_computed():
    why = gradtool_json("norm", SAMPLES / "buffer.safetensors")["data"]["backend_why"]
    assert why == choose().why


PROGRESS = """
import sys
import gradtool.report as report
report._PATIENCE_SECONDS = float(sys.argv.pop(1))
from gradtool.cli import main
main()
"""


@pytest.mark.parametrize(("patience", "shown"), [("0", True), ("3600", False)])
def test_a_progress_bar_shows_on_a_terminal_when_the_work_takes_long(tmp_path, patience, shown):
    path = write(tmp_path / "x", {"a": np.ones(3_000_000, np.float32)})
    code, text = on_terminal("norm", path, "--json", command=[sys.executable, "-P", "-c", PROGRESS, patience])
    assert code == 0
    assert ("━" in text) == shown


def test_off_a_terminal_there_is_no_progress_bar(tmp_path):
    path = write(tmp_path / "x", {"a": np.ones(3_000_000, np.float32)})
    command = [sys.executable, "-P", "-c", PROGRESS, "0", "norm", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def on_terminal(*arguments, command=COMMAND):
    """The real command on a terminal 100 columns wide: all that it shows."""
    reader, writer = pty.openpty()
    environment = os.environ | {"COLUMNS": "100", "TERM": "xterm"}
    command = [*command, *map(str, arguments)]
    with subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, env=environment) as running:
        os.close(writer)
        shown = b""
        while True:
            try:
                shown += (part := os.read(reader, 65_536))
            except OSError:  # How Linux says that the other side is gone.
                break
            if not part:
                break
    os.close(reader)
    return running.returncode, shown.decode()


def test_a_terminal_gets_tables_that_truncate_nothing(tmp_path):
    name = "a.very.long." + "name." * 30 + "end"
    path = write(tmp_path / "x", {name: encode([3, 4], "F32"), "[bold]b": encode([1], "F32")})
    code, shown = on_terminal("norm", path, "--top", "2")
    assert code == 0
    assert "5.0990195" in shown
    assert "[bold]b" in shown
    assert "…" not in shown
    code, shown = on_terminal("clip", path, "--max-norm", "1")
    assert code == 0
    for label in ("norm before", "norm after", "coef", "clipped", "yes"):
        assert label in shown


def test_debug_shows_the_traceback_and_nothing_else_does(tmp_path):
    missing = tmp_path / "missing"
    assert "Traceback" not in gradtool("norm", missing).stderr
    assert "Traceback" in gradtool("norm", missing, env={"GRADTOOL_DEBUG": "1"}).stderr


def test_a_bug_is_one_line_and_exit_70(tmp_path):
    code = "import sys, gradtool.ops.norm as n; n.Measure = None; from gradtool.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "norm", str(sample(tmp_path))], capture_output=True, text=True, check=False
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (70, 1)
    assert "a bug in gradtool" in done.stderr


def test_all_value_types_at_once(tmp_path):
    types = [dtype for dtype in NUMPY_TYPES if dtype not in ("I32", "U8")]
    path = write(tmp_path / "x", {dtype: encode([3, 4], dtype) for dtype in types})
    assert gradtool_json("norm", path)["data"]["norm"] == math.sqrt(25 * len(types))


def test_json_of_a_usage_error_that_typer_finds(tmp_path):
    answer = gradtool_json("norm", sample(tmp_path), "--top", "many")
    assert (answer["command"], answer["exit_code"], answer["errors"][0]["code"]) == ("norm", 2, "usage")
    json.dumps(answer, allow_nan=False)
