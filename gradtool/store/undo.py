"""Undo files: how what is overwritten in place is saved, and put back.

One entry after another, each a header and the bytes that were in a target before. Entries that are about the same bytes
saved the same content, so their order does not matter.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import struct
import time
import zlib
from typing import TYPE_CHECKING

from gradtool.errors import from_os_error
from gradtool.store import system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

# Magic, number of the target, begin and length of what is saved, its checksum; and then that of all of these.
_HEADER = struct.Struct("<4sIQQI")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"undo"
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
# More than any block that is written at once.
_MAX_ENTRY_BYTES = 1 << 28
# A third of what recovery takes for ours after a power cut.
_BEAT_SECONDS = 3.0
_WORD, _PAGE = 8, 4096
_MAX_OPEN = 128


class Segment:
    """One undo file, as it is written."""

    def __init__(self, path: Path, fd: int, *, fsync: bool, ahead: int) -> None:
        self._path, self._fd, self._fsync, self._ahead = path, fd, fsync, ahead
        self._end = self._reserved = 0

    def save(self, number: int, begin: int, content: memoryview) -> None:
        """Save what a target holds from byte `begin` on; it may be overwritten afterwards."""
        fields = _HEADER.pack(_MAGIC, number, begin, len(content), _checksum(content))
        header = fields + _CHECKSUM.pack(zlib.crc32(fields))
        try:
            end = self._end + len(header) + len(content)
            if end > self._reserved:
                system.reserve(self._fd, self._reserved, end + self._ahead)
                self._reserved = end + self._ahead
            self._end += system.write_all(self._fd, [header, content], self._end)
            if self._fsync:
                # With its time of change, which is what tells our changes to a target from somebody else's.
                system.sync(self._fd)
        except OSError as error:
            raise from_os_error(error, self._path) from error

    def touch(self) -> None:
        """Note the time: a target is written to next."""
        os.utime(self._fd)

    def close(self) -> None:
        """Close the file; what is in it stays."""
        os.close(self._fd)


class Heartbeat:
    """Called before every write to a target, it notes the time in the record; on the disk every few seconds."""

    def __init__(self, record: int, *, fsync: bool) -> None:
        self._record, self._fsync = record, fsync
        self._synced = -math.inf

    def __call__(self) -> None:
        """A target is written to next."""
        os.utime(self._record)
        now = time.monotonic()
        if self._fsync and now > self._synced + _BEAT_SECONDS:
            self._synced = now
            system.sync(self._record)


def put_back(
    targets: Mapping[int, tuple[Path, os.stat_result]],
    segments: Sequence[Path],
    *,
    fsync: bool,
    before_each: Callable[[], None],
) -> None:
    """Give the targets, each a path and the file that it was, what the undo files saved of them.

    Nothing is written where they still have it, nor to another file that has taken a target's place. It may be done
    twice, or half and then again. An entry that is torn was saved of something that was not overwritten.

    Raises:
        SystemRefusedError: reading or writing failed.
    """
    # None for a target that is another file now.
    open_files: dict[int, int | None] = {}
    try:
        for segment in segments:
            for number, begin, content in _entries(segment, targets):
                try:
                    if number not in open_files:
                        if len(open_files) >= _MAX_OPEN:
                            _close_all(open_files, targets, fsync=fsync)
                        open_files[number] = _opened(*targets[number])
                    fd = open_files[number]
                    if fd is not None and os.pread(fd, len(content), begin) != content:
                        before_each()
                        system.write_all(fd, [content], begin)
                except OSError as error:
                    raise from_os_error(error, targets[number][0]) from error
        _close_all(open_files, targets, fsync=fsync)
    finally:
        for fd in open_files.values():
            if fd is not None:
                os.close(fd)


def _opened(path: Path, before: os.stat_result) -> int | None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    if os.path.samestat(os.fstat(fd), before):
        return fd
    os.close(fd)
    return None


def _close_all(
    open_files: dict[int, int | None], targets: Mapping[int, tuple[Path, os.stat_result]], *, fsync: bool
) -> None:
    while open_files:
        number, fd = open_files.popitem()
        if fd is None:
            continue
        try:
            if fsync:
                system.sync(fd)
        except OSError as error:
            raise from_os_error(error, targets[number][0]) from error
        finally:
            os.close(fd)


def _entries(segment: Path, targets: Mapping[int, tuple[Path, os.stat_result]]) -> Iterator[tuple[int, int, bytes]]:
    """What an undo file holds: numbers of targets, where the content begins there, and the content."""
    try:
        # It may be anything that somebody gave such a name.
        fd = os.open(segment, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return
        with os.fdopen(fd, "rb") as file:
            while len(header := file.read(_HEADER_BYTES)) == _HEADER_BYTES:
                fields = header[: _HEADER.size]
                magic, number, begin, length, checksum = _HEADER.unpack(fields)
                is_ours = magic == _MAGIC and _CHECKSUM.unpack(header[_HEADER.size :])[0] == zlib.crc32(fields)
                if not is_ours or length > _MAX_ENTRY_BYTES:
                    return
                content = file.read(length)
                if len(content) < length or _checksum(memoryview(content)) != checksum:
                    return
                if number in targets and begin + length <= targets[number][1].st_size:
                    yield number, begin, content
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise from_os_error(error, segment) from error


def _checksum(content: memoryview) -> int:
    """The CRC-32 of the sum of all pages, as 64-bit words, and of what is left over: as fast as memory."""
    import numpy as np  # kept off the start-up path

    pages = len(content) // _PAGE
    words = np.frombuffer(content, "<u8", pages * _PAGE // _WORD).reshape(pages, _PAGE // _WORD)
    folded = np.add.reduce(words, axis=0, dtype="<u8")
    return zlib.crc32(content[pages * _PAGE :], zlib.crc32(folded.tobytes()))
