"""Files that are changed in place: what changes is built in a redo log, and copied into them once all is ready."""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import SystemRefusedError, changed_meanwhile, ensure, os_errors_about
from gradtool.store import fs, signals
from gradtool.store.io.redolog import OVERHEAD, RedoLog
from gradtool.store.source import is_same
from gradtool.store.system import BLOCK
from gradtool.store.transaction.log import Change, Redo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.store.fs import File
    from gradtool.store.transaction.transaction import Transaction


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
        with os_errors_about(transaction.home.path / name):
            fd, file = transaction.home.create_file(name)
            with fs.closing(fd):
                fs.reserve(fd, 0, nbytes)
        self.log = RedoLog(file)

    def finish(self) -> tuple[list[Change], Redo]:
        """Sync the redo log, and return what the transaction log says of it."""
        with os_errors_about(self.log.file.path), self.log.file.opened(os.O_RDONLY) as fd:
            if self._transaction.fsync:
                fs.sync(fd)
        folders = self._transaction.targets.folders
        changes = []
        for target in self._targets:
            _require_writable(target, fsync=False)
            file = target.file
            changes.append(Change(folders.index(file.folder), file.name, target.stat.st_size, file.inode))
        limits = {number: (target.nbytes, target.stat.st_size) for number, target in enumerate(self._targets)}
        for number, (nbytes, end) in self.log.added.items():
            most, size = limits.get(number, (0, 0))
            ensure(nbytes <= most and end <= size, f"the redo log has too much for file {number}")
        return changes, Redo(self._number, self.log.file.inode, self.log.size)

    def apply(self) -> None:
        """Copy the redo log into the targets, and sync them."""
        self.log.apply([target.file for target in self._targets])
        for file, before, _ in self._targets:
            with os_errors_about(file.path), file.opened(os.O_RDONLY) as fd:
                if self._transaction.fsync:
                    fs.sync(fd)
                if os.fstat(fd).st_size != before.st_size:
                    raise changed_meanwhile(file.path)

    def _require_disk_space(self) -> int:
        """Raise an error now if the disk would be full later; return the bytes that the redo log will have, about."""
        home = self._transaction.home
        folders = {home.identity[0]: home}
        needed: dict[int, int] = defaultdict(int)
        nbytes = needed[home.identity[0]] = int(sum(target.nbytes for target in self._targets) * OVERHEAD)
        for file, stat, changes in self._targets:
            folders.setdefault(file.device, file.folder)
            needed[file.device] += min(changes, max(0, stat.st_size - stat.st_blocks * BLOCK))
        for device, room in needed.items():
            with os_errors_about(folders[device].path):
                disk = os.statvfs(folders[device].fd)
            free = disk.f_bavail * disk.f_frsize
            if room > free:
                what = f"writing in place needs {room:,} bytes here for a redo log and filled holes, {free:,} are free"
                raise SystemRefusedError(what, file=folders[device].path, hint="free some space")
        return nbytes


def _require_writable(target: Target, *, fsync: bool) -> None:
    """Raise `SystemRefusedError` now for what could not be written later, while nothing is changed."""
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
