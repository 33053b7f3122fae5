"""Inputs that are no local files: another kind of source is a module of its own, and the line that chooses it."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from same_results import facts_of
from support import snapshot, write, write_index

import gradtool
from gradtool.store.source import Reader, Source

# What is in memory, by path.
OBJECTS = {}


@dataclass(frozen=True, eq=False, repr=False)
class MemoryReader(Reader):
    @property
    def is_unchanged(self):
        return self.source.is_unchanged

    def read_into(self, view, begin):
        part = OBJECTS[self.source.name][begin : begin + len(view)]
        view[: len(part)] = part
        return len(part)

    def close(self):
        pass


@dataclass(frozen=True, eq=False, repr=False)
class MemorySource(Source):
    content: bytes = b""

    @classmethod
    def at(cls, path, *, is_named=True):  # noqa: ARG003 - nobody else has made it
        if str(path) not in OBJECTS:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        content = OBJECTS[str(path)]
        return MemoryReader(cls(str(path), len(content), None, content))

    @staticmethod
    def names_in(path):
        return [Path(name).name for name in OBJECTS if Path(name).parent == path] or None

    @property
    def is_unchanged(self):
        return OBJECTS.get(self.name) is self.content

    def open(self):
        return MemoryReader(self)


@pytest.fixture
def elsewhere(monkeypatch):
    """Put the files of a folder into memory, at paths that are not of this system."""

    def kind_of(path):
        return MemorySource if str(path).startswith("memory:") else Source

    monkeypatch.setattr(Source, "kind_of", staticmethod(kind_of))

    def put(folder):
        OBJECTS.update((f"memory:/bucket/{path.name}", path.read_bytes()) for path in folder.iterdir())
        return "memory:/bucket"

    yield put
    OBJECTS.clear()


def random(seed, *shapes):
    rng = np.random.default_rng(seed)
    return {f"t{seed}.{n}": rng.standard_normal(shape).astype(np.float32) for n, shape in enumerate(shapes)}


def sets(folder):
    """Two sets, each an index with two shards; the second is close to the first."""
    for name in ("a", "b"):
        (folder / name).mkdir()
        shards = {f"{n}.safetensors": random(n, (1_000_003,), (7, 5), (0,)) for n in range(2)}
        if name == "b":
            shards["0.safetensors"]["t0.1"][3] += 1e-3
        write_index(folder / name, shards)
    return folder / "a", folder / "b"


def test_norm_and_diff_say_the_same_of_it(tmp_path, elsewhere):
    a, b = sets(tmp_path)
    there = elsewhere(a)
    assert facts_of(gradtool.norm(there, per_tensor=True)) == facts_of(gradtool.norm(a, per_tensor=True))
    for name in ("0.safetensors", "model.safetensors.index.json"):
        assert facts_of(gradtool.norm(f"{there}/{name}")) == facts_of(gradtool.norm(a / name))
    local = facts_of(gradtool.diff(a, b, per_tensor=True))
    assert int(local["differing"]) > 0
    assert facts_of(gradtool.diff(there, b, per_tensor=True)) == local
    assert facts_of(gradtool.diff(b, there, per_tensor=True)) == facts_of(gradtool.diff(b, a, per_tensor=True))


@pytest.mark.parametrize("dtype", [None, "BF16"])
def test_clip_writes_the_same_bytes(tmp_path, elsewhere, dtype):
    a, _ = sets(tmp_path)
    there = elsewhere(a)
    options = {"max_norm": 1.0, "dtype": dtype}
    expected = facts_of(gradtool.clip(a, output_dir=tmp_path / "local", **options))
    assert facts_of(gradtool.clip(there, output_dir=tmp_path / "memory", **options)) == expected
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("local", "memory")]
    assert files[0] == files[1]
    assert len(files[0]) == 3
    gradtool.clip(f"{there}/0.safetensors", output=tmp_path / "one", **options)
    gradtool.clip(a / "0.safetensors", output=tmp_path / "other", **options)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    # Nothing says who may read what is elsewhere.
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600


def test_a_remote_source_is_neither_replaced_nor_changed_in_place(tmp_path, elsewhere):
    write(tmp_path / "x.safetensors", random(0, (5,)))
    there, before = elsewhere(tmp_path), snapshot(tmp_path)
    for mode in ("replace", "inplace"):
        with pytest.raises(gradtool.UsageError, match="is not a local file, and cannot be changed") as error:
            gradtool.clip(there, max_norm=1e-3, write=mode)
        assert error.value.problems[0].file == "memory:/bucket/x.safetensors"
        assert "use output or output_dir" in error.value.problems[0].hint
    assert snapshot(tmp_path) == before


def test_a_change_of_it_is_noticed(tmp_path, elsewhere, monkeypatch):
    write(tmp_path / "x.safetensors", random(0, (5,)))
    there = elsewhere(tmp_path)
    opened = gradtool.store.transaction.inputs.Inputs.open

    def change(self):
        inputs = opened(self)
        OBJECTS.update((name, bytes(bytearray(content))) for name, content in OBJECTS.items())
        return inputs

    monkeypatch.setattr(gradtool.store.transaction.inputs.Inputs, "open", change)
    with pytest.raises(gradtool.SystemRefusedError, match="changed by another program"):
        gradtool.norm(there)


def test_what_is_not_there_is_missing(elsewhere, tmp_path):
    there = elsewhere(tmp_path)
    with pytest.raises(gradtool.BadInputError, match="no such file"):
        gradtool.norm(f"{there}/x.safetensors")


def test_no_layer_above_the_store_knows_the_status_of_a_file():
    package = Path(gradtool.__file__).parent
    modules = [path for name in ("ops", "engines", "report", "backends") for path in (package / name).rglob("*.py")]
    assert len(modules) > 50
    assert not [path for path in modules if "stat_result" in path.read_text()]
