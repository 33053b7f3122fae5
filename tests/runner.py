"""The real command in a forked process: all of it but the start of Python, which takes ten times as long."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from schema import check_printed

_SERVER = Path(__file__).with_name("forkserver.py")


class Answer(NamedTuple):
    """How a command ended.

    `steps` are the calls that it made to change the disk, counted where a fault is given; `peak` is its memory in KiB,
    on macOS in bytes.
    """

    code: int
    out: str
    err: str
    steps: int
    peak: int


def run(*argv, fault="", strike_after=None, number=signal.SIGKILL, env=None, cwd=None):
    """Run a command, and strike it with a signal after so many seconds, if any are given."""
    server, before = _server()
    now = os.environ | {"GRADTOOL_FAULT": fault} | (env or {})
    changed = {name: value for name, value in now.items() if before.get(name) != value}
    changed |= {name: None for name in before if name not in now}
    request = {"argv": list(map(str, argv)), "env": changed, "cwd": str(Path.cwd() if cwd is None else cwd)}
    request |= {"strike_after": strike_after, "signal": number}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = Answer(*json.loads(server.stdout.readline()))
    check_printed(argv, answer.out)
    return answer


@functools.cache
def _server():
    """The process that forks, and the environment that it has."""
    before = dict(os.environ)
    server = subprocess.Popen(
        [sys.executable, "-P", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=before | {"OPENBLAS_NUM_THREADS": "1"},
        text=True,
    )
    atexit.register(server.communicate)
    return server, before
