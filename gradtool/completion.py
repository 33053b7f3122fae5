"""Completion of command lines by shells, as Typer has it; next to nothing is done unless a shell or its user asks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gradtool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FLAGS = ("--install-completion", "--show-completion")
SHELLS = ("bash", "zsh", "fish")
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
