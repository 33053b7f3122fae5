"""Completion in the shells themselves: what is there after a Tab."""

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import COMMAND, gradtool

EVERY_COMMAND = {
    "norm", "diff", "check", "info", "clip", "accumulate", "zero", "layernorm-backward", "recover", "doctor",
}  # fmt: skip


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "--interactive"],
}
SETUP = {
    "bash": "source ./script",
    "zsh": "autoload -Uz compinit; compinit -u -D; source ./script",
    "fish": "source ./script",
}
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
        script = gradtool("--show-completion", name)
        assert script.returncode == 0, script
        (folder / "script").write_text(script.stdout)
        self.shown = ""
        pid, self._fd = pty.fork()
        if pid == 0:
            os.chdir(folder)
            path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
            env = {"PATH": path, "HOME": str(folder), "TERM": "xterm", "LANG": "C.UTF-8"}
            os.execvpe(SHELLS[name][0], SHELLS[name], env)  # noqa: S606
        self._pid = pid
        # What is typed is shown, too; only what is printed has no quotes.
        self.type(f"{SETUP[name]}; echo is''ready\n")
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
    one = Shell(request.param, folder)
    yield one
    one.close()


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
        ("gradtool --inst", {"--install-completion"}),
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
    assert done.stdout == "--fast\tRead headers only, and no values.\n"


def test_it_is_installed_for_a_shell_that_is_named_and_only_there(tmp_path):
    done = gradtool("--install-completion", "fish", env={"HOME": str(tmp_path)})
    assert done.returncode == 0, done
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.fish")] == [
        ".config/fish/completions/gradtool.fish"
    ]
    assert "gradtool" in (tmp_path / ".config/fish/completions/gradtool.fish").read_text()


@pytest.mark.parametrize(("shell", "name", "line"), [("bash", ".bashrc", "source "), ("zsh", ".zshrc", "fpath+=")])
def test_the_start_up_file_of_the_shell_gets_one_line_more_and_keeps_all_others(tmp_path, shell, name, line):
    # As an editor may leave it: neither UTF-8 nor with a newline at its end.
    (tmp_path / name).write_bytes(b"alias x=\xff")
    for _ in range(2):
        done = gradtool("--install-completion", shell, env={"HOME": str(tmp_path)})
        assert (done.returncode, done.stderr) == (0, "")
        (place,) = re.fullmatch(
            rf"wrote (.*); {shell} completes gradtool from its next start on\n", done.stdout
        ).groups()
        assert Path(place).read_text() == gradtool("--show-completion", shell).stdout
    before, added, end = (tmp_path / name).read_bytes().split(b"\n")
    assert (before, end) == (b"alias x=\xff", b"")
    assert added.startswith(line.encode())


@pytest.mark.parametrize("home", ["", "here"])
def test_without_a_home_nothing_is_installed(tmp_path, home):
    done = gradtool("--install-completion", "bash", env={"HOME": home}, cwd=tmp_path)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert done.stderr.startswith("gradtool: error: HOME is not set to a folder; set it")


def test_a_start_up_file_that_has_no_room_stays_as_it_was(tmp_path):
    startup = tmp_path / ".bashrc"
    startup.write_bytes(b"x" * 4096)
    # Four units of 512 or 1,024 bytes: room for the script, and none behind what is there.
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 4; exec "$@"', "-", *COMMAND, "--install-completion", "bash"],
        env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, startup.read_bytes()) == (5, "", b"x" * 4096)
    remedy = "gradtool --show-completion bash prints the script, to install it by hand"
    assert done.stderr == f"gradtool: error: {startup}: File too large; {remedy}\n"


@pytest.mark.parametrize("arguments", [["tcsh"], ["bash", "zsh"], [""]])
def test_a_shell_that_is_not_known_is_a_usage_error(arguments):
    done = gradtool("--show-completion", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gradtool: error: name the shell: --show-completion bash, zsh or fish\n"


def test_help_names_the_options_and_the_help_of_commands_does_not():
    assert "--install-completion" in gradtool("--help").stdout
    assert "--install-completion" not in gradtool("norm", "--help").stdout
