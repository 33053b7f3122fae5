"""Workers and schedulers that are hostile or freeze, on real Dask: the command runs nothing of theirs, and ends."""

import io
import signal
import subprocess
from unittest import mock

import numpy as np
import pytest
from same_results import soon
from support import sample, snapshot, write_index

pytest.importorskip("distributed", reason="Dask is not installed; pip install '.[test-dask]'")

from dask_cluster import LOST, DaskCluster, is_stopped, without_notes
from distributed.core import error_message

from gradtool.engines.cluster import dask

# Makes a file where it is unpickled, unless that is the process that pickled it: Dask tries what it sends.
EVIL = """
import os, pickle
class Evil:
    def __reduce__(self):
        return eval, (f"__import__('os').getpid() == {os.getpid()} or open({MADE!r}, 'w')",)
"""
WORKERS = {
    "an answer": "lie = Evil",
    "an error": """
def lie():
    raise RuntimeError(Evil())
""",
    "an error without end": """
def lie():
    raise RuntimeError(10**6000)
""",
    "the type of an answer": """
import copyreg
class Kind(type): pass
copyreg.pickle(Kind, lambda _: Evil().__reduce__())
class Typed(bytes, metaclass=Kind): pass
lie = lambda: Typed(b"x")
""",
}
# What is asked about a part is lied about, or about the worker itself.
LIAR = """
from gradtool.engines.cluster import work
answer = work.answer
work.answer = lambda version, payload: lie() if b"{kind}" in payload else answer(version, payload)
"""
SCHEDULERS = {
    "who is there": """
def dask_setup(scheduler):
    from distributed.protocol.serialize import ToPickle
    identity = scheduler.handlers["identity"]
    scheduler.handlers["identity"] = lambda *_, **__: identity() | {"more": ToPickle(Evil())}
""",
    "who is there, as data": """
def dask_setup(scheduler):
    from distributed.protocol import to_serialize
    identity = scheduler.handlers["identity"]
    scheduler.handlers["identity"] = lambda *_, **__: identity() | {"more": to_serialize(Evil())}
""",
    "an error": """
def dask_setup(scheduler):
    def fail(*_, **__):
        raise RuntimeError(Evil())
    scheduler.handlers["identity"] = fail
""",
    "an event": """
def dask_setup(scheduler):
    from distributed.diagnostics.plugin import SchedulerPlugin
    class Plugin(SchedulerPlugin):
        def add_client(self, scheduler, client):
            evil = pickle.dumps(Evil())
            for topic, message in (("warn", {"message": evil}), ("print", {"args": ("pwned",)})):
                event = {"op": "event", "topic": topic, "event": (0, message)}
                scheduler.loop.call_later(0.1, lambda event=event: scheduler.client_comms[client].send(event))
    scheduler.add_plugin(Plugin())
""",
    "a message": """
def dask_setup(scheduler):
    from distributed.diagnostics.plugin import SchedulerPlugin
    from distributed.protocol import to_serialize
    class Plugin(SchedulerPlugin):
        def add_client(self, scheduler, client):
            message = {"op": "task-erred", "key": "x", "exception": to_serialize(Evil())}
            scheduler.loop.call_later(0.1, lambda: scheduler.client_comms[client].send(message))
    scheduler.add_plugin(Plugin())
""",
}


def nested(depth):
    """A pickle of an error whose argument is so many tuples in one another."""
    return b"\x80\x04cbuiltins\nValueError\n(" + b"(" * depth + b"t" * depth + b"tR."


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (RuntimeError("no room"), "RuntimeError: no room"),
        (OSError(28, "no room"), "OSError: no room"),
        (ImportError("no module"), "ImportError: no module"),
        (nested(200_000), "ValueError: "),
    ],
    ids=range(4),
)
def test_an_error_of_a_worker_is_told_by_its_kind_and_its_words(sent, said):
    error = dask.GuardedUnpickler(
        io.BytesIO(sent if type(sent) is bytes else error_message(sent)["exception"].data)
    ).load()
    assert dask.Dask.why(mock.Mock(), error) == (f"a worker failed: {said}", None)


@pytest.mark.parametrize(("lie", "kind"), [*((lie, "Job") for lie in WORKERS), ("an answer", "Check")])
def test_a_pickle_of_a_worker_is_not_unpickled(tmp_path, lie, kind):
    path, made = sample(tmp_path), tmp_path / "made"
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"MADE = {str(made)!r}\n{EVIL}\n{WORKERS[lie]}\n{LIAR.format(kind=kind)}")
    with DaskCluster(tmp_path / "cluster") as cluster:
        cluster.worker(PYTHONPATH=str(site))
        before = path.read_bytes()
        done = cluster.run("clip", path, "--max-norm", "1e-3")
    assert not made.exists()
    assert (done.returncode, done.stderr.count("gradtool: error: ")) == (4 if kind == "Check" else 5, 1), done
    assert path.read_bytes() == before


@pytest.mark.parametrize("lie", SCHEDULERS)
def test_a_pickle_of_a_scheduler_is_not_unpickled(tmp_path, lie):
    path, made = sample(tmp_path), tmp_path / "made"
    preload = tmp_path / "preload.py"
    preload.write_text(f"MADE = {str(made)!r}\n{EVIL}\n{SCHEDULERS[lie]}")
    settings = {"DASK_DISTRIBUTED__SCHEDULER__PRELOAD": f'["{preload}"]'}
    with DaskCluster(tmp_path / "cluster", **settings) as cluster:
        cluster.worker()
        done = cluster.run("norm", path)
    assert not made.exists()
    assert (done.returncode, done.stderr.count("gradtool: error: ")) in [(0, 0), (5, 1)], done
    assert "pwned" not in done.stdout + done.stderr


def test_the_task_of_a_worker_that_freezes_moves_to_another_one(tmp_path):
    folder = tmp_path / "set"
    write_index(folder, {f"{i}.safetensors": {f"t{i}": np.full(3000, i + 1, np.float32)} for i in range(3)})
    before = snapshot(folder)
    with DaskCluster(tmp_path / "cluster") as cluster:
        frozen = cluster.worker(GRADTOOL_FAULT="SIGSTOP@2")
        command = cluster.command("clip", folder, "--max-norm", "1e-3", "--worker-timeout", "6", "--json")
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert soon(lambda: is_stopped(frozen) or run.poll() is not None)
        assert is_stopped(frozen), run.communicate()
        cluster.worker()
        out, err = run.communicate(timeout=60)
        assert (run.returncode, without_notes(err)) == (0, LOST)
        assert is_stopped(frozen)
    assert '"retries": 0,' not in out
    assert snapshot(folder) != before


def test_a_worker_that_is_frozen_from_the_start_gives_way(tmp_path):
    path = sample(tmp_path)
    with DaskCluster(tmp_path / "cluster") as cluster:
        frozen = cluster.worker()
        cluster.worker()
        frozen.send_signal(signal.SIGSTOP)
        assert soon(lambda: is_stopped(frozen))
        done = cluster.run("norm", path, "--worker-timeout", "6")
        # For at least 6 seconds, the frozen worker might still answer.
        note = f"gradtool: note: waiting for the workers of the Dask scheduler at {cluster.file}\n"
        assert (done.returncode, note in done.stderr, without_notes(done.stderr)) == (0, True, "")
        assert is_stopped(frozen)


def test_a_frozen_worker_that_is_the_only_one_ends_the_run(tmp_path):
    path = sample(tmp_path)
    before = path.read_bytes()
    with DaskCluster(tmp_path / "cluster") as cluster:
        cluster.worker(GRADTOOL_FAULT="SIGSTOP@2")
        done = cluster.run("clip", path, "--max-norm", "1e-3", "--worker-timeout", "3")
    assert (done.returncode, done.stderr.count("gradtool: error: ")) == (5, 1), done
    assert "has had no worker for 3 s\n  hint: start some, or wait longer with --worker-timeout" in done.stderr
    assert path.read_bytes() == before
