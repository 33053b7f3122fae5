"""Owners, modes and locks of two users in one folder."""

import contextlib
import fcntl
import os
import stat
import subprocess

import pytest
from neighbours import crash, folder_of, grads, left_in, several, state, told_once
from users import ALICE, MALLORY, At, run_as

from gradtool.store import fs
from gradtool.store.fs import Folder
from gradtool.store.transaction.inplace import InPlace
from gradtool.store.transaction.replace import Replacement
from gradtool.store.transaction.transaction import Transaction
from gradtool.store.transaction.undolog import UndoLog


def test_a_file_of_another_owner_is_replaced_without_bits_to_act_as_that_one(root):
    shared = folder_of(0, root / "shared", 0o777)
    target = grads(MALLORY, shared / "x.safetensors", 0o6755)
    assert run_as(0, "clip", target, "--max-norm", "1").code == 0
    status = target.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (MALLORY, 0o755)


def lock_all(folder):
    """Lock what can be opened, for as long as the process lives."""
    for path in [folder, *folder.iterdir()]:
        with contextlib.suppress(PermissionError):
            fd = os.open(path, os.O_RDONLY)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_locks_of_a_user_who_can_only_read_stop_no_writer(root):
    folder = folder_of(ALICE, root / "folder", 0o755)
    several(ALICE, folder)
    arguments = ["clip", folder, "--max-norm", "1", "--write", "inplace"]
    for name in ("names", "create"):
        assert run_as(ALICE, *arguments, meanwhile=At(Folder, name, lambda: lock_all(folder))).code == 0
        several(ALICE, folder)
    for name in ("append", "end"):
        assert (
            run_as(ALICE, *arguments[:4], meanwhile=At(Transaction, name, lambda: lock_all(folder), after=True)).code
            == 0
        )
        several(ALICE, folder)
    assert left_in(folder) == []


CRASHES = {
    "changing files in place": (UndoLog, "seal", 3),
    "renaming": (Folder, "rename", 2),
    "before its log was written": (fs, "write_all", 1),
    "before it was ready": (Transaction, "append", 1),
}


@pytest.mark.parametrize("crashed", CRASHES)
def test_locks_of_a_user_who_can_only_read_stop_neither_recovery_nor_readers(root, crashed):
    folder = folder_of(ALICE, root / "folder", 0o755)
    several(ALICE, folder)
    way = "inplace" if "in place" in crashed else "replace"
    run_as(ALICE, "clip", folder, "--max-norm", "1", "--write", way, "--threads", "1", dies_at=CRASHES[crashed])
    answer = run_as(ALICE, "recover", folder, meanwhile=At(Folder, "names", lambda: lock_all(folder)))
    assert (answer.code, answer.err) == (0, ""), answer
    assert left_in(folder) == []
    assert run_as(MALLORY, "norm", folder, meanwhile=At(Folder, "names", lambda: lock_all(folder), ALICE)).code == 0


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_only_its_owner_may_read_stays_so(root):
    folder = folder_of(ALICE, root / "folder", 0o777)
    secret = grads(ALICE, folder / "secret.safetensors", 0o600)
    public = grads(ALICE, folder / "public.safetensors", 0o644)
    known = grads(ALICE, folder / "known.safetensors", 0o600)
    seen = []

    def look():
        seen.extend(mode_of(path) for path in folder.rglob("*.tmp"))

    def made(*arguments):
        at = At(Replacement, "commit", lambda: look() or [check(mode == 0o600) for mode in seen] or check(False))
        answer = run_as(ALICE, *arguments, meanwhile=at)
        assert answer.code == 0, answer

    def check(holds):
        assert holds

    made("clip", public, "--max-norm", "1", "--output", known)
    assert mode_of(known) == 0o600
    made("clip", secret, "--max-norm", "1", "--output", folder / "a.safetensors")
    assert mode_of(folder / "a.safetensors") == 0o600
    made("clip", secret, "--max-norm", "1", "--output-dir", folder / "b")
    assert mode_of(folder / "b/secret.safetensors") == 0o600
    made("accumulate", secret, public, "--output", folder / "c.safetensors")
    assert mode_of(folder / "c.safetensors") == 0o600
    made("clip", secret, "--max-norm", "1")
    assert mode_of(secret) == 0o600
    made("clip", public, "--max-norm", "1", "--output", folder / "d.safetensors")
    assert mode_of(folder / "d.safetensors") == 0o644


@pytest.mark.parametrize("way", ["replace", "inplace"])
def test_a_reader_hears_of_a_half_changed_file_in_a_folder_that_it_cannot_list(root, way):
    folder = folder_of(ALICE, root / "folder", 0o755)
    paths = several(ALICE, folder)
    other = folder / "other.safetensors"
    folder.chmod(0o711)
    crash(folder, way)
    grads(ALICE, other, seed=9)
    assert run_as(MALLORY, "norm", folder).code == 5
    for path in paths:
        told_once(run_as(MALLORY, "norm", path), f"of user {ALICE}", "gradtool recover")
    assert run_as(MALLORY, "norm", other).code == 0
    assert run_as(ALICE, "recover", folder).code == 0
    assert left_in(folder) == []
    assert run_as(MALLORY, "norm", *paths).code == 0


@pytest.mark.parametrize("way", ["replace", "inplace"])
def test_of_two_users_who_may_write_a_file_one_does_so_at_a_time(root, way):
    folder = folder_of(ALICE, root / "folder", 0o777)
    paths = several(ALICE, folder, mode=0o666)

    def check():
        before = [path.read_bytes() for path in paths]
        for arguments in (["clip", paths[0], "--max-norm", "1", "--write", "inplace"], ["recover", folder]):
            told_once(run_as(MALLORY, *arguments), "in use by PID ", f" of user {ALICE}")
        assert [path.read_bytes() for path in paths] == before

    where = Replacement if way == "replace" else InPlace
    arguments = ["clip", folder, "--max-norm", "1", "--write", way]
    assert run_as(ALICE, *arguments, meanwhile=At(where, "commit", check)).code == 0
    assert left_in(folder) == []


@pytest.mark.parametrize("way", ["replace", "inplace"])
def test_what_a_crashed_run_of_another_user_left_is_left_to_that_one(root, way):
    folder = folder_of(ALICE, root / "folder", 0o777)
    paths = several(ALICE, folder, mode=0o666)
    crash(folder, way)
    before = {path: one for path, one in state(folder).items() if path != folder}
    for runner in (MALLORY, 0):
        for arguments in (["clip", paths[0], "--max-norm", "1", "--write", "inplace"], ["recover", folder]):
            told_once(run_as(runner, *arguments), f"of a crashed run of user {ALICE}", "recover it as that user")
            assert {path: one for path, one in state(folder).items() if path != folder} == before
    assert run_as(ALICE, "recover", folder).code == 0


@pytest.mark.parametrize("way", ["replace", "inplace"])
def test_a_file_that_cannot_be_written_is_found_before_anything_is_changed(root, way):
    folder = folder_of(ALICE, root / "folder", 0o755)
    paths = several(ALICE, folder, 4)
    paths[2].chmod(0o444)
    if way == "replace":
        os.chown(paths[2], MALLORY, MALLORY)
    refuses_all(folder, ALICE, way, paths[2])


@pytest.mark.parametrize("way", ["replace", "inplace"])
def test_a_file_that_not_even_root_may_write_is_found_before_anything_is_changed(root, way):
    folder = folder_of(0, root / "folder", 0o755)
    paths = several(0, folder, 4)
    if subprocess.run(["chattr", "+i", paths[2]], check=False, capture_output=True).returncode:
        pytest.skip("the file system has no files that cannot be changed")
    try:
        refuses_all(folder, 0, way, paths[2])
    finally:
        subprocess.run(["chattr", "-i", paths[2]], check=True)


def refuses_all(folder, runner, way, culprit):
    before = {path: one for path, one in state(folder).items() if path != folder}
    answer = run_as(runner, "clip", folder, "--max-norm", "1", "--write", way)
    told_once(answer, culprit.name)
    now = {path: one for path, one in state(folder).items() if path != folder}
    # Not even put back.
    assert now == before
