import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support import NUMPY_TYPES, ONES, VALUE_TYPES, encode, write, write_index

import gradtool
from gradtool import BadInputError
from gradtool.store.format import limits
from gradtool.store.format.gradset import open_sets
from gradtool.store.format.header import read_shard
from gradtool.store.format.layout import NewSet, lay_out, new_tensor
from gradtool.store.format.selection import select
from gradtool.store.format.tensors import Tensor

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(VALUE_TYPES), SHAPES), max_size=6)


def written(path, tensors, metadata):
    """A layout, and its file with ones for data."""
    layout = lay_out(path, [new_tensor(name, *one) for name, one in tensors.items()], metadata)
    path.write_bytes(layout.header + b"\1" * (layout.shard.size - len(layout.header)))
    return layout


@given(tensors=TENSORS, metadata=st.dictionaries(NAMES, NAMES, max_size=3))
def test_the_library_opens_what_is_laid_out_and_finds_it_all(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.getbasetemp() / "layout.safetensors"
    layout = written(path, tensors, metadata)
    with safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == set(tensors)
        assert (file.metadata() or {}) == metadata
        found = {name: file.get_slice(name) for name in tensors}
        assert {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in found.items()} == tensors
    shard = read_shard(path)
    assert (shard.tensors, shard.data_start, shard.size) == (
        layout.shard.tensors, layout.shard.data_start, layout.shard.size,
    )  # fmt: skip
    assert shard.metadata == layout.shard.metadata == metadata


@given(tensors=TENSORS, metadata=st.dictionaries(NAMES, NAMES, max_size=3))
def test_headers_are_padded_to_eight_bytes_and_tensors_follow_in_order_without_a_hole(tensors, metadata):
    layout = lay_out(Path("x"), [new_tensor(name, *one) for name, one in tensors.items()], metadata)
    assert int.from_bytes(layout.header[:8], "little") == len(layout.header) - 8
    assert layout.shard.data_start == len(layout.header)
    assert len(layout.header) % 8 == 0
    assert [tensor.name for tensor in layout.shard.tensors] == list(tensors)
    ends = [layout.shard.data_start, *(tensor.end for tensor in layout.shard.tensors)]
    assert [tensor.begin for tensor in layout.shard.tensors] == ends[:-1]
    assert layout.shard.size == ends[-1]


def test_the_header_is_exactly_this():
    layout = lay_out(Path("x"), [new_tensor("ü", "BF16", (2, 3)), new_tensor("s", "F64", ())], {"note": "日本"})
    text = (
        '{"__metadata__":{"note":"日本"},"ü":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},'
        '"s":{"dtype":"F64","shape":[],"data_offsets":[12,20]}}'
    ).encode()
    text += b" " * (-len(text) % 8)
    assert layout.header == len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize(("shape", "elements"), [((), 1), ((0, 3), 0), ((2, 0), 0), ((2, 3), 6)])
def test_a_new_tensor_takes_the_bytes_of_its_elements(dtype, shape, elements):
    tensor = new_tensor("a", dtype, shape)
    assert (tensor.elements, tensor.nbytes) == (elements, elements * NUMPY_TYPES[dtype].itemsize)


def test_offsets_are_made_anew(tmp_path):
    first = written(tmp_path / "1", {"a": ("F32", (3,)), "b": ("F32", ())}, {})
    again = lay_out(tmp_path / "2", reversed(first.shard.tensors), {"step": "7"})
    entries = json.loads(again.header[8:])
    assert {name: one["data_offsets"] for name, one in entries.items() if name != "__metadata__"} == {
        "b": [0, 4], "a": [4, 16],
    }  # fmt: skip


def test_without_metadata_there_is_no_entry_for_it(tmp_path):
    layout = written(tmp_path / "x", {}, {})
    assert layout.header == (8).to_bytes(8, "little") + b"{}      "
    assert read_shard(tmp_path / "x").tensors == ()


def test_a_file_that_could_not_be_read_again_is_not_laid_out(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MAX_TENSORS", 3)
    tensors = [new_tensor(name, "F32", (1,)) for name in "abcd"]
    written(tmp_path / "x", dict.fromkeys("abc", ("F32", (1,))), {})
    assert len(read_shard(tmp_path / "x").tensors) == 3
    why = "nothing written, because the new header would be invalid: the header exceeds the limit of 3 tensors"
    with pytest.raises(BadInputError, match=why):
        lay_out(tmp_path / "x", tensors, {})


@pytest.mark.parametrize(
    ("names", "metadata", "why"),
    [
        (["a", "__metadata__"], {}, "has this name"),
        (["a", "__metadata__"], {"step": "7"}, "has this name"),
        (["a", "b", "a"], {}, "has this name"),
        (["a", "n" * 4097], {}, "exceeds the limit of 4,096 characters (it has 4,097)"),
        (["a", "\udcff"], {}, "nothing written, because the new header would be invalid: is not a valid safetensors"),
        (
            ["a"],
            {"\udcff": "1"},
            "nothing written, because the new header would be invalid: is not a valid safetensors",
        ),
        (["a"], {"step": 7}, "nothing written, because the new header would be invalid: is not a valid safetensors"),
    ],
)
def test_a_header_that_the_library_would_refuse_is_not_made(tmp_path, names, metadata, why):
    with pytest.raises(BadInputError) as caught:
        lay_out(tmp_path / "x", [new_tensor(name, "F32", (1,)) for name in names], metadata)
    assert why in caught.value.problems[0].message
    assert caught.value.problems[0].file == str(tmp_path / "x")


def test_a_file_at_the_same_place_does_not_speak_for_a_new_header(tmp_path):
    written(tmp_path / "x", {"a": ("F32", (1,))}, {})
    with pytest.raises(BadInputError, match="would be invalid"):
        lay_out(tmp_path / "x", [Tensor("a", "F99", (1,), 0, 4)], {})


def test_every_header_is_made_where_it_is_judged():
    package = Path(gradtool.__file__).parent
    makers = [str(path.relative_to(package)) for path in package.rglob("*.py") if '(8, "little")' in path.read_text()]
    # A digest covers the lengths of names, in the same form.
    assert sorted(makers) == ["ops/digest.py", "store/format/header.py"]


NEW = Path("new")


def selected(folder, **elements):
    """Tensors of these numbers of elements, of one byte each where they are created as F8."""
    sets = open_sets([write(folder / "grad", {name: np.zeros(count, np.float32) for name, count in elements.items()})])
    return select(sets)


def names_in(files):
    return {str(path): [one.name for one in tensors] for path, tensors in files.items()}


@pytest.mark.parametrize(
    ("most", "parts"),
    [
        (1000, ["abcdef"]),
        (100, ["abcdef"]),
        (99, ["abcde", "f"]),
        (50, ["ab", "cde", "f"]),
        # A larger tensor gets a file at once; the open one is filled further, and comes when it is full.
        (44, ["c", "ab", "def"]),
        (40, ["c", "ab", "def"]),
        (39, ["a", "c", "bde", "f"]),
        (9, ["a", "b", "c", "f", "de"]),
        (1, ["a", "b", "c", "d", "f", "e"]),
    ],
)
def test_a_file_takes_tensors_in_order_as_huggingface_hub_has_it(tmp_path, most, parts):
    """Expected is what `huggingface_hub.split_state_dict_into_shards_factory` (2.4.0) makes of these sizes."""
    tensors = selected(tmp_path, a=10, b=30, c=45, d=5, e=0, f=10)
    files = NewSet(NEW, "F8_E4M3", shard_bytes=most).files(tensors)
    assert ["".join(names) for names in names_in(files).values()] == parts
    assert sorted(one.elements for part in files.values() for one in part) == [0, 5, 10, 10, 30, 45]


def test_files_are_called_as_save_pretrained_calls_them(tmp_path):
    tensors = selected(tmp_path, a=2, b=1, c=1)
    new = NewSet(NEW, "F32", shard_bytes=8)
    assert names_in(new.files(tensors)) == {
        "new/model-00001-of-00002.safetensors": ["a"], "new/model-00002-of-00002.safetensors": ["b", "c"],
    }  # fmt: skip
    path, text = new.index_over(new.files(tensors))
    assert path == NEW / "model.safetensors.index.json"
    assert json.loads(text) == {
        "metadata": {"total_size": 16},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }
    assert list(new.targets(tensors)) == [*map(Path, names_in(new.files(tensors))), path]


def test_a_single_file_needs_no_index(tmp_path):
    tensors = selected(tmp_path, a=2, b=1)
    for most, dtype in ((12, "F32"), (6, "BF16")):
        new = NewSet(NEW, dtype, shard_bytes=most)
        assert names_in(new.files(tensors)) == {"new/model.safetensors": ["a", "b"]}
        assert new.targets(tensors) == [NEW / "model.safetensors"]
    alone = NewSet(NEW, "F32")
    assert (alone.targets(tensors), alone.folder, NewSet(NEW, "F32", shard_bytes=1).folder) == ([NEW], None, NEW)


def test_files_are_those_of_another_set_in_its_order(tmp_path):
    like = {"y.safetensors": {"b": ONES, "a": ONES}, "x.safetensors": {"d": ONES, "c": ONES}}
    index = write_index(tmp_path / "like", like)
    index.rename(index.with_name("grads.safetensors.index.json"))
    tensors = selected(tmp_path, a=1, b=2, c=3, d=4)
    new = NewSet(NEW, "F64", open_sets([tmp_path / "like"])[0])
    files = new.files(tensors)
    assert names_in(files) == {"new/y.safetensors": ["b", "a"], "new/x.safetensors": ["d", "c"]}
    # The shapes are those of the gradient.
    assert [(one.dtype, one.shape) for part in files.values() for one in part] == [
        ("F64", (2,)), ("F64", (1,)), ("F64", (4,)), ("F64", (3,)),
    ]  # fmt: skip
    path, text = new.index_over(files)
    assert (path, json.loads(text)["metadata"]) == (NEW / "grads.safetensors.index.json", {"total_size": 80})


def test_a_file_that_would_have_no_tensor_is_left_out(tmp_path):
    write_index(tmp_path / "like", {"1.safetensors": {"a": ONES}, "2.safetensors": {"b": ONES}})
    new = NewSet(NEW, "F32", open_sets([tmp_path / "like"])[0])
    files = new.files(selected(tmp_path, b=1))
    assert names_in(files) == {"new/2.safetensors": ["b"]}
    assert json.loads(new.index_over(files)[1])["weight_map"] == {"b": "2.safetensors"}
    with pytest.raises(BadInputError, match="the gradients have no tensor"):
        new.files([])


def test_a_set_without_an_index_gives_none(tmp_path):
    for name in ("2", "1"):
        write(tmp_path / "like" / f"{name}.safetensors", {name: ONES})
    tensors = selected(tmp_path, **{"1": 1, "2": 1})
    for path, targets in (("like", ["1.safetensors", "2.safetensors"]), ("grad", ["grad"])):
        new = NewSet(NEW, "F32", open_sets([tmp_path / path])[0])
        assert new.targets(tensors) == [NEW / name for name in targets]


def test_every_tensor_that_the_other_set_does_not_have_is_named(tmp_path):
    like = write(tmp_path / "like", {"b": encode([1], "F32")})
    with pytest.raises(BadInputError) as caught:
        NewSet(NEW, "F32", open_sets([like])[0]).files(selected(tmp_path, a=1, b=1, c=1))
    assert [(one.code, one.file, one.tensor) for one in caught.value.problems] == [
        ("extra-tensor", str(tmp_path / "grad"), "a"), ("extra-tensor", str(tmp_path / "grad"), "c"),
    ]  # fmt: skip
    assert caught.value.problems[0].message == (f"is not in {like} (shard_like)")
