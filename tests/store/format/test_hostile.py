import contextlib
import json
import os
import sys

import numpy as np
import pytest
from runner import run
from support import snapshot, with_header, write, write_index

import gradtool
from gradtool import BadInputError
from gradtool.errors import EXIT_INPUT
from gradtool.store.format.limits import (
    MAX_MAPPED,
    MAX_NAME,
    MAX_ODD_TEXT,
    MAX_PATH_LIST,
    MAX_SHARDS,
    MAX_TENSORS,
    MAX_TEXT,
)

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
ENTRY = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
ONES = np.ones(2, np.float32)
INDEX = "m.safetensors.index.json"


def raw(content):
    """What makes a file, and gives its path."""

    def make(folder):
        path = folder / "x.safetensors"
        path.write_bytes(content)
        return path

    return make


def header(text, data=b""):
    return raw(with_header(text, data))


def index(text):
    """What makes an index beside a shard that has the tensors a and b."""

    def make(folder):
        write(folder / "1.safetensors", {"a": ONES, "b": ONES})
        path = folder / INDEX
        path.write_bytes(text if isinstance(text, bytes) else json.dumps({"weight_map": text}).encode())
        return path

    return make


def link_to_itself(folder):
    (folder / "x.safetensors").symlink_to("x.safetensors")
    return folder / "x.safetensors"


def links_in_a_circle(folder):
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    write_index(folder, {}, {"a": "a"})
    return folder


def fifo(folder):
    os.mkfifo(folder / "x.safetensors")
    return folder


def fifo_as_a_shard(folder):
    os.mkfifo(folder / "1.safetensors")
    return write_index(folder, {}, {"a": "1.safetensors"})


def device(folder):
    (folder / "x.safetensors").symlink_to("/dev/zero")
    return folder / "x.safetensors"


def device_as_an_index(folder):
    (folder / INDEX).symlink_to("/dev/zero")
    return folder


def folder_as_a_file(folder):
    (folder / "x.safetensors").mkdir()
    return folder


def folder_as_an_index(folder):
    (folder / INDEX).mkdir()
    return folder


def folder_as_a_shard(folder):
    (folder / "1.safetensors").mkdir()
    return write_index(folder, {}, {"a": "1.safetensors"})


def socket_file(folder):
    import socket

    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as one:
        one.bind("x.safetensors")
    return folder


def shape(*dimensions, data_offsets=(0, 8)):
    return header({"a": ONE | {"shape": dimensions, "data_offsets": data_offsets}}, bytes(8))


# By what is hostile: what makes it, and what is said.
CORPUS = {
    # Lengths.
    "a length field of all ones": (
        raw(b"\xff" * 8 + bytes(100)),
        "is a file of an unknown format (its first bytes are ff ff ff ff ff ff ff ff)",
    ),
    "a length field just below 2**63": (
        raw((2**63 - 1).to_bytes(8, "little")),
        "is a file of an unknown format (its first bytes are ff ff ff ff ff ff ff 7f)",
    ),
    "a length field just below 2**63 before a header": (
        raw((2**63 - 1).to_bytes(8, "little") + b"{}"),
        "exceeds the limit of 50,000,000 bytes (it has 9,223,372,036,854,775,807)",
    ),
    "a length beyond the end": (raw(with_header({}, length=3)), "but the whole file has 10"),
    "a length that cuts the header": (
        raw(with_header({"a": ONE}, bytes(8), length=20)),
        "not a valid",
    ),
    "no header at all": (header(b""), "not a valid safetensors file"),
    # JSON.
    "deep lists": (header(b"[" * 100_000), "not a valid safetensors file"),
    "deep lists in an entry": (header(b'{"a":' * 50_000 + b"[" * 100_000), "not a valid safetensors file"),
    "deep objects": (header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "not a valid safetensors file"),
    "deep metadata": (header(b'{"__metadata__":' + b'{"a":' * 9_000), "not a valid safetensors file"),
    "a number of many digits": (header(b'{"a":' + b"9" * 1_000_000 + b"}"), "number out of range"),
    "a field of many digits": (header(b'{"a":' + ENTRY[:-1] + b',"x":' + b"9" * 5_000 + b"}}", bytes(4)), "range"),
    "a key twice in an entry": (header(b'{"a":{"dtype":"F16",' + ENTRY[1:] + b"}", bytes(4)), "duplicate field"),
    "metadata twice": (header(b'{"__metadata__":{},"__metadata__":{}}'), "duplicate field"),
    "a NUL in the header": (header(b'{"a\0":' + ENTRY + b"}", bytes(4)), "control character"),
    "half a surrogate": (header(b'{"\\ud800":' + ENTRY + b"}", bytes(4)), "not a valid safetensors file"),
    "a byte order mark": (header(b"\xef\xbb\xbf{}"), "not a valid safetensors file"),
    "UTF-16": (header('{"a":1}'.encode("utf-16")), "not a valid safetensors file"),
    "a value in place of a header": (header(b"3"), "not a valid safetensors file"),
    "words of a megabyte": (header(b'{"a":"' + b"x" * 1_000_000 + b'"}'), "not a valid safetensors file"),
    # Shapes and offsets.
    "a product of 2**64": (shape(2**32, 2**32, 2**32), "takes 316,912,650,057,057,350,374,175,801,344 bytes"),
    "a product that wraps to what there is": (shape(2**63, 2, 2), "bad offsets"),
    "a dimension beyond 64 bits": (shape(2**64), "takes 73,786,976,294,838,206,464 bytes"),
    "an overflow of 100,000 dimensions": (shape(*[2**63] * 100_000), "overflow"),
    "an offset of 2**64 - 1": (shape(2, data_offsets=(0, 2**64 - 1)), "the offsets span 18,446,744,073,709,551,615"),
    "a tensor of an exabyte": (shape(2**58, data_offsets=(0, 2**60)), "truncated: the header says"),
    "a tensor within another": (
        header({"a": ONE, "b": ONE | {"shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        "begins at 4 instead of 8",
    ),
    "an offset before the data": (shape(2, data_offsets=(-8, 0)), "not a valid safetensors file"),
    "an end before its beginning": (shape(2, data_offsets=(8, 0)), "bad offsets"),
    # Names.
    "a long name": (
        header(b'{"' + b"x" * (MAX_NAME + 1) + b'":' + ENTRY + b"}", bytes(4)),
        "characters (it has 4,097)",
    ),
    "a long name of a refused file": (
        header({"x" * 5000: ONE}, bytes(7)),
        "the limit of 4,096 characters (it has 5,000)",
    ),
    "a long name in an index": (index({"x" * 5000: "1.safetensors"}), "the limit of 4,096 characters (it has 5,000)"),
    "a long name of a shard": (index({"a": "x" * 5000}), "the limit of 4,096 characters (it has 5,000)"),
    # Indexes.
    "a shard above": (index({"a": "../x.safetensors"}), "not the name of a file beside the index"),
    "a shard above by a detour": (index({"a": "sub/../../x"}), "not the name of a file beside the index"),
    "a shard at an absolute path": (index({"a": "/etc/passwd"}), "not the name of a file beside the index"),
    "a shard in a folder": (index({"a": "./1.safetensors"}), "not the name of a file beside the index"),
    "a shard that ends in a slash": (index({"a": "1.safetensors/"}), "not the name of a file beside the index"),
    "a shard that is the folder": (index({"a": "."}), "not the name of a file beside the index"),
    "a shard with a NUL": (index({"a": "1.safetensors\0"}), "not the name of a file beside the index"),
    "a shard of half a surrogate": (index({"a": "\ud800"}), "not the name of a file beside the index"),
    "a shard without a name": (index({"a": ""}), "not the name of a file beside the index"),
    "a shard that is a list": (index({"a": ["1.safetensors"]}), "not the name of a file beside the index"),
    "a shard that is a long list": (index({"a": [1] * 100_000}), "not the name of a file beside the index"),
    "a shard that is nothing": (index({"a": None}), "not the name of a file beside the index"),
    "the index as its own shard": (index({"a": INDEX}), "not a safetensors file"),
    "a tensor that is not there": (index({"a": "1.safetensors", "c": "1.safetensors"}), "does not contain it"),
    "an index that leaves one out": (index({"a": "1.safetensors"}), "the index does not map it"),
    "a key twice in an index": (index(b'{"weight_map":{"a":"1.safetensors","a":"x"}}'), "the key 'a' twice"),
    "two maps in an index": (index(b'{"weight_map":{},"weight_map":{}}'), "the key 'weight_map' twice"),
    "a long key twice": (index(b'{"%b":1,"%b":1}' % (b"x" * 9999, b"x" * 9999)), "xxx…xxx"),
    "a deep index": (index(b'{"weight_map":' + b"[" * 100_000), "not a valid index"),
    "an index of many digits": (index(b"9" * 1_000_000), "not a valid index"),
    "an index that is no UTF-8": (index(b'{"weight_map":{"\xff":"1.safetensors"}}'), "not a valid index"),
    "an empty index": (index(b""), "is an empty file, not an index"),
    "an index that is a number": (index(b"NaN"), "not a valid index"),
    # What is no file.
    "a link to itself": (link_to_itself, "symbolic links form a loop"),
    "links in a circle": (links_in_a_circle, "does not exist"),
    "a FIFO": (fifo, "not a regular file"),
    "a FIFO as a shard": (fifo_as_a_shard, "not a regular file"),
    "a socket": (socket_file, "not a regular file"),
    "a device without end": (device, "not a regular file"),
    "a device as an index": (device_as_an_index, "not a regular file"),
    "a folder as a file": (folder_as_a_file, "is a folder"),
    "a folder as a shard": (folder_as_a_shard, "is a folder"),
    "a folder as an index": (folder_as_an_index, "is a folder"),
}


@pytest.mark.parametrize("name", CORPUS)
def test_what_is_hostile_is_refused_in_a_line_and_changes_nothing(tmp_path, name):
    make, why = CORPUS[name]
    path = make(tmp_path)
    before = snapshot(tmp_path)
    calls = [
        lambda: gradtool.norm(path),
        lambda: gradtool.clip(path, max_norm=1, write="inplace"),
        lambda: gradtool.clip(path, max_norm=1),
        lambda: gradtool.zero(path),
    ]
    for call in calls:
        with pytest.raises(BadInputError) as caught:
            call()
        assert caught.value.exit_code == EXIT_INPUT
        assert why in str(caught.value)
        assert str(caught.value).startswith(str(tmp_path))
        assert len(str(caught.value)) < 1000
        assert len(str(caught.value).splitlines()) == 1
        assert snapshot(tmp_path) == before


def sized(start, unit, end, nbytes):
    """As many units between a start and an end as there are in so many bytes."""
    return start + unit * ((nbytes - len(start) - len(end)) // len(unit)) + end


def tensors(count):
    each = b'"model.layers.%07d.mlp.experts.down_proj":{"dtype":"F32","shape":[1,1],"data_offsets":[%d,%d]}'
    return b"{" + b",".join(each % (i, 4 * i, 4 * i + 4) for i in range(count)) + b"}"


def many_keys(count, long=b""):
    return b",".join(b'"%x%b":"%b"' % (i, long, long) for i in range(count))


def shards(count):
    return b'{"weight_map":{' + b",".join(b'"%060d":"%040d"' % (i, i) for i in range(count)) + b"}}"


def as_header(text, data=0):
    """What makes a file with a header, and a hole for the data."""

    def make(folder):
        path = folder / "x.safetensors"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            file.truncate(8 + len(text) + data)
        return path

    return make


def as_index(text):
    def make(folder):
        (folder / INDEX).write_bytes(text)
        return folder

    return make


def hole(name, nbytes, start=b""):
    """What makes a file of which only the start takes space."""

    def make(folder):
        (folder / name).write_bytes(start)
        os.truncate(folder / name, nbytes)
        return folder

    return make


def list_of_paths(folder):
    (folder / "list").symlink_to("/dev/zero")
    return f"--files-from={folder / 'list'}"


WIDE = b"\xf0\x9f\x98\x80"
MORE = b'{"a":' + ENTRY[:-1] + b',"more":['
# By what is large: what makes it when it is needed, the exit code, and what is said.
LARGE = {
    "a header of 100 MB": (lambda: hole("x.safetensors", 10**8 + 8, (10**8).to_bytes(8, "little")), 3, "100,000,000)"),
    "a header of NULs": (
        lambda: hole("x.safetensors", MAX_TEXT + 8, MAX_TEXT.to_bytes(8, "little")),
        3,
        "not a valid safetensors file",
    ),
    "a header of spaces": (lambda: as_header(sized(b"{}", b" ", b"", MAX_TEXT)), 0, ""),
    "a header of one name": (
        lambda: as_header(sized(b'{"', b"x", b'":' + ENTRY + b"}", MAX_TEXT), 4),
        3,
        "the limit of 4,096 characters (it has 49,999,947); rename it",
    ),
    "a header of one wide name": (
        lambda: as_header(sized(b'{"' + WIDE + b"\\n", b"x", b'":' + ENTRY + b"}", MAX_ODD_TEXT), 4),
        3,
        "the limit of 4,096 characters",
    ),
    "a header of more than ASCII": (
        lambda: as_header(sized(b'{"' + WIDE, b"x", b'":' + ENTRY + b"}", MAX_ODD_TEXT + 1), 4),
        3,
        "which is not plain ASCII, exceeds the limit of 25,000,000 bytes (it has 25,000,001)",
    ),
    "a header of one word": (
        lambda: as_header(sized(b'{"a":"', b"x", b'"}', MAX_TEXT)),
        3,
        "not a valid safetensors file",
    ),
    "a header of one number": (lambda: as_header(sized(b'{"a":', b"9", b"}", MAX_TEXT)), 3, "number out of range"),
    "a header of lists": (
        lambda: as_header(b"[" * MAX_TEXT),
        3,
        "of 150,000 tensors (it is as large as for 25,000,000)",
    ),
    "a header of objects": (lambda: as_header(b'{"a":' * 4_000_000), 3, "it is as large as for 2,000,000"),
    "metadata of one value": (lambda: as_header(sized(b'{"__metadata__":{"k":"', b"x", b'"}}', MAX_TEXT)), 0, ""),
    "metadata of one wide value": (
        lambda: as_header(sized(b'{"__metadata__":{"k":"' + WIDE + b"\\n", b"x", b'"}}', MAX_ODD_TEXT)),
        0,
        "",
    ),
    "metadata of as many keys as may be": (
        lambda: as_header(b'{"__metadata__":{' + many_keys(MAX_TENSORS * 3 - 1, b"x" * 30) + b"}}"),
        0,
        "",
    ),
    "metadata of a million keys": (
        lambda: as_header(b'{"__metadata__":{' + many_keys(1_000_000) + b"}}"),
        3,
        "it is as large as for 333,333",
    ),
    "as many tensors as may be": (lambda: as_header(tensors(MAX_TENSORS), 4 * MAX_TENSORS), 0, ""),
    "as many tensors as may be, cut": (
        lambda: as_header(tensors(MAX_TENSORS), 4 * MAX_TENSORS - 1),
        3,
        "(1 missing); the last whole tensor is 'model.layers.0149998.",
    ),
    "a tensor too many": (
        lambda: as_header(tensors(MAX_TENSORS + 1), 4 * MAX_TENSORS + 4),
        3,
        "the header exceeds the limit of 150,000 tensors (it is as large as for 150,001); split the file",
    ),
    "one tensor a million times": (
        lambda: as_header(sized(b"{", b'"a":["F32",[],[0,4]],', b'"a":' + ENTRY + b"}", 21_000_000), 4),
        3,
        "the limit of 150,000 tensors",
    ),
    "a million lists in a field": (lambda: as_header(MORE + b"[]," * 999_999 + b"[]]}}", 4), 3, "as for 500,001"),
    "as many numbers as may be in a field": (lambda: as_header(MORE + b"999," * 1_499_000 + b"1]}}", 4), 0, ""),
    "as many words as may be in a field": (
        lambda: as_header(MORE + (b'"' + WIDE + b'aaaaaaa",') * 899_990 + b"1]}}", 4),
        0,
        "",
    ),
    "a shape whose product takes for ever": (
        lambda: as_header(
            b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[' + b"9223372036854775807," * 1_499_000 + b"0]}}"
        ),
        3,
        "overflow",
    ),
    "an index of 500 MB": (lambda: hole(INDEX, 500_000_000), 3, "the limit of 50,000,000 bytes (it has 500,000,000)"),
    "an index of a million tensors": (
        lambda: as_index(b'{"weight_map":{' + many_keys(1_000_000, b"x") + b"}}"),
        3,
        "of 400,000 tensors (it is as large as for 1,000,000); split the set",
    ),
    "as many shards as may be": (
        lambda: as_index(shards(MAX_SHARDS)),
        3,
        "which does not exist",
    ),
    "too many shards": (
        lambda: as_index(shards(399_000)),
        3,
        "the index exceeds the limit of 20,000 shards (it names 399,000)",
    ),
    "an index of one name": (
        lambda: as_index(sized(b'{"weight_map":{"', b"x", b'":"a"}}', MAX_TEXT)),
        3,
        "the limit of 4,096 characters",
    ),
    "an index of one wide shard": (
        lambda: as_index(sized(b'{"weight_map":{"a":"' + WIDE + b"\\n", b"x", b'"}}', MAX_ODD_TEXT)),
        3,
        "the limit of 4,096 characters",
    ),
    "an index of lists": (lambda: as_index(b'{"weight_map":' + b"[" * 49_000_000), 3, "the limit of 400,000 tensors"),
    "a list of paths without end": (lambda: list_of_paths, 3, "exceeds the limit of 50,000,000 bytes in a list"),
}

MIB = 1 << 20


@pytest.mark.parametrize("name", LARGE)
def test_what_is_large_takes_little_memory(tmp_path, name):
    make, code, why = LARGE[name]
    path = make()(tmp_path)
    done = run("norm", "--threads", "1", path)
    for file in tmp_path.iterdir():
        # pytest keeps what tests leave.
        file.unlink()
    said = done.err.replace("\n  hint: ", "; ").splitlines()
    assert done.code == code, said
    if code:
        assert len(said) == 1
        assert said[0].startswith("gradtool: error: ")
        assert why in said[0]
        assert len(said[0]) < 2000
    assert done.peak * (1 if sys.platform == "darwin" else 1024) < 300 * MIB


def test_the_limits_leave_room_for_what_is_real():
    # The index of a model of 141,000 tensors in 61 files, and one of those files.
    assert MAX_MAPPED > 2 * 141_000
    assert MAX_TEXT > 2 * 141_000 * 120
    assert MAX_TENSORS > 10 * 141_000 // 61
    assert MAX_PATH_LIST > 100_000 * 255
