"""Completion of command lines by shells, as Typer has it; next to nothing is done unless a shell or its user asks.

Typer's scripts are installed here: Typer itself rewrites the start-up file of the shell, which a full disk would empty.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

from gradtool.errors import SystemRefusedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_FLAGS = _INSTALL, _SHOW = "--install-completion", "--show-completion"
# Where each shell gets its script from; and its start-up file, with the line there that has it look.
_PLACES = {
    "bash": (".bash_completions/gradtool.sh", ".bashrc", "source ~/.bash_completions/gradtool.sh"),
    "zsh": (".zfunc/_gradtool", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": (".config/fish/completions/gradtool.fish", "", ""),
}
SHELLS = tuple(_PLACES)
# What the scripts of Typer set: that this is a completion, and the words so far.
_ASKED = "_GRADTOOL_COMPLETE"
_WORDS = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
_WIDTH = 60
# With this, the flags take the name of a shell.
_TAKES_NAME = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"


def is_asked() -> bool:
    """Whether a shell asks for completions."""
    return _ASKED in os.environ


def is_about(arguments: Sequence[str]) -> bool:
    """Whether a command line is about completion itself."""
    return bool(arguments) and arguments[0] in _FLAGS


def program(arguments: Sequence[str]) -> str | None:
    """The name that is completed, however the program was called; otherwise usage shows how that was."""
    return "gradtool" if is_asked() or is_about(arguments) else None


def words() -> list[str]:
    """The words of the command line that a shell wants to have completed."""
    return " ".join(os.environ.get(name, "") for name in _WORDS).split()


def with_shell(arguments: Sequence[str]) -> list[str]:
    """A flag with the name of its shell: the one that is given, or that from which this process was called.

    Raises:
        UsageError: there is no completion for the shell, or it cannot be told which it is.
    """
    flag, *names = arguments
    name = names[0].lower() if names else _current()
    if name not in SHELLS or len(names) > 1:
        raise UsageError(f"name the shell: {flag} {', '.join(SHELLS[:-1])} or {SHELLS[-1]}")
    os.environ[_TAKES_NAME] = "1"
    return [flag, name]


def show_or_install(call: Callable[[Sequence[str]], Any], flag: str, shell: str) -> int:
    """Print the script for a shell, or install it; `call` is Typer. The exit code.

    Raises:
        SystemRefusedError: a file cannot be written; what the start-up file had is still there.
    """
    # Typer exits once it has printed.
    with contextlib.redirect_stdout(io.StringIO()) as script, contextlib.suppress(SystemExit):
        call([_SHOW, shell])
    if flag == _SHOW:
        sys.stdout.write(script.getvalue())
        return 0
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):  # noqa: PTH117 - pathlib is slow to import
        raise UsageError("HOME is not set to a folder; set it, so that the shell finds what is installed")
    path, startup, line = _PLACES[shell]
    place = os.path.join(home, path)  # noqa: PTH118
    with _by_hand(place, shell):
        os.makedirs(os.path.dirname(place), exist_ok=True)  # noqa: PTH103, PTH120
        with open(place, "wb") as file:  # noqa: PTH123
            file.write(script.getvalue().encode())
    if startup:
        with _by_hand(os.path.join(home, startup), shell) as start:  # noqa: PTH118
            _append_line(start, line.encode())
    sys.stdout.write(f"wrote {place}; {shell} completes gradtool from its next start on\n")
    return 0


@contextlib.contextmanager
def _by_hand(path: str, shell: str) -> Iterator[str]:
    """The path; an error about it says how to do without."""
    try:
        yield path
    except OSError as error:
        remedy = f"gradtool {_SHOW} {shell} prints the script, to install it by hand"
        raise SystemRefusedError(f"{error.strerror or error}; {remedy}", file=path) from error


def _append_line(path: str, line: bytes) -> None:
    """Append a line to a text file, unless it is there."""
    with open(path, "ab+") as file:  # noqa: PTH123
        file.seek(0)
        text = file.read()
        if line not in text:
            file.write((b"" if text.endswith(b"\n") or not text else b"\n") + line + b"\n")


def brief(text: str) -> str:
    """The help of an option in one line; Typer would break a longer one into several, which shells would offer."""
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def values(choices: Sequence[str]) -> Callable[[str], list[str]] | None:
    """What completes the value of an option that has these choices, in upper or lower case."""

    def complete(incomplete: str) -> list[str]:
        return [one if one.startswith(incomplete) else one.lower() for one in choices]

    return complete if choices and is_asked() else None


def _current() -> str:
    import shellingham  # as Typer finds it

    try:
        return str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        return ""
