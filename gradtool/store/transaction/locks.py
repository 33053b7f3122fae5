"""The locks of runs: a live run holds a lock on a file that no other user can open."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import SystemRefusedError, call, option, os_errors_about, say, unfinished
from gradtool.store.system import UNSUPPORTED, boot_id
from gradtool.store.transaction.log import HOST

if TYPE_CHECKING:
    from pathlib import Path

    from gradtool.store.fs import Folder
    from gradtool.store.transaction.log import Log


class InUse(NamedTuple):
    """A run that is alive."""

    log: Log
    # Its process has ended, but another process inherited the lock.
    is_orphaned: bool = False

    def error(self, target: Path) -> SystemRefusedError:
        """Return the error for a call that would write a target of the run."""
        if self.is_orphaned:
            lock = self.log.log_path.with_suffix(".lock")
            message = f"in use: {self.log.process} has ended, but another process holds its lock"
            return SystemRefusedError(message, file=target, code="in-use", hint=f"find it with fuser {lock}")
        hint = say("wait for it with {}", option("lock_timeout"))
        return SystemRefusedError(f"in use by {self.log.process}", file=target, code="in-use", hint=hint)


def create_locked(folder: Folder, name: str) -> int | None:
    """Make a file and lock it; return None if another process took it for an orphan first."""
    fd, _ = folder.create(name)
    try:
        if lock(fd) is not False and is_file_at(fd, folder, name):
            return fd
    except BaseException:
        os.close(fd)
        folder.unlink(name)
        raise
    os.close(fd)
    return None


def lock(fd: int) -> bool | None:
    """Lock a file until its descriptor is closed, and tell whether that succeeded; None where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno in (*UNSUPPORTED, errno.ENOLCK, errno.EBADF):
            return None
        raise
    return True


def claim(folder: Folder, log: Log) -> int | InUse | None:
    """Lock a crashed run, whose log is in a folder; return the descriptor with the lock, or the run if it is alive.

    None if it has ended.
    """
    if log.owner != os.geteuid():
        # We can neither see its lock nor recover it.
        if folder.status(log.path.name) is None:
            return None
        if has_process(log):
            return InUse(log)
        hint = say("run {} as that user", call("recover", str(log.path.parent)))
        raise unfinished(f"is the log of a crashed run of user {log.owner}", log.path, hint)
    name = f"{log.run}.lock"
    with os_errors_about(folder.path / name):
        try:
            fd = folder.open(name, os.O_RDWR)
        except FileNotFoundError:
            return _claim_without_lock(folder, log)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        is_locked = lock(fd)
        if not is_file_at(fd, folder, name):
            return None
        is_alive = has_process(log)
        if not is_locked and (is_locked is False or is_alive):
            return InUse(log, is_orphaned=not is_alive)
        stack.pop_all()
        return fd


def _claim_without_lock(folder: Folder, log: Log) -> int | InUse | None:
    """Make a new lock for a log that has lost it: a run removes its lock last."""
    if folder.status(log.path.name) is None:
        return None
    if log.host == HOST and has_process(log):
        return InUse(log)
    fd = None
    with os_errors_about(folder.path), contextlib.suppress(FileExistsError):
        fd = create_locked(folder, f"{log.run}.lock")
    # Otherwise, another process has just made the lock.
    return InUse(log) if fd is None else fd


def is_file_at(fd: int, folder: Folder, name: str) -> bool:
    """Check whether a name is that of an open file."""
    there, status = folder.status(name), os.fstat(fd)
    return there is not None and os.path.samestat(status, there) and stat.S_ISREG(status.st_mode)


def has_process(log: Log) -> bool:
    """Check whether the process of a run exists; a process on another machine may."""
    if log.host != HOST:
        return True
    if log.boot != boot_id():
        return False
    try:
        os.kill(log.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # It is another user's.
    return True
