"""Where stories happen: users, systems, folders and the files that every story begins with."""

import functools
import stat
from typing import NamedTuple

import numpy as np
from disk import ROOT, Disk, User
from safetensors.numpy import save
from world import World

USERS = {"root": ROOT, "alice": User(1001, 1001), "bob": User(1002, 1002)}
# Who may do only what everybody may.
MALLORY = User(1234, 1234)
FOLDERS = ("/w/a", "/w/b", "/w/ln", "/w/states", "/w/out", "/w")
# A private file of each user.
SECRETS = {f"/home/{name}/secret.safetensors": user for name, user in USERS.items()}
SECRET = save({"secret": np.frombuffer(b"nobody else may read this".ljust(64), np.float32)})


class System(NamedTuple):
    """What one differs in: names that `os` lacks, and calls that are not supported."""

    hidden: tuple[str, ...] = ()
    unsupported: frozenset[str] = frozenset()


SYSTEMS = {
    "ext4": System(),
    "tmpfs": System(unsupported=frozenset({"xattr"})),
    "nfs": System(unsupported=frozenset({"xattr", "reserve"})),
    "no locks": System(unsupported=frozenset({"flock", "xattr"})),
    "no links": System(unsupported=frozenset({"link", "xattr", "reserve", "sync-folder"})),
    "macos": System(("posix_fallocate", "posix_fadvise", "listxattr", "getxattr", "setxattr", "removexattr")),
}
# The modes of folders and of the files in them.
SHARING = {
    "own": (0o755, 0o644),
    "private": (0o755, 0o600),
    "unlisted": (0o711, 0o644),
    "open": (0o777, 0o666),
    "sticky": (0o1777, 0o666),
}


class SeenError(AssertionError):
    """What nobody may open was opened."""


class Foreign(NamedTuple):
    """What another program did to a file at a call: the inode, and a byte at an offset or the new content."""

    call: int
    path: str
    inode: int
    what: object


class StoryWorld(World):
    """A world that remembers what the oracle asks: what other programs did, and what runs could know of it."""

    def __init__(self, *args, sharing="own", **named):
        super().__init__(*args, **named)
        self.sharing = sharing
        self.foreign = []
        # Writes of other programs that nobody could have noticed in time.
        self.excused = set()
        # Files that their owner made private: since when, and the inode then.
        self.private = {}
        # Another user did what that user may do, and data may be lost.
        self.is_hostile = False
        # The inodes of private files that no run is about.
        self.secrets = set()
        # The users of tasks, by number.
        self.names = {}
        # Those that make up the IDs of runs, by ID.
        self.runs = {}
        self._seen = {}
        self._decided = {}

    def os_stat(self, path, *, dir_fd=None, follow_symlinks=True):
        status = super().os_stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        self._see(status.st_ino)
        return status

    def _readable(self, fd):
        inode = super()._readable(fd)
        if inode.number in self.secrets and not self.is_quiet:
            raise SeenError(f"{self.files[fd].path} led to what its user has not named")
        self._see(inode.number)
        return inode

    def os_urandom(self, count):
        run = super().os_urandom(count)
        self.runs[run.hex()] = self.current.number
        return run

    def _see(self, number):
        if (self.foreign or self.private) and not self.is_quiet:
            self._seen[self.current.number, number] = self.calls

    def overwrites(self, inode, data=None):
        """Note, before a process overwrites a file, whether it could know that another program has changed it."""
        if self.is_quiet:
            return
        task = self.current.number
        if data is not None and (b'{"ready":' in data or b'{"taken":' in data):
            # From here on, files that are written in place are not looked at any more.
            self._decided[task] = dict(self._seen)
        seen = self._seen if data is None else self._decided.get(task, self._seen)
        last_look = seen.get((task, inode.number), -1)
        self.excused |= {done for done in self.foreign if done.inode == inode.number and last_look < done.call}
        for path, (call, number) in list(self.private.items()):
            if number == inode.number and last_look < call:
                del self.private[path]


@functools.cache
def first_files():
    """The files that every story begins with, by path."""
    chance = np.random.default_rng(0)

    def tensors(names, shape=90):
        return {name: chance.standard_normal(shape).astype(np.float32) for name in names}

    files = {}
    for number in range(2):
        names = [f"t{number}.{k}" for k in range(2)]
        files[f"/w/a/m-{number}.safetensors"] = save(tensors(names), {"n": "5", "pad": "x" * 40})
        files[f"/w/b/m-{number}.safetensors"] = save(tensors(names), {"n": "3"})
        shapes = {"Y_grad": (4, 40), "X": (4, 40), "X_grad": (4, 40)} | dict.fromkeys(
            ("scale", "scale_grad", "bias_grad"), (40,)
        )
        layer = [tensors([f"b{number}.{name}"], shape) for name, shape in shapes.items()]
        files[f"/w/ln/m-{number}.safetensors"] = save({name: values for one in layer for name, values in one.items()})
    files["/w/one.safetensors"] = save(tensors(["t0.0", "t1.1"]))
    return files


@functools.cache
def other_files():
    """What other programs put in the places of these."""
    files = {path: bytearray(content) for path, content in first_files().items()}
    for content in files.values():
        content[-6] ^= 0x40
    return {path: bytes(content) for path, content in files.items()}


def world_with(files, seed=0, system="ext4", sharing="own", restless=0.0, owner=ROOT):
    """Make a world whose disk has those files."""
    world = StoryWorld(seed, Disk(), restless, sharing=sharing)
    world.hidden, world.unsupported = SYSTEMS[system]
    disk, (folder_mode, file_mode) = world.disk, SHARING[sharing]
    disk.keeps_names = "sync-folder" in world.unsupported
    folders = {"": disk.root}

    def folder_at(path, mode, user):
        if path not in folders:
            above, _, name = path.rpartition("/")
            folders[path] = disk.create(ROOT, folder_at(above, mode, user), name, stat.S_IFDIR | mode)
            folders[path].uid, folders[path].gid = user.uid, user.gid
        return folders[path]

    def put(path, mode, user, content):
        folder, _, name = path.rpartition("/")
        file = disk.create(ROOT, folders[folder], name, stat.S_IFREG | mode)
        disk.write(file, 0, content)
        file.uid, file.gid = user.uid, user.gid
        return file.number

    for path in [*FOLDERS, *(path.rpartition("/")[0] for path in files)]:
        folder_at(path, folder_mode, owner)
    for path, content in files.items():
        put(path, file_mode, owner, content)
    folder_at("/home", 0o755, ROOT)
    for path, user in SECRETS.items():
        folder_at(path.rpartition("/")[0], 0o700, user)
        world.secrets.add(put(path, 0o600, user, SECRET))
    disk.settle()
    return world


def state_of(world):
    """The content of every file of the data, by path."""
    return tuple(
        (path, bytes(inode.content))
        for path, inode in sorted(world.disk.tree().items())
        if inode.content is not None and path.startswith("/w/") and "/.gradtool-" not in path
    )


def left_in(world):
    """What runs have left."""
    return [path for path, inode in world.disk.tree().items() if "/.gradtool-" in path and inode.uid != MALLORY.uid]
