"""What crashed runs leave."""

import os
import traceback
import warnings
from unittest import mock

import numpy as np
from support import in_place, registered, write

from gradtool.store.io.channel import Channel
from gradtool.store.io.redolog import RedoLog
from gradtool.store.transaction.commit import Commit

ID = ".gradtool-0123456789ab"


def files_in(folder, count=2):
    return [write(folder / f"{i}.safetensors", {f"t{i}": np.ones(5, np.float32)}) for i in range(count)]


def crash(do):
    """Do something in a process that ends as soon as it is done, and leaves all as it is then."""
    with warnings.catch_warnings():
        # Idle threads of libraries hold nothing that the child needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            do()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def half_replaced(paths):
    """The files of a run that crashed when it was about to rename; their new content."""
    new = [b"n" * path.stat().st_size for path in paths]

    def replace_all():
        commit = Commit(registered(paths))
        for path, content in zip(paths, new, strict=True):
            commit.stage(path, len(content), path.stat()).path.write_bytes(content)
        with mock.patch.object(os, "replace", side_effect=lambda *_, **__: os._exit(0)):
            commit.put_in_place()
        raise AssertionError

    crash(replace_all)
    return new


def redo_log_of(log, paths, new):
    """Write to a redo log what files will hold."""
    channel = Channel(4, lambda nbytes: memoryview(bytearray(nbytes)))
    for number, (path, content) in enumerate(zip(paths, new, strict=True)):
        old = memoryview(path.read_bytes())
        log.add(channel, number, 0, old, memoryview(content), parts=[(0, len(content))])
    channel.close()


def half_changed(paths):
    """Files of which a run had changed the first in place when it crashed; their new content."""
    new = [b"overwritten" + path.read_bytes()[11:] for path in paths]

    def overwrite(*_):
        with paths[0].open("r+b") as file:
            file.write(new[0])
        os._exit(0)

    def change_all():
        commit, log = in_place(registered(paths), paths)
        redo_log_of(log, paths, new)
        with mock.patch.object(RedoLog, "apply", overwrite):
            commit.put_in_place()
        raise AssertionError

    crash(change_all)
    return new


def content_of(paths):
    return [path.read_bytes() for path in paths]
