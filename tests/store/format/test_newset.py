import json
from pathlib import Path

import numpy as np
import pytest
from support import ONES, encode, write, write_index

from gradtool import BadInputError
from gradtool.store.format.gradset import open_sets
from gradtool.store.format.layout import NewSet
from gradtool.store.format.selection import select

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
