"""New files before they are in their places: each is built as a temporary sibling of its target."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import SystemRefusedError, changed_meanwhile, os_errors_about
from gradtool.store import fs, system
from gradtool.store.fs import File
from gradtool.store.source import is_same, links_and_rights
from gradtool.store.transaction.log import Move

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gradtool.store.fs import Folder

    # A file whose content goes into new files, and its status when it was read, if that is known.
    Source = tuple[Path, os.stat_result | None]

# A file whose attributes change that often while they are copied is being changed all the time.
_TRIES = 20
_OWNER_MAY = stat.S_IRUSR | stat.S_IWUSR


class Rights(NamedTuple):
    """The group of a file and its mode; without a group, the mode is that of all users, or unknown (0)."""

    group: int | None = None
    mode: int = 0


@dataclass
class Staged:
    """A temporary, the name that it will take in its folder, and the status of the file that it replaces.

    That is the status when the file was read and then, if it still has its content, when its attributes were copied.
    """

    number: int
    temporary: File
    name: str
    target: Path
    original: os.stat_result | None
    # The target must not exist.
    is_new: bool
    # When the replaced file was last changed before its attributes were copied; 0 if there was none.
    _copied_ns: int = -1
    # The newest status of the target.
    _status: os.stat_result | None = None

    def move(self, folder: int) -> Move:
        """Return what the log says of the rename, in the folder of that number, when all is ready."""
        now = self._status
        version = (None,) * 4 if now is None else (now.st_size, now.st_mtime_ns, now.st_ctime_ns, attributes_of(now))
        return Move(folder, self.number, self.name, self.temporary.inode, *version)

    def finish(self, sources: Sequence[Rights], *, fsync: bool) -> None:
        """Copy the attributes that the replaced file has now, if that was not done, and sync the content.

        A file that replaces none, or replaces it with other content, gets a mode that follows from its sources.

        Raises:
            SystemRefusedError: that file was written to or replaced since it was read, or does not keep its attributes;
                or it exists though the target is new.
        """
        with os_errors_about(self.target):
            for _ in range(_TRIES):
                now = self.temporary.folder.status(self.name)
                if self.original is not None and (now is None or not is_same(now, self.original)):
                    break
                if self.is_new and now is not None:
                    raise self._created()
                changed = 0 if now is None else now.st_ctime_ns
                if changed == self._copied_ns:
                    self._status = now
                    return
                self._copy_attributes(now, sources, fsync=fsync)
                self._copied_ns = changed
        raise changed_meanwhile(self.target)

    def _copy_attributes(self, now: os.stat_result | None, sources: Sequence[Rights], *, fsync: bool) -> None:
        with fs.closing(self.temporary.open(os.O_RDONLY)) as fd:
            if self.original is not None and now is not None:
                self.original = now
                copy_attributes(fd, self.temporary.folder, self.name, now)
                mode = stat.S_IMODE(now.st_mode)
                if now.st_uid != os.geteuid():
                    mode &= ~(stat.S_ISUID | stat.S_ISGID)
            else:
                # It may have got an access control list since it was made.
                fs.remove_acl(fd)
                if now is not None:
                    sources = [*sources, rights_of(self.name, within=self.temporary.folder.fd)]
                mode = new_mode(os.fstat(fd).st_gid, sources)
            # Last, because it may forbid even us to write.
            fs.change_mode(fd, mode)
            if fsync:
                fs.sync(fd)

    def require_replaceable(self) -> None:
        """Raise `SystemRefusedError` now where the rename would be refused, as far as that can be known before.

        That is so for a file that cannot be changed (`chattr +i`) and, in a sticky folder, for another user's file.
        """
        with os_errors_about(self.target):
            now = self.temporary.folder.status(self.name)
            if now is None:
                return
            is_sticky = bool(self.temporary.folder.mode & stat.S_ISVTX)
            if is_sticky and os.geteuid() not in (0, now.st_uid, self.temporary.folder.owner):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            try:
                os.close(self.temporary.folder.open(self.name, os.O_WRONLY))
            except OSError as error:
                # A file that just may not be written to can be replaced.
                if error.errno == errno.EPERM:
                    raise

    def take_place(self, sources: Sequence[Rights], *, fsync: bool) -> None:
        """Rename the temporary to the target; raise `SystemRefusedError` if either is not the expected file.

        It stays as a second name of a target that must not exist: recovery needs each file under one of its names.
        """
        self.finish(sources, fsync=fsync)
        with os_errors_about(self.target):
            if not self.temporary.is_there:
                raise changed_meanwhile(self.temporary.path)
            if self.is_new and self._link():
                return
            try:
                self.temporary.folder.rename(self.temporary.name, self.name)
            except OSError:
                # A server may lose its answer, and fail when it is asked again.
                if not self.is_in_place:
                    raise

    @property
    def is_in_place(self) -> bool:
        """Whether the target is the file that was the temporary."""
        return self.temporary._replace(name=self.name).is_there

    def _link(self) -> bool:
        """Link the target, which replaces nothing, unlike a rename; return False on file systems without links."""
        try:
            self.temporary.folder.link(self.temporary.name, self.name)
        except OSError as error:
            if self.is_in_place:
                return True
            if error.errno not in (errno.EEXIST, errno.EPERM, *system.UNSUPPORTED):
                raise
            if error.errno == errno.EEXIST or self.temporary.folder.status(self.name) is not None:
                raise self._created() from error
            return False
        return True

    def _created(self) -> SystemRefusedError:
        message = "another program created it in the meantime"
        return SystemRefusedError(message, file=self.target, hint="run the command again")


def is_new(folder: Folder, move: Move) -> bool:
    """Check whether the target of a rename is the file that was its temporary."""
    status = folder.status(move.name)
    return status is not None and status.st_ino == move.inode


def is_replaceable(now: os.stat_result, move: Move) -> bool:
    """Check whether a target is still what it was when the run was ready, as `is_same` does."""
    if (now.st_size, now.st_mtime_ns) != (move.size, move.mtime_ns):
        return False
    return now.st_ctime_ns == move.ctime_ns or attributes_of(now) != move.attributes


def attributes_of(status: os.stat_result) -> int:
    """Return what explains that an inode has changed though its content has not, as a number."""
    return zlib.crc32(repr(links_and_rights(status)).encode())


def copy_attributes(fd: int, folder: Folder, name: str, original: os.stat_result) -> None:
    """Give a new file the owner and the extended attributes of the file that it replaces."""
    with fs.closing(File(folder, name, original.st_dev, original.st_ino).open(os.O_RDONLY)) as original_fd:
        # Until it has all of them, no other user may open it.
        fs.change_mode(fd, _OWNER_MAY)
        new = os.fstat(fd)
        if (new.st_uid, new.st_gid) != (original.st_uid, original.st_gid):
            fs.change_owner(fd, original.st_uid, original.st_gid)
        fs.copy_attributes(original_fd, fd)


def rights_of(path: Path | str, before: os.stat_result | None = None, within: int | None = None) -> Rights:
    """Read the rights of a file; none if it cannot be opened, or is not the file that was read."""
    try:
        with fs.closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=within)) as fd:
            status, acl = os.fstat(fd), system.acl_rights(fd)
    except OSError:
        return Rights()
    if before is not None and not os.path.samestat(before, status):
        return Rights()
    return Rights(status.st_gid, status.st_mode) if acl is None else Rights(mode=acl * 0o11)


def new_mode(group: int, sources: Sequence[Rights]) -> int:
    """Compute the permissions of a new file of a group: those that all sources give.

    A member of the group of a source may be no member of the group of the new file, and vice versa. Where these groups
    differ, members and all other users get the permissions that both have.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    mode = 0o666 & ~mask
    for source in sources or [Rights()]:
        classes = source.mode if source.group == group else (source.mode & source.mode >> 3 & 0o7) * 0o11
        mode &= classes | _OWNER_MAY
    return mode
