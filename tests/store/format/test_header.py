import json
import os
import pickle
from unittest import mock

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from support import build, with_header, write

from gradtool import BadInputError, SystemRefusedError
from gradtool.store.format.gradset import open_sets
from gradtool.store.format.header import read_shard
from gradtool.store.source import is_unchanged

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def verdict_of_library(path):
    try:
        with safe_open(path, framework="numpy"):
            return True
    except (SafetensorError, OSError):
        return False


def is_accepted(path):
    try:
        read_shard(path)
    except BadInputError:
        return False
    return True


def test_tensors_come_in_the_order_of_their_bytes(tmp_path):
    text = {"__metadata__": {"step": "7"}, "b": ONE | {"data_offsets": [8, 16]}, "a": ONE}
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header(text, bytes(16), padding=3))
    shard = read_shard(path)
    start = 8 + len(json.dumps(text)) + 3
    assert [tuple(tensor) for tensor in shard.tensors] == [
        ("a", "F32", (2,), start, start + 8),
        ("b", "F32", (2,), start + 8, start + 16),
    ]
    assert (shard.data_start, shard.size, shard.metadata) == (start, start + 16, {"step": "7"})


def test_empty_tensors_at_one_place_stay_in_the_order_of_the_header(tmp_path):
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header({"c": empty, "z": ONE, "a": empty, "b": empty}, bytes(8)))
    assert [tensor.name for tensor in read_shard(path).tensors] == ["c", "a", "b", "z"]


def test_rank_0_and_empty_tensors_have_one_and_no_element(tmp_path):
    path = write(tmp_path / "x", {"scalar": np.float32(3), "none": np.zeros((3, 0, 2), np.float64)})
    assert {tensor.name: tensor.elements for tensor in read_shard(path).tensors} == {"scalar": 1, "none": 0}


def test_a_file_without_tensors_is_fine(tmp_path):
    assert read_shard(write(tmp_path / "x", {})).tensors == ()


BAD = {
    "empty": (b"", "is an empty file, not a safetensors file; copy or download it again"),
    "seven bytes": (b"1234567", "7 bytes are too few"),
    "text": (b"hello, this is no safetensors file at all", "not a safetensors file"),
    "pickle": (pickle.dumps({"a": [1.0] * 9}), "is a pickle, not a safetensors file; convert it"),
    "torch.save": (b"PK\x03\x04" + bytes(60), "is a zip archive, not a safetensors file; unpack it"),
    "header over the limit": (with_header({}, length=100_000_001), r"50,000,000 bytes \(it has 100,000,001\)"),
    "header cut off": (with_header({}, length=50), "the header should have 50 bytes, but the whole file has 10"),
    "no JSON": (with_header(b"{nope}"), "JSON"),
    "truncated": (
        with_header({"a": ONE}, bytes(7)),
        r"truncated: the header says 77 bytes, the file has 76 \(1 missing\)",
    ),
    "last whole tensor": (
        with_header({"a": ONE, "b": ONE | {"data_offsets": [8, 16]}}, bytes(12)),
        r"4 missing\); the last whole tensor is 'a'",
    ),
    "trailing bytes": (with_header({"a": ONE}, bytes(9)), r"trailing bytes: .* \(1 too many\)"),
    "overlap": (
        with_header({"a": ONE, "b": ONE | {"data_offsets": [4, 12]}}, bytes(12)),
        "'b': bad offsets: begins at 4",
    ),
    "hole": (
        with_header({"a": ONE | {"data_offsets": [8, 16]}}, bytes(16)),
        "'a': bad offsets: begins at 8 instead of",
    ),
    "offsets and shape": (
        with_header({"a": ONE | {"shape": [3]}}, bytes(8)),
        r"\[3\] of F32 takes 12 bytes, .* span 8",
    ),
    "huge shape": (with_header({"a": ONE | {"shape": [2**62, 2**62]}}, bytes(8)), "takes 85,070,591,730"),
    "backwards": (with_header({"a": ONE | {"data_offsets": [8, 0]}}, bytes(8)), "bad offsets"),
    "unknown type": (with_header({"a": ONE | {"dtype": "F33"}}, bytes(8)), "F33"),
    "negative shape": (with_header({"a": ONE | {"shape": [-2]}}, bytes(8)), "-2"),
    "fractional shape": (with_header({"a": ONE | {"shape": [2.0]}}, bytes(8)), "2.0"),
    "metadata of numbers": (with_header({"__metadata__": {"step": 7}}), "expected a string"),
    "deep JSON": (with_header(b"[" * 5000 + b"]" * 5000), "not a valid safetensors file"),
    "bad UTF-8": (with_header(b'{"\xff": 1}'), "UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line_that_says_why(tmp_path, name):
    content, why = BAD[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    assert not verdict_of_library(path)
    with pytest.raises(BadInputError, match=why) as caught:
        open_sets([path])
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value).splitlines()) == 1


LENIENT = {
    "names that look like fields": with_header(
        {
            '"shape":[7]': ONE,
            "[ ] 12": ONE | {"shape": [2, 1], "data_offsets": [8, 16]},
            "\\": ONE | {"x": [-1, 1.5, []]},
        }
        | {"\\": {"dtype": "F32", "shape": [], "data_offsets": [16, 20], "x": [-1, 1.5, [], 2**70]}},
        bytes(20),
    ),
    "fields in an array": with_header(b'{"a":["F32",[2],[0,8]]}', bytes(8)),
    "unknown field": with_header({"a": ONE | {"more": [1]}}, bytes(8)),
    "null metadata": with_header({"__metadata__": None, "a": ONE}, bytes(8)),
    "space around": with_header(b"  {}  "),
    "name twice, the last one counts": with_header(
        b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
}


@pytest.mark.parametrize("name", LENIENT)
def test_what_the_library_accepts_is_accepted(tmp_path, name):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(LENIENT[name])
    assert verdict_of_library(path)
    with safe_open(path, framework="numpy") as opened:
        expected = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    assert {tensor.name: list(tensor.shape) for tensor in read_shard(path).tensors} == expected


NUMBERS = st.sampled_from([0, 1, 2, 4, 8, 12, 16, -1, 2**63, 2**64, 1.0, "4", None])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "I64", "F8_E4M3", "BOOL", "F4", "f32", 3]),
        "shape": st.lists(NUMBERS, max_size=3) | st.just([2]),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3) | st.sampled_from([[0, 8], [8, 16], [0, 4], [0, 0]]),
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "", "__metadata__", "é\n"]), ENTRIES | NUMBERS, max_size=3)


@given(text=HEADERS | st.builds(lambda one: {"a": one}, ENTRIES), size=st.sampled_from([0, 4, 7, 8, 16]))
def test_made_up_headers_get_the_librarys_verdict(tmp_path_factory, text, size):
    path = tmp_path_factory.getbasetemp() / "made_up.safetensors"
    path.write_bytes(with_header(text, bytes(size)))
    assert is_accepted(path) == verdict_of_library(path)


@given(position=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.integers(0, 40), extra=st.integers(0, 2))
def test_damaged_files_get_the_librarys_verdict(tmp_path_factory, position, value, cut, extra):
    content = bytearray(build({"a": np.ones((2, 3), np.float32), "b": np.ones(3, np.int32)}, {"k": "v"}))
    content[position % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(bytes(content[: len(content) - max(0, cut - 20)]) + bytes(extra))
    assert is_accepted(path) == verdict_of_library(path)


HOSTILE = {
    "a shape whose product overflows before its zero": {"shape": [2**40, 2**40, 0], "data_offsets": [0, 0]},
    "half a byte": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]},
    "minus zero": {"shape": [-0.0]},
    "a shape of text": {"shape": ["xxxxxxxx", 400_000_000]},
    "a shape beyond all": {"shape": [0, "x", 2**64]},
    "a shape of booleans": {"shape": [True, True]},
    "three offsets": {"data_offsets": [0, 4, 8]},
    "a type that is a list": {"dtype": ["F32"]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_explaining_a_hostile_header_costs_nothing(tmp_path, name):
    path = tmp_path / "x"
    path.write_bytes(with_header({"a": ONE | HOSTILE[name]}, bytes(8)))
    assert not verdict_of_library(path)
    with pytest.raises(BadInputError, match="not a valid safetensors file"):
        read_shard(path)


def test_a_type_written_as_an_object_is_what_the_library_takes_it_for(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(with_header({"a": ONE | {"dtype": {"F32": None}}}, bytes(8)))
    accepted = verdict_of_library(path)
    assert is_accepted(path) == accepted
    assert not accepted or read_shard(path).tensors[0].dtype == "F32"


def test_a_change_is_noticed_by_inode_size_and_time(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345678")
    before = path.stat()
    assert is_unchanged(path, before)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1000))
    assert not is_unchanged(path, before)
    path.write_bytes(b"123456789")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not is_unchanged(path, before)
    (tmp_path / "y").write_bytes(b"12345678")
    os.utime(tmp_path / "y", ns=(before.st_atime_ns, before.st_mtime_ns))
    (tmp_path / "y").replace(path)
    assert not is_unchanged(path, before)
    path.unlink()
    assert not is_unchanged(path, before)


def test_a_missing_file_is_bad_input(tmp_path):
    with pytest.raises(BadInputError, match="no such file"):
        read_shard(tmp_path / "none.safetensors")


def test_a_folder_a_fifo_and_a_device_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", type(tmp_path)("/dev/null")):
        with pytest.raises(BadInputError, match=r"folder|regular file"):
            read_shard(path)


def test_a_circle_of_links_is_bad_input(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(BadInputError, match="circle"):
        read_shard(tmp_path / "a")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "x", {"a": np.ones(2, np.float32)})

    def judge_and_replace(content):
        path.rename(tmp_path / "old")
        write(path, {"a": np.ones(2, np.float32)})
        return deserialize(content)

    monkeypatch.setattr(safetensors, "deserialize", judge_and_replace)
    with pytest.raises(SystemRefusedError, match="changed"):
        read_shard(path)


def test_no_file_is_mapped_into_memory_because_the_library_gets_the_header_alone(tmp_path, monkeypatch):
    path = write(tmp_path / "x", {"a": np.ones(100_000, np.float32)})
    monkeypatch.setattr(safetensors, "safe_open", mock.Mock(side_effect=MemoryError))
    (tensor,) = read_shard(path).tensors
    assert (tensor.shape, tensor.nbytes) == ((100_000,), 400_000)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(BadInputError, match="truncated"):
        read_shard(path)


def test_quotes_without_end_cost_no_more_than_others(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(with_header(b'{"' + b'\\"' * 500_000))
    with pytest.raises(BadInputError, match="not a valid safetensors file"):
        read_shard(path)
