"""A worker's own part: whether it is fit, files that are shown late or never, errors that say where they happened."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from support import sample, snapshot

import gradtool
from gradtool._version import __version__
from gradtool.backends.values import NormSpec
from gradtool.engines.cluster import remote_files, wire, work
from gradtool.ops.passes import Measure
from gradtool.store.io.destination import DISCARD
from gradtool.store.transaction.inputs import Inputs


def job_about(path, order=2.0):
    """A job that measures a file, as it is sent."""
    opened = Inputs([str(path)]).open()
    (part,) = Measure(opened.selected, NormSpec(order)).parts(DISCARD)
    return part, work.call_for(work.Job(part, None, None, 1, None))


def performed(part, call):
    """What a worker answers, as the command reads it."""
    return wire.unpacked(pickle.loads(call), work.empty_outcome(part))  # noqa: S301 - of this process


def checked(check):
    """What a worker answers that is asked whether it is fit."""
    return wire.unpacked(pickle.loads(work.call_for(check)), work.Report())  # noqa: S301 - of this process


@pytest.fixture
def check(tmp_path):
    """What a worker is asked that is to write beside a file."""
    path = sample(tmp_path)
    return work.Check(str(path), path.stat().st_ino, os.geteuid(), "cpu", None)


@pytest.mark.parametrize("user", [None, os.geteuid()])
def test_a_worker_that_is_fit_says_what_it_computes_with_and_changes_nothing(check, tmp_path, user):
    before = snapshot(tmp_path)
    assert checked(check._replace(user=user)).why == "compiled kernels"
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inode": 1}, "does not see {folder}/x.safetensors; mount the same file system there, at the same path"),
        ({"path": "/none/x"}, "does not see /none/x; mount the same file system there, at the same path"),
        ({"backend": "vulkan"}, "backend must be auto, cpu or cuda, not 'vulkan'"),
        ({"user": os.geteuid() + 1}, "start the workers as the user who runs the command"),
    ],
)
def test_a_worker_that_is_not_fit_names_its_host_and_the_remedy(check, tmp_path, monkeypatch, changes, said):
    monkeypatch.setattr(remote_files, "PAUSES", ())
    with pytest.raises(gradtool.BackendUnavailableError) as error:
        checked(check._replace(**changes))
    assert str(error.value).startswith(f"the worker on {work.HOST}")
    assert said.format(folder=tmp_path) in str(error.value)
    assert error.value.problems[0].code == "engine"


def test_a_worker_that_may_only_read_is_not_fit_to_write(check, tmp_path):
    opened = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_RDWR:
            raise OSError(30, "Read-only file system")
        return opened(path, flags, *rest, **more)

    with mock.patch.object(os, "open", refuse):
        checked(check._replace(user=None))
        with pytest.raises(gradtool.BackendUnavailableError) as error:
            checked(check)
    said = f"cannot write in {tmp_path}: Read-only file system; make it writable there"
    assert str(error.value) == f"the worker on {work.HOST} {said}"


def test_a_worker_of_another_version_does_not_look_at_what_it_is_asked():
    with pytest.raises(gradtool.BackendUnavailableError) as error:
        wire.unpacked(work.answer("0.0.1", b"of another version"), None)
    said = f"has gradtool {__version__}, this is 0.0.1; install the same version there"
    assert str(error.value) == f"the worker on {work.HOST} {said}"


@pytest.mark.parametrize("shown", ["nothing", "the one before"])
def test_a_file_that_is_shown_late_is_waited_for(tmp_path, monkeypatch, shown):
    path = sample(tmp_path)
    part, payload = job_about(path)
    new = path.rename(tmp_path / "new")
    if shown == "the one before":
        shutil.copy(new, path)
    monkeypatch.setattr(remote_files.time, "sleep", lambda _: new.replace(path) if new.exists() else None)
    remote_files.waits.clear()
    done = performed(part, payload)
    assert (done.waits, done.fingerprints) == (1, [work.fingerprint(Inputs([str(path)]).open().shards[0])])


def test_a_file_that_a_worker_never_sees_is_named_with_its_host(tmp_path, monkeypatch):
    path = sample(tmp_path)
    part, payload = job_about(path)
    path.unlink()
    monkeypatch.setattr(remote_files.time, "sleep", lambda _: None)
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


def test_processes_of_the_same_host_and_number_are_told_apart():
    code = "import os; os.getpid = lambda: 1; from gradtool.engines.cluster import work; print(work._SALT)"
    said = {subprocess.check_output([sys.executable, "-c", code], cwd=Path(work.__file__).parents[3]) for _ in range(2)}
    assert len(said) == 2
