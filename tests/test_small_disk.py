"""A real disk that is full, where the machine lets us have one."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from crashes import KILLED
from support import gradtool, read, write, write_index

from gradtool import norm


def mounted(kind, tmp_path):
    """The commands that make a file system of 8 MB and mount it."""
    if kind == "tmpfs":
        return [["mount", "-t", "tmpfs", "-o", "size=8m", "none", tmp_path / "disk"]]
    with (tmp_path / "image").open("wb") as image:
        image.truncate(8 << 20)
    return [
        ["mkfs.ext4", "-q", "-m", "0", tmp_path / "image"],
        ["mount", "-o", "loop", tmp_path / "image", tmp_path / "disk"],
    ]


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    for command in mounted(request.param, tmp_path):
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not there")
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder):
    """Leave no byte."""
    with contextlib.suppress(OSError), (folder / "junk").open("wb", buffering=0) as junk:
        while True:
            junk.write(bytes(4096))


def free_on(disk):
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ""}


def shards(folder, elements):
    write_index(folder, {f"{i}.safetensors": {f"t{i}": np.full(elements, 2.0, np.float32)} for i in range(2)})


@pytest.mark.parametrize("mode", ["replace", "inplace"])
def test_a_disk_that_is_too_small_is_exit_5_and_no_changed_byte(disk, mode):
    shards(disk / "set", 700_000)
    before = content_of(disk / "set")
    for arguments in (["clip", "--max-norm", "1"], ["zero"] if mode == "inplace" else ["clip", "--max-value", "1"]):
        done = gradtool(*arguments, disk / "set", "--write", mode)
        assert (done.returncode, done.stdout) == (5, "")
        message, hint = done.stderr.splitlines()
        assert message.startswith("gradtool: error: ")
        # In place, it needs as much beside the data as elsewhere.
        wants = {
            "replace": "free some space, or use --output-dir to write to another disk",
            "inplace": "free some space",
        }
        assert hint == f"  hint: {wants[mode]}"
        said = "new files need" if mode == "replace" else "writing in place needs"
        needed, free = re.search(rf"{said} ([\d,]+) bytes here.*?, ([\d,]+) are free", message).groups()
        files = sum(path.stat().st_size for path in (disk / "set").glob("*.safetensors"))
        assert files <= int(needed.replace(",", "")) <= 1.1 * files
        assert int(free.replace(",", "")) == pytest.approx(free_on(disk), abs=1 << 16)
        assert int(free.replace(",", "")) < int(needed.replace(",", ""))
        assert content_of(disk / "set") == before


@pytest.mark.parametrize("mode", ["replace", "inplace"])
def test_a_disk_that_is_full_to_the_last_byte_is_no_other(disk, mode):
    shards(disk / "set", 100_000)
    fill(disk)
    before = content_of(disk / "set")
    done = gradtool("clip", disk / "set", "--max-norm", "1", "--write", mode)
    assert done.returncode == 5, done
    assert content_of(disk / "set") == before


def test_what_needs_no_room_is_done_on_a_full_disk(disk):
    shards(disk / "set", 100_000)
    fill(disk)
    done = gradtool("clip", disk / "set", "--max-norm", "1e9", "--json")
    assert done.returncode == 0, done
    assert gradtool("recover", disk / "set").returncode == 0


def test_without_room_for_the_factors_of_units_nothing_is_changed(disk, tmp_path):
    grads = write(tmp_path / "g.safetensors", {"a": np.full((400_000, 2), 2.0, np.float32)})
    before = grads.read_bytes()
    fill(disk)
    # Much less than 8 bytes for each unit; enough for Python to find the folder usable.
    with (disk / "junk").open("r+b") as junk:
        junk.truncate(junk.seek(0, 2) - (1 << 20))
    # In a process of its own: Python looks for the folder once.
    environment = {"TMPDIR": str(disk), "PYTHONUNBUFFERED": "1"}
    params = write(tmp_path / "p.safetensors", read(grads))
    done = gradtool("clip", grads, "--agc", "0.1", "--params", params, env=environment)
    message = (
        f"{disk}: cannot store the factors of units: No space left on device\n  hint: set TMPDIR to another folder"
    )
    assert (done.returncode, done.stderr) == (5, f"gradtool: error: {message}\n")
    assert grads.read_bytes() == before


def test_doctor_says_that_a_disk_is_full(disk):
    shards(disk / "set", 1000)
    fill(disk)
    done = gradtool("doctor", disk / "set")
    facts = dict(line.split("\t")[:2] for line in done.stdout.splitlines())
    assert (done.returncode, done.stderr, facts["writable"], facts["free_bytes"]) == (0, "", "yes", "0"), done


@pytest.mark.parametrize("mode", ["replace", "inplace"])
def test_a_disk_without_room_for_the_state_leaves_the_gradients_elsewhere(disk, tmp_path, mode):
    shards(tmp_path / "set", 1000)
    # Of many norms, so that no remainder of the disk has room for another one.
    known = {"gradtool_state": 1, "rule": "percentile", "norm_type": 2.0, "mean": None, "variance": None}
    (disk / "clip.json").write_text(json.dumps(known | {"steps": 9000, "norms": [0.1] * 9000}))
    fill(disk)
    before, state = content_of(tmp_path / "set"), (disk / "clip.json").read_bytes()
    done = gradtool(
        *("clip", tmp_path / "set", "--limit", "percentile=1", "--state", disk / "clip.json", "--write", mode)
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert "free some space" in done.stderr
    assert (content_of(tmp_path / "set"), (disk / "clip.json").read_bytes()) == (before, state)
    assert not [path for folder in (disk, tmp_path / "set") for path in folder.glob(".gradtool*")]


@pytest.mark.parametrize("mode", ["replace", "inplace"])
def test_room_that_is_just_enough_is_enough(disk, mode):
    shards(disk / "set", 250_000)
    assert gradtool("zero", disk / "set", "--write", mode).returncode == 0
    assert not any(read(disk / "set" / f"{i}.safetensors")[f"t{i}"].any() for i in range(2))


def test_a_killed_run_is_completed_on_a_disk_that_is_full(disk):
    path = write(disk / "set" / "x.safetensors", {"t": np.full(600_000, 2.0, np.float32)})
    before = path.read_bytes()
    for step in itertools.count(4):
        done = gradtool(
            *("clip", path, "--max-norm", "1", "--write", "inplace", "--threads", "1"),
            env={"GRADTOOL_FAULT": f"kill@{step}"},
        )
        assert done.returncode == KILLED
        if path.read_bytes() != before:
            break
        assert gradtool("recover", path).returncode == 0
    fill(disk)
    done = gradtool("recover", path)
    assert (done.returncode, done.stdout.splitlines()[1]) == (0, "untouched\t0"), done
    assert done.stdout.startswith("finished\t1\n")
    assert norm(path).norm == pytest.approx(1)
    assert list((disk / "set").iterdir()) == [path]


def test_a_full_disk_names_the_option_that_this_call_has(disk):
    write(disk / "one.safetensors", {"a": np.full(1_200_000, 2.0, np.float32)})
    write(disk.parent / "grad", {"a": np.full(1_200_000, 2.0, np.float32)})
    for arguments, hint in (
        (["clip", disk / "one.safetensors", "--max-norm", "1"], "use --output to write to another disk"),
        (
            ["accumulate", disk.parent / "grad", "--into", disk / "one.safetensors"],
            "use --output to write to another disk",
        ),
        (
            ["clip", disk / "one.safetensors", "--max-norm", "1", "--output", disk / "new"],
            "use another disk for --output",
        ),
        (
            ["clip", disk / "one.safetensors", "--max-norm", "1", "--output-dir", disk / "new"],
            "use another disk for --output-dir",
        ),
    ):
        done = gradtool(*arguments)
        assert (done.returncode, done.stdout) == (5, "")
        message, *hints = done.stderr.splitlines()
        assert ": new files need 4,80" in message
        assert hints == [f"  hint: free some space, or {hint}"]
    answer = json.loads(gradtool("clip", disk / "one.safetensors", "--max-norm", "1", "--json").stdout)
    assert answer["errors"][0]["hint"] == "free some space, or use --output to write to another disk"
