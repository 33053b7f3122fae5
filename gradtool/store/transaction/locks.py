"""Whether a run is alive: it holds a lock until it ends, however it does, on a file that no other user can open."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import SystemRefusedError, from_os_error
from gradtool.store.fs import UNSUPPORTED
from gradtool.store.transaction.log import HOST, boot

if TYPE_CHECKING:
    from pathlib import Path

    from gradtool.store.fs import Folder
    from gradtool.store.transaction.log import Log


class InUse(NamedTuple):
    """A run that is alive."""

    log: Log
    # Its process has ended, and another one still holds the lock.
    is_orphaned: bool = False

    def error(self, target: Path) -> SystemRefusedError:
        """The error for a run that is to write one of its targets too."""
        if self.is_orphaned:
            lock = self.log.home.with_suffix(".lock")
            message = f"in use: {self.log.who} has ended, but another process holds its lock; fuser {lock} names it"
        else:
            message = f"in use by {self.log.who}; --lock-timeout SECONDS waits for it"
        return SystemRefusedError(message, file=target, code="in-use")


def lock_of(run: str) -> str:
    """The name of the file that a run holds a lock on."""
    return f"{run}.lock"


def create_locked(folder: Folder, name: str) -> int | None:
    """Make a file and lock it, before another process can take it for an orphan; None if one did."""
    fd = folder.create(name)
    try:
        if lock(fd) is not False and _is_same(fd, folder, name):
            return fd
    except BaseException:
        os.close(fd)
        folder.unlink(name)
        raise
    os.close(fd)
    return None


def lock(fd: int) -> bool | None:
    """Lock a file until its descriptor is closed: whether it is locked now; None where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in (*UNSUPPORTED, errno.ENOLCK, errno.EBADF):
            return None
        raise
    return True


def claim(home: Folder, log: Log) -> int | InUse | None:
    """Take over a crashed run: a descriptor that holds its lock, or the run that is alive; None if it has ended.

    Raises:
        SystemRefusedError: the run crashed, and is another user's.
    """
    if log.owner != os.geteuid():
        # Its lock is not to be seen, nor is it ours to recover.
        if home.status(log.path.name) is None:
            return None
        if _has_process(log):
            return InUse(log)
        raise SystemRefusedError(
            f"is the log of a crashed run of user {log.owner}; recover it as that user (gradtool recover)",
            file=log.path,
            code="unfinished",
        )
    name = lock_of(log.run)
    try:
        fd = home.open(name, os.O_RDWR)
    except FileNotFoundError:
        return _claim_without_lock(home, log)
    except OSError as error:
        raise from_os_error(error, home.path / name) from error
    try:
        got = lock(fd)
        if _is_same(fd, home, name):
            if got or (got is None and not _has_process(log)):
                return fd
            os.close(fd)
            return InUse(log, is_orphaned=not _has_process(log))
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _claim_without_lock(home: Folder, log: Log) -> int | InUse | None:
    """The lock goes last when a run ends, so a log without one has lost it; it gets another."""
    if home.status(log.path.name) is None:
        return None
    if log.host == HOST and _has_process(log):
        return InUse(log)
    try:
        return create_locked(home, lock_of(log.run))
    except FileExistsError:
        return None
    except OSError as error:
        raise from_os_error(error, home.path) from error


def _is_same(fd: int, folder: Folder, name: str) -> bool:
    there, status = folder.status(name), os.fstat(fd)
    return there is not None and os.path.samestat(status, there) and stat.S_ISREG(status.st_mode)


def _has_process(log: Log) -> bool:
    """By its number; a process of another machine may be alive."""
    if log.host != HOST:
        return True
    if log.boot != boot():
        return False
    try:
        os.kill(log.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
