"""Replacing files: new ones are built beside them, and renamed over them once all are ready.

A single file needs a single rename. Several are all old until the log lists their renames, and as good as new from then
on: recovery does the renames that a crashed run did not.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Self

from gradtool.errors import GradtoolError, SystemRefusedError, changed_meanwhile, os_errors_about, unfinished
from gradtool.store import fs, signals
from gradtool.store.fs import File
from gradtool.store.transaction.files import name_of, remove
from gradtool.store.transaction.log import Move
from gradtool.store.transaction.orders import Orders
from gradtool.store.transaction.staging import Staged, keep_attributes, rights_of
from gradtool.wording import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gradtool.store.fs import Folder
    from gradtool.store.transaction.orders import Built, Order
    from gradtool.store.transaction.staging import Rights, Source
    from gradtool.store.transaction.transaction import Transaction


class Replacement:
    """Every file of one run, built as a temporary sibling of its target.

    Used as a context manager: `stage` each file, fill it, `commit` them all. At the end of the block, temporaries that
    were not committed are removed. A symbolic link stays a link, and its target is replaced. Users get no rights to new
    files that they do not have to all `sources`; without any, only their owner may read them.
    """

    def __init__(self, transaction: Transaction, sources: Sequence[Source] = ()) -> None:
        self._transaction, self._sources = transaction, sources
        self._staged: list[Staged] = []
        self._backups: list[tuple[Folder, str]] = []
        # Temporaries whose targets are linked.
        self._linked: list[tuple[Folder, str]] = []
        # Of files that other processes build.
        self.orders = Orders(transaction)
        # Whether all files are in their places.
        self.is_committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._transaction.needs_recovery:
            return
        self._transaction.leaves_files = not self.clean()
        if error is not None:
            error.add_note("all files were written before" if self.is_committed else "no file was changed")

    def clean(self) -> bool:
        """Remove all files that are not in their places; whether all are gone."""
        files = [*((one.folder, one.temporary.name) for one in self._staged), *self._linked, *self._backups]
        gone = [self.orders.withdraw(), *(remove(folder, name) for folder, name in files)]
        return all(gone)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is staged."""
        return not self._staged

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
        attributes that this one has at the end. Without, a file that is replaced is one more of the sources. With
        `ranges`, only these are reserved, and the rest is holes. A target that `is_new` replaces nothing.
        """
        signals.deliver()
        folder, name = self._transaction.locate(target)
        # Until the temporary is removed, the log must stay.
        self._transaction.leaves_files = True
        number, temporary = self._transaction.new_name("tmp")
        with os_errors_about(target):
            fd, file = folder.create_file(temporary)
            self._staged.append(Staged(number, file, name, target, original, is_new))
            with fs.closing(fd):
                # In this order, because macOS reserves space only behind the end of a file.
                for begin, end in [(0, size)] if ranges is None else ranges:
                    fs.reserve(fd, begin, end)
                fs.resize(fd, size)
                if original is not None:
                    with File(folder, name, original.st_dev, original.st_ino).opened(os.O_RDONLY) as original_fd:
                        # They are taken again at the rename; what cannot be kept is better known now.
                        keep_attributes(fd, original_fd, original)
                    fs.change_mode(fd, 0o600)
        return file

    def adopt(self, order: Order, built: Built) -> None:
        """Take what another process has built as ordered; raises `SystemRefusedError` if it is something else."""
        self._staged.append(self.orders.adopted(order, built))

    def commit(self) -> None:
        """Sync every temporary, then rename each over its target.

        Raises:
            SystemRefusedError: another program changed a file since it was read, or a sync or a rename failed; all
                files are as they were.
        """
        self.orders.require_all_built()
        makes_new = any(staged.original is None for staged in self._staged)
        # Of thousands of files, only a few differ.
        sources = list({rights_of(path, before) for path, before in self._sources}) if makes_new else []
        for staged in self._staged:
            staged.finish(sources, fsync=self._transaction.fsync)
            signals.deliver()
        several = len(self._staged) > 1
        if self._staged:
            self._rename_all(sources, several=several)
        swapped = [one for one in self._staged if one.was_swapped()]
        written, self._staged = self._staged, []
        while self._backups:
            remove(*self._backups.pop())
        if swapped:
            raise changed_meanwhile(swapped[0].target)
        try:
            self._transaction.sync_folders()
            if several:
                self._transaction.end(done=True)
        except OSError as error:
            # The log must stay while a rename may not be on the disk.
            if several:
                self._transaction.leave_to_recovery()
            file = written[0].target if written else self._transaction.home.path
            hint = self._transaction.hint_to_recover if several else "run sync, and not this command again"
            what = "all files were written and are in place, but whether they would survive a power cut is unknown"
            reason = f"{what}: the folder could not be synced: {error.strerror}"
            raise SystemRefusedError(reason, file=file, hint=hint) from error

    def _rename_all(self, sources: Sequence[Rights], *, several: bool) -> None:
        """Rename all files or, if one rename fails, none."""
        moves = [self._move(staged) for staged in self._staged]
        with os_errors_about(self._transaction.home.path):
            if several:
                self._back_up(sources)
            self._transaction.append(moves=moves)
        # Only a rename that is refused is rolled back here; any other exception, such as a lack of memory, is left to
        # recovery.
        self._transaction.needs_recovery = several
        begun: list[Move] = []
        try:
            for move, staged in zip(moves, self._staged, strict=True):
                begun.append(move)
                if staged.take_place(sources, fsync=self._transaction.fsync):
                    # It stays until the link is synced: recovery needs each file under one of its names.
                    self._linked.append((staged.folder, staged.temporary.name))
        except GradtoolError as error:
            if several:
                self._revoke(error, begun)
            self._transaction.needs_recovery = False
            raise
        self.is_committed = True
        signals.mark_committed()
        self._transaction.needs_recovery = False

    def _back_up(self, sources: Sequence[Rights]) -> None:
        """Give every replaced file a second name, without which its rename could not be undone; sync all names."""
        for staged in self._staged:
            folder, backup = self._backup_of(staged)
            # Once it has that name, a write whose date is set back cannot be told from the link.
            staged.finish(sources, fsync=self._transaction.fsync)
            with contextlib.suppress(OSError):
                folder.link(staged.name, backup)
                self._backups.append((folder, backup))
                staged.note_link()
        self._transaction.add_markers()
        self._transaction.sync()

    def _move(self, staged: Staged) -> Move:
        folder, replaced = self._transaction.targets.folders.index(staged.folder), staged.folder.status(staged.name)
        was = (None, None, None) if replaced is None else (replaced.st_size, replaced.st_mtime_ns, replaced.st_ino)
        return Move(folder, staged.number, staged.name, staged.temporary.inode, *was)

    def _revoke(self, error: GradtoolError, moves: Sequence[Move]) -> None:
        """Roll back the renames that may have been done, or leave that to recovery."""
        transaction, backups = self._transaction, set(self._backups)
        try:
            for move, staged in zip(moves, self._staged, strict=False):
                can_undo = move.size is None or self._backup_of(staged) in backups
                if not can_undo and is_new(staged.folder, move):
                    raise FileNotFoundError
            transaction.append(revoked=True)
            move_back(dict(enumerate(transaction.targets.folders)), transaction.id, moves, fsync=transaction.fsync)
            transaction.end(undone=True)
        except OSError:
            transaction.leave_to_recovery()
            problem = error.problems[0]
            what = say("some files are renamed and some are not: {}", problem.message)
            raise unfinished(what, problem.file, transaction.hint_to_recover) from error

    def _backup_of(self, staged: Staged) -> tuple[Folder, str]:
        return staged.folder, name_of(self._transaction.id, staged.number, "old")


def move_back(folders: Mapping[int, Folder], run: str, moves: Sequence[Move], *, fsync: bool) -> None:
    """Undo those renames of a run that were done; may be interrupted and repeated."""
    for move in moves:
        folder = folders[move.folder]
        if not is_new(folder, move):
            continue
        backup = name_of(run, move.number, "old")
        old = folder.status(backup)
        if move.size is None:
            folder.unlink(move.name)
        elif old is not None and old.st_ino == move.original:
            folder.rename(backup, move.name)
    for folder in dict.fromkeys(folders[move.folder] for move in moves) if fsync else ():
        folder.sync()


def is_new(folder: Folder, move: Move) -> bool:
    """Whether the target of a move is the file that was its temporary."""
    status = folder.status(move.name)
    return status is not None and status.st_ino == move.inode
