"""Making a change safe: files are built beside the ones they replace, and renamed over them once all are ready.

A single file is in its place with one rename. Several are all old until the run's record says that they are ready, and
from then on as good as new: whoever finds the record of a run that died goes on with the renames.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import GradtoolError, SystemRefusedError, UsageError, from_os_error
from gradtool.store import system
from gradtool.store.attributes import keep_attributes, umask
from gradtool.store.header import changed_meanwhile, is_unchanged
from gradtool.store.records import Move, file_of
from gradtool.store.run import remove
from gradtool.store.signals import signals_deferred

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradtool.store.header import Shard
    from gradtool.store.run import Run


class _Staged(NamedTuple):
    """A temporary, what it will replace, and the original that must still be there unchanged."""

    number: int
    temporary: Path
    target: Path
    original: os.stat_result | None
    mode: int
    # Nothing may have been there before.
    is_new: bool

    def finish(self, *, fsync: bool) -> None:
        """Bring the content to the disk. The mode comes last: it may be one that even we could not write to."""
        try:
            fd = os.open(self.temporary, os.O_RDONLY | os.O_CLOEXEC)
            try:
                system.change_mode(fd, self.mode)
                if fsync:
                    system.sync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise from_os_error(error, self.target) from error

    def take_place(self) -> None:
        """Rename the temporary to the target; `FileExistsError` if it is to be new and is there."""
        if self.is_new:
            try:
                # Unlike a rename, a link replaces nothing.
                system.link(self.temporary, self.target)
            except OSError as error:
                if error.errno not in (*system.UNSUPPORTED, errno.EPERM):
                    raise
                if os.path.lexists(self.target):
                    raise FileExistsError(errno.EEXIST, "File exists") from error
            else:
                # The file is there; that it has a second name for a while cannot make this fail.
                remove(self.temporary)
                return
        system.rename(self.temporary, self.target)


class Replacement:
    """Every file of one run, built as a temporary sibling of its target.

    Used as a context manager: `stage` each file, fill it, `commit` them all; on leaving, temporaries that were not
    committed are removed. A symbolic link stays a link, and its target is replaced.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._staged: list[_Staged] = []
        self._backups: list[Path] = []
        self._committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._run.needs_recovery:
            return
        with signals_deferred():
            for path in [*(staged.temporary for staged in self._staged), *self._backups]:
                remove(path)
            self._run.is_left = False
        if error is not None:
            error.add_note("all files were written before" if self._committed else "no file was changed")

    def stage(
        self,
        target: Path,
        size: int,
        original: os.stat_result | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        *,
        is_new: bool = False,
    ) -> Path:
        """Make a temporary of `size` bytes, its space reserved, that will become `target`; give its path.

        With `original`, the status of the file that is replaced, its mode, owner and extended attributes are kept. With
        `ranges`, only those are reserved, and the rest reads as zeros: holes, where the file system has them. A target
        that `is_new` replaces nothing.

        Raises:
            SystemRefusedError: no permission, no space, or an attribute that cannot be kept.
        """
        real = self._run.require(target)
        with signals_deferred():
            # Should we not come to remove it, somebody must know of it.
            self._run.is_left = True
            try:
                number, temporary = self._run.new_file(real.parent, "tmp")
                fd = system.create(temporary)
            except OSError as error:
                raise from_os_error(error, target) from error
            mode = 0o666 & ~umask() if original is None else stat.S_IMODE(original.st_mode)
            self._staged.append(_Staged(number, temporary, real, original, mode, is_new))
        try:
            system.resize(fd, size)
            for begin, end in [(0, size)] if ranges is None else ranges:
                system.reserve(fd, begin, end)
            if original is not None:
                keep_attributes(fd, real, original)
        except OSError as error:
            raise from_os_error(error, target) from error
        finally:
            os.close(fd)
        return temporary

    def commit(self) -> None:
        """Sync every temporary, then rename each over its target. Signals wait until the last rename is done.

        Raises:
            SystemRefusedError: a file was changed by somebody else since it was read, or a sync or a rename failed; all
                files are as they were.
        """
        for staged in self._staged:
            staged.finish(fsync=self._run.fsync)
        for staged in self._staged:
            if staged.original is not None and not is_unchanged(staged.target, staged.original):
                raise changed_meanwhile(staged.target)
        with signals_deferred():
            if len(self._staged) == 1:
                _taking_place(self._staged[0])
            elif self._staged:
                self._rename_all()
            several, self._staged, self._committed = len(self._staged) > 1, [], True
            try:
                self._run.sync_folders()
                if several:
                    self._run.end(done=True)
            except OSError as error:
                # What may not be on the disk must not be forgotten.
                if several:
                    self._run.leave_to_recovery()
                remedy = "; gradtool recover tries again" if several else ""
                reason = f"all files were written, but the folder could not be synced: {error.strerror}{remedy}"
                raise SystemRefusedError(reason, file=self._run.folders[0]) from error

    def _rename_all(self) -> None:
        """Rename several files, so that it is all of them or none, whatever happens."""
        for staged in self._staged:
            # Without it, a rename that fails when others are done could not be made up for.
            backup = self._backup(staged)
            with contextlib.suppress(OSError):
                system.link(staged.target, backup)
                self._backups.append(backup)
        moves = [self._move(staged) for staged in self._staged]
        try:
            self._run.sync()
            self._run.append(moves=moves)
        except OSError as error:
            raise from_os_error(error, self._run.folders[0]) from error
        for number, staged in enumerate(self._staged):
            try:
                _taking_place(staged)
            except GradtoolError as error:
                self._revoke(error, moves, number)
                raise
        while self._backups:
            remove(self._backups.pop())

    def _move(self, staged: _Staged) -> Move:
        try:
            there = staged.target.lstat()
        except FileNotFoundError:
            there = None
        size, mtime_ns = (None, None) if there is None else (there.st_size, there.st_mtime_ns)
        place, inode = self._run.place_of(staged.target.parent), staged.temporary.stat().st_ino
        return Move(place, staged.number, staged.target.name, inode, size, mtime_ns)

    def _revoke(self, error: GradtoolError, moves: Sequence[Move], count: int) -> None:
        """Take back the first renames, for the one after them failed; or leave it to a later run to go on."""
        renamed = list(zip(moves, self._staged, strict=True))[:count]
        try:
            if not all(move.size is None or self._backup(staged) in self._backups for move, staged in renamed):
                raise FileNotFoundError
            self._run.append(revoked=True)
            move_back(self._run.folders, self._run.id, moves, fsync=self._run.fsync)
            self._run.end(undone=True)
        except OSError:
            self._run.leave_to_recovery()
            message = f"{error.problems[0].message}; some files are renamed and some are not, gradtool recover goes on"
            raise SystemRefusedError(message, file=error.problems[0].file, code="unfinished") from error

    def _backup(self, staged: _Staged) -> Path:
        return self._run.file(staged.target.parent, staged.number, "old")


def _taking_place(staged: _Staged) -> None:
    try:
        staged.take_place()
    except FileExistsError as error:
        raise SystemRefusedError("was made by somebody else in the meantime", file=staged.target) from error
    except OSError as error:
        raise from_os_error(error, staged.target) from error


def move_back(folders: Sequence[Path], run: str, moves: Sequence[Move], *, fsync: bool) -> None:
    """Undo the renames of a run, as far as they were done; it may be done twice, or half and then again.

    Raises:
        OSError: a rename failed.
    """
    for move in moves:
        target, temporary, backup = files_of(folders, run, move)
        if os.path.lexists(temporary) or not is_new(target, move):
            continue
        if move.size is None:
            system.unlink(target)
        elif os.path.lexists(backup):
            system.rename(backup, target)
    for folder in dict.fromkeys(folders[move.folder] for move in moves) if fsync else ():
        system.sync_path(folder)


def is_new(target: Path, move: Move) -> bool:
    """Whether what was moved is what is there now."""
    return os.path.lexists(target) and target.lstat().st_ino == move.inode


def files_of(folders: Sequence[Path], run: str, move: Move) -> tuple[Path, Path, Path]:
    """The target of a move, its temporary, and its second name."""
    folder = folders[move.folder]
    return folder / move.name, file_of(folder, run, move.number, "tmp"), file_of(folder, run, move.number, "old")


def refuse_collisions(targets: Sequence[Path], shards: Sequence[Shard], indexes: Sequence[Path] = ()) -> None:
    """Raise `UsageError` for a target that must not be written.

    That is one which two files would be written to, an input that is to be left alone, and anything but a regular file.
    """
    inputs = {shard.identity for shard in shards}
    for index in indexes:
        with contextlib.suppress(OSError):
            inputs.add((index.stat().st_dev, index.stat().st_ino))
    seen: set[str] = set()
    for target in targets:
        real = os.path.realpath(target)
        if real in seen:
            raise UsageError(f"two inputs would be written to {target}; use one --output-dir for each")
        seen.add(real)
        try:
            status = target.stat()
        except OSError:
            continue  # Not there, or not to be had: writing it will tell.
        if (status.st_dev, status.st_ino) in inputs:
            raise UsageError(f"{target} is an input; leave out the output option to replace it")
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{target} is a folder, where a file would be written; use --output-dir")
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{target} is no regular file; use --dry-run to write nowhere")
