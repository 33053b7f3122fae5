"""Completion in the shells themselves: what is there after a Tab."""

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import stat
import sys
import time

import pytest
from support import gradtool

EVERY_COMMAND = {
    "norm", "diff", "digest", "check", "info", "clip", "accumulate", "zero", "layernorm-backward", "recover", "doctor",
}  # fmt: skip


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "--interactive"],
}
SETUP = {"bash": "", "zsh": "autoload -Uz compinit; compinit -u -D; ", "fish": ""}
PATIENCE = 20


@pytest.fixture
def folder(tmp_path):
    """A folder with the real command on the path, and a file to complete."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "gradtool"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m gradtool "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "only_file.safetensors").touch()
    return tmp_path


class Shell:
    """An interactive shell on a terminal of its own."""

    def __init__(self, name, folder):
        printed = gradtool("--show-completion", name)
        assert printed.returncode == 0, printed
        (folder / "script").write_text(printed.stdout)
        self.shown = ""
        pid, self._fd = pty.fork()
        if pid == 0:
            os.chdir(folder)
            path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
            env = {"PATH": path, "HOME": str(folder), "TERM": "xterm", "LANG": "C.UTF-8"}
            os.execvpe(SHELLS[name][0], SHELLS[name], env)  # noqa: S606
        self._pid = pid
        # What is typed is shown, too; only what is printed has no quotes.
        self.type(f"{SETUP[name]}source ./script; echo is''ready\n")
        self.wait_for("isready")

    def type(self, text):
        os.write(self._fd, text.encode())

    def wait_for(self, text):
        """Read until the text is shown; what was shown before is forgotten."""
        end = time.monotonic() + PATIENCE
        while text not in self.shown:
            assert time.monotonic() < end, self.shown
            if select.select([self._fd], [], [], 1)[0]:
                part = os.read(self._fd, 65_536).decode(errors="replace")
                # Fish asks what terminal this is, and waits for the answer.
                if "\x1b[c" in part or "\x1b[0c" in part:
                    os.write(self._fd, b"\x1b[?62;c")
                self.shown += re.sub(r"\x1b(\[[0-9;?>=]*[A-Za-z]|\][^\x07]*\x07|[()][0-9A-B]|[=>])", "", part)
        self.shown = ""

    def close(self):
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)


@pytest.fixture(params=SHELLS)
def shell(request, folder):
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    shell = Shell(request.param, folder)
    yield shell
    shell.close()


def test_a_shell_completes_commands_options_choices_and_paths(shell):
    for typed, completed in (
        ("gradtool rec", "recover"),
        ("gradtool norm --thr", "--threads"),
        ("gradtool clip x --nonfinite prop", "propagate"),
        ("gradtool zero x --write i", "inplace"),
        ("gradtool info only_f", "only_file.safetensors"),
        ("gradtool clip a --output only_f", "only_file.safetensors"),
    ):
        shell.type(f"\x15{typed}\t")
        shell.wait_for(completed)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gradtool ", EVERY_COMMAND),
        ("gradtool z", {"zero"}),
        ("gradtool clip --wr", {"--write"}),
        ("gradtool clip --write ", {"replace", "inplace"}),
        ("gradtool zero --no-f", {"--no-fsync"}),
        ("gradtool norm --backend C", set()),
        ("gradtool norm --backend c", {"cpu", "cuda"}),
        ("gradtool norm --backend=cu", {"cuda"}),
        ("gradtool --sh", {"--show-completion"}),
        ("gradtool --inst", set()),
        ("gradtool norm ", set()),
        ("gradtool norm x --top ", set()),
        ("gradtool nothing --", {"--help"}),
    ],
)
def test_what_is_offered(words, expected):
    env = {"_GRADTOOL_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = gradtool(env=env | {"_TYPER_COMPLETE_ARGS": words})
    offered = {line.partition("\t")[0] for line in done.stdout.splitlines() if line}
    if words.endswith("--"):
        assert expected <= offered
    else:
        assert offered == expected
    assert done.stderr == ""


def test_options_are_offered_with_their_help():
    env = {"_GRADTOOL_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = gradtool(env=env | {"_TYPER_COMPLETE_ARGS": "gradtool check --fa"})
    assert done.stdout == "--fast\tRead only headers, no values.\n"


@pytest.mark.parametrize("shell", [*SHELLS, "pwsh"])
def test_the_script_of_a_shell_is_printed_and_no_file_is_written(tmp_path, shell):
    for arguments in (["--show-completion", shell], [f"--show-completion={shell}"]):
        done = gradtool(*arguments, env={"HOME": str(tmp_path)}, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "_GRADTOOL_COMPLETE" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_nothing_installs_the_script():
    done = gradtool("--install-completion", "bash")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gradtool: error: no such option: --install-completion")


@pytest.mark.parametrize("shell", ["tcsh", ""])
def test_a_shell_that_is_not_known_is_a_usage_error(shell):
    done = gradtool("--show-completion", shell)
    assert (done.returncode, done.stdout) == (2, "")
    message = f"gradtool: error: invalid value for '--show-completion': '{shell}' is not one of 'bash'"
    assert done.stderr.startswith(message)
    done = gradtool("--show-completion")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gradtool: error: option '--show-completion' requires an argument")


def test_help_names_the_option_and_the_help_of_commands_does_not():
    assert "--show-completion" in gradtool("--help").stdout
    assert "-completion" not in gradtool("norm", "--help").stdout
