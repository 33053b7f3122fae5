"""What can never be, made to be: a bug is an error before it does harm, and what is begun is left to recovery."""

import subprocess
import sys

import pytest
from leftovers import content_of, files_in, half_changed, redo_log_of
from support import in_place, registered, snapshot, targets_of

from gradtool import SystemRefusedError, clip, recover, zero
from gradtool.engines.threads import Threads
from gradtool.errors import BugError
from gradtool.store.io.destination import DISCARD
from gradtool.store.io.redolog import RedoLog
from gradtool.store.transaction.commit import Commit
from gradtool.store.transaction.open import acquire


@pytest.fixture
def paths(tmp_path):
    return files_in(tmp_path)


def stage(commit, path):
    commit.stage(path, 5, path.stat()).path.write_bytes(b"newer")


def refused(paths, prepare, wrong, error=BugError):
    """Check that a run which is prepared like that stops before anything is changed, and leaves nothing."""
    folder = paths[0].parent
    before = snapshot(folder)
    with pytest.raises(error, match=wrong) as caught, registered(paths) as run, Commit(run) as commit:
        prepare(run, commit)
        commit.put_in_place()
    assert caught.value.__notes__ == ["no file was changed"]
    assert snapshot(folder) == before


def test_a_file_is_staged_once(paths):
    def stage_twice(_, commit):
        stage(commit, paths[0])
        stage(commit, paths[0])

    refused(paths, stage_twice, "a file would be written twice")


def test_a_file_is_not_both_replaced_and_changed_in_place(paths):
    def stage_and_overwrite(run, commit):
        stage(commit, paths[0])
        commit.overwrite(targets_of(run, paths[:1]))

    refused(paths, stage_and_overwrite, "a file would be written twice")


def test_what_is_given_up_may_be_staged_again(paths):
    with registered(paths) as run, Commit(run) as commit:
        given_up = commit.stage(paths[0], 5, paths[0].stat())
        commit.give_up(given_up)
        assert (len(commit.staged), given_up.is_there) == (0, False)
        stage(commit, paths[0])
        commit.put_in_place()
    assert paths[0].read_bytes() == b"newer"
    assert sorted(paths[0].parent.iterdir()) == paths


@pytest.mark.parametrize("way", ["replace", "inplace"])
def test_only_files_that_the_log_lists_are_written(paths, way):
    def forget(run, commit):
        if way == "replace":
            stage(commit, paths[0])
        else:
            commit.overwrite(targets_of(run, paths[:1]))
        run.targets.names[run.log_folder].remove(paths[0].name)

    refused(paths, forget, "the log lacks a file")


def test_nothing_is_changed_before_all_is_ready(paths, monkeypatch):
    monkeypatch.setattr(Commit, "_log_ready", lambda *_, **__: None)
    refused(paths, lambda _, commit: stage(commit, paths[0]), "files would be changed before the log says")


def test_the_steps_of_a_log_come_once_and_in_their_order(paths):
    ready = {"ready": [[], [], None]}
    with registered(paths) as run:
        steps = [{"holds_locks": True}, ready, {"ended": "finished"}, {"taken": {}}]
        for last, step in zip(("holds_locks", "ready", "ended"), (ready, {"ended": "finished"}, None), strict=True):
            assert run.step == last
            for other in steps:
                if other != step:
                    with pytest.raises(BugError, match=f"'{next(iter(other))}' would be logged after '{last}'"):
                        run.append(**other)
            if step is not None:
                run.append(**step)
        assert (run.log_folder.path / f"{run.id}.run").read_bytes().count(b"\n") == 4


def test_a_run_that_withdraws_begins_again(paths):
    with registered(paths) as run:
        run.withdraw()
        acquire(run)
        with Commit(run) as commit:
            stage(commit, paths[0])
            commit.put_in_place()
    assert paths[0].read_bytes() == b"newer"


@pytest.mark.parametrize("by", ["unlink", "replace"])
def test_a_run_whose_lock_is_gone_may_pass_for_dead_and_ends(paths, by):
    # Another program did it, which is no bug.
    def lose(run, commit):
        stage(commit, paths[0])
        lock = run.log_folder.path / f"{run.id}.lock"
        lock.unlink()
        if by == "replace":
            lock.touch()

    refused(paths, lose, r"\.lock: was changed by another program", SystemRefusedError)


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        # Number, begin and end; the end of the file is at 0.
        ([(0, -70, 0), (0, -70, -60)], "file 0"),
        ([(0, -5, 1)], "file 0"),
        ([(0, -9, 0), (1, 0, 1)], "file 1"),
        ([(2, -9, 0)], "file 2"),
    ],
)
def test_no_more_than_the_bytes_of_a_file_are_copied_into_it(paths, entries, wrong):
    size = paths[0].stat().st_size
    entries = [(0, -size, -70), *entries]

    def overwrite(run, commit):
        log = commit.overwrite(targets_of(run, paths))
        for number, begin, end in entries:
            content = memoryview(bytes(end - begin))
            log.add(Nowhere(), number, size + begin, content, content, parts=[(0, end - begin)])

    refused(paths, overwrite, f"the redo log has too much for {wrong}")


class Nowhere:
    """A channel that writes nothing."""

    def write(self, *_):
        pass


def test_a_redo_log_is_not_copied_before_every_sector_is_known(paths, monkeypatch):
    new = half_changed(paths)
    before = snapshot(paths[0].parent)
    with monkeypatch.context() as patch:
        patch.setattr(RedoLog, "check", lambda *_: None)
        for force in (False, True):
            with pytest.raises(BugError, match="would be copied that was not checked"):
                recover(paths[0].parent, force=force)
    assert content_of(paths) == [before[path][0] for path in paths]
    assert recover(paths[0].parent).finished == 1
    assert content_of(paths) == new


def test_every_new_file_is_written(paths, monkeypatch):
    before = snapshot(paths[0].parent)
    monkeypatch.setattr(Threads, "destination", lambda *_: DISCARD)
    with pytest.raises(BugError, match="a new file was not written"):
        clip(paths, max_norm=1)
    assert snapshot(paths[0].parent) == before


def test_nothing_is_written_without_a_lock(paths, monkeypatch):
    before = snapshot(paths[0].parent)
    monkeypatch.setattr("gradtool.store.transaction.output.Output.transaction", None)
    monkeypatch.setattr("gradtool.store.transaction.open.Output._replace", lambda output, **_: output)
    with pytest.raises(BugError, match="nothing is locked"):
        zero(paths)
    assert snapshot(paths[0].parent) == before


def test_a_bug_that_shows_when_files_are_changed_is_left_to_recovery(paths, monkeypatch):
    new = [b"newer" + path.read_bytes()[5:] for path in paths]

    def break_off(*_):
        paths[0].write_bytes(new[0])
        raise BugError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(RedoLog, "apply", break_off)
        with pytest.raises(BugError) as caught, registered(paths) as run:
            commit, log = in_place(run, paths)
            redo_log_of(log, paths, new)
            with commit:
                commit.put_in_place()
    assert "makes the files all old or all new" in caught.value.__notes__[0]
    assert recover(paths[0].parent).finished == 1
    assert content_of(paths) == new


@pytest.mark.parametrize(
    ("place", "note"),
    [
        ("Commit._log_ready", "no file was changed"),
        ("RedoLog.apply", "gradtool recover, or the next run, makes the files all old or all new"),
    ],
)
def test_the_command_says_that_it_is_a_bug_and_what_became_of_the_files(paths, place, note):
    code = f"""
import sys
from gradtool.errors import ensure
from gradtool.store.transaction.commit import Commit, InPlace
from gradtool.store.io.redolog import RedoLog
{place} = lambda *_, **__: ensure(False, "broken")
from gradtool.cli import main
main()
"""
    command = [sys.executable, "-P", "-c", code, "clip", *map(str, paths), "--max-norm", "1", "--write", "inplace"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert done.stderr.splitlines() == [
        f"gradtool: error: bug in gradtool: BugError: broken; {note}",
        "  hint: set GRADTOOL_DEBUG=1 for a traceback",
    ]
    assert recover(paths[0].parent).finished == (place == "RedoLog.apply")
