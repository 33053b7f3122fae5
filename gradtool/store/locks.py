"""Locks on records and on the folders they are in; the system lets go of them when a process ends, however it does."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from typing import TYPE_CHECKING

from gradtool.errors import BadInputError, SystemRefusedError, from_os_error
from gradtool.store.records import HOST
from gradtool.store.system import UNSUPPORTED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gradtool.store.records import Record

# Nobody holds a folder for longer than it takes to read its records.
_PATIENCE_SECONDS = 10.0


@contextlib.contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Have a folder's records to oneself, as long as it takes to look at them and to add one.

    Raises:
        SystemRefusedError: somebody else does not let go.
        BadInputError: there is no such folder.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise BadInputError("no such folder", file=folder, code="missing-file") from error
        raise from_os_error(error, folder) from error
    try:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while lock(fd) is False:
            if time.monotonic() > deadline:
                raise SystemRefusedError("another process keeps this folder locked", file=folder, code="in-use")
            time.sleep(0.002)
        yield
    finally:
        os.close(fd)


def lock(fd: int) -> bool | None:
    """Lock a file until its descriptor is closed: whether that was to be had; None where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in (*UNSUPPORTED, errno.ENOLCK, errno.EBADF):
            return None
        raise
    return True


def claim(record: Record) -> int | None:
    """Take over the home record of a run that died: a descriptor that holds its lock; None if it lives, or is no more.

    Only while its folder is held.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            fd = os.open(record.path, os.O_RDWR | flags)
        except PermissionError:
            # Somebody else's: to see whether it is alive, looking is enough.
            fd = os.open(record.path, os.O_RDONLY | flags)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise from_os_error(error, record.path) from error
    try:
        got = lock(fd)
        if (got is None and not _is_alive(record)) or (got and _is_same(fd, record.path)):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _is_same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _is_alive(record: Record) -> bool:
    """By its number, where there are no locks; a process of another machine may be."""
    if record.host != HOST:
        return True
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
