import errno
import os
from unittest import mock

import numpy as np
import pytest
from support import bytes_of_memory, file_at, write

from gradtool import SystemRefusedError
from gradtool.store.format.header import read_shard
from gradtool.store.io.channel import Channel


def shards_in(folder, count):
    arrays = [np.full(10, i, np.uint8) for i in range(count)]
    return [read_shard(write(folder / f"{i}.safetensors", {"a": array})) for i, array in enumerate(arrays)]


def read(channel, shard):
    with channel.memory(10) as view:
        channel.read(shard, shard.data_start, view)
        return bytes(view)


@pytest.fixture
def opened(monkeypatch):
    """The descriptors that are open, by the name of their file, in the order in which they were opened."""
    descriptors = {}
    open_, close = os.open, os.close

    def remember(path, *arguments, **options):
        fd = open_(path, *arguments, **options)
        descriptors[fd] = os.path.basename(path)  # noqa: PTH119 - a path of any type
        return fd

    def forget(fd):
        descriptors.pop(fd, None)
        close(fd)

    monkeypatch.setattr(os, "open", remember)
    monkeypatch.setattr(os, "close", forget)
    return descriptors


def names(opened):
    return [name.removesuffix(".safetensors") for name in opened.values()]


def test_few_files_are_open_though_many_take_part_and_none_in_the_end(tmp_path, opened):
    shards = shards_in(tmp_path, 20)
    channel, most = Channel(3, bytes_of_memory), 0
    for turn in range(3):
        for i, shard in enumerate(shards):
            assert read(channel, shard) == bytes([i]) * 10, turn
            most = max(most, len(opened))
    assert most == 3
    channel.check()
    channel.close()
    assert names(opened) == []


def test_the_file_that_was_used_least_recently_is_closed(tmp_path, opened):
    one, two, three, four = shards_in(tmp_path, 4)
    channel = Channel(3, bytes_of_memory)
    for shard in (one, two, three, one, four):
        read(channel, shard)
    assert names(opened) == ["0", "2", "3"]
    channel.close()


def test_files_that_are_written_count_too_and_are_written_on_when_opened_again(tmp_path, opened):
    shards = shards_in(tmp_path, 3)
    target = tmp_path / "target"
    target.write_bytes(bytes(30))
    file = file_at(target)
    opened.clear()
    channel = Channel(2, bytes_of_memory)
    for i, shard in enumerate(shards):
        with channel.memory(10) as view:
            channel.read(shard, shard.data_start, view)
            channel.write(file, 10 * i, [view], len(view))
        assert len(opened) <= 2
    channel.close()
    assert target.read_bytes() == bytes(10) + b"\1" * 10 + b"\2" * 10
    assert (channel.clock.read_bytes, channel.clock.written_bytes) == (30, 30)


def test_where_the_system_allows_fewer_open_files_the_oldest_is_closed_and_it_is_tried_again(
    tmp_path, opened, monkeypatch
):
    one, two, three = shards_in(tmp_path, 3)
    channel = Channel(100, bytes_of_memory)
    read(channel, one)
    read(channel, two)
    open_, refused = os.open, []

    def refuse_once(path, *arguments, **options):
        if not refused:
            refused.append(path)
            raise OSError(errno.EMFILE, "Too many open files")
        return open_(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse_once)
    assert read(channel, three) == b"\2" * 10
    assert refused == [three.name]
    assert names(opened) == ["1", "2"]
    assert read(channel, one) == bytes(10)
    channel.close()
    assert names(opened) == []


def test_a_limit_that_allows_no_file_at_all_is_an_error_that_names_the_file(tmp_path, opened, monkeypatch):
    one, two = shards_in(tmp_path, 2)
    channel = Channel(100, bytes_of_memory)
    read(channel, one)

    def refuse(*_arguments, **_options):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SystemRefusedError, match="Too many open files") as caught:
        read(channel, two)
    assert caught.value.problems[0].file == two.name
    channel.close()
    assert names(opened) == []


def test_a_file_that_changed_is_noticed_when_it_is_closed_for_another(tmp_path, opened):
    one, two = shards_in(tmp_path, 2)
    channel = Channel(1, bytes_of_memory)
    read(channel, one)
    os.utime(one.name, ns=(0, 0))
    with pytest.raises(SystemRefusedError, match="changed by another program") as caught:
        read(channel, two)
    assert caught.value.problems[0].file == one.name
    assert names(opened) == []


def test_a_file_that_changed_is_noticed_at_the_end_and_when_it_is_opened_again(tmp_path):
    one, two = shards_in(tmp_path, 2)
    channel = Channel(2, bytes_of_memory)
    read(channel, one)
    channel.check()
    os.utime(one.name, ns=(0, 0))
    with pytest.raises(SystemRefusedError, match="changed by another program"):
        channel.check()
    channel.close()
    os.utime(two.name, ns=(0, 0))
    with pytest.raises(SystemRefusedError, match="changed by another program"):
        read(channel, two)


def test_a_file_that_changed_before_it_is_opened_is_closed_and_never_read(tmp_path, opened):
    (shard,) = shards_in(tmp_path, 1)
    channel = Channel(2, bytes_of_memory)
    os.utime(shard.name, ns=(0, 0))
    for _ in range(2):
        with pytest.raises(SystemRefusedError, match="changed by another program"):
            read(channel, shard)
        assert names(opened) == []
    with pytest.raises(SystemRefusedError, match="changed by another program"), channel.borrow_fd(shard):
        pass
    channel.check()


def test_memory_has_one_owner_at_a_time_and_is_used_again():
    allocated = []

    def allocate(nbytes):
        allocated.append(nbytes)
        return bytes_of_memory(nbytes)

    channel = Channel(1, allocate)
    with channel.memory(5000) as first, channel.memory(10) as other:
        first[:3], other[:3] = b"abc", b"xyz"
        assert (len(first), bytes(first[:3])) == (5000, b"abc")
    for _ in range(9):
        with channel.memory(3) as first, channel.memory(4096) as other:
            assert (bytes(first[:3]), bytes(other[:3])) == (b"abc", b"xyz")
    assert allocated == [8192, 4096]
    for _ in range(9):
        with channel.memory(8192), channel.memory(100_000) as larger, channel.memory(0) as empty:
            assert (len(larger), len(empty)) == (100_000, 0)
    assert allocated == [8192, 4096, 131_072]


def test_memory_that_is_given_back_late_is_not_lost():
    allocated = []
    channel = Channel(1, lambda nbytes: allocated.append(nbytes) or bytes_of_memory(nbytes))
    first, second = channel.memory(5000), channel.memory(5000)
    views = [first.__enter__(), second.__enter__()]
    first.__exit__(None, None, None)
    with channel.memory(5000) as again:
        again[0] = 1
        views[1][0] = 2
        assert (views[0][0], again[0]) == (1, 1)
    second.__exit__(None, None, None)
    assert allocated == [8192, 8192]


def test_memory_is_used_again_after_an_error():
    allocate = mock.Mock(side_effect=bytes_of_memory)
    channel = Channel(1, allocate)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), channel.memory(10):
            raise ZeroDivisionError
    assert allocate.call_count == 1


def test_bytes_that_are_read_are_told_and_those_written_are_not(tmp_path):
    (shard,) = shards_in(tmp_path, 1)
    target = tmp_path / "target"
    target.touch()
    told = []
    channel = Channel(2, bytes_of_memory, on_bytes=told.append)
    with channel.memory(7) as view:
        channel.read(shard, shard.data_start, view)
        channel.write(file_at(target), 0, [view], 7)
    channel.close()
    assert told == [7]


def test_files_that_are_lent_stay_open_beyond_the_limit(tmp_path):
    shards = shards_in(tmp_path, 3)
    channel = Channel(1, bytes_of_memory)
    with (
        channel.borrow_fd(shards[0]) as first,
        channel.borrow_fd(shards[1]) as second,
        channel.borrow_fd(shards[0]) as again,
    ):
        assert first == again
        assert [os.fstat(fd).st_ino for fd in (first, second)] == [shard.source.status.st_ino for shard in shards[:2]]
    channel.touch(shards[2])
    channel.close()


def test_files_that_are_lent_stay_open_where_the_system_allows_no_more(tmp_path, monkeypatch):
    first, second = shards_in(tmp_path, 2)
    channel = Channel(9, bytes_of_memory)
    with channel.borrow_fd(first) as fd:
        monkeypatch.setattr(os, "open", mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(SystemRefusedError, match="Too many open files"), channel.borrow_fd(second):
            pass
        assert os.fstat(fd).st_ino == first.source.status.st_ino
    channel.close()


def test_a_descriptor_is_lent_and_what_goes_wrong_with_it_is_said_of_the_file(tmp_path):
    (shard,) = shards_in(tmp_path, 1)
    told = []
    channel = Channel(2, bytes_of_memory, on_bytes=told.append)
    with channel.borrow_fd(shard) as fd:
        assert os.pread(fd, 10, shard.data_start) == bytes(10)
    channel.record_read(10, 0.25)
    assert (channel.clock.read_bytes, told) == (10, [10])
    assert channel.clock.read > 0.25
    errors = {
        EOFError(): "became shorter while it was read; run the command again",
        OSError(errno.EIO, "Broken disk"): "Broken disk",
    }
    for error, message in errors.items():
        with pytest.raises(SystemRefusedError, match=message) as caught, channel.borrow_fd(shard):
            raise error
        assert caught.value.problems[0].file == shard.name
    os.utime(shard.name, ns=(0, 0))
    with pytest.raises(SystemRefusedError, match="changed by another program"):
        channel.check()
    channel.close()


def test_bytes_that_are_no_result_or_are_read_again_take_time_and_do_not_count(tmp_path):
    (shard,) = shards_in(tmp_path, 1)
    target = tmp_path / "target"
    target.write_bytes(bytes(9))
    told = []
    channel = Channel(2, bytes_of_memory, on_bytes=told.append)
    with channel.memory(10) as view:
        channel.read(shard, shard.data_start, view, counts=False)
        channel.write(file_at(target), 2, [b"ab", memoryview(b"cd"), b""])
    channel.close()
    assert target.read_bytes() == b"\0\0abcd\0\0\0"
    assert (channel.clock.read_bytes, channel.clock.written_bytes, told) == (0, 0, [])
    assert min(channel.clock.read, channel.clock.write) > 0


def test_a_file_that_is_read_again_must_be_the_same(tmp_path):
    (shard,) = shards_in(tmp_path, 1)
    channel = Channel(1, bytes_of_memory)
    read(channel, shard)
    channel.close()
    os.utime(shard.name, ns=(0, 0))
    with pytest.raises(SystemRefusedError, match="changed by another program"), channel.memory(10) as view:
        channel.read(shard, shard.data_start, view, counts=False)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_bytes_that_cannot_be_written_are_an_error_that_names_the_file(tmp_path, monkeypatch, number):
    target = tmp_path / "target"
    target.touch()
    monkeypatch.setattr(os, "pwritev", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    channel = Channel(1, bytes_of_memory)
    with pytest.raises(SystemRefusedError, match=os.strerror(number)) as caught:
        channel.write(file_at(target), 0, [b"x"])
    assert caught.value.problems[0].file == str(target)
    channel.close()
