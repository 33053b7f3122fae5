import os
import subprocess
import sys

import numpy as np
import pytest
from buffers import f32, lay_out
from support import build, encode, read
from tiers import EXHAUSTIVE

from gradtool import SystemRefusedError, accumulate


def test_neighbours_in_the_gradient_that_are_none_in_the_buffer_go_where_they_belong(tmp_path):
    old = {"a": f32(0, 0), "wide": f32(0, 0, 0), "b": f32(0, 0)}
    path, grads = lay_out(tmp_path, old, {"a": f32(1, 2), "b": f32(3, 4), "wide": encode(5, "F32")})
    accumulate(grads, into=path)
    assert {name: array.tolist() for name, array in read(path).items()} == {"a": [1, 2], "wide": [5] * 3, "b": [3, 4]}


def test_two_thousand_tiny_tensors_in_another_order(tmp_path):
    old = {f"t{i}": np.full(i % 5, i, np.float32) for i in range(2000)}
    path, grads = lay_out(tmp_path, old, {name: encode(array, "BF16") * 0 + 1 for name, array in reversed(old.items())})
    accumulate(grads, into=path)
    assert path.read_bytes() == build({name: array + 1 for name, array in old.items()})


def test_a_buffer_or_gradient_that_changes_during_the_run_is_refused(tmp_path):
    path, grads = lay_out(tmp_path, np.ones(500_000, np.float32), np.ones(500_000, np.float32))
    content = path.read_bytes()
    for changed in (path, grads[0]):
        with pytest.raises(SystemRefusedError, match="changed"):
            accumulate(grads, into=path, progress=lambda *_, changed=changed: os.utime(changed, ns=(0, 0)), threads=1)
        assert path.read_bytes() == content
        os.utime(changed)
    assert len(list(tmp_path.iterdir())) == 2


# Python's own files, and the two that the call begins with, leave few for the gradients.
FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
import gradtool
print(gradtool.accumulate(sys.argv[2:], into=sys.argv[1], threads=1, fsync=False).taken)
"""


def test_more_gradients_than_files_may_be_open(tmp_path):
    path, grads = lay_out(tmp_path, np.zeros(300_000, np.float32), *[np.full(300_000, i, "f4") for i in range(64)])
    command = [sys.executable, "-P", "-c", FEW_FILES, str(path), *map(str, grads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "64\n", "")
    assert set(read(path)["a"].tolist()) == {2016.0}


@pytest.mark.parametrize("threads", [1, 2, 4, 16])
@pytest.mark.parametrize("limit", [12, pytest.param(20, marks=EXHAUSTIVE)])
def test_a_low_limit_of_open_files_is_enough_for_any_number_of_threads(tmp_path, threads, limit):
    old = {"a": np.zeros(70_000, np.float32), "b": np.zeros(200_000, np.float32)}
    path, grads = lay_out(tmp_path, old, *[{name: array + 1 for name, array in old.items()}] * 30)
    call = f"gradtool.accumulate({[str(one) for one in grads]!r}, into={str(path)!r}, threads={threads}, fsync=False)"
    code = f"import resource, gradtool; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); {call}"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
    assert (read(path)["b"] == 30).all()
