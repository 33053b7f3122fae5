"""Transaction logs that lie, are damaged, or are no logs at all."""

import json
import os
import stat
import zlib

import pytest
from leftovers import ID, content_of, files_in, half_changed, half_replaced
from support import snapshot

from gradtool import GradtoolError, SystemRefusedError, clip, norm, recover, zero
from gradtool.store.fs import Folder
from gradtool.store.transaction.log import FORMAT, encode_step
from gradtool.store.transaction.runs import runs_in


def test_a_pointer_whose_log_is_gone_says_what_to_do(tmp_path):
    paths = [files_in(tmp_path / name, 1)[0] for name in "ab"]
    half_replaced(paths)
    next((tmp_path / "a").glob("*.run")).unlink()
    for command in (norm, zero, recover):
        with pytest.raises(SystemRefusedError, match="whose log .* is missing; restore that log, or delete"):
            command(paths[1])


def log_with(folder, *entries, files=("0.safetensors",), **facts):
    run = {"id": ID, "format": FORMAT, "pid": 1, "host": "h", "boot": "", "files": list(files), "folders": []}
    steps = [json.dumps(one, separators=(",", ":")).encode() for one in ({"run": run | facts}, *entries)]
    (folder / f"{ID}.run").write_bytes(b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in steps))


def ready(moves=(), changes=(), redo=None):
    return {"ready": [list(moves), list(changes), redo]}


def new(name, folder=0, number=0):
    """A file that is to take the place of none."""
    return [folder, number, name, 1, None, None, None, None]


def move_over(path):
    """A file that is to take the place of one, just as that is now."""
    status = path.stat()
    return [0, 0, path.name, 1, status.st_size, status.st_mtime_ns, status.st_ctime_ns, 0]


def change_of(path, folder=0):
    return [folder, path.name, path.stat().st_size, path.stat().st_ino]


def test_a_log_reaches_into_no_folder_that_does_not_point_back(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    (path, _) = files_in(ours)
    (theirs).mkdir()
    (theirs / "precious").write_text("precious")
    (theirs / f"{ID}-1.tmp").write_text("evil")
    (theirs / f"{ID}-2.redo").write_text("evil")
    (ours / f"{ID}-2.redo").touch()
    before = snapshot(theirs)
    redo = [2, (ours / f"{ID}-2.redo").stat().st_ino, 0]
    moves, changes = [new("0.safetensors"), new("precious", 1, 1)], [change_of(path), change_of(theirs / "precious", 1)]
    for step in (
        ready(moves),
        ready(moves[1:] * 2),
        ready([], changes, redo),
        ready([], changes[1:], redo),
        ready(moves[:1], changes[1:], redo),
        ready(moves[1:], changes[:1], redo),
    ):
        for folders in (["../theirs"], [str(theirs)]):
            for end in ([], [{"ended": "finished"}], [{"ended": "untouched"}]):
                (ours / f"{ID}-2.redo").touch()
                log_with(ours, step, *end, folders=folders)
                if end:
                    recover(ours)
                else:
                    with pytest.raises(SystemRefusedError, match="where its log is missing; restore that folder"):
                        recover(ours, force=True)
                assert snapshot(theirs) == before
    # A single rename is done or not, and so nothing is left to do.
    log_with(ours, ready(moves[1:]), folders=["../theirs"])
    assert recover(ours).untouched == 1
    assert snapshot(theirs) == before


@pytest.mark.parametrize("name", ["../theirs/precious", "/etc/passwd", "..", ".", "", "a\0b", 7, None, ["x"]])
def test_a_log_names_nothing_but_files_beside_it(tmp_path, name):
    files_in(tmp_path)
    for step in (ready([new(name)]), ready([], [[0, name, 1, 1]], [0, 1, 1])):
        for files in (["0.safetensors", name], ["0.safetensors"]):
            log_with(tmp_path, step, files=files)
            # It is one, by its checksums, so what it may tell of is not thrown away.
            before = snapshot(tmp_path)
            for command in (norm, zero, recover):
                with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
                    command(tmp_path)
            assert snapshot(tmp_path) == before


def test_a_log_changes_only_files_that_it_named_at_first(tmp_path):
    paths = files_in(tmp_path)
    (tmp_path / f"{ID}-0.tmp").write_text("evil")
    (tmp_path / f"{ID}-1.redo").touch()
    redo = [1, (tmp_path / f"{ID}-1.redo").stat().st_ino, 0]
    before = content_of(paths)
    moves, changes = [new("0.safetensors"), new("1.safetensors", number=1)], [change_of(path) for path in paths]
    for step in (ready(moves), ready([], changes, redo), ready(moves[:1], changes[1:], redo)):
        log_with(tmp_path, step)
        for force in (False, True):
            with pytest.raises(SystemRefusedError, match="changes files that it does not list; delete"):
                recover(tmp_path, force=force)
        assert content_of(paths) == before
        assert len(list(tmp_path.glob(f"{ID}-*"))) == 2


def test_a_temporary_that_is_a_link_takes_no_place(tmp_path):
    paths = files_in(tmp_path)
    before = content_of(paths)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / f"{ID}-0.tmp").symlink_to(tmp_path / "secret")
    log_with(tmp_path, ready([move_over(paths[0])] * 2))
    with pytest.raises(SystemRefusedError, match=r"run gradtool\.recover\(.*, force=True\)"):
        recover(tmp_path)
    recover(tmp_path, force=True)
    assert content_of(paths) == before
    assert stat.S_ISREG(paths[0].lstat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors", "secret"]


HOSTILE = {
    "empty": b"",
    "garbage": os.urandom(100),
    "no line": b"0" * 1000,
    "deep": encode_step(run=1)[:9] + b"[" * 100_000 + b"\n",
    "false checksum": b"00000000 {}\n",
    "no run": encode_step(nothing=1),
    "a list": encode_step(run=[1, 2]),
    "a number": encode_step(run={"pid": "x", "host": 1, "files": 3}),
    "huge numbers": encode_step(run={"pid": 10**400, "host": "h", "files": []}).replace(b"0" * 400, b"0" * 400),
    "foreign home": encode_step(run={"pid": 1, "host": "h", "files": ["0.safetensors"], "home": "/etc/passwd"}),
    "own home": encode_step(run={"pid": 1, "host": "h", "files": ["0.safetensors"], "home": 5}),
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
        assert [run.log for run in runs_in(folder)] == [None]


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


def odd_steps():
    """Steps with one odd number, and what they are called."""
    step = ready([[0, 0, "0.safetensors", 1, 20, 20, 20, 7]], [[0, "0.safetensors", 20, 1]], [0, 1, 20])
    for name, value in ODD.items():
        for place in ((0, 0, 0), (0, 0, 1), (0, 0, 3), (0, 0, 4), (0, 0, 5), (0, 0, 6), (0, 0, 7),
                      (1, 0, 0), (1, 0, 2), (1, 0, 3), (2, 0), (2, 1), (2, 2)):  # fmt: skip
            if name == "below zero" and place[2:] in ((5,), (6,)):
                continue  # A date before 1970.
            odd = json.loads(json.dumps(step))
            inner = odd["ready"]
            for at in place[:-1]:
                inner = inner[at]
            inner[place[-1]] = value
            yield pytest.param(odd, id=f"{name} at {place}")


@pytest.mark.parametrize("step", [*odd_steps()])
def test_a_log_with_an_odd_number_is_none(tmp_path, step):
    files_in(tmp_path)
    log_with(tmp_path, step)
    before = snapshot(tmp_path)
    with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
        recover(tmp_path)
    assert snapshot(tmp_path) == before


SHORT = {
    "no redo log": [[], [[0, "0.safetensors", 20, 1]], None],
    "a redo log of two numbers": [[], [[0, "0.safetensors", 20, 1]], [0, 1]],
    "a change of three": [[], [[0, "0.safetensors", 20]], [0, 1, 20]],
    "a move of seven": [[[0, 0, "0.safetensors", 1, 20, 20, 20]], [], None],
    "a move of a file that half exists": [[[0, 0, "0.safetensors", 1, None, 20, 20, 7]], [], None],
    "a move of a file of no date": [[[0, 0, "0.safetensors", 1, 20, None, 20, 7]], [], None],
    "a move in a folder that is not named": [[[1, 0, "0.safetensors", 1, 20, 20, 20, 7]], [], None],
    "a change in a folder that is not named": [[], [[1, "0.safetensors", 20, 1]], [0, 1, 20]],
    "only moves": [[]],
    "a truth": True,
}


@pytest.mark.parametrize("value", SHORT.values(), ids=SHORT)
def test_a_log_that_says_too_little_is_none(tmp_path, value):
    files_in(tmp_path)
    log_with(tmp_path, {"ready": value})
    before = snapshot(tmp_path)
    with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
        recover(tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("huge", [1 << 64, 10**300, 10**4000])
@pytest.mark.parametrize("place", ["number of a move", "inode", "number", "redo inode", "size"])
def test_a_huge_number_leads_to_nothing(tmp_path, place, huge):
    paths = files_in(tmp_path)
    (tmp_path / f"{ID}-1.redo").touch()
    redo = [1, (tmp_path / f"{ID}-1.redo").stat().st_ino, 0]
    change, move = change_of(paths[0]), move_over(paths[0])
    if place in ("number of a move", "inode"):
        move[1 if place != "inode" else 3] = huge
        log_with(tmp_path, ready([move] * 2))
    else:
        redo[["number", "redo inode", "size"].index(place)] = huge
        log_with(tmp_path, ready([], [change], redo))
    before = content_of(paths)
    for command in (recover, zero):
        with pytest.raises(GradtoolError):
            command(tmp_path)
        assert content_of(paths) == before
    assert (tmp_path / f"{ID}.run").exists()


def test_a_rename_whose_temporary_and_result_are_gone_is_not_taken_for_done(tmp_path):
    paths = files_in(tmp_path)
    before = snapshot(tmp_path)
    for moves in ([move_over(path) for path in paths], [new("0.safetensors")] * 2):
        log_with(tmp_path, ready(moves), files=["0.safetensors", "1.safetensors"])
        for command in (recover, zero):
            with pytest.raises(SystemRefusedError, match="another program wrote to it"):
                command(tmp_path)
        # By force, without those files.
        assert recover(tmp_path, force=True).finished == 1
        assert snapshot(tmp_path) == before


def test_a_file_that_another_program_made_is_not_replaced(tmp_path):
    paths = [*files_in(tmp_path, 1), tmp_path / "new"]
    moves = []
    for number, path in enumerate(paths):
        (temporary := tmp_path / f"{ID}-{number}.tmp").write_text(f"new {number}")
        moves.append(new(path.name, number=number))
        moves[-1][3] = temporary.stat().st_ino
    before = snapshot(tmp_path)
    log_with(tmp_path, ready(moves), files=[path.name for path in paths])
    with pytest.raises(SystemRefusedError, match=r"0.safetensors: another program wrote to it"):
        recover(tmp_path)
    assert {path: was for path, was in snapshot(tmp_path).items() if path in before} == before
    paths[0].unlink()
    assert recover(tmp_path).finished == 1
    assert [path.read_text() for path in paths] == ["new 0", "new 1"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_file_is_no_redo_log(tmp_path, make, force):
    paths = files_in(tmp_path, 1)
    make(redo := tmp_path / f"{ID}-0.redo")
    log_with(tmp_path, ready([], [change_of(paths[0])], [0, redo.lstat().st_ino, 1_000]))
    before = content_of(paths)
    with pytest.raises(SystemRefusedError, match=f"whose redo log {redo.name} is missing; restore it, or delete"):
        recover(tmp_path, force=force)
    assert content_of(paths) == before
    assert os.path.lexists(redo)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("kind", ["redo", "tmp"])
def test_only_a_regular_file_can_be_a_file_of_a_run(tmp_path, make, kind):
    paths = files_in(tmp_path, 1)
    make(tmp_path / f"{ID}-0.{kind}")
    log_with(tmp_path)
    before = content_of(paths)
    assert recover(tmp_path).untouched == 1
    assert content_of(paths) == before
    assert zero(tmp_path).output.files_written == 1


def test_more_folders_than_a_run_can_have_are_not_looked_for(tmp_path):
    files_in(tmp_path)
    facts = {"id": ID, "format": FORMAT, "files": [], "folders": ["../x"] * 100_101}
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
        facts = {"id": victim.stem, "format": FORMAT, "pid": 1, "host": "h", "boot": "", "home": home}
        (tmp_path / name / victim.name).write_bytes(encode_step(run=facts | {"files": ["0.safetensors"]}))
    before = snapshot(tmp_path / "victim")
    with pytest.raises(SystemRefusedError, match="is missing"):
        recover(tmp_path / "p")
    assert snapshot(tmp_path / "victim") == before
    assert recover(tmp_path / "victim").finished == 1


@pytest.mark.parametrize("where", ["home", "folders", "name"])
def test_a_name_that_no_file_can_have_is_in_no_log(tmp_path, where):
    files_in(tmp_path)
    bad = "\ud800"
    if where == "name":
        log_with(tmp_path, ready([new(bad)]), files=["0.safetensors", bad])
    else:
        log_with(tmp_path, **{where: bad if where == "home" else [bad]})
    for command in (zero, recover):
        with pytest.raises(SystemRefusedError, match="this version of gradtool cannot read"):
            command(tmp_path)
