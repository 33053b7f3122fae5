"""Who holds a run: a process that lives, one that inherited the lock, or nobody; and what comes in between."""

import errno
import fcntl
import os
from contextlib import contextmanager
from unittest import mock

import pytest
from leftovers import crash, files_in
from support import registered, snapshot

from gradtool import SystemRefusedError, recover, zero
from gradtool.store.fs import Folder
from gradtool.store.transaction import locks, recovery
from gradtool.store.transaction.locks import InUse, claim
from gradtool.store.transaction.log import read_log
from gradtool.store.transaction.recovery import recover_at, recover_if_crashed
from gradtool.store.transaction.runs import Scope


@pytest.fixture
def paths(tmp_path):
    return [files_in(tmp_path / name, 1)[0] for name in "ab"]


@contextmanager
def crashed(path):
    """The folder and the log of a run that crashed before it changed a file."""
    crash(lambda: registered([path]))
    with Folder.at(path.parent) as folder:
        (log,) = path.parent.glob("*.run")
        yield folder, read_log(folder, log.name)


def named(folder, kind, fd):
    """The paths of a kind in a folder that lead to an open file."""
    return [path for path in folder.glob(f"*.{kind}") if path.stat().st_ino == os.fstat(fd).st_ino]


def left_in(path):
    return sorted(one.name for one in path.parent.glob(".gradtool-*"))


def test_a_lock_that_another_process_inherited_is_told_of(paths):
    with crashed(paths[0]) as (_, log):
        lock = paths[0].parent / f"{log.run}.lock"
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(SystemRefusedError) as caught:
                zero(paths[0])
    (problem,) = caught.value.problems
    assert problem.line == (f"{paths[0]}: in use: PID {log.pid} has ended, but another process holds its lock")
    assert (problem.code, problem.hint) == ("in-use", f"find it with fuser {lock}")
    # And let go of.
    assert zero(paths[0]).output.files_written == 1


def test_a_lock_that_the_system_refuses_leaves_nothing(paths, monkeypatch):
    before = snapshot(paths[0].parent)

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(SystemRefusedError, match="Input/output error"):
        registered(paths)
    assert snapshot(paths[0].parent) == before


@pytest.mark.parametrize("kind", ["lock", "run"])
@pytest.mark.parametrize("how", ["locked", "removed"])
def test_a_new_file_that_another_process_takes_for_an_orphan_is_made_again(paths, monkeypatch, kind, how):
    # The lock in the first folder, the pointer in the second.
    folder = paths[["lock", "run"].index(kind)].parent
    real, taken = fcntl.flock, []

    def take_first(fd, operation):
        made = named(folder, kind, fd)
        if made and not taken:
            taken.append(made[0])
            made[0].unlink()
            if how == "locked":
                raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", take_first)
    assert zero(paths).output.files_written == 2
    assert len(taken) == 1
    assert [left_in(path) for path in paths] == [[], []]


@pytest.mark.parametrize("kind", ["lock", "run"])
def test_whose_new_files_are_always_locked_by_others_gives_up(paths, monkeypatch, kind):
    folder, real = paths[["lock", "run"].index(kind)].parent, fcntl.flock

    def refuse(fd, operation):
        if named(folder, kind, fd):
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
        real(fd, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(SystemRefusedError, match="another process always locks it first") as caught:
            registered(paths)
    assert caught.value.problems[0].file == str(folder)
    # Whoever locked the locks removes them, as recovery does.
    assert [len(left_in(path)) for path in paths] == [10 if kind == "lock" else 0, 0]
    assert recover(paths[0].parent).removed == 10 * (kind == "lock")
    assert left_in(paths[0]) == []


def test_a_run_of_another_user_that_ended_meanwhile_is_no_crashed_run(paths, monkeypatch):
    with crashed(paths[0]) as (folder, log):
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
        with pytest.raises(SystemRefusedError, match="a crashed run of user"):
            claim(folder, log)
        (paths[0].parent / log.path.name).unlink()
        assert claim(folder, log) is None


def test_a_run_that_ended_while_its_lock_was_opened_is_not_claimed(paths, monkeypatch):
    real = fcntl.flock
    with crashed(paths[0]) as (folder, log):

        def end(fd, operation):
            for name in left_in(paths[0]):
                (paths[0].parent / name).unlink()
            real(fd, operation)

        monkeypatch.setattr(fcntl, "flock", end)
        assert claim(folder, log) is None
        # Neither when all of it is gone before.
        assert claim(folder, log) is None
        assert recover_if_crashed(log) is None


def test_a_run_whose_lock_was_deleted_is_alive_while_its_process_is(paths):
    with registered(paths[:1]) as run, Folder.at(paths[0].parent) as folder:
        (paths[0].parent / f"{run.id}.lock").unlink()
        with pytest.raises(SystemRefusedError, match=f"in use by PID {os.getpid()}"):
            zero(paths[0])
        assert isinstance(claim(folder, read_log(folder, f"{run.id}.run")), InUse)
    assert zero(paths[0]).output.files_written == 1
    assert left_in(paths[0]) == []


def test_a_deleted_lock_is_made_again_by_one_of_two_recoveries(paths):
    with crashed(paths[0]) as (folder, log):
        lock = paths[0].parent / f"{log.run}.lock"
        lock.unlink()
        with mock.patch.object(locks, "create_locked", side_effect=FileExistsError):
            assert isinstance(claim(folder, log), locks.InUse)
        fd = claim(folder, log)
        assert os.fstat(fd).st_ino == lock.stat().st_ino
        os.close(fd)
    assert recover(paths[0].parent).untouched == 1


def test_a_run_that_removes_its_log_just_now_needs_no_recovery(paths):
    with crashed(paths[0]) as (_, log):
        # Its lock it removes last.
        log.path.unlink()
        assert recover_if_crashed(log) is None


@pytest.mark.parametrize("at", [0, 1])
def test_a_run_that_ends_while_it_is_looked_at_needs_no_recovery(paths, at):
    crash(lambda: registered(paths))
    real = recovery.runs_in

    def look_and_end(folder, names):
        runs = real(folder, names)
        # By the log, or by the pointer to it.
        assert [run.log.path.parent for run in runs] == [paths[at].parent]
        for path in paths:
            for name in left_in(path):
                (path.parent / name).unlink()
        return runs

    with mock.patch.object(recovery, "runs_in", look_and_end):
        assert recover_at(Scope(paths[at].parent, None)) == ([], 0)


def test_an_orphan_that_gets_its_log_meanwhile_is_none(paths):
    with crashed(paths[0]) as (_, log):
        content = log.path.read_bytes()
        log.path.unlink()
        (paths[0].parent / f"{log.run}-0.tmp").touch()
        real = recovery.lock

        def lock_and_write(fd):
            log.path.write_bytes(content)
            return real(fd)

        with mock.patch.object(recovery, "lock", lock_and_write):
            assert recover(paths[0].parent).removed == 0
    assert len(left_in(paths[0])) == 3
    assert recover(paths[0].parent).untouched == 1
    assert left_in(paths[0]) == []


def test_a_forked_process_ends_no_run(paths):
    with registered(paths) as run:
        before = [left_in(path) for path in paths]
        crash(run.close)
        assert [left_in(path) for path in paths] == before
    assert [left_in(path) for path in paths] == [[], []]
