"""Sources, which the bytes of inputs are read from, and whether these are still the same.

`Source` and `Reader` are those of local files. Another kind, such as an object in object storage, extends both in a
module of its own, and `Source.kind_of` chooses it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, UsageError, option, say
from gradtool.store.links import open_to_read

if TYPE_CHECKING:
    from collections.abc import Hashable
    from pathlib import Path


_content = attrgetter("st_dev", "st_ino", "st_size", "st_mtime_ns")
# What explains a change of the inode (ctime) that is none of the content.
links_and_rights = attrgetter("st_mode", "st_uid", "st_gid", "st_nlink")


@dataclass(frozen=True, eq=False, repr=False)
class Source:
    """An input as it was when it was opened: a value, which can be pickled. Its name is its path as it was given.

    A local file has a status, unless it is yet to be made. What has none can neither be replaced nor changed, and has
    no descriptor.
    """

    name: str
    size: int
    status: os.stat_result | None = None

    @staticmethod
    def kind_of(path: Path) -> type[Source]:  # noqa: ARG004 - there is a single kind
        """Choose the kind of source that a path leads to."""
        return Source

    @classmethod
    def at(cls, path: Path, *, is_named: bool = True) -> Reader:
        """Open what the user named, or a folder or an index did. A FIFO does not block.

        Raises:
            OSError: it is not there or cannot be read, or another user's link leads there.
            BadInputError: it is not a regular file.
        """
        fd = open_to_read(path, is_named=is_named)
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            return Reader(cls(os.fspath(path), status.st_size, status), fd)
        os.close(fd)
        if stat.S_ISDIR(status.st_mode):
            raise BadInputError("is a folder, not a file", file=path, hint="name the folder itself, or rename it")
        raise BadInputError("is not a regular file", file=path)

    @staticmethod
    def names_in(path: Path) -> list[str] | None:
        """List the names in a folder; None if the path is not that of one. Raises `OSError`."""
        return os.listdir(path) if os.path.isdir(path) else None  # noqa: PTH112, PTH208 - Path's own may raise

    @staticmethod
    def identity_at(path: Path) -> Hashable:
        """Return the identity of an input, which all its names share, without opening it; a missing path is its own."""
        try:
            status = os.stat(path)  # noqa: PTH116 - as fstat
        except OSError:
            return os.fspath(path)
        return status.st_dev, status.st_ino

    @classmethod
    def is_there(cls, path: Path) -> bool:
        """Check whether a path leads to a folder, or to what can be opened."""
        try:
            if cls.names_in(path) is None:
                cls.at(path).close()
        except (OSError, BadInputError):
            return False
        return True

    @property
    def address(self) -> str:
        """The path by which any process can open it."""
        return os.path.join(os.getcwd(), self.name)  # noqa: PTH109, PTH118 - as Path.absolute

    @property
    def inode(self) -> int:
        """The inode, which differs if the path leads to another file on another machine; 0 where it cannot."""
        return 0 if self.status is None else self.status.st_ino

    @property
    def version(self) -> str:
        """A text that changes with the content, and is the same on all machines; empty for a file yet to be made."""
        status = self.status
        return "" if status is None else f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"

    @property
    def identity(self) -> Hashable:
        """A key that all its names share, and no other source has."""
        return self.name if self.status is None else (self.status.st_dev, self.status.st_ino)

    @property
    def is_unchanged(self) -> bool:
        """Whether its name still leads to the same content."""
        return self.status is None or is_unchanged(self.name, self.status)

    def open(self) -> Reader:
        """Open what is there now; raise `OSError` if nothing is, or it cannot be read."""
        return Reader(self, os.open(self.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))


@dataclass(frozen=True, eq=False, repr=False)
class Reader:
    """A source that is open; `fileno` is its descriptor, if it has one."""

    source: Source
    fileno: int = -1

    @property
    def is_unchanged(self) -> bool:
        """Whether it still has the content of the source."""
        return self.source.status is None or is_unchanged(self.fileno, self.source.status)

    def read_into(self, view: memoryview, begin: int) -> int:
        """Fill `view` from byte `begin` on, or as much of it as there is; return how much. Raises `OSError`."""
        done = 0
        while done < len(view) and (count := os.preadv(self.fileno, [view[done:]], begin + done)):
            done += count
        return done

    def close(self) -> None:
        """Close it."""
        os.close(self.fileno)


def require_status(source: Source) -> os.stat_result:
    """Return the status of an input that is to be replaced or changed; raise `UsageError` if it is no local file."""
    if source.status is None:
        hint = say("use {} or {}", option("output"), option("output_dir"))
        raise UsageError("is not a local file, and cannot be changed", file=source.name, hint=hint)
    return source.status


def read_range(reader: Reader, begin: int, length: int) -> bytes:
    """Read a range of a source, or as much of it as there is."""
    view = memoryview(bytearray(length))
    return bytes(view[: reader.read_into(view, begin)])


class SmallFile(NamedTuple):
    """An index or a state, which is read and written as a whole; without a status, it does not exist yet."""

    path: Path
    stat: os.stat_result | None
    content: bytes


def is_same(now: os.stat_result, before: os.stat_result) -> bool:
    """Check whether a file was neither replaced nor written to between two statuses.

    A program that writes can set back the date of the content, but not that of the inode (ctime). That date changes
    with the mode, the owner and the number of links too; where these differ, it says nothing about the content.
    """
    if _content(now) != _content(before):
        return False
    return now.st_ctime_ns == before.st_ctime_ns or links_and_rights(now) != links_and_rights(before)


def is_unchanged(path_or_fd: Path | str | int, before: os.stat_result) -> bool:
    """Check whether a file was neither replaced nor written to since it had that status."""
    try:
        return is_same(os.stat(path_or_fd), before)  # noqa: PTH116 - a descriptor has no Path
    except OSError:
        return False
