"""Every call that changes what is on the disk, in one place, where a test can make it the last, or make it fail.

`GRADTOOL_FAULT=KIND@N`, for tests alone, strikes at the Nth of these calls: `kill` ends the process before it, `tear`
does the same with half of what it writes written, `short` writes half, and the name of an error, such as `ENOSPC`, is
what the call fails with; with `@N+`, every later call too.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Buffer = bytes | bytearray | memoryview

# What the system says where it cannot do a thing at all, here or ever.
UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_steps = itertools.count(1)


def create(path: Path, mode: int = 0o600) -> int:
    """Make a file that was not there; its descriptor."""
    _step()
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def write_all(fd: int, parts: Sequence[Buffer], begin: int) -> int:
    """Write the parts, one after another, from byte `begin` on, however many calls it takes; the bytes written."""
    views, done = [memoryview(part) for part in parts], 0
    while views:
        count = _written(fd, views, begin + done)
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
    return done


def _written(fd: int, views: Sequence[memoryview], begin: int) -> int:
    fault = _step()
    if fault is None:
        return os.pwritev(fd, views, begin)
    half = b"".join(views)[: -(-sum(map(len, views)) // 2)]
    count = os.pwrite(fd, half, begin)
    if fault == "tear":
        os.kill(os.getpid(), signal.SIGKILL)
    return count


def write_file(path: Path, content: Buffer) -> None:
    """Write the beginning of a file that is there."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        write_all(fd, [content], 0)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder, or find that it is there."""
    _step()
    path.mkdir(exist_ok=True)


def resize(fd: int, size: int) -> None:
    """Cut a file off at `size`, or make it that long."""
    _step()
    os.ftruncate(fd, size)


def reserve(fd: int, begin: int, end: int) -> None:
    """Have the disk keep room for a range of a file, where the file system can promise that."""
    if begin == end or not hasattr(os, "posix_fallocate"):
        return
    _step()
    try:
        os.posix_fallocate(fd, begin, end - begin)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def change_mode(fd: int, mode: int) -> None:
    """Set the permissions of a file."""
    _step()
    os.fchmod(fd, mode)


def sync(fd: int) -> None:
    """Bring a file's content, or a folder's entries, to the disk."""
    _step()
    os.fsync(fd)


def sync_path(path: Path) -> None:
    """As `sync`, by name; a file system on which folders cannot be synced need not have it done."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def link(path: Path, name: Path) -> None:
    """Give a file a second name, which must be new."""
    _step()
    os.link(path, name)


def rename(path: Path, target: Path) -> None:
    """Put a file in the place of another."""
    _step()
    os.replace(path, target)  # noqa: PTH105 - in one line with the others


def unlink(path: Path) -> None:
    """Remove a file, if it is there."""
    _step()
    path.unlink(missing_ok=True)


def _step() -> str | None:
    """Count a call; what is to befall what it writes, if anything."""
    fault = os.environ.get("GRADTOOL_FAULT")
    if not fault:
        return None
    kind, _, number = fault.partition("@")
    step, first = next(_steps), int(number.removesuffix("+"))
    if step != first and not (step > first and number.endswith("+")):
        return None
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind in ("short", "tear"):
        return kind
    raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))
