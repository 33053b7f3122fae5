"""Open folders, and every call that changes the disk.

A path may lead elsewhere from one instant to the next. So a folder is opened once, and all names are looked up in it. A
file that was made or checked is recognized by its inode when it is opened again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool.errors import SystemRefusedError, changed_meanwhile
from gradtool.store import system
from gradtool.store.faults import step, write_half

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

UNSUPPORTED = system.UNSUPPORTED
# The name now leads to a link, a folder, a socket or nothing.
_REPLACED = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOENT)
# The folder is gone, not empty, or no folder; or another user's, as the one above it may be.
_NOT_REMOVABLE = (
    errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM,
)  # fmt: skip
_TO_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TO_SEARCH = _TO_LIST | system.TO_SEARCH


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

    def open(self, flags: int) -> int:
        """Open the file; raises `SystemRefusedError` if its name leads to another one."""
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

    def opened(self, flags: int) -> AbstractContextManager[int]:
        """As `open`, for a `with` block that closes it."""
        return closing(self.open(flags))

    @property
    def is_there(self) -> bool:
        """Whether the name still leads to the file."""
        status = self.folder.status(self.name)
        return status is not None and self.matches(status)

    def matches(self, status: os.stat_result) -> bool:
        """Whether a status is that of the file."""
        return (status.st_dev, status.st_ino) == (self.device, self.inode) and stat.S_ISREG(status.st_mode)


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
        """All names in it."""
        with self._listing():
            return os.listdir(self.fd)  # noqa: PTH208 - a descriptor has no Path

    def require_listing(self) -> None:
        """Raise `OSError` if it cannot be listed."""
        with self._listing(), os.scandir(self.fd) as entries:
            next(entries, None)

    @contextlib.contextmanager
    def _listing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.EBADF:  # It was opened only to be searched.
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path)) from None
            raise

    def status(self, name: str) -> os.stat_result | None:
        """The status of a name, links not followed; None if it does not exist."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def file(self, name: str) -> File | None:
        """The file of that name; None if it does not exist."""
        status = self.status(name)
        return None if status is None else File(self, name, status.st_dev, status.st_ino)

    def open(self, name: str, flags: int) -> int:
        """Open a file; links are not followed, and a FIFO does not block."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=self.fd)

    def create(self, name: str) -> int:
        """Make a file that did not exist; its descriptor."""
        return self.create_file(name)[0]

    def create_file(self, name: str) -> tuple[int, File]:
        """Make a file that did not exist and that only its user may open; its descriptor, and the file.

        It does not keep an access control list from its folder, which a change of its mode would put into force.
        """
        step()
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except FileNotFoundError as error:
            # As in /proc.
            what = "no file can be made in this folder, or it was just removed"
            refused = SystemRefusedError(what, file=self.path, hint="write somewhere else")
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
        """Make a folder in it; removed again if it cannot be opened."""
        step()
        os.mkdir(name, dir_fd=self.fd)
        try:
            return Folder(self.path / name, open_folder(name, within=self.fd))
        except BaseException:
            self.unmake(name)
            raise

    def link(self, name: str, new: str) -> None:
        """Give a file a second name, which must not exist."""
        step()
        os.link(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)

    def rename(self, name: str, new: str) -> None:
        """Rename a file, over another one if there is one."""
        step()
        os.replace(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def unlink(self, name: str) -> None:
        """Remove a file, if it exists."""
        step()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def unmake(self, name: str) -> None:
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
        return open_to_search(path, within)


def open_to_search(path: Path | str, within: int | None = None) -> int:
    """Open a folder only to look up names in it; the last part of the path must not be a link."""
    return os.open(path, _TO_SEARCH, dir_fd=within)


def write_all(fd: int, parts: Sequence[bytes | bytearray | memoryview], begin: int) -> int:
    """Write the parts one after another from byte `begin` on, in as many calls as that takes; the bytes written."""
    views, done = [memoryview(part) for part in parts], 0
    while views:
        fault = step()
        count = os.pwritev(fd, views, begin + done) if fault is None else write_half(fault, fd, views, begin + done)
        done += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
    return done


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
