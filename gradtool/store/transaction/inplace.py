"""Changing files in place: what is overwritten is saved first, so that all of it can be put back."""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import SystemRefusedError, changed_meanwhile, from_os_error, os_errors_about, unfinished
from gradtool.store import fs, signals
from gradtool.store.source import is_same
from gradtool.store.system import BLOCK
from gradtool.store.transaction.files import remove_all
from gradtool.store.transaction.replace import Replacement
from gradtool.store.transaction.undolog import Undo, UndoLog
from gradtool.wording import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.fs import File
    from gradtool.store.transaction.staging import Source
    from gradtool.store.transaction.transaction import Transaction

# Bytes of an undo log that are reserved at a time, and more undo logs than there will be.
_MAX_AHEAD = 8 << 20
_MAX_UNDO_LOGS = 256
# Of an undo log over its content: checksums of 8 bytes for every 512, and a little for each block.
_OVERHEAD = 1.02


class Target(NamedTuple):
    """A file that is changed in place, its status when its header was read, and the bytes that change."""

    file: File
    stat: os.stat_result
    nbytes: int


class InPlace:
    """The old content of everything that one run overwrites.

    Used as a context manager: a `Channel` saves what it overwrites, and `commit` makes the changes final; without it,
    everything is put back at the end of the block. A file that is staged in `last` is replaced, and that is the commit:
    while it is old, so is everything, and once it is new, so is everything.
    """

    def __init__(self, transaction: Transaction, targets: Sequence[Target], sources: Sequence[Source] = ()) -> None:
        self._transaction = transaction
        self._targets = targets
        self._numbers = {target.file: number for number, target in enumerate(targets)}
        self._sizes = {(one.file.device, one.file.inode): one.stat.st_size for one in targets}
        self._logs: list[File] = []
        self.last = Replacement(transaction, sources)
        self._committed = False
        self._ahead = 0

    def __enter__(self) -> Self:
        for target in self._targets:
            _require_writable(target, fsync=self._transaction.fsync)
            signals.deliver()
        self._require_disk_space()
        folders = self._transaction.targets.folders
        changes = [
            (folders.index(one.file.folder), one.file.name, one.stat.st_size, one.stat.st_ino) for one in self._targets
        ]
        # From here on, the log must stay until the clean-up is complete.
        self._transaction.leaves_files = True
        try:
            with os_errors_about(self._transaction.home.path):
                self._transaction.add_markers()
                self._transaction.sync()
                self._transaction.append(changes=changes)
        except BaseException:
            self._transaction.leaves_files = self._transaction.needs_recovery
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not (self._committed or self._transaction.needs_recovery):
            self._put_back()
        if self._transaction.needs_recovery:
            return
        gone = [remove_all(self._logs), self.last.clean()]
        self._transaction.leaves_files = not all(gone)
        if error is not None:
            error.add_note("all files were written before" if self._committed else "no file was changed")

    def number_of(self, file: File) -> int:
        """The number of a file that is changed in place."""
        return self._numbers[file]

    def is_ours(self, fd: int) -> bool:
        """Whether an open file is one that is changed in place, and still has its size."""
        now = os.fstat(fd)
        return self._sizes.get((now.st_dev, now.st_ino)) == now.st_size

    def undo_log(self) -> UndoLog:
        """A new undo log, for one thread."""
        _, name = self._transaction.new_name("undo")
        home = self._transaction.home
        with os_errors_about(home.path / name):
            fd, file = home.create_file(name)
            self._logs.append(file)
            try:
                if self._transaction.fsync:
                    home.sync()
            except BaseException:
                os.close(fd)
                raise
        return UndoLog(file, fd, self._transaction.key, fsync=self._transaction.fsync, ahead=self._ahead)

    def commit(self) -> None:
        """Sync the changed files and give up their old content; if that fails, everything will be put back."""
        for file, _, _ in self._targets:
            with os_errors_about(file.path), file.opened(os.O_RDONLY) as fd:
                if not self.is_ours(fd):
                    raise changed_meanwhile(file.path)
                if self._transaction.fsync:
                    fs.sync(fd)
            signals.deliver()
        if not self.last.is_empty:
            self._commit_with_last()
            return
        with os_errors_about(self._transaction.home.path):
            self._transaction.append(done=True)
        self._committed = True
        signals.mark_committed()

    def _commit_with_last(self) -> None:
        """Replace the one file that is staged, by a rename that recovery can tell was done or not."""
        home = self._transaction.home
        with os_errors_about(home.path):
            # Recovery looks for the temporary, which must be there in a power cut until it is renamed.
            self._transaction.sync_folders()
        try:
            self.last.commit()
            self._committed = True
            self._transaction.append(done=True)
        except BaseException as error:
            if not self.last.is_committed:
                raise
            self._committed = True
            self._transaction.leave_to_recovery()
            if not isinstance(error, OSError):
                raise
            problem = from_os_error(error, home.path).problems[0]
            what = say("all files were written, but the run could not be ended: {}", problem.message)
            raise SystemRefusedError(what, file=problem.file, hint=self._transaction.hint_to_recover) from error

    def _require_disk_space(self) -> None:
        """Raise `SystemRefusedError` now if the disk would be full later: by undo logs, and holes that are filled."""
        home = self._transaction.home
        folders = {home.identity[0]: home}
        needed: dict[int, int] = defaultdict(int)
        needed[home.identity[0]] = int(sum(target.nbytes for target in self._targets) * _OVERHEAD)
        for file, stat, nbytes in self._targets:
            folders.setdefault(file.device, file.folder)
            needed[file.device] += min(nbytes, max(0, stat.st_size - stat.st_blocks * BLOCK))
        for device, nbytes in needed.items():
            folder = folders[device]
            with os_errors_about(folder.path):
                disk = os.statvfs(folder.fd)
            free = disk.f_bavail * disk.f_frsize
            if nbytes > free:
                what = f"writing in place needs {nbytes:,} bytes here for undo logs and filled holes, {free:,} are free"
                raise SystemRefusedError(what, file=folder.path, hint="free some space")
            if folder is home:
                # Less on a disk that is nearly full: other threads need space for their undo logs too.
                self._ahead = min(_MAX_AHEAD, (free - nbytes) // _MAX_UNDO_LOGS)

    def _put_back(self) -> None:
        transaction = self._transaction
        try:
            targets = {number: (one.file, one.stat.st_size) for number, one in enumerate(self._targets)}
            Undo(targets, self._logs, transaction.key).put_back(fsync=transaction.fsync)
            transaction.append(undone=True)
        except BaseException as error:
            transaction.leave_to_recovery()
            if not isinstance(error, OSError):
                raise
            problem = from_os_error(error, transaction.home.path).problems[0]
            what = say("some old content could not be put back: {}", problem.message)
            raise unfinished(what, problem.file, transaction.hint_to_recover) from error


def _require_writable(target: Target, *, fsync: bool) -> None:
    """Raise `SystemRefusedError` now for what could not be written later, while nothing is changed.

    Bytes that are not overwritten are not saved either, so they must be on the disk, no matter who wrote them.
    """
    file, before, _ = target
    with os_errors_about(file.path), file.opened(os.O_RDWR) as fd:
        now = os.fstat(fd)
        if fsync:
            fs.sync(fd)
    if not is_same(now, before):
        raise changed_meanwhile(file.path)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit not in (resource.RLIM_INFINITY, -1) and now.st_size > limit:
        what = f"has {now.st_size:,} bytes, which exceeds the limit of {limit:,} bytes that this process may write"
        raise SystemRefusedError(what, file=file.path, hint="raise the limit on the size of files (ulimit -f)")
