import itertools
import os
import resource
import struct
import zlib
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from leftovers import crash
from support import bytes_of_memory, file_at, file_in

from gradtool import SystemRefusedError
from gradtool.store import fs, system
from gradtool.store.fs import Folder
from gradtool.store.io import redolog
from gradtool.store.io.channel import Channel
from gradtool.store.io.redolog import RedoLog
from gradtool.store.system import SECTOR

LOG = ".gradtool-0123456789ab-0.redo"


def log_of(folder, *entries, name=LOG):
    """A redo log of entries: number of the target, first byte, old content, new content, and its parts, if not all."""
    (folder / name).touch()
    log = RedoLog(file_at(folder / name))
    add(log, *entries)
    return RedoLog(log.file, log.size)


def add(log, *entries):
    channel = Channel(2, bytes_of_memory)
    for number, begin, old, new, *parts in entries:
        whole = [(0, len(new))]
        log.add(channel, number, begin, memoryview(old), memoryview(new), parts=parts[0] if parts else whole)
    channel.close()


def targets_of(*paths):
    return {number: (file_at(path), path.stat().st_size) for number, path in enumerate(paths)}


def finish(log, targets, **options):
    """Finish a log as recovery does: after it was checked, if only for damage."""
    log.check({})
    log.finish(targets, **options)


def overwrite(path, begin, data):
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(data)


def random_bytes(seed, count):
    return np.random.default_rng(seed).bytes(count)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(random_bytes(3, 5_000))
    return path


# Within a sector, over its edges, from one edge to another, and nothing at all.
RANGES = [(0, 5_000), (1, 1), (37, 199), (510, 4), (511, 2_000), (512, 512), (512, 1_537), (4_999, 1), (100, 0)]


@pytest.mark.parametrize(("begin", "length"), RANGES)
def test_what_was_copied_up_to_any_sector_is_known_and_completed(tmp_path, path, begin, length):
    old, new = path.read_bytes(), random_bytes(4, length)
    log = log_of(tmp_path, (0, begin, old[begin : begin + length], new))
    wanted = old[:begin] + new + old[begin + length :]
    edges = [edge for edge in range(0, 5_001, SECTOR) if begin < edge < begin + length]
    for first in (begin, *edges, begin + length):
        for last in (begin, *edges, begin + length):
            path.write_bytes(old)
            # A disk writes sectors in any order.
            overwrite(path, begin, new[: first - begin])
            overwrite(path, last, new[last - begin :])
            log.check(targets_of(path))
            finish(log, targets_of(path))
            assert path.read_bytes() == wanted
            # Recovery may be interrupted, and repeated.
            log.check(targets_of(path))
            finish(log, targets_of(path))
            assert path.read_bytes() == wanted


@pytest.mark.parametrize("at", [0, 1, 511, 512, 2_047, 4_095, 4_096, 4_999])
@pytest.mark.parametrize("done", [0, 2_048, 5_000])
def test_a_single_foreign_byte_is_seen(tmp_path, path, at, done):
    new = random_bytes(4, 5_000)
    log = log_of(tmp_path, (0, 0, path.read_bytes(), new))
    overwrite(path, 0, new[:done])
    theirs = bytearray(path.read_bytes())
    theirs[at] ^= 1
    path.write_bytes(theirs)
    # Before the first is written, and again right before each.
    for way in (log.check, partial(finish, log)):
        with pytest.raises(SystemRefusedError, match="another program wrote to it") as caught:
            way(targets_of(path))
        assert caught.value.problems[0].file == str(path)
        assert path.read_bytes() == theirs
    finish(log, targets_of(path), force=True)
    assert path.read_bytes() == new


@pytest.mark.parametrize("done", ["old", "new"])
@pytest.mark.parametrize(("first", "second"), [(0, 8), (0, 504), (1_024, 1_032), (512, 4_088)])
def test_words_that_changed_places_are_foreign(tmp_path, path, done, first, second):
    old, new = path.read_bytes(), random_bytes(4, 5_000)
    log = log_of(tmp_path, (0, 0, old, new))
    words = bytearray(old if done == "old" else new)
    words[first : first + 8], words[second : second + 8] = words[second : second + 8], words[first : first + 8]
    path.write_bytes(words)
    with pytest.raises(SystemRefusedError, match="another program wrote to it"):
        log.check(targets_of(path))


def test_sectors_that_changed_places_are_foreign(tmp_path, path):
    old, new = path.read_bytes(), random_bytes(4, 5_000)
    log = log_of(tmp_path, (0, 0, old, new))
    path.write_bytes(new[512:1_024] + new[:512] + new[1_024:])
    with pytest.raises(SystemRefusedError, match="another program wrote to it"):
        log.check(targets_of(path))


def test_a_foreign_write_beside_the_ranges_of_an_entry_is_none_of_its_business(tmp_path, path):
    old, new = path.read_bytes(), random_bytes(4, 1_000)
    log = log_of(tmp_path, (0, 1_000, old[1_000:2_000], new))
    overwrite(path, 0, b"theirs")
    overwrite(path, 2_000, b"theirs")
    log.check(targets_of(path))
    finish(log, targets_of(path))
    assert path.read_bytes() == b"theirs" + old[6:1_000] + new + b"theirs" + old[2_006:]


PARTS = [(0, 3), (511, 513), (600, 600), (1_024, 2_500), (2_999, 3_000)]


@pytest.mark.parametrize("way", ["apply", "finish"])
def test_between_the_parts_of_an_entry_nothing_is_written(tmp_path, path, way):
    old, new = path.read_bytes(), random_bytes(4, 3_000)
    # As a run has it: what it read, with the parts changed.
    content = bytearray(old[100:3_100])
    for start, stop in PARTS:
        content[start:stop] = new[start:stop]
    log = log_of(tmp_path, (0, 100, old[100:3_100], bytes(content), PARTS))
    writes = written_to(log, path, way)
    assert writes == [(100 + start, stop - start) for start, stop in PARTS if start < stop]
    assert path.read_bytes() == old[:100] + content + old[3_100:]


def written_to(log, path, way):
    """Apply or finish a log: where it wrote, and how much."""
    real, writes = os.pwritev, []

    def record(fd, views, begin):
        count = real(fd, views, begin)
        writes.append((begin, count))
        return count

    with mock.patch.object(os, "pwritev", record):
        log.apply([file_at(path)]) if way == "apply" else finish(log, targets_of(path))
    return [each for each in writes if each[1]]


def test_a_foreign_write_between_the_parts_is_seen(tmp_path, path):
    old = path.read_bytes()
    log = log_of(tmp_path, (0, 0, old, b"new" + old[3:4_997] + b"new", [(0, 3), (4_997, 5_000)]))
    overwrite(path, 2_000, b"theirs")
    with pytest.raises(SystemRefusedError, match="another program wrote to it"):
        log.check(targets_of(path))


def test_a_target_that_has_all_of_it_already_is_synced_and_not_written(tmp_path, path, monkeypatch):
    new = random_bytes(4, 5_000)
    log = log_of(tmp_path, (0, 0, path.read_bytes(), new))
    path.write_bytes(new)
    path.chmod(0o444)
    synced = []
    monkeypatch.setattr(system, "sync", lambda fd: synced.append(os.fstat(fd).st_ino))
    assert written_to(log, path, "finish") == []
    assert synced == [path.stat().st_ino]


@pytest.mark.parametrize("size", [0, 4_999])
def test_a_target_that_is_shorter_than_an_entry_is_left_alone(tmp_path, path, size):
    old, new = path.read_bytes(), random_bytes(4, 100)
    log = log_of(tmp_path, (0, 4_900, old[4_900:], new), (0, 0, old[:100], new))
    os.truncate(path, size)
    targets = {0: (file_at(path), size)}
    log.check(targets)
    finish(log, targets)
    assert path.read_bytes() == (new + old[100:])[:size] * bool(size)


def test_a_target_that_became_shorter_since_it_was_looked_at_is_foreign(tmp_path, path):
    log = log_of(tmp_path, (0, 0, path.read_bytes(), random_bytes(4, 5_000)))
    targets = targets_of(path)
    os.truncate(path, 100)
    with pytest.raises(SystemRefusedError, match="another program wrote to it"):
        log.check(targets)


@pytest.mark.parametrize("way", ["check", "finish"])
def test_entries_of_targets_that_are_gone_are_passed_over(tmp_path, path, way):
    old, new = path.read_bytes(), random_bytes(4, 5_000)
    log = log_of(tmp_path, (7, 0, old, new), (0, 0, old, new), (1 << 31, 1 << 63, old, new))
    log.check(targets_of(path)) if way == "check" else finish(log, targets_of(path))
    assert path.read_bytes() == (old if way == "check" else new)


def test_no_entry_is_no_work(tmp_path, path):
    before, log = path.read_bytes(), log_of(tmp_path)
    log.apply([file_at(path)])
    log.check(targets_of(path))
    finish(log, targets_of(path))
    assert (log.size, path.read_bytes()) == (0, before)


def refused(log, path):
    """Check that a damaged log is told from a whole one, before the first byte is written."""
    before, targets = path.read_bytes(), targets_of(path)
    # With `force`, recovery compares nothing.
    for way in (lambda: log.check(targets), lambda: log.check({}), lambda: finish(log, targets)):
        assert path.read_bytes() == before
        with pytest.raises(SystemRefusedError, match="is damaged, so the changes that it contains are lost") as caught:
            way()
        problem = caught.value.problems[0]
        assert (problem.code, problem.file) == ("unfinished", str(log.file.path))
        assert problem.hint == "delete .gradtool-0123456789ab* beside the data to keep it as it is"
    path.write_bytes(before)


def test_a_damaged_bit_anywhere_is_seen(tmp_path):
    path = tmp_path / "x"
    # Two pages, and more.
    path.write_bytes(random_bytes(3, 9_000))
    log = log_of(tmp_path, (0, 0, path.read_bytes(), random_bytes(4, 9_000), [(5, 100), (4_000, 9_000)]))
    content = bytearray((tmp_path / LOG).read_bytes())
    # Every byte of the header, the parts and a few sums; then some of the rest.
    for at in (*range(80), *range(80, len(content), 97), len(content) - 1):
        for bit in (1, 128):
            content[at] ^= bit
            (tmp_path / LOG).write_bytes(content)
            refused(log, path)
            content[at] ^= bit
    (tmp_path / LOG).write_bytes(content)
    finish(log, targets_of(path))


def test_a_log_that_is_cut_off_anywhere_is_damaged(tmp_path, path):
    old = path.read_bytes()
    log = log_of(tmp_path, (0, 0, old[:600], random_bytes(4, 600), [(0, 9), (10, 600)]), (0, 600, old[600:], old[600:]))
    content = (tmp_path / LOG).read_bytes()
    for size in (*range(700), len(content) - 1):
        (tmp_path / LOG).write_bytes(content[:size])
        refused(log, path)


def test_zeros_in_the_place_of_a_sector_are_damage(tmp_path, path):
    """A power cut leaves these where the log was not synced."""
    log = log_of(tmp_path, (0, 0, path.read_bytes(), random_bytes(4, 5_000)))
    content = (tmp_path / LOG).read_bytes()
    for begin in range(0, len(content), SECTOR):
        torn = content[:begin] + bytes(SECTOR) + content[begin + SECTOR :]
        (tmp_path / LOG).write_bytes(torn[: len(content)])
        refused(log, path)


@pytest.mark.parametrize("field", ["length", "count"])
@pytest.mark.parametrize("huge", [1 << 24, 1 << 28, (1 << 32) - 1, 1 << 62, (1 << 64) - 1])
def test_a_huge_entry_is_damaged_and_asks_for_no_huge_memory(tmp_path, path, field, huge):
    log = log_of(tmp_path, (0, 0, path.read_bytes(), random_bytes(4, 5_000)))
    content = (tmp_path / LOG).read_bytes()
    number, begin, length, count = struct.unpack_from("<IQQI", content, 4)
    if field == "length":
        length = huge
    else:
        count = huge & 0xFFFFFFFF
    (tmp_path / LOG).write_bytes(content[:4] + struct.pack("<IQQI", number, begin, length, count) + content[28:])
    asked, pread = [], os.pread
    with mock.patch.object(os, "pread", lambda fd, size, at: asked.append(size) or pread(fd, size, at)):
        refused(log, path)
    # No more than the largest block of a run.
    assert max(asked) < 300_000_000


@pytest.mark.parametrize("claimed", [1, 10**30])
def test_bytes_that_the_transaction_log_claims_and_the_redo_log_has_not_are_damage(tmp_path, path, claimed):
    log = log_of(tmp_path, (0, 0, path.read_bytes(), random_bytes(4, 5_000)))
    refused(RedoLog(log.file, log.size + claimed), path)


def test_what_follows_the_bytes_that_count_is_not_read(tmp_path, path):
    old, new = path.read_bytes(), random_bytes(4, 5_000)
    log = log_of(tmp_path, (0, 0, old, new))
    add(RedoLog(log.file, log.size), (0, 0, new, b"x" * 5_000))
    with (tmp_path / LOG).open("ab") as file:
        file.write(b"x" * 100)
    finish(log, targets_of(path))
    assert path.read_bytes() == new


def test_the_redo_log_of_another_run_is_damaged(tmp_path, path):
    """Even one that is right in all else: a link to one of the same user."""
    other = log_of(tmp_path, (0, 0, path.read_bytes(), bytes(5_000)), name=".gradtool-ba9876543210-0.redo")
    (tmp_path / LOG).hardlink_to(other.file.path)
    refused(RedoLog(file_at(tmp_path / LOG), other.size), path)


def many_blocks(folder, count=40, size=1 << 20):
    """Targets of so many blocks, which are not in order in the log, as threads add them; and what they will hold."""
    paths, new = [folder / name for name in "abc"], []
    for seed, path in enumerate(paths):
        path.write_bytes(random_bytes(seed, count * size // 4 + seed))
        new.append(random_bytes(10 + seed, path.stat().st_size))
    entries = [
        (number, begin, path.read_bytes()[begin : begin + size // 4], new[number][begin : begin + size // 4])
        for number, path in enumerate(paths)
        for begin in range(0, path.stat().st_size, size // 4)
    ]
    order = np.random.default_rng(5).permutation(len(entries))
    return paths, new, [entries[at] for at in order]


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_any_number_of_threads_copies_everything(tmp_path, monkeypatch, cores):
    monkeypatch.setattr(system, "cores", lambda: cores)
    paths, new, entries = many_blocks(tmp_path)
    log = log_of(tmp_path, *entries)
    started, start = [], redolog.threading.Thread.start
    with mock.patch.object(redolog.threading.Thread, "start", lambda self: started.append(self) or start(self)):
        log.apply([file_at(path) for path in paths])
    assert [path.read_bytes() for path in paths] == new
    assert len(started) == min(cores, 8, log.size // (4 << 20)) > 0
    assert not any(thread.is_alive() for thread in started)


def test_where_no_thread_can_be_started_this_one_copies(tmp_path, monkeypatch):
    paths, new, entries = many_blocks(tmp_path)
    log = log_of(tmp_path, *entries)
    calls = []

    def refuse(thread):
        calls.append(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(redolog.threading.Thread, "start", refuse)
    log.apply([file_at(path) for path in paths])
    assert calls
    assert [path.read_bytes() for path in paths] == new


@pytest.mark.parametrize("left", [5, 6, 9, 30])
def test_threads_open_no_more_files_than_there_may_be(tmp_path, monkeypatch, left):
    """Once the log is applied, a limit that is too low would leave the targets half changed."""
    monkeypatch.setattr(redolog, "_SMALL_BYTES", 1_000)
    monkeypatch.setattr(system, "cores", lambda: 8)
    folder = tmp_path / "set"
    folder.mkdir()
    paths = [folder / f"{number:02}" for number in range(40)]
    for path in paths:
        path.write_bytes(bytes(2_000))
    new = [random_bytes(number, 2_000) for number in range(40)]
    log = log_of(tmp_path, *[(number, at, bytes(500), new[number][at : at + 500])
                             for at in range(0, 2_000, 500) for number in range(40)])  # fmt: skip

    def apply():
        home = Folder.at(folder)
        files = [file_in(home, path.name) for path in paths]
        taken = {int(path.name) for path in Path("/dev/fd").iterdir()}
        for fd in {*range(max(taken))} - taken:  # So that the limit is how many more there may be.
            os.dup2(0, fd)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1 + left, hard))
        log.apply(files)

    crash(apply)
    assert [path.read_bytes() for path in paths] == new


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()])
def test_an_error_stops_all_threads_and_what_was_not_copied_can_be(tmp_path, monkeypatch, error):
    monkeypatch.setattr(system, "cores", lambda: 4)
    paths, new, entries = many_blocks(tmp_path)
    log = log_of(tmp_path, *entries)
    real, inode, calls = fs.write_all, paths[1].stat().st_ino, []

    def refuse(fd, parts, begin):
        if os.fstat(fd).st_ino == inode:
            calls.append(begin)
            if len(calls) > 3:
                raise error
        return real(fd, parts, begin)

    files, before = [file_at(path) for path in paths], redolog.threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(fs, "write_all", refuse)
        with pytest.raises(SystemRefusedError if isinstance(error, OSError) else MemoryError) as caught:
            log.apply(files)
        assert not isinstance(error, OSError) or str(caught.value) == f"{paths[1]}: Input/output error"
    assert redolog.threading.active_count() == before
    assert [path.read_bytes() for path in paths] != new
    log.check(targets_of(*paths))
    finish(log, targets_of(*paths))
    assert [path.read_bytes() for path in paths] == new


def test_targets_of_the_run_are_opened_by_their_inodes(tmp_path, path):
    old = path.read_bytes()
    log = log_of(tmp_path, (0, 0, old, bytes(5_000)))
    files, targets = [file_at(path)], targets_of(path)
    path.rename(tmp_path / "away")
    path.symlink_to("away")
    for way, where in ((log.apply, files), (log.check, targets), (partial(finish, log), targets)):
        with pytest.raises(SystemRefusedError, match="was changed by another program"):
            way(where)
    assert path.read_bytes() == old


@pytest.mark.parametrize("way", ["apply", "check", "finish"])
def test_a_redo_log_that_cannot_be_read_is_named(tmp_path, path, monkeypatch, way):
    log = log_of(tmp_path, (0, 0, path.read_bytes(), bytes(5_000)))
    log.check({})
    targets = [file_at(path)] if way == "apply" else targets_of(path)
    real = os.pread

    def refuse(fd, size, at):
        if os.fstat(fd).st_ino == log.file.inode:
            raise OSError(5, "Input/output error")
        return real(fd, size, at)

    monkeypatch.setattr(os, "pread", refuse)
    with pytest.raises(SystemRefusedError, match=f"{LOG}: Input/output error"):
        getattr(log, way)(targets)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 4_096, 10_000])
@pytest.mark.parametrize("begin", [0, 1, 500, 512, 1_000])
def test_there_is_a_sum_for_each_sector_of_the_file(begin, length):
    content = random_bytes(1, length)
    sums = redolog.sector_sums(memoryview(content), begin)
    edges = sorted({begin, begin + length, *range(-(-begin // SECTOR) * SECTOR, begin + length, SECTOR)})
    pieces = [content[start - begin : stop - begin] for start, stop in itertools.pairwise(edges)]
    assert len(sums) == len(pieces)
    for total, piece in zip(sums.tolist(), pieces, strict=True):
        words = np.frombuffer(piece, "<u8") if len(piece) == SECTOR else None
        factors = [(2 * k + 1) * 0x9E3779B97F4A7C15 for k in range(64)]
        by_hand = (
            zlib.crc32(piece)
            if words is None
            else sum(factor * word for factor, word in zip(factors, words.tolist(), strict=True)) % (1 << 64)
        )
        assert total == by_hand
