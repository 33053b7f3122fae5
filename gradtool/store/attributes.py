"""What a file has beside its content, and a new one takes over from the one that it replaces."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gradtool.store.system import UNSUPPORTED

if TYPE_CHECKING:
    from pathlib import Path


def keep_attributes(fd: int, target: Path, original: os.stat_result) -> None:
    """Give a new file the owner and the extended attributes of the one that it will replace."""
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
            if not name.startswith("security.") and error.errno not in UNSUPPORTED:
                raise


def _listxattr(path: Path) -> list[str]:
    try:
        return os.listxattr(path)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return []
        raise


def umask() -> int:
    """The permissions that a new file does not get."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
