"""Folders that two users can reach, and what each may do there."""

import os

import numpy as np
import pytest
from support import write
from users import ALICE, MALLORY, run_as

from gradtool.store.fs import Folder
from gradtool.store.io.channel import Channel
from gradtool.store.transaction.log import FORMAT, HOST, encode_step

ID = ".gradtool-0123456789ab"
# No process has it: it is beyond what the system gives.
DEAD = (1 << 31) - 1
RUNNERS = pytest.mark.parametrize("runner", [0, ALICE], ids=["root", "alice"])


def folder_of(uid, path, mode):
    path.mkdir()
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def grads(uid, path, mode=0o644, seed=1):
    """A file of gradients whose norm is far above 1."""
    rng = np.random.default_rng(seed)
    write(path, {f"t{seed}.{k}": rng.standard_normal(300 + k).astype(np.float32) for k in range(2)})
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def several(uid, folder, count=3, mode=0o644):
    return [grads(uid, folder / f"{number}.safetensors", mode, number) for number in range(count)]


def state(folder):
    """All about what is in a folder that a run which is to leave it alone could change."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[path] = content, status.st_mode, status.st_uid, status.st_gid, status.st_ino, status.st_mtime_ns
    return found


def left_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".gradtool-"))


def told_once(answer, *words):
    """That the answer is exit code 5 with one error, which has the words, or whose hint has them."""
    assert answer.code == 5, answer
    said = answer.err.replace("\n  hint: ", "; ").splitlines()
    lines = [line for line in said if line.startswith("gradtool: error: ")]
    assert len(lines) == 1, answer
    assert "Traceback" not in answer.err
    for word in words:
        assert word in lines[0], answer


def log_bytes(*steps, names=(), **facts):
    run = {"id": ID, "format": FORMAT, "pid": DEAD, "host": HOST, "boot": "", "files": list(names)} | facts
    return b"".join([encode_step(run=run), *(encode_step(**step) for step in steps)])


def forge(path, content, uid=MALLORY, mode=0o644):
    path.write_bytes(content)
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def only(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


# When it is killed, such a run has changed the first of three files: of those, each has a block, which is saved in the
# redo log, and later in the file.
HALF_CHANGED, HALF_RENAMED = (Channel, "write", 5), (Folder, "rename", 2)


def crash(folder, way="replace", runner=ALICE):
    """Kill a run when it has changed the first of three files and not the last; what the files held before."""
    paths = sorted(folder.glob("*.safetensors"))
    old = [path.read_bytes() for path in paths]
    arguments = ["clip", folder, "--max-norm", "1", "--write", way, "--threads", "1"]
    run_as(runner, *arguments, dies_at=HALF_CHANGED if way == "inplace" else HALF_RENAMED)
    assert [path.read_bytes() == before for path, before in zip(paths, old, strict=True)] == [False, True, True]
    return old
