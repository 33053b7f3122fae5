import errno
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from support import NUMPY_TYPES, file_at, write

from gradtool import SystemRefusedError, tuning
from gradtool.backends.cpu import NumpyBackend
from gradtool.engines import threads as stream
from gradtool.errors import DeviceMemoryError
from gradtool.store.format.header import read_shard
from gradtool.store.io.blocks import Block, halved, plan

UNIT = 65_536


class Tasks:
    """A pass that does something with each of its tasks; each counts as many bytes as are given."""

    title = "testing"

    def __init__(self, tasks, do, nbytes):
        self._tasks, self._do, self._nbytes = tasks, do, nbytes

    def tally(self):
        return None

    def nbytes(self, _destination):
        return self._nbytes

    def tasks(self, _backend, _destination):
        return iter(self._tasks)

    def work(self, task, worker, tally):
        assert tally is None
        self._do(task, worker)

    def halves(self, task):
        return halved(task, UNIT) if isinstance(task, Block) else ()


def rewriting(blocks, work, destinations):
    """A pass that reads a block, works on it, and writes it to its file's destination, if there is one."""

    def do(block, worker):
        with worker.memory(block.end - block.begin) as view:
            worker.read(block.shard, block.begin, view)
            work(block, view)
            if block.shard in destinations:
                worker.write(destinations[block.shard], block.begin, [view], len(view))

    return Tasks(blocks, do, 1 << 30)


def run(work, threads, progress=None, *, are_small=False):
    engine = stream.Threads(NumpyBackend(), threads, progress)
    engine.prepare(None, [None] * (1 << 20 if are_small else 0))
    engine.run(work)
    return engine.clock


def shard_of(folder, tensors, padding=0):
    arrays = {f"t{i}": np.zeros(n, NUMPY_TYPES[dtype]) for i, (dtype, n) in enumerate(tensors)}
    return read_shard(write(folder / "x.safetensors", arrays, padding=padding))


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_every_block_is_worked_on_once_and_arrives_at_the_destination(tmp_path, threads):
    rng = np.random.default_rng(1)
    path = write(tmp_path / "x.safetensors", {f"t{i}": rng.integers(0, 256, 700_000, np.uint8) for i in range(9)})
    shard = read_shard(path)
    target = tmp_path / "copy"
    target.touch()
    lock, seen = threading.Lock(), []

    def work(block, view):
        with lock:
            seen.append(block.begin)
        view[0] ^= 255

    blocks = list(plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES, whole=True))
    run(rewriting(blocks, work, {shard: file_at(target)}), threads=threads)
    assert sorted(seen) == [block.begin for block in blocks]
    expected = bytearray(path.read_bytes())
    for block in blocks:
        expected[block.begin] ^= 255
    assert target.read_bytes() == bytes(expected)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_error_of_a_worker_is_raised_and_stops_the_others(tmp_path, threads):
    shard = shard_of(tmp_path, [("F64", 2_000_000)])
    blocks = iter(list(plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES)))
    failed = threading.Event()

    def work(_block, _view):
        if failed.is_set():
            failed.wait()
            return
        failed.set()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(rewriting(blocks, work, {}), threads=threads)
    if threads == 1:
        assert len(list(blocks)) == 7


def test_short_reads_and_writes_are_carried_on(tmp_path, monkeypatch):
    path = write(tmp_path / "x", {"a": np.random.default_rng(1).integers(0, 256, 3_000_000, np.uint8)})
    shard, target = read_shard(path), tmp_path / "copy"
    target.touch()
    read_some, write_some = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read_some(fd, [views[0][:700_001]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write_some(fd, [views[0][:300_007]], at))
    blocks = plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES, whole=True)
    run(rewriting(blocks, lambda *_: None, {shard: file_at(target)}), threads=1)
    assert target.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_reads_and_writes_that_fail_name_the_file(tmp_path, monkeypatch, call):
    shard, target = shard_of(tmp_path, [("F64", 900_000)]), tmp_path / "copy"
    target.touch()

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    blocks = plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES, whole=True)
    with pytest.raises(SystemRefusedError, match="No space left") as caught:
        run(rewriting(blocks, lambda *_: None, {shard: file_at(target)}), threads=2)
    assert caught.value.problems[0].file == str(Path(shard.name) if call == "preadv" else target)


def test_where_no_thread_can_be_had_the_work_is_done_without(tmp_path, monkeypatch):
    shard, seen = shard_of(tmp_path, [("F64", 900_000)]), []

    def refuse(_self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    run(
        rewriting(
            plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES), lambda block, _: seen.append(block), {}
        ),
        threads=8,
    )
    assert len(seen) == 4


def test_a_file_that_changes_during_a_pass_is_refused(tmp_path):
    shard = shard_of(tmp_path, [("F64", 900_000)])
    with pytest.raises(SystemRefusedError, match="changed by another program"):
        blocks = plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES)
        run(rewriting(blocks, lambda *_: os.utime(Path(shard.name), ns=(0, 0)), {}), threads=1)


def test_progress_counts_every_byte(tmp_path):
    shard = shard_of(tmp_path, [("F64", 900_000), ("F32", 3)])
    counts = []
    blocks = plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES)
    run(rewriting(blocks, lambda *_: None, {}), threads=2, progress=lambda *count: counts.append(count))
    assert counts[-1] == ("testing", 900_000 * 8 + 12, 1 << 30)


def test_a_file_that_was_replaced_or_cut_since_it_was_opened_is_refused(tmp_path):
    shard = shard_of(tmp_path, [("F64", 900_000)])
    blocks = list(plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES))
    with Path(shard.name).open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(SystemRefusedError, match="changed"):
        run(rewriting(blocks, lambda *_: None, {}), threads=1)


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path):
    shard = shard_of(tmp_path, [("F64", 900_000)])

    def cut(_block, _view):
        with Path(shard.name).open("r+b") as file:
            file.truncate(100_000)

    with pytest.raises(SystemRefusedError, match="shorter"):
        run(rewriting(plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES), cut, {}), threads=1)


def test_a_signal_while_threads_are_started_stops_them_and_does_not_wait_for_ever(tmp_path, monkeypatch):
    shard = shard_of(tmp_path, [("F64", 2_000_000)])
    start, started = threading.Thread.start, []

    def interrupted(thread):
        started.append(thread)
        if len(started) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    blocks = plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES)
    with pytest.raises(KeyboardInterrupt):
        run(rewriting(blocks, lambda *_: None, {}), threads=8)
    assert len(started) == 5


def threads_of(tasks, moves):
    """The threads that do so many tasks, each of which moves so many bytes."""
    seen = []

    def do(_, worker):
        worker.clock.read_bytes += moves
        seen.append(threading.current_thread())

    clock = run(Tasks(range(tasks), do, 1 << 30), threads=2, are_small=True)
    assert (len(seen), clock.read_bytes) == (tasks, tasks * moves)
    return seen, clock


def test_one_thread_does_tasks_that_are_small_and_quick(monkeypatch):
    monkeypatch.setattr(stream, "_QUICK_SECONDS", 1e9)
    seen, clock = threads_of(50, 100_000)
    assert set(seen) == {threading.main_thread()}
    assert clock.workers == 1


@pytest.mark.parametrize(("moves", "quick"), [(1 << 20, 1e9), (100, -1e9)], ids=["large", "slow"])
def test_other_threads_do_the_tasks_after_one_that_is_large_or_slow(monkeypatch, moves, quick):
    monkeypatch.setattr(stream, "_QUICK_SECONDS", quick)
    seen, clock = threads_of(50, moves)
    assert seen[0] is threading.main_thread()
    assert threading.main_thread() not in seen[1:]
    assert clock.workers in (1, 2)


def test_an_error_in_a_quick_task_starts_no_thread(monkeypatch):
    monkeypatch.setattr(stream, "_QUICK_SECONDS", 1e9)
    seen = []

    def fail(*_):
        seen.append(threading.current_thread())
        raise SystemRefusedError("no")

    with pytest.raises(SystemRefusedError, match="no"):
        run(Tasks([1, 2], fail, 1 << 30), threads=2, are_small=True)
    assert seen == [threading.main_thread()]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_block_that_the_device_has_no_room_for_is_done_in_halves_in_order(tmp_path, threads):
    shard, seen = shard_of(tmp_path, [("U8", 5 * UNIT)]), []

    def work(block, view):
        if len(view) > 2 * UNIT:
            raise DeviceMemoryError("no room")
        seen.append((block.begin - shard.data_start) // UNIT)

    run(rewriting(list(plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES)), work, {}), threads=threads)
    assert seen == [0, 2, 3]


def test_a_block_too_small_to_be_halved_is_an_error(tmp_path):
    shard = shard_of(tmp_path, [("U8", 5 * UNIT)])

    def work(*_):
        raise DeviceMemoryError("no room")

    with pytest.raises(DeviceMemoryError, match="no room"):
        run(rewriting(list(plan(shard, enumerate(shard.tensors), UNIT, tuning.BLOCK_BYTES)), work, {}), threads=1)
