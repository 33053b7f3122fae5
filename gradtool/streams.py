"""The standard streams: always open, and what is printed arrives complete or is an error."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import select
import sys
from typing import TYPE_CHECKING, cast

from gradtool.errors import SystemRefusedError

if TYPE_CHECKING:
    from typing import TextIO


# What a runner of CI jobs takes for a command: `::` at the beginning of a line, after no more than blanks, borders and
# escape sequences; `##[` and `##vso[` anywhere. The last character of a match is escaped.
_COMMAND = re.compile(r"(?:^|(?<=[\r\n]))(?:\x1b\[[0-9;?]*[A-Za-z]|[^\w\r\n\x1b])*?::|##(?=\w*\[)")


class WorkflowCommands(str):
    """Lines that are commands to a runner of CI jobs, and printed as such."""

    __slots__ = ()


class _Stream(io.TextIOBase):
    """An unbuffered standard stream that writes all or raises `OSError`.

    Python's own drops the rest of a short write if it is unbuffered (PYTHONUNBUFFERED), and gives up on a full
    non-blocking pipe.
    """

    encoding = "utf-8"
    # A name that the terminal's encoding lacks must not fail a call whose files are written.
    errors = "backslashreplace"

    def __init__(self, fd: int, before: TextIO | None) -> None:
        self._fd = fd
        if before is not None:
            self.encoding = before.encoding

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if not isinstance(text, WorkflowCommands) and ("::" in text or "##" in text):
            printed = _COMMAND.sub(lambda match: f"{match[0][:-1]}\\x{ord(match[0][-1]):x}", text)
        else:
            printed = text
        rest = memoryview(printed.encode(self.encoding, self.errors))
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
        return len(text)


class _Stdout(_Stream):
    """The standard output: a failure is an error."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise lost_stdout(error.strerror or str(error)) from error


class _Stderr(_Stream):
    """The standard error: a failure is ignored."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)


def take_streams() -> None:
    """Open missing standard streams, replace Python's, and drop sizes of a terminal that are none."""
    for name in ("COLUMNS", "LINES"):
        # rich reads all that str.isdigit() takes for digits, such as ² or 5,000 nines.
        if re.fullmatch("[1-9][0-9]{0,4}", os.environ.get(name, "")) is None:
            os.environ.pop(name, None)
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # A data file must not get this descriptor, or a stray message could end up in it. The root folder can be
            # neither read nor written, and unlike /dev/null it exists in every chroot.
            os.open(os.sep, getattr(os, "O_PATH", os.O_RDONLY))
    sys.stdout = cast("TextIO", _Stdout(1, sys.stdout))
    sys.stderr = cast("TextIO", _Stderr(2, sys.stderr))


def require_stdout() -> None:
    """Raise `SystemRefusedError` if the result could not be read; called before a byte is changed."""
    if fcntl.fcntl(sys.stdout, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise lost_stdout("it is closed")
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        raise lost_stdout("its reader is gone")


def lost_stdout(reason: str) -> SystemRefusedError:
    """The error for a result that cannot be printed; disables stdout, because more output would not help."""
    sys.stdout = cast("TextIO", None)
    return SystemRefusedError(f"cannot print the result on stdout: {reason}")
