"""Changing files in place: what is overwritten is saved first, so that all of it can be put back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import GradtoolError, SystemRefusedError, from_os_error
from gradtool.store import system
from gradtool.store.header import changed_meanwhile, is_unchanged
from gradtool.store.run import remove_all
from gradtool.store.signals import signals_deferred
from gradtool.store.undo import Segment, put_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.run import Run

# Bytes of an undo file that are reserved at a time, and more undo files than there will be.
_MAX_AHEAD = 8 << 20
_MAX_SEGMENTS = 256


class Target(NamedTuple):
    """A file that is changed in place: its real path, what it was when it was opened, and the bytes that change."""

    path: Path
    stat: os.stat_result
    nbytes: int


class Journal:
    """The old content of everything that one run overwrites.

    Used as a context manager: a `Channel` saves what it overwrites, `commit` makes the change last; on leaving without
    that, everything is put back.
    """

    def __init__(self, run: Run, targets: Sequence[Target]) -> None:
        self._run = run
        self._targets = targets
        self._numbers = {target.path: number for number, target in enumerate(targets)}
        self._segments: list[Path] = []
        self._committed = False
        self._ahead = 0

    def __enter__(self) -> Self:
        needed, free = sum(target.nbytes for target in self._targets), self._free_bytes()
        home = self._run.folders[0]
        # Not so much ahead that there is no room for what other threads have to save.
        self._ahead = min(_MAX_AHEAD, max(0, free - needed) // _MAX_SEGMENTS)
        if needed > free:
            raise SystemRefusedError(
                f"what is overwritten is saved here first, {needed:,} bytes, and {free:,} are free; free some space",
                file=home,
            )
        changes = [
            (self._run.place_of(one.path.parent), one.path.name, one.stat.st_size, one.stat.st_ino)
            for one in self._targets
        ]
        for target in self._targets:
            if not is_unchanged(target.path, target.stat):
                raise changed_meanwhile(target.path)
        # From here on, whatever we do not come to do is left to others.
        self._run.is_left = True
        try:
            self._run.sync()
            self._run.append(changes=changes)
        except OSError as error:
            self._run.is_left = self._run.needs_recovery
            raise from_os_error(error, home) from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with signals_deferred():
            if not self._committed:
                self._put_back()
            if not self._run.needs_recovery:
                remove_all(self._segments)
                self._run.is_left = False
        if error is not None and not self._run.needs_recovery:
            error.add_note("all files were written before" if self._committed else "no file was changed")

    def number_of(self, path: Path) -> int | None:
        """The number of a file that is changed in place; None for any other."""
        return self._numbers.get(path)

    def is_ours(self, path: Path, fd: int) -> bool:
        """Whether an open file is still the one that we are changing in place."""
        number, now = self._numbers.get(Path(os.path.realpath(path))), os.fstat(fd)
        if number is None:
            return False
        before = self._targets[number].stat
        return (now.st_dev, now.st_ino, now.st_size) == (before.st_dev, before.st_ino, before.st_size)

    def segment(self) -> Segment:
        """A new undo file, for one thread."""
        _, path = self._run.new_file(self._run.folders[0], "undo")
        try:
            with signals_deferred():
                fd = system.create(path)
                self._segments.append(path)
            try:
                if self._run.fsync:
                    system.sync_path(path.parent)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise from_os_error(error, path) from error
        return Segment(path, fd, fsync=self._run.fsync, ahead=self._ahead)

    def commit(self) -> None:
        """Bring the changed files to the disk, and forget what they were before.

        Raises:
            SystemRefusedError: that failed; everything will be put back.
        """
        for target in self._targets:
            try:
                fd = os.open(target.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
                try:
                    if not self.is_ours(target.path, fd):
                        raise changed_meanwhile(target.path)
                    if self._run.fsync:
                        system.sync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                if isinstance(error, GradtoolError):
                    raise
                raise from_os_error(error, target.path) from error
        with signals_deferred():
            try:
                self._run.append(done=True)
            except OSError as error:
                raise from_os_error(error, self._run.folders[0]) from error
            self._committed = True

    def _free_bytes(self) -> int:
        try:
            disk = os.statvfs(self._run.folders[0])
        except OSError as error:
            raise from_os_error(error, self._run.folders[0]) from error
        return disk.f_bavail * disk.f_frsize

    def _put_back(self) -> None:
        if self._run.needs_recovery:
            return
        try:
            targets = {number: (one.path, one.stat) for number, one in enumerate(self._targets)}
            put_back(targets, self._segments, fsync=self._run.fsync, before_each=self._run.heartbeat())
            self._run.end(undone=True)
        except BaseException as error:
            self._run.leave_to_recovery()
            if isinstance(error, OSError) and not isinstance(error, GradtoolError):
                error = from_os_error(error, self._run.folders[0])
            if not isinstance(error, GradtoolError):
                raise
            problem = error.problems[0]
            message = f"{problem.message}; not everything could be put back, gradtool recover goes on"
            raise SystemRefusedError(message, file=problem.file, code="unfinished") from error
