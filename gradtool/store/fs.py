"""Folders that are held open, and every call that changes what is on the disk.

A path may lead elsewhere from one instant to the next. So a folder is opened once, and all names are looked up in it;
a file that was made or checked is told by its inode when it is opened again.

`GRADTOOL_FAULT=KIND@N`, for tests alone, strikes at the Nth call that changes the disk: `kill` ends the process before
it, `tear` does the same with half of what it writes written, `short` writes half, the name of a signal, such as
`SIGTERM`, is sent before it, and the name of an error, such as `ENOSPC`, is what the call fails with; with `@N+`, every
later call too.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import stat
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool.store.format.header import changed_meanwhile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Buffer = bytes | bytearray | memoryview

# What the system says where it cannot do a thing at all, here or ever.
UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
# What is said of a name that leads to no file any more, but to a link, a folder, a socket or nothing.
_OF_OTHERS = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOENT)
# A disk writes a sector as a whole or not at all; the system copies whole pages, which are made of sectors.
SECTOR = 512
# Enough to pass through a folder; reading what is in it may not be allowed.
_TO_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_steps = itertools.count(1)


class File(NamedTuple):
    """A file in a folder that is held open, and the inode that it must be."""

    folder: Folder
    name: str
    device: int
    inode: int

    @property
    def path(self) -> Path:
        """Where it lies, for messages."""
        return self.folder.path / self.name

    def open(self, flags: int) -> int:
        """Open the file itself, and no other that has its name by now.

        Raises:
            SystemRefusedError: the name leads to another file.
        """
        try:
            fd = self.folder.open(self.name, flags)
        except OSError as error:
            if error.errno not in _OF_OTHERS:
                raise
            raise changed_meanwhile(self.path) from error
        if not self.is_at(os.fstat(fd)):
            os.close(fd)
            raise changed_meanwhile(self.path)
        return fd

    @property
    def is_there(self) -> bool:
        """Whether the name still leads to the file."""
        status = self.folder.status(self.name)
        return status is not None and self.is_at(status)

    def is_at(self, status: os.stat_result) -> bool:
        """Whether a status is that of the file."""
        return (status.st_dev, status.st_ino) == (self.device, self.inode) and stat.S_ISREG(status.st_mode)


class Folder:
    """A folder that is held open; `path` is where it was then, without links."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        status = os.fstat(fd)
        self.owner, self.mode = status.st_uid, status.st_mode
        self.identity = status.st_dev, status.st_ino

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open a folder whose path has no link at its end; one that cannot be listed can still be passed through."""
        return cls(path, open_to_list(path))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the folder by its path; a file in it is still recognized by its inode.
        return Folder.at, (self.path,)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """All names in it."""
        try:
            return os.listdir(self.fd)  # noqa: PTH208 - a descriptor has no Path
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # Open to be passed through and no more.
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path)) from None

    def status(self, name: str) -> os.stat_result | None:
        """The status of what has a name, a link not followed; None if there is nothing."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def file(self, name: str) -> File | None:
        """What has a name; None if there is nothing."""
        status = self.status(name)
        return None if status is None else File(self, name, status.st_dev, status.st_ino)

    def open(self, name: str, flags: int) -> int:
        """Open what has a name; neither a link nor a FIFO leads astray."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=self.fd)

    def create(self, name: str, mode: int = 0o600) -> int:
        """Make a file that was not there; its descriptor."""
        _step()
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=self.fd)

    def create_file(self, name: str) -> tuple[int, File]:
        """As `create`, with the file that it is; none is left where that fails."""
        fd = self.create(name)
        try:
            status = os.fstat(fd)
        except BaseException:
            os.close(fd)
            self.unlink(name)
            raise
        return fd, File(self, name, status.st_dev, status.st_ino)

    def make(self, name: str) -> Folder:
        """Make a folder in it; none is left where that fails."""
        _step()
        os.mkdir(name, dir_fd=self.fd)
        try:
            return Folder(self.path / name, open_to_list(name, within=self.fd))
        except BaseException:
            self.unmake(name)
            raise

    def link(self, name: str, new: str) -> None:
        """Give a file a second name, which must be new."""
        _step()
        os.link(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)

    def rename(self, name: str, new: str) -> None:
        """Put a file in the place of another."""
        _step()
        os.replace(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove a file, if it is there."""
        _step()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def unmake(self, name: str) -> None:
        """Remove a folder that is empty; one that is not, or not there, is left."""
        _step()
        try:
            os.rmdir(name, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise

    def sync(self) -> None:
        """Bring its names to the disk; a file system on which folders cannot be synced need not have it done."""
        try:
            sync(self.fd)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise


def open_to_list(path: Path | str, within: int | None = None) -> int:
    """Open a folder, to be listed if that is allowed, and else to be passed through; no link at the path's end."""
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, dir_fd=within)
    except PermissionError:
        return os.open(path, _TO_PASS, dir_fd=within)


def open_to_pass(path: str, within: int | None = None) -> int:
    """Open a folder to look up a name in it; no link at the path's end."""
    return os.open(path, _TO_PASS, dir_fd=within)


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
    whole = b"".join(views)
    if fault == "short":
        return os.pwrite(fd, whole[: -(-len(whole) // 2)], begin)
    # Half of the sectors; of what lies in one, nothing.
    middle = begin + len(whole) // 2
    os.pwrite(fd, whole[: max(0, middle - middle % SECTOR - begin)], begin)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


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
    if kind.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[kind])
        return None
    if kind in ("short", "tear"):
        return kind
    raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))
