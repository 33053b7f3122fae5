"""Files that workers build: every attempt has a temporary of its own, and one that comes too late harms nothing."""

import contextlib
import os
import pickle
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from leftovers import crash
from support import registered, write

from gradtool.engines.cluster import remote_files
from gradtool.engines.cluster.remote_files import RemoteFiles
from gradtool.errors import SystemRefusedError
from gradtool.store import fs
from gradtool.store.format.header import read_shard
from gradtool.store.io.destination import NewFile
from gradtool.store.transaction.commit import Commit
from gradtool.store.transaction.output import Staging
from gradtool.store.transaction.recovery import recover_at
from gradtool.store.transaction.runs import scopes_of


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "x.safetensors", {"a": np.ones(100, np.float32)})


@pytest.fixture
def run(path):
    run = registered([path])
    yield run
    run.close()


def remote(commit, path, new=None):
    """The destination of a file of the same size that takes the place of a file, or is new."""
    shard = read_shard(path)
    options = SimpleNamespace(fsync=True, is_elsewhere=new is not None, no_clobber=False)
    output = SimpleNamespace(target_of=lambda _: new or path, sets=(), options=options)
    return RemoteFiles(Staging(output, commit, [NewFile(shard, shard.size)]))


def request(files):
    """What a worker is asked for, as it gets that."""
    (shard,) = files.shards
    return pickle.loads(pickle.dumps(files.request(shard)))  # noqa: S301 - of this process


def build(request, content):
    with request.opened() as file, fs.closing(file.open(os.O_WRONLY)) as fd:
        fs.write_all(fd, [content * request.new.size], 0)


def temporaries(path):
    return sorted(one.name for one in path.parent.iterdir() if one.name.endswith(".tmp"))


def test_what_is_sent_holds_no_open_file(path, run):
    with Commit(run) as commit:
        sent = request(remote(commit, path))
        assert len(pickle.dumps(sent)) < 1000
        assert sent.path.stat().st_ino == sent.inode


def test_the_last_attempt_becomes_the_file_and_all_others_go(path, run):
    size = path.stat().st_size
    with Commit(run) as commit:
        files = remote(commit, path)
        first, second = request(files), request(files)
        assert first.path != second.path
        build(second, b"2")
        with pytest.raises(SystemRefusedError, match="was changed by another program"):
            build(first, b"1")
        assert temporaries(path) == [second.path.name]
        commit.put_in_place()
    assert (path.read_bytes(), path.stat().st_ino, temporaries(path)) == (b"2" * size, second.inode, [])


def test_an_attempt_that_goes_on_after_the_commit_writes_to_nothing(path, run):
    size = path.stat().st_size
    with Commit(run) as commit:
        files = remote(commit, path)
        late = request(files)
        begun = late.opened()
        file = begun.__enter__()
        fd = file.open(os.O_WRONLY)
        build(request(files), b"2")
        commit.put_in_place()
    try:
        fs.write_all(fd, [b"1" * size], 0)
        assert not file.is_there
        with pytest.raises(SystemRefusedError, match="was changed by another program"):
            begun.__exit__(None, None, None)
    finally:
        os.close(fd)
    assert (path.read_bytes(), temporaries(path)) == (b"2" * size, [])


@pytest.mark.parametrize("ends", ["removed", "replaced", "without a folder"])
def test_an_attempt_that_begins_after_the_run_has_ended_makes_nothing(path, run, monkeypatch, ends):
    monkeypatch.setattr(remote_files, "PAUSES", ())
    with Commit(run) as commit:
        late = request(remote(commit, path))
    run.close()
    if ends == "replaced":
        late.path.write_bytes(b"of another one")
        late = late._replace(inode=late.inode + 1)
    elif ends == "without a folder":
        late = late._replace(path=late.path / "x")
    before = [one.name for one in path.parent.iterdir()]
    with pytest.raises(SystemRefusedError, match="was changed by another program"):
        build(late, b"1")
    assert [one.name for one in path.parent.iterdir()] == before


def test_a_temporary_that_is_shown_late_is_waited_for(path, run, monkeypatch):
    with Commit(run) as commit:
        sent = request(remote(commit, path))
        hidden = sent.path.rename(path.parent / "hidden")
        monkeypatch.setattr(remote_files.time, "sleep", lambda _: hidden.rename(sent.path))
        build(sent, b"1")


def test_what_a_failed_run_has_asked_for_is_removed(path, run):
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), Commit(run) as commit:
        files = remote(commit, path)
        build(request(files), b"1")
        request(files)
        raise ZeroDivisionError
    run.close()
    assert (path.read_bytes(), temporaries(path)) == (before, [])


def test_a_file_that_was_built_elsewhere_gets_the_rights_of_what_it_is_made_of_and_no_list(path, run):
    new = path.parent / "new"
    path.chmod(0o600)
    run.close()
    run = registered([new])
    with Commit(run, [(path, None)]) as commit:
        sent = request(remote(commit, path, new))
        build(sent, b"1")
        if hasattr(os, "setxattr"):
            # As another machine may give it.
            entries = [(1, 6, -1), (2, 6, 1234), (4, 6, -1), (0x10, 6, -1), (0x20, 0, -1)]
            with contextlib.suppress(OSError):
                packed = b"".join(struct.pack("<HHi", *entry) for entry in entries)
                os.setxattr(sent.path, "system.posix_acl_access", struct.pack("<I", 2) + packed)
        commit.put_in_place()
    run.close()
    assert new.stat().st_mode & 0o7777 == 0o600
    assert not hasattr(os, "listxattr") or "system.posix_acl_access" not in os.listxattr(new)


def test_recovering_removes_attempts(path):
    before = path.read_bytes()

    def build_and_crash():
        run = registered([path])
        files = remote(Commit(run), path)
        build(request(files), b"1")
        request(files)
        os._exit(0)

    crash(build_and_crash)
    assert len(temporaries(path)) == 1
    (recovered,), _ = recover_at(scopes_of(str(path.parent))[0])
    assert (recovered.outcome, path.read_bytes()) == ("untouched", before)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_recovering_puts_what_workers_built_in_its_place_and_removes_all_else(tmp_path):
    paths = [write(tmp_path / f"{name}.safetensors", {name: np.ones(100, np.float32)}) for name in "ab"]
    sizes = [path.stat().st_size for path in paths]

    def build_and_crash():
        with Commit(registered(paths)) as commit:
            for path in paths:
                files = remote(commit, path)
                request(files)
                build(request(files), b"2")
            rename, renamed = os.replace, []

            def crash_at_the_second(*arguments, **options):
                if renamed:
                    os._exit(0)
                renamed.append(rename(*arguments, **options))

            os.replace = crash_at_the_second
            commit.put_in_place()

    crash(build_and_crash)
    assert [path.read_bytes()[:1] == b"2" for path in paths] == [True, False]
    (recovered,), _ = recover_at(scopes_of(str(tmp_path))[0])
    assert (recovered.outcome, recovered.files) == ("finished", 2)
    assert [path.read_bytes() for path in paths] == [b"2" * size for size in sizes]
    assert sorted(tmp_path.iterdir()) == paths
