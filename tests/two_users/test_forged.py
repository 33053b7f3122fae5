"""Logs, pointers and undo logs that another user makes up."""

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from gradtool.store.transaction.undolog import UndoLog
from neighbours import ID, RUNNERS, crash, folder_of, forge, grads, log_bytes, only, several, state, told_once
from users import ALICE, MALLORY, At, run_as

from gradtool.store.fs import Folder
from gradtool.store.transaction import replace
from gradtool.store.transaction.files import marker_of
from gradtool.store.transaction.staging import Staged
from gradtool.store.transaction.transaction import Transaction


def move_of(temporary, target, folder=0):
    """A step that has a temporary take the place of a file, as a run would write it."""
    now = target.stat()
    return [folder, 0, target.name, temporary.stat().st_ino, now.st_size, now.st_mtime_ns, now.st_ino]


@RUNNERS
@pytest.mark.parametrize("command", ["recover", "clip"])
def test_a_forged_log_is_not_obeyed(root, runner, command):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    target, secret = grads(runner, shared / "x.safetensors"), grads(runner, private / "y.safetensors", seed=2)
    before = state(private)
    temporary = forge(shared / f"{ID}-0.tmp", b"forged")
    forge(shared / f"{ID}-1.undo", b"forged")
    moves = [move_of(temporary, target), move_of(temporary, secret, 1)]
    facts = {"folders": ["../private"], "missing": ["private"]}
    for steps in (
        [{"ready": True}, {"moves": moves}],
        [{"ready": True}, {"moves": moves}, {"revoked": True}],
        [{"changes": [[0, target.name, target.stat().st_size, target.stat().st_ino]]}],
        [{"done": True}],
        [],
    ):
        forge(shared / f"{ID}.run", log_bytes(*steps, names=[target.name], **facts))
        found = state(shared)
        arguments = ["recover", shared] if command == "recover" else ["clip", target, "--max-norm", "1"]
        told_once(run_as(runner, *arguments), f"of user {MALLORY}", "as that user")
        assert state(private) == before
        assert {path: one for path, one in state(shared).items() if path != shared} == {
            path: one for path, one in found.items() if path != shared
        }


@RUNNERS
def test_a_forged_pointer_leads_to_no_run_elsewhere(root, runner):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    several(runner, private)
    crash(private, runner=runner)
    before = state(private)
    home = only(private, "*.run")
    target = grads(runner, shared / "x.safetensors")
    pointer = log_bytes(names=[target.name], id=home.stem, home=f"../private/{home.name}")
    forge(shared / home.name, pointer)
    told_once(run_as(runner, "recover", shared), "log", "is missing")
    told_once(run_as(runner, "clip", target, "--max-norm", "1"), "is missing")
    assert state(private) == before


@RUNNERS
@pytest.mark.parametrize("pointer", ["none", "another user's"])
def test_a_log_does_not_reach_into_a_folder_where_its_user_left_no_pointer(root, runner, pointer):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    target, secret = grads(runner, shared / "x.safetensors"), grads(runner, private / "y.safetensors", seed=2)
    temporary = forge(private / f"{ID}-0.tmp", b"forged", runner)
    if pointer != "none":
        forge(private / f"{ID}.run", log_bytes(names=[secret.name], home=f"../shared/{ID}.run"))
    before = state(private)
    moves = [move_of(temporary, target), move_of(temporary, secret, 1)]
    log = log_bytes({"ready": True}, {"moves": moves}, names=[target.name], folders=["../private"])
    forge(shared / f"{ID}.run", log, runner)
    forge(shared / f"{ID}.lock", b"", runner, 0o600)
    told_once(run_as(runner, "recover", shared), "its log is missing")
    assert state(private) == before


def sticky(root):
    return folder_of(0, root / "sticky", 0o1777)


NUISANCES = {
    "a log": lambda target: log_bytes({"ready": True}, names=[target.name]),
    "a log that says it is half done": lambda target: log_bytes(
        {"changes": [[0, target.name, target.stat().st_size, target.stat().st_ino]]}, names=[target.name]
    ),
    "a log that moves": lambda target: log_bytes(
        {"ready": True}, {"moves": [move_of(target, target)] * 2}, names=[target.name]
    ),
    "a log of a live process": lambda target: log_bytes(
        {"ready": True},
        names=[target.name],
        pid=os.getpid(),
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    ),
    "a pointer to nothing": lambda target: log_bytes(names=[target.name], home=f"../private/{ID}.run"),
    "a log that cannot be understood": lambda target: log_bytes({"what": 1}, names=[target.name]),
    "a log of another version": lambda target: log_bytes(names=[target.name], format=3),
}


@pytest.mark.parametrize("nuisance", NUISANCES)
def test_a_log_of_another_user_in_a_sticky_folder_hinders_no_run(root, nuisance):
    folder = sticky(root)
    target = grads(ALICE, folder / "x.safetensors")
    forge(folder / f"{ID}.run", NUISANCES[nuisance](target))
    for kind in ("-0.tmp", "-0.old", "-0.undo", ".lock"):
        forge(folder / f"{ID}{kind}", b"forged", mode=0o600)
    forge(folder / marker_of(target.name), NUISANCES[nuisance](target))
    before = {path: one for path, one in state(folder).items() if ".gradtool-" in path.name}
    assert run_as(ALICE, "norm", target)[::2] == (0, "")
    assert run_as(ALICE, "clip", target, "--max-norm", "1")[::2] == (0, "")
    answer = run_as(ALICE, "recover", folder)
    assert (answer.code, answer.err) == (0, ""), answer
    # A file that is broken is said to be just that.
    target.write_bytes(b"broken")
    assert run_as(ALICE, "norm", target).code == 3
    assert {path: one for path, one in state(folder).items() if ".gradtool-" in path.name} == before


def test_what_others_put_in_a_sticky_folder_instead_of_logs_hinders_no_run(root):
    folder = sticky(root)
    target = grads(ALICE, folder / "x.safetensors")

    def litter():
        # The last that are looked at: others of theirs are not, after these.
        for number in range(20, 24):
            # All holes, and so for nothing.
            os.truncate(forge(folder / f".gradtool-{number:012}.run", log_bytes()), 31_000_000)
        (folder / f".gradtool-{10:012}.run").mkdir()
        (folder / f".gradtool-{11:012}.run").symlink_to(target)
        os.mkfifo(folder / f".gradtool-{12:012}.run")
        os.close(os.open(folder / f".gradtool-{13:012}.run", os.O_CREAT, 0o000))
        (folder / f".gradtool-{14:012}-0.tmp").mkdir()
        (folder / f".gradtool-{14:012}-0.undo").symlink_to(target)
        (folder / f".gradtool-{14:012}.lock").mkdir()
        (folder / marker_of(target.name)).symlink_to(target)
        leased = os.open(folder / f".gradtool-{15:012}.run", os.O_CREAT | os.O_RDWR, 0o644)
        with contextlib.suppress(OSError):
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    for arguments in (["norm", target], ["clip", target, "--max-norm", "1"], ["recover", folder]):
        for path in folder.glob(".gradtool-*"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        answer = run_as(ALICE, *arguments, meanwhile=At(Folder, "names", litter))
        assert (answer.code, answer.err) == (0, ""), answer


@pytest.mark.parametrize("way", ["replace", "inplace"])
def test_files_of_another_user_beside_a_crashed_run_do_not_keep_it_from_being_recovered(root, way):
    folder = sticky(root)
    paths = several(ALICE, folder)
    old = [path.read_bytes() for path in paths]
    before = crash(folder, way)
    run = only(folder, "*.run").stem
    assert before != old
    taken = {path.name for path in folder.glob(".gradtool-*")}
    for kind in ("tmp", "old", "undo"):
        for number in range(4):
            if f"{run}-{number}.{kind}" not in taken:
                forge(folder / f"{run}-{number}.{kind}", b"forged", mode=0o600 if number % 2 else 0o644)
    (folder / f"{run}-9.tmp").mkdir()
    assert run_as(ALICE, "norm", paths[0]).code == 5
    answer = run_as(ALICE, "recover", folder)
    assert (answer.code, answer.err) == (0, ""), answer
    now = [path.read_bytes() for path in paths]
    assert all((one == before) == (way == "inplace") for one, before in zip(now, old, strict=True))
    assert {path.stat().st_uid for path in folder.glob(".gradtool-*.*") if path.is_file()} == {MALLORY}
    assert run_as(ALICE, "norm", *paths).code == 0


@pytest.mark.parametrize("end", ["rolling back", "having rolled back"])
def test_files_of_another_user_beside_a_run_that_rolled_back_do_not_keep_it_from_doing_so(root, end):
    folder = sticky(root)
    paths = several(ALICE, folder)
    old = [path.read_bytes() for path in paths]
    at = At(Staged, "take_place", lambda: only(folder, "*-1.tmp").unlink(), 0, nth=2)
    dies_at = (replace, "move_back", 1) if end == "rolling back" else (Transaction, "end", 1)
    run_as(ALICE, "clip", folder, "--max-norm", "1", meanwhile=at, dies_at=dies_at)
    run = only(folder, "*.run").stem
    for number in range(3):
        for kind in ("tmp", "old"):
            if not (folder / f"{run}-{number}.{kind}").exists():
                forge(folder / f"{run}-{number}.{kind}", b"forged")
    answer = run_as(ALICE, "recover", folder)
    assert (answer.code, answer.err) == (0, ""), answer
    assert [path.read_bytes() for path in paths] == old


@pytest.mark.parametrize("trick", ["a forged one", "a link to one of another run"])
def test_an_undo_log_that_another_user_adds_is_not_applied(root, trick):
    folder = sticky(root)
    paths = several(ALICE, folder)
    old = [path.read_bytes() for path in paths]
    crash(folder, "inplace")
    run = only(folder, "*.run")
    added = folder / f"{run.stem}-7.undo"
    if trick == "a forged one":
        key = json.loads(run.read_bytes().split(b"\n")[0][9:])["run"]["key"]
        now = paths[1].read_bytes()
        # With the key of this run, so that it is just the owner that speaks against it.
        with Folder.at(folder) as opened:
            fd = opened.create(added.name)
            undo_log = UndoLog(opened.file(added.name), fd, key, fsync=False, ahead=0)
            undo_log.keep(1, 0, memoryview(b"x" * len(now)))
            undo_log.seal(memoryview(now))
            undo_log.close()
        os.chown(added, MALLORY, MALLORY)
    else:
        other = folder_of(ALICE, root / "other", 0o755)
        several(ALICE, other, mode=0o666)
        crash(other, "inplace")
        os.link(only(other, "*.undo"), added)
    answer = run_as(ALICE, "recover", folder)
    assert (answer.code, answer.err) == (0, ""), answer
    assert [path.read_bytes() for path in paths] == old
