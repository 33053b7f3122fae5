"""The system calls of simulated processes: what `os` and `fcntl` offer, on a `Disk`.

While a process of a `Kernel` runs, `os.open` and its like are its own. Paths below /proc and /dev, and descriptors that
the kernel did not hand out, are the real system's.
"""

import contextlib
import errno
import fcntl
import io
import os
import stat
import threading
from typing import NamedTuple

from disk import MAX_LINKS, ROOT, Disk, is_too_long, may

_FIRST_FD = 1 << 24
_REAL = ("/proc/", "/dev/", "/sys/")
_ABOUT_PROCESSES = ("geteuid", "getpid", "getcwd", "umask", "kill", "urandom")
_READ, _WRITE = 4, 2
_O_PATH = getattr(os, "O_PATH", 0)
_PATH_MAX = 4096
_NO_DATA = getattr(errno, "ENODATA", errno.ENOENT)
# What a path may end in that is no name.
_DOTS = (".", "..", "/")
_SET_ID = stat.S_ISUID | stat.S_ISGID


class OpenFile:
    """What a descriptor stands for."""

    __slots__ = ("flags", "inode", "path", "process")

    def __init__(self, inode, flags, process, path):
        self.inode, self.flags, self.process, self.path = inode, flags, process, path


class Process:
    """Who makes calls: its user, ID and host; and what is its own, such as its handlers of signals."""

    def __init__(self, user=ROOT, pid=1, host="here"):
        self.user, self.pid, self.host = user, pid, host
        self.is_dead = False
        self.umask = user.umask


class Entry(NamedTuple):
    """What `os.scandir` yields."""

    name: str
    path: str
    inode: object
    dir_fd: int | None

    def is_symlink(self):
        return self.inode.is_link

    def is_dir(self, *, follow_symlinks=True):
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks=True):
        return stat.S_ISREG(self._mode(follow_symlinks))

    def stat(self, *, follow_symlinks=True):
        return os.stat(self.path, dir_fd=self.dir_fd, follow_symlinks=follow_symlinks)

    def _mode(self, follow):
        # A folder tells the kind of what is in it.
        if not (follow and self.inode.is_link):
            return self.inode.mode
        try:
            return self.stat().st_mode
        except FileNotFoundError:
            return 0

    def __fspath__(self):
        return self.path


class Kernel:
    """The calls of whichever process is `current`; each begins with `enter`, where a world may strike."""

    # Names in `os` that systems lack; and what they do not support, by call.
    hidden: tuple[str, ...] = ()
    unsupported: frozenset[str] = frozenset()

    def __init__(self, disk=None):
        self.disk = disk or Disk()
        self.current = None
        self.files = {}
        self._next_fd = _FIRST_FD
        self._thread = threading.get_ident()

    def enter(self, _call, *_detail):
        """Note a call; a subclass may raise here, or return how the call is to fail halfway."""

    def overwrites(self, _inode, _data=None):
        """Note that a file is about to be replaced, or written to."""

    @contextlib.contextmanager
    def installed(self):
        """Let `os` and `fcntl` make the calls of the current process, for the length of a block."""
        calls = {name.removeprefix("os_"): getattr(self, name) for name in dir(self) if name.startswith("os_")}
        before = {name: getattr(os, name) for name in {*calls, *self.hidden} if hasattr(os, name)}
        flock, control = fcntl.flock, fcntl.fcntl
        try:
            for name, call in calls.items():
                if name in before and name not in self.hidden:
                    setattr(os, name, self._routed(before[name], call, always=name in _ABOUT_PROCESSES))
            for name in self.hidden:
                if name in before:
                    delattr(os, name)
            fcntl.flock, fcntl.fcntl = self._routed(flock, self.flock), self._routed(control, self.control)
            yield
        finally:
            for name, call in before.items():
                setattr(os, name, call)
            fcntl.flock, fcntl.fcntl = flock, control

    def _routed(self, real, call, *, always=False):
        def routed(*args, **named):
            # Other threads are the test runner's.
            if self.current is None or threading.get_ident() != self._thread or not (always or _is_ours(args, named)):
                return real(*args, **named)
            return call(*args, **named)

        return routed

    def close_all(self, process):
        """Close what a process that has ended had open."""
        for fd in [fd for fd, file in self.files.items() if file.process is process]:
            self._close(fd)

    # Of processes.

    def os_geteuid(self):
        return self.current.user.uid

    def os_getpid(self):
        return self.current.pid

    def os_getcwd(self):
        return "/"

    def os_umask(self, mask):
        before, self.current.umask = self.current.umask, mask
        return before

    # Of paths.

    def os_open(self, path, flags, mode=0o777, *, dir_fd=None):
        self.enter("create" if flags & os.O_CREAT else "open", dir_fd, path)
        if flags & _O_PATH:
            flags &= _O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
        if flags & os.O_CREAT:
            inode, is_new = self._created(path, dir_fd, flags, mode)
        else:
            inode, is_new = self._there(path, dir_fd, follow=not flags & os.O_NOFOLLOW), False
        if flags & os.O_DIRECTORY and not inode.is_folder:
            raise self._error(errno.ENOTDIR, path)
        if not (is_new or flags & _O_PATH):
            self._open(inode, flags, path)
        self._next_fd += 1
        self.files[self._next_fd] = OpenFile(inode, flags, self.current, path)
        return self._next_fd

    def _created(self, path, dir_fd, flags, mode):
        """The inode that is made, unless it is there, and whether it is new."""
        at, text = self._start(path, dir_fd)
        user, follows = self.current.user, not flags & (os.O_EXCL | os.O_NOFOLLOW)
        for _ in range(MAX_LINKS + 1):
            folder, name, inode, has_slash = self._told(path, self.disk.place, user, at, text)
            if has_slash and name not in _DOTS:
                raise self._error(errno.EISDIR, path)
            if inode is None:
                if folder.mode & stat.S_ISGID and mode & stat.S_IXGRP and user.uid and user.gid != folder.gid:
                    mode &= ~stat.S_ISGID
                mode = stat.S_IFREG | mode & 0o7777 & ~self.current.umask
                return self._told(path, self.disk.create, user, folder, name, mode), True
            if not (follows and inode.is_link):
                break
            self._told(path, self.disk.require_followable, user, folder, inode)
            at, text = folder, inode.target
        else:
            raise self._error(errno.ELOOP, path)
        if flags & os.O_EXCL or inode.is_folder:
            raise self._error(errno.EEXIST if flags & os.O_EXCL else errno.EISDIR, path)
        self._told(path, self.disk.require_creatable, user, folder, inode)
        return inode, False

    def _open(self, inode, flags, path):
        """Check that the user may open what is there, and empty it where that is asked for."""
        if inode.is_link:
            raise self._error(errno.ELOOP, path)
        access = flags & os.O_ACCMODE
        rights = {os.O_RDONLY: _READ, os.O_WRONLY: _WRITE}.get(access, _READ | _WRITE)
        if flags & os.O_TRUNC:
            rights |= _WRITE
        if inode.is_folder and rights & _WRITE:
            raise self._error(errno.EISDIR, path)
        if not may(self.current.user, inode, rights):
            raise self._error(errno.EACCES, path)
        if flags & os.O_TRUNC:
            self.disk.truncate(inode, 0)
            self._drop_privileges(inode)

    def os_stat(self, path, *, dir_fd=None, follow_symlinks=True):
        self.enter("stat", dir_fd, path)
        inode = self._inode(path) if isinstance(path, int) else self._there(path, dir_fd, follow=follow_symlinks)
        return self.disk.status(inode)

    def os_lstat(self, path, *, dir_fd=None):
        return self.os_stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def os_fstat(self, fd):
        return self.os_stat(fd)

    def os_statvfs(self, path):
        self.enter("statvfs", None, path)
        blocks, free = self.disk.size >> 12, self.disk.free >> 12
        return os.statvfs_result((4096, 4096, blocks, free, free, 1 << 20, 1 << 20, 1 << 20, 0, 255))

    def os_access(self, path, mode, **_):
        self.enter("access", None, path)
        try:
            return may(self.current.user, self._there(path, None), mode)
        except OSError:
            return False

    def os_readlink(self, path, *, dir_fd=None):
        self.enter("readlink", dir_fd, path)
        # An empty path stands for the descriptor itself.
        inode = self._inode(dir_fd) if path == "" and dir_fd is not None else self._there(path, dir_fd, follow=False)
        if not inode.is_link:
            raise self._error(errno.EINVAL if path else errno.ENOENT, path)
        return inode.target

    def os_listdir(self, path):
        self.enter("listdir", None, path)
        return list(self._listed(path).entries)

    def os_scandir(self, path):
        self.enter("listdir", None, path)
        dir_fd, at = (path, "") if isinstance(path, int) else (None, os.fspath(path))
        inodes, entries = self.disk.inodes, self._listed(path).entries.items()
        return _Scan(Entry(name, os.path.join(at, name), inodes[number], dir_fd) for name, number in entries)

    def os_mkdir(self, path, mode=0o777, *, dir_fd=None):
        self.enter("mkdir", dir_fd, path)
        folder, name = self._new_place(path, dir_fd, is_folder=True)
        mode = stat.S_IFDIR | mode & 0o1777 & ~self.current.umask
        self._told(path, self.disk.create, self.current.user, folder, name, mode)

    def os_symlink(self, target, path, *, dir_fd=None):
        self.enter("symlink", dir_fd, path)
        target = os.fspath(target)
        self._require_short(target, target)
        if not target:
            raise self._error(errno.ENOENT, target)
        folder, name = self._new_place(path, dir_fd)
        self._told(path, self.disk.create, self.current.user, folder, name, stat.S_IFLNK | 0o777, target)

    def os_link(self, path, new, *, src_dir_fd=None, dst_dir_fd=None, follow_symlinks=True):
        self.enter("link", dst_dir_fd, new)
        self._require_supported("link")
        inode = self._there(path, src_dir_fd, follow=follow_symlinks)
        folder, name = self._new_place(new, dst_dir_fd)
        self._told(new, self.disk.link, self.current.user, folder, name, inode)

    def os_replace(self, path, new, *, src_dir_fd=None, dst_dir_fd=None):
        self.enter("rename", dst_dir_fd, new, path)
        folder, old, inode, has_slash = self._place(path, src_dir_fd)
        other, name, there, will_have_slash = self._place(new, dst_dir_fd)
        if old in _DOTS or name in _DOTS:
            raise self._error(errno.EBUSY, path)
        if inode is None:
            raise self._missing(folder, old, path)
        if there is None and (not other.nlink or is_too_long(name)):
            raise self._missing(other, name, new)
        if (has_slash or will_have_slash) and not inode.is_folder:
            raise self._error(errno.ENOTDIR, path)
        if there is not None:
            self.overwrites(there)
        self._told(path, self.disk.rename, self.current.user, folder, old, other, name)

    os_rename = os_replace

    def os_unlink(self, path, *, dir_fd=None):
        self.enter("unlink", dir_fd, path)
        folder, name, inode, has_slash = self._place(path, dir_fd)
        if name in _DOTS:
            raise self._error(errno.EISDIR, path)
        if inode is None:
            raise self._missing(folder, name, path)
        if has_slash:
            raise self._error(errno.EISDIR if inode.is_folder else errno.ENOTDIR, path)
        self._told(path, self.disk.unlink, self.current.user, folder, name)

    os_remove = os_unlink

    def os_rmdir(self, path, *, dir_fd=None):
        self.enter("rmdir", dir_fd, path)
        folder, name, inode, _ = self._place(path, dir_fd)
        if name in _DOTS:
            raise self._error({".": errno.EINVAL, "..": errno.ENOTEMPTY, "/": errno.EBUSY}[name], path)
        if inode is None:
            raise self._missing(folder, name, path)
        self._told(path, self.disk.rmdir, self.current.user, folder, name)

    def os_utime(self, path, *, ns):
        self.enter("utime", None, path)
        self.disk.set_mtime(self._owned(path), ns[1])

    # Of descriptors.

    def os_close(self, fd):
        self._file(fd)
        self._close(fd)

    def os_pread(self, fd, count, begin):
        self.enter("read", fd)
        return bytes(self._readable(fd).content[begin : begin + count])

    def os_preadv(self, fd, views, begin):
        self.enter("read", fd)
        content, done = self._readable(fd).content, 0
        for view in views:
            part = content[begin + done : begin + done + len(view)]
            view[: len(part)] = part
            done += len(part)
        return done

    def os_pwrite(self, fd, data, begin):
        how = self.enter("write", fd)
        inode = self._writable(fd)
        if how is not None:
            data = data[: how(begin, len(data))]
        self.overwrites(inode, data)
        if not len(data):
            return 0
        count = self.disk.write(inode, begin, bytes(data))
        self._drop_privileges(inode)
        return count

    def os_pwritev(self, fd, views, begin):
        return self.os_pwrite(fd, b"".join(views), begin)

    def os_ftruncate(self, fd, size):
        self.enter("truncate", fd)
        inode = self._writable(fd, errno.EINVAL)
        self.disk.truncate(inode, size)
        self._drop_privileges(inode)

    def os_posix_fallocate(self, fd, begin, count):
        self.enter("reserve", fd)
        self._require_supported("reserve")
        if self._opened_file(fd) and count <= 0:
            raise self._error(errno.EINVAL)
        inode = self._writable(fd)
        self.disk.reserve(inode, begin + count)
        self._drop_privileges(inode)

    def os_posix_fadvise(self, fd, *_):
        self._file(fd)

    def os_fsync(self, fd):
        fails = self.enter("sync", fd)
        inode = self._opened(fd)
        if inode.is_folder:
            self._require_supported("sync-folder")
        if fails is not None:
            self.disk.lose(inode, fails)
            raise self._error(errno.EIO)
        self.disk.sync(inode)

    def os_fchmod(self, fd, mode):
        self.enter("chmod", fd)
        self._chmod(self._owned(fd), mode)

    def os_chmod(self, path, mode):
        self.enter("chmod", None, path)
        self._chmod(self._owned(path), mode)

    def _chmod(self, inode, mode):
        if self.current.user.uid and self.current.user.gid != inode.gid:
            mode &= ~stat.S_ISGID
        self.disk.change(inode, mode=stat.S_IFMT(inode.mode) | mode & 0o7777)

    def os_fchown(self, fd, uid, gid):
        self.enter("chown", fd)
        inode, user = self._opened(fd), self.current.user
        mode = inode.mode if inode.is_folder else self._without_privileges(inode)
        is_allowed = user.uid == inode.uid and uid in (-1, inode.uid) and gid in (-1, inode.gid, user.gid)
        if user.uid and not is_allowed and (uid, gid, mode) != (-1, -1, inode.mode):
            raise self._error(errno.EPERM)
        self.disk.change(inode, mode=mode, uid=inode.uid if uid < 0 else uid, gid=inode.gid if gid < 0 else gid)

    def os_listxattr(self, fd):
        self.enter("listxattr", fd)
        self._require_supported("xattr")
        return list(self._opened(fd).xattrs)

    def os_getxattr(self, fd, name):
        self.enter("getxattr", fd)
        inode = self._attributed(fd, name, _READ)
        if name not in inode.xattrs:
            raise self._error(_NO_DATA)
        return inode.xattrs[name]

    def os_setxattr(self, fd, name, value):
        self.enter("setxattr", fd)
        inode = self._attributed(fd, name, _WRITE)
        self.disk.change(inode, xattrs=inode.xattrs | {name: value})

    def os_removexattr(self, fd, name):
        self.enter("removexattr", fd)
        inode = self._attributed(fd, name, _WRITE)
        if name not in inode.xattrs:
            raise self._error(_NO_DATA)
        self.disk.change(inode, xattrs={key: value for key, value in inode.xattrs.items() if key != name})

    def os_fdopen(self, fd, *_, **__):
        self.enter("read", fd)
        return io.BytesIO(self._readable(fd).content)

    def flock(self, fd, operation):
        self.enter("flock", fd)
        self._require_supported("flock")
        file = self._opened_file(fd)
        # Nobody shares a lock, and nobody waits for one.
        if operation & fcntl.LOCK_UN:
            if file.inode.holder is file:
                file.inode.holder = None
        elif file.inode.holder not in (None, file):
            raise self._error(errno.EWOULDBLOCK)
        else:
            file.inode.holder = file

    def control(self, fd, command, *_):
        if command == getattr(fcntl, "F_FULLFSYNC", None):
            return self.os_fsync(fd)
        raise self._error(errno.EINVAL)

    # Common parts.

    def _start(self, path, dir_fd):
        """The folder where a path begins, and the path as text."""
        text = os.fspath(path)
        self._require_short(text, path)
        if dir_fd is None or text[:1] in ("/", ""):
            return self.disk.root, text
        return self._inode(dir_fd), text

    def _require_short(self, text, path):
        if len(text) >= _PATH_MAX // 4 and len(os.fsencode(text)) >= _PATH_MAX:
            raise self._error(errno.ENAMETOOLONG, path)

    def _there(self, path, dir_fd, *, follow=True):
        """The inode that a path leads to."""
        at, text = self._start(path, dir_fd)
        try:
            return self.disk.lookup(self.current.user, at, text, follow=follow)
        except OSError as error:
            error.filename = path
            raise

    def _place(self, path, dir_fd):
        """The folder, the name in it, the inode or None, and whether a slash follows."""
        return self._told(path, self.disk.place, self.current.user, *self._start(path, dir_fd))

    def _new_place(self, path, dir_fd, *, is_folder=False):
        """The folder and the name where something is to be made."""
        folder, name, inode, has_slash = self._place(path, dir_fd)
        if inode is not None:
            raise self._error(errno.EEXIST, path)
        if has_slash and not is_folder:
            raise self._missing(folder, name, path)
        return folder, name

    def _missing(self, folder, name, path):
        error = self.disk.missing(folder, name)
        error.filename = path
        return error

    def _told(self, path, do, *args):
        """Do something, with errors that name a path."""
        try:
            return do(*args)
        except OSError as error:
            error.filename = path
            raise

    def _file(self, fd):
        if fd not in self.files:
            raise self._error(errno.EBADF)
        return self.files[fd]

    def _inode(self, fd):
        return self._file(fd).inode

    def _opened_file(self, fd):
        """An open file, but not where its descriptor only stands for a place."""
        file = self._file(fd)
        if file.flags & _O_PATH:
            raise self._error(errno.EBADF)
        return file

    def _opened(self, fd):
        return self._opened_file(fd).inode

    def _readable(self, fd):
        file = self._opened_file(fd)
        if file.flags & os.O_ACCMODE == os.O_WRONLY:
            raise self._error(errno.EBADF)
        if file.inode.is_folder:
            raise self._error(errno.EISDIR)
        return file.inode

    def _writable(self, fd, number=errno.EBADF):
        file = self._opened_file(fd)
        if file.flags & os.O_ACCMODE == os.O_RDONLY:
            raise self._error(number)
        return file.inode

    def _owned(self, path):
        """What a descriptor or a path leads to, if it is the user's."""
        inode = self._opened(path) if isinstance(path, int) else self._there(path, None)
        if self.current.user.uid not in (0, inode.uid):
            raise self._error(errno.EPERM, None if isinstance(path, int) else path)
        return inode

    def _attributed(self, fd, name, right):
        """An open file, if the user has a right to its attribute of that name."""
        self._require_supported("xattr")
        inode, user = self._opened(fd), self.current.user
        if name.startswith("user."):
            if right == _WRITE and inode.is_folder and inode.mode & stat.S_ISVTX and user.uid not in (0, inode.uid):
                raise self._error(errno.EPERM)
            if not may(user, inode, right):
                raise self._error(errno.EACCES)
        elif right == _WRITE and user.uid not in (0, inode.uid):
            raise self._error(errno.EPERM)
        return inode

    def _drop_privileges(self, inode):
        """Take away from a file that is changed what a program has of its owner and group, unless root changes it."""
        if inode.mode & _SET_ID and self.current.user.uid:
            inode.mode = self._without_privileges(inode)

    def _without_privileges(self, inode):
        """The mode of a file without the bits that let a program act as its owner or group."""
        mode, user = inode.mode & ~stat.S_ISUID, self.current.user
        return mode & ~stat.S_ISGID if mode & stat.S_IXGRP or (user.uid and user.gid != inode.gid) else mode

    def _listed(self, path):
        inode = self._inode(path) if isinstance(path, int) else self._there(path, None)
        if not inode.is_folder:
            raise self._error(errno.ENOTDIR, path)
        if isinstance(path, int):
            self._opened(path)
        elif not may(self.current.user, inode, _READ):
            raise self._error(errno.EACCES, path)
        return inode

    def _close(self, fd):
        file = self.files.pop(fd)
        if file.inode.holder is file:
            file.inode.holder = None

    def _require_supported(self, call):
        if call in self.unsupported:
            raise self._error(errno.ENOLCK if call == "flock" else errno.EOPNOTSUPP)

    def _error(self, number, path=None):
        return OSError(number, os.strerror(number)) if path is None else OSError(number, os.strerror(number), path)


class _Scan:
    """The entries of a folder, for a `with` block."""

    def __init__(self, entries):
        self._entries = list(entries)

    def __iter__(self):
        return iter(self._entries)

    def __next__(self):
        if not self._entries:
            raise StopIteration
        return self._entries.pop(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._entries.clear()

    def close(self):
        self._entries.clear()


def _is_ours(args, named):
    """Whether a call is about what a kernel has: by its descriptors and paths."""
    for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"):
        if named.get(name) is not None:
            return named[name] >= _FIRST_FD
    if not args:
        return True
    return args[0] >= _FIRST_FD if type(args[0]) is int else not os.fspath(args[0]).startswith(_REAL)
