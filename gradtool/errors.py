"""Everything that can go wrong, each with its exit code and a code that a machine can read.

The message says what is wrong and what to do about it; `file` and `tensor` say where, and are printed in front of it.
Each class also inherits the standard exception that a caller of the Python API would think of first.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

EXIT_OK = 0
EXIT_FOUND = 1
EXIT_USAGE = 2
EXIT_INPUT = 3
EXIT_BACKEND = 4
EXIT_SYSTEM = 5


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: a line on stderr, an entry of `errors` in JSON."""

    code: str
    message: str
    file: str | None = None
    tensor: str | None = None

    @property
    def line(self) -> str:
        """What it is about, and what is wrong."""
        tensor = None if self.tensor is None else f"tensor {self.tensor!r}"
        return ": ".join(part for part in (self.file, tensor, self.message) if part)


class GradtoolError(Exception):
    """The base of every error that gradtool raises on purpose."""

    exit_code: ClassVar[int]
    code: ClassVar[str]
    # Said once after all the problems.
    summary: str | None = None

    def __init__(
        self, message: str, *, file: str | os.PathLike[str] | None = None, tensor: str | None = None, code: str = ""
    ) -> None:
        problem = Problem(code or self.code, message, None if file is None else str(file), tensor)
        super().__init__(message)
        self.problems: Sequence[Problem] = (problem,)

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> Self:
        """One error for several problems, of which there is at least one."""
        error = cls(problems[0].message)
        error.problems = tuple(problems)
        return error

    def __str__(self) -> str:
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        return f"{self.problems[0].line}{more}"

    def __reduce__(self) -> tuple[Any, ...]:
        # So that a worker process can hand it to its parent.
        return _restored, (type(self), self.args, self.__dict__)


class NonFiniteError(GradtoolError, ArithmeticError):
    """Values that are NaN or infinite, in what was read or in what would be written; `problems` names every tensor."""

    exit_code = EXIT_FOUND
    code = "nonfinite"

    def __init__(self, message: str, problems: Sequence[Problem]) -> None:
        super().__init__(message)
        self.summary = message
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return f"{self.summary}; {super().__str__()}"


class UsageError(GradtoolError, ValueError):
    """Arguments that make no sense, whatever the files hold."""

    exit_code = EXIT_USAGE
    code = "usage"


class BadInputError(GradtoolError, ValueError):
    """A file, an index, a shape, a type or a name that gradtool cannot work with."""

    exit_code = EXIT_INPUT
    code = "input"


class BackendUnavailableError(GradtoolError, RuntimeError):
    """A backend that was asked for by name and is not there."""

    exit_code = EXIT_BACKEND
    code = "backend"


class SystemRefusedError(GradtoolError, OSError):
    """The operating system said no: permission, disk full, a file that changed under our hands."""

    exit_code = EXIT_SYSTEM
    code = "system"


class DeviceMemoryError(SystemRefusedError):
    """The memory of the GPU is full."""

    code = "device-memory"


def shortened(text: str, most: int = 200) -> str:
    """The beginning and the end of a text that is too long to be read."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


def _restored(kind: type[GradtoolError], arguments: tuple[Any, ...], state: dict[str, Any]) -> GradtoolError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(state)
    return error


_REMEDIES = {
    errno.EACCES: "check the permissions of the file and its folder",
    errno.EPERM: "check the owner of the file and its folder",
    errno.EROFS: "use --output-dir to write somewhere else",
    errno.ENOSPC: "free some space, or use --output-dir on another disk",
    errno.EDQUOT: "the quota is used up; use --output-dir on another disk",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENOMEM: "raise the limit on memory (ulimit -v or -d)",
}


def told(error: OSError, file: str | os.PathLike[str]) -> GradtoolError:
    """The gradtool error for what went wrong with a file: that which it is already, or made of it."""
    return error if isinstance(error, GradtoolError) else from_os_error(error, file)


def from_os_error(error: OSError, file: str | os.PathLike[str]) -> GradtoolError:
    """The gradtool error for what the operating system said about a file."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return BadInputError("no such file", file=file, code="missing-file")
    if error.errno == errno.EISDIR:
        return BadInputError("is a folder, where a file is expected", file=file)
    if error.errno in (errno.ENXIO, errno.ENODEV):
        # What the system says when a socket is opened, or a device that is not there.
        return BadInputError("is not a regular file", file=file)
    if error.errno == errno.ENAMETOOLONG:
        return BadInputError("the name is too long", file=file, code="missing-file")
    if error.errno == errno.ELOOP:
        return BadInputError("symbolic links go round in a circle", file=file, code="missing-file")
    reason = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0)
    refused = SystemRefusedError(f"{reason}; {remedy}" if remedy else reason, file=file)
    refused.errno = error.errno
    return refused
