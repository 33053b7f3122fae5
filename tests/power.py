"""A disk that loses power: what the store does to the real one is recorded, and played again up to a cut.

`Recorder` writes down every call that changes a file or a folder, as it is made. `Disk` is a file system that promises
no more than POSIX does, and that each call which changes a folder is done as a whole or not at all:

- What was written to a file, and its size, are safe after an fsync or fdatasync of that file; its time after an fsync.
- A name is safe after an fsync of its folder, and of that only: the file's own does nothing for it.
- Of everything else any part may be lost and any part may be there, in whatever order it was done: a later write
  without an earlier one, some sectors of a write, a file's size without its content (which is zeros then), the new
  name of a file without its content.
- A sector is written as a whole or not at all.

It knows nothing about gradtool.
"""

import contextlib
import itertools
import os
import random
import shutil
from pathlib import Path
from typing import NamedTuple
from unittest import mock

_SECTOR = 512
# Calls that take a name, and may take the folder that it is in.
_NAMING = ("open", "mkdir", "rmdir", "link", "unlink", "replace")
_ROOT = 0
# Times are whole hours: what matters is by which run a file was changed, and not when in it.
_LONG_AGO = 450_000
_HOUR_NS = 3600 * 10**9


class File(NamedTuple):
    content: bytes
    hour: int


class Op(NamedTuple):
    """A part of a call that is on the disk or is not: `kind` is "name", "size", "grow", "data" or "time"."""

    key: int
    kind: str
    what: object
    call: int = -1


class Sync(NamedTuple):
    """A call that makes safe what was done to a file or a folder."""

    key: int
    kinds: tuple[str, ...] = ("name", "size", "grow", "data", "time")


class Call(NamedTuple):
    """What is recorded of a call: what it changes, and the file or folder that it makes, if it does."""

    ops: tuple[Op, ...]
    made: tuple[int, File | dict] | None = None


class Disk:
    """What is safe, by number: files, and folders as names to numbers; and what is `pending`, oldest first."""

    def __init__(self, inodes):
        self.inodes = inodes
        self.pending = []
        self.hour = _LONG_AGO + 1
        self._calls = 0

    def copy(self):
        other = Disk(dict(self.inodes))
        other.pending, other.hour, other._calls = list(self.pending), self.hour, self._calls
        return other

    def do(self, call):
        """Do what was recorded."""
        self._calls += 1
        if isinstance(call, Sync):
            safe, left = [], []
            for op in self.pending:
                (safe if op.key == call.key and op.kind in call.kinds else left).append(op)
            self.inodes, self.pending = self.after(safe).inodes, left
            return
        if call.made:
            key, inode = call.made
            self.inodes[key] = inode._replace(hour=self.hour) if isinstance(inode, File) else inode
        for op in call.ops:
            self.pending.append(op._replace(call=self._calls, what=self.hour if op.kind == "time" else op.what))

    def after(self, survivors):
        """The disk after a cut that these operations survived; they are among those that are pending."""
        inodes = dict(self.inodes)
        for op in survivors:
            inodes[op.key] = _changed(inodes[op.key], op)
        after = Disk(inodes)
        after.hour = self.hour + 1
        return after

    def cuts(self, seed, count):
        """What may survive a cut now: the cases that are easy to get wrong, and `count` that chance makes."""
        everything = self.pending
        names = [op for op in everything if op.kind == "name"]
        others = [op for op in everything if op.kind != "name"]
        yield from ([], everything, names, others)
        for call in dict.fromkeys(op.call for op in everything):
            yield [op for op in everything if op.call != call]
            yield [op for op in everything if op.call == call]
        # A journal of the folders keeps their order.
        for end in range(1, len(names)):
            yield names[:end]
            yield [op for op in everything if op.kind != "name" or op in names[:end]]
        rng = random.Random(seed)  # noqa: S311 - the same states every time
        for number in range(count if len(everything) > 1 else 0):
            share = rng.choice((0.2, 0.5, 0.8))
            # Whole calls, and then parts of them.
            group = [op.call if number % 2 else place for place, op in enumerate(everything)]
            alive = {one for one in dict.fromkeys(group) if rng.random() < share}
            yield [op for place, op in enumerate(everything) if group[place] in alive]

    def tree(self, key=_ROOT, at=""):
        """What can be found: path to number, a folder before what is in it."""
        found = {}
        for name, other in sorted(self.inodes[key].items()):
            found[at + name] = other
            if isinstance(self.inodes[other], dict):
                found |= self.tree(other, f"{at}{name}/")
        return found

    def fingerprint(self):
        return tuple(
            (path, key, None if isinstance(inode := self.inodes[key], dict) else inode)
            for path, key in self.tree().items()
        )


def _changed(inode, op):
    if op.kind == "name":
        return {name: key for name, key in (inode | op.what).items() if key is not None}
    if op.kind == "time":
        return inode._replace(hour=op.what)
    content = inode.content
    if op.kind == "size":
        content = content[: op.what].ljust(op.what, b"\0")
    elif op.kind == "grow":
        content = content.ljust(op.what, b"\0")
    else:
        # What lies behind the end cannot be seen.
        begin, data = op.what
        content = (
            (content[:begin] + data + content[begin + len(data) :])[: len(content)] if begin < len(content) else content
        )
    return inode._replace(content=content)


class Cut(NamedTuple):
    """A cut after so many calls, which may be all of them; what was not safe, what of that survived, and the disk."""

    calls: int
    is_last: bool
    pending: list[Op]
    survivors: list[Op]
    disk: Disk

    def __str__(self):
        names = {key: path for path, key in self.disk.after(self.pending).tree().items()}
        lines = [f"power cut after call {self.calls}; what was not safe then:"]
        for op in self.pending:
            fate = "survived" if op in self.survivors else "LOST"
            lines.append(f"{fate:>8} {op.call:3} {names.get(op.key, '.')} {op.kind} {str(op.what)[:90]}")
        return "\n  ".join(lines)


def cuts(disk, calls, count, seen=None, at=None):
    """Every disk that a cut may leave after each of the calls, or after those with the numbers that are given.

    Not those that were `seen`, but for the last.
    """
    disk, seen = disk.copy(), set() if seen is None else seen
    for number, call in enumerate(calls, 1):
        disk.do(call)
        is_last = number == len(calls)
        if at is not None and number not in at:
            continue
        for survivors in disk.cuts(number, count):
            after = disk.after(survivors)
            fingerprint = is_last, after.fingerprint()
            if fingerprint not in seen:
                seen.add(fingerprint)
                yield Cut(number, is_last, disk.pending, survivors, after)


class Place:
    """A real folder that can be made to look like a `Disk`.

    All files stay the same files, by inode and all: a cut does not change that either.
    """

    def __init__(self, root, vault):
        self.root, self._vault = root, vault
        vault.mkdir()
        inodes, self._keys, self._numbers = {}, {}, itertools.count()
        for path in (root, *sorted(root.rglob("*"))):
            key = next(self._numbers)
            self._keys[_identity(path)] = key
            if path.is_dir():
                inodes[key] = {}
            else:
                inodes[key] = File(path.read_bytes(), _LONG_AGO)
                os.utime(path, ns=(_LONG_AGO * _HOUR_NS,) * 2)
                os.link(path, vault / str(key))
            if path != root:
                inodes[self._keys[_identity(path.parent)]][path.name] = key
        self.disk = Disk(inodes)

    def show(self, disk):
        """Make the real folder what the disk has."""
        shutil.rmtree(self.root)
        self.root.mkdir()
        self._keys, shown = {_identity(self.root): _ROOT}, {}
        for name, key in disk.tree().items():
            path, inode = self.root / name, disk.inodes[key]
            if isinstance(inode, dict):
                path.mkdir()
            elif key in shown:
                os.link(shown[key], path)
            else:
                kept = self._vault / str(key)
                if kept.exists():
                    os.link(kept, path)
                path.write_bytes(inode.content)
                os.utime(path, ns=(inode.hour * _HOUR_NS,) * 2)
                shown[key] = path
            self._keys[_identity(path)] = key

    def record(self, command):
        """What a command does to the folder: the calls."""
        recorder = Recorder(self._keys, self._numbers, self._vault)
        with recorder.recording():
            command()
        return recorder.calls

    def files(self):
        return {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


def _identity(path_or_fd):
    status = os.stat(path_or_fd)  # noqa: PTH116 - a descriptor has no Path
    return status.st_dev, status.st_ino


class Recorder:
    """Stands before the system's calls, makes each, and writes it down; `keys` are the inodes that it looks at.

    Files that are made get a second name in the vault, so that their inodes last.
    """

    def __init__(self, keys, numbers, vault):
        self.calls = []
        self._keys, self._numbers, self._vault = keys, numbers, vault
        self._link = os.link

    @contextlib.contextmanager
    def recording(self):
        with contextlib.ExitStack() as stack:
            for name in (one.removeprefix("_os_") for one in dir(self) if one.startswith("_os_")):
                if hasattr(os, name):
                    stack.enter_context(mock.patch.object(os, name, self._wrapped(name)))
            yield

    def _wrapped(self, name):
        real, note = getattr(os, name), getattr(self, f"_os_{name}")

        def wrapped(*args, **options):
            # A name is looked up in a folder that is held open, if there is one.
            within = {options[key] for key in ("dir_fd", "src_dir_fd", "dst_dir_fd") if options.get(key) is not None}
            if within and name in _NAMING:
                (fd,) = within
                folder = Path(f"/proc/self/fd/{fd}").readlink()
                args = tuple(str(folder / one) if isinstance(one, str) else one for one in args)
                options = {key: one for key, one in options.items() if "dir_fd" not in key}
            # Which file has a name is not known any more after a rename.
            before = self._key(args[0])
            result = real(*args, **options)
            note(before, result, *args)
            return result

        return wrapped

    def _key(self, path_or_fd):
        try:
            return self._keys.get(_identity(path_or_fd))
        except OSError:
            return None

    def _note(self, *ops, made=None):
        if all(op.key is not None for op in ops):
            self.calls.append(Call(ops, made))

    def _name(self, path, key):
        return Op(self._key(Path(path).parent), "name", {Path(path).name: key})

    def _made(self, path, inode):
        parent = self._key(Path(path).parent)
        if parent is not None:
            key = self._keys[_identity(path)] = next(self._numbers)
            if isinstance(inode, File):
                self._link(path, self._vault / str(key))
            self._note(self._name(path, key), made=(key, inode))

    def _wrote(self, key, begin, data):
        sectors = range((begin // _SECTOR + 1) * _SECTOR, begin + len(data), _SECTOR)
        edges = [begin, *sectors, begin + len(data)]
        parts = [Op(key, "data", (a, data[a - begin : b - begin])) for a, b in itertools.pairwise(edges)]
        self._note(Op(key, "grow", begin + len(data)), *parts, Op(key, "time", None))

    def _os_open(self, _key, _fd, path, flags, *_mode):
        assert not flags & os.O_TRUNC
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            self._made(path, File(b"", 0))

    def _os_mkdir(self, _key, _none, path, *_mode):
        self._made(path, {})

    def _os_rmdir(self, _key, _none, path, *_mode):
        self._note(self._name(path, None))

    def _os_pwritev(self, key, count, _fd, views, begin):
        self._wrote(key, begin, b"".join(views)[:count])

    def _os_ftruncate(self, key, _none, _fd, size):
        self._note(Op(key, "size", size), Op(key, "time", None))

    def _os_posix_fallocate(self, key, _none, _fd, begin, length):
        self._note(Op(key, "grow", begin + length), Op(key, "time", None))

    def _os_utime(self, key, _none, _fd):
        self._note(Op(key, "time", None))

    def _os_fsync(self, key, _none, _fd):
        self.calls.append(Sync(key))

    def _os_fdatasync(self, key, _none, _fd):
        self.calls.append(Sync(key, ("size", "grow", "data")))

    def _os_link(self, key, _none, _path, name):
        self._note(self._name(name, key))

    def _os_unlink(self, _key, _none, path):
        self._note(self._name(path, None))

    def _os_replace(self, key, _none, path, target):
        assert Path(path).parent == Path(target).parent
        names = {Path(path).name: None, Path(target).name: key}
        self._note(Op(self._key(Path(path).parent), "name", names))
