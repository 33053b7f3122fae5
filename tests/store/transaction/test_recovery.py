import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from crashes import FAST
from leftovers import ID, content_of, crash, files_in, half_changed, half_replaced
from support import gradtool, gradtool_json, in_place, registered, snapshot, write

from gradtool import BadInputError, SystemRefusedError, UsageError, clip, norm, recover, zero
from gradtool.store.fs import Folder
from gradtool.store.io.redolog import RedoLog
from gradtool.store.transaction.commit import Commit


@pytest.mark.parametrize("by", ["recover", "recover file", "zero"])
def test_what_was_ready_takes_its_place(tmp_path, by):
    paths = files_in(tmp_path)
    new = half_replaced(paths)
    (log,) = tmp_path.glob("*.run")
    pid = json.loads(log.read_bytes().split(b"\n")[0][9:])["run"]["pid"]
    if by == "zero":
        with pytest.raises(BadInputError, match="is a text file"):
            zero(paths[1])  # The new content of this test is none that it could work with.
    else:
        result = recover(tmp_path if by == "recover" else paths[1])
        assert [(row.outcome, row.files, row.pid) for row in result.per_run] == [("finished", 2, pid)]
    assert content_of(paths) == new
    assert sorted(tmp_path.iterdir()) == paths


@pytest.mark.parametrize("by", ["recover", "recover file", "zero"])
def test_what_was_half_overwritten_is_completed(tmp_path, by):
    paths = files_in(tmp_path)
    new = half_changed(paths)
    assert content_of(paths) != new
    if by == "zero":
        with pytest.raises(BadInputError, match="not a safetensors file"):
            zero(paths[1])  # The new content of this test is none that it could work with.
    else:
        result = recover(tmp_path if by == "recover" else paths[1])
        assert [(row.outcome, row.files) for row in result.per_run] == [("finished", 2)]
    assert content_of(paths) == new
    assert sorted(tmp_path.iterdir()) == paths


@pytest.mark.parametrize("leave", [half_replaced, half_changed])
def test_a_copy_of_what_a_crashed_run_left_is_not_thrown_away(tmp_path, leave):
    wanted = leave(files_in(tmp_path / "there"))
    shutil.copytree(tmp_path / "there", tmp_path / "copy")
    before = snapshot(tmp_path / "copy")
    for command in (recover, zero):
        with pytest.raises(SystemRefusedError, match=r"run gradtool\.recover\(.*, force=True\)"):
            command(tmp_path / "copy")
    # But for who has tried.
    assert {path.name for path in before} == {path.name for path in (tmp_path / "copy").iterdir()}
    result = recover(tmp_path / "copy", force=True)
    assert result.finished == 1
    assert content_of(sorted((tmp_path / "copy").iterdir())) == wanted


def test_a_folder_that_cannot_be_looked_at_is_not_taken_for_gone(tmp_path, monkeypatch):
    paths = [files_in(tmp_path / name, 1)[0] for name in "ab"]
    crash(lambda: registered(paths))
    real, before = Folder.at, snapshot(tmp_path)

    def refuse(path):
        if path.name == "b":
            raise PermissionError(13, "Permission denied")
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "at", refuse)
        with pytest.raises(SystemRefusedError, match="Permission denied"):
            recover(tmp_path / "a")
    assert snapshot(tmp_path) == before
    assert recover(tmp_path / "a").untouched == 1
    assert norm(tmp_path / "b").norm > 0


def test_a_folder_that_may_not_be_opened_is_the_one_that_is_named(tmp_path, monkeypatch):
    half_changed(files_in(tmp_path))
    before = snapshot(tmp_path)

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Folder, "at", refuse)
    with pytest.raises(SystemRefusedError, match="Permission denied") as caught:
        recover(tmp_path)
    assert caught.value.problems[0].file == str(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_file_of_ours_that_cannot_be_removed_keeps_the_log(tmp_path, monkeypatch):
    paths = files_in(tmp_path)
    crash(lambda: Commit(registered(paths)).stage(paths[0], 10, paths[0].stat()))
    real = Folder.unlink

    def refuse(folder, name):
        if name.endswith(".tmp"):
            raise PermissionError(1, "Operation not permitted")
        real(folder, name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "unlink", refuse)
        with pytest.raises(SystemRefusedError, match="Operation not permitted"):
            recover(tmp_path)
        assert len(list(tmp_path.glob(".gradtool-*"))) == 3
    assert recover(tmp_path).untouched == 1
    assert sorted(tmp_path.iterdir()) == paths


def test_a_recovery_that_fails_may_be_tried_any_number_of_times(tmp_path, monkeypatch):
    paths = files_in(tmp_path)
    new = half_changed(paths)
    size = next(tmp_path.glob("*.run")).stat().st_size

    def refuse(*_, **__):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(RedoLog, "finish", refuse)
        for _ in range(5):
            with pytest.raises(SystemRefusedError, match="Input/output error"):
                recover(tmp_path)
    assert next(tmp_path.glob("*.run")).stat().st_size < size + 100
    assert recover(tmp_path).finished == 1
    assert content_of(paths) == new


@pytest.mark.parametrize("at", [0, 5, 20, 40, 60, -1])
def test_a_redo_log_that_is_damaged_is_not_applied(tmp_path, at):
    # Of the last entry, even the others are not.
    paths = files_in(tmp_path, 2)
    half_changed(paths)
    (redo,) = tmp_path.glob("*.redo")
    content = bytearray(redo.read_bytes())
    content[at] ^= 1
    redo.write_bytes(content)
    before = snapshot(tmp_path)
    for force in (False, True):
        with pytest.raises(SystemRefusedError, match="is damaged, so what was to be changed in place is lost; delete"):
            recover(tmp_path, force=force)
    assert snapshot(tmp_path) == before


def test_a_redo_log_that_is_gone_is_told_of(tmp_path):
    paths = files_in(tmp_path, 1)
    half_changed(paths)
    (redo,) = tmp_path.glob("*.redo")
    redo.unlink()
    before = snapshot(tmp_path)
    for force in (False, True):
        with pytest.raises(SystemRefusedError, match=f"redo log {redo.name} is missing; restore it, or delete"):
            recover(tmp_path, force=force)
    assert snapshot(tmp_path) == before


def test_recover_says_what_it_did(tmp_path):
    half_changed(files_in(tmp_path / "a"))
    half_replaced(files_in(tmp_path / "b"))
    (tmp_path / "a" / f"{ID}-7.tmp").touch()
    done = gradtool("recover", tmp_path / "a", tmp_path / "b")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines[:3] == [["finished", "2"], ["untouched", "0"], ["removed", "1"]]
    assert [(line[:3], line[4].startswith(str(tmp_path))) for line in lines[3:]] == [
        (["run", "finished", "2"], True),
        (["run", "finished", "2"], True),
    ]
    again = gradtool_json("recover", tmp_path / "a")
    assert again["data"] == {"finished": 0, "untouched": 0, "removed": 0, "per_run": []}


def test_a_live_run_is_left_alone_and_told_of(tmp_path):
    paths = files_in(tmp_path)
    run = registered(paths)
    with Commit(run) as commit:
        commit.stage(paths[0], 10, paths[0].stat())
        half_changed([write(tmp_path / "other.safetensors", {"t": np.ones(3, np.float32)})])
        (tmp_path / f"{ID}-0.redo").touch()
        answer = gradtool_json("recover", tmp_path)
        assert (answer["exit_code"], [one["code"] for one in answer["errors"]]) == (5, ["in-use"])
        # What does not belong to it is done nevertheless.
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            f"{run.id}-0.tmp",
            f"{run.id}.lock",
            f"{run.id}.run",
            "0.safetensors",
            "1.safetensors",
            "other.safetensors",
        ]
    run.close()


def test_what_a_run_left_that_crashed_before_it_changed_anything_is_removed(tmp_path):
    paths = files_in(tmp_path)
    before = snapshot(tmp_path)
    crash(lambda: Commit(registered(paths)).stage(paths[0], 10, paths[0].stat()))
    assert norm(tmp_path).norm > 0
    assert recover(paths[0]).untouched == 1
    assert snapshot(tmp_path) == before


def test_a_file_that_another_program_wrote_after_the_crash_is_not_lost(tmp_path):
    for leave, wanted in ((half_replaced, b"n"), (half_changed, b"o")):
        paths = files_in(tmp_path / leave.__name__)
        left = leave(paths)
        write(paths[1], {"t1": np.zeros(5, np.float32)})
        later = time.time_ns() + 3600 * 10**9
        os.utime(paths[1], ns=(later, later))
        before = content_of(paths)
        # Nor is it when it is tried again.
        for command in (zero, recover, zero, recover):
            with pytest.raises(
                SystemRefusedError, match=r"another program wrote to it .* gradtool\.recover\(.*, force=True\)"
            ) as caught:
                command(paths[1])
            assert caught.value.problems[0].file == str(paths[1])
            assert content_of(paths) == before
        recover(paths[1], force=True)
        assert content_of(paths) == left, wanted
        assert sorted(paths[0].parent.iterdir()) == paths


@pytest.mark.parametrize("renamed", [False, True])
def test_a_single_rename_was_done_or_not(tmp_path, renamed):
    (path,) = files_in(tmp_path, 1)
    old, new = path.read_bytes(), b"n" * path.stat().st_size

    def replace():
        commit = Commit(registered([path]))
        commit.stage(path, len(new), path.stat()).path.write_bytes(new)
        rename = Folder.rename

        def rename_and_die(*names):
            if renamed:
                rename(*names)
            os._exit(0)

        Folder.rename = rename_and_die
        commit.put_in_place()

    crash(replace)
    assert norm(path, allow_unfinished=True) if not renamed else path.read_bytes() == new
    result = recover(tmp_path)
    assert (result.finished, result.untouched) == (renamed, not renamed)
    assert path.read_bytes() == (new if renamed else old)
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_without_changes_is_none_that_could_lose_anything(tmp_path):
    (path,) = files_in(tmp_path, 1)
    crash(lambda: in_place(registered([path]), [path]))
    os.utime(path, ns=(0, 2 * time.time_ns()))
    assert recover(tmp_path).untouched == 1
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_recovered_together_from_any_of_them(tmp_path):
    for start in "abc":
        paths = [files_in(tmp_path / start / name, 1)[0] for name in "abc"]
        new = half_replaced(paths)
        assert recover(tmp_path / start / start).finished == 1
        assert content_of(paths) == new
        assert all(list(path.parent.iterdir()) == [path] for path in paths)


@pytest.mark.parametrize("leave", [half_replaced, half_changed])
def test_file_systems_are_recovered_together_from_any_of_them(tmp_path, leave):
    with tempfile.TemporaryDirectory(dir=FAST) as other:
        folders = [tmp_path, Path(other)]
        if tmp_path.stat().st_dev == folders[1].stat().st_dev:
            pytest.skip("there is only one file system to write to")
        for start in folders:
            paths = [files_in(folder, 1)[0] for folder in folders]
            left = leave(paths)
            assert len(recover(start).per_run) == 1
            assert content_of(paths) == left
            assert all(list(path.parent.iterdir()) == [path] for path in paths)


def test_the_run_of_another_user_is_theirs_to_recover(tmp_path, monkeypatch):
    paths = files_in(tmp_path)
    half_changed(paths)
    before = snapshot(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    for command in (zero, recover):
        with pytest.raises(SystemRefusedError, match=f"a crashed run of user {os.getuid()}; run .* as that user"):
            command(tmp_path)
    assert snapshot(tmp_path) == before


def test_no_path_and_no_folder_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no path is given"):
        recover()
    with pytest.raises(BadInputError, match="no such"):
        recover(tmp_path / "nowhere" / "x.safetensors")


def test_a_folder_of_links_is_recovered_where_its_files_are(tmp_path):
    paths = files_in(tmp_path / "blobs")
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()
    for path in paths:
        (snapshots / path.name).symlink_to(path)
    for named in (snapshots, snapshots / "model.safetensors.index.json"):
        new = half_changed(paths)
        with pytest.raises(SystemRefusedError, match=r"run gradtool.recover\(.*\)"):
            norm(snapshots)
        assert recover(named).finished == 1
        assert content_of(paths) == new


def test_what_cannot_be_recovered_does_not_keep_the_rest(tmp_path):
    bad, good = files_in(tmp_path / "a")[:1], files_in(tmp_path / "b")
    other = [write(tmp_path / "a" / "other.safetensors", {"o": np.ones(5, np.float32)})]
    half_changed(bad)
    bad[0].unlink()
    new = half_changed(other) + half_changed(good)
    (tmp_path / "a" / f"{ID}-3.tmp").touch()
    with pytest.raises(SystemRefusedError) as caught:
        recover([tmp_path / "nowhere" / "x", tmp_path / "a", tmp_path / "b"])
    assert [(one.code, one.file) for one in caught.value.problems] == [
        ("missing-file", str(tmp_path / "nowhere")),
        ("unfinished", str(bad[0])),
    ]
    assert content_of(other + good) == new
    assert not (tmp_path / "a" / f"{ID}-3.tmp").exists()
    # And by force without the file that is gone.
    assert recover(tmp_path / "a", force=True).finished == 1
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_a_name_that_nothing_knows_is_no_success(tmp_path):
    files_in(tmp_path)
    with pytest.raises(BadInputError, match="no such file"):
        recover(tmp_path / "typo.safetensors")


def test_what_another_program_wrote_is_told_by_its_content_and_not_by_its_time(tmp_path):
    (path,) = files_in(tmp_path, 1)
    (new,) = half_changed([path])
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(30)
        file.write(b"theirs")
    # At the very instant of our last write.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    theirs = path.read_bytes()
    for command in (recover, zero):
        with pytest.raises(SystemRefusedError, match="another program wrote to it"):
            command(tmp_path)
    assert path.read_bytes() == theirs
    assert recover(tmp_path, force=True).finished == 1
    assert path.read_bytes() == new


def test_a_file_that_was_put_back_from_a_copy_is_not_changed_again(tmp_path):
    paths = files_in(tmp_path)
    old = content_of(paths)
    new = half_changed(paths)
    for path, content in zip(paths, old, strict=True):
        # Each sector has what it had before the run, or after it; but these are other files.
        (tmp_path / "copy").write_bytes(content)
        (tmp_path / "copy").replace(path)
    for command in (recover, zero):
        with pytest.raises(SystemRefusedError, match="another program wrote to it"):
            command(tmp_path)
        assert content_of(paths) == old
    assert recover(tmp_path, force=True).finished == 1
    assert content_of(paths) == new


@pytest.mark.parametrize("when", [-86_400, 0, 1, 4_102_444_800])
def test_no_date_hides_what_is_half_done(tmp_path, when):
    paths = files_in(tmp_path)
    for path in paths:
        os.utime(path, ns=(when * 10**9 - 1,) * 2)
    new = half_replaced(paths)
    assert recover(tmp_path).finished == 1
    assert content_of(paths) == new
    for path in files_in(tmp_path):
        os.utime(path, ns=(when * 10**9 - 1,) * 2)
    new = half_changed(paths)
    for path in paths:
        os.utime(path, ns=(when * 10**9 - 1,) * 2)
    assert recover(tmp_path).finished == 1
    assert content_of(paths) == new


def test_an_interruption_at_the_worst_instant_leaves_a_log(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"t": np.full(600_000, 2.0, np.float32)})
    old = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RedoLog, "apply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            clip(path, max_norm=1, write="inplace")
    assert path.read_bytes() == old
    assert recover(path).finished == 1
    assert norm(path).norm == pytest.approx(1)
    assert list(tmp_path.iterdir()) == [path]


def test_force_completes_all_that_is_still_there(tmp_path):
    for lose in (lambda path: path.unlink(), lambda path: os.truncate(path, 30)):
        paths = files_in(tmp_path, 3)
        new = half_changed(paths)
        lose(paths[1])
        assert recover(tmp_path, force=True).finished == 1
        assert [paths[0].read_bytes(), paths[2].read_bytes()] == [new[0], new[2]]


def test_a_link_that_leads_nowhere_is_no_failure(tmp_path):
    paths = files_in(tmp_path, 1)
    new = half_changed(paths)
    (tmp_path / "lost.safetensors").symlink_to(tmp_path / "gone" / "x")
    assert recover(tmp_path).finished == 1
    assert content_of(paths) == new


@pytest.mark.parametrize(("mode", "recovered"), [(0o600, 0o600), (0o640, 0o640), (0o666, 0o644), (0o755, 0o644)])
def test_recovery_takes_permissions_that_a_file_lost_since_its_run_was_ready(tmp_path, mode, recovered):
    paths = files_in(tmp_path)
    for path in paths:
        path.chmod(0o644)
    new = half_replaced(paths)
    paths[0].chmod(mode)
    recover(tmp_path)
    assert content_of(paths) == new
    assert [path.stat().st_mode & 0o777 for path in paths] == [recovered, 0o644]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to any group")
def test_recovery_takes_permissions_of_a_group_from_a_file_that_has_another_since(tmp_path):
    (path,) = paths = files_in(tmp_path, 1)
    path.chmod(0o664)
    paths += files_in(tmp_path / "b", 1)
    half_replaced(paths)
    os.chown(path, -1, 4321)
    recover(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o604
