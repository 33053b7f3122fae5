"""What a file has beside its content, and a new one takes over from the one that it replaces."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from gradtool.store.fs import UNSUPPORTED

if TYPE_CHECKING:
    from collections.abc import Iterable

_ALL = 0o777
_OWNER_MAY = stat.S_IRUSR | stat.S_IWUSR


def keep_attributes(fd: int, original_fd: int, original: os.stat_result) -> None:
    """Give a new file the owner and the extended attributes of the one that it will replace."""
    ours = os.fstat(fd)
    if (ours.st_uid, ours.st_gid) != (original.st_uid, original.st_gid):
        os.fchown(fd, original.st_uid, original.st_gid)
    if not hasattr(os, "listxattr"):
        return
    for name in _listxattr(original_fd):
        try:
            os.setxattr(fd, name, os.getxattr(original_fd, name))
        except OSError as error:
            # Security labels are the kernel's to give; a new file has got its own.
            if not name.startswith("security.") and error.errno not in UNSUPPORTED:
                raise


def kept_mode(original: os.stat_result) -> int:
    """The permissions of a file that is replaced, without those to act as another user."""
    mode = stat.S_IMODE(original.st_mode)
    return mode if original.st_uid == os.geteuid() else mode & ~(stat.S_ISUID | stat.S_ISGID)


def new_mode(sources: Iterable[os.stat_result]) -> int:
    """The permissions of a new file: nobody may read it who may not read all that it is made of."""
    mode = _ALL & ~stat.S_IXUSR & ~stat.S_IXGRP & ~stat.S_IXOTH & ~_umask()
    for source in sources:
        mode &= source.st_mode | _OWNER_MAY
    return mode


def _listxattr(fd: int) -> list[str]:
    try:
        return os.listxattr(fd)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return []
        raise


def _umask() -> int:
    """The permissions that a new file does not get."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
