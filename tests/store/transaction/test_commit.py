import contextlib
import errno
import os
import signal
import stat
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gradtool.store.transaction.replace import Replacement
from support import gradtool, registered, snapshot, until_told, write, write_back_in_time

from gradtool import SystemRefusedError, UsageError, clip, norm, recover
from gradtool.store import fs, signals, system
from gradtool.store.format.header import read_shard
from gradtool.store.fs import Folder
from gradtool.store.transaction import replace, staging
from gradtool.store.transaction.output_checks import check_collisions
from gradtool.store.transaction.staging import Rights, Staged, new_mode
from gradtool.store.transaction.transaction import Transaction

LINUX = pytest.mark.skipif(not hasattr(os, "setxattr"), reason="Python has extended attributes only on Linux")


def file_at(path):
    """A file as it is when its header is read."""
    return SimpleNamespace(path=path, size=path.stat().st_size, stat=path.stat())


def shards_of(folder, count=2):
    return [file_at(write(folder / f"{i}.safetensors", {f"t{i}": np.ones(5, np.float32)})) for i in range(count)]


@contextlib.contextmanager
def replacing(folder, name="0.safetensors", *, fsync=True, sources=()):
    run = registered([folder / name, folder / "1.safetensors", folder / "2.safetensors"], fsync=fsync)
    try:
        with Replacement(run, [(path, None) for path in sources]) as replacement:
            yield replacement
    finally:
        run.close()


def fill(temporary, letter=b"n"):
    temporary.path.write_bytes(letter * temporary.path.stat().st_size)


def test_nothing_changes_before_the_commit_and_everything_with_it(tmp_path):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)
    with replacing(tmp_path) as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before
        replacement.commit()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors"]
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)


def test_without_a_commit_no_trace_is_left(tmp_path):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(KeyboardInterrupt) as caught, replacing(tmp_path) as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        raise KeyboardInterrupt
    assert snapshot(tmp_path) == before
    assert caught.value.__notes__ == ["no file was changed"]


def test_the_space_is_reserved_and_the_temporary_hidden(tmp_path):
    with replacing(tmp_path, "x.safetensors") as replacement:
        temporary = replacement.stage(tmp_path / "x.safetensors", 1 << 20)
        assert temporary.path.stat().st_size == 1 << 20
        assert temporary.path.stat().st_blocks * 512 >= 1 << 20
        assert temporary.name.startswith(".gradtool-")
        assert temporary.path.suffix == ".tmp"


@pytest.mark.parametrize("mode", [0o640, 0o444, 0o000])
def test_the_mode_is_kept_even_one_that_forbids_writing(tmp_path, mode):
    (shard,) = shards_of(tmp_path, 1)
    shard.path.chmod(mode)
    shard.stat = shard.path.stat()
    with replacing(tmp_path) as replacement:
        fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
    assert shard.path.stat().st_mode & 0o7777 == mode


@LINUX
def test_extended_attributes_are_kept(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    try:
        os.setxattr(shard.path, "user.note", b"from rank 3")
        shard.stat = shard.path.stat()
    except OSError as error:
        pytest.skip(f"this file system has no extended attributes: {error}")
    with replacing(tmp_path) as replacement:
        fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
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
    with replacing(tmp_path) as replacement:
        temporary = replacement.stage(shard.path, shard.size, shard.stat)
        assert "system.posix_acl_access" not in os.listxattr(temporary.path)
        fill(temporary)
        replacement.commit()
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
    with replacing(tmp_path, "new", sources=[shard.path]) as replacement:
        fill(replacement.stage(tmp_path / "new", 10))
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
    with replacing(tmp_path) as replacement:
        replacement.stage(shard.path, shard.size, shard.stat)
    monkeypatch.setattr(os, "listxattr", lambda _: ["user.note"])
    with pytest.raises(SystemRefusedError), replacing(tmp_path) as replacement:
        replacement.stage(shard.path, shard.size, shard.stat)
    assert snapshot(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_owner_is_kept(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    os.chown(shard.path, 1234, 4321)
    shard.path.chmod(0o4755)
    shard = file_at(shard.path)
    with replacing(tmp_path) as replacement:
        fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
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
    with pytest.raises(SystemRefusedError, match="check the owner"), replacing(tmp_path) as replacement:
        replacement.stage(shard.path, shard.size, shard.stat)
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
        with replacing(tmp_path, "new", sources=paths) as replacement:
            fill(replacement.stage(tmp_path / "new", 3))
            replacement.commit()
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
    run = registered([tmp_path / "a", tmp_path / "b"])
    for name, source in (("a", (shard.path, Path(__file__).stat())), ("b", (gone, None))):
        with Replacement(run, [source]) as replacement:
            fill(replacement.stage(tmp_path / name, 3))
            replacement.commit()
        assert (tmp_path / name).stat().st_mode & 0o7777 == 0o600
    run.close()


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path):
    (shard,) = shards_of(tmp_path / "real", 1)
    link = tmp_path / "link.safetensors"
    link.symlink_to(shard.path)
    shard = file_at(link)
    with replacing(tmp_path / "real") as replacement:
        fill(replacement.stage(link, shard.size, shard.stat))
        replacement.commit()
    assert link.is_symlink()
    assert (tmp_path / "real" / "0.safetensors").read_bytes() == b"n" * shard.size


def steps_of(monkeypatch):
    """The names of the calls that change something, as they come."""
    steps = []
    for place, name in ((fs, "sync"), (Folder, "link"), (Folder, "rename"), (Folder, "unlink")):
        real = getattr(place, name)

        def told(*arguments, name=name, real=real):
            steps.append(name)
            real(*arguments)

        monkeypatch.setattr(place, name, told)
    return steps


@pytest.mark.parametrize("count", [1, 2])
def test_every_file_is_synced_before_the_first_rename_and_the_log_of_several_too(tmp_path, monkeypatch, count):
    steps = steps_of(monkeypatch)
    expected = {
        # Each file; the log with the rename; this; then the folder. And the log and the lock go.
        (1, True): ["sync", "sync", "rename", "sync", "unlink", "unlink"],
        (1, False): ["rename", "unlink", "unlink"],
        # Each file; second names; the log and the folder; the log with the renames; these; and the folder.
        (2, True): [
            *("sync", "sync", "link", "link", "sync", "sync", "sync"),
            *("rename", "rename", "unlink", "unlink", "sync", "unlink", "unlink"),
        ],
        (2, False): ["link", "link", "rename", "rename", "unlink", "unlink", "unlink", "unlink"],
    }
    for fsync in (True, False):
        steps.clear()
        with replacing(tmp_path, fsync=fsync) as replacement:
            for shard in shards_of(tmp_path, count):
                fill(replacement.stage(shard.path, shard.size, shard.stat))
            replacement.commit()
        assert steps == expected[count, fsync]


def test_a_file_that_another_program_changed_is_not_overwritten(tmp_path):
    first, second = shards_of(tmp_path)
    with pytest.raises(SystemRefusedError, match="changed by another program"), replacing(tmp_path) as replacement:
        for shard in (first, second):
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        with second.path.open("ab") as file:
            file.write(b"theirs")
        replacement.commit()
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


def test_a_rename_that_fails_half_way_takes_back_those_before_it(tmp_path, monkeypatch):
    shards = shards_of(tmp_path, 3)
    before = {shard.path: shard.path.read_bytes() for shard in shards}
    refuse_renames_to(monkeypatch, "1.safetensors")
    with (
        pytest.raises(SystemRefusedError, match="1.safetensors: Input/output error") as caught,
        replacing(tmp_path) as replacement,
    ):
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
    assert caught.value.__notes__ == ["no file was changed"]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("where", [(replace, "move_back"), (Staged, "take_place")])
def test_renames_that_end_for_want_of_memory_are_left_to_recover(tmp_path, monkeypatch, where):
    shards = shards_of(tmp_path, 3)
    old = [shard.path.read_bytes() for shard in shards]
    with monkeypatch.context() as patch:
        refuse_renames_to(patch, "1.safetensors")

        def fail(*_, **__):
            raise MemoryError

        patch.setattr(*where, fail)
        with pytest.raises(MemoryError), replacing(tmp_path) as replacement:
            for shard in shards:
                fill(replacement.stage(shard.path, shard.size, shard.stat))
            replacement.commit()
    with pytest.raises(SystemRefusedError, match=r"wait for it, run gradtool\.recover\(.*\), or use"):
        norm(tmp_path)
    result = recover(tmp_path)
    new = [b"n" * shard.size for shard in shards]
    assert [shard.path.read_bytes() for shard in shards] == (new if result.finished else old)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_rename_that_cannot_be_taken_back_is_left_to_recover(tmp_path, monkeypatch):
    shards = shards_of(tmp_path, 3)
    refuse_renames_to(monkeypatch, "1.safetensors")

    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with (
        pytest.raises(SystemRefusedError, match=r"run gradtool\.recover\(") as caught,
        replacing(tmp_path) as replacement,
    ):
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
    assert (caught.value.problems[0].code, caught.value.exit_code) == ("unfinished", 5)
    with pytest.raises(SystemRefusedError, match=r"wait for it, run gradtool\.recover\(.*\), or use"):
        norm(tmp_path)
    monkeypatch.undo()
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

    with replacing(tmp_path) as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, None if is_new else shard.stat, is_new=is_new))
        monkeypatch.setattr(os, call, fail_after)
        replacement.commit()
    assert sorted(tmp_path.iterdir()) == [shard.path for shard in shards]
    assert all(shard.path.read_bytes() == b"n" * shard.size for shard in shards)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_known_before_work_starts_and_leaves_no_trace(tmp_path, monkeypatch, number):
    shards = shards_of(tmp_path)
    before = snapshot(tmp_path)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with pytest.raises(SystemRefusedError, match=os.strerror(number)) as caught, replacing(tmp_path) as replacement:
        replacement.stage(shards[0].path, shards[0].size, shards[0].stat)
        monkeypatch.setattr(system, "reserve", refuse)
        replacement.stage(shards[1].path, shards[1].size, shards[1].stat)
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
    with pytest.raises(KeyboardInterrupt), signals.deferred(), replacing(tmp_path, fsync=False) as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
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
    with pytest.raises(SystemRefusedError, match="Input/output"), replacing(tmp_path) as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
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
    with said if number == errno.EIO else contextlib.nullcontext(), replacing(tmp_path) as replacement:
        fill(replacement.stage(shard.path, shard.size))
        replacement.commit()
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
        # Without a second name, the files are written all the same.
        assert (answer.returncode, now == before) in ((5, True), (0, False)), answer
    what = "all files were written and are in place"
    unknown = "whether they would survive a power cut is unknown: the folder could not be synced: Input/output error"
    hint = "run sync, and not this command again" if count == 1 else f"run gradtool recover {tmp_path}"
    assert f"0.safetensors: {what}, but {unknown}\n  hint: {hint}\n" in answer.stderr
    if count > 1:
        recover(tmp_path)
        assert [shard.path.read_bytes() for shard in shards] == now


# The names of several files are synced once each has a second one.
INSTANTS = {"while they are built": None, "while they are synced": "sync_folders", "before the renames": "append"}
MOMENTS = pytest.mark.parametrize(
    ("count", "instant"), [(count, instant) for count in (1, 2) for instant in list(INSTANTS)[:: 3 - count]]
)


@MOMENTS
def test_a_write_whose_date_is_set_back_is_no_less_a_change(tmp_path, monkeypatch, count, instant):
    shards = shards_of(tmp_path, count)
    at_instant(monkeypatch, INSTANTS[instant], lambda: write_back_in_time(shards[0].path, b"foreign"))
    with pytest.raises(SystemRefusedError, match="changed by another program"), replacing(tmp_path) as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        if INSTANTS[instant] is None:
            write_back_in_time(shards[0].path, b"foreign")
        replacement.commit()
    assert shards[0].path.read_bytes().endswith(b"foreign")
    assert all(b"nnnn" not in shard.path.read_bytes() for shard in shards)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(shard.path.name for shard in shards)


def test_a_write_whose_date_is_set_back_is_told_from_the_second_name_that_follows_it(tmp_path, monkeypatch):
    shards = shards_of(tmp_path)
    link = Folder.link

    def linked(folder, name, new):
        link(folder, name, new)
        if name == shards[0].path.name:
            # Many files get their names one after another, which takes a while.
            write_back_in_time(shards[1].path, b"foreign")

    monkeypatch.setattr(Folder, "link", linked)
    with pytest.raises(SystemRefusedError, match="changed by another program"), replacing(tmp_path) as replacement:
        for shard in shards:
            fill(replacement.stage(shard.path, shard.size, shard.stat))
        replacement.commit()
    assert shards[1].path.read_bytes().endswith(b"foreign")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(shard.path.name for shard in shards)


@MOMENTS
def test_the_mode_is_that_of_the_rename_and_no_temporary_is_readable_before(tmp_path, monkeypatch, count, instant):
    shards = shards_of(tmp_path, count)
    target = shards[0].path
    target.chmod(0o644)
    object.__setattr__(shards[0], "stat", target.stat())

    def restrict():
        status = target.stat()
        target.chmod(0o600)
        until_told(target, status)

    at_instant(monkeypatch, INSTANTS[instant], restrict)
    with replacing(tmp_path) as replacement:
        for shard in shards:
            temporary = replacement.stage(shard.path, shard.size, shard.stat)
            assert temporary.path.stat().st_mode & 0o777 == 0o600
            fill(temporary)
        if INSTANTS[instant] is None:
            restrict()
        replacement.commit()
    assert target.stat().st_mode & 0o777 == 0o600
    assert all(b"nnnn" in shard.path.read_bytes() for shard in shards)


def at_instant(monkeypatch, name, act):
    """Have something happen after the first call of a method of the transaction."""
    if name is None:
        return
    method, calls = getattr(Transaction, name), []

    def patched(*arguments, **options):
        method(*arguments, **options)
        if not calls:
            calls.append(1)
            act()

    monkeypatch.setattr(Transaction, name, patched)


@LINUX
def test_an_access_control_list_lets_nobody_read_a_temporary_and_is_that_of_the_rename(tmp_path):
    (shard,) = shards_of(tmp_path, 1)
    shard.path.chmod(0o640)
    try:
        os.setxattr(shard.path, ACL, acl(1234))
    except OSError as error:
        pytest.skip(f"this file system has no access control lists: {error}")
    shard.stat = shard.path.stat()
    with replacing(tmp_path) as replacement:
        temporary = replacement.stage(shard.path, shard.size, shard.stat)
        # The rights of the group are then the most that anybody in the list has.
        assert temporary.path.stat().st_mode & 0o077 == 0
        fill(temporary)
        os.setxattr(shard.path, ACL, acl(4321))
        shard.path.chmod(0o660)
        replacement.commit()
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
    with replacing(tmp_path) as replacement:
        fill(replacement.stage(shard.path, shard.size, shard.stat))
        os.removexattr(shard.path, "user.note")
        shard.path.chmod(0o600)
        replacement.commit()
    assert os.listxattr(shard.path) == []
    assert shard.path.stat().st_mode & 0o777 == 0o600


def test_a_file_system_that_cannot_reserve_space_does_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(system, "reserve", refuse)
    with replacing(tmp_path, "x") as replacement:
        assert replacement.stage(tmp_path / "x", 1000).path.stat().st_size == 1000


def test_a_name_of_many_bytes_can_be_replaced(tmp_path):
    path = tmp_path / ("😀" * 60 + ".safetensors")
    shard = file_at(write(path, {"a": np.ones(5, np.float32)}))
    with replacing(tmp_path, path.name) as replacement:
        fill(replacement.stage(path, shard.size, shard.stat))
        replacement.commit()
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
