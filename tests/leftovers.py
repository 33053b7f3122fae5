"""What a crashed run leaves, made by hand."""

import os

import numpy as np
from support import in_place, registered, write

from gradtool.store.transaction.replace import Replacement

ID = ".gradtool-0123456789ab"


def files_in(folder, count=2):
    return [write(folder / f"{i}.safetensors", {f"t{i}": np.ones(5, np.float32)}) for i in range(count)]


def die(run):
    """What is left of a run when its process ends: everything but the lock."""
    os.close(run._lock)


def half_replaced(paths):
    """The files of a run that died when it was about to rename; their new content."""
    run = registered(paths)
    replacement = Replacement(run)
    for path in paths:
        replacement.stage(path, path.stat().st_size, path.stat()).path.write_bytes(b"n" * path.stat().st_size)
    run.append(moves=[replacement._move(staged) for staged in replacement._staged])
    die(run)
    return [b"n" * path.stat().st_size for path in paths]


def half_changed(paths):
    """Files that a run overwrote half of in place, and died; their old content."""
    old = [path.read_bytes() for path in paths]
    run = registered(paths)
    undo_log = in_place(run, paths).__enter__().undo_log()
    for number, content in enumerate(old):
        new = b"overwritten" + content[11:]
        undo_log.save(number, 0, memoryview(content), memoryview(new))
    for path in paths:
        with path.open("r+b") as file:
            file.write(b"overwritten")
    undo_log.close()
    die(run)
    return old


def content_of(paths):
    return [path.read_bytes() for path in paths]
