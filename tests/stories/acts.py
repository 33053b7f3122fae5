"""What other programs and users do in stories. Each act is done at once, when an event of its name strikes."""

import contextlib
import os

from disk import ROOT
from kernel import Process
from places import MALLORY, Foreign, SeenError, first_files, other_files

from gradtool.store.transaction.log import FORMAT, encode_step


def write(world, event):
    """Change a byte of a file, and set the date back, or not."""
    path, inode = _data(world, event.what)
    if inode is None:
        return
    with _as_user(world, ROOT):
        fd = os.open(path, os.O_RDWR)
        before = os.fstat(fd).st_mtime_ns
        at = len(inode.content) - 1 - 4 * (event.what % 60)
        byte = bytes([inode.content[at] ^ 0x01])
        os.pwrite(fd, byte, at)
        # A write, its date set back and another mode together are not noticed, as the pages say.
        if event.what % 2 and path not in world.private:
            os.utime(fd, ns=(before, before))
        os.fsync(fd)
    world.foreign.append(Foreign(world.calls, path, inode.number, (at, byte)))


def replace(world, event):
    """Put another file in the place of one: a copy from before, or something else."""
    path, inode = _data(world, event.what)
    if inode is None:
        return
    content = (first_files() if event.what % 3 == 0 else other_files())[path]
    with _as_user(world, ROOT), world.room():
        fd = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(fd, content, 0)
        os.fchmod(fd, inode.mode & 0o777)
        os.fchown(fd, inode.uid, inode.gid)
        os.fsync(fd)
        new = world.files[fd].inode
        os.replace(f"{path}.new", path)
        world.disk.sync(world.disk.tree()[path.rpartition("/")[0]])
    world.foreign.append(Foreign(world.calls, path, new.number, content))


def chmod(world, event):
    """Make a file private."""
    path, inode = _data(world, event.what)
    # A change that changes nothing looks like a write whose date was set back, as the pages say.
    is_written = any(done.path == path for done in world.foreign)
    if inode is not None and inode.mode & 0o777 != 0o600 and not is_written:
        with _as_user(world, ROOT):
            os.chmod(path, 0o600)
        world.private[path] = world.calls, inode.number


def stall(world, _event):
    """Stop the process for a while."""
    world.sleep(0.05)


def swap(world, event):
    """Let a name of a run, or of the data, lead to a secret of its user."""
    names = [path for path in world.disk.tree() if path.startswith("/w/") and path.count("/") > 2]
    names = [path for path in names if "/.gradtool-" in path] or names
    path = names[event.what % len(names)]
    with _hostile(world):
        os.rename(path, f"{path}-away")
        os.symlink(_secret_of(world, event), path)


def plant(world, event):
    """Add a link to a secret to a set, or put one where an output will be."""
    secret = _secret_of(world, event)
    places = ("/w/a/m-9.safetensors", "/w/out/m-0.safetensors", "/w/out/one.safetensors", "/w/new", "/w/states/s.json")
    path = places[event.what % len(places)]
    with _hostile(world):
        os.symlink(secret.rpartition("/")[0] if path == "/w/new" else secret, path)


def squat(world, event):
    """Take a name that a run is about to use."""
    for lock in [path for path in world.disk.tree() if path.endswith(".lock")]:
        name = lock.removesuffix(".lock") + ("-0.tmp", ".run", "-0.redo", "-1.tmp")[event.what % 4]
        with _hostile(world):
            if event.what % 3 == 0:
                os.mkdir(name)
            else:
                os.symlink(_secret_of(world, event), name)


def peek(world, _event):
    """Open what only its user may open."""
    tree = world.disk.tree()
    for path in [path for path in tree if path.endswith((".lock", ".redo")) and tree[path].uid != MALLORY.uid]:
        with _as_user(world, MALLORY), contextlib.suppress(OSError):
            os.open(path, os.O_RDONLY)
            raise SeenError(f"another user can open {path}")


def forge(world, event):
    """Leave a log of a run that was ready to put a file of Mallory's in the place of another, or a malformed one."""
    run, home = ".gradtool-0123456789ab", "/w/a"
    other = _secret_of(world, event).rpartition("/")[0] if event.what % 2 else "/w/b"
    name = "secret.safetensors" if event.what % 2 else "m-0.safetensors"
    facts = {"id": run, "format": FORMAT, "pid": 77, "host": "here", "boot": world.boot, "files": ["m-0.safetensors"]}
    was_hostile = world.is_hostile
    with _hostile(world):
        fd = os.open(f"{home}/{run}-0.tmp", os.O_RDWR | os.O_CREAT, 0o666)
        os.pwrite(fd, first_files()["/w/a/m-0.safetensors"], 0)
        inode = os.fstat(fd).st_ino
        moves = [[1, number, name, inode, None, None, None, None] for number in range(2)]
        content = encode_step(run=facts | {"folders": [os.path.relpath(other, home)]})
        content += encode_step(ready=[moves, [], None] if event.what % 4 else "no list")
        fd = os.open(f"{home}/{run}.run", os.O_RDWR | os.O_CREAT, 0o644)
        os.pwrite(fd, content, 0)
    # In a sticky folder, it stops nobody.
    world.is_hostile = was_hostile or world.sharing != "sticky"


ACTS = {act.__name__: act for act in (write, replace, chmod, stall, swap, plant, squat, peek, forge)}


def _data(world, number):
    """A file of the data, chosen by a number, if it is there."""
    tree = world.disk.tree()
    paths = [path for path in first_files() if path in tree and not tree[path].is_link]
    path = paths[number % len(paths)] if paths else None
    return path, tree.get(path)


def _secret_of(world, event):
    return f"/home/{world.names[event.task]}/secret.safetensors"


def _as_user(world, user):
    return world.as_process(Process(user, 99))


@contextlib.contextmanager
def _hostile(world):
    """Do something as Mallory, as far as that is allowed."""
    world.is_hostile = True
    with _as_user(world, MALLORY), contextlib.suppress(OSError):
        yield
