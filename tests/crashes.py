"""What the tests of crashed runs share: data sets, a command on one of them, and which of its steps to strike at."""

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


class Case(NamedTuple):
    """A command on a set of files: what it is given, and what it says on the command line."""

    make: object
    arguments: object


CASES = {
    "clip": Case(shards, lambda path: ["clip", path, "--max-norm", "1"]),
    "accumulate": Case(shards, lambda path: ["accumulate", path, path.parent / "other"]),
    "zero": Case(shards, lambda path: ["zero", path]),
    "layernorm": Case(layers, lambda path: ["layernorm-backward", path]),
}


class Scene:
    """A data set that can be put back as it was, and what it holds before and after a command of so many `steps`.

    Of these, a test strikes at those of a `part`.
    """

    def __init__(self, case, count, *options, size=700, part="all"):
        self._case, self._options, self.part = CASES[case], options, part
        self.root = Path(tempfile.mkdtemp(prefix="gradtool-test-", dir=FAST))
        home = self.root / "fresh"
        self._case.make(home / "set", count, size)
        if case == "accumulate":
            # In a folder of its own: only what is written to is looked at.
            shards(home / "other", count, size)
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
        assert self.new.keys() == self.old.keys()
        assert self.new != self.old
        self.put_back()

    def each_step(self):
        """The steps to strike at: a sample with the last, or the others for as long as there are any."""
        return numbers(self.part, self.steps)

    def put_back(self):
        shutil.rmtree(self.root / "now", ignore_errors=True)
        shutil.copytree(self.root / "fresh", self.root / "now")

    def run(self, *options, **death):
        return run(*self._arguments(), *self._options, *options, **death)

    def _arguments(self):
        arguments = self._case.arguments(self.path)
        # The other set of `accumulate`, which lies beside the one that is written to.
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
