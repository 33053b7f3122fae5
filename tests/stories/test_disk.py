"""The simulated disk against a real one: the same random calls, made on both, have the same results.

Then what no real disk can be asked to do: lose power, fail to sync, be full.

Some things are simulated only as far as programs need them, and are not compared: the time of the last access, the size
of folders, negative offsets, extended attributes that are not a user's, locks that are shared or waited for, and what
space files take up: a hole does, and a removed file that is still open does not.
"""

import contextlib
import errno
import fcntl
import functools
import os
import random
import reprlib
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from disk import ROOT, SECTOR, Disk, User
from kernel import Kernel, Process
from tiers import EXHAUSTIVE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the simulated disk has the results of Linux")
PLACES = [pytest.param(path, id=name) for name, path in (("disk", tempfile.gettempdir()), ("memory", "/dev/shm"))]  # noqa: S108
# Sequences of so many calls. The sample has 10,000 calls: two places, and both kinds of users where there are both.
LENGTH, SAMPLE, REST = 250, range(10 if os.geteuid() == 0 else 20), range(20, 400)
# Even 40 links and 3 names, each of which leads one folder up, do not lead out of here.
NEST = "/".join(["nest"] * 45)
SEVERAL = (ROOT, User(5678, 5678), User(1234, 1234), User(4321, 5678))
LONG, TOO_LONG, TOO_LONG_IN_BYTES = "y" * 255, "z" * 256, "é" * 128
TARGETS = (
    "a", "b", "c", "d", "e", "a/b", "b/", "../a", "..", ".", "@/a", "@/b/c", "@", "d/../c", "c/", "", "nowhere", LONG
)  # fmt: skip
MODES = (0o600, 0o644, 0o666, 0o755, 0o777, 0o000, 0o400, 0o200, 0o300, 0o100, 0o500, 0o070, 0o4755, 0o2644)
# Of what runs as its group. Linux has changed what becomes of this mode where a file is created.
GROUP_MODE = 0o2755
FOLDER_MODES = (0o755, 0o777, 0o1777, 0o1777, 0o2777, 0o3770, 0o2750, 0o700, 0o500, 0o300, 0o600, 0o000, 0o1775)
MTIMES = (1_500_000_000 * 10**9, 1_600_000_000 * 10**9 + 12_345_678)
ATTRIBUTES = ("user.a", "user.b")
# Descriptors: of the folder of the test, which stays open, and of nothing.
HOME, BAD, NO_FILE = "home", "bad", 1 << 25


class Call(NamedTuple):
    """A call of `Side`, by a user; a path that begins with @ is below the folder of the test."""

    user: User
    name: str
    args: tuple


class Side:
    """Makes calls on a disk; they go to the real one or the simulated one, whichever is in force."""

    def __init__(self, folder):
        self.folder, self.root = folder, f"{folder}/{NEST}"
        self.fds = {BAD: NO_FILE}

    def result(self, call):
        try:
            return getattr(self, call.name)(*call.args)
        except OSError as error:
            return errno.errorcode[error.errno]

    def path(self, text):
        return self.root + text[1:] if text.startswith("@") else text

    def short(self, path):
        return path.removeprefix(self.folder)

    def at(self, path, slot):
        return {"path": self.path(path), "dir_fd": None if slot is None else self.fds[slot]}

    def open(self, path, at, flags, mode, slot):
        fd = os.open(flags=flags, mode=mode, **self.at(path, at))
        if slot in self.fds:
            os.close(self.fds[slot])
        self.fds[slot] = fd
        return "opened"

    def close(self, slot):
        os.close(self.fds[slot] if slot == BAD else self.fds.pop(slot))

    def stat(self, path, at, follow):
        return told(os.stat(**self.at(path, at), follow_symlinks=follow))

    def lstat(self, path):
        return told(os.lstat(self.path(path)))

    def fstat(self, slot):
        return told(os.fstat(self.fds[slot]))

    def listdir(self, path):
        return sorted(os.listdir(self.path(path) if isinstance(path, str) else self.fds[path[0]]))

    def scandir(self, path):
        with os.scandir(self.path(path) if isinstance(path, str) else self.fds[path[0]]) as entries:
            return sorted((entry.name, *map(attempt, kinds_of(entry))) for entry in entries)

    def mkdir(self, path, at, mode):
        os.mkdir(mode=mode, **self.at(path, at))

    def rmdir(self, path, at):
        os.rmdir(**self.at(path, at))

    def unlink(self, path, at):
        os.unlink(**self.at(path, at))

    def symlink(self, target, path, at):
        place = self.at(path, at)
        os.symlink(self.path(target), place["path"], dir_fd=place["dir_fd"])

    def readlink(self, path, at):
        return self.short(os.readlink(**self.at(path, at)))

    def link(self, path, at, new, new_at):
        old, new = self.at(path, at), self.at(new, new_at)
        os.link(old["path"], new["path"], src_dir_fd=old["dir_fd"], dst_dir_fd=new["dir_fd"], follow_symlinks=False)

    def rename(self, path, at, new, new_at):
        old, new = self.at(path, at), self.at(new, new_at)
        os.replace(old["path"], new["path"], src_dir_fd=old["dir_fd"], dst_dir_fd=new["dir_fd"])

    def chmod(self, path, mode):
        os.chmod(self.path(path), mode)

    def fchmod(self, slot, mode):
        os.fchmod(self.fds[slot], mode)

    def fchown(self, slot, uid, gid):
        os.fchown(self.fds[slot], uid, gid)

    def utime(self, path, mtime):
        os.utime(self.path(path) if isinstance(path, str) else self.fds[path[0]], ns=(mtime, mtime))

    def access(self, path, rights):
        return os.access(self.path(path), rights)

    def pread(self, slot, count, begin):
        return os.pread(self.fds[slot], count, begin)

    def preadv(self, slot, counts, begin):
        views = [bytearray(count) for count in counts]
        return os.preadv(self.fds[slot], list(map(memoryview, views)), begin), views

    def pwrite(self, slot, data, begin):
        return os.pwrite(self.fds[slot], data, begin)

    def pwritev(self, slot, parts, begin):
        return os.pwritev(self.fds[slot], list(map(memoryview, parts)), begin)

    def ftruncate(self, slot, size):
        os.ftruncate(self.fds[slot], size)

    def reserve(self, slot, begin, count):
        os.posix_fallocate(self.fds[slot], begin, count)

    def fsync(self, slot):
        os.fsync(self.fds[slot])

    def listxattr(self, slot):
        return sorted(name for name in os.listxattr(self.fds[slot]) if name.startswith("user."))

    def getxattr(self, slot, name):
        return os.getxattr(self.fds[slot], name)

    def setxattr(self, slot, name, value):
        os.setxattr(self.fds[slot], name, value)

    def removexattr(self, slot, name):
        os.removexattr(self.fds[slot], name)

    def flock(self, slot, operation):
        fcntl.flock(self.fds[slot], operation)

    def umask(self, mask):
        return os.umask(mask)

    def realpath(self, path):
        return self.short(os.path.realpath(self.path(path)))

    def lexists(self, path):
        return os.path.lexists(self.path(path))

    def isdir(self, path):
        return os.path.isdir(self.path(path))


class Told(NamedTuple):
    """What disks agree on of a status."""

    mode: str
    nlink: int | None
    uid: int
    gid: int
    size: int | None


def told(status):
    size = None if stat.S_ISDIR(status.st_mode) else status.st_size
    return Told(oct(status.st_mode), status.st_nlink, status.st_uid, status.st_gid, size)


def kinds_of(entry):
    return entry.is_symlink, entry.is_dir, lambda: entry.is_dir(follow_symlinks=False), entry.is_file


def attempt(do):
    try:
        return do()
    except OSError as error:
        return errno.errorcode[error.errno]


class Thing(NamedTuple):
    """What a path or a descriptor leads to."""

    status: tuple
    target: str | None
    content: object
    number: int
    mtime: int
    ctime: int


def tree_of(side, base, *, with_content, has_xattrs):
    """All that is below an open folder, by path, and what is open, by descriptor."""
    things = {}

    def note(path, fd, name):
        status = os.stat(name, dir_fd=fd, follow_symlinks=False) if name else os.fstat(fd)
        target = side.short(os.readlink(name, dir_fd=fd)) if name and stat.S_ISLNK(status.st_mode) else None
        has_content = with_content and name and stat.S_ISREG(status.st_mode)
        content = attempt(lambda: content_of(fd, name, has_xattrs=has_xattrs)) if has_content else None
        things[path] = Thing(told(status), target, content, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        return status.st_mode

    def walk(fd, path):
        for name in sorted(os.listdir(fd)):
            try:
                if not stat.S_ISDIR(note(f"{path}/{name}", fd, name)):
                    continue
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            except PermissionError:
                # Whoever is not root cannot look everywhere.
                continue
            walk(inner, f"{path}/{name}")
            os.close(inner)

    walk(base, "")
    for slot, fd in side.fds.items():
        if slot != BAD:
            note(slot, fd, "")
    return things


def content_of(fd, name, *, has_xattrs):
    inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd)
    try:
        names = [name for name in os.listxattr(inner) if name in ATTRIBUTES] if has_xattrs else []
        return os.pread(inner, 1 << 20, 0), {name: os.getxattr(inner, name) for name in names}
    finally:
        os.close(inner)


def set_time_of(thing):
    return thing.mtime if thing.mtime in MTIMES else None


class Pair:
    """The same calls on both disks."""

    def __init__(self, folder, users, abilities):
        # Of the same length; what is below /dev is never simulated.
        simulated = folder.replace("/dev/", "/dve/", 1)
        self.sides = Side(folder), Side(simulated)
        self.kernel = Kernel()
        for name in ("hardlinks", "symlinks", "regular"):
            setattr(self.kernel.disk, f"protected_{name}", int(Path(f"/proc/sys/fs/protected_{name}").read_text()))
        self.process = Process()
        # Who looks at what the calls have done.
        self.me = self.now = users[0]
        self.abilities = abilities
        self.calls = []
        self.before = {}
        self.paths = []
        self.bases = [None, None]

    def __enter__(self):
        with contextlib.ExitStack() as block:
            block.callback(os.umask, os.umask(0o022))
            block.enter_context(self.kernel.installed())
            block.callback(self._close)
            self.on_both(self._begin)
            self.make(Call(self.me, "open", ("@", None, os.O_RDONLY, 0, HOME)))
            self.work = self.kernel.disk.lookup(ROOT, None, self.sides[1].root)
            self.block = block.pop_all()
        return self

    def __exit__(self, *_):
        self.block.close()

    def _close(self):
        self.become(self.me)
        for fd in (self.bases[0], *self.sides[0].fds.values()):
            if fd not in (None, NO_FILE):
                os.close(fd)

    def _begin(self, side, number):
        if number:
            self.process.user = ROOT
            at = ""
            for name in side.root.split("/")[1 : -NEST.count("/") - 1]:
                at += f"/{name}"
                os.mkdir(at, 0o755)
            self.process.user = self.me
            inode = self.kernel.disk.lookup(ROOT, None, at)
            inode.uid, inode.gid = self.me.uid, self.me.gid
        os.makedirs(side.root, 0o755)
        os.chmod(side.root, 0o1777)  # noqa: S103 - the calls are made there
        self.bases[number] = os.open(side.root + "/..", os.O_RDONLY | os.O_DIRECTORY)

    def on_both(self, do):
        """Do something with each side, as who runs the tests."""
        answers = []
        for number, side in enumerate(self.sides):
            self.become(self.me)
            self.kernel.current, self.process.user = (self.process, self.me) if number else (None, self.me)
            try:
                answers.append(do(side, number))
            finally:
                self.kernel.current = None
        return answers

    def become(self, user):
        if user != self.now:
            self.now = user
            os.setresuid(0, 0, 0)
            os.setresgid(user.gid, user.gid, 0)
            os.setresuid(user.uid, user.uid, 0)

    def make(self, call):
        """Make a call on both; the result."""
        self.calls.append(call)
        real, simulated = self.sides
        self.become(call.user)
        is_here = real.result(call)
        self.kernel.current, self.process.user = self.process, call.user
        try:
            is_there = simulated.result(call)
        finally:
            self.kernel.current = None
        self._require(self._without_nlink(is_there), self._without_nlink(is_here), "its result")
        return is_here

    def _without_nlink(self, answer):
        has_it = isinstance(answer, Told) and answer.size is None and not self.abilities.has_nlink
        return answer._replace(nlink=None) if has_it else answer

    def is_within(self, slot):
        """Whether no path from an open folder leads out of what the test made."""
        inode = self.kernel.files[self.sides[1].fds[slot]].inode if slot != BAD else self.work
        while inode is not self.work and inode.parent not in (None, inode):
            inode = inode.parent
        return inode is self.work or not inode.is_folder

    def require_same(self, *, with_content):
        how = {"with_content": with_content, "has_xattrs": self.abilities.has_xattrs}
        here, there = self.on_both(lambda side, number: tree_of(side, self.bases[number], **how))
        self._require(list(there), list(here), "the names")
        numbers = {thing.number: here[path].number for path, thing in there.items()}
        self._require(len(set(numbers.values())), len(numbers), "how many inodes there are")
        for path, thing in there.items():
            real = here[path]
            self._require(numbers[thing.number], real.number, f"the inode of {path}")
            self._require(self._without_nlink(thing.status), self._without_nlink(real.status), f"the status of {path}")
            self._require((thing.target, thing.content), (real.target, real.content), f"what is in {path}")
            self._require(set_time_of(thing), set_time_of(real), f"the time that was set of {path}")
            if thing.number in self.before:
                old, real_old = self.before[thing.number]
                pairs = ("mtime", thing.mtime != old.mtime, real.mtime != real_old.mtime), (
                    "ctime", thing.ctime != old.ctime, real.ctime != real_old.ctime,
                )  # fmt: skip
                for name, has_changed, has_really in pairs:
                    # A coarse clock hides a change, but makes none up.
                    if has_really or self.abilities.has_times:
                        self._require(has_changed, has_really, f"whether {name} has changed of {path}")
        self.before = {thing.number: (thing, here[path]) for path, thing in there.items()}
        self.paths = [path.removeprefix("/nest/") for path in there if path.startswith("/nest/")]

    def _require(self, simulated, real, what):
        if simulated != real:
            calls = "\n".join(map(shortened, self.calls[-40:]))
            told = f"{calls}\nwas the last call; {what} is {real!r}, but {simulated!r} where it is simulated"
            pytest.fail(told, pytrace=False)


def shortened(call):
    shorter = reprlib.Repr()
    shorter.maxstring = shorter.maxother = 40
    return f"{call.user.uid}:{call.user.gid} {call.name} {shorter.repr(call.args)}"


class Author:
    """Makes up calls."""

    def __init__(self, seed, users, abilities):
        self.random, self.users = random.Random(seed), users
        self.user = users[-1]
        self.slots = {}
        self.count = 0
        self.makers = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
        self.makers = [name for name in self.makers if abilities.has_xattrs or "xattr" not in name]

    def call(self, pair):
        if self.random.random() < 0.2:
            self.user = self.random.choice(self.users)
        self.pair = pair
        self.count += 1
        name = self.random.choice(self.makers)
        return Call(self.user, name.partition("-")[0], getattr(self, "_" + name.replace("-", "_"))())

    def one_of(self, *values):
        return self.random.choice(values)

    def happens(self, chance):
        return self.random.random() < chance

    def name(self):
        if self.happens(0.1):
            return self.one_of(".", "..", "..", "", LONG, TOO_LONG, TOO_LONG_IN_BYTES)
        return self.one_of("a", "b", "c", "d", "e")

    def relative(self):
        if self.happens(0.002):
            return "a/" * 2100
        names = [self.name() for _ in range(self.one_of(1, 1, 1, 1, 2, 2, 3))]
        return "/".join(names) + self.one_of(*[""] * 9, "/")

    def absolute(self):
        if self.happens(0.5) and self.pair.paths:
            return f"@/{self.one_of(*self.pair.paths)}"
        return "@/" + self.relative()

    def slot(self):
        return BAD if self.happens(0.01) else self.random.choice([HOME, *self.slots])

    def file(self):
        """A descriptor that most probably is of a file that can be read or written."""
        files = [slot for slot, flags in self.slots.items() if flags & (os.O_ACCMODE | os.O_CREAT)]
        return self.one_of(*files) if files and self.happens(0.8) else self.slot()

    def at(self):
        """A path and the descriptor where it begins, or None."""
        if self.happens(0.4) and self.pair.paths:
            path = self.one_of(*self.pair.paths) + self.one_of(*[""] * 8, "/", "/..")
            return self.one_of((path, HOME), (f"@/{path}", None))
        slot = self.slot()
        if self.happens(0.3) or not self.pair.is_within(slot):
            return self.absolute(), self.one_of(None, slot)
        path = self.relative()
        # From an empty name a path begins at the root of the disk.
        return ("" if path.startswith("/") else path), slot

    def path_or_slot(self):
        return (self.slot(),) if self.happens(0.5) else self.absolute()

    def data(self):
        return self.random.randbytes(self.one_of(0, 1, 7, 100, 600, 5000))

    def offset(self):
        return self.one_of(0, 0, 1, 50, 511, 512, 3000, 9000)

    def new_slot(self):
        return f"fd {self.count}"

    def _open(self):
        flags = self.one_of(os.O_RDONLY, os.O_RDONLY, os.O_RDWR, os.O_WRONLY)
        for flag, chance in ((os.O_DIRECTORY, 0.3), (os.O_NOFOLLOW, 0.4), (os.O_PATH, 0.25), (os.O_TRUNC, 0.1)):
            flags |= flag if self.happens(chance) else 0
        return *self.at(), flags, 0o666, self.new_slot()

    def _open_folder(self):
        return *self.at(), os.O_RDONLY | os.O_DIRECTORY | self.one_of(0, os.O_NOFOLLOW), 0o666, self.new_slot()

    def _open_create(self):
        flags = os.O_CREAT | self.one_of(os.O_RDWR, os.O_RDWR, os.O_WRONLY, os.O_RDONLY)
        for flag, chance in ((os.O_EXCL, 0.4), (os.O_NOFOLLOW, 0.3), (os.O_TRUNC, 0.2), (os.O_PATH, 0.02)):
            flags |= flag if self.happens(chance) else 0
        return *self.at(), flags, self.one_of(*MODES), self.new_slot()

    def _close(self):
        slot = self.slot()
        if slot == HOME:
            return (BAD,)
        if slot != BAD:
            del self.slots[slot]
        return (slot,)

    def _stat(self):
        return *self.at(), self.happens(0.5)

    def _lstat(self):
        return (self.absolute(),)

    _realpath = _lexists = _isdir = _lstat

    def _fstat(self):
        return (self.slot(),)

    _fsync = _listxattr = _fstat

    def _listdir(self):
        return (self.path_or_slot(),)

    _scandir = _listdir

    def _mkdir(self):
        return *self.at(), self.one_of(*FOLDER_MODES)

    def _rmdir(self):
        return self.at()

    _unlink = _rmdir

    def _symlink(self):
        return self.one_of(*TARGETS), *self.at()

    def _readlink(self):
        slot = self.slot()
        return ("", slot) if self.happens(0.3) else self.at()

    def _link(self):
        return *self.at(), *self.at()

    _rename = _link

    def _chmod(self):
        return self.absolute(), self.one_of(*MODES, *FOLDER_MODES, GROUP_MODE)

    def _fchmod(self):
        return self.slot(), self.one_of(*MODES, *FOLDER_MODES, GROUP_MODE)

    def _fchown(self):
        ids = -1, *(user.uid for user in self.users)
        return self.slot(), self.one_of(*ids), self.one_of(*ids)

    def _utime(self):
        return self.path_or_slot(), self.one_of(*MTIMES)

    def _access(self):
        return self.absolute(), self.one_of(os.F_OK, os.R_OK, os.W_OK, os.X_OK, os.R_OK | os.W_OK)

    def _pread(self):
        return self.file(), self.one_of(0, 1, 100, 10000), self.offset()

    def _preadv(self):
        return self.file(), [self.one_of(1, 10, 600) for _ in range(self.one_of(1, 2, 3))], self.offset()

    def _pwrite(self):
        return self.file(), self.data(), self.offset()

    def _pwritev(self):
        return self.file(), [self.data() for _ in range(self.one_of(1, 2, 3))], self.offset()

    def _ftruncate(self):
        return self.file(), self.offset()

    def _reserve(self):
        return self.file(), self.offset(), self.one_of(0, 1, 600, 10000)

    def _getxattr(self):
        return self.slot(), self.one_of(*ATTRIBUTES)

    _removexattr = _getxattr

    def _setxattr(self):
        # Never the same value: whether that is a change is not the same everywhere.
        return self.slot(), self.one_of(*ATTRIBUTES), f"{self.count}".encode()

    def _flock(self):
        return self.slot(), self.one_of(fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN)

    def _umask(self):
        return (self.one_of(0o022, 0o077, 0o002, 0o000, 0o777),)


# How often each call is made up; all together are about 230.
WEIGHTS = {
    "open": 12, "open-folder": 8, "open-create": 18, "close": 12, "stat": 8, "lstat": 4, "fstat": 3, "listdir": 3,
    "scandir": 3, "mkdir": 14, "rmdir": 6, "unlink": 8, "symlink": 9, "readlink": 5, "link": 10, "rename": 20,
    "chmod": 6, "fchmod": 4, "fchown": 5, "utime": 3, "access": 6, "pread": 4, "preadv": 4, "pwrite": 8, "pwritev": 5,
    "ftruncate": 5, "reserve": 4, "fsync": 2, "listxattr": 2, "getxattr": 3, "setxattr": 4, "removexattr": 2,
    "flock": 6, "umask": 2, "realpath": 3, "lexists": 2, "isdir": 2,
}  # fmt: skip
CHANGES = frozenset((
    "open", "mkdir", "rmdir", "unlink", "symlink", "link", "rename", "chmod", "fchmod", "fchown", "utime", "pwrite",
    "pwritev", "ftruncate", "reserve", "setxattr", "removexattr",
))  # fmt: skip


def run_sequence(pair, author):
    for _ in range(LENGTH):
        while len(author.slots) > 10:
            slot = next(iter(author.slots))
            del author.slots[slot]
            pair.make(Call(author.user, "close", (slot,)))
        call = author.call(pair)
        result = pair.make(call)
        if call.name == "open" and result == "opened":
            author.slots[call.args[-1]] = call.args[2]
        # That a call which failed, or only reads, has changed nothing is found out with the next that does.
        has_failed = isinstance(result, str) and result != "opened"
        if (call.name in CHANGES and not has_failed) or author.count % 50 == 0:
            pair.require_same(with_content=author.count % 10 == 0)
    pair.require_same(with_content=True)


@pytest.fixture
def folder(place):
    if not Path(place).is_dir():
        pytest.skip(f"there is no {place}")
    path = tempfile.mkdtemp(prefix="gradtool-disk-", dir=place)
    Path(path).chmod(0o755)
    yield path
    open_up(path)
    shutil.rmtree(path)


def open_up(path):
    """Let a folder be removed, whatever mode random calls have given to what is in it."""
    Path(path).chmod(0o700)
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            open_up(entry.path)


@pytest.fixture
def who(users):
    if users == "one":
        yield (User(os.geteuid(), os.getegid()),)
        return
    if os.geteuid() != 0:
        pytest.skip("only root can be several users")
    groups = os.getgroups()
    os.setgroups([])
    yield SEVERAL
    os.setgroups(groups)


class Abilities(NamedTuple):
    """What of a real disk can be compared: extended attributes, links to folders, and the times of changes."""

    has_xattrs: bool
    has_nlink: bool
    has_times: bool


def abilities_of(folder):
    path = Path(folder, "try")
    path.mkdir()
    has_nlink = path.stat().st_nlink == 2
    try:
        os.setxattr(path, ATTRIBUTES[0], b"")
        has_xattrs = True
    except OSError:
        has_xattrs = False
    times = []
    for number in range(20):
        name = path / str(number)
        name.touch()
        times.append(path.stat().st_mtime_ns)
        name.stat()
        name.unlink()
        times.append(path.stat().st_mtime_ns)
    shutil.rmtree(path)
    return Abilities(has_xattrs, has_nlink, len(set(times)) == len(times))


@pytest.mark.parametrize("part", [pytest.param(SAMPLE, id="sample"), pytest.param(REST, id="rest", marks=EXHAUSTIVE)])
@pytest.mark.parametrize("users", ["one", "several"])
@pytest.mark.parametrize("place", PLACES)
def test_random_calls_have_the_same_results_on_a_real_disk(folder, place, users, who, part):
    abilities = abilities_of(folder)
    for seed in part:
        inner = f"{folder}/{seed}"
        Path(inner).mkdir()
        with Pair(inner, who, abilities) as pair:
            run_sequence(pair, Author(f"{place} {users} {seed}", who, abilities))


# What random calls seldom do: chains of links, folders that are moved, and files that run as their owner or group.
ALICE, BOB = SEVERAL[1:3]
TO_READ, TO_WRITE = os.O_RDONLY, os.O_WRONLY
RARE = [
    (ROOT, "open", "@/0", None, os.O_RDWR | os.O_CREAT, 0o666, "file"),
    *[(ROOT, "symlink", str(number), f"@/{number + 1}", None) for number in range(41)],
    *[(ROOT, "stat", f"@/{number}", None, True) for number in (1, 39, 40, 41)],
    *[(ROOT, "open", f"@/{number}", None, os.O_RDWR | os.O_CREAT, 0o666, "chain") for number in (40, 41)],
    (ALICE, "mkdir", "@/from", None, 0o700),
    (ALICE, "mkdir", "@/from/folder", None, 0o500),
    (ALICE, "mkdir", "@/to", None, 0o755),
    (ALICE, "rename", "@/from/folder", None, "@/to/folder", None),
    (ALICE, "rename", "@/from/folder", None, "@/from/renamed", None),
    (ALICE, "chmod", "@/from/renamed", 0o700),
    (ALICE, "rename", "@/from/renamed", None, "@/to/folder", None),
    (ALICE, "open", "@/to/folder/../marker", None, TO_WRITE | os.O_CREAT, 0o644, "marker"),
    (ALICE, "rename", "@/to", None, "@/to/folder/inner", None),
    (ALICE, "rename", "@/to/folder", None, "@/to", None),
    (ALICE, "unlink", "@/to/marker/", None),
    (ALICE, "unlink", "@/to/folder/", None),
    (ALICE, "rename", "@/to/marker/", None, "@/to/other", None),
    (ALICE, "rmdir", "@/to/marker/", None),
    *[
        (user, *call)
        for mode in (0o4755, 0o2755, 0o2745, 0o6777)
        for change in (
            ("pwrite", "program", b"x", 0), ("pwrite", "program", b"", 0), ("ftruncate", "program", 1),
            ("reserve", "program", 0, 9), ("fchown", "program", -1, -1), ("fchmod", "program", mode),
            ("open", "@/to/program", None, TO_WRITE | os.O_TRUNC, 0o666, "again"),
        )
        for user, call in (
            (ALICE, ("open", "@/to/program", None, os.O_RDWR | os.O_CREAT, 0o777, "program")),
            (ALICE, ("chmod", "@/to/program", mode)),
            (BOB, ("link", "@/to/program", None, "@/stolen", None)),
            (ALICE, change),
            (ROOT, ("fchown", "program", ALICE.uid, BOB.gid)),
            (ALICE, ("chmod", "@/to/program", mode)),
            (ROOT, ("chmod", "@/to/program", mode)),
            (ALICE, change),
            (ROOT, ("chmod", "@/to/program", mode)),
            (BOB, change),
            (ROOT, ("chmod", "@/to/program", mode)),
            (ROOT, change),
            (ROOT, ("unlink", "@/to/program", None)),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize("users", ["several"])
@pytest.mark.parametrize("place", PLACES)
def test_rare_calls_have_the_same_results_on_a_real_disk(folder, who):
    with Pair(folder, who, abilities_of(folder)) as pair:
        for user, name, *args in RARE:
            pair.make(Call(user, name, tuple(args)))
            pair.require_same(with_content=False)


@pytest.mark.parametrize("place", PLACES)
def test_the_clock_of_a_real_disk_tells_calls_apart(folder):
    if not abilities_of(folder).has_times:
        pytest.skip("its clock is too coarse: when times change is not compared there")


class Chance:
    """Draws what it is told to; else the most: all of what is pending survives."""

    def __init__(self, how="any", share=1.0, end=None, draws=()):
        self.how, self.share, self.end, self.draws = how, share, end, iter(draws)

    def choice(self, options):
        if isinstance(options[0], str):
            return self.how
        return self.share if isinstance(options[0], float) else self.end

    def random(self):
        return next(self.draws, 0.0)


# A power cut, or a failed fsync, of which nothing survives.
NOTHING = {"share": 0.0}


class Faulty(Kernel):
    """A kernel whose next fsync may fail; what has become of the data then is up to chance."""

    chance = None

    def enter(self, call, *_detail):
        if call != "sync":
            return None
        chance, self.chance = self.chance, None
        return chance


@pytest.fixture
def kernel():
    return Faulty(Disk(1 << 20))


def simulated(test):
    """Let a test run on its kernel, as root; what pytest does before and after is real."""

    @functools.wraps(test)
    def run(kernel, **named):
        kernel.current = Process()
        with kernel.installed():
            try:
                test(kernel, **named)
            finally:
                kernel.current = None

    return run


def create(path, content=b""):
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.pwrite(fd, content, 0)
    return fd


def read(path):
    fd = os.open(path, os.O_RDONLY)
    content = os.pread(fd, 1 << 20, 0)
    os.close(fd)
    return content


def sync_folder(path="/"):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def refusal(do, *args):
    with pytest.raises(OSError, match=r"\[Errno") as caught:
        do(*args)
    return errno.errorcode[caught.value.errno]


@simulated
def test_a_power_cut_keeps_what_was_synced_and_may_lose_all_else(kernel):
    fd = create("/a", b"old")
    os.fsync(fd)
    sync_folder()
    os.pwrite(fd, b"newer", 0)
    create("/b", b"lost")
    assert (os.listdir("/"), read("/a"), read("/b")) == (["a", "b"], b"newer", b"lost")
    kernel.disk.cut(Chance(**NOTHING))
    assert (os.listdir("/"), read("/a")) == (["a"], b"old")


@simulated
def test_a_power_cut_may_also_keep_what_was_not_synced(kernel):
    os.fsync(create("/a", b"old"))
    os.mkdir("/f")
    os.rename("/a", "/f/b")
    create("/f/c", b"new")
    kernel.disk.cut(Chance())
    assert (os.listdir("/"), os.listdir("/f"), read("/f/b"), read("/f/c")) == (["f"], ["b", "c"], b"old", b"new")


@simulated
def test_a_power_cut_may_keep_names_without_content_and_content_without_names(kernel):
    fd = create("/a", b"old")
    os.fsync(fd)
    sync_folder()
    create("/b", b"never written")
    os.pwrite(fd, b"new", 0)
    os.unlink("/a")
    kernel.disk.cut(Chance("names"))
    assert (os.listdir("/"), read("/b")) == (["b"], b"")
    os.pwrite(os.open("/b", os.O_RDWR), b"kept", 0)
    os.rename("/b", "/c")
    kernel.disk.cut(Chance("data"))
    assert (os.listdir("/"), read("/b")) == (["b"], b"kept")


@simulated
def test_a_power_cut_may_keep_the_size_of_a_file_without_its_content(kernel):
    fd = create("/a")
    sync_folder()
    os.posix_fallocate(fd, 0, 4)
    os.pwrite(fd, b"lost", 0)
    os.pwrite(fd, b"kept", 8)
    kernel.disk.cut(Chance(share=0.5, draws=[0.1, 0.9, 0.1]))
    assert read("/a") == b"\0\0\0\0\0\0\0\0kept"


@simulated
def test_a_power_cut_tears_a_write_between_sectors_and_nowhere_else(kernel):
    fd = create("/a", b"o" * 4 * SECTOR)
    os.fsync(fd)
    sync_folder()
    os.pwrite(fd, b"n" * 3 * SECTOR, 100)
    kernel.disk.cut(Chance("torn", draws=[0.0, 0.9, 0.1, 0.9, 0.1]))
    old, new = b"o" * SECTOR, b"n" * SECTOR
    assert read("/a") == old + new + old + b"n" * 100 + b"o" * (SECTOR - 100)


@simulated
def test_a_journal_keeps_the_order_of_names_across_folders(kernel):
    os.mkdir("/f")
    sync_folder()
    create("/a")
    create("/f/b")
    create("/c")
    sequence = [op.call for op in kernel.disk.root.pending]
    kernel.disk.cut(Chance("journal", end=sequence[-1] - 1))
    assert (sorted(os.listdir("/")), os.listdir("/f")) == (["a", "f"], ["b"])


@simulated
def test_a_rename_is_kept_or_lost_as_a_whole(kernel):
    os.fsync(create("/a", b"a"))
    os.fsync(create("/b", b"b"))
    sync_folder()
    os.rename("/a", "/b")
    kernel.disk.cut(Chance(**NOTHING))
    assert (read("/a"), read("/b")) == (b"a", b"b")
    os.rename("/a", "/b")
    kernel.disk.cut(Chance())
    assert (os.listdir("/"), read("/b")) == (["b"], b"a")


@simulated
def test_a_move_to_another_folder_is_safe_at_once(kernel):
    os.mkdir("/f")
    os.fsync(create("/a", b"a"))
    sync_folder()
    os.rename("/a", "/f/b")
    kernel.disk.cut(Chance(**NOTHING))
    assert (os.listdir("/"), os.listdir("/f"), read("/f/b")) == (["f"], ["b"], b"a")


@simulated
def test_modes_and_owners_are_safe_at_once(kernel):
    fd = create("/a")
    os.fsync(fd)
    sync_folder()
    os.fchmod(fd, 0o640)
    os.fchown(fd, 5678, 1234)
    kernel.disk.cut(Chance(**NOTHING))
    status = os.stat("/a")
    assert (oct(status.st_mode), status.st_uid, status.st_gid, status.st_nlink) == ("0o100640", 5678, 1234, 1)


@simulated
def test_where_folders_cannot_be_synced_names_are_safe_at_once(kernel):
    kernel.unsupported, kernel.disk.keeps_names = {"sync-folder"}, True
    create("/a", b"lost")
    assert refusal(sync_folder) == "ENOTSUP"
    kernel.disk.cut(Chance(**NOTHING))
    assert (os.listdir("/"), read("/a")) == (["a"], b"")


@simulated
def test_a_failed_fsync_loses_data_that_no_later_fsync_brings_back(kernel):
    fd = create("/a", b"old old old")
    os.fsync(fd)
    sync_folder()
    os.pwrite(fd, b"new", 0)
    os.pwrite(fd, b"new", 8)
    kernel.chance = Chance(draws=[0.9, 0.1])
    assert refusal(os.fsync, fd) == "EIO"
    assert read("/a") == b"new old new"
    os.fsync(fd)
    os.pwrite(fd, b"mid", 4)
    os.fsync(fd)
    assert read("/a") == b"new mid new"
    kernel.disk.cut(Chance())
    assert read("/a") == b"old mid new"


@simulated
def test_a_failed_fsync_of_a_folder_loses_names_until_it_is_synced_again(kernel):
    create("/a")
    kernel.chance = Chance(draws=[0.9])
    assert refusal(sync_folder) == "EIO"
    create("/b")
    sync_folder()
    kernel.disk.cut(Chance(**NOTHING))
    assert os.listdir("/") == ["a", "b"]


@simulated
def test_a_full_disk_gives_a_short_write_and_then_none(kernel):
    kernel.disk.size = 1000
    fd = create("/a", b"a" * 600)
    assert os.pwrite(fd, b"b" * 600, 500) == 500
    assert refusal(os.pwrite, fd, b"c", 1000) == "ENOSPC"
    assert refusal(os.pwrite, fd, b"c" * 10, 1005) == "ENOSPC"
    assert refusal(os.ftruncate, fd, 1001) == "ENOSPC"
    assert refusal(os.posix_fallocate, fd, 900, 101) == "ENOSPC"
    assert os.pwrite(fd, b"d" * 1000, 0) == 1000
    assert os.statvfs("/").f_bavail == 0
    other = create("/b")
    os.unlink("/a")
    assert os.pwrite(other, b"e" * 1001, 0) == 1000


@simulated
def test_what_is_reserved_can_be_written_to_a_full_disk(kernel):
    kernel.disk.size = 1000
    fd = create("/a")
    os.posix_fallocate(fd, 0, 1000)
    assert refusal(create, "/b", b"b") == "ENOSPC"
    assert os.pwrite(fd, b"a" * 1000, 0) == 1000


@pytest.mark.parametrize("end", ["unlocked", "closed", "ended", "cut"])
@simulated
def test_a_lock_ends_with_its_holder(kernel, end):
    create("/lock")
    sync_folder()
    first, second = kernel.current, Process(pid=2)
    fd = os.open("/lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    kernel.current = second
    other = os.open("/lock", os.O_RDWR)
    assert refusal(fcntl.flock, other, fcntl.LOCK_EX | fcntl.LOCK_NB) == "EAGAIN"
    # Which unlocks nothing.
    fcntl.flock(other, fcntl.LOCK_UN)
    assert refusal(fcntl.flock, other, fcntl.LOCK_EX | fcntl.LOCK_NB) == "EAGAIN"
    kernel.current = first
    {
        "unlocked": lambda: fcntl.flock(fd, fcntl.LOCK_UN),
        "closed": lambda: os.close(fd),
        "ended": lambda: kernel.close_all(first),
        "cut": lambda: kernel.disk.cut(Chance()),
    }[end]()
    kernel.current = second
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if end == "ended":
        assert refusal(os.fstat, fd) == "EBADF"


def test_a_kernel_hides_the_calls_that_a_system_lacks():
    class Other(Kernel):
        hidden = ("posix_fallocate", "O_PATH", "missing everywhere")

    with Other().installed():
        assert not hasattr(os, "posix_fallocate")
        assert not hasattr(os, "O_PATH")
    assert os.O_PATH == 0o10000000
    assert os.posix_fallocate.__module__ == "posix"


@pytest.mark.parametrize(
    ("what", "number", "call"),
    [
        ("link", "ENOTSUP", lambda _: os.link("/a", "/b", follow_symlinks=False)),
        ("reserve", "ENOTSUP", lambda fd: os.posix_fallocate(fd, 0, 10)),
        ("xattr", "ENOTSUP", lambda fd: os.listxattr(fd)),  # noqa: PLW0108 - the simulated one
        ("xattr", "ENOTSUP", lambda fd: os.getxattr(fd, "user.a")),
        ("xattr", "ENOTSUP", lambda fd: os.setxattr(fd, "user.a", b"")),
        ("xattr", "ENOTSUP", lambda fd: os.removexattr(fd, "user.a")),
        ("flock", "ENOLCK", lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)),
        ("sync-folder", "ENOTSUP", lambda _: sync_folder()),
    ],
)
@simulated
def test_a_kernel_refuses_what_a_file_system_does_not_support(kernel, what, number, call):
    fd = create("/a")
    kernel.unsupported = frozenset({what})
    assert refusal(call, fd) == number
    os.fsync(fd)


@simulated
def test_only_the_current_process_is_simulated_and_what_the_system_tells_of_itself_is_real(kernel, tmp_path):
    fd = create("/a")
    assert os.stat("/proc/self/exe").st_size > 0
    assert (os.getpid(), os.geteuid()) == (1, 0)
    kernel.current = None
    assert os.getpid() > 1
    real = os.open(tmp_path / "real", os.O_RDWR | os.O_CREAT)
    assert real < fd
    kernel.current = Process(User(5678, 5678))
    os.close(real)
    assert refusal(os.stat, tmp_path) == "ENOENT"
    assert refusal(os.open, "/a", os.O_RDONLY) == "EACCES"


@pytest.mark.parametrize(("level", "mode", "results"), [
    (0, 0o1777, ["EACCES", "done", "done"]),
    (1, 0o1777, ["EACCES", "EACCES", "EACCES"]),
    (1, 0o1775, ["ELOOP", "done", "done"]),
    (2, 0o1775, ["ELOOP", "done", "EACCES"]),
    (1, 0o777, ["ELOOP", "done", "done"]),
])  # fmt: skip
@simulated
def test_a_system_may_keep_users_from_links_and_files_of_others_in_sticky_folders(kernel, level, mode, results):
    disk, mallory, alice = kernel.disk, User(1234, 1234), User(5678, 100)
    disk.protected_symlinks, disk.protected_regular = min(level, 1), level
    folder = disk.create(ROOT, disk.root, "f", stat.S_IFDIR | mode)
    folder.gid = 100
    os.close(create("/a", b"a"))
    os.chmod("/a", 0o644)
    for name, inode_mode, target in (("link", stat.S_IFLNK | 0o777, "/a"), ("file", stat.S_IFREG | 0o666, None)):
        disk.create(ROOT, folder, name, inode_mode, target).uid = mallory.uid
    kernel.current = Process(alice)

    def outcome(do, *args):
        try:
            do(*args)
        except OSError as error:
            return errno.errorcode[error.errno]
        return "done"

    assert [
        outcome(os.open, "/f/link", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW),
        outcome(os.stat, "/f/link"),
        outcome(os.open, "/f/file", os.O_RDWR | os.O_CREAT),
    ] == results
    assert refusal(lambda: os.link("/f/link", "/f/more", follow_symlinks=False)) == "EPERM"
    assert outcome(lambda: os.link("/f/file", "/f/more", follow_symlinks=False)) == "done"
    disk.protected_hardlinks = 0
    assert outcome(lambda: os.link("/f/link", "/f/most", follow_symlinks=False)) == "done"
