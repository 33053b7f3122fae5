"""A single commit for all that a run writes: built beside the data, then put in place.

New files are renamed over the old ones; what changes in place is copied from a redo log. Before a line of the
transaction log says that everything is ready, all files are old. From that line on they are as good as new: what the
run does not complete, recovery does.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import (
    GradtoolError,
    SystemRefusedError,
    changed_meanwhile,
    ensure,
    from_os_error,
    os_errors_about,
    say,
    unfinished,
)
from gradtool.store import fs, signals
from gradtool.store.io.redolog import OVERHEAD, RedoLog
from gradtool.store.source import is_same
from gradtool.store.system import BLOCK
from gradtool.store.transaction.log import UNTOUCHED, Change, Redo
from gradtool.store.transaction.staging import Staged, copy_attributes, rights_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradtool.store.fs import File
    from gradtool.store.source import SmallFile
    from gradtool.store.transaction.staging import Rights, Source
    from gradtool.store.transaction.transaction import Transaction


class Commit:
    """Every file that a run writes.

    Used as a context manager: `stage` or `overwrite` files, write their content, then `put_in_place` all of them. At
    the end of the block, what was not put in place is removed. A symbolic link stays a link, and its target is
    replaced. Users get no rights to new files that they do not have to all `sources`; without any, only their owner may
    read them.
    """

    def __init__(self, transaction: Transaction, sources: Sequence[Source] = ()) -> None:
        self._transaction, self._sources = transaction, sources
        self.staged: list[Staged] = []
        self._in_place: InPlace | None = None
        # Whether all files are in their places.
        self.is_committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not self._transaction.needs_recovery:
            error.add_note(signals.WRITTEN if self.is_committed else "no file was changed")

    def stage(
        self,
        target: Path,
        size: int,
        original: os.stat_result | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        *,
        is_new: bool = False,
    ) -> File:
        """Make a temporary of `size` bytes, with its disk space reserved, that will become `target`.

        With `original`, the status of the replaced file when it was read, the file gets the mode, owner and extended
        attributes that this file has at the end. Without it, a file that is replaced is a further source. With
        `ranges`, only these are reserved, and the rest is holes. A target that `is_new` replaces nothing.
        """
        signals.deliver()
        folder, name = self._transaction.targets.locate(target)
        number, temporary = self._transaction.new_name("tmp")
        with os_errors_about(target):
            fd, file = folder.create(temporary)
            self.staged.append(Staged(number, file, name, target, original, is_new))
            with fs.closing(fd):
                # In this order, because macOS reserves space only behind the end of a file.
                for begin, end in [(0, size)] if ranges is None else ranges:
                    fs.reserve(fd, begin, end)
                fs.resize(fd, size)
                if original is not None:
                    # They are copied again at the rename; what cannot be copied is better known now.
                    copy_attributes(fd, folder, name, original)
                    fs.change_mode(fd, 0o600)
        return file

    def give_up(self, temporary: File) -> None:
        """Remove a temporary that was staged; a worker that still writes to it then changes no file."""
        self.staged = [staged for staged in self.staged if staged.temporary != temporary]
        with os_errors_about(temporary.path):
            temporary.folder.unlink(temporary.name)

    def stage_content(self, file: SmallFile, *, is_new: bool) -> None:
        """Stage a small file with its content; if `is_new`, it may not exist when it is put in its place."""
        temporary = self.stage(file.path, len(file.content), file.stat, is_new=is_new)
        with os_errors_about(file.path), fs.closing(temporary.open(os.O_WRONLY)) as fd:
            fs.write_all(fd, [file.content], 0)

    def overwrite(self, targets: Sequence[Target]) -> RedoLog:
        """Return the redo log for what changes in targets in place, which are numbered in this order."""
        self._in_place = InPlace(self._transaction, targets)
        return self._in_place.log

    def put_in_place(self) -> None:
        """Sync everything, log that it is ready, and rename and copy it into its places.

        Raises:
            SystemRefusedError: another program changed a file since it was read, or a sync failed, and all files are as
                they were; or a rename or a copy failed after the first, and recovery must go on.
        """
        makes_new = any(staged.original is None for staged in self.staged)
        # Of thousands of files, only a few differ.
        sources = list({rights_of(path, before) for path, before in self._sources}) if makes_new else []
        for staged in self.staged:
            staged.finish(sources, fsync=self._transaction.fsync)
            signals.deliver()
        is_atomic = len(self.staged) == 1 and self._in_place is None
        self._log_ready(sources, is_atomic=is_atomic)
        self._move_and_copy(sources, is_atomic=is_atomic)
        swapped = []
        for staged in self.staged:
            with contextlib.suppress(OSError):  # The rename succeeded, and nothing else is known.
                # Another file may have taken the temporary's name at the very instant of the rename.
                swapped += [] if staged.is_in_place else [staged.target]
        try:
            self._transaction.sync_folders()
            if not is_atomic:
                # A redo log may be removed only when it is certain that no recovery needs it.
                self._transaction.end(always=self._in_place is not None)
        except OSError as error:
            # The log must stay while a rename may not be on the disk.
            if not is_atomic:
                self._transaction.needs_recovery = True
            file = self.staged[0].target if self.staged else self._transaction.log_folder.path
            hint = "run sync, and not this command again" if is_atomic else self._transaction.hint_to_recover
            message = "all files were written and are in place, but whether they would survive a power cut is unknown"
            message += f": the folder could not be synced: {error.strerror}"
            raise SystemRefusedError(message, file=file, hint=hint) from error
        if swapped:
            raise changed_meanwhile(swapped[0])

    def _log_ready(self, sources: Sequence[Rights], *, is_atomic: bool) -> None:
        """Check once more that every target is as it was read, and log that all is ready."""
        for staged in self.staged:
            staged.finish(sources, fsync=self._transaction.fsync)
            staged.require_replaceable()
        folders = list(self._transaction.targets.names)
        with os_errors_about(self._transaction.log_folder.path):
            moves = [staged.move(folders.index(staged.temporary.folder)) for staged in self.staged]
            changes, redo = ([], None) if self._in_place is None else self._in_place.finish()
            self._transaction.check_ready([*changes, *moves])
            if not is_atomic:
                self._transaction.publish()
            self._transaction.append(ready=[moves, changes, redo])

    def _move_and_copy(self, sources: Sequence[Rights], *, is_atomic: bool) -> None:
        """Put everything in place; if nothing can be, the run is not ready any more."""
        transaction = self._transaction
        ensure(transaction.step == "ready", "files would be changed before the log says that all is ready")
        # An unexpected exception, such as a lack of memory, is left to recovery too.
        transaction.needs_recovery = not is_atomic
        has_begun = self._in_place is not None
        try:
            if self._in_place is not None:
                self._in_place.apply()
            for staged in self.staged:
                staged.take_place(sources, fsync=transaction.fsync)
                has_begun = True
        except GradtoolError as error:
            if not has_begun:
                self._call_off()
                raise
            problem = error.problems[0]
            message = say("some files are new and some are not: {}", problem.message)
            raise unfinished(message, problem.file, transaction.hint_to_recover) from error
        self.is_committed = True
        signals.mark_committed()
        transaction.needs_recovery = False

    def _call_off(self) -> None:
        try:
            self._transaction.append(ended=UNTOUCHED)
        except OSError as error:
            self._transaction.needs_recovery = True
            raise from_os_error(error, self._transaction.log_folder.path) from error
        self._transaction.needs_recovery = False


class Target(NamedTuple):
    """A file that is changed in place, its status when its header was read, and the bytes that change."""

    file: File
    stat: os.stat_result
    nbytes: int


class InPlace:
    """The targets of a run, which are checked before work starts and again at its end, and their redo log.

    Raises:
        SystemRefusedError: a target cannot be written, or is not the file that was read; or the disk would be full.
    """

    def __init__(self, transaction: Transaction, targets: Sequence[Target]) -> None:
        self._transaction, self._targets = transaction, targets
        for target in targets:
            # Bytes that do not change are in no redo log, so they must be on the disk, no matter who wrote them.
            _require_writable(target, fsync=transaction.fsync)
            signals.deliver()
        nbytes = self._require_disk_space()
        self._number, name = transaction.new_name("redo")
        with os_errors_about(transaction.log_folder.path / name):
            fd, file = transaction.log_folder.create(name)
            with fs.closing(fd):
                fs.reserve(fd, 0, nbytes)
        self.log = RedoLog(file)

    def finish(self) -> tuple[list[Change], Redo]:
        """Sync the redo log, and return what the transaction log says of it."""
        with os_errors_about(self.log.file.path), fs.closing(self.log.file.open(os.O_RDONLY)) as fd:
            if self._transaction.fsync:
                fs.sync(fd)
        folders = list(self._transaction.targets.names)
        changes = []
        for target in self._targets:
            _require_writable(target, fsync=False)
            file = target.file
            changes.append(Change(folders.index(file.folder), file.name, target.stat.st_size, file.inode))
        limits = {number: (target.nbytes, target.stat.st_size) for number, target in enumerate(self._targets)}
        for number, (nbytes, end) in self.log.added.items():
            limit, size = limits.get(number, (0, 0))
            ensure(nbytes <= limit and end <= size, f"the redo log has too much for file {number}")
        return changes, Redo(self._number, self.log.file.inode, self.log.size)

    def apply(self) -> None:
        """Copy the redo log into the targets, and sync them."""
        self.log.apply([target.file for target in self._targets])
        for file, before, _ in self._targets:
            with os_errors_about(file.path), fs.closing(file.open(os.O_RDONLY)) as fd:
                if self._transaction.fsync:
                    fs.sync(fd)
                if os.fstat(fd).st_size != before.st_size:
                    raise changed_meanwhile(file.path)

    def _require_disk_space(self) -> int:
        """Raise an error now if the disk would be full later; return the bytes that the redo log will have, about."""
        log_folder = self._transaction.log_folder
        folders = {log_folder.identity[0]: log_folder}
        needed: dict[int, int] = defaultdict(int)
        nbytes = needed[log_folder.identity[0]] = int(sum(target.nbytes for target in self._targets) * OVERHEAD)
        for file, stat, changes in self._targets:
            folders.setdefault(file.device, file.folder)
            needed[file.device] += min(changes, max(0, stat.st_size - stat.st_blocks * BLOCK))
        for device, room in needed.items():
            with os_errors_about(folders[device].path):
                disk = os.statvfs(folders[device].fd)
            free = disk.f_bavail * disk.f_frsize
            if room > free:
                message = f"writing in place needs {room:,} bytes here for a redo log and filled holes"
                message += f", {free:,} are free"
                raise SystemRefusedError(message, file=folders[device].path, hint="free some space")
        return nbytes


def _require_writable(target: Target, *, fsync: bool) -> None:
    """Raise `SystemRefusedError` now for what could not be written later, while nothing is changed."""
    file, before, _ = target
    with os_errors_about(file.path), fs.closing(file.open(os.O_RDWR)) as fd:
        now = os.fstat(fd)
        if fsync:
            fs.sync(fd)
    if not is_same(now, before):
        raise changed_meanwhile(file.path)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit not in (resource.RLIM_INFINITY, -1) and now.st_size > limit:
        message = f"has {now.st_size:,} bytes, which exceeds the limit of {limit:,} bytes that this process may write"
        raise SystemRefusedError(message, file=file.path, hint="raise the limit on the size of files (ulimit -f)")
