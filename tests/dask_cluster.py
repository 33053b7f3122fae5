"""Real Dask schedulers and workers on this machine, each a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from same_results import soon

_QUIET = {"DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": "false", "DASK_DISTRIBUTED__DASHBOARD__LINK": ""}


# The warning of a run that lost the first of two workers.
LOST = (
    "gradtool: warning: 1 of 2 workers was lost; its work was done again\n"
    "  hint: see their logs; fewer --threads and smaller shards need less memory\n"
)


class DaskCluster:
    """A scheduler, and the workers that are started one by one; used as a context manager, which ends all of them."""

    def __init__(self, folder, **settings):
        self.folder, self._settings = Path(folder), settings
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "scheduler.json"
        self.processes = []
        self.scheduler = None

    def __enter__(self):
        self.scheduler = self._start("scheduler", "--no-dashboard", "--port", "0", "--host", "127.0.0.1")
        assert soon(self.file.exists)
        return self

    def __exit__(self, *_):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes:
            process.wait()

    @property
    def options(self):
        return ["--engine", f"dask:{self.file}"]

    def worker(self, *, before=(), **env):
        """Start a worker, in an environment and perhaps by way of another command, and wait until it is known."""
        name = f"w{len(self.processes)}"
        process = self._start(
            "worker", "--no-nanny", "--nthreads", "1", "--no-dashboard", "--name", name, before=before, env=env
        )
        log = self.folder / f"{len(self.processes) - 1}.log"
        assert soon(lambda: b"Starting established connection" in log.read_bytes()), log.read_text()
        return process

    def retire(self, process):
        """End a worker, and wait until the scheduler knows that it has."""
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        process.wait()

    def run(self, *arguments, env=None, **options):
        """Run the real command on the cluster."""
        return subprocess.run(
            self.command(*arguments), check=False, capture_output=True, text=True, timeout=120,
            env=os.environ | (env or {}), **options,
        )  # fmt: skip

    def command(self, *arguments):
        return [sys.executable, "-P", "-m", "gradtool", *map(str, arguments), *self.options]

    def _start(self, kind, *arguments, before=(), env=None):
        log = (self.folder / f"{len(self.processes)}.log").open("wb")
        path = os.pathsep.join(filter(None, [(env or {}).get("PYTHONPATH"), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "distributed.cli.dask_" + kind, "--scheduler-file", self.file, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.folder,
            env=os.environ | _QUIET | self._settings | (env or {}) | {"PYTHONPATH": path},
        )
        log.close()
        self.processes.append(process)
        return process


def is_stopped(process):
    """Whether a process has been stopped by a signal."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def waits(process, seconds):
    """Whether a process ends in time; how it did, and what it printed."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def without_notes(err):
    """What a command printed on stderr, but for the waits: whether they take long depends on the machine."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.startswith("gradtool: note: "))


def wall(seconds):
    """A moment by the clock, to measure how long something took."""
    return time.monotonic() + seconds
