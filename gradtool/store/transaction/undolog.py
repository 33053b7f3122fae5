"""Undo logs: how what is overwritten in place is saved, told from what others wrote, and put back.

An undo log is one entry after another, each a header, a checksum for every sector that will be written, and the bytes
that a target held before. So each sector of a target is known to be old, or new, or another program's. Every byte is
overwritten once in a run, so the order of entries does not matter.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import GradtoolError, SystemRefusedError, from_os_error, told
from gradtool.store import fs
from gradtool.store.fs import SECTOR, File

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    Sums = npt.NDArray[np.uint64]

# Magic, number of the target, begin and length of what is saved; and then the checksum of the whole entry.
_HEADER = struct.Struct("<4sIQQ")
_CHECKSUM = struct.Struct("<II")
_MAGIC = b"und2"
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
# More than any block that is written at once.
_MAX_ENTRY_BYTES = 1 << 28
_WORD, _PAGE = 8, 4096


class Entry(NamedTuple):
    """What a target held from byte `begin` on, and the checksums of the sectors that were to be written there."""

    number: int
    begin: int
    content: bytes
    sums: bytes


class UndoLog:
    """One undo log, as it is written; `key` is that of the run, so that no other run's is taken for it."""

    def __init__(self, file: File, fd: int, key: str, *, fsync: bool, ahead: int) -> None:
        self._file, self._fd, self._key, self._fsync, self._ahead = file, fd, key.encode(), fsync, ahead
        self._end = self._reserved = 0

    def save(self, number: int, begin: int, content: memoryview, new: memoryview) -> None:
        """Save what a target holds from byte `begin` on, before it is overwritten with what is new."""
        sums = _sector_sums(new, begin).tobytes()
        header = _sealed(self._key, _HEADER.pack(_MAGIC, number, begin, len(content)), sums, content)
        try:
            end = self._end + len(header) + len(sums) + len(content)
            if end > self._reserved:
                fs.reserve(self._fd, self._reserved, end + self._ahead)
                self._reserved = end + self._ahead
            self._end += fs.write_all(self._fd, [header, sums, content], self._end)
            if self._fsync:
                fs.sync(self._fd)
        except OSError as error:
            raise from_os_error(error, self._file.path) from error

    def close(self) -> None:
        """Close the file; what is in it stays."""
        os.close(self._fd)


class Undo(NamedTuple):
    """Everything that a run saved: its targets by number, with the size that each has, and its undo logs."""

    targets: Mapping[int, tuple[File, int]]
    files: Sequence[File]
    key: str

    def foreign(self) -> File | None:
        """A target that another program wrote to after the run did: a sector is neither old nor new.

        Raises:
            SystemRefusedError: reading failed.
        """
        for entry in self._entries():
            file, _ = self.targets[entry.number]
            if file.is_there and _is_foreign(_read(file, entry), entry):
                return file
        return None

    def put_back(self, *, fsync: bool, force: bool = False) -> None:
        """Give the targets what the undo logs saved of them, as far as they do not have it.

        It may be done twice, or half and then again. An entry that is torn was saved of something that was not
        overwritten. Nothing is written to another file that has taken a target's place, nor, without `force`, over what
        another program wrote. A failure does not keep the other targets from being put back.

        Raises:
            SystemRefusedError: another program wrote to a target, or reading or writing failed.
        """
        # Not only what is written now: what an earlier rollback wrote may not be on the disk yet.
        saved: dict[int, File] = {}
        errors: list[GradtoolError] = []
        failed: set[int] = set()
        for entry in self._entries():
            file, _ = self.targets[entry.number]
            try:
                if file.is_there:
                    saved[entry.number] = file
                    _put_back(file, entry, force=force)
            except OSError as error:
                if entry.number not in failed:
                    errors.append(told(error, file.path))
                failed.add(entry.number)
        for file in saved.values() if fsync else ():
            try:
                _sync(file)
            except OSError as error:
                errors.append(told(error, file.path))
        if errors:
            raise errors[0]

    def _entries(self) -> Iterator[Entry]:
        for file in self.files:
            for entry in _entries(file, self.key.encode()):
                size = self.targets[entry.number][1] if entry.number in self.targets else -1
                if entry.begin + len(entry.content) <= size:
                    yield entry


def _read(file: File, entry: Entry) -> bytes:
    # To look is enough at first: to open it to write may be refused, and may not be needed.
    fd = file.open(os.O_RDONLY)
    try:
        return os.pread(fd, len(entry.content), entry.begin)
    finally:
        os.close(fd)


def _put_back(file: File, entry: Entry, *, force: bool) -> None:
    current = _read(file, entry)
    if current == entry.content:
        return
    if not force and _is_foreign(current, entry):
        raise changed_since(file.path)
    fd = file.open(os.O_WRONLY)
    try:
        fs.write_all(fd, [entry.content], entry.begin)
    finally:
        os.close(fd)


def changed_since(target: Path) -> SystemRefusedError:
    """The error for a target that another program wrote to after the run did."""
    return SystemRefusedError(
        "another program wrote to it after a run that crashed or failed; to keep it as it is, delete the .gradtool-* "
        "files beside it, and to roll that run back or forward all the same, use gradtool recover --force",
        file=target,
        code="unfinished",
    )


def _sync(file: File) -> None:
    fd = file.open(os.O_RDONLY)
    try:
        fs.sync(fd)
    finally:
        os.close(fd)


def _is_foreign(current: bytes, entry: Entry) -> bool:
    """Whether a sector is neither what was saved nor what was to be written."""
    if current == entry.content:
        return False
    import numpy as np  # kept off the start-up path

    expected = np.frombuffer(entry.sums, "<u8")
    if len(current) != len(entry.content):
        return True
    now = _sector_sums(memoryview(current), entry.begin)
    old = _sector_sums(memoryview(entry.content), entry.begin)
    return bool(((now != old) & (now != expected)).any())


def _entries(file: File, key: bytes) -> Iterator[Entry]:
    """What an undo log holds, up to the first entry that is torn."""
    try:
        # It may be anything that somebody gave such a name.
        fd = file.open(os.O_RDONLY)
        with os.fdopen(fd, "rb") as log:
            while len(header := log.read(_HEADER_BYTES)) == _HEADER_BYTES:
                magic, number, begin, length = _HEADER.unpack_from(header)
                if magic != _MAGIC or length > _MAX_ENTRY_BYTES:
                    return
                sums = log.read(_sectors(begin, length) * _WORD)
                content = log.read(length)
                if header != _sealed(key, header[: _HEADER.size], sums, memoryview(content)):
                    return
                yield Entry(number, begin, content, sums)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise told(error, file.path) from error


def undo_logs(folder: fs.Folder, names: Sequence[str], owner: int) -> list[File]:
    """Those of a run's files that are undo logs of a user; what others put beside them is not believed."""
    found = []
    for name in names:
        status = folder.status(name)
        if name.endswith(".undo") and status and stat.S_ISREG(status.st_mode) and status.st_uid == owner:
            found.append(File(folder, name, status.st_dev, status.st_ino))
    return found


def _sealed(key: bytes, fields: bytes, sums: bytes, content: memoryview) -> bytes:
    """A header with its checksums: of the fields and the key, and of all that follows."""
    begin = zlib.crc32(sums, zlib.crc32(fields, zlib.crc32(key)))
    return fields + _CHECKSUM.pack(begin, _checksum(content, begin))


def _checksum(content: memoryview, begin: int) -> int:
    """The CRC-32 of the sum of all pages, as 64-bit words, and of what is left over: as fast as memory."""
    import numpy as np  # kept off the start-up path

    pages = len(content) // _PAGE
    words = np.frombuffer(content, "<u8", pages * _PAGE // _WORD).reshape(pages, _PAGE // _WORD)
    folded = np.add.reduce(words, axis=0, dtype="<u8")
    return zlib.crc32(content[pages * _PAGE :], zlib.crc32(folded.tobytes(), begin))


def _sectors(begin: int, length: int) -> int:
    """How many sectors a range of a file lies in."""
    return (begin + length - 1) // SECTOR - begin // SECTOR + 1 if length else 0


def _sector_sums(content: memoryview, begin: int) -> Sums:
    """A checksum for each sector of what lies in a file from byte `begin` on."""
    import numpy as np  # kept off the start-up path

    sums = np.empty(_sectors(begin, len(content)), "<u8")
    first = min(len(content), -begin % SECTOR)
    whole = (len(content) - first) // SECTOR
    words = np.frombuffer(content, "<u8", whole * SECTOR // _WORD, first).reshape(whole, SECTOR // _WORD)
    at = 1 if first else 0
    np.einsum("ij,j->i", words, _weights(), out=sums[at : at + whole])
    if first:
        sums[0] = zlib.crc32(content[:first])
    if at + whole < len(sums):
        sums[-1] = zlib.crc32(content[first + whole * SECTOR :])
    return sums


def _weights() -> Sums:
    """An odd factor for each word of a sector, so that neither a change nor an exchange of words goes unseen."""
    import numpy as np  # kept off the start-up path

    numbers = np.arange(1, 2 * SECTOR // _WORD, 2, dtype="<u8")
    return numbers * np.uint64(0x9E3779B97F4A7C15)
