import json
import os
import shutil
import stat
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from crashes import FAST
from support import gradtool, gradtool_json, in_place, registered, snapshot, write

from gradtool import BadInputError, SystemRefusedError, UsageError, clip, norm, recover, zero
from gradtool.store.fs import Folder
from gradtool.store.transaction import transaction as transaction_module
from gradtool.store.transaction.inplace import InPlace
from gradtool.store.transaction.log import line_of
from gradtool.store.transaction.logfiles import logs_in
from gradtool.store.transaction.replace import Replacement
from gradtool.store.transaction.undolog import Undo

ID = ".gradtool-0123456789ab"


def files_in(folder, count=2):
    return [write(folder / f"{i}.safetensors", {f"t{i}": np.ones(5, np.float32)}) for i in range(count)]


def die(run):
    """What is left of a run when its process ends: everything but the lock."""
    os.close(run._lock)


def half_replaced(paths):
    """The files of a run that died when it was about to rename; their new content."""
    run = registered(paths)
    replacement = Replacement(run)
    for path in paths:
        replacement.stage(path, path.stat().st_size, path.stat()).path.write_bytes(b"n" * path.stat().st_size)
    run.append(moves=[replacement._move(staged) for staged in replacement._staged])
    die(run)
    return [b"n" * path.stat().st_size for path in paths]


def half_changed(paths):
    """Files that a run overwrote half of in place, and died; their old content."""
    old = [path.read_bytes() for path in paths]
    run = registered(paths)
    undo_log = in_place(run, paths).__enter__().undo_log()
    for number, content in enumerate(old):
        new = b"overwritten" + content[11:]
        undo_log.save(number, 0, memoryview(content), memoryview(new))
    for path in paths:
        with path.open("r+b") as file:
            file.write(b"overwritten")
    undo_log.close()
    die(run)
    return old


def content_of(paths):
    return [path.read_bytes() for path in paths]


@pytest.mark.parametrize("by", ["recover", "recover file", "zero"])
def test_what_was_ready_takes_its_place(tmp_path, by):
    paths = files_in(tmp_path)
    new = half_replaced(paths)
    if by == "zero":
        with pytest.raises(BadInputError, match="header"):
            zero(paths[1])  # The new content of this test is none that it could work with.
    else:
        result = recover(tmp_path if by == "recover" else paths[1])
        assert [(row.outcome, row.files, row.pid) for row in result.per_run] == [("finished", 2, os.getpid())]
    assert content_of(paths) == new
    assert sorted(tmp_path.iterdir()) == paths


@pytest.mark.parametrize("by", ["recover", "recover file", "zero"])
def test_what_was_overwritten_comes_back(tmp_path, by):
    paths = files_in(tmp_path)
    old = half_changed(paths)
    if by == "zero":
        assert zero(paths[1]).files_written == 1
        assert paths[1].read_bytes() == old[1][:-20] + bytes(20)
    else:
        result = recover(tmp_path if by == "recover" else paths[1])
        assert [(row.outcome, row.files) for row in result.per_run] == [("undone", 2)]
        assert paths[1].read_bytes() == old[1]
    assert paths[0].read_bytes() == old[0]
    assert sorted(tmp_path.iterdir()) == paths


@pytest.mark.parametrize("leave", [half_replaced, half_changed])
def test_a_copy_of_what_a_crashed_run_left_is_not_thrown_away(tmp_path, leave):
    wanted = leave(files_in(tmp_path / "there"))
    shutil.copytree(tmp_path / "there", tmp_path / "copy")
    before = snapshot(tmp_path / "copy")
    for command in (recover, zero):
        with pytest.raises(SystemRefusedError, match="recover --force"):
            command(tmp_path / "copy")
    # But for who has tried.
    assert {path.name for path in before} == {path.name for path in (tmp_path / "copy").iterdir()}
    result = recover(tmp_path / "copy", force=True)
    assert result.finished + result.undone == 1
    assert content_of(sorted((tmp_path / "copy").iterdir())) == wanted


def test_a_folder_that_cannot_be_looked_at_is_not_taken_for_gone(tmp_path, monkeypatch):
    paths = [files_in(tmp_path / name, 1)[0] for name in "ab"]
    run = registered(paths)
    die(run)
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


def test_a_recovery_that_fails_may_be_tried_any_number_of_times(tmp_path, monkeypatch):
    paths = files_in(tmp_path)
    old = half_changed(paths)
    size = next(tmp_path.glob("*.run")).stat().st_size

    def refuse(*_, **__):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Undo, "put_back", refuse)
        for _ in range(5):
            with pytest.raises(SystemRefusedError, match="Input/output error"):
                recover(tmp_path)
    assert next(tmp_path.glob("*.run")).stat().st_size < size + 100
    assert recover(tmp_path).undone == 1
    assert content_of(paths) == old


def test_an_entry_that_is_torn_or_false_was_saved_of_nothing_that_changed(tmp_path):
    paths = files_in(tmp_path, 1)
    half_changed(paths)
    (undo,) = tmp_path.glob("*.undo")
    with undo.open("r+b") as file:
        file.seek(50)
        file.write(b"?")
    record = next(tmp_path.glob("*.run")).stat()
    os.utime(undo, ns=(record.st_mtime_ns, record.st_mtime_ns))
    overwritten = content_of(paths)
    assert recover(tmp_path).undone == 1
    assert content_of(paths) == overwritten


def test_it_says_what_it_did(tmp_path):
    half_changed(files_in(tmp_path / "a"))
    half_replaced(files_in(tmp_path / "b"))
    (tmp_path / "a" / f"{ID}-7.tmp").touch()
    done = gradtool("recover", tmp_path / "a", tmp_path / "b")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines[:4] == [["finished", "1"], ["undone", "1"], ["untouched", "0"], ["removed", "1"]]
    assert [(line[:3], line[4].startswith(str(tmp_path))) for line in lines[4:]] == [
        (["run", "undone", "2"], True),
        (["run", "finished", "2"], True),
    ]
    again = gradtool_json("recover", tmp_path / "a")
    assert again["data"] == {"finished": 0, "undone": 0, "untouched": 0, "removed": 0, "per_run": []}


def test_a_live_run_is_left_alone_and_told_of(tmp_path):
    paths = files_in(tmp_path)
    run = registered(paths)
    with Replacement(run) as replacement:
        replacement.stage(paths[0], 10, paths[0].stat())
        half_changed([write(tmp_path / "other.safetensors", {"t": np.ones(3, np.float32)})])
        (tmp_path / f"{ID}-0.old").touch()
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


def test_what_died_before_it_changed_anything_is_just_removed(tmp_path):
    paths = files_in(tmp_path)
    before = snapshot(tmp_path)
    run = registered(paths)
    Replacement(run).stage(paths[0], 10, paths[0].stat())
    die(run)
    assert norm(tmp_path).norm > 0
    assert recover(paths[0]).untouched == 1
    assert snapshot(tmp_path) == before


def test_a_file_that_somebody_wrote_anew_is_not_lost(tmp_path):
    for leave, wanted in ((half_replaced, b"n"), (half_changed, b"o")):
        paths = files_in(tmp_path / leave.__name__)
        left = leave(paths)
        write(paths[1], {"t1": np.zeros(5, np.float32)})
        later = time.time_ns() + 3600 * 10**9
        os.utime(paths[1], ns=(later, later))
        before = content_of(paths)
        # Nor is it when it is tried again.
        for command in (zero, recover, zero, recover):
            with pytest.raises(SystemRefusedError, match="another program wrote to it .* recover --force") as caught:
                command(paths[1])
            assert caught.value.problems[0].file == str(paths[1])
            assert content_of(paths) == before
        recover(paths[1], force=True)
        assert content_of(paths) == left, wanted
        assert sorted(paths[0].parent.iterdir()) == paths


def test_a_run_without_changes_is_none_that_could_lose_anything(tmp_path):
    (path,) = files_in(tmp_path, 1)
    run = registered([path])
    in_place(run, [path]).__enter__()
    die(run)
    os.utime(path, ns=(0, 2 * time.time_ns()))
    assert recover(tmp_path).undone == 1
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


def test_a_pointer_whose_record_is_gone_says_what_to_do(tmp_path):
    paths = [files_in(tmp_path / name, 1)[0] for name in "ab"]
    half_replaced(paths)
    next((tmp_path / "a").glob("*.run")).unlink()
    for command in (norm, zero, recover):
        with pytest.raises(SystemRefusedError, match="whose log .* is missing; restore that log, or delete"):
            command(paths[1])


def test_the_run_of_another_user_is_theirs_to_recover(tmp_path, monkeypatch):
    paths = files_in(tmp_path)
    # Of a process that is no more: the boot that it belonged to is over.
    monkeypatch.setattr(transaction_module, "boot", lambda: "another")
    half_changed(paths)
    before = snapshot(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    for command in (zero, recover):
        with pytest.raises(SystemRefusedError, match=f"a crashed run of user {os.getuid()}; recover it as that user"):
            command(tmp_path)
    assert snapshot(tmp_path) == before


def test_no_path_and_no_folder_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no path is given"):
        recover()
    with pytest.raises(BadInputError, match="no such"):
        recover(tmp_path / "nowhere" / "x.safetensors")


def record(folder, *entries, files=("0.safetensors",), **facts):
    run = {"id": ID, "format": 2, "pid": 1, "host": "h", "boot": "", "key": "", "files": list(files), "folders": []}
    steps = [json.dumps(one, separators=(",", ":")).encode() for one in ({"run": run | facts}, *entries)]
    (folder / f"{ID}.run").write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in steps))


def test_a_record_reaches_into_no_folder_that_does_not_point_back(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    files_in(ours)
    (theirs).mkdir()
    (theirs / "precious").write_text("precious")
    (theirs / f"{ID}-1.tmp").write_text("evil")
    before = snapshot(theirs)
    moves = [[0, 0, "0.safetensors", 1, None, None, None], [1, 1, "precious", 1, None, None, None]]
    changes = [[1, "precious", 8, (theirs / "precious").stat().st_ino]]
    for entries in (
        [{"moves": moves}],
        [{"moves": moves}, {"revoked": True}],
        [{"changes": changes}],
        [{"changes": changes}, {"done": True}],
        [{"moves": moves}, {"undone": True}],
    ):
        for folders in (["../theirs"], [str(theirs)]):
            record(ours, *entries, folders=folders)
            if len(entries) == 1 or "revoked" in entries[1]:
                with pytest.raises(SystemRefusedError, match="where its log is missing; restore that folder"):
                    recover(ours, force=True)
            else:
                recover(ours)
            assert snapshot(theirs) == before


@pytest.mark.parametrize("name", ["../theirs/precious", "/etc/passwd", "..", ".", "", "a\0b", 7, None, ["x"]])
def test_a_record_names_nothing_but_files_beside_it(tmp_path, name):
    files_in(tmp_path)
    record(tmp_path, {"moves": [[0, 0, name, 1, None, None, None]]}, files=["0.safetensors", name])
    # It is one, by its checksums, so what it may tell of is not thrown away.
    before = snapshot(tmp_path)
    for command in (norm, zero, recover):
        with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
            command(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_record_moves_only_what_it_said_it_would(tmp_path):
    paths = files_in(tmp_path)
    (tmp_path / f"{ID}-0.tmp").write_text("evil")
    before = content_of(paths)
    moves = [[0, 0, "0.safetensors", 1, None, None, None], [0, 1, "1.safetensors", 1, None, None, None]]
    record(tmp_path, {"moves": moves})
    with pytest.raises(SystemRefusedError, match="changes files that it does not list; delete"):
        recover(tmp_path, force=True)
    assert content_of(paths) == before


def test_a_temporary_that_is_a_link_takes_no_place(tmp_path):
    paths = files_in(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / f"{ID}-0.tmp").symlink_to(tmp_path / "secret")
    status = paths[0].stat()
    record(tmp_path, {"moves": [[0, 0, "0.safetensors", 1, status.st_size, status.st_mtime_ns, status.st_ino]] * 2})
    with pytest.raises(SystemRefusedError, match="recover --force"):
        recover(tmp_path)
    recover(tmp_path, force=True)
    assert stat.S_ISREG(paths[0].lstat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors", "secret"]


HOSTILE = {
    "empty": b"",
    "garbage": os.urandom(100),
    "no line": b"0" * 1000,
    "deep": line_of(run=1)[:9] + b"[" * 100_000 + b"\n",
    "false checksum": b"00000000 {}\n",
    "no run": line_of(nothing=1),
    "a list": line_of(run=[1, 2]),
    "a number": line_of(run={"pid": "x", "host": 1, "files": 3}),
    "huge numbers": line_of(run={"pid": 10**400, "host": "h", "files": []}).replace(b"0" * 400, b"0" * 400),
    "foreign home": line_of(run={"pid": 1, "host": "h", "files": ["0.safetensors"], "home": "/etc/passwd"}),
    "own home": line_of(run={"pid": 1, "host": "h", "files": ["0.safetensors"], "home": 5}),
    "infinite": b"%08x %s\n" % (0, json.dumps({"run": float("inf")}).encode()),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_record_is_in_nobodys_way(tmp_path, content):
    paths = files_in(tmp_path)
    (tmp_path / f"{ID}.run").write_bytes(content)
    assert clip(tmp_path, max_norm=1).clipped
    assert norm(tmp_path).norm < 1
    assert recover(tmp_path).per_run == ()
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != f"{ID}.run"] == paths


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_no_record_and_keeps_nobody_waiting(tmp_path, make):
    files_in(tmp_path)
    make(tmp_path / f"{ID}.run")
    make(tmp_path / f"{ID}-0.tmp")
    assert clip(tmp_path, max_norm=1).clipped
    assert norm(tmp_path).norm < 1
    assert recover(tmp_path).per_run == ()


def test_a_record_that_is_too_large_is_not_read(tmp_path):
    files_in(tmp_path)
    with (tmp_path / f"{ID}.run").open("wb") as file:
        file.truncate(1 << 40)
    assert norm(tmp_path).norm > 0
    with Folder.at(tmp_path) as folder:
        assert logs_in(folder) == []


def test_a_lying_pointer_leads_nowhere(tmp_path):
    files_in(tmp_path / "a")
    files_in(tmp_path / "b")
    record(tmp_path / "a", home=f"../b/{ID}.run")
    record(tmp_path / "b", home=f"../a/{ID}.run")
    before = snapshot(tmp_path)
    for command in (norm, zero, recover):
        with pytest.raises(SystemRefusedError, match="is missing; restore that log"):
            command(tmp_path / "a")
    assert snapshot(tmp_path) == before


def test_a_folder_of_links_is_recovered_where_its_files_are(tmp_path):
    paths = files_in(tmp_path / "blobs")
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()
    for path in paths:
        (snapshots / path.name).symlink_to(path)
    for named in (snapshots, snapshots / "model.safetensors.index.json"):
        old = half_changed(paths)
        with pytest.raises(SystemRefusedError, match="gradtool recover"):
            norm(snapshots)
        assert recover(named).undone == 1
        assert content_of(paths) == old


def test_what_cannot_be_recovered_does_not_keep_the_rest(tmp_path):
    bad, good = files_in(tmp_path / "a")[:1], files_in(tmp_path / "b")
    other = [write(tmp_path / "a" / "other.safetensors", {"o": np.ones(5, np.float32)})]
    half_changed(bad)
    bad[0].unlink()
    old = half_changed(other) + half_changed(good)
    (tmp_path / "a" / f"{ID}-3.tmp").touch()
    with pytest.raises(SystemRefusedError) as caught:
        recover([tmp_path / "nowhere" / "x", tmp_path / "a", tmp_path / "b"])
    assert [(one.code, one.file) for one in caught.value.problems] == [
        ("missing-file", str(tmp_path / "nowhere")),
        ("unfinished", str(bad[0])),
    ]
    assert content_of(other + good) == old
    assert not (tmp_path / "a" / f"{ID}-3.tmp").exists()
    # And by force without the file that is gone.
    assert recover(tmp_path / "a", force=True).undone == 1
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_a_name_that_nothing_knows_is_no_success(tmp_path):
    files_in(tmp_path)
    with pytest.raises(BadInputError, match="no such file"):
        recover(tmp_path / "typo.safetensors")


def test_what_another_program_wrote_is_told_by_its_content_and_not_by_its_time(tmp_path):
    (path,) = files_in(tmp_path, 1)
    (old,) = half_changed([path])
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
    assert recover(tmp_path, force=True).undone == 1
    assert path.read_bytes() == old


@pytest.mark.parametrize("when", [-86_400, 0, 1, 4_102_444_800])
def test_no_date_hides_what_is_half_done(tmp_path, when):
    paths = files_in(tmp_path)
    for path in paths:
        os.utime(path, ns=(when * 10**9 - 1,) * 2)
    new = half_replaced(paths)
    assert recover(tmp_path).finished == 1
    assert content_of(paths) == new
    old = half_changed(paths)
    for path in paths:
        os.utime(path, ns=(when * 10**9 - 1,) * 2)
    assert recover(tmp_path).undone == 1
    assert content_of(paths) == old


def test_an_interruption_at_the_worst_instant_leaves_a_record(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"t": np.full(600_000, 2.0, np.float32)})
    old = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(InPlace, "commit", interrupt)
        patch.setattr(InPlace, "__exit__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            clip(path, max_norm=1, write="inplace")
    assert path.read_bytes() != old
    assert recover(path).undone == 1
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


ODD = {
    "a way out": "x/../../theirs/precious",
    "a fraction": 0.5,
    "a truth": True,
    "below zero": -1,
    "infinity": float("inf"),
    "nothing": None,
    "a list": [1],
}


@pytest.mark.parametrize("field", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_a_record_with_an_odd_number_is_none(tmp_path, field, value):
    files_in(tmp_path)
    move = [0, 0, "0.safetensors", 1, 20, 20, 7]
    move[field] = value
    record(tmp_path, {"moves": [move]})
    with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
        recover(tmp_path)


def test_a_rename_is_taken_back_only_where_its_result_is_still_there(tmp_path):
    files_in(tmp_path)
    before = snapshot(tmp_path)
    record(tmp_path, {"moves": [[0, 7, "0.safetensors", 1, None, None, None]] * 2}, {"revoked": True})
    assert recover(tmp_path).undone == 1
    assert snapshot(tmp_path) == before
    (tmp_path / f"{ID}-7.old").write_text("evil")
    record(tmp_path, {"moves": [[0, 7, "0.safetensors", 1, 20, 20, 7]] * 2}, {"revoked": True})
    with pytest.raises(SystemRefusedError, match="another program wrote to it"):
        zero(tmp_path)
    assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("kind", ["undo", "tmp", "old"])
def test_what_is_no_file_is_none_of_a_run_either(tmp_path, make, kind):
    paths = files_in(tmp_path, 1)
    make(tmp_path / f"{ID}-0.{kind}")
    status = paths[0].stat()
    record(tmp_path, {"changes": [[0, "0.safetensors", status.st_size, status.st_ino]]})
    before = content_of(paths)
    assert recover(tmp_path).undone == 1
    assert content_of(paths) == before
    assert zero(tmp_path).files_written == 1


def test_more_folders_than_a_run_can_have_are_not_looked_for(tmp_path):
    files_in(tmp_path)
    facts = {"id": ID, "format": 2, "files": [], "folders": ["../x"] * 100_101}
    text = json.dumps({"run": facts}, separators=(",", ":")).encode()
    (tmp_path / f"{ID}.run").write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
        recover(tmp_path)


def test_force_puts_back_all_that_is_still_there(tmp_path):
    for lose in (lambda path: path.unlink(), lambda path: os.truncate(path, 30)):
        paths = files_in(tmp_path, 3)
        old = half_changed(paths)
        lose(paths[1])
        assert recover(tmp_path, force=True).undone == 1
        assert [paths[0].read_bytes(), paths[2].read_bytes()] == [old[0], old[2]]


def test_a_pointer_to_a_pointer_touches_nothing(tmp_path):
    paths = files_in(tmp_path / "victim", 1)
    half_changed(paths)
    (victim,) = (tmp_path / "victim").glob("*.run")
    for name, home in (("p", f"../q/{victim.name}"), ("q", f"../victim/{victim.name}")):
        files_in(tmp_path / name, 1)
        facts = {"id": victim.stem, "format": 2, "pid": 1, "host": "h", "boot": "", "key": "", "home": home}
        (tmp_path / name / victim.name).write_bytes(line_of(run=facts | {"files": ["0.safetensors"]}))
    before = snapshot(tmp_path / "victim")
    with pytest.raises(SystemRefusedError, match="is missing"):
        recover(tmp_path / "p")
    assert snapshot(tmp_path / "victim") == before
    assert recover(tmp_path / "victim").undone == 1


@pytest.mark.parametrize("where", ["home", "folders", "name"])
def test_a_name_that_no_file_can_have_is_in_no_record(tmp_path, where):
    files_in(tmp_path)
    bad = "\ud800"
    if where == "name":
        record(tmp_path, {"moves": [[0, 0, bad, 1, None, None]]}, files=["0.safetensors", bad])
    else:
        record(tmp_path, **{where: bad if where == "home" else [bad]})
    for command in (zero, recover):
        with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
            command(tmp_path)


def test_a_link_that_leads_nowhere_is_no_failure(tmp_path):
    paths = files_in(tmp_path, 1)
    old = half_changed(paths)
    (tmp_path / "lost.safetensors").symlink_to(tmp_path / "gone" / "x")
    assert recover(tmp_path).undone == 1
    assert content_of(paths) == old
