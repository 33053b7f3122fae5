"""What the tests of crashed runs share: data sets, a command on one of them, and which of its steps to strike at."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from runner import run
from support import write, write_index
from tiers import numbers

KILLED = -9
# In memory where possible: after a kill, unlike a power cut, it does not matter what reached the disk.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a fast place, and nothing predictable in it


def tensors(seed, size):
    rng = np.random.default_rng(seed)
    return {f"layer{seed}.{k}": rng.standard_normal(size + k).astype(np.float32) for k in range(3)}


def shards(folder, count, size):
    """A set of `count` shards with an index, or a single file."""
    if count == 1:
        write(folder / "model.safetensors", tensors(0, size))
    else:
        write_index(folder, {f"model-{i}.safetensors": tensors(i, size) for i in range(count)})


def layers(folder, count, size):
    """Layer norms whose gradients are there already, so that they can be overwritten in place; one for each file."""
    rng = np.random.default_rng(1)
    files = {}
    for i in range(count):
        shape = (-(-size // 100), 40)
        names = {"Y_grad": shape, "X": shape, "scale": (40,), "X_grad": shape, "scale_grad": (40,), "bias_grad": (40,)}
        files[f"model-{i}.safetensors"] = {
            f"blocks.{i}.{name}": rng.standard_normal(shape).astype(np.float32) for name, shape in names.items()
        }
    if count == 1:
        write(folder / "model.safetensors", files["model-0.safetensors"])
    else:
        write_index(folder, files)


TOTAL = {"n": "5", "gradtool.weight_key": "n", "gradtool.weighted": "sum"}


def weighted(folder, count, size, metadata=TOTAL, padding=32, first=0):
    """A set with a total weight in the metadata of each shard, and room for another one; without the `first` shards."""
    for i in range(first, count):
        path = folder / (f"model-{i}.safetensors" if count > 1 else "model.safetensors")
        write(path, tensors(i, size), metadata, padding)


def unweighted(folder, count, size):
    """A set whose headers have no room for a total."""
    weighted(folder, count, size, {"format": "pt"}, padding=0)


def micro_batch(folder, count, size):
    """A gradient with a weight; of several shards, the first is missing, so that nothing is added there."""
    weighted(folder, count, size, {"n": "30000"}, first=int(count > 1))


STATE = {
    "gradtool_state": 1, "rule": "z", "norm_type": 2.0, "steps": 9, "mean": 1.0, "variance": 0.25, "norms": [],
}  # fmt: skip


def with_state(folder, count, size):
    """A set with the state of a limit beside it, which the norm is far above."""
    shards(folder, count, size)
    (folder / "clip.json").write_text(json.dumps(STATE))


def state_of(path):
    return (path if path.is_dir() else path.parent) / "clip.json"


class Case(NamedTuple):
    """A command on a set of files: what it is given, and what it says on the command line.

    `other` is a set beside them that is only read. With `grows`, there is no room to do it in place.
    """

    make: object
    arguments: object
    other: object = None
    grows: bool = False


CASES = {
    "clip": Case(shards, lambda path: ["clip", path, "--max-norm", "1"]),
    "agc": Case(shards, lambda path: ["clip", path, "--agc", "0.01", "--params", path.parent / "other"], shards),
    "accumulate": Case(shards, lambda path: ["accumulate", path.parent / "other", "--into", path], shards),
    # The state is one more file, which in place is replaced all the same; and which may not be there yet.
    "state": Case(with_state, lambda path: ["clip", path, "--limit", "z=2.5", "--state", state_of(path)]),
    "first-state": Case(
        shards, lambda path: ["clip", path, "--limit", "percentile=10", "--max-norm", "1", "--state", state_of(path)]
    ),
    "zero": Case(shards, lambda path: ["zero", path]),
    "layernorm": Case(layers, lambda path: ["layernorm-backward", path]),
    # These change headers: of the same length, and of files with no other change; with zeros; and longer ones.
    "total": Case(
        weighted,
        lambda path: ["accumulate", path.parent / "other", "--into", path, "--weight-key", "n", "--missing", "zero"],
        micro_batch,
    ),
    "zero-total": Case(weighted, lambda path: ["zero", path]),
    "new-total": Case(
        unweighted,
        lambda path: ["accumulate", path.parent / "other", "--into", path, "--weight-key", "n", "--overwrite"],
        weighted,
        grows=True,
    ),
}


class Scene:
    """A data set that can be put back as it was, and what it holds before and after a command of so many `steps`."""

    def __init__(self, case, count, *options, size=700):
        self._case, self._options = CASES[case], options
        self.root = Path(tempfile.mkdtemp(prefix="gradtool-test-", dir=FAST))
        home = self.root / "fresh"
        self._case.make(home / "set", count, size)
        if self._case.other is not None:
            # In a folder of its own: only what is written to is looked at.
            self._case.other(home / "other", count, size)
        self.path = self.root / "now" / "set"
        if count == 1:
            self.path /= "model.safetensors"
        self.put_back()
        self.old = self.files()
        # No step has this number: it is only counted.
        done = self.run(fault="kill@0")
        assert done.code == 0
        self.steps = done.steps
        self.new = self.files()
        assert self.new.keys() >= self.old.keys()
        assert self.new != self.old
        self.put_back()

    def each_step(self):
        """The steps to strike at: a sample with the last."""
        return numbers("sample", self.steps)

    def put_back(self):
        shutil.rmtree(self.root / "now", ignore_errors=True)
        shutil.copytree(self.root / "fresh", self.root / "now")

    def run(self, *options, **death):
        return run(*self._arguments(), *self._options, *options, **death)

    def _arguments(self):
        arguments = self._case.arguments(self.path)
        # The set that is only read lies beside the one that is written to.
        return [self.root / "now" / "other" if str(one).endswith("other") else one for one in arguments]

    def recover(self, **death):
        return run("recover", self.path, **death)

    def norm(self):
        return run("norm", self.path)

    def files(self):
        folder = self.root / "now" / "set"
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    def state(self):
        """Whether the files are "old" or "new", as a whole, with nothing beside them; anything else is shown."""
        now = self.files()
        if now in (self.old, self.new):
            return "old" if now == self.old else "new"
        return {
            name: "old" if data == self.old.get(name) else "new" if data == self.new.get(name) else "neither"
            for name, data in now.items()
        }

    def close(self):
        shutil.rmtree(self.root, ignore_errors=True)
