import json
import subprocess
import sys

import numpy as np
import pytest
from support import SAMPLES, encode, gradtool, gradtool_json, snapshot, with_header, write, write_index
from terminal import on_terminal

from gradtool import BadInputError, UsageError, info


def header_of(*tensors):
    """A file with tensors of any type: name, type, shape, bytes."""
    header, end = {}, 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    return with_header(header, bytes(end))


def test_tensors_are_listed_with_type_shape_bytes_and_file_in_the_order_of_their_bytes(tmp_path):
    path = write(
        tmp_path / "x", {"b": encode([[1, 2]], "F32"), "a": encode([1], "BF16"), "s": encode(3, "F64")}, {"k": "v"}
    )
    result = info(path)
    rows = [(one.name, one.file, one.dtype, one.shape, one.bytes) for one in result.per_tensor]
    assert rows == [
        ("b", str(path), "F32", (1, 2), 8),
        ("a", str(path), "BF16", (1,), 2),
        ("s", str(path), "F64", (), 8),
    ]
    assert (result.files, result.tensors, result.elements, result.bytes) == (1, 3, 4, 18)
    assert [(one.key, one.value, one.file) for one in result.per_metadata] == [("k", "v", str(path))]


def test_totals_of_each_type_come_with_the_largest_first(tmp_path):
    path = write(tmp_path / "x", {"a": np.ones(3, np.uint8), "b": np.ones(5, np.float32), "c": np.ones(2, np.float32)})
    rows = [(one.dtype, one.tensors, one.elements, one.bytes) for one in info(path).per_dtype]
    assert rows == [("F32", 2, 7, 28), ("U8", 1, 3, 3)]


def test_types_need_not_be_known(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        header_of(("i", "I64", [2], 16), ("b", "BOOL", [3], 3), ("f", "F4", [4], 2), ("n", "F9_NEW", [2, 2], 5))
    )
    result = info(path)
    assert [(one.dtype, one.shape, one.bytes) for one in result.per_tensor] == [
        ("I64", (2,), 16),
        ("BOOL", (3,), 3),
        ("F4", (4,), 2),
        ("F9_NEW", (2, 2), 5),
    ]
    assert result.bytes == 26


def test_folders_and_indexes_are_all_their_files(tmp_path):
    index = write_index(tmp_path, {"1.safetensors": {"a": np.ones(2)}, "2.safetensors": {"b": np.ones(3)}})
    write(tmp_path / "other.safetensors", {"c": np.ones(1)})
    for path in (index, tmp_path):
        assert [one.name for one in info(path).per_tensor] == ["a", "b"]
    index.unlink()
    assert [one.name for one in info(tmp_path).per_tensor] == ["a", "b", "c"]
    assert info([tmp_path / "1.safetensors", tmp_path / "2.safetensors"]).files == 2


def test_what_is_selected_is_listed(tmp_path):
    path = write(tmp_path / "x", {"a.w": np.ones(2), "a.b": np.ones(3), "c": np.ones(4)})
    assert [one.name for one in info(path, include="^a", exclude="b$").per_tensor] == ["a.w"]
    assert info(path, include="^a").bytes == 40
    with pytest.raises(BadInputError, match="matches no tensor name"):
        info(path, include="nothing")


def test_half_changed_and_broken_values_do_not_matter(tmp_path):
    path = write(tmp_path / "x", {"a": encode([np.nan], "F32")})
    (tmp_path / ".gradtool-0123456789ab.run").write_bytes(b"anything")
    before = snapshot(tmp_path)
    assert info(path).tensors == 1
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header_of(("a", "F32", [2], 8))[:-1], "truncated: the header says"),
        (header_of(("a", "F32", [2], 8)) + b"x", "trailing bytes"),
        (with_header(b"[]"), "is not a valid safetensors file"),
        (with_header({"a": {"dtype": 5, "shape": [], "data_offsets": [0, 0]}}), "'a' is unclear"),
        (with_header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}), "'a' is unclear"),
        (with_header({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 0]}}), "'a' is unclear"),
        (with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}), "'a' is unclear"),
        (with_header({"a": {"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 0]}}), "'a' is unclear"),
        (with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": "04"}}), "is not a valid safetensors file"),
        (with_header({"a": {"dtype": "F32", "shape": [1]}}), "is not a valid safetensors file"),
        (with_header({"__metadata__": {"k": 1}}), "'k' is unclear"),
        (with_header({"__metadata__": [1]}), "is not a valid safetensors file"),
        (with_header(b'{"a":' + b"[" * 100_000), "is not a valid safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (b"", "is an empty file"),
    ],
)
def test_a_header_that_cannot_be_told_is_bad_input(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        info(path)
    answer = gradtool_json("info", path)
    assert (answer["exit_code"], answer["errors"][0]["file"]) == (3, str(path))


def test_a_missing_path_or_shard_is_bad_input_and_no_path_is_a_usage_error(tmp_path):
    with pytest.raises(BadInputError, match="no such file"):
        info(tmp_path / "nothing")
    index = write_index(tmp_path, {"1.safetensors": {"a": np.ones(2)}}, {"a": "2.safetensors"})
    with pytest.raises(BadInputError, match="names the shard 2.safetensors, which does not exist; copy it, or correct"):
        info(index)
    with pytest.raises(UsageError, match="no path is given"):
        info([])


def test_every_file_of_the_library_is_listed_as_the_library_reads_it():
    safetensors = pytest.importorskip("safetensors.numpy")
    path = SAMPLES / "buffer.safetensors"
    arrays = safetensors.load_file(path)
    assert {one.name: one.shape for one in info(path).per_tensor} == {key: one.shape for key, one in arrays.items()}
    assert info(path).bytes == sum(one.nbytes for one in arrays.values())


def test_the_keys_of_the_json(tmp_path):
    data = gradtool_json("info", write(tmp_path / "x", {"a": np.ones((2, 1))}, {"k": "v"}))["data"]
    keys = ["files", "tensors", "elements", "bytes", "seconds", "per_dtype", "per_metadata", "per_tensor", "per_piece"]
    assert list(data) == keys
    assert data["per_tensor"] == [
        {"name": "a", "file": str(tmp_path / "x"), "dtype": "F64", "shape": [2, 1], "bytes": 16}
    ]
    assert data["per_dtype"] == [{"dtype": "F64", "tensors": 1, "elements": 2, "bytes": 16}]
    assert data["per_metadata"] == [{"key": "k", "value": "v", "file": str(tmp_path / "x")}]


def test_lines_have_a_tensor_each(tmp_path):
    path = write(tmp_path / "x", {"a\n": np.ones(2, np.float32)})
    lines = gradtool("info", path).stdout.splitlines()
    assert [line for line in lines if line.startswith(("dtype", "tensor\t"))] == [
        "dtype\tF32\t1\t2\t8",
        f"tensor\tF32\t2\t8\ta\\n\t{path}",
    ]


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_has_no_line_that_is_too_long(tmp_path, monkeypatch, columns):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x", {f"model.layers.{n}.mlp.weight": np.ones((2, n)) for n in range(3)}, {"long": "word " * 99})
    code, shown = on_terminal("info", "x", columns=columns)
    assert code == 0
    assert "model.layers.2.mlp.weight" in shown
    assert "2x2" in shown
    plain = [line.replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", "") for line in shown.splitlines()]
    assert max(map(len, plain)) <= columns


def test_info_imports_neither_numpy_nor_the_library(tmp_path):
    path = write(tmp_path / "x", {"a": np.ones(2)})
    code = f"""
import sys
sys.argv = ["gradtool", "info", {str(path)!r}, "--json"]
try:
    from gradtool.cli import main
    main()
except SystemExit as end:
    assert not end.code, end.code
print([name for name in ("numpy", "safetensors", "rich") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert json.loads(done.stdout)["data"]["tensors"] == 1
