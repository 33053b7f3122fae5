"""A disk in memory, with users, that can be full, fail, and lose power.

Calls have the results of Linux. It promises no more than POSIX does, and that each call which changes a folder is done
as a whole or not at all:

- What was written to a file, and its size, are safe after an fsync of that file; a name after an fsync of its folder.
- Of everything else any part may be lost and any part may be there, in whatever order it was done.
- A sector is written as a whole or not at all. Modes and owners are safe at once.
- An fsync that fails may have lost what was written before it: no later fsync brings that back.

It knows nothing about gradtool.
"""

import errno
import functools
import os
import stat
from typing import NamedTuple

SECTOR = 512
MAX_LINKS, _MAX_NAME = 40, 255
_READ, _WRITE, _SEARCH = 4, 2, 1
_MICROSECOND = 1000


class Op(NamedTuple):
    """A part of a call that is not safe yet: `what` is (begin, bytes), a size, or names with inode numbers or None."""

    call: int
    kind: str
    what: object
    mtime: int
    # Of a change of names, the inode whose status it changed with.
    inode: object = None


class Inode:
    """A file, folder or symbolic link: what processes see, what is `safe` on the disk, and what is `pending`."""

    __slots__ = (
        "content", "ctime", "entries", "gid", "holder", "is_lossy", "mode", "mtime", "nlink", "number", "parent",
        "pending", "safe", "safe_ctime", "safe_mtime", "target", "uid", "xattrs",
    )  # fmt: skip

    def __init__(self, number, mode, uid, gid, now):
        self.number, self.mode, self.uid, self.gid = number, mode, uid, gid
        self.content = bytearray() if stat.S_ISREG(mode) else None
        self.entries = {} if stat.S_ISDIR(mode) else None
        self.target, self.parent = None, None
        self.xattrs = {}
        self.mtime = self.ctime = self.safe_mtime = self.safe_ctime = now
        self.nlink = 2 if stat.S_ISDIR(mode) else 0
        self.safe = {} if stat.S_ISDIR(mode) else b""
        self.pending = []
        self.is_lossy = False
        # The open file that has the lock.
        self.holder = None

    @property
    def is_folder(self):
        return self.entries is not None

    @property
    def is_link(self):
        return self.target is not None


class User(NamedTuple):
    """Who makes a call."""

    uid: int
    gid: int
    umask: int = 0o022


ROOT = User(0, 0)


class Disk:
    """The inodes, and every change that a call may make to them; `size` is how many bytes there is room for."""

    # As in /proc/sys/fs: what keeps users from falling for links of others in sticky folders.
    protected_hardlinks, protected_symlinks, protected_regular = 1, 0, 0

    def __init__(self, size=1 << 30):
        self.size = size
        # Of the wall clock, in nanoseconds; each change is a little later, unless it jumps.
        self.now = 1_700_000_000 * 10**9
        self._calls = self._next = 0
        self._used = 0
        # Names are safe at once, as on file systems that cannot sync a folder.
        self.keeps_names = False
        self.inodes = {}
        self.root = self._new(stat.S_IFDIR | 0o755, ROOT)
        self.root.parent = self.root

    # What a path leads to.

    def lookup(self, user, at, path, *, follow=True):
        """The inode that a path leads to from a folder; a link at its end is followed if `follow`."""
        if not path:
            raise _error(errno.ENOENT)
        if path[0] == "/":
            at = self.root
        left, links = [*_parts(path)], 0
        while left:
            part = left.pop()
            number = self._entry(user, at, part)
            if number is None:
                raise self.missing(at, part)
            inode = self.inodes[number]
            if inode.target is None or not (left or follow):
                at = inode
                continue
            links += 1
            if links > MAX_LINKS:
                raise _error(errno.ELOOP)
            if not left or left == [""]:
                self.require_followable(user, at, inode)
            left += _parts(inode.target)
            if inode.target[0] == "/":
                at = self.root
        return at

    def place(self, user, at, path):
        """The folder that a path leads to but for its last name, that name, its inode or None, and if a slash follows.

        The name may be ".", ".." or "/".
        """
        bare = path.rstrip("/")
        if not bare:
            return self.root, "/", self.lookup(user, at, path), True
        head, slash, name = bare.rpartition("/")
        folder = self.lookup(user, at, head + "/") if slash else at
        number = self._entry(user, folder, name)
        return folder, name, None if number is None else self.inodes[number], len(bare) < len(path)

    def _entry(self, user, folder, name):
        """The number of what has a name in a folder, or None; an empty name is a slash at the end of a path."""
        if folder.entries is None:
            raise _error(errno.ENOTDIR)
        if not name:
            return folder.number
        if user.uid and not may(user, folder, _SEARCH):
            raise _error(errno.EACCES)
        number = folder.entries.get(name)
        if number is None and name in (".", ".."):
            return folder.number if name == "." else folder.parent.number
        return number

    def missing(self, folder, name):
        """The error of a name that a folder does not have."""
        return _error(errno.ENAMETOOLONG if folder.nlink and is_too_long(name) else errno.ENOENT)

    def require_followable(self, user, folder, link):
        """Raise `OSError` if the system keeps a user from following a link in a folder at the end of a path."""
        if self.protected_symlinks and _is_of_stranger(user, folder, link) and folder.mode & stat.S_IWOTH:
            raise _error(errno.EACCES)

    def require_creatable(self, user, folder, inode):
        """Raise `OSError` if the system keeps a user from opening what is there as if to create it."""
        if _is_of_stranger(user, folder, inode):
            level = self.protected_regular if inode.content is not None else 1
            if folder.mode & ((stat.S_IWOTH if level else 0) | (stat.S_IWGRP if level > 1 else 0)):
                raise _error(errno.EACCES)

    def status(self, inode):
        """What `os.stat` says of it."""
        size = len(inode.content) if inode.content is not None else len(os.fsencode(inode.target or "")) or 4096
        mtime, ctime = inode.mtime, inode.ctime
        seconds, changed = mtime // 10**9, ctime // 10**9
        about = inode.mode, inode.number, 1, inode.nlink, inode.uid, inode.gid, size, seconds, seconds, changed
        # The times once more, as fractions and in nanoseconds; then how much space is taken up; no device.
        precisely = mtime / 10**9, mtime / 10**9, ctime / 10**9, mtime, mtime, ctime, 4096, -(-size // 4096) * 8, 0
        return os.stat_result(about + precisely)

    @property
    def free(self):
        """The bytes there is room for."""
        return max(0, self.size - self._used)

    # What changes it.

    def create(self, user, folder, name, mode, target=None):
        """Make a file, a folder or a link in a folder, where nothing has that name."""
        self._require_writable(user, folder, name)
        inode = self._new(mode, user)
        if folder.mode & stat.S_ISGID:
            inode.gid = folder.gid
            if inode.is_folder:
                inode.mode |= stat.S_ISGID
        if target is not None:
            inode.target, inode.content, inode.safe = target, None, None
        if inode.is_folder:
            inode.parent = folder
            folder.nlink += 1
        else:
            inode.nlink = 1
        self._rename(folder, {name: inode.number}, inode)
        return inode

    def link(self, user, folder, name, inode):
        """Give a file one more name."""
        if not folder.nlink or is_too_long(name):
            raise self.missing(folder, name)
        if self.protected_hardlinks and user.uid not in (0, inode.uid) and not _is_safe_to_link(user, inode):
            raise _error(errno.EPERM)
        self._require_writable(user, folder)
        if inode.is_folder:
            raise _error(errno.EPERM)
        inode.nlink += 1
        self._rename(folder, {name: inode.number}, inode)

    def rename(self, user, folder, old, other, new):
        """Rename what a folder has, or move it to another folder, over what has the new name."""
        inode, there = self.inodes[folder.entries[old]], self.inodes.get(other.entries.get(new))
        if other is not folder and inode in _up_from(other):
            raise _error(errno.EINVAL)
        if other is not folder and there in _up_from(folder):
            raise _error(errno.ENOTEMPTY)
        if there is inode:
            return
        self._require_renamable(user, folder, inode, other, there)
        if there is not None:
            self._unlinked(other, there)
        if other is folder:
            self._rename(folder, {old: None, new: inode.number}, inode)
            return
        if inode.is_folder:
            inode.parent = other
            folder.nlink -= 1
            other.nlink += 1
        self._rename(folder, {old: None}, inode)
        self._rename(other, {new: inode.number}, inode)
        # Half of a move would lose the file: it is safe at once, as in a journal that was written to the disk.
        self.sync(folder)
        self.sync(other)

    def _require_renamable(self, user, folder, inode, other, there):
        self._require_removable(user, folder, inode)
        if there is None:
            self._require_writable(user, other)
        else:
            self._require_removable(user, other, there)
            if there.is_folder != inode.is_folder:
                raise _error(errno.EISDIR if there.is_folder else errno.ENOTDIR)
        if inode.is_folder and other is not folder:
            # Its ".." is changed.
            _require(user, inode, _WRITE)
        if there is not None and there.entries:
            raise _error(errno.ENOTEMPTY)

    def unlink(self, user, folder, name):
        """Remove the name of a file or a link."""
        inode = self.inodes[folder.entries[name]]
        self._require_removable(user, folder, inode)
        if inode.is_folder:
            raise _error(errno.EISDIR)
        self._unlinked(folder, inode)
        self._rename(folder, {name: None}, inode)

    def rmdir(self, user, folder, name):
        """Remove an empty folder."""
        inode = self.inodes[folder.entries[name]]
        self._require_removable(user, folder, inode)
        if not inode.is_folder:
            raise _error(errno.ENOTDIR)
        if inode.entries:
            raise _error(errno.ENOTEMPTY)
        self._unlinked(folder, inode)
        self._rename(folder, {name: None}, inode)

    def write(self, inode, begin, data):
        """Write bytes; how many, which is fewer than asked where the disk is full."""
        # No hole is free: what lies before the bytes takes up space too.
        lacking = begin + len(data) - len(inode.content) - self.free
        if lacking > 0:
            data = data[: max(0, len(data) - lacking)]
            if not data:
                raise _error(errno.ENOSPC)
        if begin + len(data) > len(inode.content):
            self._resized(inode, begin + len(data))
        inode.content[begin : begin + len(data)] = data
        self._changed(inode, "data", (begin, bytes(data)))
        return len(data)

    def truncate(self, inode, size):
        """Cut a file, or extend it with zeros."""
        if size - len(inode.content) > self.free:
            raise _error(errno.ENOSPC)
        self._resized(inode, size)
        self._changed(inode, "size", size)

    def reserve(self, inode, end):
        """Reserve space up to a byte, which makes a file that long."""
        if end > len(inode.content):
            if end - len(inode.content) > self.free:
                raise _error(errno.ENOSPC)
            self._resized(inode, end)
            self._changed(inode, "grow", end)
        else:
            inode.mtime = inode.ctime = self._tick()

    def change(self, inode, **fields):
        """Set the mode, the owner or the group, which is safe at once."""
        for name, value in fields.items():
            setattr(inode, name, value)
        inode.ctime = inode.safe_ctime = self._tick()

    def set_mtime(self, inode, mtime):
        """Set the time of the content."""
        inode.mtime = inode.safe_mtime = mtime
        inode.ctime = inode.safe_ctime = self._tick()

    # What is safe.

    def sync(self, inode):
        """Make everything that was done to it safe, but for what an earlier failure has lost."""
        self._settle(inode, inode.pending)
        if not inode.is_lossy:
            inode.safe = dict(inode.entries) if inode.is_folder else bytes(inode.content)
            inode.safe_mtime = inode.mtime
            inode.safe_ctime = inode.ctime

    def lose(self, inode, chance):
        """Fail to sync: each change is on the disk or lost for good, as chance has it."""
        self._settle(inode, [op for op in inode.pending if chance.random() < 0.5])
        inode.is_lossy = inode.is_lossy or inode.content is not None

    def cut(self, chance):
        """Cut the power: only what is safe is left, and of the rest whatever chance keeps."""
        keeps = _keeper(chance, [op.call for inode in self.inodes.values() for op in inode.pending])
        for inode in self.inodes.values():
            if inode.pending:
                self._settle(inode, keeps(inode.pending))
            inode.holder, inode.is_lossy, inode.ctime = None, False, inode.safe_ctime
            if inode.is_folder:
                inode.entries = dict(inode.safe)
            elif inode.content is not None:
                inode.content = bytearray(inode.safe)
                inode.mtime = inode.safe_mtime
        self._forget_unreachable()

    def settle(self):
        """Make everything safe that there is, as if it were old."""
        for inode in self.inodes.values():
            if not inode.is_link:
                inode.is_lossy = False
                self.sync(inode)

    def tree(self):
        """Every path with its inode, a folder before what is in it."""
        paths, left = {}, [("", self.root)]
        while left:
            path, folder = left.pop()
            for name, number in sorted(folder.entries.items()):
                inode = self.inodes[number]
                paths[f"{path}/{name}"] = inode
                if inode.is_folder:
                    left.append((f"{path}/{name}", inode))
        return paths

    def _new(self, mode, user):
        # Numbers of removed files are not used again: that they may be is another story.
        self._next += 1
        inode = self.inodes[self._next] = Inode(self._next, mode, user.uid, user.gid, self._tick())
        return inode

    def _tick(self):
        self.now += _MICROSECOND
        return self.now

    def _changed(self, inode, kind, what, renamed=None):
        inode.mtime = inode.ctime = self._tick()
        self._calls += 1
        inode.pending.append(Op(self._calls, kind, what, inode.mtime, renamed))

    def _rename(self, folder, names, inode):
        for name, number in names.items():
            if number is None:
                folder.entries.pop(name, None)
            else:
                folder.entries[name] = number
        self._changed(folder, "name", names, inode)
        inode.ctime = folder.ctime
        if self.keeps_names:
            self.sync(folder)

    def _unlinked(self, folder, inode):
        inode.nlink -= 1
        inode.ctime = self._tick()
        if inode.is_folder:
            folder.nlink -= 1
            inode.nlink = 0
        elif not inode.nlink and inode.content is not None:
            # Even while it is open, which the system waits for.
            self._used -= len(inode.content)

    def _resized(self, inode, size):
        if inode.nlink:
            self._used += size - len(inode.content)
        if size < len(inode.content):
            del inode.content[size:]
        else:
            inode.content.extend(bytes(size - len(inode.content)))

    def _settle(self, inode, survivors):
        """Put changes on the disk, in the order in which they were made, and forget the others."""
        if inode.is_folder:
            for op in survivors:
                inode.safe = {name: number for name, number in (inode.safe | op.what).items() if number is not None}
                op.inode.safe_ctime = max(op.inode.safe_ctime, op.mtime)
        else:
            content = bytearray(inode.safe or b"")
            for op in survivors:
                _apply(content, op)
                inode.safe_mtime = inode.safe_ctime = op.mtime
            inode.safe = bytes(content)
        inode.pending = []

    def _forget_unreachable(self):
        reached = {self.root.number: self.root} | {inode.number: inode for inode in self.tree().values()}
        self.inodes = reached
        for inode in reached.values():
            inode.nlink = 2 if inode.is_folder else 0
        for folder in [inode for inode in reached.values() if inode.is_folder]:
            for number in folder.entries.values():
                inode = reached[number]
                if inode.is_folder:
                    inode.parent = folder
                    folder.nlink += 1
                else:
                    inode.nlink += 1
        self._used = sum(len(inode.content) for inode in reached.values() if inode.content is not None)

    def _require_writable(self, user, folder, name=""):
        if not folder.nlink or is_too_long(name):
            raise self.missing(folder, name)
        _require(user, folder, _WRITE | _SEARCH)

    def _require_removable(self, user, folder, inode):
        self._require_writable(user, folder)
        if folder.mode & stat.S_ISVTX and user.uid not in (0, folder.uid, inode.uid):
            raise _error(errno.EPERM)


def may(user, inode, rights):
    """Whether a user has rights, as bits of a mode, to an inode."""
    if user.uid == 0:
        return not (rights & _SEARCH and not inode.is_folder and not inode.mode & 0o111)
    shift = 6 if user.uid == inode.uid else 3 if user.gid == inode.gid else 0
    return not rights & ~(inode.mode >> shift)


def is_too_long(name):
    """Whether nothing can have that name."""
    return len(name) > _MAX_NAME // 4 and len(os.fsencode(name)) > _MAX_NAME


def _require(user, inode, rights):
    if not may(user, inode, rights):
        raise _error(errno.EACCES)


def _error(number):
    return OSError(number, os.strerror(number))


def _is_of_stranger(user, folder, inode):
    """Whether what is in a sticky folder belongs neither to a user nor to the folder's owner."""
    return folder.mode & stat.S_ISVTX and inode.uid not in (user.uid, folder.uid)


def _is_safe_to_link(user, inode):
    """Whether Linux lets a user, if it is careful, make a hard link to a file of another."""
    is_privileged = inode.mode & stat.S_ISUID or not ~inode.mode & (stat.S_ISGID | stat.S_IXGRP)
    return stat.S_ISREG(inode.mode) and not is_privileged and may(user, inode, _READ | _WRITE)


def _up_from(folder):
    """A folder and all that it is in."""
    above = [folder]
    while above[-1].parent is not above[-1]:
        above.append(above[-1].parent)
    return above


@functools.lru_cache(1 << 12)
def _parts(path):
    """The names in a path, the last one first; "" there stands for a slash at the end."""
    parts = [part for part in path.split("/") if part]
    return tuple(reversed([*parts, ""] if parts and path[-1] == "/" else parts))


def _apply(content, op):
    if op.kind == "data":
        begin, data = op.what
        if begin + len(data) > len(content):
            content.extend(bytes(begin + len(data) - len(content)))
        content[begin : begin + len(data)] = data
    elif op.kind == "size" and op.what < len(content):
        del content[op.what :]
    else:
        content.extend(bytes(max(0, op.what - len(content))))


def _keeper(chance, calls):
    """Draw how a power cut treats what was not safe: a function from changes to those that survive."""
    share, how = chance.choice((0.0, 0.2, 0.5, 0.8, 1.0)), chance.choice(("any", "journal", "torn", "names", "data"))
    end = chance.choice(calls) if calls else 0

    def keeps(pending):
        survivors = []
        for op in pending:
            is_name = op.kind == "name"
            if how == "journal" and is_name:
                # A journal of the folders keeps their order.
                alive = op.call <= end
            elif how in ("names", "data"):
                alive = is_name == (how == "names")
            else:
                alive = chance.random() < share
            if how == "torn" and op.kind == "data":
                survivors += [piece for piece in _sectors(op) if chance.random() < 0.5]
            elif alive:
                survivors.append(op)
        return survivors

    return keeps


def _sectors(op):
    """The parts of a write that are in one sector each."""
    begin, data = op.what
    at = 0
    while at < len(data):
        size = min(len(data) - at, SECTOR - (begin + at) % SECTOR)
        yield op._replace(what=(begin + at, data[at : at + size]))
        at += size
