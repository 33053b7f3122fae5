"""Makes Linux as macOS is where gradtool meets the system: PYTHONPATH=tests/macos hides what macOS lacks.

What macOS has instead is made of what Linux has, and counted in the file that GRADTOOL_TEST_CALLS names, if any; with
GRADTOOL_TEST_FULL, the disk is full. Python runs this file when it starts, so all processes of a test run are changed.
"""

import builtins
import ctypes
import errno
import fcntl
import io
import os
import posix
import struct

_LACKED = (
    "posix_fallocate", "posix_fadvise", "memfd_create", "MFD_CLOEXEC", "sched_getaffinity", "sched_setaffinity",
    "getxattr", "listxattr", "setxattr", "removexattr", "O_PATH", "O_TMPFILE", "copy_file_range", "splice", "fdatasync",
)  # fmt: skip
_REAL = {name: getattr(os, name, None) for name in ("open", "fsync", "listxattr", "getxattr", "setxattr")}
_FULLFSYNC, _PREALLOCATE = 51, 42
_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)
_real_fcntl, _real_open = fcntl.fcntl, io.open


def _note(call):
    if "GRADTOOL_TEST_CALLS" in os.environ:
        fd = _REAL["open"](os.environ["GRADTOOL_TEST_CALLS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(fd, f"{call}\n".encode())
        os.close(fd)


def _fcntl(fd, command, argument=0):
    if command == _FULLFSYNC:
        _note("F_FULLFSYNC")
        _REAL["fsync"](fd)
        return 0
    if command == _PREALLOCATE:
        _note("F_PREALLOCATE")
        flags, mode, offset, length, _ = struct.unpack("Iiqqq", argument)
        assert (flags, mode, offset) == (4, 3, 0)
        if "GRADTOOL_TEST_FULL" in os.environ:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        begin = os.fstat(fd).st_blocks * 512
        if _libc.fallocate(fd, _KEEP_SIZE, ctypes.c_long(begin), ctypes.c_long(length)):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return argument
    return _real_fcntl(fd, command, argument)


def _fcopyfile(fd, to, flags):
    if flags == posix._COPYFILE_DATA:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    _note("fcopyfile")
    assert flags == 5
    for name in _REAL["listxattr"](fd):
        _REAL["setxattr"](to, name, _REAL["getxattr"](fd, name))


def _refuse_proc(path):
    if isinstance(path, (str, bytes, os.PathLike)) and os.fsdecode(path).startswith("/proc/"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))


def _open(path, *arguments, **options):
    _refuse_proc(path)
    return _real_open(path, *arguments, **options)


def _os_open(path, *arguments, **options):
    _refuse_proc(path)
    return _REAL["open"](path, *arguments, **options)


for name in _LACKED:
    if hasattr(os, name):
        delattr(os, name)
    if hasattr(posix, name):
        delattr(posix, name)
fcntl.F_FULLFSYNC = _FULLFSYNC
fcntl.fcntl = _fcntl
posix._fcopyfile, posix._COPYFILE_DATA = _fcopyfile, 8
builtins.open = io.open = _open
os.open = _os_open
# What os says of a function, it says of the one in its place.
for known in (os.supports_dir_fd, os.supports_fd):
    if _REAL["open"] in known:
        known.add(_os_open)
