"""What one user may and may not do to the runs of another, by way of a folder that both can reach."""

import contextlib
import fcntl
import json
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from crashes import FAST
from support import write
from users import ALICE, MALLORY, At, as_user, run_as

from gradtool.store import fs
from gradtool.store.fs import Folder
from gradtool.store.transaction import recovery, replace, undolog
from gradtool.store.transaction.files import marker_of
from gradtool.store.transaction.inplace import InPlace
from gradtool.store.transaction.log import HOST, line_of
from gradtool.store.transaction.replace import Replacement
from gradtool.store.transaction.staging import Staged
from gradtool.store.transaction.targets import Targets
from gradtool.store.transaction.transaction import Transaction
from gradtool.store.transaction.undolog import UndoLog

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")

ID = ".gradtool-0123456789ab"
KEY = "00" * 16
# No process has it: it is beyond what the system gives.
DEAD = (1 << 31) - 1
RUNNERS = pytest.mark.parametrize("runner", [0, ALICE], ids=["root", "alice"])


@pytest.fixture
def root():
    """A folder that everybody can pass through, of which only root can change the names."""
    path = Path(tempfile.mkdtemp(prefix="gradtool-users-", dir=FAST))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def folder_of(uid, path, mode):
    path.mkdir()
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def grads(uid, path, mode=0o644, seed=1):
    """A file of gradients whose norm is far above 1."""
    rng = np.random.default_rng(seed)
    write(path, {f"t{seed}.{k}": rng.standard_normal(300 + k).astype(np.float32) for k in range(2)})
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def several(uid, folder, count=3, mode=0o644):
    return [grads(uid, folder / f"{number}.safetensors", mode, number) for number in range(count)]


def state(folder):
    """All about what is in a folder that a run which is to leave it alone could change."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[path] = content, status.st_mode, status.st_uid, status.st_gid, status.st_ino, status.st_mtime_ns
    return found


def left_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".gradtool-"))


def told_once(answer, *words):
    """That the answer is exit code 5 with one line about the error, which has the words."""
    assert answer.code == 5, answer
    lines = [line for line in answer.err.splitlines() if line.startswith("gradtool: error: ")]
    assert len(lines) == 1, answer
    assert "Traceback" not in answer.err
    for word in words:
        assert word in lines[0], answer


def log_bytes(*steps, names=(), **facts):
    run = {"id": ID, "format": 2, "pid": DEAD, "host": HOST, "boot": "", "key": KEY, "files": list(names)} | facts
    return b"".join([line_of(run=run), *(line_of(**step) for step in steps)])


def forge(path, content, uid=MALLORY, mode=0o644):
    path.write_bytes(content)
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


def move_of(temporary, target, folder=0):
    """A step that has a temporary take the place of a file, as a run would write it."""
    now = target.stat()
    return [folder, 0, target.name, temporary.stat().st_ino, now.st_size, now.st_mtime_ns, now.st_ino]


def only(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


def swap(path, by):
    path.unlink()
    by(path)


INSTANTS = {
    "before it is filled": (Replacement, "stage", True),
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


def test_a_file_of_another_owner_is_replaced_without_bits_to_act_as_that_one(root):
    shared = folder_of(0, root / "shared", 0o777)
    target = grads(MALLORY, shared / "x.safetensors", 0o6755)
    assert run_as(0, "clip", target, "--max-norm", "1").code == 0
    status = target.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (MALLORY, 0o755)


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
        told_once(run_as(runner, *arguments), f"of user {MALLORY}", "recover it as that user")
        assert state(private) == before
        assert {path: one for path, one in state(shared).items() if path != shared} == {
            path: one for path, one in found.items() if path != shared
        }


def crash(folder, way="replace", runner=ALICE):
    """Kill a run when it has changed the first file and not the last; what the files hold then."""
    at = (UndoLog, "save", 3) if way == "inplace" else (Folder, "rename", 2)
    arguments = ["clip", folder, "--max-norm", "1", "--write", way, "--threads", "1"]
    run_as(runner, *arguments, dies_at=at)
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


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


CHECKS = {
    "before its names are read": (Folder, "names", False),
    "after its logs are read": (recovery, "home_of", False),
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


@RUNNERS
def test_an_output_folder_that_is_a_link_of_another_user_is_refused(root, runner):
    shared, private = folder_of(0, root / "shared", 0o777), folder_of(runner, root / "private", 0o700)
    source = grads(runner, root / "x.safetensors")
    as_user(MALLORY, lambda: (shared / "out").symlink_to(private))
    before = state(private)
    told_once(run_as(runner, "clip", source, "--max-norm", "1", "--output-dir", shared / "out"), f"user {MALLORY} made")
    assert state(private) == before


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
    "after the log is written": (Transaction, "_write_log", True),
    "after the others are looked at": (Transaction, "append", False),
    "before a file is staged": (Replacement, "stage", False),
    "after a file is staged": (Replacement, "stage", True),
    "before the renames": (Replacement, "commit", False),
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
    "a log that nobody understands": lambda target: log_bytes({"what": 1}, names=[target.name]),
    "a log of another version": lambda target: log_bytes(names=[target.name], format=3),
}


@pytest.mark.parametrize("nuisance", NUISANCES)
def test_a_log_of_another_user_in_a_sticky_folder_is_in_nobodys_way(root, nuisance):
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


def test_what_others_put_in_a_sticky_folder_instead_of_logs_is_in_nobodys_way(root):
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


def entry(number, begin, content, new):
    """An entry of an undo log, as the log that everybody may read gives the key for it."""
    sums = undolog._sector_sums(memoryview(new), begin).tobytes()
    fields = undolog._HEADER.pack(undolog._MAGIC, number, begin, len(content))
    return undolog._sealed(KEY.encode(), fields, sums, memoryview(content)) + sums + content


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
        assert len(key) == len(KEY)
        now = paths[1].read_bytes()
        forged = entry(1, 0, b"x" * len(now), now)
        # With the key of this run, so that it is just the owner that speaks against it.
        body = forged[undolog._HEADER_BYTES :]
        sums, content = body[: -len(now)], body[-len(now) :]
        forge(added, undolog._sealed(key.encode(), forged[: undolog._HEADER.size], sums, memoryview(content)) + body)
    else:
        other = folder_of(ALICE, root / "other", 0o755)
        several(ALICE, other, mode=0o666)
        crash(other, "inplace")
        os.link(only(other, "*.undo"), added)
    answer = run_as(ALICE, "recover", folder)
    assert (answer.code, answer.err) == (0, ""), answer
    assert [path.read_bytes() for path in paths] == old


def test_a_temporary_that_is_not_the_one_that_was_made_takes_no_files_place(root):
    folder = folder_of(ALICE, root / "shared", 0o777)
    paths = several(ALICE, folder)
    before = crash(folder)
    as_user(MALLORY, lambda: swap(only(folder, "*-1.tmp"), lambda path: path.write_bytes(b"forged")))
    run_as(ALICE, "recover", folder)
    assert paths[1].read_bytes() == before[1]


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
        at = At(Transaction, name, lambda: lock_all(folder), after=True)
        assert run_as(ALICE, *arguments[:4], meanwhile=at).code == 0
        several(ALICE, folder)
    assert left_in(folder) == []


CRASHES = {
    "changing files in place": (UndoLog, "save", 3),
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
    made("accumulate", "--create", folder / "c.safetensors", secret, public)
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
