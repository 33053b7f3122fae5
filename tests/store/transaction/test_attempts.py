"""Files that other processes build: every attempt has its own temporary, and one that comes too late harms nothing."""

import contextlib
import os
import pickle
import struct

import numpy as np
import pytest
from gradtool.store.transaction.guard import Scope
from leftovers import crash
from support import registered, write

from gradtool.errors import SystemRefusedError
from gradtool.store import fs
from gradtool.store.format.header import read_shard
from gradtool.store.io.destination import NewFile
from gradtool.store.transaction import attempts, orders
from gradtool.store.transaction.attempts import Attempt
from gradtool.store.transaction.commit import Commit
from gradtool.store.transaction.recovery import recover_at


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "x.safetensors", {"a": np.ones(100, np.float32)})


@pytest.fixture
def run(path):
    run = registered([path])
    yield run
    run.close()


def ordered(commit, path):
    """An order for a new file of the same size, as another process gets it."""
    shard = read_shard(path)
    order = commit.orders.add(path, NewFile(shard, shard.size), keeps_attributes=True)
    return order, pickle.loads(pickle.dumps(order))  # noqa: S301 - of this process


def build(order, content):
    with Attempt(order) as attempt:
        with attempt.file.opened(os.O_WRONLY) as fd:
            fs.write_all(fd, [content * order.new.size], 0)
        return attempt.finish()


def temporaries(path):
    return sorted(one.name for one in path.parent.iterdir() if one.name.endswith(".tmp"))


def test_the_attempt_that_is_adopted_becomes_the_file_and_all_others_go(path, run):
    size = path.stat().st_size
    with Commit(run) as commit:
        order, sent = ordered(commit, path)
        first, second = build(sent, b"1"), build(sent, b"2")
        assert first.number != second.number
        assert len(temporaries(path)) == 3  # and the permit
        commit.adopt(order, second)
        commit.put_in_place()
    assert (path.read_bytes(), path.stat().st_ino, temporaries(path)) == (b"2" * size, second.inode, [])


def test_an_attempt_that_goes_on_after_the_commit_writes_to_nothing(path, run):
    size = path.stat().st_size
    with Commit(run) as commit:
        order, sent = ordered(commit, path)
        late = Attempt(sent).__enter__()
        fd = late.file.open(os.O_WRONLY)
        commit.adopt(order, build(sent, b"2"))
        commit.put_in_place()
    try:
        fs.write_all(fd, [b"1" * size], 0)
        with pytest.raises(SystemRefusedError, match="the run has ended"):
            late.look()
        with pytest.raises(SystemRefusedError, match="the run has ended") as error:
            late.finish()
        late.__exit__(type(error.value), error.value, None)
    finally:
        os.close(fd)
    assert (path.read_bytes(), temporaries(path)) == (b"2" * size, [])


def test_an_attempt_that_begins_after_the_run_has_ended_leaves_nothing(path, run, monkeypatch):
    monkeypatch.setattr("gradtool.store.late.PAUSES", ())
    with Commit(run) as commit:
        _, sent = ordered(commit, path)
    with pytest.raises(SystemRefusedError, match="the run has ended"):
        build(sent, b"1")
    assert temporaries(path) == []


def test_an_attempt_that_is_made_just_after_the_sweep_removes_itself(path, run, monkeypatch):
    commit = Commit(run)
    _, sent = ordered(commit, path)
    create = attempts.Attempt._create

    def create_late(self):
        assert commit.orders.withdraw()
        return create(self)

    monkeypatch.setattr(attempts.Attempt, "_create", create_late)
    with pytest.raises(SystemRefusedError, match="the run has ended"):
        build(sent, b"1")
    assert temporaries(path) == []


def test_an_attempt_that_is_made_during_the_sweep_removes_itself(path, run, monkeypatch):
    commit = Commit(run)
    _, sent = ordered(commit, path)
    names_in = orders.files_of_runs

    def listed_too_early(folder):
        names = names_in(folder)
        with pytest.raises(SystemRefusedError, match="the run has ended"):
            build(sent, b"1")
        return names

    monkeypatch.setattr("gradtool.store.late.PAUSES", ())
    monkeypatch.setattr(orders, "files_of_runs", listed_too_early)
    assert commit.orders.withdraw()
    assert temporaries(path) == []


def test_an_attempt_whose_temporary_was_swept_stops(path, run):
    with Commit(run) as commit:
        _, sent = ordered(commit, path)
        with pytest.raises(SystemRefusedError, match="was changed by another program"), Attempt(sent) as attempt:
            attempt.file.path.unlink()
            attempt.look()


def test_an_attempt_that_fails_removes_its_temporary(path, run):
    with Commit(run) as commit:
        _, sent = ordered(commit, path)
        permit = temporaries(path)
        with pytest.raises(ZeroDivisionError), Attempt(sent):
            raise ZeroDivisionError
        assert temporaries(path) == permit


def test_nothing_is_committed_unless_all_files_were_built(path, run):
    before = path.read_bytes()
    with pytest.raises(AssertionError, match="no worker has built a file"), Commit(run) as commit:
        ordered(commit, path)
        commit.put_in_place()
    assert (path.read_bytes(), temporaries(path)) == (before, [])


def test_a_file_that_was_built_elsewhere_gets_the_rights_of_what_it_is_made_of_and_no_list(path, run):
    new = path.parent / "new"
    path.chmod(0o600)
    run.close()
    run = registered([new])
    with Commit(run, [(path, None)]) as commit:
        order = commit.orders.add(new, NewFile(read_shard(path), path.stat().st_size), keeps_attributes=False)
        built = build(pickle.loads(pickle.dumps(order)), b"1")  # noqa: S301 - of this process
        temporary = path.parent / temporaries(path)[-1]
        if hasattr(os, "setxattr"):
            # As another machine may see it, with a list from the folder that was not removed there.
            entries = [(1, 6, -1), (2, 6, 1234), (4, 6, -1), (0x10, 6, -1), (0x20, 0, -1)]
            with contextlib.suppress(OSError):
                packed = b"".join(struct.pack("<HHi", *entry) for entry in entries)
                os.setxattr(temporary, "system.posix_acl_access", struct.pack("<I", 2) + packed)
        commit.adopt(order, built)
        commit.put_in_place()
    run.close()
    assert new.stat().st_mode & 0o7777 == 0o600
    assert not hasattr(os, "listxattr") or "system.posix_acl_access" not in os.listxattr(new)


def test_recovering_removes_permits_and_attempts(path):
    before = path.read_bytes()

    def build_and_crash():
        build(ordered(Commit(registered([path])), path)[1], b"1")
        os._exit(0)

    crash(build_and_crash)
    assert len(temporaries(path)) == 2
    (recovered,), _ = recover_at(Scope.of(str(path.parent))[0])
    assert (recovered.outcome, path.read_bytes()) == ("untouched", before)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
