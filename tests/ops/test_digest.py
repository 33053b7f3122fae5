"""`digest` against the definition in docs/numerics.md, on bytes that a naive reader has read."""

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from split import write_split
from support import SAMPLES, build, gradtool, gradtool_json, with_header, write, write_back_in_time, write_index
from terminal import on_terminal

from gradtool import BadInputError, SystemRefusedError, digest, tuning
from gradtool.store.format.tensors import BITS

PAGE = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
DEFINITION = {}
exec(re.search(r"## Digests\n.*?```python\n(.*?)```", PAGE, re.DOTALL)[1], DEFINITION)  # noqa: S102 - our own page
MIB = 1 << 20


def truth(*paths):
    """The digests of tensors, and that of the set, by the definition."""
    digests = {}
    for path in paths:
        data = Path(path).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                content = data[start + begin : start + end]
                digests[name] = DEFINITION["tensor_digest"](entry["dtype"], entry["shape"], content)
    return {name: value.hex() for name, value in digests.items()}, DEFINITION["set_digest"](digests).hex()


def digests_of(result):
    return {row.name: row.digest for row in result.per_tensor}, result.digest


def arrays(seed=0):
    """Tensors around the size of a leaf, of several leaves, and without any."""
    rng = np.random.default_rng(seed)
    sizes = [0, 1, MIB - 1, MIB, MIB + 1, 5 * MIB + 3]
    tensors = {f"bytes {size}": rng.integers(0, 256, size, np.uint8) for size in sizes}
    tensors |= {f"small {number}": rng.standard_normal((number, 3)).astype(np.float32) for number in range(20)}
    return tensors | {
        "scalar": np.array(7.0),
        "wide": rng.standard_normal((2, 300_001)),
        "e": np.zeros((3, 0, 2), "f2"),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("digest") / "x.safetensors", arrays(), {"step": "7"})


@pytest.fixture
def listed(tmp_path, path):
    """What the command prints about that file."""
    file = tmp_path / "listed"
    file.write_text(gradtool("digest", path).stdout)
    return file


def codes(result):
    return [(problem.code, problem.tensor) for problem in result.problems]


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_digests_are_as_defined(path, threads):
    assert digests_of(digest(path, threads=threads)) == truth(path)


def test_a_known_digest(tmp_path):
    """So that the page and the program do not change together."""
    result = digest(write(tmp_path / "x", {"a": np.arange(3, dtype=np.float32), "b": np.array(1, np.int32)}))
    assert digests_of(result) == (
        {
            "a": "0f3812396def9515c97e1b57d57f4bb4d1ce759cc362508842e93a9bb0605761",
            "b": "20d9657ac7c9972eacd3cb4e6b52b4cfa74b3f2a476ec0733c72005605236c5c",
        },
        "baf906abdb3c64dc144d0085aa5a2af17767ec39faf616075ccefe6914a34e01",
    )


@pytest.mark.parametrize("dtype", BITS)
def test_tensors_of_any_type_are_the_bytes_that_are_stored(tmp_path, dtype):
    data = np.random.default_rng(3).bytes(3 * MIB)
    elements = len(data) * 8 // BITS[dtype]
    entries = {
        "a": {"dtype": dtype, "shape": [4, elements // 4], "data_offsets": [0, len(data)]},
        "b": {"dtype": dtype, "shape": [24], "data_offsets": [len(data), len(data) + 3 * BITS[dtype]]},
    }
    path = tmp_path / "x"
    path.write_bytes(with_header(entries, data + bytes(3 * BITS[dtype])))
    assert digests_of(digest(path)) == truth(path)
    assert [(row.dtype, row.shape) for row in digest(path).per_tensor] == [(dtype, (4, elements // 4)), (dtype, (24,))]


def test_the_layout_of_files_does_not_count(tmp_path, path):
    tensors = arrays()
    names = sorted(tensors, key=lambda name: name[::-1])
    write_index(
        tmp_path / "sharded",
        {
            "a.safetensors": {name: tensors[name] for name in names[::2]},
            "b.safetensors": {name: tensors[name] for name in names[1::2]},
        },
    )
    shuffled = tmp_path / "shuffled"
    data = build({name: tensors[name] for name in names}, {"other": "metadata"}, padding=13)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    shuffled.write_bytes(with_header(dict(sorted(header.items())), data[start:]))
    cuts = {
        "bytes 5242883": [[1, MIB, MIB + 5]],
        "wide": [[1], [7, 150_000]],
        "bytes 1048577": [[MIB]],
        "small 7": [[2], [1]],
    }
    write_split(tmp_path / "split", tensors, cuts)
    for other in ("sharded", "shuffled", "split"):
        assert digests_of(digest(tmp_path / other)) == truth(path), other
    parts = (
        write(tmp_path / "p0", {names[0]: tensors[names[0]]}),
        write(tmp_path / "p1", {n: tensors[n] for n in names[1:]}),
    )
    assert digests_of(digest(parts)) == truth(path)


def test_the_samples_that_are_one_set_have_one_digest():
    whole = truth(SAMPLES / "buffer.safetensors")
    assert digests_of(digest(SAMPLES / "split")) == digests_of(digest(SAMPLES / "buffer.safetensors")) == whole
    assert digests_of(digest(SAMPLES / "sharded")) == truth(*sorted((SAMPLES / "sharded").glob("*.safetensors")))


@pytest.mark.parametrize("nbytes", [1, MIB, MIB + 1, 3 * MIB, 16 * MIB])
def test_the_size_of_blocks_does_not_count(path, monkeypatch, nbytes):
    monkeypatch.setattr(tuning, "BLOCK_BYTES", nbytes)
    assert digests_of(digest(path)) == truth(path)


def test_type_shape_name_and_each_bit_count(tmp_path):
    base = {"a": np.zeros((2, 4), np.float32), "b": np.ones(1, np.float32)}
    others = [
        {"a": np.zeros((4, 2), np.float32)}, {"a": np.zeros((2, 4), np.int32)}, {"a": -np.zeros((2, 4), np.float32)},
        {"b": np.array(1, np.float32)}, {"c": np.zeros((0,), np.float32)},
    ]  # fmt: skip
    sets = [
        base,
        *(base | other for other in others),
        {"b": base["a"], "a": base["b"]},
        {"ab": base["a"], "": base["b"]},
    ]
    wholes = {digest(write(tmp_path / str(number), tensors)).digest for number, tensors in enumerate(sets)}
    assert len(wholes) == len(sets)


def test_names_may_be_odd(tmp_path):
    names = ["é", "\U0001f600", "\ue000", "a\tb", "a\0b", "##[x]", "", "::error::x", "a\\nb"]
    path = tmp_path / "x"
    entries = {name: {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n, name in enumerate(names)}
    path.write_bytes(with_header(entries, bytes(range(len(entries)))))
    assert digests_of(digest(path)) == truth(path)
    for form in ("text", "json", "jsonl"):
        (tmp_path / form).write_text(gradtool("digest", path, "--format", form).stdout)
        assert digest(path, check=tmp_path / form).same is True


@pytest.mark.parametrize("form", ["text", "json", "jsonl"])
def test_what_the_command_printed_is_checked(tmp_path, path, form):
    file = tmp_path / "listed"
    file.write_text(gradtool("digest", path, "--format", form).stdout)
    done = gradtool("digest", path, "--check", file, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    tensors = arrays()
    del tensors["wide"]
    tensors["bytes 1"] = tensors["bytes 1"] ^ 1
    tensors["new"] = np.ones(2)
    other = write(tmp_path / "other", tensors)
    answer = gradtool_json("digest", other, "--check", file)
    assert (answer["exit_code"], answer["data"]["same"], answer["data"]["digest"]) == (1, False, truth(other)[1])
    (new,), (old,) = ([row.digest for row in digest(one).per_tensor if row.name == "bytes 1"] for one in (other, path))
    assert answer["errors"] == [
        {
            "code": "different",
            "message": f"has the digest {new[:16]}…, not {old[:16]}… as in {file}",
            "file": str(other),
            "tensor": "bytes 1",
        },
        {"code": "extra-tensor", "message": f"is not in {file}", "file": str(other), "tensor": "new"},
        {"code": "missing-tensor", "message": f"is only in {file}", "tensor": "wide"},
    ]


def test_selected_tensors_are_checked(tmp_path, path, listed):
    assert digest(path, check=listed, include="bytes").same is True
    assert digest(path, check=listed, exclude="wide").same is True
    lean = write(tmp_path / "lean", {name: array for name, array in arrays().items() if name != "wide"})
    assert codes(digest(lean, check=listed)) == [("missing-tensor", "wide")]
    assert digest(lean, check=listed, exclude="wide|scalar").same is True
    assert codes(digest(lean, check=listed, include="wide|scalar")) == [("missing-tensor", "wide")]
    more = write(tmp_path / "more", arrays() | {"new": np.ones(1)})
    assert codes(digest(more, check=listed, include=["scalar", "new"])) == [("extra-tensor", "new")]


def test_the_digest_of_the_set_alone_is_checked(path, listed):
    (line,) = [line for line in listed.read_text().splitlines() if line.startswith("digest")]
    listed.write_text(f"{line}\n")
    assert digest(path, check=listed).same is True
    assert codes(digest(path, check=listed, exclude="wide")) == [("different", None)]
    assert digest(path).same is None


def test_digests_are_checked_through_a_pipe(path, monkeypatch):
    printed = gradtool("digest", path).stdout
    monkeypatch.setattr(sys, "stdin", io.StringIO(printed))
    assert digest(path, check="-").same is True


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n", b"nothing\n", b"digest\tabc\n", b"\xff\n", b"{}", b"[]", b'{"data": {}}', b"{", b'{"data": 3}',
        b"digest\t" + b"A" * 64, b"tensor\t" + b"0" * 64 + b"\tF32\t3\ta", b'{"name": 3, "digest": "%s"}' % (b"0" * 64),
        (b"tensor\t" + b"0" * 64 + b"\tF32\t3\ta\tx\n") * 2, b"0" * 64 + b"  a\n", b'{"digest": ["a"]}',
    ],
)  # fmt: skip
def test_what_the_command_does_not_print_is_refused(tmp_path, path, content):
    file = tmp_path / "listed"
    file.write_bytes(content)
    done = gradtool("digest", path, "--check", file)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"gradtool: error: {file}: is not what gradtool digest prints\n"
        "  hint: make it with gradtool digest; to compare two sets, use gradtool diff --bits\n"
    )


def test_a_file_to_check_must_be_there(tmp_path, path):
    with pytest.raises(BadInputError, match="no such file"):
        digest(path, check=tmp_path / "nothing")
    with pytest.raises(BadInputError, match="not what gradtool.digest"):
        digest(path, check=path)


def test_a_name_may_not_be_in_two_paths(tmp_path, path):
    other = write(tmp_path / "y", {"scalar": np.ones(1)})
    done = gradtool("digest", path, other)
    assert done.returncode == 3
    assert done.stderr.endswith(f"tensor 'scalar': is in {path} too\n  hint: run gradtool digest for each path\n")


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path):
    path = write(tmp_path / "x", {"a": np.zeros(8 * MIB, np.uint8)})
    content = path.read_bytes()
    with pytest.raises(SystemRefusedError, match="changed") as caught:
        digest(path, threads=1, progress=lambda *_: write_back_in_time(path, content[:-1] + b"x"))
    assert caught.value.problems[0].code == "changed"


def test_progress_is_told_of_all_bytes(path):
    seen = []
    digest(path, threads=1, progress=lambda *state: seen.append(state))
    total = sum(array.nbytes for array in arrays().values())
    assert (seen[-1], {title for title, _, _ in seen}) == (("hashing", total, total), {"hashing"})


def test_a_terminal_gets_whole_digests():
    digests, whole = digests_of(digest(SAMPLES / "sharded", include="^head"))
    for columns in (80, 120, 200):
        code, shown = on_terminal("digest", SAMPLES / "sharded", "--include", "^head", columns=columns)
        assert code == 0
        assert re.findall("[0-9a-f]{64}", shown) == [whole, *digests.values()]


def test_plain_lines_have_the_digest_first():
    lines = gradtool("digest", SAMPLES / "sharded", "--include", "^head").stdout.splitlines()
    digests, whole = digests_of(digest(SAMPLES / "sharded", include="^head"))
    shard = SAMPLES / "sharded" / "model-00002-of-00002.safetensors"
    assert lines[0] == f"digest\t{whole}"
    assert [line for line in lines if line.startswith("tensor\t")] == [
        f"tensor\t{digests['head.bias']}\tF32\t10\thead.bias\t{shard}",
        f"tensor\t{digests['head.weight']}\tF32\t10x40\thead.weight\t{shard}",
    ]
