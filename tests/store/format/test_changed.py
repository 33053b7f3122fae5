"""Files that do not stay what they are while they are read."""

import json
import os

import numpy as np
import pytest
import safetensors
from safetensors import deserialize
from support import read, snapshot, until_told, write, write_back_in_time, write_index

from gradtool import BadInputError, GradtoolError, SystemRefusedError, clip, norm
from gradtool.store.format.gradset import open_sets
from gradtool.store.format.header import read_shard, read_small
from gradtool.store.transaction import inputs as opening

ONES = {"a": np.ones(20_000, np.float32), "b": np.ones(3, np.float64)}


def shrink(path):
    os.truncate(path, path.stat().st_size - 1)


def empty(path):
    os.truncate(path, 0)


def grow(path):
    with path.open("ab") as file:
        file.write(b"\0")


def overwrite(path):
    """Another value under the same header."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    # A clock may be too coarse to tell.
    os.utime(path, ns=(0, 0))


def overwrite_and_set_the_date_back(path):
    write_back_in_time(path, b"\1")


def replace(path):
    write(path.with_name("new"), ONES).replace(path)


def replace_by_a_fifo(path):
    path.unlink()
    os.mkfifo(path)


def replace_by_a_folder(path):
    path.unlink()
    path.mkdir()


def remove(path):
    path.unlink()


WRITES = [shrink, empty, grow, overwrite, overwrite_and_set_the_date_back]
CHANGES = [*WRITES, replace, replace_by_a_fifo, replace_by_a_folder, remove]


def before(monkeypatch, module, name, act):
    """Have something happen just before a function is called, once."""
    function, done = getattr(module, name), []

    def wrapped(*arguments, **options):
        if not done:
            done.append(1)
            act()
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, wrapped)


MOMENTS = {
    "read": (os, "preadv"),
    "judged": (safetensors, "deserialize"),
    "parsed": (json, "loads"),
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_its_header_is_read_is_refused(tmp_path, monkeypatch, change, moment):
    path = write(tmp_path / "x.safetensors", ONES)
    before(monkeypatch, *moment, lambda: change(path))
    with pytest.raises(SystemRefusedError, match="changed by another program in the meantime; run the command again"):
        read_shard(path)


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_between_header_and_data_is_refused(tmp_path, monkeypatch, change):
    path = write(tmp_path / "x.safetensors", ONES)
    before(monkeypatch, opening, "select", lambda: change(path))
    with pytest.raises(GradtoolError, match=r"changed|no such file"):
        norm(path)


def restrict(path):
    path.chmod(0o600)


def give_a_second_name(path):
    os.link(path, path.with_name("second name"))


@pytest.mark.parametrize("change", [restrict, give_a_second_name])
def test_a_file_whose_mode_or_number_of_names_changes_while_it_is_read_is_read(tmp_path, monkeypatch, change):
    path = write(tmp_path / "x.safetensors", ONES)

    def act():
        status = path.stat()
        change(path)
        until_told(path, status)

    before(monkeypatch, opening, "select", act)
    assert norm(path).norm == pytest.approx(20_003**0.5)


@pytest.mark.parametrize("change", [shrink, empty, grow, replace_by_a_fifo, replace_by_a_folder, remove])
def test_a_file_that_changes_before_it_is_clipped_is_left_as_it_is_then(tmp_path, monkeypatch, change):
    path = write(tmp_path / "x.safetensors", ONES)
    after = {}

    def act():
        change(path)
        after.update(snapshot(tmp_path))

    before(monkeypatch, opening, "select", act)
    with pytest.raises(GradtoolError):
        clip(path, max_norm=1, write="inplace")
    assert snapshot(tmp_path) == after


def test_a_file_that_is_replaced_before_it_is_clipped_is_the_one_that_is_clipped(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", {"a": np.full(20_000, 5, np.float32)})
    before(monkeypatch, opening, "select", lambda: replace(path))
    assert clip(path, max_norm=1, write="inplace").norm_before == pytest.approx(20_003**0.5)
    assert read(path)["b"].shape == (3,)


def test_an_invalid_file_that_changes_meanwhile_is_not_called_invalid(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", ONES)
    shrink(path)
    before(monkeypatch, safetensors, "deserialize", lambda: grow(path))
    with pytest.raises(SystemRefusedError, match="changed"):
        read_shard(path)


@pytest.mark.parametrize("change", WRITES)
def test_an_index_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, change):
    index = write_index(tmp_path, {"1.safetensors": ONES})
    before(monkeypatch, os, "preadv", lambda: change(index))
    with pytest.raises(SystemRefusedError, match="changed"):
        open_sets([index])
    assert read_small(index).content == index.read_bytes()


def test_no_descriptor_is_left_open(tmp_path):
    path = write(tmp_path / "x.safetensors", ONES)
    (tmp_path / "bad").write_bytes(b"\xff" * 99)
    held = os.listdir("/dev/fd")  # noqa: PTH208
    for _ in range(5):
        read_shard(path)
        with pytest.raises(BadInputError):
            read_shard(tmp_path / "bad")
    assert os.listdir("/dev/fd") == held  # noqa: PTH208


def test_what_a_header_holds_is_remembered_only_for_the_same_bytes_and_size(tmp_path, monkeypatch):
    path = write(tmp_path / "x.safetensors", ONES)
    judged = []

    def judge(content):
        judged.extend([1] if b'"a"' in content else [])
        return deserialize(content)

    monkeypatch.setattr(safetensors, "deserialize", judge)
    first = read_shard(path)
    first.metadata["added"] = "by a caller"
    assert read_shard(path).metadata == {}
    assert judged == [1]
    write(path, ONES | {"a": np.ones(20_000, np.int32)})
    assert [tensor.dtype for tensor in read_shard(path).tensors if tensor.name == "a"] == ["I32"]
    assert judged == [1, 1]
    shrink(path)
    with pytest.raises(BadInputError, match=r"truncated: .* \(1 missing\)"):
        read_shard(path)
