"""Headers and indexes that were damaged in every way: the library's verdict, and never anything but our own errors."""

import json
from pathlib import Path

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from support import build, encode, with_header, write
from tiers import PARTS, examples

from gradtool import GradtoolError
from gradtool.store.format.gradset import open_sets
from gradtool.store.format.header import read_shard

SAMPLES = [
    build({"a": np.ones((2, 3), np.float32), "b": np.ones(3, np.int32)}, {"k": "v"}),
    build(
        {"s": np.float64(1).reshape(()), "e": np.zeros((3, 0), np.float32), "h": encode([1, 2, 3], "BF16")}, padding=5
    ),
    build({}, {"format": "pt", "step": "7"}),
    build({f"model.layers.{i}.weight": encode([i], "F16") for i in range(8)}),
    with_header(
        b'{"a":["F32",[2],[0,8]],"\\u00e9\\n":{"dtype":"U8","shape":[0],"data_offsets":[8,8],"x":null}}', bytes(8)
    ),
]
# Bits of JSON, of headers and of UTF-8, to be put where they do harm.
TOKENS = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b"0",
        b"-",
        b"1e3",
        b".5",
        b"null",
        b"true",
        b"NaN",
        b" ",
        b"\n",
    ),
    *(b"\0", b"\xff", b"\xc3\xa9", b"\\u0041", b"\\ud800", b'"a"', b'"a":', b'"dtype"', b'"shape"', b'"F32"', b'"F64"'),
    *(b'"__metadata__":{"k":"v"},', b'"x":{},', b"18446744073709551615", b"18446744073709551616", b"[" * 200),
]
PLACES = st.integers(0, 400)
MUTATIONS = st.one_of(
    st.tuples(st.just("flip"), PLACES, st.integers(0, 7)),
    st.tuples(st.just("set"), PLACES, st.integers(0, 255)),
    st.tuples(st.just("insert"), PLACES, st.sampled_from(TOKENS) | st.binary(min_size=1, max_size=4)),
    st.tuples(st.just("replace"), PLACES, st.sampled_from(TOKENS)),
    st.tuples(st.just("delete"), PLACES, st.integers(1, 30)),
    st.tuples(st.just("repeat"), PLACES, st.integers(1, 60)),
    st.tuples(st.just("cut"), PLACES, st.just(0)),
)


def mutated(content, mutations):
    content = bytearray(content)
    for what, place, value in mutations:
        at = place % (len(content) + 1)
        if what == "flip":
            content[at : at + 1] = bytes(byte ^ (1 << value) for byte in content[at : at + 1])
        elif what == "set":
            content[at : at + 1] = bytes([value])
        elif what == "insert":
            content[at:at] = value
        elif what == "replace":
            content[at : at + len(value)] = value
        elif what == "delete":
            del content[at : at + value]
        elif what == "repeat":
            content[at:at] = content[at : at + value]
        else:
            del content[at:]
    return bytes(content)


def library(path):
    """What the library finds in a file: types and shapes by name; None if it refuses it."""
    try:
        with safe_open(path, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (SafetensorError, OSError):
        return None


def ours(path):
    try:
        return {tensor.name: (tensor.dtype, tensor.shape) for tensor in read_shard(path).tensors}
    except GradtoolError:
        return None


def agree(folder, content):
    path = folder.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(content)
    assert ours(path) == library(path)


@PARTS
def test_mutated_files_get_the_librarys_verdict(tmp_path_factory, part):
    @examples(600, part)
    @given(content=st.sampled_from(SAMPLES), mutations=st.lists(MUTATIONS, min_size=1, max_size=4))
    def check(content, mutations):
        agree(tmp_path_factory, mutated(content, mutations))

    check()


@PARTS
def test_mutated_headers_of_the_right_length_get_the_librarys_verdict(tmp_path_factory, part):
    @examples(600, part)
    @given(content=st.sampled_from(SAMPLES), mutations=st.lists(MUTATIONS, min_size=1, max_size=3))
    def check(content, mutations):
        length = int.from_bytes(content[:8], "little")
        agree(tmp_path_factory, with_header(mutated(content[8 : 8 + length], mutations), content[8 + length :]))

    check()


@given(content=st.sampled_from(SAMPLES), length=st.integers(0, 400) | st.integers(0, 2**64 - 1))
@example(content=SAMPLES[0], length=2**63)
@example(content=SAMPLES[0], length=2**64 - 1)
def test_a_wrong_length_of_the_header_gets_the_librarys_verdict(tmp_path_factory, content, length):
    agree(tmp_path_factory, length.to_bytes(8, "little") + content[8:])


# Anything that JSON can hold, names that mean something to a file system among it.
FILES = st.text(max_size=5) | st.sampled_from(
    [
        *("1.safetensors", "2.safetensors", "m.safetensors.index.json", "../1.safetensors", "/etc/passwd"),
        *("./1.safetensors", "sub/1.safetensors", "..", ".", "", "1.safetensors/", "1.safetensors\0", "\ud800"),
        *("x" * 5000, "\x1b[2J", "~"),
    ]
)
NAMES = st.text(max_size=3) | st.sampled_from(
    ["a", "b", "c", "__metadata__", "weight_map", "", "\udfff", "\0", "\x1b]"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | FILES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
MAPS = st.dictionaries(NAMES, FILES | ANYTHING, max_size=4) | st.just({"a": "1.safetensors", "b": "2.safetensors"})
INDEX = b'{"metadata":{"total_size":16},"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}'


def open_index(folder, text):
    """Open an index beside two shards. If it is not refused by an error of ours, it maps them as they are."""
    base = folder.getbasetemp() / "fuzzed"
    if not base.exists():
        for name, shard in (("a", "1"), ("b", "2")):
            write(base / f"{shard}.safetensors", {name: np.ones(2, np.float32)})
    index = base / "m.safetensors.index.json"
    index.write_bytes(text)
    try:
        (opened,) = open_sets([index])
    except GradtoolError:
        return False
    weight_map = json.loads(text)["weight_map"]
    assert weight_map.items() <= {"a": "1.safetensors", "b": "2.safetensors"}.items()
    assert [Path(shard.name) for shard in opened.shards] == [base / file for file in weight_map.values()]
    return True


@PARTS
def test_made_up_indexes_raise_nothing_but_our_own_errors(tmp_path_factory, part):
    @examples(400, part)
    @given(document=MAPS.map(lambda one: {"weight_map": one}) | ANYTHING, escaped=st.booleans())
    def check(document, escaped):
        open_index(tmp_path_factory, json.dumps(document, ensure_ascii=escaped).encode(errors="surrogatepass"))

    check()


@PARTS
def test_mutated_indexes_raise_nothing_but_our_own_errors(tmp_path_factory, part):
    @examples(600, part)
    @given(mutations=st.lists(MUTATIONS, max_size=4))
    @example(mutations=[])
    def check(mutations):
        opened = open_index(tmp_path_factory, mutated(INDEX, mutations))
        assert opened or mutations

    check()


@given(pairs=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("12")), min_size=1, max_size=4))
def test_a_name_is_mapped_once_or_the_index_is_refused(tmp_path_factory, pairs):
    text = ",".join(f'"{name}":"{shard}.safetensors"' for name, shard in pairs)
    opened = open_index(tmp_path_factory, b'{"weight_map":{%b}}' % text.encode())
    assert opened == (sorted(pairs) in ([("a", "1")], [("b", "2")], [("a", "1"), ("b", "2")]))
