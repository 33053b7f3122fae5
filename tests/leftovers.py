"""What crashed runs leave."""

import os
import traceback
import warnings
from unittest import mock

import numpy as np
from support import in_place, registered, write

from gradtool.store.transaction.replace import Replacement

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
        replacement = Replacement(registered(paths))
        for path, content in zip(paths, new, strict=True):
            replacement.stage(path, len(content), path.stat()).path.write_bytes(content)
        with mock.patch.object(os, "replace", side_effect=lambda *_, **__: os._exit(0)):
            replacement.commit()
        raise AssertionError

    crash(replace_all)
    return new


def half_changed(paths):
    """Files that a run overwrote half of in place before it crashed; their old content."""
    old = [path.read_bytes() for path in paths]

    def overwrite():
        undo_log = in_place(registered(paths), paths).__enter__().undo_log()
        for number, (path, content) in enumerate(zip(paths, old, strict=True)):
            new = b"overwritten" + content[11:]
            undo_log.keep(number, 0, memoryview(content))
            undo_log.seal(memoryview(new))
            with path.open("r+b") as file:
                file.write(b"overwritten")

    crash(overwrite)
    return old


def content_of(paths):
    return [path.read_bytes() for path in paths]
