"""A process that may not have all the memory or threads it likes does its work, or says that it cannot: exit 5."""

import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from support import COMMAND, with_header, write

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="limits on memory are Linux's")  # noqa: PTH110
MIB = 1 << 20


def limited(option, kib, *arguments):
    """Run the command under a limit."""
    command = ["sh", "-c", f'ulimit {option} {kib}; exec "$@"', "-", *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_file_larger_than_the_limit_is_no_trouble(tmp_path):
    path = tmp_path / "x.safetensors"
    nbytes = 600 * MIB
    path.write_bytes(with_header({"a": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}))
    os.truncate(path, path.stat().st_size + nbytes)
    done = limited("-v", 400 * 1024, "norm", path, "--threads", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "norm\t0.0\n" in done.stdout


THREADS = """
import os, sys
from gradtool import __main__, cli
def main():
    import numpy
    print(len(os.listdir("/proc/self/task")), flush=True)
    raise SystemExit
cli.main = main
__main__.main()
"""


def test_numpy_starts_no_thread_that_is_never_used():
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-P", "-c", THREADS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_where_no_thread_may_be_started_the_work_is_done_all_the_same(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": np.ones(3_000_000, np.float32)})
    prefix = []
    if os.geteuid() == 0:
        # The limit is not root's; and another user may need root's right to read this environment.
        if shutil.which("setpriv") is None:
            pytest.skip("root has no limit on processes, and there is no setpriv to become another user")
        capability = "+dac_read_search"
        prefix = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups"]
        prefix += [f"--inh-caps={capability}", f"--ambient-caps={capability}"]
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
            pytest.skip("root may not become another user here")
    command = ["bash", "-c", 'ulimit -u 1; exec "$@"', "-", *prefix, *COMMAND, "norm", str(path), "--threads", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"norm\t{3_000_000**0.5!r}\n" in done.stdout


def test_short_units_take_no_memory_of_their_own(tmp_path):
    grads, params = tmp_path / "grads.safetensors", tmp_path / "params.safetensors"
    nbytes = 200 * MIB
    header = with_header({"a": {"dtype": "BF16", "shape": [nbytes // 4, 2], "data_offsets": [0, nbytes]}})
    for path in (grads, params):
        path.write_bytes(header)
        os.truncate(path, len(header) + nbytes)
    with grads.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        # The last unit is (1, 1), and all others are 0.
        file.write(bytes.fromhex("803f803f"))
    done = limited(
        "-v", 400 * 1024, "clip", grads, "--agc", "1", "--params", params, "--agc-eps", "1", "--threads", "1", "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)["data"]
    assert (data["units"], data["units_clipped"]) == (nbytes // 4, 1)
    assert data["norm_before"] == math.sqrt(2)
    with grads.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        # 1/sqrt(2) rounded to BF16.
        assert file.read().hex() == "00000000353f353f"
