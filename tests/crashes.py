"""What the tests of dying runs share: data sets, the real command in a forked process, and a look from outside."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from support import write, write_index

_SERVER = Path(__file__).with_name("forkserver.py")
KILLED = -9
# In memory where that can be had: a kill is no power cut, so what is on the disk does not matter.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a fast place, and nothing predictable in it


class Answer(NamedTuple):
    code: int
    out: str
    err: str
    peak_kib: int


class Runner:
    """Runs commands in forked processes."""

    def __init__(self):
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-P", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def __call__(self, *argv, fault="", strike_after=None, number=signal.SIGKILL):
        request = {"argv": list(map(str, argv)), "env": {"GRADTOOL_FAULT": fault}}
        request |= {"strike_after": strike_after, "signal": number}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return Answer(*json.loads(self._server.stdout.readline()))

    def close(self):
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()


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
    """Layer norms with their gradients, so that they can be worked out in place; one for each file."""
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
    """A data set that can be put back as it was, and what it holds before and after a command."""

    def __init__(self, runner, case, count, *options, size=700):
        self._runner, self._case, self._options = runner, CASES[case], options
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
        assert self.run().code == 0
        self.new = self.files()
        assert self.new.keys() == self.old.keys()
        assert self.new != self.old
        self.put_back()

    def put_back(self):
        shutil.rmtree(self.root / "now", ignore_errors=True)
        shutil.copytree(self.root / "fresh", self.root / "now")

    def run(self, *options, **death):
        return self._runner(*self._arguments(), *self._options, *options, **death)

    def _arguments(self):
        arguments = self._case.arguments(self.path)
        # The other set of `accumulate`, which lies beside the one that is written to.
        return [self.root / "now" / "other" if str(one).endswith("other") else one for one in arguments]

    def recover(self, **death):
        return self._runner("recover", self.path, **death)

    def norm(self):
        return self._runner("norm", self.path)

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
