"""Owners, modes and locks of two users in one folder."""

import contextlib
import fcntl
import json
import os
import stat
import struct
import subprocess

import pytest
from layers import layer
from neighbours import HALF_CHANGED, HALF_RENAMED, crash, folder_of, grads, left_in, several, state, told_once
from support import write
from users import ALICE, MALLORY, At, as_user, run_as

from gradtool.store import fs
from gradtool.store.fs import Folder
from gradtool.store.io.redolog import RedoLog
from gradtool.store.transaction.commit import Commit
from gradtool.store.transaction.transaction import Transaction


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
    "changing files in place": HALF_CHANGED,
    "ready to change files in place": (RedoLog, "apply", 1),
    "renaming": HALF_RENAMED,
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

    def look():
        made = [path for path in folder.rglob(".gradtool-*") if path.suffix in (".tmp", ".redo")]
        assert made
        assert [mode_of(path) for path in made] == [0o600] * len(made)

    def made(*arguments):
        answer = run_as(ALICE, *arguments, meanwhile=At(Commit, "put_in_place", look))
        assert answer.code == 0, answer

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
    made("clip", secret, "--max-norm", "0.5", "--write", "inplace")
    assert mode_of(secret) == 0o600
    made("clip", public, "--max-norm", "0.5", "--write", "inplace")
    assert mode_of(public) == 0o644
    made("clip", public, "--max-norm", "0.1", "--output", folder / "d.safetensors")
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


ALIVE = {
    "before renames": ("replace", Commit, "put_in_place", 1),
    "between renames": ("replace", *HALF_RENAMED),
    "before files are changed in place": ("inplace", Commit, "put_in_place", 1),
    "while files are changed in place": ("inplace", *HALF_CHANGED),
}


@pytest.mark.parametrize("instant", ALIVE)
def test_of_two_users_who_may_write_a_file_one_does_so_at_a_time(root, instant):
    folder = folder_of(ALICE, root / "folder", 0o777)
    paths = several(ALICE, folder, mode=0o666)
    other = grads(ALICE, root / "other.safetensors", seed=9)
    way, where, name, nth = ALIVE[instant]

    def check():
        before = [path.read_bytes() for path in paths]
        for runner in (MALLORY, 0):
            user = f" of user {ALICE}"
            for arguments in (["clip", paths[0], "--max-norm", "1", "--write", "inplace"], ["recover", folder]):
                told_once(run_as(runner, *arguments), "in use by PID ", user)
            told_once(run_as(runner, "clip", other, "--max-norm", "1", "--output", paths[2]), "in use by PID", user)
            if nth > 1:
                told_once(run_as(runner, "norm", paths[0]), "may be half changed by a run (PID ", user)
            else:
                assert run_as(runner, "norm", paths[0]).code == 0
        assert [path.read_bytes() for path in paths] == before

    arguments = ["clip", folder, "--max-norm", "1", "--write", way, "--threads", "1"]
    answer = run_as(ALICE, *arguments, meanwhile=At(where, name, check, 0, nth=nth))
    assert (answer.code, answer.err) == (0, ""), answer
    assert left_in(folder) == []


@pytest.mark.parametrize("way", ["replace", "inplace"])
def test_what_a_crashed_run_of_another_user_left_is_left_to_that_one(root, way):
    folder = folder_of(ALICE, root / "folder", 0o777)
    paths = several(ALICE, folder, mode=0o666)
    crash(folder, way)
    before = {path: one for path, one in state(folder).items() if path != folder}
    for runner in (MALLORY, 0):
        for arguments in (["clip", paths[0], "--max-norm", "1", "--write", "inplace"], ["recover", folder]):
            told_once(run_as(runner, *arguments), f"of a crashed run of user {ALICE}", "as that user")
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


def test_a_file_of_another_user_that_cannot_be_replaced_is_found_before_anything_is_changed(root):
    sources, sticky = folder_of(ALICE, root / "in", 0o755), folder_of(0, root / "sticky", 0o1777)
    several(ALICE, sources, 4)
    several(ALICE, sticky, 2)
    # Readable, and even writable for Alice; but in such a folder, only its owner may take away its name.
    theirs = grads(MALLORY, sticky / "2.safetensors", 0o666)
    before = {path: one for path, one in state(sticky).items() if path != sticky}
    arguments = ["clip", sources, "--max-norm", "1", "--output-dir", sticky]
    told_once(run_as(ALICE, *arguments), f"{theirs}: Operation not permitted")
    assert {path: one for path, one in state(sticky).items() if path != sticky} == before
    for owner in (ALICE, 0):
        os.chown(sticky, owner, owner)
        if owner == 0:
            os.chown(theirs, ALICE, ALICE)
        assert run_as(ALICE, *arguments).code == 0
        assert len(list(sticky.iterdir())) == 4


def refuses_all(folder, runner, way, culprit):
    before = {path: one for path, one in state(folder).items() if path != folder}
    answer = run_as(runner, "clip", folder, "--max-norm", "1", "--write", way)
    told_once(answer, culprit.name)
    now = {path: one for path, one in state(folder).items() if path != folder}
    assert now == before


SECRET = 777
# Of linux/posix_acl_xattr.h: the tags of entries for the owner, a user, the group, the mask and all others.
OWNER, USER, GROUP, MASK, OTHERS = 1, 2, 4, 0x10, 0x20


def list_on(path, *entries, kind="access"):
    """Give a file or folder an access control list of (tag, rights) or (tag, rights, ID)."""
    packed = [struct.pack("<HHi", *entry, *[-1] * (3 - len(entry))) for entry in entries]
    try:
        os.setxattr(path, f"system.posix_acl_{kind}", struct.pack("<I", 2) + b"".join(packed))
    except (AttributeError, OSError) as error:
        pytest.skip(f"this file system has no access control lists: {error}")


def secret_in(folder, name="secret.safetensors", mode=0o640, group=SECRET, seed=1):
    path = grads(ALICE, folder / name, mode, seed)
    os.chown(path, ALICE, group)
    return path


def has_list(path):
    return hasattr(os, "listxattr") and "system.posix_acl_access" in os.listxattr(path)


def reads(path, uid=MALLORY):
    try:
        as_user(uid, path.read_bytes)
    except AssertionError:
        return False
    return True


def folder_of_mallorys_group(root):
    folder = folder_of(0, root / "new", 0o777)
    os.chown(folder, 0, MALLORY)
    folder.chmod(0o2777)
    return folder


def folder_that_lets_mallory_in(root):
    folder = folder_of(0, root / "new", 0o777)
    list_on(folder, (OWNER, 7), (USER, 7, MALLORY), (GROUP, 7), (MASK, 7), (OTHERS, 5), kind="default")
    return folder


# By name: the options, and the files that are made by way of them; `in` is the input, `new` the folder.
MAKERS = {
    "a file": (["clip", "in/x", "--max-norm", "1", "--output", "new/y"], ["y"]),
    "a folder": (["clip", "in", "--max-norm", "1", "--output-dir", "new/d"], ["d/x", "d/x.safetensors.index.json"]),
    "a set": (
        ["accumulate", "in/x", "--output-dir", "new/set", "--max-shard-size", "1KB"],
        ["set/model-00001-of-00002.safetensors", "set/model.safetensors.index.json"],
    ),
    "a set like another": (["accumulate", "public", "--output-dir", "new/set", "--shard-like", "in"], ["set/x"]),
    "a state": (["clip", "in/x", "--limit", "z=2", "--state", "new/state"], ["state"]),
    "a state in place": (
        ["clip", "in/x", "--limit", "z=2", "--state", "new/state", "--write", "inplace"],
        ["state"],
    ),
    "a file by parameters": (
        ["clip", "public", "--agc", "0.01", "--params", "in/x", "--output", "new/y"],
        ["y"],
    ),
    "a file by parameters of a set": (
        ["clip", "public", "--agc", "0.01", "--params", "in", "--output", "new/y"],
        ["y"],
    ),
    "a file by a state": (
        ["clip", "public", "--limit", "z=2", "--state", "in/state", "--output", "new/y"],
        ["y"],
    ),
    "a file of two": (["accumulate", "public", "in/x", "--output", "new/y"], ["y"]),
}


@pytest.mark.parametrize("where", [folder_of_mallorys_group, folder_that_lets_mallory_in])
@pytest.mark.parametrize("made", MAKERS)
def test_a_new_file_lets_in_nobody_whom_an_input_keeps_out(root, where, made):
    arguments, names = MAKERS[made]
    new = where(root)
    inputs = folder_of(ALICE, root / "in", 0o755)
    source = secret_in(inputs, "x")
    grads(ALICE, root / "public")
    if "in" in arguments:
        index = inputs / "x.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(("t1.0", "t1.1"), "x")}))
    if "in/state" in arguments:
        first = run_as(ALICE, "clip", source, "--limit", "z=2", "--state", root / "in/state")
        assert first.code == 0, first
        assert mode_of(root / "in/state") == 0o600
    places = ("in", "in/x", "in/state", "public")
    words = [root / word if word in places or word.startswith("new/") else word for word in arguments]
    answer = run_as(ALICE, *words)
    assert answer.code == 0, answer
    for name in names:
        assert mode_of(new / name) == 0o600
        assert not reads(new / name)
        assert not has_list(new / name)


@pytest.mark.parametrize("where", [folder_of_mallorys_group, folder_that_lets_mallory_in])
def test_a_new_file_of_what_everybody_may_read_is_for_everybody(root, where):
    new = where(root)
    source = grads(ALICE, root / "public")
    assert run_as(ALICE, "clip", source, "--max-norm", "1", "--output", new / "y").code == 0
    assert mode_of(new / "y") == 0o644
    assert reads(new / "y")
    assert not has_list(new / "y")


def test_the_gradients_of_a_layer_keep_out_whom_an_input_keeps_out(root):
    new = folder_of_mallorys_group(root)
    source = write(root / "x", layer((3, 8)))
    os.chown(source, ALICE, SECRET)
    source.chmod(0o640)
    answer = run_as(ALICE, "layernorm-backward", source, "--output", new / "y")
    assert answer.code == 0, answer
    assert mode_of(new / "y") == 0o600


def test_members_of_the_inputs_group_read_new_files_of_that_group(root):
    new = folder_of_mallorys_group(root)
    source = secret_in(root, group=MALLORY)
    assert run_as(ALICE, "clip", source, "--max-norm", "1", "--output", new / "y").code == 0
    assert mode_of(new / "y") == 0o640
    assert reads(new / "y")


@pytest.mark.parametrize(
    ("entries", "mode"),
    [
        # The mask of a list, which a mode shows as the rights of the group, is not what the group may do.
        ([(OWNER, 6), (USER, 4, 4321), (GROUP, 0), (MASK, 4), (OTHERS, 0)], 0o600),
        ([(OWNER, 6), (USER, 0, MALLORY), (GROUP, 4), (MASK, 4), (OTHERS, 4)], 0o600),
        ([(OWNER, 6), (USER, 6, 4321), (GROUP, 4), (MASK, 6), (OTHERS, 4)], 0o644),
    ],
    ids=["lets in one user", "keeps out one user", "lets in everybody"],
)
def test_what_an_access_control_list_of_an_input_says_counts(root, entries, mode):
    source = grads(ALICE, root / "x")
    list_on(source, *entries)
    new = folder_of_mallorys_group(root)
    assert run_as(ALICE, "clip", source, "--max-norm", "1", "--output", new / "y").code == 0
    assert mode_of(new / "y") == mode
    assert reads(new / "y") == reads(source)


def test_a_file_that_is_replaced_by_a_new_one_keeps_out_whom_it_kept_out(root):
    new = folder_of_mallorys_group(root)
    source, there = grads(ALICE, root / "public"), secret_in(new, "y")
    assert run_as(ALICE, "clip", source, "--max-norm", "1", "--output", there).code == 0
    assert mode_of(there) == 0o600


def test_an_index_that_is_replaced_after_it_was_read_keeps_out_whom_it_kept_out(root):
    shared, new = folder_of(0, root / "shared", 0o777), folder_of(0, root / "new", 0o777)
    grads(ALICE, shared / "x")
    index = shared / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(("t1.0", "t1.1"), "x"), "metadata": {"a": "secret"}}))
    index.chmod(0o600)
    os.chown(index, ALICE, ALICE)

    def swap():
        index.rename(shared / "away")
        index.write_text("{}")

    at = At(Commit, "put_in_place", swap)
    assert run_as(ALICE, "clip", shared, "--max-norm", "1", "--output-dir", new / "d", meanwhile=at).code == 0
    assert "secret" in (new / "d" / index.name).read_text()
    assert mode_of(new / "d" / index.name) == 0o600


def test_an_input_that_is_closed_to_others_during_the_run_keeps_them_out(root):
    new = folder_of(0, root / "new", 0o777)
    source = grads(ALICE, root / "x")
    at = At(Commit, "put_in_place", lambda: source.chmod(0o600), ALICE)
    assert run_as(ALICE, "clip", source, "--max-norm", "1", "--output", new / "y", meanwhile=at).code == 0
    assert mode_of(new / "y") == 0o600
