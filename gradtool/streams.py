"""The standard streams: always open, and what is printed arrives complete or is an error."""

from __future__ import annotations

import fcntl
import io
import os
import re
import select
import sys
from typing import TYPE_CHECKING, Any, cast

from gradtool.errors import SystemRefusedError

if TYPE_CHECKING:
    from typing import TextIO

_STDERR = 2


class _File(io.FileIO):
    """A standard stream that waits while a pipe is full. A failure of stdout is an error, one of stderr is ignored."""

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # A pipe that does not block is full.
                poll = select.poll()
                poll.register(self, select.POLLOUT)
                poll.poll()
        except OSError as error:
            if self.fileno() == _STDERR or sys.stdout is None:
                return memoryview(data).nbytes
            raise lost_stdout(error.strerror or str(error)) from error
        return written


def replace_std_streams() -> None:
    """Open missing standard streams, replace Python's, and drop sizes of a terminal that are none."""
    for name in ("COLUMNS", "LINES"):
        # rich reads all that str.isdigit() takes for digits, such as ² or 5,000 nines.
        if re.fullmatch("[1-9][0-9]{0,4}", os.environ.get(name, "")) is None:
            os.environ.pop(name, None)
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # A data file must not get this descriptor, or a stray message could end up in it. Writing to the end of a
            # pipe that is read fails, and unlike /dev/null a pipe exists in every chroot.
            os.close(os.pipe()[1])
    # Whoever prints flushes.
    sys.stdout, sys.stderr = (
        # A name that the terminal's encoding lacks must not fail a call whose files are written.
        io.TextIOWrapper(
            io.BufferedWriter(_File(fd, "w", closefd=False)),
            encoding="utf-8" if before is None else before.encoding,
            errors="backslashreplace",
            line_buffering=fd == _STDERR,
        )
        for fd, before in ((1, sys.stdout), (_STDERR, sys.stderr))
    )


def require_stdout() -> None:
    """Raise `SystemRefusedError` if the result could not be read; called before a byte is changed."""
    if fcntl.fcntl(sys.stdout, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise lost_stdout("it is closed")
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        raise lost_stdout("its reader is gone")


def lost_stdout(reason: str) -> SystemRefusedError:
    """Return the error for a result that cannot be printed; disable stdout, because more output would not help."""
    sys.stdout = cast("TextIO", None)
    return SystemRefusedError(f"cannot print the result on stdout: {reason}")
