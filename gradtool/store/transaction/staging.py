"""New files before they are in their places: each is built as a temporary sibling of its target."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import SystemRefusedError, changed_meanwhile, os_errors_about
from gradtool.store import fs, system
from gradtool.store.format.header import version_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from gradtool.store.fs import File, Folder

_OWNER_MAY = stat.S_IRUSR | stat.S_IWUSR


class Staged(NamedTuple):
    """A temporary, the name that it will take in its folder, and the status of the file that it replaces."""

    number: int
    temporary: File
    name: str
    target: Path
    original: os.stat_result | None
    mode: int
    # The target must not exist.
    is_new: bool

    @property
    def folder(self) -> Folder:
        """The folder of both."""
        return self.temporary.folder

    def finish(self, *, fsync: bool) -> None:
        """Set the mode, which may forbid even us to write, and sync the content."""
        with os_errors_about(self.target), self.temporary.opened(os.O_RDONLY) as fd:
            fs.change_mode(fd, self.mode)
            if fsync:
                fs.sync(fd)

    def is_unchanged(self) -> bool:
        """Whether the file that it replaces is still the one that was read."""
        now, before = self.folder.status(self.name), self.original
        return before is None or (now is not None and version_of(now) == version_of(before))

    def take_place(self) -> bool:
        """Rename the temporary to the target; `SystemRefusedError` if either is not the expected file.

        Returns whether the temporary is left, as a second name of a target that did not exist.
        """
        with os_errors_about(self.target):
            if not self.temporary.is_there:
                raise changed_meanwhile(self.temporary.path)
            if self.is_new and self._link():
                return True
            try:
                self.folder.rename(self.temporary.name, self.name)
            except OSError:
                if not self._is_target():
                    raise
            return False

    def was_swapped(self) -> bool:
        """Whether another file took the temporary's name at the very instant of the rename."""
        try:
            status = self.folder.status(self.name)
        except OSError:
            return False  # The rename succeeded, and nothing else is known.
        return status is None or not self.temporary.matches(status)

    def _is_target(self) -> bool:
        """Whether a call that failed was done: a server may lose its answer, and fail when it is asked again."""
        status = self.folder.status(self.name)
        return status is not None and self.temporary.matches(status)

    def _link(self) -> bool:
        """Link the target, which replaces nothing, unlike a rename; False on file systems without links."""
        try:
            self.folder.link(self.temporary.name, self.name)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.EPERM, *fs.UNSUPPORTED):
                raise
            if self._is_target():
                return True
            if error.errno == errno.EEXIST or self.folder.status(self.name) is not None:
                message = "another program created it in the meantime; run again"
                raise SystemRefusedError(message, file=self.target) from error
            return False
        return True


def keep_attributes(fd: int, original_fd: int, original: os.stat_result) -> None:
    """Give a new file the owner and the extended attributes of the file that it replaces."""
    ours = os.fstat(fd)
    if (ours.st_uid, ours.st_gid) != (original.st_uid, original.st_gid):
        os.fchown(fd, original.st_uid, original.st_gid)
    system.copy_attributes(original_fd, fd)


def mode_for(original: os.stat_result | None, replaced: os.stat_result | None, mode: int) -> int:
    """The permissions of a new file: those of its original or, without one, no more than the replaced file has.

    Setuid and setgid bits are kept only if the original belongs to this user.
    """
    if original is None:
        return mode if replaced is None else mode & (replaced.st_mode | _OWNER_MAY)
    kept = stat.S_IMODE(original.st_mode)
    return kept if original.st_uid == os.geteuid() else kept & ~(stat.S_ISUID | stat.S_ISGID)


def new_mode(sources: Iterable[os.stat_result]) -> int:
    """The permissions of a file made of others: no user may read it who cannot read all of these."""
    mask = os.umask(0o077)
    os.umask(mask)
    mode = 0o666 & ~mask
    for source in sources:
        mode &= source.st_mode | _OWNER_MAY
    return mode
