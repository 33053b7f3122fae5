"""The real command run as one user, and what another user does to it at a set instant.

Everything is forked from the process of the tests, which must be root's: each child becomes the user that it is to be.
"""

import contextlib
import ctypes
import importlib
import os
import pkgutil
import signal
import sys
import traceback
import warnings
from typing import Any, NamedTuple

import safetensors
import typer
from crashes import KILLED

import gradtool
from gradtool import __main__
from gradtool.store import fs

# Once, and not in every child, whose user may not be able to read where all this is installed.
for package in (typer, safetensors, gradtool):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            # What is made for other libraries does not load without them.
            with contextlib.suppress(ImportError, AssertionError):
                importlib.import_module(module.name)

# User IDs that no system is known to use.
ALICE, MALLORY = 5678, 1234
_PR_SET_DUMPABLE = 4


class Answer(NamedTuple):
    code: int
    out: str
    err: str


class At(NamedTuple):
    """What a user does before, or after, the nth call of a function."""

    where: Any
    name: str
    do: Any
    by: int = MALLORY
    nth: int = 1
    after: bool = False


def become(uid):
    """Be another user for good, without any right of the one before."""
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # As after an exec: what is in /proc/self is one's own.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.umask(0o022)


def run_as(uid, *argv, meanwhile=None, dies_at=None):
    """Run the command as a user; `dies_at` is the function, by its owner and name, at whose nth call it is killed."""
    out, err = os.memfd_create("out"), os.memfd_create("err")
    report = os.memfd_create("report")
    ask, asked = _pipe()
    told, tell = _pipe()
    neighbour = _fork(lambda: _wait_and_do(meanwhile, ask, (asked, told), tell, report)) if meanwhile else None
    child = _fork(lambda: _command(uid, argv, (out, err), (meanwhile, dies_at), (asked, told), (ask, tell)))
    for fd in (ask, asked, told, tell):
        os.close(fd)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if neighbour is not None:
        os.waitpid(neighbour, 0)
    *texts, done = [_content(fd) for fd in (out, err, report)]
    # A test of what happens at an instant that never comes would not be one.
    assert done == ("done" if meanwhile else ""), (done, texts)
    assert (code == KILLED) == (dies_at is not None), texts
    return Answer(code, *texts)


def as_user(uid, do):
    """Do something as a user."""
    report = os.memfd_create("report")
    os.waitpid(_fork(lambda: (become(uid), _reported(do, report))), 0)
    assert _content(report) == "done"


def _command(uid, argv, streams, instants, pipes, closed):
    meanwhile, dies_at = instants
    for fd in closed:
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, fd in enumerate(streams, 1):
        os.dup2(fd, number)
    # Those of pytest are not the process's.
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["gradtool", *map(str, argv)]
    os.environ["GRADTOOL_BACKEND"] = "cpu"
    fs.steps = iter(range(1, 1 << 30))
    if meanwhile is not None:
        asked, told = pipes
        _patch(*meanwhile[:2], meanwhile.nth, lambda: (os.write(asked, b"."), os.read(told, 1)), after=meanwhile.after)
    if dies_at is not None:
        _patch(*dies_at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    become(uid)
    __main__.main()


def _patch(where, name, nth, do, *, after=False):
    raw = vars(where)[name]
    original, calls = getattr(raw, "__func__", raw), iter(range(1, 1 << 30))

    def patched(*args, **kwargs):
        is_now = next(calls) == nth
        if is_now and not after:
            do()
        result = original(*args, **kwargs)
        if is_now and after:
            do()
        return result

    setattr(where, name, type(raw)(patched) if isinstance(raw, classmethod | staticmethod) else patched)


def _wait_and_do(meanwhile, ask, others, tell, report):
    for fd in others:
        os.close(fd)
    become(meanwhile.by)
    if os.read(ask, 1):
        _reported(meanwhile.do, report)
        os.write(tell, b".")
        # What it holds, such as locks, it holds until the command is over.
        os.read(ask, 1)


def _reported(do, report):
    try:
        do()
        os.write(report, b"done")
    except Exception:  # noqa: BLE001 - it is told to the test
        os.write(report, traceback.format_exc().encode())


def _pipe():
    ends = os.pipe()
    for fd in ends:
        os.set_inheritable(fd, True)
    return ends


def _fork(do):
    with warnings.catch_warnings():
        # Idle threads of libraries hold nothing that the child needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            do()
        finally:
            os._exit(99)
    return child


def _content(fd):
    text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
    os.close(fd)
    return text
