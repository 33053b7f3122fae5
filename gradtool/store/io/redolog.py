"""Redo logs: what a run overwrites in place is written here first, and copied into the targets once all is ready.

A redo log is a sequence of entries: a header, the parts of a range that change, a checksum of the old content of each
sector, and the new content of the range. So each sector of a target is known to be old, new, or written by another
program. A run changes every byte at most once, so the order of the entries does not matter.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import zlib
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import SystemRefusedError, call, ensure, os_errors_about, say, unfinished
from gradtool.store import fs, system
from gradtool.store.io.channel import Channel, fill
from gradtool.store.source import Reader, Source
from gradtool.store.system import SECTOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from gradtool.store.fs import File

    # Of a range, each with its first byte and its end.
    Parts = Sequence[tuple[int, int]]
    Sums = npt.NDArray[np.uint64]

# The checksum of the entry; number of the target, begin and length of the range, number of its parts; each part.
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<IQQI")
_PART = struct.Struct("<QQ")
_HEADER_BYTES = _CHECKSUM.size + _HEADER.size
# Larger than any block that is written at once.
_MAX_ENTRY_BYTES = 1 << 28
_WORD, _PAGE = 8, 4096
# Of a log over its content: checksums of 8 bytes for every 512, and a little for each entry.
OVERHEAD = 1.02
# Threads that copy, each with so many open files at most; fewer bytes are not worth a second thread.
_MAX_THREADS, _OPEN_FILES, _SMALL_BYTES = 8, 16, 4 << 20


class Entry(NamedTuple):
    """A range of a target, from byte `begin` on, of which the `parts` change; its new content is at `at` in the log."""

    number: int
    begin: int
    length: int
    parts: Parts
    sums: bytes
    head: bytes
    at: int


class RedoLog:
    """The redo log of a run, of so many bytes. Threads add entries side by side.

    All methods raise `SystemRefusedError` if the log or a target cannot be read or written, or the log is damaged.
    """

    def __init__(self, file: File, size: int = 0) -> None:
        self.file, self.size = file, size
        # In every checksum, so that the redo log of another run cannot pass for this one's.
        self._run = file.name.rpartition("-")[0]
        self._lock = threading.Lock()
        # Of each target, by number: the bytes that change, and where the last entry ends.
        self.added: dict[int, tuple[int, int]] = {}
        self._is_checked = False

    def add(self, channel: Channel, number: int, begin: int, old: memoryview, new: memoryview, *, parts: Parts) -> None:
        """Add a range of a target, whose `parts` will change from `old` to `new`."""
        tables = [_PART.pack(*part) for part in parts]
        head = b"".join([_HEADER.pack(number, begin, len(new), len(parts)), *tables, sector_sums(old, begin).tobytes()])
        head = _checksum(self._run, head, new) + head
        nbytes = sum(stop - start for start, stop in parts)
        with self._lock:
            at, self.size = self.size, self.size + len(head) + len(new)
            before, end = self.added.get(number, (0, 0))
            self.added[number] = before + nbytes, max(end, begin + len(new))
        channel.write(self.file, at, [head, new], nbytes)

    def entries(self, fd: int) -> Iterator[Entry]:
        """Yield the entries, whose content is not read; `fd` is the open log."""
        at = 0
        while at < self.size:
            header = os.pread(fd, _HEADER_BYTES, at)
            if len(header) < _HEADER_BYTES:
                raise self._damaged()
            number, begin, length, count = _HEADER.unpack_from(header, _CHECKSUM.size)
            if max(length, split := count * _PART.size) > _MAX_ENTRY_BYTES:
                raise self._damaged()
            nbytes = split + _sectors(begin, length) * _WORD
            tables = os.pread(fd, nbytes, at + _HEADER_BYTES)
            if len(tables) < nbytes:
                raise self._damaged()
            at += _HEADER_BYTES + nbytes
            parts, sums = tables[:split], tables[split:]
            yield Entry(number, begin, length, [*_PART.iter_unpack(parts)], sums, header + tables, at)
            at += length

    def apply(self, targets: Sequence[File]) -> None:
        """Copy everything into the targets, on several threads; `finish` goes on where this fails."""
        errors: list[BaseException] = []
        with os_errors_about(self.file.path), fs.closing(self.file.open(os.O_RDONLY)) as fd:
            budget = system.descriptors_left()
            # Beside this thread.
            count = max(0, min(system.cores(), _MAX_THREADS, self.size // _SMALL_BYTES, budget - 1))
            open_files = max(1, min(_OPEN_FILES, budget // (count + 1)))
            copy = partial(self._copy, fd, self.entries(fd), targets, open_files, errors)
            threads = [threading.Thread(target=copy) for _ in range(count)]
            with contextlib.suppress(RuntimeError):  # No more threads can be started.
                for thread in threads:
                    thread.start()
            copy()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            if errors:
                raise errors[0]

    def _copy(
        self, fd: int, entries: Iterator[Entry], targets: Sequence[File], open_files: int, errors: list[BaseException]
    ) -> None:
        """Copy entries into their targets until there are no more, or a thread has an error."""
        log = Reader(Source(str(self.file.path), self.size), fd)
        channel = Channel(open_files, lambda nbytes: memoryview(bytearray(nbytes)))
        try:
            while not errors:
                with self._lock:
                    entry = next(entries, None)
                if entry is None:
                    break
                with channel.memory(entry.length) as view:
                    fill(log, entry.at, view)
                    for start, stop in entry.parts:
                        channel.write(targets[entry.number], entry.begin + start, [view[start:stop]])
        except BaseException as error:  # noqa: BLE001 - the first thread raises it
            errors.append(error)
        finally:
            channel.close()

    def check(self, targets: Mapping[int, tuple[File, int]]) -> None:
        """Raise `SystemRefusedError` if a target, given with its size, has a sector that is neither old nor new."""
        for entry, file, content, now in self._compared(targets):
            if _is_foreign(now, entry, content):
                raise changed_since(file.path)
        self._is_checked = True

    def finish(self, targets: Mapping[int, tuple[File, int]], *, force: bool = False) -> None:
        """Copy into the targets what they do not have yet, after a `check`, and sync them; may be repeated.

        It raises the errors of `check`, too, unless with `force`: another program may have written since.
        """
        ensure(self._is_checked, "a redo log would be copied that was not checked")
        for entry, file, content, now in self._compared(targets):
            if not force and _is_foreign(now, entry, content):
                raise changed_since(file.path)
            if now != content:
                with os_errors_about(file.path), fs.closing(file.open(os.O_WRONLY)) as fd:
                    for start, stop in entry.parts:
                        fs.write_all(fd, [content[start:stop]], entry.begin + start)
        # All are synced: an earlier recovery may have written what is right already, and not synced it.
        for file, _ in targets.values():
            with os_errors_about(file.path), fs.closing(file.open(os.O_RDONLY)) as fd:
                fs.sync(fd)

    def _compared(self, targets: Mapping[int, tuple[File, int]]) -> Iterator[tuple[Entry, File, bytes, bytes]]:
        """Yield each entry with its target, its new content, and what the target has now."""
        with os_errors_about(self.file.path), fs.closing(self.file.open(os.O_RDONLY)) as fd:
            for entry in self.entries(fd):
                content = os.pread(fd, entry.length, entry.at)
                if _checksum(self._run, entry.head[_CHECKSUM.size :], content) != entry.head[: _CHECKSUM.size]:
                    raise self._damaged()
                file, size = targets.get(entry.number, (None, 0))
                if file is not None and entry.begin + entry.length <= size:
                    with os_errors_about(file.path), fs.closing(file.open(os.O_RDONLY)) as target:
                        now = os.pread(target, entry.length, entry.begin)
                    yield entry, file, content, now

    def _damaged(self) -> SystemRefusedError:
        hint = f"delete {self._run}* beside the data to keep it as it is"
        return unfinished("is damaged, so the changes that it contains are lost", self.file.path, hint)


def changed_since(target: Path) -> SystemRefusedError:
    """Return the error for a target that another program wrote to after a run crashed or failed."""
    hint = say(
        "delete the .gradtool-* files beside it to keep it as it is, or run {} to overwrite what that program wrote",
        call("recover", str(target), force=True),
    )
    return unfinished("another program wrote to it after a run crashed or failed", target, hint)


def _is_foreign(now: bytes, entry: Entry, content: bytes) -> bool:
    """Check whether a sector has neither the old content nor the new."""
    if now == content:
        return False
    if len(now) != len(content):
        return True
    import numpy as np  # kept off the start-up path

    old = np.frombuffer(entry.sums, "<u8")
    sums, new = (sector_sums(memoryview(each), entry.begin) for each in (now, content))
    return bool(((sums != old) & (sums != new)).any())


def _checksum(run: str, head: bytes, content: bytes | memoryview) -> bytes:
    """Compute the checksum of an entry; of its content the sum of all pages as 64-bit words counts: very fast."""
    import numpy as np  # kept off the start-up path

    pages = len(content) // _PAGE
    words = np.frombuffer(content, "<u8", pages * _PAGE // _WORD).reshape(pages, _PAGE // _WORD)
    folded: bytes = np.add.reduce(words, axis=0, dtype="<u8").tobytes()
    start = zlib.crc32(head, zlib.crc32(run.encode()))
    return _CHECKSUM.pack(zlib.crc32(content[pages * _PAGE :], zlib.crc32(folded, start)))


def _sectors(begin: int, length: int) -> int:
    """Count the sectors that a range of a file touches."""
    return (begin + length - 1) // SECTOR - begin // SECTOR + 1 if length else 0


def sector_sums(content: memoryview, begin: int) -> Sums:
    """Compute a checksum for each sector of a range of a file that begins at byte `begin`."""
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
