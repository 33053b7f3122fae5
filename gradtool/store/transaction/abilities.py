"""What the file system of a folder can do, by trying it on files that are removed at once."""

from __future__ import annotations

import contextlib
import errno
import os
import statistics
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from gradtool.store import fs, system
from gradtool.store.system import BLOCK
from gradtool.store.transaction.files import PREFIX, name_of
from gradtool.store.transaction.locks import lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradtool.store.fs import Folder

_SIZE = 1 << 20
_SYNCS = 5
# Where nothing can be written; such as in /proc, where no file can be made, and on a full disk.
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOSPC, errno.EDQUOT)


class Abilities(NamedTuple):
    """What a file system can do; None where nothing can be written, or the system has no call to find out.

    `writable`: two files of 1 MiB may be made, and there is room for them. `holes`: a file may be larger than the space
    that it takes. `reserves`: space can be taken before it is written. `reflinks`: a copy can share the space of its
    original. `hard_links`: a file may have a second name. `locks`: `flock` keeps a second process out. `attributes`:
    extended attributes are copied. `fsync_seconds`: the median time that syncing 4 KiB takes.
    """

    writable: bool
    holes: bool | None = None
    reserves: bool | None = None
    reflinks: bool | None = None
    hard_links: bool | None = None
    locks: bool | None = None
    attributes: bool | None = None
    fsync_seconds: float | None = None


def abilities(folder: Folder) -> Abilities:
    """What the file system of a folder can do; raises `OSError` if it fails at something else."""
    # Named as the files of a run, so that recover removes what a killed call leaves.
    names = [name_of(f"{PREFIX}{os.urandom(6).hex()}", number, "tmp") for number in range(3)]
    try:
        with _files(folder, names[:2]) as (fd, other):
            return Abilities(
                writable=True,
                holes=_has_holes(fd),
                reserves=_reserves(fd),
                reflinks=_reflinks(fd, other),
                hard_links=_links(folder, names[0], names[2]),
                locks=_locks(folder, names[0], fd),
                attributes=_keeps_attributes(fd, other),
                fsync_seconds=_seconds_to_sync(fd),
            )
    except OSError as error:
        if error.errno in _REFUSED:
            return Abilities(writable=False)
        raise


@contextlib.contextmanager
def _files(folder: Folder, names: list[str]) -> Iterator[list[int]]:
    """New files, open."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in names:
            fd = folder.create(name)
            stack.callback(folder.unlink, name)
            stack.callback(os.close, fd)
            made.append(fd)
        yield made


def _space(fd: int) -> int:
    return os.fstat(fd).st_blocks * BLOCK


def _has_holes(fd: int) -> bool:
    fs.resize(fd, _SIZE)
    return _space(fd) < _SIZE


def _reserves(fd: int) -> bool:
    fs.resize(fd, 0)
    fs.reserve(fd, 0, _SIZE)
    return _space(fd) >= _SIZE


def _reflinks(fd: int, other: int) -> bool | None:
    fs.write_all(fd, [bytes(_SIZE)], 0)
    return fs.clone(fd, other)


def _links(folder: Folder, name: str, new: str) -> bool:
    try:
        folder.link(name, new)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EMLINK, *fs.UNSUPPORTED):
            return False
        raise
    folder.unlink(new)
    return True


def _locks(folder: Folder, name: str, fd: int) -> bool:
    with fs.closing(folder.open(name, os.O_RDWR)) as second:
        return lock(fd) is True and lock(second) is False


def _keeps_attributes(fd: int, other: int) -> bool | None:
    if not hasattr(os, "setxattr"):
        return None
    try:
        os.setxattr(fd, "user.gradtool", b"1")
        system.copy_attributes(fd, other)
    except OSError as error:
        if error.errno in fs.UNSUPPORTED or error.errno in _REFUSED:
            return False
        raise
    return "user.gradtool" in os.listxattr(other)


def _seconds_to_sync(fd: int) -> float:
    taken = []
    for number in range(_SYNCS):
        fs.write_all(fd, [bytes([number]) * 4096], 0)
        began = perf_counter()
        fs.sync(fd)
        taken.append(perf_counter() - began)
    return statistics.median(taken)
