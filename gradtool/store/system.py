"""System calls that differ between Linux and macOS, or that one of them lacks.

No other module asks which of them exist, and only `fs` calls those that change the disk. Each use asks anew whether a
call exists, so that tests can hide it.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import resource
import struct

UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
# The unit of `st_blocks`, on every file system.
BLOCK = 512
# A disk writes a sector as a whole or not at all; the system copies whole pages, which are made of sectors.
SECTOR = 512
# A folder that is only searched needs no permission to be listed.
TO_SEARCH: int = getattr(os, "O_PATH", getattr(os, "O_SEARCH", os.O_RDONLY))
# Of macOS's sys/fcntl.h: the command, all or nothing, from the end of what is allocated; and `struct fstore`.
_F_PREALLOCATE, _F_ALLOCATEALL, _F_PEOFPOSMODE = 42, 4, 3
_FSTORE = struct.Struct("Iiqqq")
# Linux keeps the access control list of a file in this attribute.
_ACL = "system.posix_acl_access"
# Of linux/posix_acl_xattr.h: its version takes four bytes; each entry has a tag, rights and an ID. The owner has tag 1.
_ACL_START, _ACL_ENTRY, _ACL_OWNER = 4, struct.Struct("<HHI"), 1
# Of macOS's copyfile.h: access control lists and extended attributes; and of its sys/acl.h: the kind of such a list.
_COPYFILE_ACL, _COPYFILE_XATTR = 1, 4
_ACL_TYPE_EXTENDED = 0x100
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_UUID_BYTES = 64
# In place of no limit.
_MANY = 1 << 16


def reserve(fd: int, begin: int, end: int) -> None:
    """Reserve disk space for a range of a file; on macOS only if there is no hole before it.

    Raises:
        OSError: the disk is full, or the file system cannot do it (`UNSUPPORTED`).
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, begin, end - begin)
    elif hasattr(fcntl, "F_FULLFSYNC"):
        status = os.fstat(fd)
        allocated = status.st_blocks * BLOCK
        if begin <= max(status.st_size, allocated) < end:
            # Which does not change the size of the file.
            fstore = _FSTORE.pack(_F_ALLOCATEALL, _F_PEOFPOSMODE, 0, end - allocated, 0)
            fcntl.fcntl(fd, _F_PREALLOCATE, fstore)


def sync(fd: int) -> None:
    """Sync a file or a folder to the disk itself; macOS's fsync leaves it in the cache of the disk."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(fd, full)
        except OSError as error:
            # Network file systems, and some folders.
            if error.errno not in (*UNSUPPORTED, errno.ENOTTY):
                raise
        else:
            return
    os.fsync(fd)


def copy_attributes(fd: int, to: int) -> None:
    """Copy the extended attributes of a file, where there are any, and its access control list.

    Raises:
        OSError: an attribute cannot be copied. Security labels are left out: the kernel gives a new file its own.
    """
    if hasattr(os, "listxattr"):
        names = _attributes(fd)
        # A list that is inherited from the folder would let in users whom the original keeps out.
        remove_acl(to)
        for name in set(_attributes(to)).difference(names):
            # The original may have lost it since it was copied.
            if name.startswith("user."):
                os.removexattr(to, name)
        for name in names:
            try:
                os.setxattr(to, name, os.getxattr(fd, name))
            except OSError as error:
                if not name.startswith("security.") and error.errno not in UNSUPPORTED:
                    raise
        return
    import posix

    # What shutil copies files with, which is all that Python has for it.
    copy = getattr(posix, "_fcopyfile", None)
    if copy is not None:
        try:
            copy(fd, to, _COPYFILE_ACL | _COPYFILE_XATTR)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise


def acl_rights(fd: int) -> int | None:
    """Return what the access control list of a file lets all users but its owner do; None if it has no list.

    Rights are bits, as in a mode. A list of macOS, which can also deny rights, counts as giving none.
    """
    if not hasattr(os, "getxattr"):
        return 0 if _macos_acl(fd) else None
    try:
        entries = os.getxattr(fd, _ACL)[_ACL_START:]
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.ENODATA):
            raise
        return None
    rights = 0o7
    for tag, allowed, _ in _ACL_ENTRY.iter_unpack(entries):
        if tag != _ACL_OWNER:
            rights &= allowed
    return rights


def remove_acl(fd: int) -> None:
    """Remove the access control list of a file, if it has one."""
    if not hasattr(os, "removexattr"):
        _macos_acl(fd, remove=True)
        return
    try:
        os.removexattr(fd, _ACL)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.ENODATA):
            raise


def _macos_acl(fd: int, *, remove: bool = False) -> bool:
    """Check whether a file has an access control list of macOS; if so, remove it where that is wanted."""
    from ctypes import CDLL, byref, c_void_p

    libc = CDLL(None)
    if not hasattr(libc, "acl_get_fd_np"):
        return False
    libc.acl_get_fd_np.restype = libc.acl_init.restype = c_void_p
    lists = acl, empty = c_void_p(libc.acl_get_fd_np(fd, _ACL_TYPE_EXTENDED)), c_void_p(libc.acl_init(0))
    try:
        has_entries = bool(acl) and libc.acl_get_entry(acl, 0, byref(c_void_p())) == 0
        if remove and has_entries and libc.acl_set_fd_np(fd, empty, _ACL_TYPE_EXTENDED) != 0:
            raise PermissionError(errno.EPERM, "the access control list of a new file could not be removed")
        return has_entries
    finally:
        for pointer in filter(None, lists):
            libc.acl_free(pointer)


def _attributes(fd: int) -> list[str]:
    try:
        return os.listxattr(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return []


def read_link(path: str, within: int | None = None) -> tuple[os.stat_result, str]:
    """Return the status of a symbolic link and where it leads: both of the same link, even if it is being replaced.

    Raises:
        OSError: it is no link, or was replaced meanwhile.
    """
    path_only: int = getattr(os, "O_PATH", 0)
    if path_only:
        fd = os.open(path, path_only | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
        try:
            return os.fstat(fd), os.readlink("", dir_fd=fd)
        finally:
            os.close(fd)
    before = os.stat(path, dir_fd=within, follow_symlinks=False)
    target = os.readlink(path, dir_fd=within)
    after = os.stat(path, dir_fd=within, follow_symlinks=False)
    if (before.st_ino, before.st_ctime_ns) != (after.st_ino, after.st_ctime_ns):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return before, target


def read_in_order(fd: int) -> None:
    """Tell the system that a file will be read from its beginning to its end; macOS finds out by itself."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def descriptors_left() -> int:
    """Estimate how many more files this process may open; a few are reserved for libraries."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MANY
    try:
        used = len(os.listdir("/dev/fd"))  # noqa: PTH208 - names, of descriptors
    except OSError:
        used = 16
    return limit - used - 4


@functools.cache
def boot_id() -> str:
    """Return an ID of the machine's current boot; an empty text if it has none."""
    try:
        with open(_BOOT_ID, "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            return file.read().decode().strip()
    except OSError:
        return _boot_session()


def _boot_session() -> str:
    # On macOS.
    import ctypes

    value, size = ctypes.create_string_buffer(_UUID_BYTES), ctypes.c_size_t(_UUID_BYTES)
    try:
        failed = ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", value, ctypes.byref(size), None, 0)
    except (OSError, AttributeError):
        return ""
    return "" if failed else value.value.decode(errors="replace")
