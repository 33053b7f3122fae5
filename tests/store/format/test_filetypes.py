"""What a file is that is no safetensors file: a small file of every kind, and the whole line that is said about it."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import build, gradtool, sample, snapshot, with_header, write, write_index

from gradtool import BadInputError, GradtoolError, norm
from gradtool.store.format import filetypes
from gradtool.store.format.gradset import open_sets
from gradtool.store.format.header import read_shard
from gradtool.store.format.paths import read_list

ONES = np.ones(2, np.float32)


def saved(save, *arguments, **keywords):
    file = io.BytesIO()
    save(file, *arguments, **keywords)
    return file.getvalue()


def zipped(*names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")
    return file.getvalue()


def tarred(name, mode):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


def recipe(name):
    return f"convert it as `gradtool help convert` shows under '{name}'"


TORCH = f"is a checkpoint of torch.save, not a safetensors file; {recipe('From .pt')}"
TENSORFLOW = (
    "is a TensorFlow checkpoint, not a safetensors file; "
    "read it with tf.train.load_checkpoint and save its arrays with safetensors.numpy"
)
TEXT = "is a text file, not a safetensors file; check the path, or use files_from for a list of paths"
PICKLE = f"is a pickle, not a safetensors file; {recipe('From a pickle')}"
WEB_PAGE = "is a web page (HTML), such as an error or login page, not a safetensors file; download the file again"
NO_MAP = "if it is an index, its name must end in .safetensors.index.json"
UNKNOWN = "not a safetensors file; check the path and what wrote it"
ZEROS = "is a file that begins with zeros, as an unfinished copy does, not a safetensors file; copy it again"
# As torch 2.15 writes them: the start of a zip archive, aligned by letters, and what came before.
TORCH_ZIP = (
    b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x10\x00\x12\x00"
    b"archive/data.pklFB\x0e\x00ZZZZZZZZZZZZZZ\x80\x02}q\x00."
)
OLD_TORCH = (
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}q\x00(X\x10\x00\x00\x00protocol_version"
)

# By what it is: its name, its content, and what is said.
KINDS = {
    "Git LFS pointer": (
        "model.safetensors",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n",
        "is a Git LFS pointer, not a safetensors file; run git lfs pull to fetch the file itself",
    ),
    "git-annex pointer": (
        "model.safetensors",
        b"/annex/objects/SHA256E-s12--4d7a.safetensors\n",
        "is a git-annex pointer, not a safetensors file; run git annex get to fetch the file itself",
    ),
    "HTML": ("x.safetensors", b"\n<!DOCTYPE html>\n<html><head>\xe2\x80\xa6", WEB_PAGE),
    "HTML in capitals": ("x.safetensors", b"<HTML><BODY>403 Forbidden</BODY></HTML>", WEB_PAGE),
    "XML": (
        "x.safetensors",
        b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
        "is XML, such as the error page of a storage service, not a safetensors file; download the file again",
    ),
    ".npy": (
        "x.npy",
        saved(np.save, ONES),
        f"is a .npy array, not a safetensors file; {recipe('From .npy')}",
    ),
    ".npz": (
        "x.npz",
        saved(np.savez, w=ONES),
        f"is an .npz archive, not a safetensors file; {recipe('From .npz')}",
    ),
    ".npz, compressed": (
        "x.npz",
        saved(np.savez_compressed, w=ONES),
        f"is an .npz archive, not a safetensors file; {recipe('From .npz')}",
    ),
    "gzip": (
        "x.safetensors.gz",
        gzip.compress(build({"a": ONES}), mtime=1e9),
        "is gzip data, not a safetensors file; decompress it with gunzip",
    ),
    # Its first bytes are also the length of a header that is within the limits.
    "gzip without a time": (
        "x.safetensors.gz",
        gzip.compress(np.random.default_rng(1).bytes(600_000), 1, mtime=0),
        "is gzip data, not a safetensors file; decompress it with gunzip",
    ),
    "gzip without a time, short": (
        "x.safetensors.gz",
        gzip.compress(b"x", mtime=0),
        "is gzip data, not a safetensors file; decompress it with gunzip",
    ),
    "Zstandard": (
        "x.safetensors.zst",
        b"\x28\xb5\x2f\xfd\x24\x01\x09\x00\x00x\x8b\x35\x6b\x2a",
        "is Zstandard data, not a safetensors file; decompress it with zstd -d",
    ),
    "xz": (
        "x.safetensors.xz",
        lzma.compress(b"x"),
        "is xz data, not a safetensors file; decompress it with unxz",
    ),
    "bzip2": (
        "x.safetensors.bz2",
        bz2.compress(b"x"),
        "is bzip2 data, not a safetensors file; decompress it with bunzip2",
    ),
    "LZ4": (
        "x.safetensors.lz4",
        b"\x04\x22\x4d\x18\x64\x40\xa7\x01\x00\x00\x80x\0\0\0\0",
        "is LZ4 data, not a safetensors file; decompress it with lz4 -d",
    ),
    "7z": (
        "x.7z",
        b"7z\xbc\xaf\x27\x1c\0\x04" + bytes(24),
        "is a 7z archive, not a safetensors file; unpack it with 7z x",
    ),
    "tar": (
        "x.tar",
        tarred("model.safetensors", "w"),
        "is a tar archive, not a safetensors file; unpack it with tar -xf",
    ),
    # A name of two letters, as the length of a header, is within the limits.
    "tar of a short name": (
        "x.tar",
        tarred("ab", "w"),
        "is a tar archive, not a safetensors file; unpack it with tar -xf",
    ),
    "tar, compressed": (
        "x.tar.gz",
        tarred("model.safetensors", "w:gz"),
        "is a compressed tar archive, not a safetensors file; unpack it with tar -xzf",
    ),
    "zip": (
        "x.zip",
        zipped("model.safetensors"),
        "is a zip archive, not a safetensors file; unpack it with unzip",
    ),
    "zip, empty": ("x.zip", zipped(), "is a zip archive, not a safetensors file; unpack it with unzip"),
    "JSON": ("config.json", b'{\n  "hidden_size": 768\n}', f"is JSON, not a safetensors file; {NO_MAP}"),
    "JSON list": ("x.json", b"[1, 2, 3, 4, 5]", f"is JSON, not a safetensors file; {NO_MAP}"),
    "JSON with a byte order mark": (
        "x.json",
        b'\xef\xbb\xbf{"a": 12345}',
        f"is JSON, not a safetensors file; {NO_MAP}",
    ),
    "index under another name": (
        "model.index.json",
        b'{"metadata": {"total_size": 8}, "weight_map": {"a": "1.safetensors"}}',
        "is an index, not a safetensors file; rename it to end in .safetensors.index.json",
    ),
    "index of .bin files": (
        "pytorch_model.bin.index.json",
        b'{"metadata": {}, "weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}',
        f"is an index of .bin files, not a safetensors file; {recipe('From .pt')}",
    ),
    "ONNX of torch": (
        "x.onnx",
        b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\xe3\x01\n",
        f"is an ONNX model, not a safetensors file; {recipe('From .onnx')}",
    ),
    "ONNX without a producer": (
        "x.onnx",
        b"\x08\x0e:\\\n\x10\n\x01x\x12\x01y\x22\x08Identity",
        f"is an ONNX model, not a safetensors file; {recipe('From .onnx')}",
    ),
    "HDF5": (
        "x.h5",
        b"\x89HDF\r\n\x1a\n\0\0\0\0\0\x08\x08\0",
        f"is an HDF5 file, not a safetensors file; {recipe('From .h5')}",
    ),
    "GGUF": (
        "x.gguf",
        b"GGUF\x03\0\0\0" + bytes(16),
        "is a GGUF file, not a safetensors file; use the safetensors files that it was made from",
    ),
    "pickle of protocol 2": ("x.pkl", pickle.dumps({"w": [1.0] * 9}, 2), PICKLE),
    "pickle of protocol 3": ("x.pkl", pickle.dumps({"w": [1.0] * 9}, 3), PICKLE),
    "pickle of protocol 4": ("x.pkl", pickle.dumps({"w": [1.0] * 9}, 4), PICKLE),
    "pickle of protocol 5": ("x.pkl", pickle.dumps({"w": [1.0] * 9}, 5), PICKLE),
    "torch.save": ("x.pt", TORCH_ZIP, TORCH),
    "torch.save, old": ("x.pt", OLD_TORCH, TORCH),
    "torch.save, as .bin": ("pytorch_model.bin", zipped("grads/data.pkl", "grads/version"), TORCH),
    "torch.distributed.checkpoint": (
        "__0_0.distcp",
        TORCH_ZIP,
        f"is a part of a distributed torch checkpoint, not a safetensors file; {filetypes.DISTRIBUTED}",
    ),
    "TensorFlow data": ("ckpt.data-00000-of-00001", bytes(range(100, 200)), TENSORFLOW),
    "TensorFlow index": ("ckpt.index", b"\x00\x00\x0d\x08\x01\x1a\x02\x08\x01\x00\x01\x08b", TENSORFLOW),
    "TensorFlow checkpoint file": ("checkpoint", b'model_checkpoint_path: "ckpt-1"\n', TENSORFLOW),
    "empty": ("x.safetensors", b"", "is an empty file, not a safetensors file; copy or download it again"),
    "zeros": ("x.safetensors", bytes(4096), ZEROS),
    "text": ("README.md", b"# Gradients\n\nof a model\n", TEXT),
    "text that is long": ("README.md", b"word \xe2\x80\xa6" * 500, TEXT),
    "text with a brace at the ninth byte": ("x.txt", b"12345678{ and more", TEXT),
    "UTF-16": ("x.txt", "a list of paths".encode("utf-16"), TEXT),
    "PNG": (
        "x.png",
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        f"is a file of an unknown format (its first bytes are 89 50 4e 47 0d 0a 1a 0a), {UNKNOWN}",
    ),
}


def refused(path):
    with pytest.raises(BadInputError) as caught:
        norm(path)
    (problem,) = caught.value.problems
    assert (problem.file, problem.code, problem.tensor) == (str(path), "input", None)
    return f"{problem.message}; {problem.hint}"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file_gets_a_sentence_and_a_remedy(tmp_path, kind):
    name, content, line = KINDS[kind]
    (tmp_path / name).write_bytes(content)
    assert refused(tmp_path / name) == line


def test_the_command_prints_it_with_a_hint_and_exit_code_3(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(KINDS["Git LFS pointer"][1])
    before = snapshot(tmp_path)
    for command in (["norm"], ["clip", "--max-norm", "1"], ["zero", "--write", "inplace"]):
        done = gradtool(*command, "x.safetensors", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (3, "")
        message, hint = KINDS["Git LFS pointer"][2].split("; ")
        assert done.stderr == f"gradtool: error: x.safetensors: {message}\n  hint: {hint}\n"
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("kind", ["Git LFS pointer", "HTML", "torch.save", "empty"])
def test_a_shard_that_is_something_else_is_named_with_what_it_is(tmp_path, kind):
    index = write_index(tmp_path, {"1.safetensors": {"a": ONES}}, {"a": "1.safetensors", "b": "2.safetensors"})
    shard = tmp_path / "2.safetensors"
    shard.write_bytes(KINDS[kind][1])
    for path in (index, tmp_path):
        with pytest.raises(BadInputError) as caught:
            norm(path)
        assert str(caught.value) == f"{shard}: {KINDS[kind][2]}"


# By what stands where an index should be: its content, and what is said.
NO_INDEXES = {
    "Git LFS pointer": (
        KINDS["Git LFS pointer"][1],
        "is a Git LFS pointer, not an index; run git lfs pull to fetch the file itself",
    ),
    "HTML": (KINDS["HTML"][1], WEB_PAGE.replace("a safetensors file", "an index")),
    "gzip": (KINDS["gzip"][1], "is gzip data, not an index; decompress it with gunzip"),
    "empty": (b"", "is an empty file, not an index; copy or download it again"),
    "safetensors": (build({"a": ONES}), "is a safetensors file, not an index; remove .index.json from its name"),
}


@pytest.mark.parametrize("kind", NO_INDEXES)
def test_an_index_that_is_something_else_is_named_with_what_it_is(tmp_path, kind):
    content, line = NO_INDEXES[kind]
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content)
    assert refused(path) == line


def test_an_index_that_an_index_names_as_a_shard_is_no_shard(tmp_path):
    name = "model.safetensors.index.json"
    path = write_index(tmp_path, {}, {"a": name})
    assert refused(path) == "is an index, not a safetensors file; correct the index that names it as a shard"


# The same for a list of paths.
NO_LISTS = {
    "safetensors": (build({"a": ONES}), "is a safetensors file, not a list of paths; name it without --files-from"),
    "gzip": (KINDS["gzip"][1], "is gzip data, not a list of paths; decompress it with gunzip"),
    "torch.save": (TORCH_ZIP, f"is a checkpoint of torch.save, not a list of paths; {recipe('From .pt')}"),
}


@pytest.mark.parametrize("kind", NO_LISTS)
def test_a_list_of_paths_that_is_something_else_is_named_with_what_it_is(tmp_path, kind):
    content, line = NO_LISTS[kind]
    path = tmp_path / "list"
    path.write_bytes(content)
    done = gradtool("norm", "--files-from", path)
    message, hint = line.split("; ")
    assert (done.returncode, done.stderr) == (3, f"gradtool: error: {path}: {message}\n  hint: {hint}\n")
    done = gradtool("norm", "--files-from", "-", input=content, text=False)
    expected = f"gradtool: error: standard input: {message}\n  hint: {hint}\n"
    assert (done.returncode, done.stderr) == (3, expected.encode())


def test_a_large_file_that_is_given_as_a_list_of_paths_is_named_with_what_it_is(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(with_header({"a": {"dtype": "U8", "shape": [60_000_000], "data_offsets": [0, 60_000_000]}}))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 60_000_000)
    with pytest.raises(BadInputError, match="is a safetensors file, not a list of paths"):
        read_list(str(path))


# What is damaged but may be a safetensors file keeps the message about the damage.
DAMAGED = {
    "header of 640 bytes, as a pickle begins": (
        (640).to_bytes(8, "little") + b"{}",
        "truncated: the header should have 640",
    ),
    "header of 559,903 bytes, as gzip begins": (
        (0x088B1F).to_bytes(8, "little") + b'{"a":',
        "truncated: the header should have 559,903",
    ),
    "cut after the length": ((640).to_bytes(8, "little"), "truncated: the header should have 640 bytes"),
    "cut within the length": ((640).to_bytes(8, "little")[:5], "5 bytes are too few"),
    "header beyond the limit": (
        with_header({}, length=2**40),
        r"exceeds the limit of 50,000,000 bytes \(it has 1,099,511,627,776\)",
    ),
    "header of spaces": (with_header(b"    "), "is not a valid safetensors file"),
    "data cut off": (build({"a": ONES})[:-3], r"truncated: the header says .* \(3 missing\)"),
    "header of other bytes": (with_header(b"nothing"), "is not a valid safetensors file"),
    "no header": (bytes(8), "is not a valid safetensors file"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_safetensors_file_is_not_taken_for_something_else(tmp_path, name):
    content, why = DAMAGED[name]
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(BadInputError, match=why):
        read_shard(tmp_path / "x")
    assert filetypes.type_of(content[: filetypes.HEAD], len(content), "x") is None


@pytest.mark.parametrize("name", ["x.npy", "x.distcp", "x.tar.gz", "ckpt.data-00000-of-00001", "x.html"])
def test_a_valid_file_is_accepted_whatever_its_name(tmp_path, name):
    path = write(tmp_path / name, {"a": ONES})
    assert [tensor.name for tensor in read_shard(path).tensors] == ["a"]


# No name of an entry lies within the first bytes; the entry of a directory may be anything.
@pytest.mark.parametrize("length", [0, 500, 65_535])
def test_an_archive_with_an_odd_name_of_its_first_entry_is_an_archive(tmp_path, length):
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04" + bytes(22) + length.to_bytes(2, "little") + b"\0\0" + b"x" * 40)
    assert refused(tmp_path / "x.zip") == "is a zip archive, not a safetensors file; unpack it with unzip"


STARTS = st.sampled_from(
    [
        b"",
        b"PK\x03\x04",
        b"\x80\x02",
        b"\x08\x07\x12",
        b"\xef\xbb\xbf",
        *(content[:12] for _, content, _ in KINDS.values()),
    ]
)
NAMES = st.sampled_from(["x", "x.tar.gz", "x.distcp", "x.index", "m.safetensors.index.json"])


@given(start=STARTS, rest=st.binary(max_size=600), name=NAMES)
@example(start=b"PK\x03\x04", rest=b"", name="x")
def test_made_up_bytes_raise_nothing_but_our_own_errors(tmp_path_factory, start, rest, name):
    content = start + rest
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    kind = filetypes.type_of(content[: filetypes.HEAD], len(content), name)
    assert kind is None or (kind.name.isprintable() and len(kind.name + kind.hint) < 200)
    for call in (lambda: open_sets([path]), lambda: open_sets(["no/such/file"], read_list(str(path)))):
        with contextlib.suppress(GradtoolError):
            call()


def test_json_has_the_same_message_under_the_code_of_bad_input(tmp_path):
    (tmp_path / "x").write_bytes(KINDS["PNG"][1])
    done = gradtool("norm", sample(tmp_path), tmp_path / "x", "--json")
    (error,) = json.loads(done.stdout)["errors"]
    message, hint = KINDS["PNG"][2].split("; ")
    assert error == {"code": "input", "message": message, "file": str(tmp_path / "x"), "hint": hint}
