"""A process that may not have all the memory or threads it likes does its work, or says that it cannot: exit 5."""

import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from schema import checked
from support import COMMAND, gradtool_json, with_header, write
from tiers import EXHAUSTIVE, PARTS, up_to

from gradtool import memory
from gradtool.store.format.header import read_shard

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="limits on memory are Linux's")  # noqa: PTH110
MIB = 1 << 20
# What the interpreter itself takes before our first line runs.
PROBE = "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith(('VmPeak', 'VmData'))))"


def limited(option, kib, *arguments):
    """Run the command under a limit."""
    command = ["sh", "-c", f'ulimit {option} {kib}; exec "$@"', "-", *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """KiB of address space and of data that a program of one line takes."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.py").write_text(PROBE)
    command = [sys.executable, "-P", "-m", "probe"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, check=True)
    return dict(zip(("-v", "-d"), map(int, done.stdout.split()), strict=True))


# MiB that a command may have beyond those: from too few for its imports to enough.
LIMITS = (2, 8, 32, 64, 88, 94, *range(97, 130, 4), 256)


@PARTS
@pytest.mark.parametrize("option", ["-v", "-d"])
@pytest.mark.parametrize("tensors", [1, pytest.param(20_000, marks=EXHAUSTIVE)])
def test_memory_refused_at_any_point_is_exit_5_and_names_the_remedy(tmp_path, bare, option, tensors, part):
    path = tmp_path / "x.safetensors"
    entries = {
        f"layers.{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(tensors)
    }
    path.write_bytes(with_header(entries, bytes(4 * tensors)))
    codes = []
    for number in up_to(len(LIMITS), part):
        done = limited(option, bare[option] + LIMITS[number - 1] * 1024, "norm", path, "--json", "--threads", "4")
        answer = checked(done.stdout)
        codes.append(done.returncode)
        assert answer["exit_code"] == done.returncode
        assert answer["command"] == "norm"
        if done.returncode:
            assert f"ulimit {option}" in done.stderr.replace("-v or -d", f"{option}")
            assert done.stderr == f"gradtool: error: {answer['errors'][0]['message']}\n"
    assert set(codes) <= {0, 5}
    if part == "sample":
        assert (codes[0], codes[-1]) == (5, 0)


def test_what_is_said_without_memory_has_the_format_that_is_asked_for(bare):
    for how in (["--format", "jsonl"], ["--format=JSONL"]):
        assert checked(limited("-v", bare["-v"] + 8192, "norm", "missing", *how).stdout, "line")["exit_code"] == 5
    for how in ([], ["--format", "text"], ["--format", "github"]):
        assert limited("-v", bare["-v"] + 8192, "norm", "missing", *how).stdout == ""


def test_what_is_said_without_memory_is_what_any_failure_says(bare, tmp_path):
    answer = checked(limited("-v", bare["-v"] + 8192, "norm", "missing", "--json").stdout)
    other = gradtool_json("norm", tmp_path / "missing")
    same = ("gradtool", "schema", "command", "status", "data")
    assert list(answer) == list(other)
    assert [answer[key] for key in same] == [other[key] for key in same]


def test_a_file_larger_than_the_limit_is_no_trouble(tmp_path):
    path = tmp_path / "x.safetensors"
    nbytes = 600 * MIB
    path.write_bytes(with_header({"a": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}))
    os.truncate(path, path.stat().st_size + nbytes)
    done = limited("-v", 400 * 1024, "norm", path, "--threads", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "norm\t0.0\n" in done.stdout


def test_a_module_that_finds_no_room_is_exit_5(bare, tmp_path):
    path = write(tmp_path / "x", {"a": np.ones(2, np.float32)})
    code = "from gradtool import memory; memory.TO_START = 0; from gradtool.__main__ import main; main()"
    command = ["sh", "-c", f'ulimit -v {bare["-v"] + 30 * 1024}; exec "$@"', "-", sys.executable, "-P", "-c", code]
    done = subprocess.run(
        [*command, "norm", str(path), "--norm-type", "3"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert len(done.stderr.splitlines()) == 1
    assert "ulimit -v" in done.stderr


def test_a_header_that_the_library_would_not_survive_is_a_memory_error(tmp_path, monkeypatch):
    path = write(tmp_path / "x", {"a": np.ones(2, np.float32)})
    monkeypatch.setattr(memory, "left", lambda: 1000)
    with pytest.raises(MemoryError):
        read_shard(path)


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
