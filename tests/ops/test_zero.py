import math

import numpy as np
import pytest
from support import bits_of, build, encode, read, snapshot, with_header, write, write_index

from gradtool import BadInputError, zero
from gradtool.store.format.header import read_shard


@pytest.fixture
def odd(tmp_path):
    """All kinds of values, in types that carry gradients and types that do not."""
    tensors = {
        "a": encode([1, math.nan, -math.inf, -0.0], "F32"),
        "ids": np.arange(5, dtype=np.int32),
        "b": encode([3, math.nan], "BF16"),
        "e": np.zeros((0, 3), np.float32),
        "s": np.array(7.0),
        "f8": encode([1, math.nan, 448], "F8_E4M3"),
    }
    return write(tmp_path / "x.safetensors", tensors, {"step": "7"}, padding=5), tensors


def test_every_element_becomes_plus_zero_and_nothing_else_changes(odd):
    path, tensors = odd
    result = zero(path)
    expected = {name: np.zeros_like(array) for name, array in tensors.items()}
    assert path.read_bytes() == build(expected, {"step": "7"}, padding=5)
    assert (result.call.tensors, result.call.elements, result.output.files_written) == (6, 15, 1)
    assert result.call.bytes == sum(array.nbytes for array in tensors.values())
    assert result.output.bytes_written == path.stat().st_size - result.call.bytes


def test_tensors_that_are_not_selected_stay_byte_for_byte(odd):
    path, tensors = odd
    zero(path, exclude=["^a$", "ids", "f8"])
    changed = {name: np.zeros_like(tensors[name]) for name in ("b", "e", "s")}
    assert path.read_bytes() == build(tensors | changed, {"step": "7"}, padding=5)


def test_types_below_a_byte_are_zeroed(tmp_path):
    path = tmp_path / "x"
    header = {
        "a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        "b": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [2, 5]},
        "c": {"dtype": "U8", "shape": [1], "data_offsets": [5, 6]},
    }
    path.write_bytes(with_header(header, b"abcdef"))
    zero(path, exclude=["c"])
    assert path.read_bytes() == with_header(header, b"\0\0\0\0\0f")


def test_what_is_zeroed_takes_no_space(tmp_path):
    arrays = {"keep": np.ones(100_000, np.float32), "big": np.ones(10_000_000, np.float32)}
    path = write(tmp_path / "x", arrays)
    result = zero(path, include=["big"])
    if path.stat().st_blocks * 512 > 40_000_000:
        pytest.skip("this file system has no holes")
    assert path.stat().st_blocks * 512 < 600_000
    assert result.output.bytes_written < 500_000
    assert not read(path)["big"].any()
    assert read(path)["keep"].tobytes() == arrays["keep"].tobytes()


def test_all_shards_of_a_set_and_several_sets_are_zeroed(tmp_path):
    write_index(tmp_path / "set", {"1.safetensors": {"a": np.ones(3)}, "2.safetensors": {"b": np.ones(3)}})
    other = write(tmp_path / "other", {"a": np.ones(2)})
    assert zero([tmp_path / "set", other]).output.files_written == 3
    for file in (tmp_path / "set" / "1.safetensors", tmp_path / "set" / "2.safetensors", other):
        assert not any(array.any() for array in read(file).values())


def test_files_without_a_zeroed_element_are_not_touched(tmp_path):
    write(tmp_path / "1.safetensors", {"a": np.ones(3), "e": np.zeros(0)})
    write(tmp_path / "2.safetensors", {"b": np.ones(3), "f": np.zeros(0)})
    before = snapshot(tmp_path)
    assert zero(tmp_path, include=["a", "e", "f"]).output.files_written == 1
    after = snapshot(tmp_path)
    assert after[tmp_path / "2.safetensors"] == before[tmp_path / "2.safetensors"]
    assert zero(tmp_path, include=["e", "f"]).output.files_written == 0
    assert snapshot(tmp_path) == after


def test_elsewhere_every_file_arrives_and_the_index_with_them(tmp_path):
    shards = {"1.safetensors": {"a": np.ones(3)}, "2.safetensors": {"b": np.ones(3)}}
    index = write_index(tmp_path / "set", shards)
    before = snapshot(tmp_path)
    result = zero(index, include=["a"], output_dir=tmp_path / "out")
    assert result.output.files_written == 2
    assert {path: kept for path, kept in snapshot(tmp_path).items() if path in before} == before
    assert (tmp_path / "out" / index.name).read_bytes() == index.read_bytes()
    assert not read(tmp_path / "out" / "1.safetensors")["a"].any()
    assert (tmp_path / "out" / "2.safetensors").read_bytes() == (tmp_path / "set" / "2.safetensors").read_bytes()
    zero(tmp_path / "set" / "1.safetensors", output=tmp_path / "one")
    assert not read(tmp_path / "one")["a"].any()


def test_a_dry_run_writes_nothing_and_says_how_much_it_would_be(odd):
    path, _ = odd
    before = snapshot(path.parent)
    result = zero(path, dry_run=True)
    assert snapshot(path.parent) == before
    assert (result.call.tensors, result.output.files_written, result.output.dry_run) == (6, 0, True)


def test_many_small_tensors_with_kept_ones_between_them(tmp_path):
    arrays = {f"t{i}": encode(np.arange(1, 38) + i, "BF16") for i in range(2000)}
    path = write(tmp_path / "x", arrays)
    zero(path, include=["[02468]$"])
    for i, (name, array) in enumerate(read(path).items()):
        assert np.array_equal(bits_of(array), bits_of(arrays[name]) * (i % 2)), name


def test_bad_input_changes_nothing(tmp_path):
    write(tmp_path / "x", {"a": np.ones(3)})
    (tmp_path / "bad").write_bytes((tmp_path / "x").read_bytes()[:-1])
    before = snapshot(tmp_path)
    with pytest.raises(BadInputError, match="truncated"):
        zero([tmp_path / "x", tmp_path / "bad"])
    with pytest.raises(BadInputError, match="matches no tensor"):
        zero(tmp_path / "x", include=["nope"])
    assert snapshot(tmp_path) == before


SUM = {"gradtool.weight_key": "n", "gradtool.weighted": "sum"}
PLAIN = {"n": "5", "m": "6", "format": "pt"}


@pytest.mark.parametrize("mode", ["replace", "inplace"])
@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        (PLAIN | SUM, {"m": "6", "format": "pt"}, 1),
        (PLAIN, PLAIN, 0),
        (SUM, {}, 0),
        ({"gradtool.weighted": "sum"}, None, 0),
    ],
)
def test_what_is_zeroed_has_no_total(tmp_path, mode, old, new, count):
    path = write(tmp_path / "x", {"a": np.ones(3), "ids": np.arange(3, dtype=np.int32)}, old, padding=7)
    result = zero(path, exclude=["ids"], write=mode)
    zeroed = build({"a": np.zeros(3), "ids": np.arange(3, dtype=np.int32)}, old, padding=7)
    shard = read_shard(path)
    assert list(shard.metadata.items()) == list((old if new is None else new).items())
    assert path.read_bytes()[shard.data_start :] == zeroed[shard.data_start :]
    assert old != new or path.read_bytes() == zeroed
    assert [(one.code, one.message) for one in result.call.warnings] == [
        ("weight-dropped", "total weight removed, because it does not match the new content: 'n' = '5'")
    ] * count


@pytest.mark.parametrize("mode", ["replace", "inplace"])
def test_what_is_zeroed_in_part_has_no_total_any_more(tmp_path, mode):
    shards = {"1.safetensors": {"a": np.ones(3)}, "2.safetensors": {"b": np.ones(3)}}
    for name, tensors in shards.items():
        write(tmp_path / "set" / name, tensors, PLAIN | SUM)
    result = zero(tmp_path / "set", include=["a"], write=mode)
    assert [read_shard(tmp_path / "set" / name).metadata for name in shards] == [{"m": "6", "format": "pt"}] * 2
    assert [one.code for one in result.call.warnings] == ["weight-dropped"]
    assert read(tmp_path / "set" / "2.safetensors")["b"].tolist() == [1, 1, 1]


def test_each_set_has_a_total_of_its_own(tmp_path):
    paths = [write(tmp_path / name, {name: np.ones(3)}, PLAIN | SUM) for name in ("a", "b")]
    plain = write(tmp_path / "c", {"c": np.ones(3)}, PLAIN)
    paths.append(write(tmp_path / "d", {"d": np.ones(3), "a": np.ones(2)}, PLAIN | SUM))
    result = zero([*paths, plain], include=["^a$"])
    assert [read_shard(path).metadata.get("n") for path in (*paths, plain)] == [None, "5", None, "5"]
    assert [one.file for one in result.call.warnings] == [str(paths[0]), str(paths[2])]


def test_progress_says_that_it_writes(tmp_path):
    path, calls = write(tmp_path / "x", {"a": encode([3, 4], "F32")}), []
    zero(path, progress=lambda *call: calls.append(call))
    assert {title for title, _, _ in calls} == {"writing"}
