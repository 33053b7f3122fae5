"""Everything that can go wrong, each with an exit code and a machine-readable code, and the words that say so.

An error is data: what is wrong, where (file and tensor), and a hint, which says what to do. The command and Python
spell options differently: a message that names one is a `Text`, made by `say`. Each class also inherits the standard
exception that callers of the Python API would expect.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EXIT_OK = 0
EXIT_FOUND = 1
EXIT_USAGE = 2
EXIT_INPUT = 3
EXIT_BACKEND = 4
EXIT_SYSTEM = 5
EXIT_BUG = 70


class Text(str):
    """A text that is Python's as a string, with that of the command as `command`."""

    __slots__ = ("command",)
    command: str

    def __new__(cls, python: str, command: str) -> Self:
        """Make a text of both."""
        text = super().__new__(cls, python)
        text.command = command
        return text

    def __reduce__(self) -> tuple[type[Text], tuple[str, str]]:
        """Pickle both."""
        return Text, (str(self), self.command)


def as_command(part: Any) -> Any:
    """Return a part of a message as the command spells it; other values stay as they are."""
    return part.command if isinstance(part, Text) else part


def say(template: str, *parts: Any) -> Text:
    """Fill a template, once with the parts as Python spells them and once as the command does."""
    return Text(template.format(*parts), template.format(*map(as_command, parts)))


def option(name: str, value: Any = None) -> Text:
    """Name an option, perhaps with its value: `--nonfinite zero` or `nonfinite="zero"`, `--mean` or `mean=True`."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return Text(name, flag)
    if isinstance(value, bool):
        return Text(f"{name}={value}", flag if value else flag.replace("--", "--no-", 1))
    return Text(f"{name}={_literal(value)}", f"{flag} {_quoted(value)}")


def call(name: str, *arguments: str, **options: Any) -> Text:
    """Name a call: `gradtool recover grads/` or `gradtool.recover("grads/")`."""
    named = [option(key, value) for key, value in options.items()]
    command = ["gradtool", name.replace("_", "-"), *map(_quoted, arguments), *map(as_command, named)]
    return Text(f"gradtool.{name}({', '.join([*map(_literal, arguments), *named])})", " ".join(command))


def _quoted(value: Any) -> str:
    import shlex  # only needed for messages

    return shlex.quote(str(value))


def _literal(value: Any) -> str:
    return '"{}"'.format(value.replace("\\", "\\\\").replace('"', '\\"')) if isinstance(value, str) else repr(value)


@dataclass(frozen=True)
class Problem:
    """An error or a warning: a line on stderr, perhaps with a hint below it, and an entry in JSON.

    `index` is the number of the element that it is about, in C order.
    """

    code: str
    message: str
    file: str | None = None
    tensor: str | None = None
    hint: str | None = None
    index: int | None = None

    @property
    def line(self) -> str:
        """The message, after the file and the tensor."""
        tensor = None if self.tensor is None else f"tensor {self.tensor!r}"
        return ": ".join(part for part in (self.file, tensor, self.message) if part)

    def as_command(self) -> Problem:
        """Return the same as the command spells it."""
        return replace(self, message=as_command(self.message), hint=as_command(self.hint))


class GradtoolError(Exception):
    """The base of every error that gradtool raises on purpose."""

    exit_code: ClassVar[int]
    code: ClassVar[str]
    # What several problems have in common; printed once, after all of them.
    summary: str | None = None

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        code: str = "",
        hint: str | None = None,
    ) -> None:
        problem = Problem(code or self.code, message, None if file is None else str(file), tensor, hint)
        super().__init__(message)
        self.problems: Sequence[Problem] = (problem,)

    @classmethod
    def from_problems(cls, problems: Sequence[Problem], hint: str | None = None) -> Self:
        """Return an error with several problems; those without a hint get this one."""
        error = cls(problems[0].message)
        error.problems = tuple(replace(problem, hint=problem.hint or hint) for problem in problems)
        return error

    def __str__(self) -> str:
        first = self.problems[0]
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return "; ".join(part for part in (self.summary, f"{first.line}{more}", first.hint) if part)


class NonFiniteError(GradtoolError, ArithmeticError):
    """NaN or Inf in the input or in the result; `problems` names every tensor."""

    exit_code = EXIT_FOUND
    code = "nonfinite"

    def __init__(self, message: str, problems: Sequence[Problem] = (), hint: str | None = None) -> None:
        # Unpickling passes the message alone.
        super().__init__(message)
        self.summary = message
        self.problems = tuple(replace(problem, hint=hint or problem.hint) for problem in problems)


class TooFewError(GradtoolError, ValueError):
    """Too few gradients are left once `screen` has left out others; `problems` names each of those."""

    exit_code = EXIT_FOUND
    code = "too-few"


class UsageError(GradtoolError, ValueError):
    """Arguments that are invalid, whatever the files contain."""

    exit_code = EXIT_USAGE
    code = "usage"


class BadInputError(GradtoolError, ValueError):
    """A file, an index, a shape, a dtype or a name that gradtool cannot work with."""

    exit_code = EXIT_INPUT
    code = "input"


class BackendUnavailableError(GradtoolError, RuntimeError):
    """A backend that was requested by name and is not available."""

    exit_code = EXIT_BACKEND
    code = "backend"


class SystemRefusedError(GradtoolError, OSError):
    """The operating system refused: no permission, disk full, a file that changed during the call."""

    exit_code = EXIT_SYSTEM
    code = "system"


class DeviceMemoryError(SystemRefusedError):
    """The GPU is out of memory."""

    code = "device-memory"


class BugError(AssertionError):
    """An invariant does not hold: a bug in gradtool, which stops here instead of changing a file."""


def ensure(condition: bool, message: str) -> None:
    """Raise `BugError` with a message if a condition that must always hold does not."""
    if not condition:
        raise BugError(message)


def shortened(text: str, length: int = 200) -> str:
    """Return a text, without its middle if it is longer than `length`."""
    return text if len(text) <= length else f"{text[: length // 2]}…{text[-length // 2 :]}"


def printable(text: str) -> str:
    """Escape all control characters, which a terminal might act on, and the second # of two.

    In the log of a CI job, `##[add-mask]x` or `##vso[...]x` anywhere in a line is a command to the runner. For those
    that begin a line, such as `::error::x`, see `gradtool.report.messages`.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text.replace("##", "#\\x23")


def number_of(number: int, noun: str) -> str:
    """Return a number with its noun, singular or plural: "1 tensor", "2,000 tensors"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def size_of(nbytes: float) -> str:
    """Return a number of bytes in the unit that suits it: "512 B", "31.6 kB", "6.4 GB"."""
    # Of three digits, so that 999,950 is 1.0 MB.
    exponent = max(0, int(f"{nbytes:.2e}".partition("e")[2]))
    unit = min(exponent // 3, len(_UNITS) - 1)
    return f"{nbytes / 1000**unit:.{(1, 1, 0)[exponent % 3] if unit else 0}f} {_UNITS[unit]}"


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
NO_SUCH_FILE = "no such file"
NO_SUCH_FOLDER = "no such folder"
# The message and the error code of each.
_BAD_INPUT = {
    errno.ENOENT: (NO_SUCH_FILE, "missing-file"),
    errno.ENOTDIR: (NO_SUCH_FILE, "missing-file"),
    errno.ENAMETOOLONG: ("the name is too long", "missing-file"),
    errno.ELOOP: ("symbolic links form a loop", "missing-file"),
    errno.EISDIR: ("is a folder, not a file", ""),
    # From opening a socket, or a device that does not exist.
    errno.ENXIO: ("is not a regular file", ""),
    errno.ENODEV: ("is not a regular file", ""),
}
_HINTS: dict[int, str] = {
    errno.EACCES: "check the permissions of the file and its folder",
    errno.EPERM: "check the owner of the file and its folder",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space or raise the quota",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENOMEM: "raise the limit on memory (ulimit -v or -d)",
}


@contextlib.contextmanager
def os_errors_about(file: str | os.PathLike[str]) -> Iterator[None]:
    """Turn every `OSError` of the block into a gradtool error that names the file."""
    try:
        yield
    except GradtoolError:
        raise
    except OSError as error:
        raise from_os_error(error, file) from error


def from_os_error(error: OSError, file: str | os.PathLike[str]) -> GradtoolError:
    """Return the gradtool error for what the operating system reports about a file; a gradtool error stays as it is."""
    if isinstance(error, GradtoolError):
        return error
    if error.errno in _BAD_INPUT:
        message, code = _BAD_INPUT[error.errno]
        return BadInputError(message, file=file, code=code)
    if error.errno == errno.EACCES and (denied := _missing_permission(os.fspath(file))) is not None:
        refusal = SystemRefusedError(f"{error.strerror}: {denied[1]}", file=denied[0], hint="check its permissions")
    else:
        refusal = SystemRefusedError(error.strerror or str(error), file=file, hint=_HINTS.get(error.errno or 0))
    refusal.errno = error.errno
    return refusal


def _missing_permission(file: str) -> tuple[str, str] | None:
    """Return the file, or the folder on the way to it, that lacks a permission, and what cannot be done to it."""
    for path in dict.fromkeys((file, os.path.realpath(file))):
        folders = [path]
        while (parent := os.path.dirname(folders[0])) not in (folders[0], ""):  # noqa: PTH120 - pathlib is slow to import
            folders.insert(0, parent)
        for folder in folders[:-1]:
            if not _may(folder, os.X_OK):
                return (folder, "cannot enter this folder") if os.path.isdir(folder) else None  # noqa: PTH112
        is_folder = os.path.isdir(path)  # noqa: PTH112
        rights = {os.X_OK: "enter", os.R_OK: "list"} if is_folder else {os.R_OK: "read"}
        for right, verb in (rights | {os.W_OK: "write to"}).items():
            if os.path.exists(path) and not _may(path, right):  # noqa: PTH110
                return path, f"cannot {verb} this {'folder' if is_folder else 'file'}"
    return None


def _may(path: str, right: int) -> bool:
    return os.access(path, right, effective_ids=os.access in os.supports_effective_ids)


def unfinished(message: str, file: str | os.PathLike[str] | None, hint: str) -> SystemRefusedError:
    """Return the error for a file that a crashed or a live run may leave half changed."""
    return SystemRefusedError(message, file=file, code="unfinished", hint=hint)


def changed_meanwhile(file: str | os.PathLike[str]) -> SystemRefusedError:
    """Return the error for a file that has changed since its header was read."""
    return SystemRefusedError(
        "was changed by another program in the meantime", file=file, code="changed", hint="run the command again"
    )
