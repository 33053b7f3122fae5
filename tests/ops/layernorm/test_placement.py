"""Where the gradients of layers go, to the byte; that they are right is tested in test_backward.py."""

import itertools
import json
import math
import stat

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from support import NUMPY_TYPES, build, encode, read, snapshot, write

from gradtool import BadInputError, UsageError, layernorm_backward, norm, tuning

OUTPUTS = ["X_grad", "scale_grad", "bias_grad"]
METADATA = {"step": "7", "note": "é"}
# What the safetensors library writes from numpy, beside types whose tensors have any number of bytes.
ALIGNED = ("F64", "F32", "F16")


def layer(prefix="", types=("F32", "F32"), shape=(5, 7), seed=0):
    """The tensors of a layer: X of the first type, all else of the second."""
    rng = np.random.default_rng(seed)
    x_dtype, dtype = types
    values = {
        "Y_grad": encode(rng.standard_normal(shape), dtype),
        "X": encode(rng.standard_normal(shape), x_dtype),
        "scale": encode(rng.standard_normal(shape[-1:]), dtype),
    }
    return {prefix + name: array for name, array in values.items()}


def header_of(path):
    content = path.read_bytes()
    return content[: 8 + int.from_bytes(content[:8], "little")]


def begins(path):
    """Where each tensor begins in the file, in the order of the header."""
    raw = header_of(path)
    header = json.loads(raw[8:])
    header.pop("__metadata__", None)
    return {name: len(raw) + entry["data_offsets"][0] for name, entry in header.items()}


def opened(path):
    """The metadata of a file that the safetensors library opens, and in which it sees the tensors that we do."""
    with safe_open(path, framework="numpy") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert shapes == {name: array.shape for name, array in read(path).items()}
        return file.metadata()


def assert_kept(path, tensors):
    found = read(path)
    for name, array in tensors.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes()


def expected_outputs(folder, tensors, **options):
    """The gradients as they are in a file of their own."""
    layernorm_backward(write(folder / "expected" / "x", tensors), output=folder / "expected" / "out", **options)
    return read(folder / "expected" / "out")


def test_gradients_are_added_and_all_else_stays_byte_for_byte(tmp_path):
    tensors = {"ids": np.arange(5, dtype=np.int32)} | layer("n.") | {"odd": np.ones(3, np.uint8), "e": np.zeros((0, 2))}
    path = write(tmp_path / "x", tensors, METADATA, padding=5)
    path.chmod(0o640)
    result = layernorm_backward(path)
    assert sorted(read(path)) == sorted([*tensors, *(f"n.{name}" for name in OUTPUTS)])
    assert_kept(path, tensors | expected_outputs(tmp_path, tensors))
    assert opened(path) == METADATA
    assert (result.output.files_written, result.output.bytes_written) == (1, path.stat().st_size)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_second_run_replaces_the_gradients_of_the_first_and_gives_the_same_bytes(tmp_path):
    path = write(tmp_path / "x", layer("n.") | layer(seed=2), METADATA)
    layernorm_backward(path)
    before = path.read_bytes()
    layernorm_backward(path)
    assert path.read_bytes() == before


def test_outputs_of_the_same_type_and_shape_are_replaced_under_the_same_header(tmp_path):
    own = layer()
    old = {"X_grad": np.ones((5, 7), np.float32), "bias_grad": np.full(7, math.nan, np.float32)}
    tensors = {"bias_grad": old["bias_grad"], "z": np.ones(3), "X_grad": old["X_grad"], **own}
    tensors |= {"a": np.ones(1, np.uint8), "scale_grad": np.zeros(7, np.float32)}
    path = write(tmp_path / "x", tensors, METADATA, padding=3)
    layernorm_backward(path)
    # Not one byte of the header changed, and the new values are where the old ones were.
    assert path.read_bytes() == build(tensors | expected_outputs(tmp_path, own), METADATA, padding=3)


@pytest.mark.parametrize("old", [np.ones((5, 7)), np.ones((7, 5), np.float32), np.arange(3, dtype=np.int32)])
def test_an_output_of_another_type_or_shape_is_replaced(tmp_path, old):
    own = layer()
    path = write(tmp_path / "x", {"X_grad": old, "z": np.ones(3), **own}, METADATA)
    layernorm_backward(path)
    assert sorted(read(path)) == sorted(["z", *own, *OUTPUTS])
    assert_kept(path, own | {"z": np.ones(3)} | expected_outputs(tmp_path, own))
    assert opened(path) == METADATA


def test_the_bias_grad_of_another_kind_of_run_stays(tmp_path):
    path = write(tmp_path / "x", layer())
    layernorm_backward(path)
    before = read(path)["bias_grad"].tolist()
    layernorm_backward(path, kind="rmsnorm")
    assert read(path)["bias_grad"].tolist() == before


@pytest.mark.parametrize("in_place", [False, True])
def test_every_tensor_of_a_file_that_the_library_wrote_stays_aligned(tmp_path, in_place):
    others = {"u": np.ones(3, np.uint8), "h": np.ones(5, np.float16), "b": np.ones(1, bool), "w": np.ones(3, np.int32)}
    for types in itertools.product(ALIGNED, ALIGNED):
        if in_place and types[0] != types[1]:
            continue
        # Gradients are there already for one layer, of a type that does not fit.
        old = {"m.X_grad": np.ones((5, 7), NUMPY_TYPES[ALIGNED[ALIGNED.index(types[0]) - 1]])}
        tensors = layer("n.", types) | layer("m.", types, seed=1) | old | others
        path = tmp_path / "x"
        save_file(tensors, path, METADATA)
        layernorm_backward(path, x_grad_in_place=in_place)
        with safe_open(path, framework="numpy") as file:
            assert file.metadata() == METADATA
            kept = {name for name in tensors if name not in old and not (in_place and name.endswith("Y_grad"))}
            assert set(file.keys()) == kept | {f"{prefix}{name}" for prefix in ("n.", "m.") for name in OUTPUTS}
            for name, begin in begins(path).items():
                array = file.get_tensor(name)
                assert begin % array.itemsize == 0, (types, name)
                assert name not in kept or array.tobytes() == tensors[name].tobytes()


def spread(folder, old=None, **more):
    """Two layers over four shards, and an index that says how large they are; `old` gradients may be there."""
    one, two = layer("a."), layer("b.", shape=(3, 4), seed=1)
    shards = {
        "1.safetensors": {"a.Y_grad": one["a.Y_grad"], "b.X": two["b.X"], "ids": np.arange(3, dtype=np.uint8)},
        "2.safetensors": {"a.X": one["a.X"]},
        "3.safetensors": {"a.scale": one["a.scale"], "b.Y_grad": two["b.Y_grad"], "b.scale": two["b.scale"]},
        "4.safetensors": {"far": np.ones(2)} | (old or {}),
    }
    for name, tensors in shards.items():
        write(folder / name, tensors, {"format": "pt"})
    every = [array for tensors in shards.values() for array in tensors.values()]
    document = {
        "metadata": {"total_size": sum(array.nbytes for array in every), "kept": [1]},
        "weight_map": {name: file for file, tensors in shards.items() for name in tensors},
    } | more
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(document))
    return index, shards


def document_of(index):
    return json.loads(index.read_text())


def assert_valid(index, alone=()):
    """Whether an index tells the truth of its shards, and a later call can work with it."""
    document = document_of(index)
    found = {path.name: read(path) for path in sorted(index.parent.glob("*.safetensors"))}
    mapped = {name: file for file, tensors in found.items() for name in tensors}
    assert document["weight_map"] == mapped
    if "total_size" in document.get("metadata", {}):
        sizes = [array.nbytes for tensors in found.values() for array in tensors.values()]
        assert document["metadata"]["total_size"] == sum(sizes)
    for path in index.parent.glob("*.safetensors"):
        opened(path)
    assert norm(index.parent, exclude=list(alone)).norm > 0


def test_a_layer_spread_over_shards_is_done_and_the_index_follows(tmp_path):
    index, shards = spread(tmp_path / "set")
    before = snapshot(tmp_path)
    result = layernorm_backward(tmp_path / "set")
    assert [row.name for row in result.per_layer] == ["a", "b"]
    assert (result.call.files, result.output.files_written) == (4, 2)
    assert_valid(index, ["ids"])
    document = document_of(index)
    # The gradients are beside their layer's Y_grad, and after what the index had.
    added = {f"a.{name}": "1.safetensors" for name in OUTPUTS} | {f"b.{name}": "3.safetensors" for name in OUTPUTS}
    old = {name: file for file, tensors in shards.items() for name in tensors}
    assert document["weight_map"] == old | added
    assert list(document["weight_map"])[: len(old)] == list(old)
    assert document["metadata"]["kept"] == [1]
    for name, tensors in shards.items():
        assert_kept(tmp_path / "set" / name, tensors)
        assert opened(tmp_path / "set" / name) == {"format": "pt"}
    for name in ("2.safetensors", "4.safetensors"):
        path = tmp_path / "set" / name
        assert snapshot(tmp_path)[path] == before[path]
    every = {name: array for tensors in shards.values() for name, array in tensors.items()}
    for name, array in expected_outputs(tmp_path, every).items():
        assert read(tmp_path / "set" / added[name])[name].tobytes() == array.tobytes()


def test_gradients_that_are_in_some_shard_are_replaced_there(tmp_path):
    old = {"a.X_grad": np.zeros((5, 7), np.float32), "b.bias_grad": np.zeros(9)}
    index, _ = spread(tmp_path / "set", old)
    layernorm_backward(index)
    assert_valid(index, ["ids"])
    weight_map = document_of(index)["weight_map"]
    assert (weight_map["a.X_grad"], weight_map["b.bias_grad"]) == ("4.safetensors",) * 2
    assert weight_map["a.scale_grad"] == "1.safetensors"
    found = read(tmp_path / "set" / "4.safetensors")
    assert list(found)[:2] == ["far", "a.X_grad"]
    assert found["a.X_grad"].any()
    assert found["b.bias_grad"].shape == (4,)


def test_an_index_that_stays_true_is_not_touched(tmp_path):
    index, _ = spread(tmp_path / "set")
    layernorm_backward(index)
    # Not as we would write it.
    index.write_text(json.dumps(document_of(index), indent=7))
    before = snapshot(tmp_path)
    assert layernorm_backward(index).output.files_written == 2
    after = snapshot(tmp_path)
    assert after[index] == before[index]
    assert {path: kept[0] for path, kept in after.items()} == {path: kept[0] for path, kept in before.items()}


@pytest.mark.parametrize("metadata", [{"metadata": {}}, {"metadata": None}, {"note": "é"}])
def test_an_index_without_a_size_gets_none(tmp_path, metadata):
    index, _ = spread(tmp_path / "set", **({"metadata": {}} | metadata))
    layernorm_backward(index)
    document = document_of(index)
    assert {key: value for key, value in document.items() if key != "weight_map"} == {"metadata": {}} | metadata
    assert len(document["weight_map"]) == 14


def test_a_folder_without_an_index_is_a_set(tmp_path):
    index, _ = spread(tmp_path / "set")
    index.unlink()
    assert layernorm_backward(tmp_path / "set").output.files_written == 2
    assert not index.exists()
    assert "a.X_grad" in read(tmp_path / "set" / "1.safetensors")


def test_output_holds_the_gradients_alone(tmp_path):
    path = write(tmp_path / "in" / "x", layer("n.", types=("BF16", "F32")) | {"other": np.ones(3)}, METADATA)
    before = snapshot(tmp_path / "in")
    result = layernorm_backward(path, output=tmp_path / "out")
    assert snapshot(tmp_path / "in") == before
    assert sorted(read(tmp_path / "out")) == sorted(f"n.{name}" for name in OUTPUTS)
    assert read(tmp_path / "out")["n.X_grad"].dtype == NUMPY_TYPES["BF16"]
    opened(tmp_path / "out")
    # The larger elements first, so that all are aligned.
    assert list(begins(tmp_path / "out")) == ["n.scale_grad", "n.bias_grad", "n.X_grad"]
    assert result.output.bytes_written == (tmp_path / "out").stat().st_size


def test_output_dir_holds_the_gradients_alone_and_an_index_of_them(tmp_path):
    index, _ = spread(tmp_path / "set")
    before = snapshot(tmp_path / "set")
    result = layernorm_backward(index, output_dir=tmp_path / "new" / "out")
    assert snapshot(tmp_path / "set") == before
    out = tmp_path / "new" / "out"
    assert sorted(path.name for path in out.iterdir()) == ["1.safetensors", "3.safetensors", index.name]
    assert sorted(read(out / "1.safetensors")) == sorted(f"a.{name}" for name in OUTPUTS)
    assert sorted(read(out / "3.safetensors")) == sorted(f"b.{name}" for name in OUTPUTS)
    assert_valid(out / index.name)
    assert result.output.files_written == 2


def test_a_dry_run_writes_nothing(tmp_path):
    index, _ = spread(tmp_path / "set")
    before = snapshot(tmp_path)
    for options in ({}, {"x_grad_in_place": True}, {"output_dir": tmp_path / "out"}):
        result = layernorm_backward(index, dry_run=True, **options)
        assert (result.output.files_written, result.output.bytes_written, result.layers) == (0, 0, 2)
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "out").exists()


def test_x_grad_takes_the_place_of_y_grad(tmp_path):
    own = layer("n.")
    tensors = {"first": np.ones(3), **own, "last": np.ones(2, np.float16)}
    path = write(tmp_path / "x", tensors, METADATA)
    order = list(begins(path))
    layernorm_backward(path, x_grad_in_place=True)
    expected = expected_outputs(tmp_path, own)
    assert [name for name in begins(path) if name in {*order, "n.X_grad"}] == [
        name.replace("Y_grad", "X_grad") for name in order
    ]
    del tensors["n.Y_grad"]
    assert_kept(path, tensors | expected)
    assert len(read(path)) == len(tensors) + 3
    assert opened(path) == METADATA


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_x_grad_takes_the_place_of_y_grad_and_an_old_one_goes_wherever_it_is(tmp_path, dtype):
    index, shards = spread(tmp_path / "set", {"a.X_grad": np.ones((5, 7), NUMPY_TYPES[dtype])})
    layernorm_backward(index, x_grad_in_place=True)
    assert_valid(index, ["ids"])
    weight_map = document_of(index)["weight_map"]
    assert (weight_map["a.X_grad"], weight_map["b.X_grad"]) == ("1.safetensors", "3.safetensors")
    assert not {"a.Y_grad", "b.Y_grad"} & set(weight_map)
    every = {name: array for tensors in shards.values() for name, array in tensors.items()}
    expected = expected_outputs(tmp_path, every)["a.X_grad"]
    assert read(tmp_path / "set" / "1.safetensors")["a.X_grad"].tobytes() == expected.tobytes()
    assert list(read(tmp_path / "set" / "4.safetensors")) == ["far"]


def test_x_grad_cannot_take_the_place_of_another_type_nor_of_an_input_that_stays(tmp_path):
    path = write(tmp_path / "x", layer(types=("BF16", "F32")))
    before = snapshot(tmp_path)
    with pytest.raises(BadInputError, match="has type F32, so X_grad of BF16 cannot replace it") as caught:
        layernorm_backward(path, x_grad_in_place=True)
    assert (caught.value.problems[0].file, caught.value.problems[0].tensor) == (str(path), "Y_grad")
    with pytest.raises(UsageError, match="cannot be combined with output or output_dir"):
        layernorm_backward(path, x_grad_in_place=True, output=tmp_path / "out")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("in_place", [False, True])
def test_the_x_grad_of_the_layer_above_can_be_the_y_grad_of_this_one(tmp_path, in_place):
    own = layer()
    expected = expected_outputs(tmp_path, own)
    tensors = {"X_grad": own["Y_grad"], "X": own["X"], "scale": own["scale"]}
    path = write(tmp_path / "x", tensors)
    layernorm_backward(path, y_grad="X_grad", x_grad_in_place=in_place)
    assert sorted(read(path)) == sorted({*tensors, *OUTPUTS})
    assert_kept(path, {"X": own["X"], "scale": own["scale"]} | expected)


def test_a_large_file_is_copied_around_the_gradients_whole(tmp_path):
    # Longer than a block of 2 MiB, before and after what is added and what goes.
    rng = np.random.default_rng(1)
    big = {name: rng.standard_normal(700_001).astype(np.float32) for name in ("before", "after")}
    path = write(tmp_path / "x", {"before": big["before"], **layer("n."), "after": big["after"]}, METADATA)
    layernorm_backward(path)
    assert_kept(path, big)
    layernorm_backward(path, x_grad_in_place=True)
    assert_kept(path, big)
    assert opened(path) == METADATA


def test_a_symbolic_link_stays_a_link(tmp_path):
    path = write(tmp_path / "real", layer())
    (tmp_path / "link").symlink_to(path)
    layernorm_backward(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert "X_grad" in read(path)


def test_the_size_in_the_index_is_right_even_where_the_names_stay(tmp_path):
    tensors = layer() | {"X_grad": np.zeros((5, 7)), "scale_grad": np.zeros(7, np.float32), "bias_grad": np.zeros(1)}
    write(tmp_path / "1.safetensors", tensors)
    index = tmp_path / "model.safetensors.index.json"
    mapped = dict.fromkeys(tensors, "1.safetensors")
    index.write_text(json.dumps({"metadata": {"total_size": 1, "total_parameters": 1}, "weight_map": mapped}))
    layernorm_backward(tmp_path)
    document, arrays = json.loads(index.read_text()), read(tmp_path / "1.safetensors").values()
    totals = {"total_size": sum(one.nbytes for one in arrays), "total_parameters": sum(one.size for one in arrays)}
    assert (document["metadata"], document["weight_map"]) == (totals, mapped)


def test_a_shard_named_without_its_index_gets_nothing_that_the_index_does_not_know(tmp_path):
    shard = write(tmp_path / "1.safetensors", layer())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(layer(), "1.safetensors")}))
    before = snapshot(tmp_path)
    with pytest.raises(BadInputError, match=r"is a shard of model\.safetensors\.index\.json"):
        layernorm_backward(shard)
    assert snapshot(tmp_path) == before
    layernorm_backward(shard, output=tmp_path / "grads")
    layernorm_backward(index)
    assert layernorm_backward(shard).output.files_written == 1


@pytest.mark.parametrize("elements", [1 << 18, 300, 30])
@pytest.mark.parametrize("x_grad_in_place", [False, True])
def test_inputs_stay_as_they_are_however_they_are_cut(tmp_path, monkeypatch, elements, x_grad_in_place):
    monkeypatch.setattr(tuning, "PATCH_ELEMENTS", elements)
    tensors = layer("a.", shape=(23, 77)) | layer("b.", ("BF16", "F32"), (5, 31), seed=1) | layer("c.", shape=(0, 3))
    path = write(tmp_path / "x", tensors | {"other": np.arange(9.0)})
    layernorm_backward(path, x_grad_in_place=x_grad_in_place, exclude=["^b"], kind="rmsnorm", fsync=False)
    found = read(path)
    for name, array in tensors.items():
        if name.endswith("Y_grad") and x_grad_in_place and not name.startswith("b"):
            assert name not in found
        else:
            assert found[name].tobytes() == array.tobytes()


def test_what_the_pass_reads_is_not_read_again_to_be_copied(tmp_path):
    tensors = layer(shape=(50, 40)) | {"mean": np.zeros(50), "inv_std_dev": np.ones(50), "other": np.ones(1000)}
    path = write(tmp_path / "x", tensors)
    once, twice = ("X", "Y_grad", "other"), ("mean", "inv_std_dev", "scale")
    nbytes = sum(tensors[name].nbytes for name in once) + 2 * sum(tensors[name].nbytes for name in twice)
    assert layernorm_backward(path).call.timings.read_bytes == nbytes
    header = len(header_of(path))
    # The gradients have their places now, and the header is copied.
    assert layernorm_backward(path).call.timings.read_bytes == nbytes + header


# One tensor is X and Y_grad of a layer, or X of a layer and Y_grad of another.
@pytest.mark.parametrize(("x", "names"), [("dy", ["a.dy", "a.b.dy"]), ("b.dy", ["a.dy", "a.b.dy", "a.b.b.dy"])])
def test_an_input_that_is_read_twice_is_written_once(tmp_path, x, names):
    path = write(tmp_path / "x", {name: np.ones((5, 7), np.float32) for name in names})
    result = layernorm_backward(path, y_grad="dy", x=x, affine=False, kind="rmsnorm", include=r"^a\.(b\.)?dy$")
    assert (result.layers, result.output.bytes_written) == (2, path.stat().st_size)


@pytest.mark.parametrize("role", ["x_grad", "scale_grad", "bias_grad"])
@pytest.mark.parametrize("output", [None, "new.safetensors"])
@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("__metadata__", "input", "makes the new name '__metadata__', which the format reserves"),
        ("n" * 4097, "limit", "exceeds the limit of 4,096 characters (it has 4,097)"),
    ],
)
def test_a_result_whose_name_no_tensor_can_have_is_refused(tmp_path, role, output, name, code, why):
    path = write(tmp_path / "x.safetensors", layer(), METADATA)
    before = snapshot(tmp_path)
    with pytest.raises(BadInputError) as caught:
        layernorm_backward(path, **{role: name, "output": output and tmp_path / output})
    (problem,) = caught.value.problems
    assert (problem.code, problem.file, problem.tensor) == (code, str(path), "X" if role == "x_grad" else "scale")
    assert problem.message.startswith(role)
    assert why in problem.message
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("option", ["x_grad", "prefix", "include"])
def test_names_that_are_not_utf_8_are_usage_errors(tmp_path, option):
    path = write(tmp_path / "x.safetensors", layer())
    with pytest.raises(UsageError, match=f"^{option} must be valid UTF-8"):
        layernorm_backward(path, **{option: "\udcff" if option == "x_grad" else ["\udcff"]})


def test_an_index_of_names_that_are_not_utf_8_is_written_as_it_was(tmp_path):
    write(tmp_path / "\udcff.safetensors", layer())
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(layer(), "\udcff.safetensors")}))
    assert layernorm_backward(index).layers == 1
    names = [*layer(), *OUTPUTS]
    assert json.loads(index.read_bytes())["weight_map"] == dict.fromkeys(names, "\udcff.safetensors")
