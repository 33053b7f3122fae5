"""Whole runs where the calls that macOS lacks are hidden, and those that it has instead are made up: the same files."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import COMMAND, SAMPLES, snapshot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on macOS, all tests are such tests")
HIDING = Path(__file__).parent / "macos"
CALLS = {
    "clip": "clip sharded --max-norm 1",
    "clip in place": "clip sharded --max-norm 1 --write inplace",
    "clip elsewhere": "clip sharded --max-norm 1 --output-dir new",
    "accumulate": "accumulate micro_0.safetensors micro_1.safetensors --into buffer.safetensors",
    "accumulate, alone": "accumulate micro_0.safetensors --output-dir sum --max-shard-size 40kB",
    "zero": "zero sharded",
    "layernorm-backward": "layernorm-backward layernorm.safetensors",
}


@pytest.fixture
def samples(tmp_path):
    """Two copies of the sample data: of one run here, and of one as on macOS."""
    return [shutil.copytree(SAMPLES, tmp_path / name) for name in ("here", "macos")]


def run(call, cwd, *, macos=True, **environment):
    """The real command: how it ended, and how often it made each of macOS's calls."""
    notes = cwd.parent / f"{cwd.name}.calls"
    notes.unlink(missing_ok=True)
    if macos:
        environment |= {"PYTHONPATH": str(HIDING), "GRADTOOL_TEST_CALLS": str(notes)}
    done = subprocess.run(
        [*COMMAND, *call.split()], capture_output=True, text=True, check=False, cwd=cwd, env=os.environ | environment
    )
    return done, Counter(notes.read_text().split() if notes.exists() else [])


def content_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_calls_are_hidden():
    code = "import os; print(hasattr(os, 'posix_fallocate'), hasattr(os, 'memfd_create'), os.path.exists('/proc/self'))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}; open('/proc/self/statm')"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(HIDING)},
    )
    assert done.stdout == "False False True\n"
    assert "FileNotFoundError" in done.stderr


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_whole_run_writes_the_same_files_and_syncs_them_fully(samples, call):
    here, there = samples
    expected, none = run(call, here, macos=False)
    done, calls = run(call, there)
    assert (expected.returncode, expected.stderr, none) == (0, "", Counter())
    assert (done.returncode, done.stderr) == (0, "")
    assert content_of(there) == content_of(here)
    assert calls["F_FULLFSYNC"] > 0
    assert calls["F_PREALLOCATE"] > 0 or call.startswith("zero")


def test_norms_are_the_same(samples):
    here, there = (run("norm sharded --top 3 --json", folder, macos=folder.name == "macos") for folder in samples)
    one, other = (json.loads(done.stdout)["data"] for done, _ in (here, there))
    assert {key: one[key] for key in ("norm", "max_abs", "zeros")} == {
        key: other[key] for key in ("norm", "max_abs", "zeros")
    }
    assert [row["norm"] for row in one["per_tensor"]] == [row["norm"] for row in other["per_tensor"]]


@pytest.mark.parametrize("write", ["replace", "inplace"])
def test_a_killed_run_is_recovered(samples, write):
    _, folder = samples
    grads = folder / "sharded"
    old = content_of(grads)
    run("clip sharded --max-norm 1", samples[0])
    new = content_of(samples[0] / "sharded")
    outcomes = Counter()
    for step in range(3, 99, 6):
        done, _ = run(f"clip sharded --max-norm 1 --threads 1 --write {write}", folder, GRADTOOL_FAULT=f"kill@{step}")
        if done.returncode == 0:
            break
        assert done.returncode == -9
        recovered, _ = run("recover sharded", folder)
        assert (recovered.returncode, recovered.stderr) == (0, "")
        found = content_of(grads)
        assert found in (old, new)
        outcomes["old" if found == old else "new"] += 1
        shutil.rmtree(grads)
        shutil.copytree(SAMPLES / "sharded", grads)
    assert min(outcomes["old"], outcomes["new"] + (write == "inplace")) > 0, outcomes


def test_attributes_are_kept(samples):
    _, folder = samples
    path = folder / "sharded" / "model-00001-of-00002.safetensors"
    try:
        os.setxattr(path, "user.note", b"kept")
    except OSError as error:
        pytest.skip(f"this file system has no extended attributes: {error}")
    done, calls = run("clip sharded --max-norm 1", folder)
    # Of two files, when they are made and again at the rename.
    assert (done.returncode, calls["fcopyfile"]) == (0, 4)
    assert os.getxattr(path, "user.note") == b"kept"


def test_a_full_disk_is_known_before_a_byte_is_written(samples):
    _, folder = samples
    before = snapshot(folder)
    done, _ = run("clip sharded --max-norm 1", folder, GRADTOOL_TEST_FULL="1")
    assert done.returncode == 5
    assert "No space left on device" in done.stderr
    assert snapshot(folder) == before


def test_doctor_says_what_is_not_known_there(samples):
    done, _ = run("doctor . --json", samples[1])
    data = json.loads(done.stdout)["data"]
    assert (data["file_system"], data["gpu_driver"], data["writable"]) == (None, None, True)
