"""Making a change safe: files are built beside the ones they replace, and renamed over them once all are ready."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool.errors import BadInputError, GradtoolError, SystemRefusedError, UsageError, from_os_error
from gradtool.store.header import changed_meanwhile, is_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from gradtool.store.header import Shard

_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class _Staged(NamedTuple):
    """A temporary, what it will replace, and the original that must still be there unchanged."""

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
                os.fchmod(fd, self.mode)
                if fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise from_os_error(error, self.target) from error

    def take_place(self) -> None:
        """Rename the temporary to the target; `FileExistsError` if it is to be new and is there."""
        if self.is_new:
            try:
                # Unlike a rename, a link replaces nothing.
                os.link(self.temporary, self.target)
            except OSError as error:
                if error.errno not in (*_UNSUPPORTED, errno.EPERM):
                    raise
                if os.path.lexists(self.target):
                    raise FileExistsError(errno.EEXIST, "File exists") from error
            else:
                # The file is there; that it has a second name for a while cannot make this fail.
                with contextlib.suppress(OSError):
                    self.temporary.unlink()
                return
        self.temporary.replace(self.target)


class Replacement:
    """Every file of one call, built as a temporary sibling of its target.

    Used as a context manager: `stage` each file, fill it, `commit` them all; on leaving, temporaries that were not
    committed are removed. A symbolic link stays a link, and its target is replaced.
    """

    def __init__(self, *, fsync: bool = True) -> None:
        self._fsync = fsync
        self._staged: list[_Staged] = []
        self._renamed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with signals_deferred():
            for staged in self._staged:
                # One that cannot be removed must not keep the others.
                with contextlib.suppress(OSError):
                    staged.temporary.unlink()
        if error is not None and self._renamed == 0:
            error.add_note("no file was changed")
        elif error is not None and not self._staged:
            error.add_note("all files were written before")

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
        real = Path(os.path.realpath(target))
        with signals_deferred():
            try:
                fd, name = tempfile.mkstemp(prefix=".gradtool-", suffix=".tmp", dir=real.parent)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR):
                    raise BadInputError("no such folder", file=real.parent, code="missing-file") from error
                raise from_os_error(error, target) from error
            mode = 0o666 & ~_umask() if original is None else stat.S_IMODE(original.st_mode)
            self._staged.append(_Staged(Path(name), real, original, mode, is_new))
        try:
            os.ftruncate(fd, size)
            for begin, end in [(0, size)] if ranges is None else ranges:
                _reserve(fd, begin, end)
            if original is not None:
                _keep_attributes(fd, real, original)
        except OSError as error:
            raise from_os_error(error, target) from error
        finally:
            os.close(fd)
        return Path(name)

    def commit(self) -> None:
        """Sync every temporary, then rename each over its target. Signals wait until the last rename is done.

        Raises:
            SystemRefusedError: a file was changed by somebody else since it was read, or a sync or a rename failed.
        """
        for staged in self._staged:
            staged.finish(fsync=self._fsync)
        for staged in self._staged:
            if staged.original is not None and not is_unchanged(staged.target, staged.original):
                raise changed_meanwhile(staged.target)
        folders = {staged.target.parent for staged in self._staged}
        with signals_deferred():
            while self._staged:
                staged = self._staged[0]
                try:
                    staged.take_place()
                except FileExistsError as error:
                    raise SystemRefusedError("was made by somebody else in the meantime", file=staged.target) from error
                except OSError as error:
                    raise self._half_done(error, staged.target) from error
                self._staged.pop(0)
                self._renamed += 1
            if self._fsync:
                for folder in folders:
                    _sync_folder(folder)

    def _half_done(self, error: OSError, target: Path) -> GradtoolError:
        refused = from_os_error(error, target)
        if not self._renamed:
            return refused
        left = f"this and {len(self._staged) - 1} more files are as they were, those before it are replaced"
        return SystemRefusedError(f"{refused.problems[0].message}; {left}", file=target)


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


def _reserve(fd: int, begin: int, end: int) -> None:
    if begin == end or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, begin, end - begin)
    except OSError as error:
        # A file system that cannot promise space; it will have to do without.
        if error.errno not in _UNSUPPORTED:
            raise


def _keep_attributes(fd: int, target: Path, original: os.stat_result) -> None:
    ours = os.fstat(fd)
    if (ours.st_uid, ours.st_gid) != (original.st_uid, original.st_gid):
        os.fchown(fd, original.st_uid, original.st_gid)
    if not hasattr(os, "listxattr"):
        return
    for name in _listxattr(target):
        try:
            os.setxattr(fd, name, os.getxattr(target, name))
        except OSError as error:
            # Security labels are the kernel's to give; a new file has got its own.
            if not name.startswith("security.") and error.errno not in _UNSUPPORTED:
                raise


def _listxattr(path: Path) -> list[str]:
    try:
        return os.listxattr(path)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return []
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            reason = f"all files were written, but the folder could not be synced: {error.strerror}"
            raise SystemRefusedError(reason, file=folder) from error


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold back Ctrl-C and its like until the end of the block, and let them act there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        pending.append(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, remember)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for pended in pending:
            signal.raise_signal(pended)
