"""Open folders, and every call that changes the disk.

A path may lead elsewhere from one instant to the next. So a folder is opened once, and all names are looked up in it. A
file that was made or checked is recognized by its inode when it is opened again.

For tests, `GRADTOOL_FAULT=KIND@N` strikes at the Nth call that changes the disk. `kill` ends the process before the
call, `tear` after half of what it writes, `short` makes it write half. The name of a signal, such as `SIGTERM`, sends
that before the call; the name of an error, such as `ENOSPC`, makes the call fail with it. With `@N+`, all later calls
are struck too.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import stat
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool.errors import SystemRefusedError, changed_meanwhile
from gradtool.store import system
from gradtool.store.system import SECTOR, UNSUPPORTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# The names of all files that runs leave beside the data begin with this.
PREFIX = ".gradtool-"
# Counted up by each call that changes the disk.
steps = itertools.count(1)
# The name now leads to a link, a folder, a socket or nothing.
_REPLACED = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOENT)
# The folder is gone, not empty, or no folder; or another user's, as the one above it may be.
_NOT_REMOVABLE = (
    errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM,
)  # fmt: skip
_TO_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The last part of the path must not be a link.
TO_SEARCH = _TO_LIST | system.TO_SEARCH


def step() -> str | None:
    """Count a call that changes the disk, and strike if it is due; return `short` or `tear`, which the caller does."""
    fault = os.environ.get("GRADTOOL_FAULT")
    if not fault:
        return None
    kind, _, number = fault.partition("@")
    now, first = next(steps), int(number.removesuffix("+"))
    if now != first and not (now > first and number.endswith("+")):
        return None
    if kind == "kill":  # pragma: no cover - a process that is killed cannot report it
        os.kill(os.getpid(), signal.SIGKILL)
    if kind.startswith("SIG"):  # pragma: no cover - may end this process
        os.kill(os.getpid(), signal.Signals[kind])
        return None
    if kind in ("short", "tear"):
        return kind
    raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))


@contextlib.contextmanager
def where_supported() -> Iterator[None]:
    """Ignore that the file system does not support a call."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


class File(NamedTuple):
    """A file in an open folder, and the inode that it must have."""

    folder: Folder
    name: str
    device: int
    inode: int

    @property
    def path(self) -> Path:
        """Its path, for messages."""
        return self.folder.path / self.name

    @property
    def is_there(self) -> bool:
        """Whether its name still leads to it."""
        status = self.folder.status(self.name)
        return status is not None and self.matches(status)

    def matches(self, status: os.stat_result) -> bool:
        """Check whether a status is that of the file."""
        return (status.st_dev, status.st_ino) == (self.device, self.inode) and stat.S_ISREG(status.st_mode)

    def open(self, flags: int) -> int:
        """Open the file; raise `SystemRefusedError` if its name leads to another file."""
        try:
            fd = self.folder.open(self.name, flags)
        except OSError as error:
            if error.errno not in _REPLACED:
                raise
            raise changed_meanwhile(self.path) from error
        if not self.matches(os.fstat(fd)):
            os.close(fd)
            raise changed_meanwhile(self.path)
        return fd


class Folder:
    """An open folder; `path` is where it was when it was opened, without links."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        status = os.fstat(fd)
        self.owner, self.mode = status.st_uid, status.st_mode
        self.identity = status.st_dev, status.st_ino

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open a folder; the last part of its path must not be a link."""
        return cls(path, open_folder(path))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the folder by its path; a file in it is still recognized by its inode.
        return Folder.at, (self.path,)

    def close(self) -> None:
        """Close it."""
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """List all names in it; raise `PermissionError` if it could only be opened to look up names."""
        try:
            return os.listdir(self.fd)  # noqa: PTH208 - a descriptor has no Path
        except OSError as error:
            if error.errno == errno.EBADF:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path)) from None
            raise

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of a name, links not followed; None if it does not exist."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open(self, name: str, flags: int) -> int:
        """Open a file; links are not followed, and a FIFO does not block."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=self.fd)

    def create(self, name: str) -> tuple[int, File]:
        """Make a file that did not exist and that only its user may open; return its descriptor, and the file.

        It does not keep an access control list from its folder, which a change of its mode would put into force.
        """
        step()
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except FileNotFoundError as error:
            # As in /proc.
            message = "no file can be made in this folder, or it was just removed"
            refused = SystemRefusedError(message, file=self.path, hint="write somewhere else")
            refused.errno = error.errno
            raise refused from error
        try:
            remove_acl(fd)
            status = os.fstat(fd)
        except BaseException:
            os.close(fd)
            self.unlink(name)
            raise
        return fd, File(self, name, status.st_dev, status.st_ino)

    def make(self, name: str) -> Folder:
        """Make a folder in it and open that, or else remove it again."""
        step()
        os.mkdir(name, dir_fd=self.fd)
        try:
            return Folder(self.path / name, open_folder(name, self.fd))
        except BaseException:
            self.remove_folder(name)
            raise

    def link(self, name: str, new: str) -> None:
        """Give a file a second name, which must not exist."""
        step()
        os.link(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)

    def rename(self, name: str, new: str) -> None:
        """Rename a file, over another file if there is one."""
        step()
        os.replace(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove a file, if it exists."""
        step()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def remove_folder(self, name: str) -> None:
        """Remove a folder, if it exists, is empty and may be removed."""
        step()
        try:
            os.rmdir(name, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in _NOT_REMOVABLE:
                raise

    def sync(self) -> None:
        """Sync its entries, on file systems that can sync a folder."""
        with where_supported():
            sync(self.fd)


def open_folder(path: Path | str, within: int | None = None) -> int:
    """Open a folder to list it or, without permission for that, to look up names in it; its last part is no link."""
    try:
        return os.open(path, _TO_LIST, dir_fd=within)
    except PermissionError:
        return os.open(path, TO_SEARCH, dir_fd=within)


def write_all(fd: int, parts: Sequence[bytes | bytearray | memoryview], begin: int) -> int:
    """Write the parts one after another from byte `begin` on, in as many calls as that takes; return their bytes."""
    views, done = [memoryview(part) for part in parts], 0
    while views:
        fault = step()
        count = os.pwritev(fd, views, begin + done) if fault is None else _write_half(fault, fd, views, begin + done)
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
    return done


def _write_half(kind: str, fd: int, views: Sequence[memoryview], begin: int) -> int:
    content = b"".join(views)
    if kind == "tear":  # pragma: no cover - kills this process
        # Half of the sectors; none of them partly.
        middle = begin + len(content) // 2
        os.pwrite(fd, content[: max(0, middle - middle % SECTOR - begin)], begin)
        os.kill(os.getpid(), signal.SIGKILL)
    return os.pwrite(fd, content[: -(-len(content) // 2)], begin)


def resize(fd: int, size: int) -> None:
    """Truncate or extend a file to `size` bytes."""
    step()
    os.ftruncate(fd, size)


def reserve(fd: int, begin: int, end: int) -> None:
    """Reserve disk space for a range of a file, on file systems that can."""
    if begin < end:
        step()
        with where_supported():
            system.reserve(fd, begin, end)


def change_mode(fd: int, mode: int) -> None:
    """Set the permissions of a file."""
    step()
    os.fchmod(fd, mode)


def change_owner(fd: int, user: int, group: int) -> None:
    """Set the owner and the group of a file."""
    step()
    os.fchown(fd, user, group)


def copy_attributes(fd: int, to: int) -> None:
    """Copy the extended attributes of a file, and its access control list."""
    step()
    system.copy_attributes(fd, to)


def remove_acl(fd: int) -> None:
    """Remove the access control list of a file, if it has one."""
    step()
    system.remove_acl(fd)


def sync(fd: int) -> None:
    """Sync a file or the entries of a folder."""
    step()
    system.sync(fd)
