"""Files and folders that another user puts in the place of others, at the worst instant."""

import contextlib
import email.parser  # noqa: F401 - before a user comes who may not be able to read it
import os

import pytest
from neighbours import (
    HALF_CHANGED,
    RUNNERS,
    crash,
    folder_of,
    forge,
    grads,
    left_in,
    log_bytes,
    only,
    several,
    state,
    told_once,
)
from users import ALICE, MALLORY, At, as_user, run_as

from gradtool.store import fs
from gradtool.store.fs import Folder
from gradtool.store.io.redolog import RedoLog
from gradtool.store.transaction import recovery
from gradtool.store.transaction.commit import Commit, InPlace
from gradtool.store.transaction.staging import Staged
from gradtool.store.transaction.targets import Targets
from gradtool.store.transaction.transaction import Transaction


def swap(path, by):
    path.unlink()
    by(path)


INSTANTS = {
    "before it is filled": (Commit, "stage", True),
    "before it is finished": (Staged, "finish", False),
    "before it is renamed": (Staged, "take_place", False),
    "while it is renamed": (Folder, "rename", False),
}


@RUNNERS
@pytest.mark.parametrize("kind", ["symlink", "hard link"])
@pytest.mark.parametrize("instant", INSTANTS)
def test_a_temporary_that_is_swapped_leads_to_no_other_file(root, runner, kind, instant):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    target, secret = grads(runner, shared / "x.safetensors"), grads(runner, private / "secret", 0o600, seed=2)
    before, old = state(private), target.read_bytes()
    # The system may not let another user link to it; where it does, this is what follows.
    link, by = (os.symlink, MALLORY) if kind == "symlink" else (os.link, 0)

    def attack():
        swap(only(shared, "*.tmp"), lambda path: link(secret, path))

    where, name, after = INSTANTS[instant]
    answer = run_as(runner, "clip", target, "--max-norm", "1", meanwhile=At(where, name, attack, by, after=after))
    told_once(answer, "in the meantime")
    assert state(private)[secret] == before[secret]
    if instant != "while it is renamed":
        # At that instant, it is what Mallory could do without us.
        assert not target.is_symlink()
        assert target.read_bytes() == old
    assert left_in(shared) == []


BUILT = {
    "when it is made": (RedoLog, "__init__", 1),
    "before it is written": (RedoLog, "add", 1),
    "before it is finished": (Commit, "put_in_place", 1),
    "when everything is ready": (RedoLog, "apply", 1),
}


@RUNNERS
@pytest.mark.parametrize("kind", ["symlink", "hard link"])
@pytest.mark.parametrize("instant", BUILT)
def test_a_redo_log_that_is_swapped_leads_to_no_other_file(root, runner, kind, instant):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    paths, secret = several(runner, shared), grads(runner, private / "secret", 0o600, seed=9)
    old, (before, *rest) = state(private), [path.read_bytes() for path in paths]
    link, by = (os.symlink, MALLORY) if kind == "symlink" else (os.link, 0)

    def attack():
        redo = only(shared, "*.redo")
        redo.rename(shared / "away")
        link(secret, redo)

    where, name, nth = BUILT[instant]
    arguments = ["clip", shared, "--max-norm", "1", "--write", "inplace", "--threads", "1"]
    answer = run_as(runner, *arguments, meanwhile=At(where, name, attack, by, nth=nth))
    told_once(answer, "in the meantime")
    assert state(private)[secret] == old[secret]
    assert [path.read_bytes() for path in paths] == [before, *rest]
    if instant != "when everything is ready":
        assert left_in(shared) == []
        return
    told_once(answer, "some files are new and some are not", f"run gradtool recover {shared}")
    for force in ([], ["--force"]):
        told_once(run_as(runner, "recover", shared, *force))
        assert state(private)[secret] == old[secret]
        assert [path.read_bytes() for path in paths] == [before, *rest]
    (shared / "away").replace(only(shared, "*.redo"))
    assert run_as(runner, "recover", shared).code == 0
    assert [path.read_bytes() == was for path, was in zip(paths, [before, *rest], strict=True)] == [False] * 3
    assert left_in(shared) == []


OVERWRITTEN = {
    "before it is opened": (InPlace, "__init__", 1),
    "before all is ready": (Commit, "put_in_place", 1),
    "when everything is ready": (RedoLog, "apply", 1),
    "before the next is overwritten": HALF_CHANGED,
}


@RUNNERS
@pytest.mark.parametrize("kind", ["symlink", "hard link"])
@pytest.mark.parametrize("instant", OVERWRITTEN)
def test_a_file_that_is_swapped_while_it_is_changed_in_place_leads_to_no_other_file(root, runner, kind, instant):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    paths = several(runner, shared)
    # As large, so that nothing but its inode speaks against it.
    secret = grads(runner, private / "secret", 0o600, seed=1)
    before, old = state(private), [path.read_bytes() for path in paths]
    link, by = (os.symlink, MALLORY) if kind == "symlink" else (os.link, 0)

    def attack():
        paths[1].rename(shared / "away")
        link(secret, paths[1])

    where, name, nth = OVERWRITTEN[instant]
    arguments = ["clip", shared, "--max-norm", "1", "--write", "inplace", "--threads", "1"]
    told_once(run_as(runner, *arguments, meanwhile=At(where, name, attack, by, nth=nth)), "in the meantime")
    assert state(private)[secret] == before[secret]
    is_ready = where is not InPlace and where is not Commit
    assert bool(left_in(shared)) == is_ready
    paths[1].unlink()
    (shared / "away").rename(paths[1])
    if is_ready:
        assert run_as(runner, "recover", shared).code == 0
    assert [path.read_bytes() != was for path, was in zip(paths, old, strict=True)] == [is_ready] * 3


ROLLED = {"when it was looked at": (RedoLog, "check", True), "before it is written": (RedoLog, "finish", False)}


@RUNNERS
@pytest.mark.parametrize("kind", ["symlink", "hard link"])
@pytest.mark.parametrize("instant", ROLLED)
def test_a_half_changed_file_that_is_swapped_while_it_is_recovered_leads_to_no_other_file(root, runner, kind, instant):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    paths = several(runner, shared)
    secret = grads(runner, private / "secret", 0o600, seed=1)
    old, before = crash(shared, "inplace", runner), state(private)
    link, by = (os.symlink, MALLORY) if kind == "symlink" else (os.link, 0)

    def attack():
        paths[1].rename(shared / "away")
        link(secret, paths[1])

    where, name, after = ROLLED[instant]
    for force in ([], ["--force"]):
        at = At(where, name, attack, by, after=after)
        told_once(run_as(runner, "recover", shared, *force, meanwhile=at), "in the meantime")
        assert state(private)[secret] == before[secret]
        paths[1].unlink()
        (shared / "away").rename(paths[1])
    assert run_as(runner, "recover", shared).code == 0
    assert [path.read_bytes() != was for path, was in zip(paths, old, strict=True)] == [True] * 3
    assert left_in(shared) == []


CHECKS = {
    "before its names are read": (Folder, "names", False),
    "after its logs are read": (recovery, "follow_pointer", False),
    "before it is opened again": (Folder, "at", False, 2),
    "before its owner is asked": (recovery, "claim", False),
}


@pytest.mark.parametrize(("level", "runner"), [(0, ALICE), (1, 0)], ids=["itself", "above"])
@pytest.mark.parametrize("instant", CHECKS)
def test_a_folder_that_is_swapped_while_it_is_recovered_leads_to_no_run_elsewhere(root, runner, instant, level):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    folder_of(MALLORY, shared / "job", 0o755)
    trap, goal = folder_of(MALLORY, shared / "job/inner", 0o755), folder_of(runner, private / "inner", 0o755)
    several(runner, goal)
    crash(goal, runner=runner)
    before = state(goal)
    log = only(goal, "*.run").name
    forge(trap / log, log_bytes(names=["x.safetensors"], id=log.removesuffix(".run")))
    swapped, to = [(trap, goal), (trap.parent, private)][level]

    def attack():
        swapped.rename(shared / "away")
        swapped.symlink_to(to)

    where, name, after, *nth = CHECKS[instant]
    at = At(where, name, attack, after=after, nth=nth[0] if nth else 1)
    told_once(run_as(runner, "recover", trap, meanwhile=at))
    assert {path: one for path, one in state(goal).items() if path != goal} == {
        path: one for path, one in before.items() if path != goal
    }


@RUNNERS
def test_an_output_folder_that_is_a_link_of_another_user_is_refused(root, runner):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    source = grads(runner, root / "x.safetensors")
    as_user(MALLORY, lambda: (shared / "out").symlink_to(private))
    before = state(private)
    told_once(run_as(runner, "clip", source, "--max-norm", "1", "--output-dir", shared / "out"), f"user {MALLORY} made")
    assert state(private) == before


# What makes a folder, by way of a folder that is there and a link.
MAKES_FOLDERS = {
    "clip": ["clip", "x", "--max-norm", "1", "--output-dir", "out"],
    "new set": ["accumulate", "x", "--output-dir", "out", "--max-shard-size", "1KB"],
}


@RUNNERS
@pytest.mark.parametrize("made", MAKES_FOLDERS)
@pytest.mark.parametrize("below", ["new", "new/deeper"])
def test_no_folder_is_made_by_way_of_a_link_of_another_user_in_a_folder_of_ones_own(root, runner, made, below):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    source = grads(runner, root / "x")
    as_user(MALLORY, lambda: (shared / "out").symlink_to(private))
    before = state(private)
    places = {"x": source, "out": shared / "out" / below}
    answer = run_as(runner, *(places.get(word, word) for word in MAKES_FOLDERS[made]))
    told_once(answer, f"user {MALLORY} made, leads to a folder of yours, {private}; name that folder itself")
    assert state(private) == before


def test_a_folder_is_made_by_way_of_a_link_of_another_user_in_a_folder_of_that_one(root):
    shared, theirs = folder_of(0, root / "shared", 0o777), folder_of(MALLORY, root / "theirs", 0o777)
    source = grads(ALICE, root / "x")
    as_user(MALLORY, lambda: (shared / "out").symlink_to(theirs))
    answer = run_as(ALICE, "clip", source, "--max-norm", "1", "--output-dir", shared / "out/new")
    assert answer.code == 0, answer
    assert (theirs / "new/x").is_file()


def test_not_even_root_is_led_to_the_folder_of_a_third_user(root):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(ALICE, root / "private", 0o700)
    source, secret = grads(0, root / "x.safetensors"), grads(ALICE, private / "x.safetensors", 0o600, seed=2)
    as_user(MALLORY, lambda: ((shared / "out").symlink_to(private), (shared / "y.safetensors").symlink_to(secret)))
    before = state(private)
    told_once(run_as(0, "clip", source, "--max-norm", "1", "--output-dir", shared / "out"), f"user {MALLORY} made")
    told_once(run_as(0, "clip", shared / "y.safetensors", "--max-norm", "1"), f"user {MALLORY} made")
    assert state(private) == before


def test_a_link_that_leads_on_to_another_users_link_is_not_followed(root):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(ALICE, root / "private", 0o755)
    secret = grads(ALICE, private / "x.safetensors", 0o600)
    as_user(ALICE, lambda: (private / "latest.safetensors").symlink_to(secret.name))
    as_user(MALLORY, lambda: (shared / "y.safetensors").symlink_to(private / "latest.safetensors"))
    before = state(private)
    for runner in (0, ALICE):
        told_once(run_as(runner, "clip", shared / "y.safetensors", "--max-norm", "1"), f"user {MALLORY} made")
    assert state(private) == before


SWAPS = {
    "before the folders are opened": (Targets, "__init__", False),
    "after the folders are opened": (Targets, "__init__", True),
    "after the log is written": (fs, "write_all", True),
    "after the others are looked at": (Transaction, "append", False),
    "before a file is staged": (Commit, "stage", False),
    "after a file is staged": (Commit, "stage", True),
    "before the renames": (Commit, "put_in_place", False),
    "between the renames": (Folder, "rename", False, 2),
}


@pytest.mark.parametrize("instant", SWAPS)
@pytest.mark.parametrize("is_there", [True, False], ids=["there", "to be made"])
def test_an_output_folder_that_is_swapped_leads_to_no_other_folder(root, instant, is_there):
    runner = 0 if is_there else ALICE
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    sources = folder_of(runner, root / "in", 0o755)
    several(runner, sources)
    output = shared / "out"
    if is_there:
        folder_of(MALLORY, output, 0o777)
    before = state(private)

    def attack():
        with contextlib.suppress(FileNotFoundError):
            output.rename(shared / "away")
        output.symlink_to(private)

    where, name, after, *nth = SWAPS[instant]
    at = At(where, name, attack, after=after, nth=nth[0] if nth else 1)
    answer = run_as(runner, "clip", sources, "--max-norm", "1", "--output-dir", output, meanwhile=at)
    if answer.code != 0:
        told_once(answer)
    assert state(private) == before
    assert left_in(shared) == []


def test_a_temporary_that_is_not_the_one_that_was_made_takes_no_files_place(root):
    folder = folder_of(ALICE, root / "shared", 0o777)
    paths = several(ALICE, folder)
    old = crash(folder)
    now = [path.read_bytes() for path in paths]
    as_user(MALLORY, lambda: swap(only(folder, "*-1.tmp"), lambda path: path.write_bytes(b"forged")))
    told_once(run_as(ALICE, "recover", folder), "-1.tmp", "another program wrote to it")
    # Nor does any other, until it is certain that all can.
    assert [path.read_bytes() for path in paths] == now
    assert now[1:] == old[1:]


@RUNNERS
@pytest.mark.parametrize("way", ["replace", "inplace"])
def test_a_link_of_another_user_to_a_file_of_ones_own_is_read_and_not_written_through(root, runner, way):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    secret = grads(runner, private / "x.safetensors", 0o600)
    as_user(MALLORY, lambda: ((shared / "y.safetensors").symlink_to(secret), (shared / "z").symlink_to(private)))
    before = state(private)
    for path in (shared / "y.safetensors", shared / "z/x.safetensors", shared / "z"):
        assert run_as(runner, "norm", path).code == 0
        told_once(run_as(runner, "clip", path, "--max-norm", "1", "--write", way), f"user {MALLORY} made", "of yours")
    assert state(private) == before


def test_a_link_of_another_user_to_that_ones_own_file_is_followed(root):
    cache = folder_of(MALLORY, root / "cache", 0o777)
    blob = grads(MALLORY, cache / "blob", 0o666)
    as_user(MALLORY, lambda: (cache / "x.safetensors").symlink_to(blob.name))
    old = blob.read_bytes()
    answer = run_as(ALICE, "clip", cache / "x.safetensors", "--max-norm", "1", "--write", "inplace")
    assert answer.code == 0, answer
    assert (cache / "x.safetensors").is_symlink()
    assert blob.read_bytes() != old
    assert run_as(0, "clip", cache / "x.safetensors", "--max-norm", "0.5").code == 0
    assert blob.stat().st_uid == MALLORY


@RUNNERS
@pytest.mark.parametrize("named", ["", "y.safetensors", "z"])
def test_recover_follows_no_link_of_another_user_to_a_run_of_ones_own(root, runner, named):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    several(runner, private)
    crash(private, runner=runner)
    first = private / "0.safetensors"
    as_user(MALLORY, lambda: ((shared / "y.safetensors").symlink_to(first), (shared / "z").symlink_to(private)))
    before = state(private)
    answer = run_as(runner, "recover", shared / named)
    if named:
        told_once(answer, f"user {MALLORY} made")
    assert state(private) == before
