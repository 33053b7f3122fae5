"""Changing files in place: what is overwritten is saved first, so that all of it can be put back."""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import SystemRefusedError, from_os_error, told
from gradtool.store import fs, signals
from gradtool.store.format.header import changed_meanwhile
from gradtool.store.transaction.run import remove_all
from gradtool.store.transaction.undolog import Undo, UndoLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.fs import File
    from gradtool.store.transaction.run import Run

# Bytes of an undo log that are reserved at a time, and more undo logs than there will be.
_MAX_AHEAD = 8 << 20
_MAX_UNDO_LOGS = 256
# What an undo log has beside the content: checksums of 8 bytes for 512, and a little for each block.
_OVERHEAD = 1.02
# What `st_blocks` counts in, whatever the file system has.
_BLOCK = 512


class Target(NamedTuple):
    """A file that is changed in place, what it was when its header was read, and the bytes that change."""

    file: File
    stat: os.stat_result
    nbytes: int


class InPlace:
    """The old content of everything that one run overwrites.

    Used as a context manager: a `Channel` saves what it overwrites, `commit` makes the change last; on leaving without
    that, everything is put back.
    """

    def __init__(self, run: Run, targets: Sequence[Target]) -> None:
        self._run = run
        self._targets = targets
        self._numbers = {target.file: number for number, target in enumerate(targets)}
        self._sizes = {(one.file.device, one.file.inode): one.stat.st_size for one in targets}
        self._logs: list[File] = []
        self._committed = False
        self._ahead = 0

    def __enter__(self) -> Self:
        for target in self._targets:
            _refuse_unwritable(target, fsync=self._run.fsync)
            signals.heed()
        self._refuse_full_disk()
        changes = [
            (self._run.number_of(one.file.folder), one.file.name, one.stat.st_size, one.stat.st_ino)
            for one in self._targets
        ]
        # From here on, the log must stay until everything is cleared away.
        self._run.is_left = True
        try:
            self._run.mark()
            self._run.sync()
            self._run.append(changes=changes)
        except BaseException as error:
            self._run.is_left = self._run.needs_recovery
            if isinstance(error, OSError):
                raise told(error, self._run.home.path) from error
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self._committed:
            self._put_back()
        if not self._run.needs_recovery:
            self._run.is_left = not remove_all(self._logs)
        if error is not None and not self._run.needs_recovery:
            error.add_note("all files were written before" if self._committed else "no file was changed")

    def number_of(self, file: File) -> int:
        """The number of a file that is changed in place."""
        return self._numbers[file]

    def is_ours(self, fd: int) -> bool:
        """Whether an open file is one that we are changing in place, of the size that it had."""
        now = os.fstat(fd)
        return self._sizes.get((now.st_dev, now.st_ino)) == now.st_size

    def undo_log(self) -> UndoLog:
        """A new undo log, for one thread."""
        _, name = self._run.new_name("undo")
        home = self._run.home
        try:
            fd, file = home.create_file(name)
            self._logs.append(file)
            try:
                if self._run.fsync:
                    home.sync()
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise from_os_error(error, home.path / name) from error
        return UndoLog(file, fd, self._run.key, fsync=self._run.fsync, ahead=self._ahead)

    def commit(self) -> None:
        """Bring the changed files to the disk, and forget what they were before.

        Raises:
            SystemRefusedError: that failed; everything will be put back.
        """
        for target in self._targets:
            try:
                fd = target.file.open(os.O_RDONLY)
                try:
                    if not self.is_ours(fd):
                        raise changed_meanwhile(target.file.path)
                    if self._run.fsync:
                        fs.sync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                raise told(error, target.file.path) from error
            signals.heed()
        try:
            self._run.append(done=True)
        except OSError as error:
            raise from_os_error(error, self._run.home.path) from error
        self._committed = True
        signals.pass_return()

    def _refuse_full_disk(self) -> None:
        """Refuse now what would not find room later: undo logs in the home, and holes that are filled."""
        needed: dict[int, int] = defaultdict(int)
        homes = {self._run.home.identity[0]: self._run.home}
        undo = int(sum(target.nbytes for target in self._targets) * _OVERHEAD)
        needed[self._run.home.identity[0]] += undo
        for file, stat, nbytes in self._targets:
            homes.setdefault(file.device, file.folder)
            needed[file.device] += min(nbytes, max(0, stat.st_size - stat.st_blocks * _BLOCK))
        for device, nbytes in needed.items():
            try:
                disk = os.statvfs(homes[device].fd)
            except OSError as error:
                raise from_os_error(error, homes[device].path) from error
            free = disk.f_bavail * disk.f_frsize
            if nbytes > free:
                raise SystemRefusedError(
                    f"what is overwritten is saved here first, and holes are filled: that takes {nbytes:,} bytes, and "
                    f"{free:,} are free; free some space",
                    file=homes[device].path,
                )
            if homes[device] is self._run.home:
                # Less where the disk is nearly full: other threads need room for their undo logs, too.
                self._ahead = min(_MAX_AHEAD, (free - nbytes) // _MAX_UNDO_LOGS)

    def _put_back(self) -> None:
        if self._run.needs_recovery:
            return
        try:
            targets = {number: (one.file, one.stat.st_size) for number, one in enumerate(self._targets)}
            Undo(targets, self._logs, self._run.key).put_back(fsync=self._run.fsync)
            self._run.append(undone=True)
        except BaseException as error:
            self._run.leave_to_recovery()
            if not isinstance(error, OSError):
                raise
            problem = told(error, self._run.home.path).problems[0]
            message = f"{problem.message}; not everything could be put back, gradtool recover goes on"
            raise SystemRefusedError(message, file=problem.file, code="unfinished") from error


def _refuse_unwritable(target: Target, *, fsync: bool) -> None:
    """Refuse now what could not be written later, while nothing is changed.

    What is not overwritten is not saved either, so it must be on the disk, whoever wrote it.
    """
    file, before, _ = target
    try:
        fd = file.open(os.O_RDWR)
        try:
            now = os.fstat(fd)
            if fsync:
                fs.sync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise told(error, file.path) from error
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise changed_meanwhile(file.path)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit not in (resource.RLIM_INFINITY, -1) and now.st_size > limit:
        raise SystemRefusedError(
            f"has {now.st_size:,} bytes, and a process may write up to {limit:,}; raise that limit (ulimit -f)",
            file=file.path,
        )
