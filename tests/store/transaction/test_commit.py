import contextlib
import errno
import os
import signal
import stat
import struct
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from leftovers import content_of, crash, files_in, half_replaced, redo_log_of
from support import file_in, gradtool, registered, snapshot, until_told, write, write_back_in_time

from gradtool import BadInputError, SystemRefusedError, UsageError, clip, norm, recover, zero
from gradtool.store import fs, signals, system
from gradtool.store.format.header import read_shard
from gradtool.store.fs import Folder
from gradtool.store.io.redolog import RedoLog
from gradtool.store.source import SmallFile
from gradtool.store.transaction import log, staging, transaction
from gradtool.store.transaction.commit import Commit, InPlace, Target
from gradtool.store.transaction.log import marker_name
from gradtool.store.transaction.output import check_collisions
from gradtool.store.transaction.staging import Rights, Staged, new_mode
from gradtool.store.transaction.transaction import Transaction

LINUX = pytest.mark.skipif(not hasattr(os, "setxattr"), reason="Python has extended attributes only on Linux")


def read_at(path):
    """A file as it is when its header is read."""
    return SimpleNamespace(path=path, size=path.stat().st_size, stat=path.stat())


def shards_of(folder, count=2):
    return [read_at(write(folder / f"{i}.safetensors", {f"t{i}": np.ones(5, np.float32)})) for i in range(count)]


@contextlib.contextmanager
def replacing(folder, name="0.safetensors", *, fsync=True, sources=()):
    run = registered([folder / name, folder / "1.safetensors", folder / "2.safetensors"], fsync=fsync)
    try:
        with Commit(run, [(path, None) for path in sources]) as commit:
            yield commit
    finally:
        run.close()


def fill(temporary, letter=b"n"):
    temporary.path.write_bytes(letter * temporary.path.stat().st_size)


def replace_all(commit, files):
    """Replace files by others of the same size."""
    for file in files:
        fill(commit.stage(file.path, file.size, file.stat))
    commit.put_in_place()


def test_nothing_changes_before_the_commit_and_everything_with_it(tmp_path):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)
    with replacing(tmp_path) as commit:
        for shard in shards:
            fill(commit.stage(shard.path, shard.size, shard.stat))
        assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before
        commit.put_in_place()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors"]
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)


def test_without_a_commit_no_trace_is_left(tmp_path):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(KeyboardInterrupt) as caught, replacing(tmp_path) as commit:
        for shard in shards:
            fill(commit.stage(shard.path, shard.size, shard.stat))
        raise KeyboardInterrupt
    assert snapshot(tmp_path) == before
    assert caught.value.__notes__ == ["no file was changed"]


def test_the_space_is_reserved_and_the_temporary_hidden(tmp_path):
    with replacing(tmp_path, "x.safetensors") as commit:
        temporary = commit.stage(tmp_path / "x.safetensors", 1 << 20)
        assert temporary.path.stat().st_size == 1 << 20
        assert temporary.path.stat().st_blocks * 512 >= 1 << 20
        assert temporary.name.startswith(".gradtool-")
        assert temporary.path.suffix == ".tmp"


@pytest.mark.parametrize("mode", [0o640, 0o444, 0o000])
def test_the_mode_is_kept_even_one_that_forbids_writing(tmp_path, mode):
    (shard,) = shards_of(tmp_path, 1)
    shard.path.chmod(mode)
    shard.stat = shard.path.stat()
    with replacing(tmp_path) as commit:
        fill(commit.stage(shard.path, shard.size, shard.stat))
        commit.put_in_place()
    assert shard.path.stat().st_mode & 0o7777 == mode


@LINUX
def test_extended_attributes_are_kept(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    try:
        os.setxattr(shard.path, "user.note", b"from rank 3")
        shard.stat = shard.path.stat()
    except OSError as error:
        pytest.skip(f"this file system has no extended attributes: {error}")
    with replacing(tmp_path) as commit:
        fill(commit.stage(shard.path, shard.size, shard.stat))
        commit.put_in_place()
    assert os.getxattr(shard.path, "user.note") == b"from rank 3"


@LINUX
def test_a_file_without_an_access_control_list_gets_none_from_its_folder(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    shard.path.chmod(0o660)
    shard.stat = shard.path.stat()
    # What new files in the folder inherit: user 1234 may do everything. Of linux/posix_acl_xattr.h: tag, rights, ID.
    entries = [(1, 7, -1), (2, 7, 1234), (4, 7, -1), (0x10, 7, -1), (0x20, 0, -1)]
    default = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", default)
    except OSError as error:
        pytest.skip(f"this file system has no access control lists: {error}")
    with replacing(tmp_path) as commit:
        temporary = commit.stage(shard.path, shard.size, shard.stat)
        assert "system.posix_acl_access" not in os.listxattr(temporary.path)
        fill(temporary)
        commit.put_in_place()
    assert "system.posix_acl_access" not in os.listxattr(shard.path)
    assert shard.path.stat().st_mode & 0o7777 == 0o660


@LINUX
def test_no_file_of_a_run_has_an_access_control_list_from_its_folder(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    shard.path.chmod(0o644)
    entries = [(1, 7, -1), (2, 7, 1234), (4, 7, -1), (0x10, 7, -1), (0x20, 7, -1)]
    default = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", default)
    except OSError as error:
        pytest.skip(f"this file system has no access control lists: {error}")
    with replacing(tmp_path, "new", sources=[shard.path]) as commit:
        fill(commit.stage(tmp_path / "new", 10))
        made = [path for path in tmp_path.iterdir() if path.name.startswith(".gradtool-")]
        assert len(made) == 3
        assert [path for path in made if "system.posix_acl_access" in os.listxattr(path)] == []
    assert list(tmp_path.iterdir()) == [shard.path]


@LINUX
def test_an_attribute_that_cannot_be_kept_is_refused_but_a_security_label_is_not(tmp_path, monkeypatch):
    (shard,) = shards_of(tmp_path, 1)
    before = snapshot(tmp_path)

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "getxattr", lambda *_: b"value")
    monkeypatch.setattr(os, "setxattr", refuse)
    monkeypatch.setattr(os, "listxattr", lambda _: ["security.label"])
    with replacing(tmp_path) as commit:
        commit.stage(shard.path, shard.size, shard.stat)
    monkeypatch.setattr(os, "listxattr", lambda _: ["user.note"])
    with pytest.raises(SystemRefusedError), replacing(tmp_path) as commit:
        commit.stage(shard.path, shard.size, shard.stat)
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_owner_is_kept(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    os.chown(shard.path, 1234, 4321)
    shard.path.chmod(0o4755)
    shard = read_at(shard.path)
    with replacing(tmp_path) as commit:
        fill(commit.stage(shard.path, shard.size, shard.stat))
        commit.put_in_place()
    status = shard.path.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (1234, 4321, 0o755)


def test_an_owner_that_cannot_be_kept_is_refused(tmp_path, monkeypatch):
    (shard,) = shards_of(tmp_path, 1)
    before = snapshot(tmp_path)

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    stolen = os.stat_result([*shard.stat[:4], 1234, *shard.stat[5:]])
    object.__setattr__(shard, "stat", stolen)
    with pytest.raises(SystemRefusedError, match="check the owner"), replacing(tmp_path) as commit:
        commit.stage(shard.path, shard.size, shard.stat)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("there", "sources", "wanted"),
    [
        (None, [0o644], 0o640),
        (None, [0o666, 0o600], 0o600),
        (None, [0o444], 0o640),
        (0o600, [0o644], 0o600),
        (0o777, [0o755, 0o640], 0o640),
    ],
)
def test_a_new_file_is_no_wider_than_what_it_is_made_of_and_what_it_replaces(tmp_path, there, sources, wanted):
    paths = [write(tmp_path / "in" / str(number), {}) for number in range(len(sources))]
    for path, mode in zip(paths, sources, strict=True):
        path.chmod(mode)
    mask = os.umask(0o027)
    try:
        if there is not None:
            (tmp_path / "new").touch()
            (tmp_path / "new").chmod(there)
        with replacing(tmp_path, "new", sources=paths) as commit:
            fill(commit.stage(tmp_path / "new", 3))
            commit.put_in_place()
    finally:
        os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o7777 == wanted


@pytest.mark.parametrize(
    ("sources", "mode"),
    [
        ([(7, 0o100640)], 0o640),
        ([(7, 0o666), (7, 0o644)], 0o644),
        ([(7, 0o606)], 0o606),
        ([(8, 0o640)], 0o600),
        ([(8, 0o644)], 0o644),
        # In the group 8, to which the file is closed, may be any of all others.
        ([(8, 0o604)], 0o600),
        ([(7, 0o640), (8, 0o644)], 0o640),
        ([(7, 0o640), (8, 0o640)], 0o600),
        ([(None, 0o644)], 0o644),
        ([(None, 0o640)], 0o600),
        ([], 0o600),
    ],
)
def test_a_new_file_gives_no_user_more_than_all_of_its_sources(sources, mode):
    mask = os.umask(0)
    try:
        assert new_mode(7, [Rights(*source) for source in sources]) == mode
    finally:
        os.umask(mask)


def test_a_file_that_is_no_longer_the_one_that_was_read_gives_no_rights(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    gone = tmp_path / "gone"
    for name, source in (("a", (shard.path, Path(__file__).stat())), ("b", (gone, None))):
        with registered([tmp_path / name]) as run, Commit(run, [source]) as commit:
            fill(commit.stage(tmp_path / name, 3))
            commit.put_in_place()
        assert (tmp_path / name).stat().st_mode & 0o7777 == 0o600


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path):
    (shard,) = shards_of(tmp_path / "real", 1)
    link = tmp_path / "link.safetensors"
    link.symlink_to(shard.path)
    shard = read_at(link)
    with replacing(tmp_path / "real") as commit:
        fill(commit.stage(link, shard.size, shard.stat))
        commit.put_in_place()
    assert link.is_symlink()
    assert (tmp_path / "real" / "0.safetensors").read_bytes() == b"n" * shard.size


def overwrite(run, commit, paths, new):
    """Build what files will hold that a run changes in place."""
    files = [file_in(folder, name) for folder, name in map(run.targets.locate, paths)]
    statuses = [file.path.stat() for file in files]
    targets = [Target(file, status, status.st_size) for file, status in zip(files, statuses, strict=True)]
    redo_log_of(commit.overwrite(targets), paths, new)


def steps_of(monkeypatch):
    """The calls that change something, as they come, and the kinds of the files that they are about."""
    steps = []

    def told(place, name, kind_of):
        real = getattr(place, name)

        def step(*arguments):
            steps.append(f"{name} {kind_of(*arguments)}")
            return real(*arguments)

        monkeypatch.setattr(place, name, step)

    def opened(fd, *_):
        path = Path(f"/proc/self/fd/{fd}").readlink()
        return "folder" if path.is_dir() else path.suffix[1:]

    for name in ("sync", "write_all"):
        told(fs, name, opened)
    for name in ("link", "rename", "unlink"):
        told(Folder, name, lambda _, name, *__: name.rpartition(".")[2])
    return steps


END = ["unlink run", "unlink lock"]
# The order in which things are done, with syncs; the log is written when it is made, and when all locks are held.
ORDER = {
    # A rename is done or not; which of the two, recovery sees.
    "1": ["sync tmp", "write_all run", "sync run", "rename tmp", "sync folder", *END],
    # All files; the log and the names; that everything is ready; the renames; and these.
    "2": [
        *("sync tmp", "sync tmp", "sync run", "sync folder", "write_all run", "sync run"),
        *("rename tmp", "rename tmp", "sync folder", *END),
    ],
    # What is not overwritten, and what is to be; then as above; the copying, and that no redo log is needed any more.
    "in place": [
        *("sync safetensors", "sync safetensors", "write_all redo", "write_all redo"),
        *("sync redo", "sync run", "sync folder", "write_all run", "sync run"),
        *("write_all safetensors", "write_all safetensors", "sync safetensors", "sync safetensors"),
        *("sync folder", "write_all run", "sync run", "unlink redo", *END),
    ],
    "in place, and one": [
        *("sync safetensors", "write_all redo", "sync tmp"),
        *("sync redo", "sync run", "sync folder", "write_all run", "sync run"),
        *("write_all safetensors", "sync safetensors", "rename tmp"),
        *("sync folder", "write_all run", "sync run", "unlink redo", *END),
    ],
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which file a descriptor is")
@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("what", ORDER)
def test_everything_is_on_the_disk_before_what_follows_from_it(tmp_path, monkeypatch, what, fsync):
    shards = shards_of(tmp_path, 1 if what == "1" else 2)
    overwritten = [] if "in place" not in what else shards[:1] if "one" in what else shards
    run = registered([shard.path for shard in shards], fsync=fsync)
    steps = steps_of(monkeypatch)
    with Commit(run) as commit:
        if overwritten:
            overwrite(run, commit, [shard.path for shard in overwritten], [b"n" * shard.size for shard in overwritten])
        for shard in shards[len(overwritten) :]:
            fill(commit.stage(shard.path, shard.size, shard.stat))
        commit.put_in_place()
    run.close()
    assert steps == [step for step in ORDER[what] if fsync or not step.startswith("sync")]
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)
    assert sorted(tmp_path.iterdir()) == [shard.path for shard in shards]


def test_a_file_that_another_program_changed_is_not_overwritten(tmp_path):
    first, second = shards_of(tmp_path)
    with pytest.raises(SystemRefusedError, match="changed by another program"), replacing(tmp_path) as commit:
        for shard in (first, second):
            fill(commit.stage(shard.path, shard.size, shard.stat))
        with second.path.open("ab") as file:
            file.write(b"theirs")
        commit.put_in_place()
    assert first.path.read_bytes()[-1:] != b"n"
    assert second.path.read_bytes().endswith(b"theirs")
    assert len(list(tmp_path.iterdir())) == 2


def refuse_renames_to(monkeypatch, name):
    real = os.replace

    def refuse(path, target, **folders):
        if target == name:
            raise OSError(errno.EIO, "Input/output error")
        real(path, target, **folders)

    monkeypatch.setattr(os, "replace", refuse)


@pytest.mark.parametrize("count", [1, 3])
def test_a_first_rename_that_is_refused_leaves_everything_as_it_was(tmp_path, monkeypatch, count):
    shards = shards_of(tmp_path, count)
    before = snapshot(tmp_path)
    refuse_renames_to(monkeypatch, "0.safetensors")
    with pytest.raises(SystemRefusedError) as caught, replacing(tmp_path) as commit:
        replace_all(commit, shards)
    assert str(caught.value) == f"{shards[0].path}: Input/output error"
    assert caught.value.__notes__ == ["no file was changed"]
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("count", [1, 3])
def test_who_is_killed_when_a_first_rename_was_refused_has_left_everything_as_it_was(tmp_path, count):
    shards = shards_of(tmp_path, count)
    before = snapshot(tmp_path)

    def replace_and_crash():
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(SystemRefusedError),
            replacing(tmp_path) as commit,
        ):
            refuse_renames_to(patch, "0.safetensors")
            unlink = Folder.unlink
            # When it has removed the first of its files.
            patch.setattr(Folder, "unlink", lambda folder, name: (unlink(folder, name), os._exit(0)))
            replace_all(commit, shards)

    crash(replace_and_crash)
    assert len(list(tmp_path.iterdir())) == 2 * count + 1
    assert norm(tmp_path).norm > 0
    assert recover(tmp_path).untouched == 1
    assert snapshot(tmp_path) == before


def test_a_run_that_cannot_say_that_it_is_called_off_is_completed_by_recovery(tmp_path, monkeypatch):
    shards = shards_of(tmp_path, 3)
    old = [shard.path.read_bytes() for shard in shards]
    append = log.append_step

    def refuse(*arguments, **options):
        if "ended" in options:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(*arguments, **options)

    with monkeypatch.context() as patch:
        refuse_renames_to(patch, "0.safetensors")
        patch.setattr(transaction, "append_step", refuse)
        with pytest.raises(SystemRefusedError, match="No space left"), replacing(tmp_path) as commit:
            replace_all(commit, shards)
    assert [shard.path.read_bytes() for shard in shards] == old
    with pytest.raises(SystemRefusedError, match="may be half changed"):
        norm(tmp_path)
    assert recover(tmp_path).finished == 1
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_where_nobody_knows_whether_the_log_says_ready_recovery_does_what_it_says(
    tmp_path, monkeypatch, count, is_whole
):
    shards = shards_of(tmp_path, count)
    old = [shard.path.read_bytes() for shard in shards]
    write_all = fs.write_all

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    def write_ready(fd, parts, begin):
        if b'"ready"' not in parts[0]:
            return write_all(fd, parts, begin)
        monkeypatch.setattr(fs, "resize", refuse)
        monkeypatch.setattr(fs, "sync", refuse)
        write_all(fd, [parts[0] if is_whole else parts[0][:-1]], begin)
        return len(parts[0]) if is_whole else refuse()

    with pytest.raises(SystemRefusedError, match="Input/output error") as caught, replacing(tmp_path) as commit:
        monkeypatch.setattr(fs, "write_all", write_ready)
        replace_all(commit, shards)
    monkeypatch.undo()
    assert not hasattr(caught.value, "__notes__")
    assert [shard.path.read_bytes() for shard in shards] == old
    # A single rename was not done.
    is_finished = is_whole and count > 1
    assert [row.outcome for row in recover(tmp_path).per_run] == ["finished" if is_finished else "untouched"]
    assert [shard.path.read_bytes() for shard in shards] == (
        [b"n" * shard.size for shard in shards] if is_finished else old
    )
    assert sorted(tmp_path.iterdir()) == [shard.path for shard in shards]


@pytest.mark.parametrize("refused", [1, 2])
@pytest.mark.parametrize("by", ["recover", "the next run"])
def test_a_rename_that_is_refused_after_another_is_left_to_recover(tmp_path, monkeypatch, refused, by):
    shards = shards_of(tmp_path, 3)
    old, new = [shard.path.read_bytes() for shard in shards], [b"n" * shard.size for shard in shards]
    with monkeypatch.context() as patch:
        refuse_renames_to(patch, f"{refused}.safetensors")
        with pytest.raises(SystemRefusedError) as caught, replacing(tmp_path) as commit:
            replace_all(commit, shards)
        (problem,) = caught.value.problems
        assert (problem.code, caught.value.exit_code) == ("unfinished", 5)
        assert problem.line == f"{shards[refused].path}: some files are new and some are not: Input/output error"
        assert problem.hint == f'run gradtool.recover("{tmp_path}")'
        assert not hasattr(caught.value, "__notes__")
        half = new[:refused] + old[refused:]
        assert [shard.path.read_bytes() for shard in shards] == half
        with pytest.raises(SystemRefusedError, match=r"wait for it, run gradtool\.recover\(.*\), or use"):
            norm(tmp_path)
        # As long as it is refused, that is all that anybody can do.
        for command in (recover, zero):
            with pytest.raises(SystemRefusedError, match="Input/output error"):
                command(tmp_path)
            assert [shard.path.read_bytes() for shard in shards] == half
    if by == "recover":
        assert recover(tmp_path).finished == 1
    else:
        with pytest.raises(BadInputError, match="is a text file"):
            zero(tmp_path)  # The new content of this test is none that it could work with.
    assert [shard.path.read_bytes() for shard in shards] == new
    assert sorted(tmp_path.iterdir()) == [shard.path for shard in shards]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_renames_that_end_for_want_of_memory_are_left_to_recover(tmp_path, monkeypatch, nth):
    shards = shards_of(tmp_path, 3)
    calls, real = [], Staged.take_place

    def fail(*arguments, **options):
        calls.append(1)
        if len(calls) == nth:
            raise MemoryError
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Staged, "take_place", fail)
        with pytest.raises(MemoryError), replacing(tmp_path) as commit:
            replace_all(commit, shards)
    assert [shard.path.read_bytes()[:1] == b"n" for shard in shards] == [number < nth - 1 for number in range(3)]
    with pytest.raises(SystemRefusedError, match=r"wait for it, run gradtool\.recover\(.*\), or use"):
        norm(tmp_path)
    assert recover(tmp_path).finished == 1
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("call", "number"), [("replace", errno.ENOENT), ("link", errno.EEXIST)])
def test_a_call_whose_answer_a_server_lost_was_done(tmp_path, monkeypatch, count, call, number):
    shards = shards_of(tmp_path, count)
    is_new = call == "link"
    if is_new:
        for shard in shards:
            shard.path.unlink()
    real = getattr(os, call)

    def fail_after(*arguments, **options):
        # As NFS, whose second try finds that the first was done.
        real(*arguments, **options)
        raise OSError(number, os.strerror(number))

    with replacing(tmp_path) as commit:
        for shard in shards:
            fill(commit.stage(shard.path, shard.size, None if is_new else shard.stat, is_new=is_new))
        monkeypatch.setattr(os, call, fail_after)
        commit.put_in_place()
    assert sorted(tmp_path.iterdir()) == [shard.path for shard in shards]
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)


@pytest.mark.parametrize(
    ("number", "is_there", "wrong"),
    [
        # A file system without second names.
        (errno.EPERM, False, None),
        (errno.EOPNOTSUPP, False, None),
        (errno.EPERM, True, "another program created it"),
        (errno.EEXIST, False, "another program created it"),
        (errno.EIO, False, "Input/output error"),
    ],
)
def test_a_new_file_replaces_none_even_where_links_are_refused(tmp_path, monkeypatch, number, is_there, wrong):
    def refuse(*_, **__):
        if is_there:
            (tmp_path / "new").write_bytes(b"foreign")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    expected = pytest.raises(SystemRefusedError, match=wrong) if wrong else contextlib.nullcontext()
    with expected, replacing(tmp_path, "new") as commit:
        fill(commit.stage(tmp_path / "new", 9, is_new=True))
        commit.put_in_place()
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert content == ({"new": b"foreign"} if is_there else {} if wrong else {"new": b"n" * 9})


def test_a_file_whose_mode_another_program_changes_all_the_time_is_not_replaced(tmp_path, monkeypatch):
    (shard,) = shards_of(tmp_path, 1)
    content, copy, tries = shard.path.read_bytes(), staging.copy_attributes, []

    def copy_and_change(*arguments):
        copy(*arguments)
        status = shard.path.stat()
        shard.path.chmod(0o600 + len(tries) % 2)
        tries.append(status)
        until_told(shard.path, status)

    monkeypatch.setattr(staging, "copy_attributes", copy_and_change)
    with pytest.raises(SystemRefusedError, match="changed by another program"), replacing(tmp_path) as commit:
        fill(commit.stage(shard.path, shard.size, shard.stat))
        commit.put_in_place()
    assert len(tries) == 20
    assert shard.path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [shard.path]


def test_an_error_of_a_run_that_only_recovery_may_complete_says_so(tmp_path):
    paths = files_in(tmp_path)
    for hint in (None, "free some space"):
        with pytest.raises(SystemRefusedError) as caught, registered(paths) as run:
            run.needs_recovery = True
            raise SystemRefusedError("the disk fails", file=paths[0], tensor="t", hint=hint)
        (problem,) = caught.value.problems
        assert (problem.line, problem.code) == (f"{paths[0]}: tensor 't': the disk fails", "unfinished")
        assert problem.hint == f'run gradtool.recover("{tmp_path}")'
        assert recover(tmp_path).untouched == 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.ETXTBSY])
def test_a_file_that_may_not_be_written_to_may_be_replaced(tmp_path, monkeypatch, number):
    (shard,) = shards_of(tmp_path, 1)
    real = Folder.open

    def refuse(folder, name, flags):
        if name == shard.path.name and flags & os.O_WRONLY:
            raise OSError(number, os.strerror(number))
        return real(folder, name, flags)

    monkeypatch.setattr(Folder, "open", refuse)
    with replacing(tmp_path) as commit:
        fill(commit.stage(shard.path, shard.size, shard.stat))
        commit.put_in_place()
    assert shard.path.read_bytes() == b"n" * shard.size


def test_a_file_that_cannot_be_looked_at_after_its_rename_was_renamed(tmp_path, monkeypatch):
    (shard,) = shards_of(tmp_path, 1)
    rename = Folder.rename

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    def rename_and_fail(folder, *names):
        rename(folder, *names)
        monkeypatch.setattr(Folder, "status", refuse)

    with replacing(tmp_path) as commit:
        fill(commit.stage(shard.path, shard.size, shard.stat))
        monkeypatch.setattr(Folder, "rename", rename_and_fail)
        commit.put_in_place()
        monkeypatch.undo()
    assert shard.path.read_bytes() == b"n" * shard.size
    assert list(tmp_path.iterdir()) == [shard.path]


def test_a_run_in_a_folder_that_not_everybody_may_list_has_a_marker_for_each_file_while_it_writes(
    tmp_path, monkeypatch
):
    shards = shards_of(tmp_path)
    tmp_path.chmod(0o711)
    rename, seen = Folder.rename, []

    def look_and_rename(folder, *names):
        with Folder.at(tmp_path) as opened:
            logs = [log.read_log(opened, marker_name(shard.path.name)) for shard in shards]
        seen.append([log.is_unfinished for log in logs])
        rename(folder, *names)

    monkeypatch.setattr(Folder, "rename", look_and_rename)
    with replacing(tmp_path) as commit:
        (tmp_path / marker_name("2.safetensors")).write_bytes(b"foreign")
        replace_all(commit, shards)
    assert seen == [[True, True]] * 2
    assert sorted(tmp_path.iterdir()) == sorted(
        [*(shard.path for shard in shards), tmp_path / marker_name("2.safetensors")]
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_known_before_work_starts_and_leaves_no_trace(tmp_path, monkeypatch, number):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with pytest.raises(SystemRefusedError, match=os.strerror(number)) as caught, replacing(tmp_path) as commit:
        commit.stage(shards[0].path, shards[0].size, shards[0].stat)
        monkeypatch.setattr(system, "reserve", refuse)
        commit.stage(shards[1].path, shards[1].size, shards[1].stat)
    assert caught.value.exit_code == 5
    assert snapshot(tmp_path) == before


def test_signals_wait_for_the_last_rename(tmp_path, monkeypatch):
    shards = shards_of(tmp_path)
    real_replace = os.replace

    def replace_and_interrupt(path, target, **folders):
        real_replace(path, target, **folders)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "replace", replace_and_interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), signals.deferred(), replacing(tmp_path, fsync=False) as commit:
        for shard in shards:
            fill(commit.stage(shard.path, shard.size, shard.stat))
        commit.put_in_place()
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)
    assert signals.is_committed()
    assert len(list(tmp_path.iterdir())) == 2
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize(("module", "call"), [(system, "sync"), (os, "fchmod")])
def test_a_sync_that_fails_changes_nothing(tmp_path, monkeypatch, module, call):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, call, refuse)
    with pytest.raises(SystemRefusedError, match="Input/output"), replacing(tmp_path) as commit:
        for shard in shards:
            fill(commit.stage(shard.path, shard.size, shard.stat))
        commit.put_in_place()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL])
def test_a_folder_that_cannot_be_synced_is_said_and_one_that_need_not_be_is_not(tmp_path, monkeypatch, number):
    (shard,) = shards_of(tmp_path, 1)
    real_sync = system.sync

    def sync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real_sync(fd)

    monkeypatch.setattr(system, "sync", sync)
    said = pytest.raises(SystemRefusedError, match=r"0.safetensors: all files were written and are in place, but")
    with said if number == errno.EIO else contextlib.nullcontext(), replacing(tmp_path) as commit:
        fill(commit.stage(shard.path, shard.size))
        commit.put_in_place()
    assert shard.path.read_bytes() == b"n" * shard.size


@pytest.mark.parametrize("count", [1, 2])
def test_eio_at_the_sync_after_the_renames_says_that_the_files_are_new(tmp_path, count):
    """As the command says it; a hint that leads to adding a second time would be wrong."""
    name = "0.safetensors" if count == 1 else ""
    for step in range(1, 100):
        shards = shards_of(tmp_path, count)
        before = [shard.path.read_bytes() for shard in shards]
        answer = gradtool("clip", tmp_path / name, "--max-norm", "1", env={"GRADTOOL_FAULT": f"EIO@{step}"})
        now = [shard.path.read_bytes() for shard in shards]
        if answer.returncode == 5 and all(new != old for new, old in zip(now, before, strict=True)):
            break
        if "some files are new and some are not" in answer.stderr:
            # The second rename was refused.
            assert (answer.returncode, count, now[0] != before[0], now[1] == before[1]) == (5, 2, True, True), answer
            assert recover(tmp_path).finished == 1
            continue
        # A file that could not be removed at the end is no failure.
        assert (answer.returncode, now == before) in ((5, True), (0, False)), answer
    what = "all files were written and are in place"
    unknown = "whether they would survive a power cut is unknown: the folder could not be synced: Input/output error"
    hint = "run sync, and not this command again" if count == 1 else f"run gradtool recover {tmp_path}"
    assert f"0.safetensors: {what}, but {unknown}\n  hint: {hint}\n" in answer.stderr
    if count > 1:
        recover(tmp_path)
        assert [shard.path.read_bytes() for shard in shards] == now


# Of a single file, the folder is synced only after the rename.
INSTANTS = ("while it is built", "while all are synced", "when all are ready")
MOMENTS = pytest.mark.parametrize(
    ("count", "instant"), [(count, instant) for count in (1, 2) for instant in INSTANTS[:: 3 - count]]
)


@contextlib.contextmanager
def at_instant(monkeypatch, instant, act):
    """Have something happen at an instant of a commit; in the block, files are built."""
    calls = []

    def patched(name, is_now):
        method = getattr(Transaction, name)

        def step(*arguments, **options):
            method(*arguments, **options)
            if is_now(options) and not calls:
                calls.append(act())

        monkeypatch.setattr(Transaction, name, step)

    if instant == "while all are synced":
        patched("sync_folders", lambda _: True)
    if instant == "when all are ready":
        patched("append", lambda options: "ready" in options)
    yield
    if instant == "while it is built":
        calls.append(act())


def replace_at(monkeypatch, instant, act, folder, shards):
    """Replace files; something happens at an instant."""
    with replacing(folder) as commit:
        with at_instant(monkeypatch, instant, act):
            for shard in shards:
                temporary = commit.stage(shard.path, shard.size, shard.stat)
                assert temporary.path.stat().st_mode & 0o777 == 0o600
                fill(temporary)
        commit.put_in_place()


@MOMENTS
def test_a_write_whose_date_is_set_back_is_no_less_a_change(tmp_path, monkeypatch, count, instant):
    shards = shards_of(tmp_path, count)
    with pytest.raises(SystemRefusedError, match="changed by another program"):
        replace_at(monkeypatch, instant, lambda: write_back_in_time(shards[0].path, b"foreign"), tmp_path, shards)
    assert shards[0].path.read_bytes().endswith(b"foreign")
    assert all(b"nnnn" not in shard.path.read_bytes() for shard in shards)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(shard.path.name for shard in shards)


# How another program changes a file that was to be replaced, and after that nobody can tell it from its size and date.
LATE = {
    "writes": lambda path: write_back_in_time(path, b"foreign"),
    "replaces": lambda path: replaced_back_in_time(path, b"foreign"),
}


def replaced_back_in_time(path, content):
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[: -len(content)] + content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    until_told(path, before)


@pytest.mark.parametrize("change", LATE)
@pytest.mark.parametrize("killed", [False, True])
def test_a_foreign_write_when_all_are_ready_is_overwritten_neither_by_the_run_nor_by_recovery(
    tmp_path, monkeypatch, change, killed
):
    shards = shards_of(tmp_path, 3)
    act = partial(LATE[change], shards[1].path)
    if killed:
        rename, renamed = os.replace, []

        def replace_then_die(*arguments, **options):
            if renamed:
                os._exit(0)
            renamed.append(rename(*arguments, **options))

        def replace_and_crash():
            os.replace = replace_then_die
            with replacing(tmp_path) as commit:
                replace_all(commit, shards)

        crash(replace_and_crash)
        act()
    else:
        with pytest.raises(SystemRefusedError) as caught:
            replace_at(monkeypatch, "when all are ready", act, tmp_path, shards)
        what = "some files are new and some are not: was changed by another program in the meantime"
        assert caught.value.problems[0].line == f"{shards[1].path}: {what}"
        monkeypatch.undo()
    half = [shard.path.read_bytes() for shard in shards]
    assert [half[0][:1] == b"n", half[1][-7:], half[2][:1] == b"n"] == [True, b"foreign", False]
    for command in (recover, zero, recover):
        with pytest.raises(SystemRefusedError, match="1.safetensors: another program wrote to it"):
            command(tmp_path)
        assert [shard.path.read_bytes() for shard in shards] == half
    assert recover(tmp_path, force=True).finished == 1
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)
    assert sorted(tmp_path.iterdir()) == [shard.path for shard in shards]


@pytest.mark.parametrize("killed", [False, True])
def test_a_file_that_another_program_creates_when_all_are_ready_is_not_replaced(tmp_path, monkeypatch, killed):
    targets = [tmp_path / f"{number}.safetensors" for number in range(3)]

    def stage_all(commit):
        for target in targets:
            fill(commit.stage(target, 100, is_new=True))

    def create():
        targets[1].write_bytes(b"foreign")

    if killed:

        def create_and_crash():
            with replacing(tmp_path) as commit:
                stage_all(commit)
                take_place = Staged.take_place

                def take_place_and_die(staged, *arguments, **options):
                    if staged.target == targets[1]:
                        os._exit(0)
                    return take_place(staged, *arguments, **options)

                Staged.take_place = take_place_and_die
                commit.put_in_place()

        crash(create_and_crash)
        create()
    else:
        with pytest.raises(SystemRefusedError, match="another program created it"), replacing(tmp_path) as commit:
            with at_instant(monkeypatch, "when all are ready", create):
                stage_all(commit)
            commit.put_in_place()
        monkeypatch.undo()
    assert [target.exists() and target.read_bytes()[:1] for target in targets] == [b"n", b"f", False]
    with pytest.raises(SystemRefusedError, match="1.safetensors: another program wrote to it"):
        recover(tmp_path)
    assert targets[1].read_bytes() == b"foreign"
    targets[1].unlink()
    assert recover(tmp_path).finished == 1
    assert [target.read_bytes() for target in targets] == [b"n" * 100] * 3
    assert sorted(tmp_path.iterdir()) == targets


@MOMENTS
def test_the_mode_is_that_of_the_rename_and_no_temporary_is_readable_before(tmp_path, monkeypatch, count, instant):
    shards = shards_of(tmp_path, count)
    # The last: when all are ready, others are renamed before it.
    target = shards[-1].path
    target.chmod(0o644)
    shards[-1].stat = target.stat()

    def restrict():
        status = target.stat()
        target.chmod(0o600)
        until_told(target, status)

    replace_at(monkeypatch, instant, restrict, tmp_path, shards)
    assert target.stat().st_mode & 0o777 == 0o600
    assert all(b"nnnn" in shard.path.read_bytes() for shard in shards)


def test_a_change_of_mode_after_the_crash_is_no_foreign_write(tmp_path):
    paths = files_in(tmp_path, 2)
    new = half_replaced(paths)
    paths[1].chmod(0o600)
    assert recover(tmp_path).finished == 1
    assert content_of(paths) == new


class Hybrid(NamedTuple):
    """Two files that are changed in place, and a state that is replaced with them; what all will hold."""

    paths: list[Path]
    state: Path
    new: list[bytes]


@pytest.fixture
def hybrid(tmp_path):
    paths = files_in(tmp_path, 2)
    (tmp_path / "state").write_bytes(b"old state")
    return Hybrid(paths, tmp_path / "state", [b"n" * path.stat().st_size for path in paths] + [b"new state"])


def put_in_place(hybrid):
    """Change the files in place, and replace the state."""
    run = registered([*hybrid.paths, hybrid.state])
    try:
        with Commit(run) as commit:
            overwrite(run, commit, hybrid.paths, hybrid.new[:2])
            commit.stage_content(SmallFile(hybrid.state, hybrid.state.stat(), hybrid.new[-1]), is_new=False)
            commit.put_in_place()
    finally:
        run.close()


def test_a_rename_that_is_refused_after_files_were_changed_in_place_is_left_to_recover(hybrid, monkeypatch):
    folder = hybrid.state.parent
    with monkeypatch.context() as patch:
        refuse_renames_to(patch, "state")
        with pytest.raises(SystemRefusedError) as caught:
            put_in_place(hybrid)
        assert caught.value.problems[0].line == (
            f"{hybrid.state}: some files are new and some are not: Input/output error"
        )
        assert content_of([*hybrid.paths, hybrid.state]) == [*hybrid.new[:2], b"old state"]
    assert recover(folder).finished == 1
    assert content_of([*hybrid.paths, hybrid.state]) == hybrid.new
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("when", ["ready", "copied"])
def test_a_state_that_another_program_writes_is_overwritten_neither_by_the_run_nor_by_recovery(
    hybrid, monkeypatch, when
):
    folder = hybrid.state.parent
    apply = RedoLog.apply

    def apply_and_write(*arguments):
        if when == "ready":
            write_back_in_time(hybrid.state, b"theirs")
        apply(*arguments)
        if when == "copied":
            write_back_in_time(hybrid.state, b"theirs")

    with monkeypatch.context() as patch:
        patch.setattr(RedoLog, "apply", apply_and_write)
        with pytest.raises(SystemRefusedError, match="was changed by another program"):
            put_in_place(hybrid)
    for command in (recover, lambda _: zero(hybrid.paths[0])):
        with pytest.raises(SystemRefusedError, match="state: another program wrote to it"):
            command(folder)
        assert hybrid.state.read_bytes() == b"oldtheirs"
    assert recover(folder, force=True).finished == 1
    assert content_of([*hybrid.paths, hybrid.state]) == hybrid.new


def test_a_copy_that_is_refused_is_left_to_recover(hybrid, monkeypatch):
    folder = hybrid.state.parent
    real, inode = fs.write_all, hybrid.paths[1].stat().st_ino

    def refuse(fd, parts, begin):
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, parts, begin)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "write_all", refuse)
        with pytest.raises(SystemRefusedError) as caught:
            put_in_place(hybrid)
        (problem,) = caught.value.problems
        assert problem.line == f"{hybrid.paths[1]}: some files are new and some are not: Input/output error"
        assert (problem.code, problem.hint) == ("unfinished", f'run gradtool.recover("{folder}")')
        with pytest.raises(SystemRefusedError, match="Input/output error"):
            recover(folder)
        # Nothing is renamed before everything is copied.
        assert hybrid.state.read_bytes() == b"old state"
    with pytest.raises(SystemRefusedError, match="may be half changed"):
        norm(hybrid.paths[1])
    assert recover(folder).finished == 1
    assert content_of([*hybrid.paths, hybrid.state]) == hybrid.new


def test_a_file_whose_size_changes_while_it_is_overwritten_is_noticed(hybrid, monkeypatch):
    apply = RedoLog.apply

    def append_and_apply(*arguments):
        with hybrid.paths[1].open("ab") as file:
            file.write(b"theirs")
        apply(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RedoLog, "apply", append_and_apply)
        with pytest.raises(SystemRefusedError, match="1.safetensors: some files are new .* changed by another program"):
            put_in_place(hybrid)
    with pytest.raises(SystemRefusedError, match="1.safetensors: another program wrote to it"):
        recover(hybrid.state.parent)
    assert hybrid.paths[1].read_bytes().endswith(b"theirs")
    assert hybrid.state.read_bytes() == b"old state"


@pytest.mark.parametrize("when", ["opened", "built"])
def test_a_file_that_changes_before_all_is_ready_is_not_overwritten(hybrid, monkeypatch, when):
    before = content_of([hybrid.paths[0], hybrid.state])
    place, method = (Commit, "overwrite") if when == "opened" else (InPlace, "finish")
    real = getattr(place, method)

    def write_meanwhile(*arguments):
        result = real(*arguments) if when == "opened" else None
        write_back_in_time(hybrid.paths[1], b"theirs")
        return real(*arguments) if when == "built" else result

    monkeypatch.setattr(place, method, write_meanwhile)
    with pytest.raises(SystemRefusedError, match="1.safetensors: was changed by another program") as caught:
        put_in_place(hybrid)
    assert caught.value.__notes__ == ["no file was changed"]
    assert content_of([hybrid.paths[0], hybrid.state]) == before
    assert hybrid.paths[1].read_bytes().endswith(b"theirs")
    assert len(list(hybrid.state.parent.iterdir())) == 3


@LINUX
def test_an_access_control_list_lets_nobody_read_a_temporary_and_is_that_of_the_rename(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    shard.path.chmod(0o640)
    try:
        os.setxattr(shard.path, ACL, acl(1234))
    except OSError as error:
        pytest.skip(f"this file system has no access control lists: {error}")
    shard.stat = shard.path.stat()
    with replacing(tmp_path) as commit:
        temporary = commit.stage(shard.path, shard.size, shard.stat)
        # The rights of the group are then the most that anybody in the list has.
        assert temporary.path.stat().st_mode & 0o077 == 0
        fill(temporary)
        os.setxattr(shard.path, ACL, acl(4321))
        shard.path.chmod(0o660)
        commit.put_in_place()
    assert shard.path.stat().st_mode & 0o777 == 0o660
    assert struct.pack("<HHi", 2, 4, 4321) in os.getxattr(shard.path, ACL)
    assert struct.pack("<HHi", 2, 4, 1234) not in os.getxattr(shard.path, ACL)


ACL = "system.posix_acl_access"


def acl(user):
    """A list that lets a user read. Of linux/posix_acl_xattr.h: tag, rights, ID."""
    entries = [(1, 6, -1), (2, 4, user), (4, 4, -1), (0x10, 4, -1), (0x20, 0, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)


@LINUX
def test_attributes_that_are_removed_meanwhile_are_not_restored(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    try:
        os.setxattr(shard.path, "user.note", b"from rank 3")
    except OSError as error:
        pytest.skip(f"this file system has no extended attributes: {error}")
    shard.path.chmod(0o644)
    shard.stat = shard.path.stat()
    with replacing(tmp_path) as commit:
        fill(commit.stage(shard.path, shard.size, shard.stat))
        os.removexattr(shard.path, "user.note")
        shard.path.chmod(0o600)
        commit.put_in_place()
    assert os.listxattr(shard.path) == []
    assert shard.path.stat().st_mode & 0o777 == 0o600


def test_a_file_system_that_cannot_reserve_space_does_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(system, "reserve", refuse)
    with replacing(tmp_path, "x") as commit:
        assert commit.stage(tmp_path / "x", 1000).path.stat().st_size == 1000


def test_a_name_of_many_bytes_can_be_replaced(tmp_path):
    path = tmp_path / ("😀" * 60 + ".safetensors")
    shard = read_at(write(path, {"a": np.ones(5, np.float32)}))
    with replacing(tmp_path, path.name) as commit:
        fill(commit.stage(path, shard.size, shard.stat))
        commit.put_in_place()
    assert path.read_bytes() == b"n" * shard.size


def test_outputs_may_not_collide_with_each_other_or_with_an_input(tmp_path):
    shards = [read_shard(file.path) for file in shards_of(tmp_path)]
    with pytest.raises(UsageError, match="two inputs"):
        check_collisions([tmp_path / "x", tmp_path / "x"], shards)
    with pytest.raises(UsageError, match="is an input"):
        check_collisions([Path(shards[0].name)], shards)
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(UsageError, match="two inputs"):
        check_collisions([tmp_path / "x", tmp_path / "link"], shards)
    check_collisions([tmp_path / "x", tmp_path / "y"], shards)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"output": "-"}, 'output="-" is not supported: results are files, not streams; use ./-'),
        ({"output_dir": "-"}, 'output_dir="-" is not supported'),
        ({"output": "x", "write": "inplace"}, 'write="inplace" cannot be combined with output or output_dir'),
        ({"output": "x", "output_dir": "y"}, "output and output_dir cannot be combined"),
        ({"no_clobber": True}, "no_clobber=True requires output or output_dir"),
        ({"output": "x/"}, 'output="x/" is a folder or an index, not a file; use output_dir'),
        ({"output": "model.safetensors.index.json"}, "is a folder or an index, not a file"),
        ({"output_dir": "file"}, 'output_dir="file" is not a folder'),
    ],
)
def test_outputs_that_cannot_be_meant_are_refused_before_anything_is_read(tmp_path, monkeypatch, options, wrong):
    monkeypatch.chdir(tmp_path)
    (shard,) = shards_of(tmp_path, 1)
    (tmp_path / "file").touch()
    before = snapshot(tmp_path)
    with pytest.raises(UsageError) as caught:
        clip(shard.path, max_norm=1, **options)
    assert wrong in str(caught.value)
    assert snapshot(tmp_path) == before


def test_only_regular_files_are_written_over(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for target in (tmp_path / "fifo", Path("/dev/null"), tmp_path):
        with pytest.raises(UsageError, match="not a regular file|is a folder"):
            check_collisions([target], [])


def test_the_rights_of_many_files_are_compared_as_few(tmp_path, monkeypatch):
    for number in range(20):
        write(tmp_path / "set" / f"{number:02}.safetensors", {f"t{number}": np.ones(5, np.float32)})
    seen, judge = [], staging.new_mode
    monkeypatch.setattr(staging, "new_mode", lambda group, sources: seen.append(len(sources)) or judge(group, sources))
    clip(tmp_path / "set", max_norm=1, output_dir=tmp_path / "new")
    # With the file itself where one is replaced; here none is.
    assert seen == [1] * 20
