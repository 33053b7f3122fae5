"""`--others copy`: integer tensors of gradients, copied to a new set byte for byte."""

import json
import math

import numpy as np
import pytest
from buffers import f32, lay_out
from split import write_split
from support import encode, gradtool, gradtool_json, read, write_index

from gradtool import BadInputError, UsageError, accumulate, norm
from gradtool.store.format.tensors import INTEGERS

STEP, MASK = np.arange(7, 12, dtype=np.int32), np.array([3, 0, 255], np.uint8)
BOTH = {"mask": MASK, "a": f32(1, 2), "step": STEP, "b": encode([4], "BF16")}


def raw(dtype, count):
    """Bytes of a type that numpy need not know, and a header that names it."""
    nbytes = count * (1 if dtype in {"BOOL", "U8", "I8"} else int(dtype[1:]) // 8)
    return np.random.default_rng(3).integers(0, 2, nbytes, np.uint8).tobytes()


def with_integers(path):
    """A file that has a tensor of every integer type before, between and behind two that are added."""
    entries, data = {}, b""
    for dtype in INTEGERS:
        entries[dtype] = {"dtype": dtype, "shape": [5, 1], "content": raw(dtype, 5)}
    names = list(entries)
    entries = {**{name: entries[name] for name in names[:4]}, "a": None, **{name: entries[name] for name in names[4:]}}
    entries["a"] = {"dtype": "F32", "shape": [3], "content": f32(1, 2, 3).tobytes()}
    header, contents = {}, {}
    for name, entry in entries.items():
        contents[name] = entry.pop("content")
        header[name] = entry | {"data_offsets": [len(data), len(data) + len(contents[name])]}
        data += contents[name]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return contents


def test_every_integer_type_is_copied_in_its_place(tmp_path):
    contents = with_integers(tmp_path / "g")
    result = accumulate(tmp_path / "g", output=tmp_path / "new", weight=[2], others="copy", dtype="F64")
    content = (tmp_path / "new").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert list(header) == list(contents)
    found = {name: content[start + e["data_offsets"][0] : start + e["data_offsets"][1]] for name, e in header.items()}
    assert found == contents | {"a": np.array([2.0, 4, 6]).tobytes()}
    assert {name: e["dtype"] for name, e in header.items()} == {name: name for name in INTEGERS} | {"a": "F64"}
    assert (result.copied, result.call.tensors, result.call.elements, result.call.bytes) == (len(INTEGERS), 1, 3, 24)
    assert (result.norm_after, result.zeros) == (math.sqrt(56), 0)
    assert result.output.bytes_written == len(content)


def test_each_comes_from_the_first_gradient_that_has_it(tmp_path):
    grads = lay_out(tmp_path, f32(), BOTH, {"a": f32(1, 1), "b": encode([1], "BF16"), "step": STEP + 1, "late": MASK})[
        1
    ]
    result = accumulate(grads, output=tmp_path / "new", others="copy", per_gradient=True)
    found = read(tmp_path / "new")
    assert {name: array.tolist() for name, array in found.items()} == {
        "mask": [3, 0, 255], "a": [2, 3], "step": [7, 8, 9, 10, 11], "b": [5], "late": [3, 0, 255],
    }  # fmt: skip
    # What is only copied need not be in every gradient.
    assert (result.copied, result.missing, result.extra, result.call.warnings) == (3, 0, 0, ())
    assert [row.norm for row in result.per_gradient] == [math.sqrt(21), math.sqrt(3)]
    assert norm(tmp_path / "new", exclude=["mask", "step", "late"]).norm == result.norm_after


def test_the_new_file_of_a_single_gradient_is_that_gradient(tmp_path):
    _, (grad,) = lay_out(tmp_path, f32(), BOTH)
    accumulate(grad, output=tmp_path / "new", others="copy")
    assert (list(read(tmp_path / "new")), read(tmp_path / "new")["mask"].tobytes()) == (list(BOTH), MASK.tobytes())


def test_without_it_they_stay_an_error_that_names_it(tmp_path):
    _, grads = lay_out(tmp_path, f32(), BOTH, BOTH)
    done = gradtool("accumulate", *grads, "--output", tmp_path / "new")
    assert (done.returncode, (tmp_path / "new").exists()) == (3, False)
    assert "tensor 'mask': unsupported dtype U8" in done.stderr
    assert "skip it with --exclude '^mask$', or copy such tensors with --others copy" in done.stderr
    with pytest.raises(
        BadInputError, match=r'skip it with exclude="\^mask\$", or copy such tensors with others="copy"'
    ):
        accumulate(grads, output=tmp_path / "new", screen=["finite"])
    # A buffer keeps its own.
    done = gradtool("accumulate", grads[1], "--into", grads[0])
    assert (done.returncode, "--others" in done.stderr, "--exclude '^mask$'" in done.stderr) == (3, False, True)


@pytest.mark.parametrize("more", [(), ("output",)])
def test_with_a_buffer_it_is_a_usage_error(tmp_path, more):
    path, grads = lay_out(tmp_path, BOTH, BOTH)
    with pytest.raises(UsageError, match='others="copy" requires a new set, without into'):
        accumulate(grads, into=path, others="copy", **dict.fromkeys(more, tmp_path / "new"))


@pytest.mark.parametrize("kinds", [("F32", "I32"), ("I32", "F32")])
def test_a_name_cannot_be_both(tmp_path, kinds):
    grads = lay_out(tmp_path, f32(), *({"x": encode([1], kind), "a": f32(1)} for kind in kinds))[1]
    with pytest.raises(BadInputError, match="'x': has type F32, but I32 in ") as caught:
        accumulate(grads, output=tmp_path / "new", others="copy")
    assert [problem.code for problem in caught.value.problems] == ["dtype"]


def test_other_types_without_values_stay_errors(tmp_path):
    path = tmp_path / "g"
    text = b'{"a":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}  '
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(BadInputError, match=r'unsupported dtype C64 .*skip it with exclude="\^a\$"$'):
        accumulate(path, output=tmp_path / "new", others="copy")


def test_sets_of_integers_alone_can_be_copied(tmp_path):
    _, grads = lay_out(tmp_path, f32(), {"step": STEP}, {"step": STEP})
    result = accumulate(grads, output=tmp_path / "new", others="copy", weight_key=None, mean=True)
    assert (read(tmp_path / "new")["step"].tolist(), result.norm_after, result.call.tensors) == (STEP.tolist(), 0, 0)


def test_shards_are_laid_out_with_them(tmp_path):
    write_index(
        tmp_path / "model",
        {"1.safetensors": {"step": STEP, "b": f32(0)}, "2.safetensors": {"mask": MASK, "a": f32(0, 0)}},
    )
    grads = lay_out(tmp_path, f32(), BOTH, BOTH)[1]
    accumulate(grads, output_dir=tmp_path / "like", shard_like=tmp_path / "model", others="copy")
    assert {path.name: list(read(path)) for path in sorted((tmp_path / "like").glob("*.safetensors"))} == {
        "1.safetensors": ["step", "b"], "2.safetensors": ["mask", "a"],
    }  # fmt: skip
    assert read(tmp_path / "like" / "1.safetensors")["step"].tolist() == STEP.tolist()
    index = json.loads((tmp_path / "like" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 + 8 + 20 + 2
    result = accumulate(grads, output_dir=tmp_path / "sized", max_shard_size=20, others="copy")
    assert result.output.files_written == 3
    found = {
        name: array.tolist()
        for path in (tmp_path / "sized").glob("*.safetensors")
        for name, array in read(path).items()
    }
    assert found == {"mask": [3, 0, 255], "a": [2, 4], "step": STEP.tolist(), "b": [8]}


def test_tensors_in_pieces_are_put_together(tmp_path):
    grid = np.arange(60, dtype=np.int32).reshape(6, 10)
    tensors = {"grid": grid, "w": encode(np.ones((6, 4)), "F32"), "step": STEP}
    for rank in range(2):
        write_split(tmp_path / f"g{rank}", tensors, {"grid": [(2, 3), (7,)], "w": [(3,), ()]})
    result = accumulate([tmp_path / "g0", tmp_path / "g1"], output=tmp_path / "new", others="copy")
    found = read(tmp_path / "new")
    assert (found["grid"].tolist(), found["step"].tolist()) == (grid.tolist(), STEP.tolist())
    assert (found["w"].tolist(), result.copied) == (np.full((6, 4), 2).tolist(), 2)


def test_nothing_is_written_on_a_dry_run_or_without_an_update(tmp_path):
    _, grads = lay_out(tmp_path, f32(), BOTH)
    dry = gradtool_json("accumulate", *grads, "--output", tmp_path / "new", "--others", "copy", "--dry-run")["data"]
    assert (dry["copied"], dry["tensors"], dry["files_written"], (tmp_path / "new").exists()) == (2, 2, 0, False)
    off = gradtool_json("accumulate", *grads, "--output", tmp_path / "new", "--others", "copy", "--no-update")["data"]
    assert (off["copied"], off["files_written"], (tmp_path / "new").exists()) == (0, 0, False)


@pytest.mark.parametrize("missing", ["skip", "zero"])
def test_missing_tensors_and_weights_in_metadata_go_with_it(tmp_path, missing):
    first, second = {"step": STEP, "a": f32(1)}, {"mask": MASK, "b": f32(2), "a": f32(4)}
    metadata = [{"n": "3", "format": "pt"}, {"n": "1"}]
    grads = lay_out(tmp_path, f32(), first, second, metadata=metadata)[1]
    result = accumulate(grads, output=tmp_path / "new", others="copy", missing=missing, weight_key="n", mean=True)
    found = {name: array.tolist() for name, array in read(tmp_path / "new").items()}
    assert found == {"step": STEP.tolist(), "a": [1.75], "mask": [3, 0, 255], "b": [2 if missing == "skip" else 0.5]}
    assert (result.copied, result.missing) == (2, 1)


def test_rules_leave_gradients_out_with_their_integers(tmp_path):
    bad = {"a": f32(math.nan), "step": STEP + 1}
    fewer = {"a": f32(1), "b": f32(1), "step": STEP + 2}
    good = {"a": f32(1), "step": STEP}
    grads = lay_out(tmp_path, f32(), bad, fewer, good, good)[1]
    rules = ["complete", "finite", "norm<=9x", "cosine>=-1"]
    result = accumulate(grads, output=tmp_path / "new", others="copy", screen=rules)
    assert {name: array.tolist() for name, array in read(tmp_path / "new").items()} == {"a": [2], "step": STEP.tolist()}
    assert (result.skipped, result.copied) == (2, 1)


@pytest.mark.parametrize(
    "options", [{"reduce": "median"}, {"max_norm": 1e-3}, {"clip_each": 1e-3}, {"nonfinite": "skip"}]
)
def test_it_goes_with_every_way_to_add(tmp_path, options):
    grads = lay_out(tmp_path, f32(), BOTH, BOTH)[1]
    plain = [{name: array for name, array in BOTH.items() if array.dtype.kind not in "iu"}] * 2
    result = accumulate(grads, output=tmp_path / "new", others="copy", **options)
    (tmp_path / "plain").mkdir()
    expected = accumulate(lay_out(tmp_path / "plain", f32(), *plain)[1], output=tmp_path / "expected", **options)
    found = read(tmp_path / "new")
    assert (found["mask"].tobytes(), found["step"].tobytes()) == (MASK.tobytes(), STEP.tobytes())
    assert {name: found[name].tobytes() for name in ("a", "b")} == {
        name: array.tobytes() for name, array in read(tmp_path / "expected").items()
    }
    assert (result.norm_after, result.call.elements) == (expected.norm_after, expected.call.elements)


def test_a_large_tensor_is_copied_block_by_block(tmp_path):
    ids = np.arange(3_000_000, dtype=np.int32)
    _, grads = lay_out(tmp_path, f32(), {"ids": ids, "a": f32(1)}, {"a": f32(1), "ids": ids[:2]})
    accumulate(grads, output=tmp_path / "new", others="copy", threads=3)
    assert np.array_equal(read(tmp_path / "new")["ids"], ids)
