import json
import math
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import (
    COMMAND,
    NUMPY_TYPES,
    encode,
    gradtool,
    gradtool_json,
    read,
    sample,
    snapshot,
    write,
)


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


@pytest.mark.parametrize("command", [*COMMANDS, "recover", "doctor"])
def test_help_has_a_heading_for_each_group_of_options_and_fits_80_columns(command):
    lines = gradtool(command, "--help").stdout.splitlines()
    groups = {
        "norm": ["Options", "Selection", "Compute"],
        "recover": ["Options"],
        "doctor": [],
    }.get(command, ["Options", "Selection", "Output", "Compute"])
    headings = [line for line in lines if re.fullmatch(r"\w+:", line)]
    assert headings == [f"{title}:" for title in ("Arguments", *groups, "General")]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("columns", [40, 60])
@pytest.mark.parametrize("command", ["", *COMMANDS, "recover", "doctor"])
def test_help_on_a_narrow_terminal_breaks_lines_between_words(command, columns):
    arguments = [command, "--help"] if command else ["--help"]
    wide, narrow = (gradtool(*arguments, env={"COLUMNS": str(width)}).stdout for width in (80, columns))
    # The name of the command stays whole, and so do examples, which are to be copied.
    text = re.sub(r"(?s)^Usage: .*?\n|Examples:.*?\n\n|Documentation: .*", "", narrow)
    assert max(map(len, text.splitlines())) <= columns
    assert narrow.split() == wide.split()


def test_without_a_command_the_help_is_shown():
    assert gradtool().stdout == gradtool("--help").stdout


def test_a_path_that_is_no_text_works(tmp_path):
    path = os.path.join(os.fsencode(tmp_path), b"gr\xffad.safetensors")  # noqa: PTH118 - bytes
    Path(os.fsdecode(path)).write_bytes(sample(tmp_path).read_bytes())
    assert gradtool("norm", os.fsdecode(path), "--top", "1").returncode == 0
    assert gradtool_json("norm", os.fsdecode(path))["data"]["norm"] == 5.0


def test_files_from_standard_input(tmp_path):
    paths = [write(tmp_path / f"{i} .safetensors", {"a": encode([2], "F32")}) for i in range(4)]
    text = "\0".join(map(str, paths)) + "\0"
    assert gradtool_json("norm", "--concat", "--files-from", "-", input=text)["data"]["norm"] == 4.0


# A dry run imports everything first, for another user may not be able to read this environment.
AS_NOBODY = """
import os, sys
import gradtool.cli, gradtool.report.text, gradtool.store.format.hints, gradtool.store.transaction.refusals
gradtool.clip(sys.argv.pop(), max_norm=1, dry_run=True)
gradtool.command.parse(gradtool.cli.COMMANDS, sys.argv[1:])
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
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and not stat.S_IMODE(parent.stat().st_mode) & 0o001:
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
    what = "write to this folder" if sealed == "folder" else "read this file"
    advice = ", or use --output to write to another folder" if sealed == "folder" else ""
    line = f"{refused}: Permission denied: cannot {what}\n  hint: check its permissions{advice}"
    assert done.stderr == f"gradtool: error: {line}\n"
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
        == "gradtool: error: cannot print the result on stdout: No space left on device (the operation completed)\n"
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


REMOVED_FOLDER = ["sh", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "-", *COMMAND]


def test_in_a_folder_that_is_gone_a_path_from_the_root_works_and_another_is_missing(tmp_path):
    path = sample(tmp_path)
    done = subprocess.run([*REMOVED_FOLDER, "norm", path], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for call in (["norm", "x"], ["clip", "x", "--max-norm", "1"]):
        done = subprocess.run([*REMOVED_FOLDER, *call], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (3, "gradtool: error: x: no such file\n")
    for more in (["--output", "y"], ["--output-dir", "y"], ["--limit", "z=2", "--state", "y"]):
        call = ["clip", path, *(["--max-norm", "1"] if "--state" not in more else []), *more]
        done = subprocess.run([*REMOVED_FOLDER, *call], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 5
        assert done.stderr == "gradtool: error: the current folder no longer exists\n  hint: change to another folder\n"
    call = ["clip", path, "--max-norm", "1e-3", "--output", tmp_path / "y"]
    done = subprocess.run([*REMOVED_FOLDER, *call], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, (tmp_path / "y").exists()) == (0, "", True)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux has such a folder")
@pytest.mark.parametrize("option", ["--output=/proc/x", "--output-dir=/proc/x", "--output-dir=/proc"])
def test_a_folder_that_takes_no_files_says_so(tmp_path, option):
    done = gradtool("clip", sample(tmp_path), "--max-norm", "1e-3", option)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("gradtool: error: /proc: no file can be made in this folder")


# An error of the system where none is expected.
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
        (
            "ENOMEM /some/file",
            "/some/file: Cannot allocate memory\n  hint: raise the limit on memory (ulimit -v or -d)",
        ),
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


def test_an_unset_variable_is_no_folder(tmp_path):
    path = sample(tmp_path)
    before = snapshot(tmp_path)
    done = gradtool("clip", "", "--max-norm", "1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "gradtool: error: a path is empty\n  hint: check whether a shell variable is unset\n",
    )
    assert gradtool("clip", path, "--max-norm", "1", "--output-dir", "", cwd=tmp_path).returncode == 2
    assert snapshot(tmp_path) == before


def test_debug_shows_the_traceback_and_nothing_else_does(tmp_path):
    missing = tmp_path / "missing"
    assert "Traceback" not in gradtool("norm", missing).stderr
    debugged = gradtool("norm", missing, env={"GRADTOOL_DEBUG": "1"}).stderr
    assert "Traceback" in debugged
    assert "FileNotFoundError: [Errno 2] No such file or directory" in debugged


def test_a_bug_is_one_line_and_exit_70(tmp_path):
    code = "import sys, gradtool.ops.norm as n; n.Measure = None; from gradtool.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "norm", str(sample(tmp_path))], capture_output=True, text=True, check=False
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (70, 2)
    assert "bug in gradtool" in done.stderr


def test_all_value_types_at_once(tmp_path):
    types = [dtype for dtype in NUMPY_TYPES if dtype not in ("I32", "U8")]
    path = write(tmp_path / "x", {dtype: encode([3, 4], dtype) for dtype in types})
    assert gradtool_json("norm", path)["data"]["norm"] == math.sqrt(25 * len(types))


def test_json_of_a_usage_error_that_typer_finds(tmp_path):
    answer = gradtool_json("norm", sample(tmp_path), "--top", "many")
    assert (answer["command"], answer["exit_code"], answer["errors"][0]["code"]) == ("norm", 2, "usage")
    json.dumps(answer, allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["clip", "x", "--inplace"], "no such option: --inplace", "use --write inplace, or see gradtool clip --help"),
        (["accumulate", "x", "-i"], "no such option: -i", "use --write inplace, or see gradtool accumulate --help"),
        (
            ["clip", "x", "--max-grad-norm", "1"],
            "no such option: --max-grad-norm",
            "use --max-norm, or see gradtool clip --help",
        ),
        (["norm", "x", "--gpu"], "no such option: --gpu", "use --backend cuda, or see gradtool norm --help"),
        (["clip", "x", "--max-norm", "one"], "--max-norm must be a number, not 'one'", ""),
        (["norm", "x", "-i"], "no such option: -i", "see gradtool norm --help"),
        (
            ["norm", "x", "--ignore-journal"],
            "no such option: --ignore-journal",
            "use --allow-unfinished, or see gradtool norm --help",
        ),
        (["recover", "x", "-n"], "no such option: -n", "see gradtool recover --help"),
        (["clop"], "no such command 'clop'", "see gradtool --help"),
        (
            ["norm", "x", "--max-norm", "1"],
            "no such option: --max-norm",
            "--max-norm is an option of clip and accumulate; see gradtool norm --help",
        ),
        (
            ["clip", "x", "--screen=finite"],
            "no such option: --screen",
            "--screen is an option of accumulate; see gradtool clip --help",
        ),
        (
            ["norm", "x", "--clip-norm", "1"],
            "no such option: --clip-norm",
            "--max-norm is an option of clip and accumulate; see gradtool norm --help",
        ),
        (
            ["doctor", "--backend", "cpu"],
            "no such option: --backend",
            "--backend is an option of norm, diff, digest and others; see gradtool doctor --help",
        ),
        (["help", "clop"], "no such command or topic 'clop'", "topics are convert, in, out, exit-codes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_told_its_name_and_the_help_of_its_command(arguments, message, hint):
    done = gradtool(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gradtool: error: {message}")
    assert done.stderr.splitlines()[1:] == ([f"  hint: {hint}"] if hint else [])


def test_help_is_a_command():
    assert gradtool("help", "clip").stdout == gradtool("clip", "--help").stdout
    assert gradtool("help").stdout == gradtool("--help").stdout


def test_output_to_a_stream_is_refused(tmp_path):
    done = gradtool("clip", sample(tmp_path), "--max-norm", "1", "--output", "-", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "gradtool: error: --output - is not supported: results are files, not streams\n"
        "  hint: use ./- for a file or folder named -\n"
    )
    assert not (tmp_path / "-").exists()
    assert gradtool("clip", sample(tmp_path), "--max-norm", "1", "--output", "./-", cwd=tmp_path).returncode == 0
    assert (tmp_path / "-").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("clip", "x.safetensors", "--max-norm", "1", "--output-dir", "-"),
        ("accumulate", "x.safetensors", "--output", "-"),
    ],
    ids=["--output-dir", "--output"],
)
def test_stdout_is_refused_as_an_output(tmp_path, arguments):
    sample(tmp_path)
    done = gradtool(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "- is not supported: results are files, not streams\n  hint: use ./- for a f" in done.stderr
    assert not (tmp_path / "-").exists()


def test_no_clobber_keeps_files_that_exist(tmp_path):
    path, old = sample(tmp_path / "in"), write(tmp_path / "old", {"b": encode([1], "F32")})
    before = old.read_bytes()
    for output in (["--output", old], ["--output", old, "--dry-run"]):
        done = gradtool("clip", path, "--max-norm", "1", "--no-clobber", *output)
        assert (done.returncode, done.stdout) == (3, "")
        message, hint = done.stderr.splitlines()
        assert message == f"gradtool: error: {old}: already exists"
        assert hint.startswith("  hint: ")
        assert "--no-clobber" in hint
    assert old.read_bytes() == before
    assert gradtool("clip", path, "--max-norm", "1", "--output-dir", tmp_path / "new", "--no-clobber").returncode == 0
    answer = gradtool_json("clip", path, "--max-norm", "1", "--output-dir", tmp_path / "new", "--no-clobber")
    assert (answer["exit_code"], [one["code"] for one in answer["errors"]]) == (3, ["exists"])
    assert gradtool("clip", path, "--max-norm", "1", "--output", old).returncode == 0
    done = gradtool("clip", path, "--max-norm", "1", "--no-clobber")
    assert (done.returncode, "--no-clobber requires --output or --output-dir" in done.stderr) == (2, True)


def test_more_threads_than_help_are_not_started(tmp_path):
    answer = gradtool("norm", sample(tmp_path), "--threads", "5000")
    assert answer.returncode == 0
    assert answer.stderr == "gradtool: warning: --threads 5000 exceeds the limit; using 256 threads\n"


NUMPY = """
import sys
sys.modules["gradtool.backends._kernels"] = None
from gradtool.cli import main
main()
"""


@pytest.mark.parametrize(("megabytes", "warns"), [(64, False), (65, True)])
def test_numpy_warns_once_where_it_takes_long(tmp_path, megabytes, warns):
    path = write(tmp_path / "x", {"a": np.ones(megabytes << 18, np.float32)})
    command = [sys.executable, "-P", "-c", NUMPY, "norm", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == (
        "gradtool: warning: computed by numpy, several times slower than the compiled kernels\n"
        "  hint: install gradtool again on a machine with a C compiler\n"
        if warns
        else ""
    )
    command[4] = "zero"
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""
