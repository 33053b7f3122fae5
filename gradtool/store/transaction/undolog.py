"""Undo logs: the old content of what is overwritten in place, and how it is put back.

An undo log is a sequence of entries: a header, a checksum for every sector that will be written, and the bytes that the
target had before. So each sector of a target is known to be old, new, or written by another program. A run overwrites
every byte at most once, so the order of the entries does not matter.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import GradtoolError, SystemRefusedError, from_os_error, os_errors_about, unfinished
from gradtool.store import fs
from gradtool.store.fs import SECTOR, File
from gradtool.wording import call, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    Sums = npt.NDArray[np.uint64]

# Magic, number of the target, begin and length of the content; the checksum of the header, and of the whole entry.
_HEADER = struct.Struct("<4sIQQ")
_CHECKSUM = struct.Struct("<II")
_MAGIC = b"und2"
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
# Larger than any block that is written at once.
_MAX_ENTRY_BYTES = 1 << 28
_WORD, _PAGE = 8, 4096


class Entry(NamedTuple):
    """What a target had from byte `begin` on, and the checksums of the sectors that were to be written there."""

    number: int
    begin: int
    content: bytes
    sums: bytes


class _Kept(NamedTuple):
    """Content that an undo log holds: where it was, and what stands for it in the checksum of its entry."""

    number: int
    begin: int
    length: int
    digest: bytes


# No target has this number.
_NOTHING = _Kept(-1, 0, 0, b"")


class UndoLog:
    """An undo log that is being written; `key` is its run's, so that it cannot pass for another's."""

    def __init__(self, file: File, fd: int, key: str, *, fsync: bool, ahead: int) -> None:
        self._file, self._fd, self._key, self._fsync, self._ahead = file, fd, key.encode(), fsync, ahead
        self._end = self._reserved = 0
        self._kept = _NOTHING

    def keep(self, number: int, begin: int, content: memoryview) -> None:
        """Write the content that a target has from byte `begin` on; it counts only once it is sealed.

        What is kept next takes the place of what was not sealed.
        """
        at = self._end + _HEADER_BYTES + _sectors(begin, len(content)) * _WORD
        with os_errors_about(self._file.path):
            if at + len(content) > self._reserved:
                fs.reserve(self._fd, self._reserved, at + len(content) + self._ahead)
                self._reserved = at + len(content) + self._ahead
            fs.write_all(self._fd, [content], at)
        self._kept = _Kept(number, begin, len(content), _digest(content))

    def has_kept(self, number: int, begin: int, length: int) -> bool:
        """Whether just this range of a target was kept last, and is not sealed yet."""
        return self._kept[:3] == (number, begin, length)

    def seal(self, new: memoryview) -> None:
        """Complete the entry of what was kept last; from then on, `new` may be written over it."""
        number, begin, length, digest = self._kept
        sums = _sector_sums(new, begin).tobytes()
        header = _sealed(self._key, _HEADER.pack(_MAGIC, number, begin, length), sums, digest)
        with os_errors_about(self._file.path):
            self._end += fs.write_all(self._fd, [header, sums], self._end) + length
            if self._fsync:
                fs.sync(self._fd)
        self._kept = _NOTHING

    def close(self) -> None:
        """Close the file; its content stays."""
        os.close(self._fd)


class Undo(NamedTuple):
    """Everything that a run saved: its targets by number, each with its size, and its undo logs."""

    targets: Mapping[int, tuple[File, int]]
    files: Sequence[File]
    key: str

    def foreign(self) -> File | None:
        """A target that another program wrote to, if there is one: a sector is neither old nor new."""
        for entry in self._entries():
            file, _ = self.targets[entry.number]
            if file.is_there and _is_foreign(_read(file, entry), entry):
                return file
        return None

    def put_back(self, *, fsync: bool, force: bool = False) -> None:
        """Give the targets their old content; may be interrupted and repeated.

        A torn entry is ignored: what it saved was not overwritten. Nothing is written to a file that has taken a
        target's name, nor, without `force`, over what another program wrote. If one target fails, the others are still
        put back, and the first error is raised.
        """
        # All are synced: an earlier rollback may have written what is right already, and not synced it.
        saved: dict[File, None] = {}
        errors: dict[File, GradtoolError] = {}
        for entry in self._entries():
            file, _ = self.targets[entry.number]
            with _collected(errors, file):
                if file.is_there:
                    saved[file] = None
                    _put_back(file, entry, force=force)
        for file in saved if fsync else ():
            with _collected(errors, file), file.opened(os.O_RDONLY) as fd:
                fs.sync(fd)
        if errors:
            raise next(iter(errors.values()))

    def _entries(self) -> Iterator[Entry]:
        for file in self.files:
            for entry in _entries(file, self.key.encode()):
                size = self.targets[entry.number][1] if entry.number in self.targets else -1
                if entry.begin + len(entry.content) <= size:
                    yield entry


@contextlib.contextmanager
def _collected(errors: dict[File, GradtoolError], file: File) -> Iterator[None]:
    try:
        with os_errors_about(file.path):
            yield
    except GradtoolError as error:
        errors.setdefault(file, error)


def _read(file: File, entry: Entry) -> bytes:
    with file.opened(os.O_RDONLY) as fd:
        return os.pread(fd, len(entry.content), entry.begin)


def _put_back(file: File, entry: Entry, *, force: bool) -> None:
    # Opened for writing only if that is needed: it may not be allowed.
    current = _read(file, entry)
    if current == entry.content:
        return
    if not force and _is_foreign(current, entry):
        raise changed_since(file.path)
    with file.opened(os.O_WRONLY) as fd:
        fs.write_all(fd, [entry.content], entry.begin)


def changed_since(target: Path) -> SystemRefusedError:
    """The error for a target that another program wrote to after a run crashed or failed."""
    what = "another program wrote to it after a run crashed or failed"
    hint = say(
        "delete the .gradtool-* files beside it to keep it as it is, or run {} to recover the run all the same",
        call("recover", str(target), force=True),
    )
    return unfinished(what, target, hint)


def _is_foreign(current: bytes, entry: Entry) -> bool:
    """Whether a sector is neither what was saved nor what was to be written."""
    if current == entry.content:
        return False
    if len(current) != len(entry.content):
        return True
    import numpy as np  # kept off the start-up path

    new = np.frombuffer(entry.sums, "<u8")
    now, old = (_sector_sums(memoryview(content), entry.begin) for content in (current, entry.content))
    return bool(((now != old) & (now != new)).any())


def _entries(file: File, key: bytes) -> Iterator[Entry]:
    """The entries of an undo log, up to the first that is torn."""
    try:
        with os.fdopen(file.open(os.O_RDONLY), "rb") as log:
            while len(header := log.read(_HEADER_BYTES)) == _HEADER_BYTES:
                magic, number, begin, length = _HEADER.unpack_from(header)
                if magic != _MAGIC or length > _MAX_ENTRY_BYTES:
                    return
                sums = log.read(_sectors(begin, length) * _WORD)
                content = log.read(length)
                if header != _sealed(key, header[: _HEADER.size], sums, _digest(content)):
                    return
                yield Entry(number, begin, content, sums)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise from_os_error(error, file.path) from error


def undo_logs(folder: fs.Folder, names: Sequence[str], owner: int) -> list[File]:
    """The undo logs among a run's files; those of other users are not trusted."""
    found = []
    for name in names:
        status = folder.status(name)
        if name.endswith(".undo") and status and stat.S_ISREG(status.st_mode) and status.st_uid == owner:
            found.append(File(folder, name, status.st_dev, status.st_ino))
    return found


def _sealed(key: bytes, fields: bytes, sums: bytes, digest: bytes) -> bytes:
    """A header with its two checksums: of key, fields and sector checksums; and of the content too."""
    begin = zlib.crc32(sums, zlib.crc32(fields, zlib.crc32(key)))
    return fields + _CHECKSUM.pack(begin, zlib.crc32(digest, begin))


def _digest(content: bytes | memoryview) -> bytes:
    """What stands for a content in its checksum: the sum of all pages as 64-bit words, and the rest; very fast."""
    import numpy as np  # kept off the start-up path

    pages = len(content) // _PAGE
    words = np.frombuffer(content, "<u8", pages * _PAGE // _WORD).reshape(pages, _PAGE // _WORD)
    folded: bytes = np.add.reduce(words, axis=0, dtype="<u8").tobytes()
    return folded + bytes(content[pages * _PAGE :])


def _sectors(begin: int, length: int) -> int:
    """The number of sectors that a range of a file touches."""
    return (begin + length - 1) // SECTOR - begin // SECTOR + 1 if length else 0


def _sector_sums(content: memoryview, begin: int) -> Sums:
    """A checksum for each sector of a range of a file that begins at byte `begin`."""
    import numpy as np  # kept off the start-up path

    sums = np.empty(_sectors(begin, len(content)), "<u8")
    first = min(len(content), -begin % SECTOR)
    whole = (len(content) - first) // SECTOR
    words = np.frombuffer(content, "<u8", whole * SECTOR // _WORD, first).reshape(whole, SECTOR // _WORD)
    # An odd factor for each word, so that neither a changed word nor two exchanged ones go unnoticed.
    weights = np.arange(1, 2 * SECTOR // _WORD, 2, dtype="<u8") * np.uint64(0x9E3779B97F4A7C15)
    at = 1 if first else 0
    np.einsum("ij,j->i", words, weights, out=sums[at : at + whole])
    if first:
        sums[0] = zlib.crc32(content[:first])
    if at + whole < len(sums):
        sums[-1] = zlib.crc32(content[first + whole * SECTOR :])
    return sums
