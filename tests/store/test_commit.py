import contextlib
import errno
import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
from support import snapshot, write

from gradtool import SystemRefusedError, UsageError
from gradtool.store import commit
from gradtool.store.commit import Replacement, refuse_collisions
from gradtool.store.header import read_shard


def shards_of(folder, count=2):
    return [read_shard(write(folder / f"{i}.safetensors", {f"t{i}": np.ones(5, np.float32)})) for i in range(count)]


def fill(temporary, letter=b"n"):
    temporary.write_bytes(letter * temporary.stat().st_size)


def test_nothing_changes_before_the_commit_and_everything_with_it(tmp_path):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)
    with Replacement() as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before
        replacement.commit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors"]
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)


def test_without_a_commit_no_trace_is_left(tmp_path):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(KeyboardInterrupt) as caught, Replacement() as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        raise KeyboardInterrupt
    assert snapshot(tmp_path) == before
    assert caught.value.__notes__ == ["no file was changed"]


def test_the_space_is_reserved_and_the_temporary_hidden(tmp_path):
    with Replacement() as replacement:
        temporary = replacement.stage(tmp_path / "x.safetensors", 1 << 20)
        assert temporary.stat().st_size == 1 << 20
        assert temporary.stat().st_blocks * 512 >= 1 << 20
        assert temporary.name.startswith(".gradtool-")
        assert temporary.suffix == ".tmp"


@pytest.mark.parametrize("mode", [0o640, 0o444, 0o000])
def test_the_mode_is_kept_even_one_that_forbids_writing(tmp_path, mode):
    (shard,) = shards_of(tmp_path, 1)
    shard.path.chmod(mode)
    object.__setattr__(shard, "stat", shard.path.stat())
    with Replacement() as replacement:
        fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
    assert shard.path.stat().st_mode & 0o7777 == mode


def test_extended_attributes_are_kept(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    try:
        os.setxattr(shard.path, "user.note", b"from rank 3")
    except OSError as error:
        pytest.skip(f"this file system has no extended attributes: {error}")
    with Replacement() as replacement:
        fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
    assert os.getxattr(shard.path, "user.note") == b"from rank 3"


def test_an_attribute_that_cannot_be_kept_is_refused_but_a_security_label_is_not(tmp_path, monkeypatch):
    (shard,) = shards_of(tmp_path, 1)
    before = snapshot(tmp_path)

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "getxattr", lambda *_: b"value")
    monkeypatch.setattr(os, "setxattr", refuse)
    monkeypatch.setattr(os, "listxattr", lambda _: ["security.label"])
    with Replacement() as replacement:
        replacement.stage(shard.path, shard.size, shard.stat)
    monkeypatch.setattr(os, "listxattr", lambda _: ["user.note"])
    with pytest.raises(SystemRefusedError), Replacement() as replacement:
        replacement.stage(shard.path, shard.size, shard.stat)
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_owner_is_kept(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    os.chown(shard.path, 1234, 4321)
    shard.path.chmod(0o4755)
    shard = read_shard(shard.path)
    with Replacement() as replacement:
        fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
    status = shard.path.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (1234, 4321, 0o4755)


def test_an_owner_that_cannot_be_kept_is_refused(tmp_path, monkeypatch):
    (shard,) = shards_of(tmp_path, 1)
    before = snapshot(tmp_path)

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    stolen = os.stat_result([*shard.stat[:4], 1234, *shard.stat[5:]])
    object.__setattr__(shard, "stat", stolen)
    with pytest.raises(SystemRefusedError, match="check the owner"), Replacement() as replacement:
        replacement.stage(shard.path, shard.size, shard.stat)
    assert snapshot(tmp_path) == before


def test_a_new_file_gets_the_mode_that_the_umask_leaves(tmp_path):
    mask = os.umask(0o027)
    try:
        with Replacement() as replacement:
            fill(replacement.stage(tmp_path / "new", 3))
            replacement.commit()
    finally:
        os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o640


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path):
    (shard,) = shards_of(tmp_path / "real", 1)
    link = tmp_path / "link.safetensors"
    link.symlink_to(shard.path)
    shard = read_shard(link)
    with Replacement() as replacement:
        fill(replacement.stage(link, shard.size, shard.stat))
        replacement.commit()
    assert link.is_symlink()
    assert (tmp_path / "real" / "0.safetensors").read_bytes() == b"n" * shard.size


def test_all_files_are_synced_before_the_first_rename(tmp_path, monkeypatch):
    calls = []
    real_sync, real_replace = os.fsync, type(tmp_path).replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("sync") or real_sync(fd))
    monkeypatch.setattr(type(tmp_path), "replace", lambda self, to: calls.append("rename") or real_replace(self, to))
    for fsync, expected in (
        (True, ["sync", "sync", "rename", "rename", "sync"]),
        (False, ["rename", "rename"]),
    ):
        calls.clear()
        with Replacement(fsync=fsync) as replacement:
            for shard in shards_of(tmp_path):
                fill(replacement.stage(shard.path, shard.size, shard.stat))
            replacement.commit()
        assert calls == expected


def test_a_file_that_somebody_else_changed_is_not_overwritten(tmp_path):
    first, second = shards_of(tmp_path)
    with pytest.raises(SystemRefusedError, match="changed by somebody else"), Replacement() as replacement:
        for shard in (first, second):
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        with second.path.open("ab") as file:
            file.write(b"theirs")
        replacement.commit()
    assert first.path.read_bytes()[-1:] != b"n"
    assert second.path.read_bytes().endswith(b"theirs")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_rename_that_fails_half_way_says_what_is_replaced_and_what_is_not(tmp_path, monkeypatch):
    shards = shards_of(tmp_path, 3)
    real_replace = type(tmp_path).replace

    def refuse_the_second(self, to):
        if to.name == "1.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return real_replace(self, to)

    monkeypatch.setattr(type(tmp_path), "replace", refuse_the_second)
    with (
        pytest.raises(SystemRefusedError, match="this and 1 more files are as they were"),
        Replacement() as replacement,
    ):
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
    assert [shard.path.read_bytes()[:1] == b"n" for shard in shards] == [True, False, False]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_known_before_work_starts_and_leaves_no_trace(tmp_path, monkeypatch, number):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with pytest.raises(SystemRefusedError, match=os.strerror(number)) as caught, Replacement() as replacement:
        replacement.stage(shards[0].path, shards[0].size, shards[0].stat)
        monkeypatch.setattr(commit.os, "posix_fallocate", refuse)
        replacement.stage(shards[1].path, shards[1].size, shards[1].stat)
    assert caught.value.exit_code == 5
    assert snapshot(tmp_path) == before


def test_signals_wait_for_the_last_rename(tmp_path, monkeypatch):
    shards = shards_of(tmp_path)
    real_replace = type(tmp_path).replace

    def replace_and_interrupt(self, to):
        real_replace(self, to)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(type(tmp_path), "replace", replace_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt) as caught, Replacement(fsync=False) as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)
    assert caught.value.__notes__ == ["all files were written before"]
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize("call", ["fsync", "fchmod"])
def test_a_sync_that_fails_changes_nothing(tmp_path, monkeypatch, call):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(SystemRefusedError, match="Input/output"), Replacement() as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL])
def test_a_folder_that_cannot_be_synced_is_said_and_one_that_need_not_be_is_not(tmp_path, monkeypatch, number):
    (shard,) = shards_of(tmp_path, 1)
    real_sync = os.fsync

    def sync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real_sync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    said = pytest.raises(SystemRefusedError, match="all files were written, but")
    with said if number == errno.EIO else contextlib.nullcontext(), Replacement() as replacement:
        fill(replacement.stage(shard.path, shard.size))
        replacement.commit()
    assert shard.path.read_bytes() == b"n" * shard.size


def test_a_file_system_that_cannot_reserve_space_does_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with Replacement() as replacement:
        assert replacement.stage(tmp_path / "x", 1000).stat().st_size == 1000


def test_a_name_of_many_bytes_can_be_replaced(tmp_path):
    path = tmp_path / ("😀" * 60 + ".safetensors")
    shard = read_shard(write(path, {"a": np.ones(5, np.float32)}))
    with Replacement() as replacement:
        fill(replacement.stage(path, shard.size, shard.stat))
        replacement.commit()
    assert path.read_bytes() == b"n" * shard.size


def test_outputs_may_not_collide_with_each_other_or_with_an_input(tmp_path):
    shards = shards_of(tmp_path)
    with pytest.raises(UsageError, match="two inputs"):
        refuse_collisions([tmp_path / "x", tmp_path / "x"], shards)
    with pytest.raises(UsageError, match="is an input"):
        refuse_collisions([shards[0].path], shards)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(UsageError, match="two inputs"):
        refuse_collisions([tmp_path / "x", tmp_path / "link"], shards)
    refuse_collisions([tmp_path / "x", tmp_path / "y"], shards)


def test_only_regular_files_are_written_over(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for target in (tmp_path / "fifo", Path("/dev/null"), tmp_path):
        with pytest.raises(UsageError, match="no regular file|is a folder"):
            refuse_collisions([target], [])
