import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from support import write, write_index

from gradtool import BadInputError, SystemRefusedError, UsageError
from gradtool.store.format import gradset
from gradtool.store.format.paths import read_list
from gradtool.store.format.selection import check_dtypes, select

ONES = np.ones(2, np.float32)


def open_sets(paths):
    return gradset.open_sets(paths if isinstance(paths, list) else [paths])


def names(sets):
    return [(shard.file_name, tensor.name) for one in sets for shard in one.shards for tensor in shard.tensors]


def test_a_file_is_a_set(tmp_path):
    path = write(tmp_path / "any.name", {"a": ONES, "b": ONES})
    assert names(open_sets(path)) == [("any.name", "a"), ("any.name", "b")]


def test_a_folder_without_an_index_is_its_files_in_name_order(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.safetensors", {name: ONES})
    write(tmp_path / ".hidden.safetensors", {"h": ONES})
    write(tmp_path / "other.bin", {"o": ONES})
    assert [name for name, _ in names(open_sets(tmp_path))] == ["a.safetensors", "b.safetensors", "c.safetensors"]


def test_an_index_is_its_shards_and_so_is_its_folder(tmp_path):
    index = write_index(tmp_path, {"2.safetensors": {"a": ONES}, "1.safetensors": {"b": ONES, "c": ONES}})
    write(tmp_path / "consolidated.safetensors", {"a": ONES})
    expected = [("2.safetensors", "a"), ("1.safetensors", "b"), ("1.safetensors", "c")]
    assert names(open_sets(index)) == names(open_sets(tmp_path)) == expected
    assert open_sets(tmp_path)[0].index == index


def test_two_indexes_in_a_folder_are_ambiguous(tmp_path):
    write_index(tmp_path, {"1.safetensors": {"a": ONES}})
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(BadInputError, match="2 indexes"):
        open_sets(tmp_path)


def test_a_folder_without_files_is_bad_input(tmp_path):
    with pytest.raises(BadInputError, match=r"no \.safetensors file"):
        open_sets(tmp_path)


def test_no_path_is_a_usage_error():
    with pytest.raises(UsageError, match="no path"):
        open_sets([])


@pytest.mark.parametrize(
    ("weight_map", "why"),
    [
        (
            {"a": "1.safetensors", "z": "1.safetensors"},
            "'z': the index maps it to 1.safetensors, which does not contain",
        ),
        (
            {"a": "1.safetensors", "b": "1.safetensors"},
            "'b': the index maps it to 1.safetensors, which does not contain",
        ),
        ({"a": "1.safetensors", "b": "3.safetensors"}, "the shard 3.safetensors, which does not exist"),
        ({"a": "2.safetensors", "b": "1.safetensors"}, "does not contain it"),
        ({"a": "1.safetensors", "b": "2.safetensors"}, "'c': is in 2.safetensors, but the index does not map it"),
        (
            {"a": "1.safetensors", "x": "1.safetensors", "y": "1.safetensors"},
            "the index maps 'x', 'y' to 1.safetensors, which does not contain them",
        ),
        ({"a": "../1.safetensors"}, "'a': .*not the name of a file beside the index"),
        ({"a": "/etc/passwd"}, "'a': .*not the name of a file beside the index"),
        ({"a": "sub/1.safetensors"}, "not the name of a file beside the index"),
        ({"a": ".."}, "not the name of a file beside the index"),
        ({"a": 7}, "not the name of a file beside the index"),
        (["a"], "not a valid index"),
        ("text", "not a valid index"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_bad_input(tmp_path, weight_map, why):
    shards = {"1.safetensors": {"a": ONES}, "2.safetensors": {"b": ONES, "c": ONES}}
    index = write_index(tmp_path, shards, weight_map)
    with pytest.raises(BadInputError, match=why) as caught:
        open_sets(index)
    assert str(index) in str(caught.value)
    assert caught.value.problems[0].code in ("input", "missing-file")


@pytest.mark.parametrize("file", ["x\0", "x\ud800", "", "."])
def test_a_shard_whose_name_the_system_cannot_take_is_bad_input(tmp_path, file):
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(BadInputError, match="not the name of a file beside the index"):
        open_sets(index)


def test_an_index_that_maps_nothing_or_is_a_fifo_is_bad_input(tmp_path):
    index = tmp_path / "m.safetensors.index.json"
    index.write_text('{"weight_map": {}}')
    with pytest.raises(BadInputError, match="maps no tensor"):
        open_sets(index)
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(BadInputError, match="not a regular file"):
        open_sets(index)


def test_one_file_under_two_names_in_an_index_is_bad_input(tmp_path):
    index = write_index(tmp_path, {"1.safetensors": {"a": ONES}}, {"a": "1.safetensors", "b": "2.safetensors"})
    os.link(tmp_path / "1.safetensors", tmp_path / "2.safetensors")
    with pytest.raises(BadInputError, match="same file"):
        open_sets(index)


@pytest.mark.parametrize("text", [" ", "{", "[]", "{}", "[" * 100_000, '{"weight_map": null}', "\x00"])
def test_an_index_that_is_none_is_bad_input(tmp_path, text):
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(BadInputError, match="not a valid index"):
        open_sets(index)


def test_an_index_that_names_a_tensor_twice_is_bad_input(tmp_path):
    write(tmp_path / "1.safetensors", {"a": ONES})
    index = tmp_path / "m.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "1.safetensors", "a": "1.safetensors"}}')
    with pytest.raises(BadInputError, match="the key 'a' twice"):
        open_sets(index)


def test_one_name_in_two_shards_of_a_set_is_bad_input(tmp_path):
    for name in ("1", "2"):
        write(tmp_path / f"{name}.safetensors", {"a": ONES})
    with pytest.raises(BadInputError, match="'a': is in 1.safetensors too"):
        open_sets(tmp_path)
    assert len(open_sets([tmp_path / "1.safetensors", tmp_path / "2.safetensors"])) == 2


def test_the_same_file_twice_is_bad_input_by_whatever_name(tmp_path):
    path = write(tmp_path / "a.safetensors", {"a": ONES})
    (tmp_path / "link").symlink_to(path)
    os.link(path, tmp_path / "hard")
    for other in (path, tmp_path / "link", tmp_path / "hard", tmp_path):
        with pytest.raises(BadInputError, match="named twice") as caught:
            open_sets([path, other])
        assert caught.value.problems[0].code == "duplicate-file"


@pytest.mark.parametrize("separator", ["\n", "\0"])
def test_paths_come_from_a_file(tmp_path, separator):
    awkward = "b c" if separator == "\n" else "b\nc"
    paths = [str(write(tmp_path / name, {name: ONES})) for name in ("a", awkward)]
    (tmp_path / "list").write_text(separator.join(paths) + separator)
    assert read_list(str(tmp_path / "list")).paths == paths
    assert len(open_sets(paths)) == 2


def test_paths_come_from_standard_input(tmp_path, monkeypatch):
    path = write(tmp_path / "a", {"a": ONES})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(os.fsencode(path) + b"\0")))
    assert read_list("-").paths == [str(path)]


def test_an_empty_list_of_paths_is_bad_input(tmp_path):
    (tmp_path / "list").write_text("\n\n")
    with pytest.raises(BadInputError, match="lists no paths"):
        read_list(str(tmp_path / "list"))


def chosen(sets, **patterns):
    return [one.tensor.name for one in select(sets, **patterns)]


def test_patterns_search_in_names(tmp_path):
    sets = open_sets(write(tmp_path / "x", dict.fromkeys(("l.0.weight", "l.0.bias", "l.1.weight", "head"), ONES)))
    assert chosen(sets) == ["l.0.weight", "l.0.bias", "l.1.weight", "head"]
    assert chosen(sets, include=["weight"]) == ["l.0.weight", "l.1.weight"]
    assert chosen(sets, include=["weight", "^head$"]) == ["l.0.weight", "l.1.weight", "head"]
    assert chosen(sets, exclude=[r"\.0\."]) == ["l.1.weight", "head"]
    assert chosen(sets, include=[r"^l\."], exclude=["bias"]) == ["l.0.weight", "l.1.weight"]


@pytest.mark.parametrize("patterns", [{"include": ["nope"]}, {"include": ["a", "nope"]}, {"exclude": ["nope"]}])
def test_a_pattern_that_matches_nothing_is_bad_input(tmp_path, patterns):
    sets = open_sets(write(tmp_path / "x", {"a": ONES}))
    with pytest.raises(BadInputError, match="nope\\S matches no tensor"):
        select(sets, **patterns)


def test_patterns_that_leave_nothing_are_bad_input(tmp_path):
    with pytest.raises(BadInputError, match="leave no tensor"):
        select(open_sets(write(tmp_path / "x", {"a": ONES})), include=["a"], exclude=["a"])


def test_a_pattern_that_is_none_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r'include="\(" is not a regular expression'):
        select(open_sets(write(tmp_path / "x", {"a": ONES})), include=["("])


def test_an_unsupported_type_is_named_with_the_way_out(tmp_path):
    sets = open_sets(write(tmp_path / "x", {"a": ONES, "ids.0": np.ones(2, np.int32)}))
    with pytest.raises(BadInputError, match=r"tensor 'ids.0': unsupported dtype I32.*exclude=\"\^ids\\\\.0\$\""):
        check_dtypes(select(sets), ["F32"])
    check_dtypes(select(sets, exclude=[r"^ids\.0$"]), ["F32"])


def test_an_index_of_a_link_finds_the_shards_beside_the_link(tmp_path):
    blobs = tmp_path / "blobs"
    real = write_index(blobs, {"1.safetensors": {"a": ONES}})
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors.index.json").symlink_to(real)
    (snapshot / "1.safetensors").symlink_to(blobs / "1.safetensors")
    assert Path(open_sets(snapshot)[0].shards[0].name) == snapshot / "1.safetensors"
    assert json.loads(real.read_text())["weight_map"] == {"a": "1.safetensors"}


def test_standard_input_may_be_text_alone(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert read_list("-").paths == ["a", "b"]


def test_without_standard_input_there_are_no_paths_on_it(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(BadInputError, match="standard input: lists no paths"):
        read_list("-")


def test_a_folder_is_no_list_of_paths(tmp_path):
    with pytest.raises(BadInputError, match="is a folder"):
        read_list(str(tmp_path))


@pytest.mark.filterwarnings("error")
def test_odd_patterns_neither_warn_nor_crash(tmp_path):
    sets = open_sets(write(tmp_path / "x", {"[a": ONES}))
    assert chosen(sets, include=["[[a]"]) == ["[a"]
    with pytest.raises(UsageError, match="not a regular expression"):
        select(sets, include=["a{99999999999}"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named_itself(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": ONES})
    path.chmod(0)
    with pytest.raises(SystemRefusedError) as caught:
        open_sets(tmp_path)
    assert caught.value.problems[0].file == str(path)


def test_a_pipe_that_does_not_block_is_read_to_its_end(monkeypatch):
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    texts = [b"\nc\n", b"\nb", b"a"]

    class Poll:
        """Where the reader would wait, something is written, or the end comes."""

        def register(self, *_):
            pass

        def poll(self):
            os.write(writer, texts.pop()) if texts else os.close(writer)

    monkeypatch.setattr("select.poll", Poll)
    with os.fdopen(reader) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert read_list("-").paths == ["a", "b", "c"]
