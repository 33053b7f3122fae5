"""Many small files in one call, and many calls from Python: what counts is the work for each, not for its bytes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import read, write

MANY = Path(__file__).parent / "many.py"


def files(bench, *, alike):
    """2,000 files of 100 KB, of the same names or of names of their own; few when not timed."""
    folder = bench.folder / ("alike" if alike else "many")
    if not folder.exists():
        folder.mkdir()
        values = np.random.default_rng(0).standard_normal(25_000, np.float32)
        for number in range(2000 if bench.timing else 20):
            prefix = "" if alike else f"{number}."
            write(folder / f"{number:05}.safetensors", {f"{prefix}w": values[:20_000], f"{prefix}b": values[20_000:]})
    return folder


@pytest.mark.parametrize(("command", "target"), [("norm", 1.5), ("clip", 2), ("accumulate", 2.5)])
def test_many_small_files(bench, gradtool_command, command, target):
    folder = files(bench, alike=command == "accumulate")
    paths = sorted(folder.iterdir())
    arguments = {
        "norm": [str(folder)],
        # Halved in each round, so that there is always something to clip.
        "clip": [str(folder), "--max-norm", "0.5", "--total-norm", "1", "--eps", "0", "--no-fsync"],
        "accumulate": [*map(str, paths[1:]), "--into", str(paths[0]), "--no-fsync"],
    }
    before = read(paths[0])
    ours, plain = bench.in_turn(
        [[*gradtool_command, command, *arguments[command]], [sys.executable, str(MANY), command, str(folder)]]
    )
    if command == "clip":
        rounds = 2 * (bench.rounds + bench.timing)
        assert all(np.array_equal(read(paths[0])[name], before[name] * np.float32(0.5**rounds)) for name in before)
    ratio = ours.median / plain.median
    detail = f"{ours.median:.2f} s, {ours.median / len(paths) * 1e3:.2f} ms a file, loop {plain.median:.2f} s"
    bench.note(f"{command}, 2,000 files of 100 KB, beside a loop", f"{ratio:.2f}x", f"<= {target}x", detail)
    assert not bench.timing or ratio <= target


@pytest.mark.parametrize("what", ["norm", "clip"])
def test_many_calls_from_python(bench, what):
    values = np.random.default_rng(0).standard_normal(25_000, np.float32)
    path = write(bench.folder / "called", {f"t{number}": part for number, part in enumerate(np.split(values, 20))})
    milliseconds = {}
    for whose in ("gradtool", "plain"):
        command = [sys.executable, str(MANY), whose, what, str(path), "1000" if bench.timing else "2"]
        milliseconds[whose] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    ours, plain = milliseconds.values()
    detail = f"{ours:.2f} ms a call, loop {plain:.2f} ms"
    bench.note(f"{what} from Python, 20 tensors, beside a loop", f"{ours / plain:.1f}x", "-", detail)
