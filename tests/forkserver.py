"""Runs the real command in one forked process after another, without the cost of starting Python each time.

A program of its own: it reads requests, one JSON object a line, on stdin, and answers each with one on stdout.
"""

import gc
import itertools
import json
import mmap
import os
import signal
import sys
import tempfile
import time

# More than any test lets a command run.
_TIMEOUT_SECONDS = 120


def unnamed():
    """A file without a name."""
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


class Steps:
    """Numbers the calls that change the disk, and shows the parent how many there were."""

    def __init__(self):
        self._numbers = itertools.count(1)
        self._made = mmap.mmap(-1, 1 << 16)

    def __next__(self):
        number = next(self._numbers)
        # A byte each: threads and signals may come in between.
        self._made[number] = 1
        return number

    def taken(self):
        """The number of the last call, and none for the next process."""
        last = self._made.rfind(b"\1")
        self._made[: last + 1] = bytes(last + 1)
        return max(last, 0)


def _child(request, out, err):
    signal.alarm(_TIMEOUT_SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(request["cwd"])
    for name, value in request["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv = ["gradtool", *request["argv"]]
    from gradtool.__main__ import main

    main()


def _serve():
    # What every run imports first, and nothing that starts a thread.
    import numpy  # noqa: F401, ICN001
    import safetensors  # noqa: F401

    import gradtool.backends.choose
    import gradtool.cli
    import gradtool.store.fs
    from gradtool import accumulate, clip, layernorm_backward, norm, recover, zero  # noqa: F401

    # The compiled kernels, or what takes their place.
    gradtool.backends.choose.choose("cpu")

    steps = gradtool.store.fs.steps = Steps()
    # So that collecting garbage does not copy all of this in every child.
    gc.disable()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        out, err = unnamed(), unnamed()
        child = os.fork()
        if child == 0:
            try:
                _child(request, out, err)
            finally:
                os._exit(99)
        if request["strike_after"] is not None:
            time.sleep(request["strike_after"])
            # A process that has ended already is not affected.
            os.kill(child, request["signal"])
        _, status, usage = os.wait4(child, 0)
        texts = []
        for fd in (out, err):
            texts.append(os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace"))
            os.close(fd)
        answer = [os.waitstatus_to_exitcode(status), *texts, steps.taken(), usage.ru_maxrss]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
