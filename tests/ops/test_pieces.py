"""Sets that torch's distributed writer saved in pieces: what is refused, what cannot be known, and what torch makes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from layers import layer
from split import joined, write_split
from support import gaussian, gradtool_json, read, snapshot, write, write_index

import gradtool
from gradtool import BadInputError
from gradtool.store.format.header import PIECES_KEY

SAMPLE = Path(__file__).parents[2] / "sample_data"
FIRST, SECOND, THIRD, FOURTH = (f"shard-{number:05}-model-00001-of-00001.safetensors" for number in range(1, 5))


def array(*shape, seed=0):
    return gaussian(int(np.prod(shape)), "F32", seed).reshape(shape)


def grid(folder):
    """A matrix in four pieces, and a whole vector."""
    return write_split(folder, {"w": array(6, 10), "b": array(4, seed=1)}, {"w": [[2], [7]]})


def rewrite(path, offsets, **pieces):
    """Write a file again with other pieces or offsets."""
    text = json.dumps(offsets) if isinstance(offsets, dict) else offsets
    write(path, read(path) | pieces, {PIECES_KEY: text})


def at(*start):
    return {"w": {"saved_offsets": list(start)}}


# The file that is changed, its offsets, its pieces; the file that is named, and what is wrong.
FAULTS = {
    "a gap": (SECOND, at(0, 7), {"w": array(2, 2)}, "", r"no file has its part \[0:2, 9:10\]"),
    "a gap in the middle": (FOURTH, at(3, 7), {"w": array(3, 3)}, "", r"no file has its part \[2:3, 7:10\]"),
    "the same place": (SECOND, at(0, 0), {"w": array(2, 7)}, SECOND, r"\[0:2, 0:7\] is in two files at the same place"),
    "an overlap": (SECOND, at(0, 6), {"w": array(2, 4)}, SECOND, r"its part \[0:2, 6:7\] is in two files: "),
    "types": (SECOND, at(0, 7), {"w": array(2, 3).astype(np.float16)}, SECOND, "differ in the type: F16 here, F32 in"),
    "ranks": (SECOND, at(7), {"w": array(6)}, SECOND, "differ in the number of axes: 1 here, 2 in "),
    "negative": (SECOND, at(0, -7), {}, SECOND, r"saved_offsets \[0, -7\] must be 2 whole numbers from 0 on"),
    "fractional": (SECOND, at(0, 7.0), {}, SECOND, r"saved_offsets \[0, 7.0\] must be 2 whole numbers"),
    "true": (SECOND, at(0, True), {}, SECOND, r"saved_offsets \[0, true\] must be"),
    "too few": (SECOND, at(7), {}, SECOND, r"saved_offsets \[7\] must be 2 whole numbers"),
    "too many": (SECOND, at(0, 7, 0), {}, SECOND, r"saved_offsets \[0, 7, 0\] must be"),
    "no list": (SECOND, {"w": {"saved_offsets": 7}}, {}, SECOND, "saved_offsets 7 must be"),
    "beyond 2^63": (SECOND, at(0, 2**63 - 2), {}, SECOND, r"saved_offsets \[0, 9223372036854775806\] are beyond 2\^63"),
    "far away": (SECOND, at(0, 2**62), {}, "", r"no file has its part \[0:2, 7:4611686018427387904\]"),
    "no JSON": (SECOND, "{", {}, SECOND, "are not JSON that has saved_offsets for each tensor"),
    "other JSON": (SECOND, "[1]", {}, SECOND, "are not JSON that has saved_offsets"),
    "deep JSON": (SECOND, "[" * 9000, {}, SECOND, "are not JSON that has saved_offsets"),
    "long number": (SECOND, '{"w": {"saved_offsets": [0, %s]}}' % ("9" * 5000), {}, SECOND, "are not JSON that"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_pieces_that_make_no_whole_are_refused(tmp_path, fault):
    file, offsets, pieces, named, message = FAULTS[fault]
    folder = grid(tmp_path / "set")
    rewrite(folder / file, offsets, **pieces)
    before = snapshot(folder)
    with pytest.raises(BadInputError, match=message) as caught:
        gradtool.clip(folder, max_norm=1.0)
    assert Path(caught.value.problems[0].file) == folder / named
    assert snapshot(folder) == before
    result = gradtool.check(folder)
    faults = [finding.message for finding in result.per_finding if finding.severity == "fault"]
    assert any(re.search(message, fault) for fault in faults)
    assert gradtool.info(folder).files == 4


def test_an_index_cannot_map_a_tensor_that_lies_in_pieces(tmp_path):
    folder = grid(tmp_path / "set")
    write_index(folder, {}, {"w": FIRST, "b": SECOND})
    with pytest.raises(BadInputError, match="the index has a single file for 'w', which several files have in pieces"):
        gradtool.norm(folder)


def test_pieces_of_elements_of_less_than_a_byte_are_refused(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(2):
        header = {"w": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}
        header["__metadata__"] = {PIECES_KEY: json.dumps(at(2 * number, 0))}
        text = json.dumps(header).encode()
        (folder / f"{number}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(2))
    with pytest.raises(BadInputError, match="tensor 'w': lies in pieces, and an element of F4 is less than a byte"):
        gradtool.zero(folder)
    assert gradtool.info(folder).tensors == 2


def test_a_tensor_that_is_whole_as_well_is_refused(tmp_path):
    folder = grid(tmp_path / "set")
    write(folder / "other.safetensors", {"w": array(6, 10)})
    with pytest.raises(BadInputError, match="tensor 'w': is in other.safetensors too"):
        gradtool.norm(folder)


def test_a_file_of_a_set_does_not_pass_for_the_set(tmp_path):
    folder = grid(tmp_path / "set")
    with pytest.raises(BadInputError, match=r"no file has its part \[0:2, 0:7\]") as caught:
        gradtool.norm(folder / SECOND)
    assert caught.value.problems[0].hint.startswith("name the folder that has all pieces")
    # Nothing tells the first file from a whole set but its name.
    assert [problem.code for problem in gradtool.norm(folder / FIRST).call.warnings] == ["unknown-shapes"]


def test_the_loss_of_a_last_piece_is_noticed_with_shapes_alone(tmp_path):
    content = {"w": array(6, 10), "b": array(4, seed=1)}
    folder = write_split(tmp_path / "set", content, {"w": [[2, 4], []]})
    model = write(tmp_path / "model.safetensors", content)
    assert gradtool.norm(folder, shapes_from=model).call.warnings == ()
    (folder / THIRD).unlink()
    (warning,) = gradtool.norm(folder).call.warnings
    assert (warning.code, warning.file) == ("unknown-shapes", str(folder))
    with pytest.raises(BadInputError, match=r"has shape \[4, 10\], not \[6, 10\] as in shapes_from="):
        gradtool.norm(folder, shapes_from=model)
    assert "unknown-shapes" in [note.code for note in gradtool.check(folder).per_finding]
    (fault,) = [each for each in gradtool.check(folder, shapes_from=model).per_finding if each.severity == "fault"]
    assert (fault.severity, fault.code, fault.name) == ("fault", "shape", "w")
    with pytest.raises(BadInputError, match="is not in shapes_from="):
        gradtool.norm(write(tmp_path / "other.safetensors", {"x": array(2)}), shapes_from=model)


def test_a_full_save_is_an_ordinary_set(tmp_path):
    path = tmp_path / "model-00001-of-00001.safetensors"
    write(path, {"w": array(6, 10)}, {PIECES_KEY: json.dumps(at(0, 0)), "DCP_VERSION": "1.0"})
    result = gradtool.norm(path, per_tensor=True)
    assert (result.call.warnings, result.per_tensor[0].file) == ((), str(path))
    # A tensor that the metadata do not mention begins at index 0, and so do others that have no tensor.
    write(path, {"v": array(5)}, {PIECES_KEY: json.dumps(at(3, 0))})
    assert gradtool.norm(path).call.tensors == 1


def test_info_and_norm_show_a_tensor_once_with_its_pieces(tmp_path):
    folder = grid(tmp_path / "set")
    result = gradtool.info(folder)
    assert [(row.name, row.shape, row.file) for row in result.per_tensor] == [
        ("b", (4,), str(folder / SECOND)),
        ("w", (6, 10), str(folder)),
    ]
    assert [(row.offsets, row.shape, Path(row.file).name) for row in result.per_piece] == [
        ((0, 0), (2, 7), FIRST),
        ((0, 7), (2, 3), SECOND),
        ((2, 0), (4, 7), THIRD),
        ((2, 7), (4, 3), FOURTH),
    ]
    assert [row.name for row in gradtool.norm(folder, per_tensor=True).per_tensor] == ["b", "w"]


def test_a_new_set_has_the_tensors_whole(tmp_path):
    folder, content = grid(tmp_path / "set"), {"w": array(6, 10), "b": array(4, seed=1)}
    gradtool.accumulate([folder], output=tmp_path / "whole.safetensors")
    assert {name: value.tobytes() for name, value in read(tmp_path / "whole.safetensors").items()} == {
        name: value.tobytes() for name, value in content.items()
    }
    # In the files of a set in pieces, a tensor is where its first piece is.
    gradtool.accumulate([tmp_path / "whole.safetensors"], output_dir=tmp_path / "like", shard_like=folder)
    assert sorted(path.name for path in (tmp_path / "like").iterdir()) == [FIRST, SECOND]
    assert (read(tmp_path / "like" / FIRST)["w"] == content["w"]).all()


def test_an_output_folder_keeps_the_cut_and_the_metadata(tmp_path):
    folder = grid(tmp_path / "set")
    gradtool.clip(folder, max_norm=1e-3, output_dir=tmp_path / "out")
    for path in sorted(folder.iterdir()):
        old, new = path.read_bytes(), (tmp_path / "out" / path.name).read_bytes()
        size = 8 + int.from_bytes(old[:8], "little")
        assert old[:size] == new[:size]
    assert gradtool.norm(tmp_path / "out").norm == pytest.approx(1e-3, rel=1e-4)


def test_another_type_needs_whole_tensors(tmp_path):
    folder = grid(tmp_path / "set")
    with pytest.raises(BadInputError, match="lies in pieces, and dtype needs it whole") as caught:
        gradtool.clip(folder, max_norm=1.0, dtype="BF16", output_dir=tmp_path / "out")
    call = f'gradtool.accumulate("{folder}", output_dir="DIR")'
    assert caught.value.problems[0].hint == f"put the pieces together first, with {call}"
    # A tensor that is whole may be converted, and the pieces beside it stay what they are.
    gradtool.clip(folder, include=["b"], max_norm=1e9, dtype="BF16", output_dir=tmp_path / "out")
    assert (joined(tmp_path / "out")["w"] == array(6, 10)).all()


LAYER_CUTS = {"rows": [[10, 11]], "columns": [[], [3]], "grid": [[7], [5]]}


@pytest.mark.parametrize("cut", LAYER_CUTS)
@pytest.mark.parametrize("where", ["beside", "file", "folder"])
def test_layer_norms_of_pieces(tmp_path, cut, where):
    content = {f"n.{name}": value for name, value in layer((24, 16)).items()}
    cuts = {name: [*LAYER_CUTS[cut], []][: content[name].ndim] for name in ("n.Y_grad", "n.X")} | {"n.scale": [[4]]}
    folder, path = write_split(tmp_path / "set", content, cuts), write(tmp_path / "x.safetensors", content)
    before = joined(folder)
    expected = gradtool.layernorm_backward(path, output=tmp_path / "expected.safetensors")
    options = {"beside": {}, "file": {"output": tmp_path / "o"}, "folder": {"output_dir": tmp_path / "out"}}[where]
    result = gradtool.layernorm_backward(folder, **options)
    assert result.per_layer[0].x_grad_norm == expected.per_layer[0].x_grad_norm
    written = {"beside": folder, "file": tmp_path / "o", "folder": tmp_path / "out"}[where]
    files = [written] if written.is_file() else sorted(written.iterdir())
    results = {name: value for file in files for name, value in read(file).items() if name.endswith("_grad")}
    for name, value in read(tmp_path / "expected.safetensors").items():
        assert results[name].tobytes() == value.tobytes(), name
    assert all(joined(folder)[name].tobytes() == value.tobytes() for name, value in before.items())


def test_results_do_not_replace_pieces(tmp_path):
    content = layer((24, 16))
    folder = write_split(tmp_path / "set", content, {"Y_grad": [[4], []]})
    with pytest.raises(BadInputError, match="lies in pieces, and cannot be replaced by a result"):
        gradtool.layernorm_backward(folder, x_grad_in_place=True)


def test_the_sample_is_the_buffer():
    split, buffer = SAMPLE / "split", SAMPLE / "buffer.safetensors"
    assert gradtool.norm(split, shapes_from=buffer).norm == gradtool.norm(buffer).norm
    result = gradtool.diff(split, buffer, bits=True)
    assert (result.differing_bits, result.problems) == (0, ())


def test_torch_puts_together_what_gradtool_clipped(tmp_path):
    pytest.importorskip("torch.distributed.checkpoint", reason="torch is not installed")
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    # Without scalars, of which torch 2.14 makes 0.
    shapes = {"w": (10, 7), "b": (5,), "t": (2, 3), "u": (300, 1001)}
    content = {name: array(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    whole = write(tmp_path / "whole.safetensors", content)
    subprocess.run([sys.executable, SAMPLE / "make_split.py", whole, tmp_path / "saved"], check=True, timeout=300)
    expected_norm = gradtool.norm(whole).norm
    gradtool.clip(whole, max_norm=1.0)
    expected = {name: value.tobytes() for name, value in read(whole).items()}
    for way in ("fsdp", "tp", "both", "replicas"):
        folder, torch_folder = tmp_path / "saved" / way, tmp_path / f"{way}-whole"
        assert gradtool.norm(folder).norm == expected_norm
        gradtool.clip(folder, max_norm=1.0, write="inplace" if way == "tp" else "replace")
        torch_folder.mkdir()
        consolidate_safetensors_files(str(folder), str(torch_folder), dict.fromkeys(content, 1))
        (made,) = torch_folder.glob("*.safetensors")
        assert {name: value.tobytes() for name, value in read(made).items()} == expected, way


def test_the_command_says_once_that_it_cannot_know():
    answer = gradtool_json("norm", SAMPLE / "split")
    (warning,) = answer["data"]["warnings"]
    assert warning["hint"] == "use --shapes-from to compare them with a model"
