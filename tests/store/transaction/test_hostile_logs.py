"""Transaction logs that lie, are damaged, or are no logs at all."""

import json
import os
import stat
import zlib

import pytest
from leftovers import ID, content_of, files_in, half_changed, half_replaced
from support import snapshot

from gradtool import SystemRefusedError, clip, norm, recover, zero
from gradtool.store.fs import Folder
from gradtool.store.transaction.log import line_of
from gradtool.store.transaction.logfiles import logs_in


def test_a_pointer_whose_log_is_gone_says_what_to_do(tmp_path):
    paths = [files_in(tmp_path / name, 1)[0] for name in "ab"]
    half_replaced(paths)
    next((tmp_path / "a").glob("*.run")).unlink()
    for command in (norm, zero, recover):
        with pytest.raises(SystemRefusedError, match="whose log .* is missing; restore that log, or delete"):
            command(paths[1])


def log_with(folder, *entries, files=("0.safetensors",), **facts):
    run = {"id": ID, "format": 2, "pid": 1, "host": "h", "boot": "", "key": "", "files": list(files), "folders": []}
    steps = [json.dumps(one, separators=(",", ":")).encode() for one in ({"run": run | facts}, *entries)]
    (folder / f"{ID}.run").write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in steps))


def test_a_log_reaches_into_no_folder_that_does_not_point_back(tmp_path):
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
            log_with(ours, *entries, folders=folders)
            if len(entries) == 1 or "revoked" in entries[1]:
                with pytest.raises(SystemRefusedError, match="where its log is missing; restore that folder"):
                    recover(ours, force=True)
            else:
                recover(ours)
            assert snapshot(theirs) == before


@pytest.mark.parametrize("name", ["../theirs/precious", "/etc/passwd", "..", ".", "", "a\0b", 7, None, ["x"]])
def test_a_log_names_nothing_but_files_beside_it(tmp_path, name):
    files_in(tmp_path)
    log_with(tmp_path, {"moves": [[0, 0, name, 1, None, None, None]]}, files=["0.safetensors", name])
    # It is one, by its checksums, so what it may tell of is not thrown away.
    before = snapshot(tmp_path)
    for command in (norm, zero, recover):
        with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
            command(tmp_path)
    assert snapshot(tmp_path) == before


def test_a_log_renames_only_files_that_it_named_at_first(tmp_path):
    paths = files_in(tmp_path)
    (tmp_path / f"{ID}-0.tmp").write_text("evil")
    before = content_of(paths)
    moves = [[0, 0, "0.safetensors", 1, None, None, None], [0, 1, "1.safetensors", 1, None, None, None]]
    log_with(tmp_path, {"moves": moves})
    with pytest.raises(SystemRefusedError, match="changes files that it does not list; delete"):
        recover(tmp_path, force=True)
    assert content_of(paths) == before


def test_a_temporary_that_is_a_link_takes_no_place(tmp_path):
    paths = files_in(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / f"{ID}-0.tmp").symlink_to(tmp_path / "secret")
    status = paths[0].stat()
    log_with(tmp_path, {"moves": [[0, 0, "0.safetensors", 1, status.st_size, status.st_mtime_ns, status.st_ino]] * 2})
    with pytest.raises(SystemRefusedError, match=r"run gradtool\.recover\(.*, force=True\)"):
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
def test_what_is_no_log_hinders_no_run(tmp_path, content):
    paths = files_in(tmp_path)
    (tmp_path / f"{ID}.run").write_bytes(content)
    assert clip(tmp_path, max_norm=1).clipped
    assert norm(tmp_path).norm < 1
    assert recover(tmp_path).per_run == ()
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != f"{ID}.run"] == paths


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_no_log_and_blocks_no_run(tmp_path, make):
    files_in(tmp_path)
    make(tmp_path / f"{ID}.run")
    make(tmp_path / f"{ID}-0.tmp")
    assert clip(tmp_path, max_norm=1).clipped
    assert norm(tmp_path).norm < 1
    assert recover(tmp_path).per_run == ()


def test_a_log_that_is_too_large_is_not_read(tmp_path):
    files_in(tmp_path)
    with (tmp_path / f"{ID}.run").open("wb") as file:
        file.truncate(1 << 40)
    assert norm(tmp_path).norm > 0
    with Folder.at(tmp_path) as folder:
        assert logs_in(folder) == []


def test_a_lying_pointer_leads_nowhere(tmp_path):
    files_in(tmp_path / "a")
    files_in(tmp_path / "b")
    log_with(tmp_path / "a", home=f"../b/{ID}.run")
    log_with(tmp_path / "b", home=f"../a/{ID}.run")
    before = snapshot(tmp_path)
    for command in (norm, zero, recover):
        with pytest.raises(SystemRefusedError, match="is missing; restore that log"):
            command(tmp_path / "a")
    assert snapshot(tmp_path) == before


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
def test_a_log_with_an_odd_number_is_none(tmp_path, field, value):
    files_in(tmp_path)
    move = [0, 0, "0.safetensors", 1, 20, 20, 7]
    move[field] = value
    log_with(tmp_path, {"moves": [move]})
    with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
        recover(tmp_path)


def test_a_rename_is_taken_back_only_where_its_result_is_still_there(tmp_path):
    files_in(tmp_path)
    before = snapshot(tmp_path)
    log_with(tmp_path, {"moves": [[0, 7, "0.safetensors", 1, None, None, None]] * 2}, {"revoked": True})
    assert recover(tmp_path).undone == 1
    assert snapshot(tmp_path) == before
    (tmp_path / f"{ID}-7.old").write_text("evil")
    log_with(tmp_path, {"moves": [[0, 7, "0.safetensors", 1, 20, 20, 7]] * 2}, {"revoked": True})
    with pytest.raises(SystemRefusedError, match="another program wrote to it"):
        zero(tmp_path)
    assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("kind", ["undo", "tmp", "old"])
def test_what_is_no_file_is_none_of_a_run_either(tmp_path, make, kind):
    paths = files_in(tmp_path, 1)
    make(tmp_path / f"{ID}-0.{kind}")
    status = paths[0].stat()
    log_with(tmp_path, {"changes": [[0, "0.safetensors", status.st_size, status.st_ino]]})
    before = content_of(paths)
    assert recover(tmp_path).undone == 1
    assert content_of(paths) == before
    assert zero(tmp_path).output.files_written == 1


def test_more_folders_than_a_run_can_have_are_not_looked_for(tmp_path):
    files_in(tmp_path)
    facts = {"id": ID, "format": 2, "files": [], "folders": ["../x"] * 100_101}
    text = json.dumps({"run": facts}, separators=(",", ":")).encode()
    (tmp_path / f"{ID}.run").write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
        recover(tmp_path)


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
def test_a_name_that_no_file_can_have_is_in_no_log(tmp_path, where):
    files_in(tmp_path)
    bad = "\ud800"
    if where == "name":
        log_with(tmp_path, {"moves": [[0, 0, bad, 1, None, None]]}, files=["0.safetensors", bad])
    else:
        log_with(tmp_path, **{where: bad if where == "home" else [bad]})
    for command in (zero, recover):
        with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
            command(tmp_path)
