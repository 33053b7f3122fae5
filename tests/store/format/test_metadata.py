"""Headers with other metadata: what is asked for changes, and not a byte besides."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support import build, with_header, write
from tiers import PARTS, examples

from gradtool import BadInputError, SystemRefusedError
from gradtool.store.format import limits
from gradtool.store.format.header import read_shard
from gradtool.store.format.layout import SPARE, rewritten, with_entries

# A header by hand, with spaces, escapes and a tensor in front of the metadata.
ODD = (
    rb'{ "a\u0062": {"dtype":"U8","shape":[ 1 ],"data_offsets":[0,1]}, "__metadata__" : { "x" : "1" , "\u00e9":"2" } } '
)


def test_only_the_metadata_are_written_anew():
    before, after = ODD.split(b'{ "x" : "1" , "\\u00e9":"2" }')
    assert with_entries(ODD, {"x": "10"}) == before + '{"x":"10","é":"2"}'.encode() + after.rstrip()
    assert with_entries(ODD, {"x": None}) == before + '{"é":"2"}'.encode() + after.rstrip()
    assert with_entries(ODD, {"x": None, "é": None, "new": '"'}) == before + rb'{"new":"\""}' + after.rstrip()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"{}", b'{"__metadata__":{"n":"1"}}'),
        (b"{ }", b'{"__metadata__":{"n":"1"} }'),
        (b'{"__metadata__":null}', b'{"__metadata__":{"n":"1"}}'),
        (b'{"__metadata__":{}}', b'{"__metadata__":{"n":"1"}}'),
        (b'{\n"t":{}}', b'{"__metadata__":{"n":"1"},\n"t":{}}'),
        (b'{"t":{"__metadata__":{}}}', b'{"__metadata__":{"n":"1"},"t":{"__metadata__":{}}}'),
        (rb'{"__metadata\u005f_":{"n":"5"}}', rb'{"__metadata\u005f_":{"n":"1"}}'),
    ],
)
def test_metadata_are_added_where_there_are_none(old, new):
    assert with_entries(old, {"n": "1"}) == new


def test_a_header_that_fits_keeps_its_length_and_another_gets_room_for_the_next_time(tmp_path):
    shard = read_shard(write(tmp_path / "x", {"t": np.ones(3)}, {"n": "224", "k": "v"}))
    old = (tmp_path / "x").read_bytes()[: shard.data_start]
    assert rewritten(shard, {"n": "7"}) == old[:8] + with_entries(old[8:], {"n": "7"}).ljust(len(old) - 8)
    assert rewritten(shard, {"n": None})[:8] == old[:8]
    grown = rewritten(shard, {"longer": "x" * 300})
    assert len(grown) % 8 == 0
    assert len(grown.rstrip()) + SPARE <= len(grown) < len(grown.rstrip()) + SPARE + 8
    assert int.from_bytes(grown[:8], "little") == len(grown) - 8


def test_metadata_beyond_the_limits_of_what_is_read_are_refused(tmp_path, monkeypatch):
    shard = read_shard(write(tmp_path / "x", {"t": np.ones(3)}))
    monkeypatch.setattr(limits.check_length, "__defaults__", (200,))
    with pytest.raises(BadInputError, match=r"the header exceeds the limit of 200 bytes \(it has 3..\)"):
        rewritten(shard, {"long": "x" * 200})


def test_the_header_of_a_file_that_changed_is_not_rewritten(tmp_path):
    shard = read_shard(write(tmp_path / "x", {"t": np.ones(3)}, {"n": "224"}))
    write(tmp_path / "x", {"t": np.ones(4)}, {"n": "224"})
    with pytest.raises(SystemRefusedError, match="changed by another program"):
        rewritten(shard, {"n": "7"})


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
METADATA = st.dictionaries(NAMES, NAMES, max_size=4)


@PARTS
def test_what_is_rewritten_is_read_by_everyone_as_it_is_meant(tmp_path_factory, part):
    path = tmp_path_factory.mktemp("headers") / "x"

    @examples(300, part)
    @given(METADATA | st.none(), METADATA, st.dictionaries(NAMES, st.integers(0, 9), max_size=3), st.booleans())
    def check(metadata, new, tensors, as_ascii):
        arrays = {f"t{name}": np.full(i, i, np.uint8) for name, i in tensors.items()}
        content = build(arrays, metadata)
        start = 8 + int.from_bytes(content[:8], "little")
        text = json.dumps(json.loads(content[8:start]), ensure_ascii=as_ascii).encode()
        path.write_bytes(with_header(text, content[start:]))
        shard = read_shard(path)
        gone = next(iter(metadata), "gone") if metadata else "gone"
        header = rewritten(shard, {gone: None, **new})
        path.write_bytes(header + path.read_bytes()[shard.data_start :])
        kept = {key: text for key, text in (metadata or {}).items() if key != gone or key in new}
        expected = kept | new
        with safe_open(path, "np") as file:
            assert (file.metadata() or {}) == expected
            assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
                name: array.tolist() for name, array in arrays.items()
            }
        assert list(read_shard(path).metadata.items()) == list(expected.items())
        assert [one[:3] for one in read_shard(path).tensors] == [one[:3] for one in shard.tensors]

    check()


@pytest.mark.parametrize("entries", [{"\udcff": "1"}, {"n": "\udcff"}, {"n": 1}])
def test_metadata_that_the_library_would_refuse_are_not_written(tmp_path, entries):
    shard = read_shard(write(tmp_path / "x", {"t": np.ones(3)}))
    with pytest.raises(BadInputError, match="nothing written, because the new header would be invalid"):
        rewritten(shard, entries)
