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
from typing import TYPE_CHECKING, Any, Self

from gradtool.errors import GradtoolError, SystemRefusedError, UsageError, from_os_error
from gradtool.store.header import Shard, is_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType


class Replacement:
    """Every file of one call, built as a temporary sibling of its target.

    Used as a context manager: `stage` each file, fill it, `commit` them all; on leaving, temporaries that were not
    committed are removed. A symbolic link stays a link, and its target is replaced.
    """

    def __init__(self, *, fsync: bool = True) -> None:
        self._fsync = fsync
        # Temporary, target, and the original that must still be there unchanged.
        self._staged: list[tuple[Path, Path, Shard | None]] = []
        self._committed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for temporary, _, _ in self._staged:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        if error is not None and not self._committed:
            error.add_note("no file was changed")

    def stage(self, target: Path, size: int, original: Shard | None = None) -> Path:
        """Make a temporary of `size` bytes, its space reserved, that will become `target`; give its path.

        With `original`, the file that is replaced, its mode, owner and extended attributes are kept.

        Raises:
            SystemRefusedError: no permission, no space, or an attribute that cannot be kept.
        """
        real = Path(os.path.realpath(target))
        try:
            fd, name = tempfile.mkstemp(prefix=f".{real.name[:64]}.gradtool-", suffix=".tmp", dir=real.parent)
        except OSError as error:
            raise from_os_error(error, real.parent if error.errno in (errno.ENOENT, errno.ENOTDIR) else real) from error
        self._staged.append((Path(name), real, original))
        try:
            _reserve(fd, size)
            if original is None:
                os.fchmod(fd, 0o666 & ~_umask())
            else:
                _keep_attributes(fd, real, original.stat)
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
        if self._fsync:
            for temporary, target, _ in self._staged:
                _sync(temporary, target)
        for _, target, original in self._staged:
            if original is not None and not is_unchanged(target, original.stat):
                raise SystemRefusedError("was changed by somebody else in the meantime; run again", file=target)
        folders = {target.parent for _, target, _ in self._staged}
        with _signals_deferred():
            while self._staged:
                temporary, target, _ = self._staged[0]
                try:
                    temporary.replace(target)
                except OSError as error:
                    raise self._half_done(error, target) from error
                self._staged.pop(0)
                self._committed = True
        if self._fsync:
            for folder in folders:
                _sync(folder, folder)

    def _half_done(self, error: OSError, target: Path) -> GradtoolError:
        refused = from_os_error(error, target)
        if not self._committed:
            return refused
        left = f"this and {len(self._staged) - 1} more files are as they were, those before it are replaced"
        return SystemRefusedError(f"{refused.problems[0].message}; {left}", file=target)


def refuse_collisions(targets: Sequence[Path], shards: Sequence[Shard]) -> None:
    """Raise `UsageError` when two files would be written to one path, or one over an input that is to be left alone."""
    inputs = {shard.identity for shard in shards}
    seen: set[Path] = set()
    for target in targets:
        if target in seen:
            raise UsageError(f"two inputs would be written to {target}; use one --output-dir for each")
        seen.add(target)
        with contextlib.suppress(OSError):
            status = target.stat()
            if (status.st_dev, status.st_ino) in inputs:
                raise UsageError(f"{target} is an input; leave out the output option to replace it")


def _reserve(fd: int, size: int) -> None:
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)


def _keep_attributes(fd: int, target: Path, original: os.stat_result) -> None:
    ours = os.fstat(fd)
    if (ours.st_uid, ours.st_gid) != (original.st_uid, original.st_gid):
        os.fchown(fd, original.st_uid, original.st_gid)
    # After the owner, whose change clears the set-user-ID bit.
    os.fchmod(fd, stat.S_IMODE(original.st_mode))
    if not hasattr(os, "listxattr"):
        return
    for name in _listxattr(target):
        try:
            os.setxattr(fd, name, os.getxattr(target, name))
        except OSError as error:
            # Security labels are the kernel's to give; a new file has got its own.
            if not name.startswith("security.") and error.errno != errno.ENOTSUP:
                raise


def _listxattr(path: Path) -> list[str]:
    try:
        return os.listxattr(path)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return []
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync(path: Path, target: Path) -> None:
    """Bring a file, or a folder's entries, to the disk; `target` is what an error is about."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, target) from error


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Hold back Ctrl-C and its like: a set of files is to be all old or all new."""
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
