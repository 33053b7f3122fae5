"""Completion of command lines by shells: Typer's own, but for `--install-completion`, which writes no start-up file."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The start-up file of each shell that Typer knows, and the line that has it complete gradtool.
_LINES = {
    "bash": ("~/.bashrc", 'eval "$(gradtool --show-completion bash)"'),
    "zsh": ("~/.zshrc, below compinit", 'eval "$(gradtool --show-completion zsh)"'),
    "fish": ("~/.config/fish/config.fish", "gradtool --show-completion fish | source"),
    "pwsh": ("$PROFILE", "gradtool --show-completion pwsh | Out-String | Invoke-Expression"),
    "powershell": ("$PROFILE", "gradtool --show-completion powershell | Out-String | Invoke-Expression"),
}
# What Typer has is wrong for the first, and too wide for a narrow terminal.
_HELP = {
    "install_completion": "Print the line that has bash, zsh, fish or pwsh complete commands.",
    "show_completion": "Print the script that the line runs.",
}
# What the scripts of Typer set: that this is a completion, and the words so far.
_ASKED = "_GRADTOOL_COMPLETE"
_WORDS = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
_WIDTH = 60
# With this in the environment, Typer's options take the name of a shell instead of guessing it.
TAKES_NAME = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"


def is_requested() -> bool:
    """Whether a shell asks for completions."""
    return _ASKED in os.environ


def words() -> list[str]:
    """The words of the command line that a shell wants to have completed."""
    return " ".join(os.environ.get(name, "") for name in _WORDS).split()


def print_instead_of_installing(command: Any) -> None:
    """Have Typer's `--install-completion` print the line to add, and change no file."""
    for parameter in command.params:
        if parameter.name in _HELP:
            parameter.metavar, parameter.help = "SHELL", _HELP[parameter.name]
        if parameter.name == "install_completion":
            parameter.callback = _print_line


def _print_line(context: Any, _parameter: Any, shell: str | None) -> None:
    if shell and not context.resilient_parsing:
        file, line = _LINES[shell]
        sys.stdout.write(f"# Add this line to {file}:\n{line}\n")
        context.exit()


def brief(text: str) -> str:
    """The help of an option in one line; Typer would break a longer one into several, which shells would offer."""
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def values(choices: Sequence[str]) -> Callable[[str], list[str]] | None:
    """What completes the value of an option that has these choices, in upper or lower case."""

    def complete(incomplete: str) -> list[str]:
        return [one if one.startswith(incomplete) else one.lower() for one in choices]

    return complete if choices and is_requested() else None
