"""The result and what is said about it arrive whole, or the exit code says that they did not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import COMMAND, encode, gradtool, gradtool_json, read, snapshot, write

ONES = np.ones(2, np.float32)
# More than a pipe holds, and than FEW lets a file hold.
NAMES = [f"{i:04}." + "x" * 1000 for i in range(300)]
FEW = "ulimit -f 100"
LOST = "gradtool: error: cannot print the result on stdout: "


@pytest.fixture(params=["1", ""], ids=["unbuffered", "buffered"])
def environment(request):
    """Containers have Python's streams unbuffered."""
    return {"PYTHONUNBUFFERED": request.param}


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "x.safetensors", dict.fromkeys(NAMES, ONES))


@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "lines"])
def test_a_file_that_may_not_hold_all_of_the_result_is_exit_5(tmp_path, path, environment, arguments):
    command = ["sh", "-c", f'{FEW}; exec "$@"', "-", *COMMAND, "norm", str(path), "--per-tensor", *arguments]
    with (tmp_path / "result").open("wb") as result:
        done = subprocess.run(
            command, stdout=result, stderr=subprocess.PIPE, text=True, check=False, env=os.environ | environment
        )
    assert (done.returncode, done.stderr) == (5, f"{LOST}File too large (the operation completed)\n")


@pytest.mark.parametrize("arguments", [["--json"], []], ids=["json", "lines"])
def test_a_pipe_that_does_not_block_gets_all_of_the_result(path, environment, arguments):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [*COMMAND, "norm", str(path), "--per-tensor", *arguments]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, env=os.environ | environment) as running:
        os.close(writer)
        with os.fdopen(reader) as result:
            text = result.read()
        assert (running.wait(), running.stderr.read()) == (0, b"")
    if arguments:
        assert [row["name"] for row in json.loads(text)["data"]["per_tensor"]] == NAMES
    else:
        assert [line.split("\t")[-2] for line in text.splitlines() if line.startswith("tensor\t")] == NAMES


def test_a_pipe_on_stderr_that_does_not_block_gets_all_that_is_said(tmp_path, environment):
    names = [f"{i:02}." + "x" * 4000 for i in range(20)]
    path = write(tmp_path / "x", {name: encode([np.nan], "F32") for name in names})
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [*COMMAND, "clip", str(path), "--max-norm", "1"]
    with subprocess.Popen(command, stderr=writer, env=os.environ | environment) as running:
        os.close(writer)
        with os.fdopen(reader) as said:
            lines = said.read().splitlines()
        assert running.wait() == 1
    assert [line.split("'")[1] for line in lines[:-2]] == names


def test_a_reader_that_leaves_in_the_middle_is_exit_5(path, environment):
    command = [*COMMAND, "norm", str(path), "--per-tensor"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=os.environ | environment) as running:
        assert running.stdout.read(5) == b"norm\t"
        running.stdout.close()
        said = running.stderr.read().decode()
    assert (running.returncode, said) == (5, f"{LOST}Broken pipe (the operation completed)\n")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["norm", "missing", "--json"]])
def test_a_full_stdout_never_shows_a_traceback(arguments, environment):
    with Path("/dev/full").open("w") as full:
        done = gradtool(*arguments, stdout=full, env=environment)
    assert done.returncode == (3 if "missing" in arguments else 5)
    assert len(done.stderr.splitlines()) == 1


def test_a_full_stderr_does_not_change_the_exit_code(environment):
    with Path("/dev/full").open("w") as full:
        assert gradtool("norm", "missing", stderr=full, env=environment).returncode == 3
        done = gradtool("norm", "missing", "--json", stderr=full, env=environment | {"GRADTOOL_DEBUG": "1"})
    assert json.loads(done.stdout)["exit_code"] == 3


def without(closed, *arguments, **options):
    """Run the command with some of its standard streams closed."""
    command = ["sh", "-c", f'exec "$@" {closed}', "-", *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["norm", "x.safetensors"]])
def test_a_closed_stdout_is_exit_5(path, arguments):
    done = without(">&-", *arguments, cwd=path.parent)
    assert (done.returncode, len(done.stderr.splitlines())) == (5, 1)
    assert done.stderr.startswith(LOST)


def test_a_stdout_that_can_only_be_read_is_noticed_before_a_byte_changes(path):
    before = snapshot(path.parent)
    done = without("1</dev/null", "clip", path, "--max-norm", "1")
    assert (done.returncode, done.stderr) == (5, f"{LOST}it is closed\n")
    assert snapshot(path.parent) == before


def test_without_stderr_the_result_arrives(path):
    assert without("<&- 2>&-", "norm", path).stdout.startswith("norm\t")


# As in a chroot that has no /dev.
NO_DEVICES = """
import os
os.devnull = "/nowhere/null"
from gradtool.cli import main
main()
"""


@pytest.mark.parametrize("closed", ["", "<&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_safe_without_dev_null(path, closed):
    before = snapshot(path.parent)
    quiet = ["--quiet"] if ">&-" in closed.split() else []
    code = [sys.executable, "-P", "-c", NO_DEVICES, "clip", str(path), "--max-norm", "1", *quiet]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "-", *code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert snapshot(path.parent) != before
    assert read(path)[NAMES[0]][0] == pytest.approx(1 / 600**0.5)


def test_problems_are_whole_in_json_whatever_stderr_is(tmp_path):
    path = write(tmp_path / "x", {"a": encode([np.nan], "F32")})
    with Path("/dev/full").open("w") as full:
        assert gradtool_json("norm", path, stderr=full)["exit_code"] == 1
