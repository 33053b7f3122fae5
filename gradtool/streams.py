"""The standard streams: safe to have, and what is printed arrives whole, or is an error."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import sys
from typing import TYPE_CHECKING, cast

from gradtool.errors import SystemRefusedError

if TYPE_CHECKING:
    from typing import TextIO


class _Stream(io.TextIOBase):
    """A standard stream without a buffer: all that is written has arrived, or `OSError` says why not.

    Python's own drops the rest of a short write where it has no buffer either (PYTHONUNBUFFERED), and gives up on a
    full pipe that does not block.
    """

    encoding = "utf-8"
    # Never let a name that the terminal's encoding lacks end a run whose files are written.
    errors = "backslashreplace"

    def __init__(self, fd: int, before: TextIO | None) -> None:
        self._fd = fd
        if before is not None:
            self.encoding = before.encoding

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._fd)

    def writable(self) -> bool:
        """Whether it may be written to, as `io` wants to know."""
        return True

    def write(self, text: str) -> int:
        """Write all of a text, waiting as long as that takes."""
        rest = memoryview(text.encode(self.encoding, self.errors))
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
        return len(text)


class _Stdout(_Stream):
    """The standard output, without which there is no result."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise lost_stdout(error.strerror or str(error)) from error


class _Stderr(_Stream):
    """The standard error: what cannot be said on it does not change what is done."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)


def take_streams() -> None:
    """Make the standard streams safe to have."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # Never let a data file be opened as this descriptor, where a stray message would be written into it. What
            # takes its place can be neither read nor written, and unlike /dev/null is there in every chroot.
            os.open(os.sep, getattr(os, "O_PATH", os.O_RDONLY))
    sys.stdout = cast("TextIO", _Stdout(1, sys.stdout))
    sys.stderr = cast("TextIO", _Stderr(2, sys.stderr))


def require_stdout() -> None:
    """Refuse to work when nobody can read the result; asked before a byte is changed."""
    if fcntl.fcntl(sys.stdout, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise lost_stdout("it is closed")
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        raise lost_stdout("its reader is gone")


def lost_stdout(reason: str) -> SystemRefusedError:
    """The error for a result that cannot be printed; nothing is tried on stdout from here on."""
    # Another object, after what has arrived of this one, would not mend it.
    sys.stdout = cast("TextIO", None)
    return SystemRefusedError(f"cannot print the result on stdout: {reason}")
