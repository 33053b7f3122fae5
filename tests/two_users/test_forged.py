"""Logs, pointers and redo logs that another user makes up."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

import pytest
from leftovers import redo_log_of
from neighbours import ID, RUNNERS, crash, folder_of, forge, grads, log_bytes, only, several, state, told_once
from support import file_at
from users import ALICE, MALLORY, At, as_user, run_as

from gradtool.store.fs import Folder
from gradtool.store.io.redolog import RedoLog
from gradtool.store.transaction.log import FORMAT, marker_name
from gradtool.store.transaction.staging import Staged


def move_of(temporary, target, folder=0):
    """A temporary that is to take the place of a file, as a run that is ready would log it."""
    now = target.stat()
    return [folder, 0, target.name, temporary.stat().st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns, 0]


def change_of(target, folder=0):
    """A file that is to be changed in place."""
    return [folder, target.name, target.stat().st_size, target.stat().st_ino]


def ready(*moves, changes=(), redo=None):
    return {"ready": [list(moves), list(changes), redo]}


def redo_of(path, targets, new, uid=MALLORY):
    """Forge a redo log, in every way as a run would write it: what the transaction log says of it."""
    path.touch()
    log = RedoLog(file_at(path))
    redo_log_of(log, targets, new)
    os.chown(path, uid, uid)
    return [int(path.stem.rpartition("-")[2]), path.stat().st_ino, log.size]


@RUNNERS
@pytest.mark.parametrize("command", ["recover", "clip"])
def test_a_forged_log_is_not_obeyed(root, runner, command):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    target, secret = grads(runner, shared / "x.safetensors"), grads(runner, private / "y.safetensors", seed=2)
    before = state(private)
    temporary = forge(shared / f"{ID}-0.tmp", b"forged")
    redo = redo_of(shared / f"{ID}-1.redo", [target, secret], [b"x" * path.stat().st_size for path in (target, secret)])
    moves, changes = [move_of(temporary, target), move_of(temporary, secret, 1)], [change_of(target)]
    facts = {"folders": ["../private"], "missing": ["private"]}
    for steps in (
        [ready(*moves)],
        [ready(moves[0])],
        [ready(*moves), {"ended": "finished"}],
        [ready(changes=changes, redo=redo)],
        [ready(changes=[*changes, change_of(secret, 1)], redo=redo)],
        [ready(*moves, changes=changes, redo=redo)],
        [{"ended": "untouched"}],
        [],
    ):
        forge(shared / f"{ID}.run", log_bytes(*steps, names=[target.name], **facts))
        found = state(shared)
        for force in ([], ["--force"])[: 1 + (command == "recover")]:
            arguments = ["recover", shared, *force] if command == "recover" else ["clip", target, "--max-norm", "1"]
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
    redo = redo_of(shared / f"{ID}-1.redo", [target, secret], [b"x" * 5, b"x" * 5], runner)
    moves = [move_of(temporary, target), move_of(temporary, secret, 1)]
    changes = [change_of(target), change_of(secret, 1)]
    forge(shared / f"{ID}.lock", b"", runner, 0o600)
    for step in (ready(*moves), ready(changes=changes, redo=redo), ready(moves[0], changes=changes[1:], redo=redo)):
        forge(shared / f"{ID}.run", log_bytes(step, names=[target.name], folders=["../private"]), runner)
        for force in ([], ["--force"]):
            told_once(run_as(runner, "recover", shared, *force), "its log is missing")
            assert state(private) == before


def sticky(root):
    return folder_of(0, root / "sticky", 0o1777)


NUISANCES = {
    "a log": lambda target: log_bytes(names=[target.name]),
    "a log that holds locks": lambda target: log_bytes({"holds_locks": True}, names=[target.name]),
    "a log that says it is half done": lambda target: log_bytes(
        ready(changes=[change_of(target)], redo=[0, 1, 1]), names=[target.name]
    ),
    "a log that moves": lambda target: log_bytes(ready(*[move_of(target, target)] * 2), names=[target.name]),
    "a log of a live process": lambda target: log_bytes(
        {"holds_locks": True},
        ready(changes=[change_of(target)], redo=[0, 1, 1]),
        names=[target.name],
        pid=os.getpid(),
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    ),
    "a pointer to nothing": lambda target: log_bytes(names=[target.name], home=f"../private/{ID}.run"),
    "a log that cannot be understood": lambda target: log_bytes({"what": 1}, names=[target.name]),
    "a log of another version": lambda target: log_bytes(names=[target.name], format=FORMAT + 1),
}


@pytest.mark.parametrize("nuisance", NUISANCES)
def test_a_log_of_another_user_in_a_sticky_folder_hinders_no_run(root, nuisance):
    folder = sticky(root)
    target = grads(ALICE, folder / "x.safetensors")
    forge(folder / f"{ID}.run", NUISANCES[nuisance](target))
    for kind in ("-0.tmp", "-0.redo", ".lock"):
        forge(folder / f"{ID}{kind}", b"forged", mode=0o600)
    forge(folder / marker_name(target.name), NUISANCES[nuisance](target))
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
        (folder / f".gradtool-{14:012}-0.redo").symlink_to(target)
        (folder / f".gradtool-{14:012}.lock").mkdir()
        (folder / marker_name(target.name)).symlink_to(target)
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
    old = crash(folder, way)
    run = only(folder, "*.run").stem
    taken = {path.name for path in folder.glob(".gradtool-*")}
    for kind in ("tmp", "redo"):
        for number in range(4):
            if f"{run}-{number}.{kind}" not in taken:
                forge(folder / f"{run}-{number}.{kind}", b"forged", mode=0o600 if number % 2 else 0o644)
    (folder / f"{run}-9.tmp").mkdir()
    assert run_as(ALICE, "norm", paths[0]).code == 5
    answer = run_as(ALICE, "recover", folder)
    assert (answer.code, answer.err) == (0, ""), answer
    assert all(path.read_bytes() != before for path, before in zip(paths, old, strict=True))
    assert {path.stat().st_uid for path in folder.glob(".gradtool-*.*") if path.is_file()} == {MALLORY}
    assert run_as(ALICE, "norm", *paths).code == 0


def test_a_temporary_that_another_user_removes_between_the_renames_costs_just_that_file(root):
    folder = folder_of(ALICE, root / "shared", 0o777)
    paths = several(ALICE, folder)
    old = [path.read_bytes() for path in paths]
    at = At(Staged, "take_place", lambda: only(folder, "*-1.tmp").unlink(), nth=2)
    answer = run_as(ALICE, "clip", folder, "--max-norm", "1", meanwhile=at)
    told_once(answer, "some files are new and some are not", f"run gradtool recover {folder}")
    names = [path.name for path in folder.glob(".gradtool-*")]
    told_once(run_as(ALICE, "recover", folder), "1.safetensors", "another program wrote to it", "--force")
    assert sorted(path.name for path in folder.glob(".gradtool-*")) == sorted(names)
    (last,) = (name for name in names if name.endswith("-2.tmp"))
    as_user(MALLORY, (folder / last.replace("-2.tmp", "-1.tmp")).touch)
    told_once(run_as(ALICE, "recover", folder), "-1.tmp", "another program wrote to it", "--force")
    only(folder, "*-1.tmp").unlink()
    answer = run_as(ALICE, "recover", folder, "--force")
    assert (answer.code, answer.err) == (0, ""), answer
    assert [path.read_bytes() == before for path, before in zip(paths, old, strict=True)] == [False, True, False]


def test_a_redo_log_that_another_user_adds_is_not_applied(root):
    folder = folder_of(ALICE, root / "shared", 0o777)
    paths = several(ALICE, folder)
    old = crash(folder, "inplace")
    run = only(folder, "*.run").stem
    forged = [b"x" * path.stat().st_size for path in paths]
    for number in (1, 7):
        redo_of(folder / f"{run}-{number}.redo", paths, forged)
    answer = run_as(ALICE, "recover", folder)
    assert (answer.code, answer.err) == (0, ""), answer
    assert all(path.read_bytes() not in (*old, *forged) for path in paths)
    assert sorted(folder.iterdir()) == paths


def put_in_place_of(redo, trick, paths):
    """Put something in the place of a redo log that is gone."""
    if trick == "a forged redo log":
        redo_of(redo, paths, [b"x" * 9] * 3)
    elif trick == "a link":
        redo.symlink_to("away")
    elif trick == "a FIFO":
        os.mkfifo(redo)
    elif trick == "a folder":
        redo.mkdir()
    elif trick == "the one of another run":
        os.link(only(redo.parent.parent / "other", "*.redo"), redo)


@pytest.mark.parametrize(
    "trick", ["nothing", "a forged redo log", "a link", "a FIFO", "a folder", "the one of another run"]
)
def test_a_redo_log_that_another_user_replaces_is_not_applied(root, trick):
    folder, other = folder_of(ALICE, root / "folder", 0o777), folder_of(ALICE, root / "other", 0o755)
    paths = several(ALICE, folder)
    # A file of each is not the same gradients, but in the same place.
    for number, path in enumerate(several(ALICE, other)):
        grads(ALICE, path, seed=number + 4)
    crash(other, "inplace")
    old = crash(folder, "inplace")
    redo, half = only(folder, "*.redo"), [path.read_bytes() for path in paths]
    redo.rename(folder / "away")
    # The system may not let another user link to the one of another run; where it does, this is what follows.
    is_own = trick == "the one of another run"
    as_user(0 if is_own else MALLORY, lambda: put_in_place_of(redo, trick, paths))
    before = state(folder)
    for force in ([], ["--force"]):
        # What is of the right user, and has the right name, is told by its inode or by its content.
        words = "is missing" if not is_own else "is damaged" if force else "another program wrote to it"
        told_once(run_as(ALICE, "recover", folder, *force), words)
        assert [path.read_bytes() for path in paths] == half
        changed = {path for path, status in state(folder).items() if status != before[path]}
        assert changed <= {folder, only(folder, "*.run")}
    redo.rmdir() if redo.is_dir() and not redo.is_symlink() else redo.unlink(missing_ok=True)
    (folder / "away").rename(redo)
    answer = run_as(ALICE, "recover", folder)
    assert (answer.code, answer.err) == (0, ""), answer
    assert all(path.read_bytes() != was for path, was in zip(paths, old, strict=True))
    assert sorted(folder.iterdir()) == paths
