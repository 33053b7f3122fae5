"""Transaction logs on the disk: found, read and appended to."""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import TYPE_CHECKING, Any

from gradtool.errors import from_os_error, os_errors_about, unfinished
from gradtool.store import fs
from gradtool.store.transaction.files import MARKER, log_of
from gradtool.store.transaction.log import MAX_BYTES, Log, line_of, parse

if TYPE_CHECKING:
    from gradtool.store.fs import Folder

_START = re.compile(rb'[0-9a-f]{8} \{"run":\{"id":"(\.gradtool-[0-9a-f]{12})"')
_START_BYTES = 64
# What the system says of a link, a socket, or a path that cannot exist.
_NOT_A_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG)


class InDoubtError(OSError):
    """A step could neither be appended to a log nor removed again."""


def is_trusted(owner: int, folder: Folder) -> bool:
    """Whether the files of a user count in a folder.

    In a sticky one (such as /tmp), where every user may add files, only those of this user, root and its owner do.
    """
    return not folder.mode & stat.S_ISVTX or owner in (0, os.geteuid(), folder.owner)


def read_log(folder: Folder, name: str) -> Log | None:
    """A log; None if the file is gone, is no log, or is not complete yet."""
    try:
        fd = folder.open(name, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NOT_A_FILE or _is_closed_to_us(folder, name, error):
            return None
        raise from_os_error(error, folder.path / name) from error
    with os_errors_about(folder.path / name), fs.closing(fd):
        status = os.fstat(fd)
        start = _START.match(os.pread(fd, _START_BYTES, 0)) if stat.S_ISREG(status.st_mode) else None
        if start is None or status.st_size > MAX_BYTES:
            return None
        own_name = log_of(start[1].decode())
        # A second name must not pass for another run.
        if not name.endswith(MARKER) and name != own_name:
            return None
        with os.fdopen(fd, "rb", closefd=False) as file:
            return _parsed(folder, own_name, status, file.read())


def _is_closed_to_us(folder: Folder, name: str, error: OSError) -> bool:
    """Whether another user's file could not be opened: it is not public yet, or never will be, or has a lease."""
    if error.errno not in (errno.EACCES, errno.EWOULDBLOCK):
        return False
    status = folder.status(name)
    return status is not None and status.st_uid != os.geteuid()


def _parsed(folder: Folder, name: str, status: os.stat_result, content: bytes) -> Log | None:
    try:
        return parse(folder.path / name, status, content)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if not is_trusted(status.st_uid, folder):
            return None
        # Its checksums are right. To ignore it could cost the data that it protects.
        what = "is a transaction log that this version of gradtool cannot read"
        files = f"{name.removesuffix('.run')}*"
        hint = f"recover with the version that wrote it, or delete {files} beside it to keep the data as it is"
        raise unfinished(what, folder.path / name, hint) from error


def append_step(fd: int, begin: int, *, fsync: bool, **entry: Any) -> int:
    """Append a step at byte `begin`, the end of a log; the bytes it takes. If that fails, it is not in the log.

    Raises:
        InDoubtError: it may be in the log.
    """
    line = line_of(**entry)
    try:
        count = fs.write_all(fd, [line], begin)
        if fsync:
            fs.sync(fd)
    except OSError as error:
        try:
            fs.resize(fd, begin)
            if fsync:
                fs.sync(fd)
        except OSError:
            raise InDoubtError(error.errno, error.strerror) from error
        raise
    return count
