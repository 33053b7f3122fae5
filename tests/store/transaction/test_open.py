import contextlib
import errno
import fcntl
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from leftovers import crash, redo_log_of
from support import COMMAND, gradtool, gradtool_json, in_place, read, registered, snapshot, write, write_index
from tiers import EXHAUSTIVE

from gradtool import BadInputError, SystemRefusedError, UsageError, accumulate, clip, norm, recover, zero
from gradtool.errors import changed_meanwhile
from gradtool.store.fs import Folder
from gradtool.store.io.redolog import RedoLog
from gradtool.store.transaction import locks
from gradtool.store.transaction.inputs import Inputs, require_finished
from gradtool.store.transaction.log import encode_step
from gradtool.store.transaction.runs import runs_in
from gradtool.store.transaction.targets import Targets
from gradtool.store.transaction.transaction import Transaction


def one_file(folder, name="x.safetensors", value=3.0):
    return write(folder / name, {name: np.full(5, value, np.float32)})


@pytest.fixture
def held(tmp_path):
    """A file, and the run that has it."""
    path = one_file(tmp_path)
    run = registered([path])
    yield path, run
    run.close()


@pytest.mark.parametrize("mode", ["replace", "inplace"])
def test_the_second_writer_is_told_who_the_first_is_and_changes_nothing(held, mode):
    path, _ = held
    before = snapshot(path.parent)
    done = gradtool("zero", path, "--write", mode)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        f"gradtool: error: {path}: in use by PID {os.getpid()}\n  hint: wait for it with --lock-timeout\n"
    )
    assert snapshot(path.parent) == before
    answer = gradtool_json("clip", path, "--max-norm", "1")
    assert [(one["code"], one["file"]) for one in answer["errors"]] == [("in-use", str(path))]


def test_a_run_within_the_same_process_is_no_exception(held):
    with pytest.raises(SystemRefusedError, match=f"in use by PID {os.getpid()}"):
        zero(held[0])


def test_a_link_leads_to_the_same_lock(held, tmp_path):
    (tmp_path / "else").mkdir()
    link = tmp_path / "else" / "link.safetensors"
    link.symlink_to(held[0])
    with pytest.raises(SystemRefusedError, match="in use"):
        zero(link)


@pytest.mark.usefixtures("held")
def test_other_files_of_the_folder_are_free(tmp_path):
    other = one_file(tmp_path, "other.safetensors")
    assert zero(other).output.files_written == 1


def test_who_has_not_changed_anything_yet_is_not_in_the_way_of_readers(held):
    assert norm(held[0]).norm == pytest.approx(3 * 5**0.5)
    assert clip(held[0], max_norm=1, dry_run=True).clipped


def test_an_output_is_locked_too_and_its_input_is_not(held, tmp_path):
    source = one_file(tmp_path, "source.safetensors", 1.0)
    with pytest.raises(SystemRefusedError, match="in use"):
        zero(source, output=held[0])
    assert zero(held[0], output=tmp_path / "copy.safetensors").output.files_written == 1


def test_who_waits_gets_the_lock_and_what_the_first_one_wrote(held):
    path, run = held
    found = []
    waiting = threading.Thread(target=lambda: found.append(clip(path, max_norm=1.0, lock_timeout=60).norm_before))
    waiting.start()
    # Whether it waits already or only begins to makes no difference.
    path.write_bytes(one_file(path.parent / "new", "x.safetensors", 7.0).read_bytes())
    run.close()
    waiting.join()
    assert found == [pytest.approx(7 * 5**0.5)]


def test_who_waits_in_vain_is_told(held):
    with pytest.raises(SystemRefusedError, match="in use"):
        zero(held[0], lock_timeout=0.05)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "soon"])
def test_a_time_to_wait_must_be_one(held, seconds):
    with pytest.raises(UsageError, match="lock_timeout"):
        zero(held[0], lock_timeout=seconds)


def test_a_run_leaves_nothing_in_any_of_its_folders(tmp_path):
    paths = [one_file(tmp_path / name, f"{name}.safetensors") for name in "abc"]
    run = registered(paths)
    assert [len(list((tmp_path / name).glob(".gradtool-*"))) for name in "abc"] == [2, 1, 1]
    with pytest.raises(SystemRefusedError, match=f"in use by PID {os.getpid()}"):
        zero(paths[2])
    run.close()
    assert zero(paths).output.files_written == 3
    assert [list((tmp_path / name).iterdir()) for name in "abc"] == [[path] for path in paths]


def test_who_is_refused_in_one_folder_lets_go_of_the_others(tmp_path):
    paths = [one_file(tmp_path / name, f"{name}.safetensors") for name in "abc"]
    run = registered(paths[1:2])
    with pytest.raises(SystemRefusedError, match="in use"):
        registered(paths)
    assert [len(list((tmp_path / name).glob(".gradtool-*"))) for name in "abc"] == [0, 2, 0]
    run.close()


def test_the_log_of_a_crashed_run_is_taken_over(tmp_path):
    path = one_file(tmp_path)
    crash(lambda: registered([path]))
    assert zero(path).output.files_written == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_that_another_process_makes_first_is_that_of_a_live_run(tmp_path, monkeypatch):
    path = one_file(tmp_path)
    crash(lambda: registered([path]))
    (lock,) = tmp_path.glob(".*.lock")
    lock.unlink()
    monkeypatch.setattr(locks, "create_locked", lambda *_: lock.touch())  # Made, and taken for an orphan.
    with Folder.at(tmp_path) as folder:
        (run,) = runs_in(folder)
        assert isinstance(locks.claim(folder, run.log), locks.InUse)


def test_without_locks_a_process_that_is_there_is_alive_and_one_that_is_gone_is_not(tmp_path, monkeypatch):
    path = one_file(tmp_path)

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    run = registered([path])
    with pytest.raises(SystemRefusedError, match="in use"):
        zero(path)
    child = subprocess.Popen(["true"])
    child.wait()
    log = tmp_path / f"{run.id}.run"
    facts = json.loads(log.read_text().splitlines()[0].partition(" ")[2])["run"] | {"pid": child.pid}
    log.write_bytes(encode_step(run=facts))
    assert zero(path).output.files_written == 1
    log.write_bytes(encode_step(run=facts | {"host": "elsewhere"}))
    (tmp_path / f"{run.id}.lock").touch()
    with pytest.raises(SystemRefusedError, match=f"in use by PID {child.pid} on elsewhere"):
        zero(path)


@contextlib.contextmanager
def being_changed(path):
    """A live run that is just about to overwrite a file, and what has it go on and end."""
    is_ready, may_go_on = threading.Event(), threading.Event()
    apply, run = RedoLog.apply, registered([path])
    commit, log = in_place(run, [path])
    redo_log_of(log, [path], [path.read_bytes()])

    def apply_later(*arguments):
        is_ready.set()
        may_go_on.wait()
        apply(*arguments)

    def put_in_place():
        with run, commit:
            commit.put_in_place()

    running = threading.Thread(target=put_in_place)

    def go_on():
        may_go_on.set()
        running.join()

    with mock.patch.object(RedoLog, "apply", apply_later):
        running.start()
        is_ready.wait()
    try:
        yield go_on
    finally:
        go_on()
    assert not list(path.parent.glob(".gradtool-*"))


@pytest.fixture
def changing(tmp_path):
    """A file that is being changed in place."""
    path = one_file(tmp_path)
    with being_changed(path):
        yield path


def test_a_file_that_is_half_changed_is_not_read_unless_that_is_asked_for(changing, tmp_path):
    answer = gradtool_json("norm", changing)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (5, "unfinished")
    assert f"PID {os.getpid()}" in answer["errors"][0]["message"]
    assert norm(changing, allow_unfinished=True).norm == pytest.approx(3 * 5**0.5)
    buffer = write(tmp_path / "buffer.safetensors", {"x.safetensors": np.zeros(5, np.float32)})
    for read_it in (
        lambda: accumulate(changing, into=buffer),
        lambda: clip(changing, max_norm=1, output=tmp_path / "copy"),
        lambda: clip(changing, max_norm=1, dry_run=True),
        lambda: norm([buffer, changing]),
    ):
        with pytest.raises(SystemRefusedError, match="may be half changed by a run"):
            read_it()
    assert not any(read(buffer)["x.safetensors"])


def test_a_set_that_cannot_be_opened_because_it_is_half_changed_says_so(tmp_path):
    write_index(tmp_path, {"a.safetensors": {"t": np.ones(3, np.float32)}})
    with being_changed(tmp_path / "a.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"new": "a.safetensors"}}')
        with pytest.raises(SystemRefusedError, match="may be half changed by a run"):
            norm(tmp_path)
        with pytest.raises(BadInputError):
            norm(tmp_path, allow_unfinished=True)
    with pytest.raises(BadInputError):
        norm(tmp_path)


def test_where_nothing_can_be_locked_what_changes_nothing_still_succeeds(tmp_path, monkeypatch):
    path = one_file(tmp_path, value=0.1)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Folder, "create", refuse)
    assert not clip(path, max_norm=1).clipped
    with pytest.raises(SystemRefusedError, match="Permission denied; check the permissions"):
        clip(path, max_norm=0.01)


def test_a_folder_that_may_not_be_listed_is_no_hindrance_to_reading(tmp_path, monkeypatch):
    path = one_file(tmp_path)

    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "listdir", refuse)
    require_finished([path])


@pytest.mark.parametrize(
    "modes",
    [
        ["replace", "inplace"],
        pytest.param(["replace"], marks=EXHAUSTIVE),
        pytest.param(["inplace"], marks=EXHAUSTIVE),
    ],
    ids="+".join,
)
def test_ten_writers_at_once_are_ten_writers_in_some_order(tmp_path, modes):
    shards = [f"buffer-{i}.safetensors" for i in range(3)]
    write_index(tmp_path / "buffer", {file: {file: np.zeros(40_000, np.float32)} for file in shards})
    running = []
    for number in range(10):
        # Distinct powers of two: the sum says which were added, and how often.
        gradient = tmp_path / f"{number}.safetensors"
        write(gradient, {file: np.full(40_000, 2.0**number, np.float32) for file in shards})
        options = ["--write", modes[number % len(modes)], "--lock-timeout", "300", "--quiet"]
        running.append(subprocess.Popen([*COMMAND, "accumulate", gradient, "--into", tmp_path / "buffer", *options]))
    assert [one.wait() for one in running] == [0] * 10
    assert all((read(tmp_path / "buffer" / file)[file] == 1023).all() for file in shards)
    assert sorted(path.name for path in (tmp_path / "buffer").iterdir()) == [*shards, "model.safetensors.index.json"]


def test_ten_writers_at_once_that_do_not_wait_are_done_or_told(tmp_path):
    path = write(tmp_path / "buffer.safetensors", {"t": np.zeros(200_000, np.float32)})
    running = []
    for number in range(10):
        gradient = write(tmp_path / f"{number}", {"t": np.full(200_000, 2.0**number, np.float32)})
        command = [*COMMAND, "accumulate", gradient, "--into", path, "--quiet", "--write", "inplace"]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    said = [one.communicate()[1] for one in running]
    codes = [one.returncode for one in running]
    assert set(codes) <= {0, 5}
    assert 0 in codes
    assert all("in use by PID" in text for text, code in zip(said, codes, strict=True) if code == 5)
    assert (read(path)["t"] == sum(2.0**k for k, code in enumerate(codes) if code == 0)).all()
    assert recover(tmp_path).per_run == ()


@pytest.mark.parametrize("folder", ["a", "b"])
@pytest.mark.parametrize("mode", ["replace", "inplace"])
def test_a_link_that_is_led_elsewhere_while_a_run_waits_is_noticed(tmp_path, monkeypatch, folder, mode):
    first, other = one_file(tmp_path / "a", "first.safetensors"), one_file(tmp_path / folder, "other.safetensors")
    link = tmp_path / "link.safetensors"
    link.symlink_to(first)
    run = registered([first])

    def lead_elsewhere(_):
        link.unlink()
        link.symlink_to(other)
        run.close()

    monkeypatch.setattr(time, "sleep", lead_elsewhere)
    before = first.read_bytes(), other.read_bytes()
    with pytest.raises(SystemRefusedError, match="changed by another program"):
        zero(link, write=mode, lock_timeout=60)
    assert (first.read_bytes(), other.read_bytes()) == before
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        *("first.safetensors", "link.safetensors", "other.safetensors"),
    ]


def test_a_call_that_cannot_write_to_one_folder_is_not_in_its_own_way(tmp_path, monkeypatch):
    paths = [one_file(tmp_path / name, f"{name}.safetensors") for name in "ab"]
    real = Folder.create

    def refuse(folder, *more):
        if folder.path.name == "b":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, *more)

    monkeypatch.setattr(Folder, "create", refuse)
    before = snapshot(tmp_path)
    with pytest.raises(SystemRefusedError, match="No space left"):
        zero(paths, lock_timeout=60)
    assert snapshot(tmp_path) == before


def test_who_finds_a_set_half_replaced_waits_for_it(tmp_path, monkeypatch):
    index = write_index(tmp_path, {"a.safetensors": {"t": np.full(3, 2.0, np.float32)}})
    whole = index.read_text()
    for seconds in (60, 0):
        with being_changed(tmp_path / "a.safetensors") as go_on:
            index.write_text('{"weight_map": {"new": "a.safetensors"}}')

            def finish(_, go_on=go_on):
                index.write_text(whole)
                go_on()

            monkeypatch.setattr(time, "sleep", finish)
            if seconds:
                assert zero(tmp_path, lock_timeout=seconds).output.files_written == 1
            else:
                with pytest.raises(SystemRefusedError, match="in use by PID"):
                    zero(tmp_path)


def test_a_set_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    path, real, seen = one_file(tmp_path), Inputs.open, []

    def change(inputs):
        seen.append(len(seen))
        if len(seen) < 4:
            raise changed_meanwhile(path)
        return real(inputs)

    monkeypatch.setattr(Inputs, "open", change)
    assert zero(path).output.files_written == 1
    assert seen == [0, 1, 2, 3]


def test_links_that_form_a_loop_or_lead_nowhere_are_no_place_of_runs(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(BadInputError, match="symbolic links form a loop"):
        registered([tmp_path / "a"])
    for path in (tmp_path / "a", tmp_path / "gone" / "x"):
        with pytest.raises(BadInputError):
            norm(path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_path_that_was_not_locked_is_not_written_to(held):
    path, run = held
    assert run.targets.locate(path) == (run.log_folder, path.name)
    with pytest.raises(SystemRefusedError, match="other.safetensors: was changed by another program"):
        run.targets.locate(one_file(path.parent, "other.safetensors"))


# How a file is written, and where.
WAYS = {
    "replace": ({}, "x.safetensors"),
    "inplace": ({"write": "inplace"}, "x.safetensors"),
    "output": ({"output": "new"}, "new"),
    "output_dir": ({"output_dir": "new"}, "new/x.safetensors"),
}


@pytest.mark.parametrize("way", WAYS)
def test_locks_are_held_while_the_files_are_read_and_nothing_is_written_yet(tmp_path, monkeypatch, way):
    monkeypatch.chdir(tmp_path)
    path, other = one_file(tmp_path), one_file(tmp_path / "other", value=1.0)
    options, target = WAYS[way][0], tmp_path / WAYS[way][1]
    seen = []

    def look(*_):
        if not seen:
            with pytest.raises(SystemRefusedError, match=f"in use by PID {os.getpid()}"):
                clip(other, max_norm=1, output=target)
            # Whoever changes nothing needs no lock.
            assert clip(other, max_norm=1, output=target, dry_run=True).clipped
            assert norm(path).norm > 1
            seen.append(target.exists())

    assert clip(path, max_norm=1, progress=look, **options).clipped
    assert seen == [target == path]
    assert norm(target).norm == pytest.approx(1)
    # And they are let go of.
    assert clip(other, max_norm=1, output=target).clipped
    assert not list(tmp_path.rglob(".gradtool-*"))


def test_a_dry_run_takes_no_lock(tmp_path, monkeypatch):
    path = one_file(tmp_path)

    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(Folder, "create", refuse)
    for options in ({}, {"write": "inplace"}, {"output": tmp_path / "new"}, {"output_dir": tmp_path / "new"}):
        assert clip(path, max_norm=1, dry_run=True, **options).clipped
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_behind_a_link_and_two_dots_is_made_where_the_system_would_make_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = one_file(tmp_path)
    Path("real/deep").mkdir(parents=True)
    Path("link").symlink_to("real/deep")
    for _ in range(2):
        clip(path, max_norm=1, output_dir="link/../new")
        assert [one.name for one in Path("real/new").iterdir()] == [path.name]
    assert not Path("new").exists()


def test_a_run_that_withdraws_makes_its_new_folder_again(tmp_path):
    new = tmp_path / "a" / "b"
    targets = Targets([new / "x.safetensors"], new)
    with Transaction(targets, fsync=False) as run:
        for _ in range(2):
            run.register()
            assert targets.locate(new / "x.safetensors") == (targets.made[-1], "x.safetensors")
            run.withdraw()
            assert list(tmp_path.iterdir()) == []
        run.register()
        (new / "x.safetensors").touch()
    assert [path.name for path in new.iterdir()] == ["x.safetensors"]


def test_two_dots_behind_a_folder_that_is_missing_lead_nowhere(tmp_path):
    path, before = one_file(tmp_path), snapshot(tmp_path)
    with pytest.raises(BadInputError, match=f"no such folder: there is no folder {tmp_path}/missing"):
        clip(path, max_norm=1, output_dir=tmp_path / "missing/../new")
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_the_one_that_is_named(tmp_path):
    path, before = one_file(tmp_path), snapshot(tmp_path)
    with pytest.raises(BadInputError) as caught:
        clip(path, max_norm=1, output_dir=tmp_path / ("n" * 300) / "deeper")
    (problem,) = caught.value.problems
    assert (problem.file, problem.message) == (str(tmp_path / ("n" * 300)), "the name is too long")
    assert snapshot(tmp_path) == before
