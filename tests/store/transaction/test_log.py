import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from support import registered, snapshot, write

from gradtool import BadInputError, SystemRefusedError, clip, norm, recover
from gradtool.store.fs import Folder
from gradtool.store.transaction import log as log_module
from gradtool.store.transaction import runs
from gradtool.store.transaction.log import FORMAT, Change, Move, Redo, encode_step, files_by_run, marker_name, read_log

ID = ".gradtool-0123456789ab"
RUN = {"id": ID, "format": FORMAT, "pid": 1, "host": "h", "boot": "b", "files": ["x"], "folders": []}


def line(text):
    """A step with a checksum that is right, whatever it says."""
    return b"%08x %s\n" % (zlib.crc32(text), text)


def read_back(folder, content):
    (folder / f"{ID}.run").write_bytes(content)
    with Folder.at(folder) as opened:
        return read_log(opened, f"{ID}.run")


# Dates before 1970 are negative.
MOVES = [Move(0, 3, "x", 7, 20, -1, -2, 9), Move(0, 4, "new", 8, None, None, None, None)]
CHANGES, REDO = [Change(0, "x", 20, 7)], Redo(5, 9, 4_000)


def test_a_log_that_is_torn_at_any_byte_is_what_was_whole_of_it(tmp_path):
    ready = {"ready": [MOVES, CHANGES, REDO]}
    lines = [encode_step(run=RUN), encode_step(holds_locks=True), encode_step(**ready), encode_step(ended="finished")]
    content = b"".join(lines)
    ends = [sum(map(len, lines[:count])) for count in range(len(lines) + 1)]
    for size in range(len(content) + 1):
        log = read_back(tmp_path, content[:size])
        whole = sum(end <= size for end in ends) - 1
        if not whole:
            assert log is None
            continue
        facts = (MOVES, CHANGES, REDO) if whole > 2 else ((), (), None)
        assert (log.holds_locks, log.ended) == (whole > 1, "finished" if whole > 3 else None)
        assert (log.moves, log.changes, log.redo) == facts
        # Before the line that says it is ready, recovery leaves everything as it is.
        assert log.is_unfinished == (whole == 3)
        assert log.size == ends[whole]


@pytest.mark.parametrize(
    ("ready", "is_atomic"),
    [
        ([MOVES[:1], [], None], True),
        ([MOVES[1:], [], None], True),
        ([MOVES, [], None], False),
        ([[], CHANGES, REDO], False),
        ([MOVES[:1], CHANGES, REDO], False),
    ],
)
def test_only_a_single_rename_is_done_or_not(tmp_path, ready, is_atomic):
    log = read_back(tmp_path, encode_step(run=RUN) + encode_step(ready=ready))
    # What is not, may be half done.
    assert (log.is_atomic, log.is_unfinished) == (is_atomic, not is_atomic)
    for outcome in ("finished", "untouched"):
        ended = read_back(tmp_path, encode_step(run=RUN) + encode_step(ready=ready) + encode_step(ended=outcome))
        assert (ended.is_unfinished, ended.ended) == (False, outcome)


def test_what_recoveries_add_is_known_and_does_not_count(tmp_path):
    lines = [encode_step(run=RUN), encode_step(ready=[MOVES, [], None])]
    taken = [encode_step(taken={"pid": pid, "host": f"host {pid}"}) for pid in (5, 6)]
    log = read_back(tmp_path, b"".join(lines + taken) + taken[0][:-3])
    assert (log.pid, log.host, log.size, log.is_unfinished) == (6, "host 6", len(b"".join(lines)), True)
    whole = read_back(tmp_path, b"".join(lines + taken) + (end := encode_step(ended="finished")))
    assert (whole.pid, whole.ended, whole.size) == (6, "finished", len(b"".join(lines + taken) + end))


def test_names_of_files_come_back_whatever_bytes_they_are_of(tmp_path):
    names = ["é", "\udcff", "a b", '"[,{', "😀" * 60]
    assert read_back(tmp_path, encode_step(run=RUN | {"files": names})).names == set(names)


@pytest.mark.parametrize("kind", ["tmp", "redo"])
def test_the_files_of_a_run_are_told_by_their_names(tmp_path, kind):
    files = [f"{ID}-7.{kind}", f"{ID}.lock", f"{ID}.run"]
    for name in (*files, f"{ID}-7.{kind}.bak", f"x{ID}.run", marker_name("x")):
        (tmp_path / name).touch()
    with Folder.at(tmp_path) as folder:
        assert files_by_run(folder) == {ID: files}


DEEP = b"[" * 90_000 + b"]" * 90_000
READY = {"ready": [MOVES, CHANGES, REDO]}
NOT_UNDERSTOOD = {
    "an older format": encode_step(run=RUN | {"format": FORMAT - 1, "key": "00"}),
    "a newer format": encode_step(run=RUN | {"format": FORMAT + 1}),
    "a format that is missing": encode_step(run={"id": ID}),
    "a process that cannot be": encode_step(run=RUN | {"pid": 0}),
    "a process that is no number": encode_step(run=RUN | {"pid": True}),
    "a boot that is no text": encode_step(run=RUN | {"boot": 7}),
    "an unknown step": encode_step(run=RUN) + encode_step(later="version"),
    "a step of an older format": encode_step(run=RUN) + encode_step(moves=[]),
    "an unknown end": encode_step(run=RUN) + encode_step(**READY) + encode_step(ended="undone"),
    "too many steps": encode_step(run=RUN) + encode_step(taken={"pid": 1, "host": "h"}) * 1000,
    "deep": line(b'{"run":{"id":"%b","x":%b}}' % (ID.encode(), DEEP)),
    "wide": line(b'{"run":{"id":"%b","x":[' % ID.encode() + b"[]," * 200_000 + b"[]]}}"),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_a_log_that_is_not_understood_is_neither_ignored_nor_deleted(tmp_path, name):
    write(tmp_path / "x.safetensors", {"t": np.ones(3, np.float32)})
    (tmp_path / f"{ID}.run").write_bytes(NOT_UNDERSTOOD[name])
    (tmp_path / f"{ID}-0.redo").write_bytes(b"precious")
    before = snapshot(tmp_path)
    for command in (norm, recover, lambda path: clip(path, max_norm=1)):
        with pytest.raises(SystemRefusedError, match="cannot read; recover with the version that wrote it") as caught:
            command(tmp_path)
        assert caught.value.problems[0].code == "unfinished"
    assert snapshot(tmp_path) == before


def test_logs_that_are_too_many_to_be_read_are_refused(tmp_path, monkeypatch):
    write(tmp_path / "x.safetensors", {"t": np.ones(3, np.float32)})
    for number in range(3):
        name = f".gradtool-{number:012x}"
        (tmp_path / f"{name}.run").write_bytes(encode_step(run=RUN | {"id": name}))
    assert norm(tmp_path).norm > 0
    monkeypatch.setattr(runs, "MAX_BYTES_IN_FOLDER", 300)
    with pytest.raises(SystemRefusedError, match="exceed the limit of 300 bytes") as caught:
        norm(tmp_path)
    assert caught.value.problems[0].file == str(tmp_path)


def test_a_log_that_cannot_be_read_stops_everybody(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"t": np.ones(3, np.float32)})
    (tmp_path / f"{ID}.run").write_bytes(encode_step(run=RUN))
    before, real = snapshot(tmp_path), Folder.open

    def refuse(folder, name, flags):
        if name == f"{ID}.run":
            raise OSError(5, "Input/output error")
        return real(folder, name, flags)

    monkeypatch.setattr(Folder, "open", refuse)
    for command in (norm, recover, lambda path: clip(path, max_norm=1)):
        with pytest.raises(SystemRefusedError, match=f"{ID}.run: Input/output error"):
            command(path)
    assert snapshot(tmp_path) == before


def test_a_folder_that_cannot_be_read_is_no_folder_without_runs(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"t": np.ones(3, np.float32)})

    def refuse(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "listdir", refuse)
    for command in (norm, recover, lambda path: clip(path, max_norm=1)):
        with pytest.raises(SystemRefusedError, match=f"{tmp_path}: Input/output error"):
            command(path)


def test_what_cannot_be_looked_at_is_told_once_and_what_is_not_there_not_at_all(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / name).mkdir()
    (tmp_path / "a" / f"{ID}.run").write_bytes(NOT_UNDERSTOOD["an unknown step"])
    (tmp_path / "c" / f"{ID}-0.tmp").write_bytes(b"left")
    real = Folder.at

    def refuse(path):
        if path.name == "b":
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(Folder, "at", refuse)
    places = [str(tmp_path / name) for name in ("a", "a/x", "b", "b/x", "c", "gone/x", "c/x/y")]
    leftovers, errors = runs.leftovers_at(places)
    assert [(one.kind, one.path, one.nbytes) for one in leftovers] == [("orphan", tmp_path / "c" / f"{ID}-0.tmp", 4)]
    assert [one.problems[0].file for one in errors] == [str(tmp_path / "a" / f"{ID}.run"), str(tmp_path / "b")]


def test_a_second_name_of_a_log_is_no_other_run(tmp_path):
    content = encode_step(run=RUN)
    read_back(tmp_path, content)
    with Folder.at(tmp_path) as folder:
        (tmp_path / ".gradtool-ffffffffffff.run").hardlink_to(tmp_path / f"{ID}.run")
        assert read_log(folder, ".gradtool-ffffffffffff.run") is None
        assert read_log(folder, f"{ID}.run").run == ID


@pytest.mark.parametrize("what", ["files", "bytes"])
def test_what_could_not_be_read_back_is_refused_before_the_run_begins(tmp_path, monkeypatch, what):
    paths = [write(tmp_path / f"{i}.safetensors", {f"t{i}": np.ones(3, np.float32)}) for i in range(120)]
    if what == "files":
        monkeypatch.setattr(log_module, "MAX_FILES", 10)
        monkeypatch.setattr(log_module, "PER_STEP", 10)
    else:
        monkeypatch.setattr(log_module, "MAX_BYTES", 4_000)
    before = snapshot(tmp_path)
    for mode in ("replace", "inplace"):
        with pytest.raises(BadInputError, match="the names of the files to write exceed the limit") as caught:
            clip(tmp_path, max_norm=1, write=mode)
        assert caught.value.problems[0].code == "limit"
        assert Path(caught.value.problems[0].file) in paths
    assert snapshot(tmp_path) == before
    run = registered(paths[:5])
    run.close()
    assert snapshot(tmp_path) == before
