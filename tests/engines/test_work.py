"""A worker's own part: files that are shown late or never, and errors that say where they happened."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import sample

import gradtool
from gradtool._version import __version__
from gradtool.backends.protocol import NormSpec
from gradtool.engines import work
from gradtool.ops.passes import Measure
from gradtool.store import late
from gradtool.store.io.destination import DISCARD, NewFile
from gradtool.store.transaction.attempts import Attempt
from gradtool.store.transaction.inputs import Inputs
from gradtool.store.transaction.orders import Order


def job_about(path, order=2.0):
    """A job that measures a file, as it is sent."""
    opened = Inputs([str(path)]).open()
    (part,) = Measure(opened.selected, NormSpec(order)).parts(DISCARD)
    return part, work.packed(work.Job(part, None, None, 1, None))


def performed(part, payload):
    """What a worker answers, as the command reads it."""
    return work.read_outcome(work.perform(__version__, payload), part)


@pytest.mark.parametrize("shown", ["nothing", "the one before"])
def test_a_file_that_is_shown_late_is_waited_for(tmp_path, monkeypatch, shown):
    path = sample(tmp_path)
    part, payload = job_about(path)
    new = path.rename(tmp_path / "new")
    if shown == "the one before":
        shutil.copy(new, path)
    monkeypatch.setattr(late.time, "sleep", lambda _: new.replace(path) if new.exists() else None)
    done = performed(part, payload)
    assert (done.late, done.seen[0].version.split("-")[0]) == (1, str(path.stat().st_ino))


def test_a_file_that_a_worker_never_sees_is_named_with_its_host(tmp_path, monkeypatch):
    path = sample(tmp_path)
    part, payload = job_about(path)
    path.unlink()
    monkeypatch.setattr(late.time, "sleep", lambda _: None)
    with pytest.raises(gradtool.BackendUnavailableError) as error:
        performed(part, payload)
    (problem,) = error.value.problems
    assert problem.message == f"the worker on {work.HOST} does not see it"
    assert problem.hint.startswith("mount the same file system")
    assert (problem.file, problem.code) == (str(path), "engine")


def test_what_the_system_refuses_a_worker_is_said_with_its_host(tmp_path, monkeypatch):
    path = sample(tmp_path)
    # Of an order that has no kernel, which would read by itself.
    part, payload = job_about(path, order=3.0)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(gradtool.SystemRefusedError) as error:
        performed(part, payload)
    (problem,) = error.value.problems
    assert (problem.message, problem.file) == (f"Input/output error (worker on {work.HOST})", str(path))


def test_an_attempt_in_a_folder_that_is_not_there_makes_nothing(tmp_path, monkeypatch):
    shard = Inputs([str(sample(tmp_path))]).open().shards[0]
    order = Order(NewFile(shard, 1), ".gradtool-0123456789ab", tmp_path / "none", "x", "permit", False, False)
    monkeypatch.setattr(late.time, "sleep", lambda _: None)
    with pytest.raises(gradtool.SystemRefusedError, match="permit is missing: the run has ended"):
        Attempt(order).__enter__()
    assert [one.name for one in tmp_path.iterdir()] == ["x.safetensors"]


def test_processes_of_the_same_host_and_number_are_told_apart():
    code = "import os; os.getpid = lambda: 1; from gradtool.engines.work import process; print(process())"
    said = {subprocess.check_output([sys.executable, "-c", code], cwd=Path(work.__file__).parents[2]) for _ in range(2)}
    assert len(said) == 2
