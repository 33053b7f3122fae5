"""Signals, at every stage of a command."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from runner import run
from schema import checked
from support import COMMAND, sample, snapshot, write
from tiers import EXHAUSTIVE

from gradtool import norm
from gradtool.store import signals

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
    ["accumulate", "x2", "--into", "x"],
    ["accumulate", "x", "x2", "--output", "new"],
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


# Reports of a fault, what nothing can handle, and what Python ignores.
UNHANDLED = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP", "SIGEMT", "SIGKILL", "SIGPIPE", "SIGXFSZ"}


# Prints the signals that end a process that does nothing about them.
ENDING = """
import os, resource, signal
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for number in map(int, signal.valid_signals()):
    pid = os.fork()
    if pid == 0:
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(0)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    elif os.WIFSIGNALED(status):
        print(number)
"""


def test_all_signals_that_end_a_process_are_handled():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, check=True, text=True)
    handled = set(map(int, done.stdout.split())) - {getattr(signal, name, None) for name in UNHANDLED}
    assert set(signals.ENDING) == handled


@pytest.mark.parametrize("name", ["SIGXCPU", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGQUIT", "SIGABRT"])
@pytest.mark.parametrize("write_mode", ["replace", "inplace"])
def test_any_signal_that_ends_a_process_leaves_the_files_as_they_were(tmp_path, name, write_mode):
    path, number = sample(tmp_path), signal.Signals[name]
    before = snapshot(tmp_path)
    answer = run("clip", path, "--max-norm", "1", "--write", write_mode, fault=f"{name}@3")
    told = f"terminated by signal {int(number)} ({signal.strsignal(number)}); no file was changed"
    assert (answer.code, answer.out, answer.err) == (128 + number, "", f"gradtool: error: {told}\n")
    assert snapshot(tmp_path) == before


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path):
    command = ["sh", "-c", 'trap "" USR1; exec "$@"', "-", *COMMAND, "clip", str(sample(tmp_path)), "--max-norm", "1"]
    done = subprocess.run(command, env=os.environ | {"GRADTOOL_FAULT": "SIGUSR1@3"}, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_limit_of_processor_time_sends_a_signal_before_it_kills():
    code = "import resource; from gradtool import process; process.adjust_limits(); "
    code += "print(*resource.getrlimit(resource.RLIMIT_CPU))"
    for given, wanted in (("-t 100", "99 100"), ("-t 1", "1 1"), ("-St 50; ulimit -Ht 100", "50 100")):
        command = ["sh", "-c", f'ulimit {given}; exec "$@"', "-", sys.executable, "-P", "-c", code]
        assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == f"{wanted}\n"


def test_deferred_handlers_of_a_program_are_all_called_until_one_raises():
    called = []

    def note(number, frame):
        called.append((number, frame is not None))
        if number == signal.SIGALRM:
            raise TimeoutError

    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGQUIT]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        with pytest.raises(TimeoutError), signals.deferred():
            for number in numbers:
                signal.raise_signal(number)
            called.append("deferred")
        assert called == ["deferred", *((number, True) for number in numbers[:3])]
        assert all(signal.getsignal(number) is note for number in numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Where the signal comes: while all is imported, or while Typer is at work.
EARLY_SIGNAL = """
import os, sys, gradtool
import typer
from gradtool import cli
number, where = int(sys.argv[1]), sys.argv[2]
def strike(*_, **__):
    os.kill(os.getpid(), number)
if where == "import":
    gradtool.module_of = strike
else:
    typer.core.TyperCommand.invoke = strike
sys.argv = ["gradtool", "norm", "x"]
cli.main()
"""


@pytest.mark.parametrize(("number", "exit_code", "word"), SIGNALS)
@pytest.mark.parametrize("where", ["import", "typer"])
def test_a_signal_before_the_work_begins_is_told_of_as_any_other(number, exit_code, word, where):
    command = [sys.executable, "-P", "-c", EARLY_SIGNAL, str(int(number)), where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        exit_code,
        "",
        f"gradtool: error: {word}; no file was changed\n",
    )


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
    while not process.first_signal_ignored:
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
    assert checked(stdout)["status"] == "ok"


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
    assert stderr == "gradtool: error: terminated after all files were written\n"
    assert norm(path).norm == pytest.approx(1)


def test_a_second_signal_ends_an_error_that_nobody_reads(tmp_path):
    command = [sys.executable, "-P", "-c", SLOW_PRINTING, "wait", "norm", str(tmp_path / "missing"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert "missing: no such file" in running.stderr.readline()
        for line in ("printing\n", "spared\n"):
            assert running.stderr.readline() == line
            running.terminate()
        stdout, stderr = running.communicate(timeout=60)
    assert (running.returncode, stdout) == (143, "")
    assert stderr == "gradtool: error: terminated while an error was printed\n"


def test_sigkill_in_the_middle_leaves_every_file_as_it_was(tmp_path):
    paths = [write(tmp_path / f"{i}.safetensors", {f"a{i}": np.ones(1_000_000, np.float32)}) for i in range(3)]
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
    answer = checked(stdout)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (143, "interrupted")
