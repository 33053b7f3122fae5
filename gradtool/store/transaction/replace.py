"""Replacing files: new ones are built beside them, and renamed over them once all are ready.

A single file is in its place with one rename. Several are all old until the log says that they are ready, and as good
as new from then on: whoever finds the log of a crashed run rolls it forward.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import GradtoolError, SystemRefusedError, UsageError, told
from gradtool.store import fs, signals
from gradtool.store.format.header import changed_meanwhile
from gradtool.store.fs import File
from gradtool.store.transaction.attributes import keep_attributes, kept_mode
from gradtool.store.transaction.log import Move, name_of
from gradtool.store.transaction.run import remove

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from gradtool.store.format.header import Shard
    from gradtool.store.fs import Folder
    from gradtool.store.transaction.run import Run


class _Staged(NamedTuple):
    """A temporary, the name that it will take in its folder, and the original that must still be there unchanged."""

    number: int
    temporary: File
    name: str
    target: Path
    original: os.stat_result | None
    mode: int
    # Nothing may have been there before.
    is_new: bool

    @property
    def folder(self) -> Folder:
        return self.temporary.folder

    def finish(self, *, fsync: bool) -> None:
        """Bring the content to the disk. The mode comes last: it may be one that even we could not write to."""
        try:
            fd = self.temporary.open(os.O_RDONLY)
            try:
                fs.change_mode(fd, self.mode)
                if fsync:
                    fs.sync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise told(error, self.target) from error

    def is_unchanged(self) -> bool:
        """Whether what it replaces is still what was read."""
        now, before = self.folder.status(self.name), self.original
        return before is None or (now is not None and _version(now) == _version(before))

    def take_place(self) -> None:
        """Rename the temporary to the target.

        Raises:
            SystemRefusedError: that failed, another file is there, or the temporary is another file.
        """
        try:
            if not self.temporary.is_there:
                raise changed_meanwhile(self.temporary.path)
            if self.is_new and self._link():
                # The file is there; that it has a second name for a while cannot make this fail.
                remove(self.folder, self.temporary.name)
            else:
                self.folder.rename(self.temporary.name, self.name)
        except FileExistsError as error:
            raise SystemRefusedError("another program made it in the meantime; run again", file=self.target) from error
        except OSError as error:
            raise told(error, self.target) from error

    @property
    def is_exchanged(self) -> bool:
        """Whether the temporary was exchanged at the very instant of its rename."""
        try:
            status = self.folder.status(self.name)
        except OSError:
            return False  # The rename was done, and nothing else is known.
        return status is None or not self.temporary.is_at(status)

    def _link(self) -> bool:
        """Whether it is there by a link, which replaces nothing, unlike a rename; not every file system has links.

        Raises:
            FileExistsError: another file is there.
        """
        try:
            self.folder.link(self.temporary.name, self.name)
        except OSError as error:
            if error.errno not in (*fs.UNSUPPORTED, errno.EPERM):
                raise
            if self.folder.status(self.name) is not None:
                raise FileExistsError(errno.EEXIST, "File exists") from error
            return False
        return True


class Replacement:
    """Every file of one run, built as a temporary sibling of its target.

    Used as a context manager: `stage` each file, fill it, `commit` them all; on leaving, temporaries that were not
    committed are removed. A symbolic link stays a link, and its target is replaced.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._staged: list[_Staged] = []
        self._backups: list[tuple[Folder, str]] = []
        self._committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._run.needs_recovery:
            return
        files = [*((one.folder, one.temporary.name) for one in self._staged), *self._backups]
        # All of them, whatever becomes of the first.
        gone = [remove(folder, name) for folder, name in files]
        self._run.is_left = not all(gone)
        if error is not None:
            error.add_note("all files were written before" if self._committed else "no file was changed")

    def stage(
        self,
        target: Path,
        size: int,
        original: os.stat_result | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        *,
        mode: int = 0o600,
        is_new: bool = False,
    ) -> File:
        """Make a temporary of `size` bytes, its space reserved, that will become `target`.

        With `original`, the status of the file that is replaced, its mode, owner and extended attributes are kept; a
        file that is new gets `mode`, or less if one is replaced that had less. With `ranges`, only those are reserved,
        and the rest reads as zeros: holes, where the file system has them. A target that `is_new` replaces nothing.

        Raises:
            SystemRefusedError: no permission, no space, or an attribute that cannot be kept.
        """
        signals.heed()
        folder, name = self._run.place(target)
        # Until the temporary is removed, the log must tell of it.
        self._run.is_left = True
        number, temporary = self._run.new_name("tmp")
        try:
            there = folder.status(name)
            if original is not None:
                mode = kept_mode(original)
            elif there is not None:
                mode &= there.st_mode | stat.S_IRUSR | stat.S_IWUSR
            fd, file = folder.create_file(temporary)
            self._staged.append(_Staged(number, file, name, target, original, mode, is_new))
            try:
                fs.resize(fd, size)
                for begin, end in [(0, size)] if ranges is None else ranges:
                    fs.reserve(fd, begin, end)
                if original is not None:
                    _keep(fd, File(folder, name, original.st_dev, original.st_ino), original)
            finally:
                os.close(fd)
        except OSError as error:
            raise told(error, target) from error
        return file

    def commit(self) -> None:
        """Sync every temporary, then rename each over its target.

        Raises:
            SystemRefusedError: another program changed a file since it was read, or a sync or a rename failed; all
                files are as they were.
        """
        for staged in self._staged:
            staged.finish(fsync=self._run.fsync)
            signals.heed()
        for staged in self._staged:
            if not staged.is_unchanged():
                raise changed_meanwhile(staged.target)
        several = len(self._staged) > 1
        if self._staged:
            self._rename_all(several=several)
        exchanged, self._staged = [one for one in self._staged if one.is_exchanged], []
        while self._backups:
            remove(*self._backups.pop())
        if exchanged:
            raise changed_meanwhile(exchanged[0].target)
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
            raise SystemRefusedError(reason, file=self._run.home.path) from error

    def _rename_all(self, *, several: bool) -> None:
        """Rename the files, so that it is all of them or none, whatever happens."""
        # Without a second name, a rename that fails when others are done could not be taken back.
        for staged in self._staged if several else ():
            backup = staged.folder, self._backup(staged)
            with contextlib.suppress(OSError):
                staged.folder.link(staged.name, backup[1])
                self._backups.append(backup)
        moves = [self._move(staged) for staged in self._staged]
        try:
            if several:
                self._run.mark()
                self._run.sync()
            self._run.append(moves=moves)
        except OSError as error:
            raise told(error, self._run.home.path) from error
        # Only a rename that is refused is rolled back here; any other exception, such as a lack of memory, is left to
        # recovery.
        self._run.needs_recovery = several
        begun: list[Move] = []
        try:
            for move, staged in zip(moves, self._staged, strict=True):
                begun.append(move)
                staged.take_place()
        except GradtoolError as error:
            if several:
                self._revoke(error, begun)
            self._run.needs_recovery = False
            raise
        self._committed = True
        signals.pass_return()
        self._run.needs_recovery = False

    def _move(self, staged: _Staged) -> Move:
        there, place = staged.folder.status(staged.name), self._run.number_of(staged.folder)
        was = (None, None, None) if there is None else (there.st_size, there.st_mtime_ns, there.st_ino)
        return Move(place, staged.number, staged.name, staged.temporary.inode, *was)

    def _revoke(self, error: GradtoolError, moves: Sequence[Move]) -> None:
        """Roll back the renames that may have been done, as the last of them failed; or leave it to a later run."""
        backups = set(self._backups)
        try:
            for move, staged in zip(moves, self._staged, strict=False):
                has_backup = move.size is None or (staged.folder, self._backup(staged)) in backups
                if not has_backup and is_new(staged.folder, move):
                    raise FileNotFoundError
            self._run.append(revoked=True)
            move_back(self._run.folders, self._run.id, moves, fsync=self._run.fsync)
            self._run.end(undone=True)
        except OSError:
            self._run.leave_to_recovery()
            problem = error.problems[0]
            message = f"{problem.message}; some files are renamed and some are not, gradtool recover rolls them forward"
            raise SystemRefusedError(message, file=problem.file, code="unfinished") from error

    def _backup(self, staged: _Staged) -> str:
        return name_of(self._run.id, staged.number, "old")


def move_back(folders: Sequence[Folder], run: str, moves: Sequence[Move], *, fsync: bool) -> None:
    """Undo the renames of a run, as far as they were done; it may be done twice, or half and then again.

    Raises:
        OSError: a rename failed.
    """
    for move in moves:
        folder = folders[move.folder]
        if not is_new(folder, move):
            continue
        backup = name_of(run, move.number, "old")
        there = folder.status(backup)
        if move.size is None:
            folder.unlink(move.name)
        elif there is not None and there.st_ino == move.original:
            folder.rename(backup, move.name)
    for folder in dict.fromkeys(folders[move.folder] for move in moves) if fsync else ():
        folder.sync()


def is_new(folder: Folder, move: Move) -> bool:
    """Whether what was moved is what is there now."""
    status = folder.status(move.name)
    return status is not None and status.st_ino == move.inode


def refuse_collisions(targets: Sequence[Path], shards: Sequence[Shard], indexes: Iterable[Path] = ()) -> None:
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


def _keep(fd: int, file: File, original: os.stat_result) -> None:
    original_fd = file.open(os.O_RDONLY)
    try:
        keep_attributes(fd, original_fd, original)
    finally:
        os.close(original_fd)


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
