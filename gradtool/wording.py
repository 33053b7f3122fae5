"""Text that the command and the Python functions word differently: `--eps` is `eps` there."""

from __future__ import annotations

from typing import Any, NamedTuple, Self


class Wording(NamedTuple):
    """What the command calls something, and what Python does."""

    command: str
    python: str


class Text(str):
    """A message; as a string it is Python's, and `command` is that of the command."""

    __slots__ = ("command",)
    command: str

    def __new__(cls, python: str, command: str) -> Self:
        """Make a message of both wordings."""
        text = super().__new__(cls, python)
        text.command = command
        return text

    def __reduce__(self) -> tuple[type[Text], tuple[str, str]]:
        """Pickle both wordings."""
        return Text, (str(self), self.command)


def say(template: str, *parts: Any) -> Text:
    """Fill a template, once in the wording of Python and once in that of the command."""
    python = [part.python if isinstance(part, Wording) else part for part in parts]
    command = [as_command(part) for part in parts]
    return Text(template.format(*python), template.format(*command))


def as_command(part: Any) -> Any:
    """Return a part of a message as the command words it."""
    return part.command if isinstance(part, (Text, Wording)) else part


def option(name: str, value: Any = None) -> Wording:
    """Name an option, perhaps with its value: `--nonfinite zero` or `nonfinite="zero"`, `--mean` or `mean=True`."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return Wording(flag, name)
    if isinstance(value, bool):
        return Wording(flag if value else flag.replace("--", "--no-", 1), f"{name}={value}")
    return Wording(f"{flag} {_quoted(value)}", f"{name}={_literal(value)}")


def call(name: str, *arguments: str, **options: Any) -> Wording:
    """Name a call: `gradtool recover grads/` or `gradtool.recover("grads/")`."""
    named = [option(key, value) for key, value in options.items()]
    command = ["gradtool", name.replace("_", "-"), *map(_quoted, arguments), *(one.command for one in named)]
    python = [*map(_literal, arguments), *(one.python for one in named)]
    return Wording(" ".join(command), f"gradtool.{name}({', '.join(python)})")


def _quoted(value: Any) -> str:
    import shlex  # only needed for messages

    return shlex.quote(str(value))


def _literal(value: Any) -> str:
    return '"{}"'.format(value.replace("\\", "\\\\").replace('"', '\\"')) if isinstance(value, str) else repr(value)
