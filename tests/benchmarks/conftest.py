"""The benchmarks: small and untimed as part of the tests, full size and timed with `--timing`.

    pytest tests/benchmarks --timing

Every figure is a ratio of whole processes measured in turn in one run, with a warm page cache and the inputs restored
before each round; bytes are counted from the file sizes, never guessed from the time.
"""

import importlib.util
import math
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import COMMAND, NUMPY_TYPES, with_header

ROUNDS = 5
TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f64": np.float64}
PEER = Path(__file__).parent / "peer.py"
LAUNCHER = Path(__file__).parent / "launch.py"
HAS_TORCH = importlib.util.find_spec("torch") is not None
_ROWS = []


def pytest_addoption(parser):
    parser.addoption("--timing", action="store_true", help="run the benchmarks at full size and time them")


@dataclass
class Run:
    """Wall seconds and peak memory of the rounds of one command."""

    seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0

    @property
    def median(self):
        return statistics.median(self.seconds)

    def measure(self, command):
        launched = [sys.executable, "-S", str(LAUNCHER), *command]
        done = subprocess.run(launched, stdout=subprocess.PIPE, text=True, check=True)
        seconds, peak_kib, exit_code = done.stdout.split()
        assert exit_code == "0"
        self.seconds.append(float(seconds))
        self.peak_mib = max(self.peak_mib, int(peak_kib) / 1024)


def _write_repeated(path, values, tensors):
    """The same tensor under many names, one at a time: the file may be larger than memory."""
    names = {dtype: name for name, dtype in NUMPY_TYPES.items()}
    entry = {"dtype": names[values.dtype], "shape": list(values.shape)}
    ends = [values.nbytes * (i + 1) for i in range(tensors)]
    header = {f"t{i}": entry | {"data_offsets": [end - values.nbytes, end]} for i, end in enumerate(ends)}
    with path.open("wb") as file:
        file.write(with_header(header))
        for _ in range(tensors):
            file.write(values.tobytes())


def _write_parts(path, repeated, others):
    """Tensors of repeated rows, a part at a time, and others as they are."""
    names = {dtype: name for name, dtype in NUMPY_TYPES.items()}
    header, end = {}, 0
    shapes = {name: ((rows, part.shape[1]), part.dtype) for name, (part, rows) in repeated.items()}
    shapes |= {name: (array.shape, array.dtype) for name, array in others.items()}
    for name, (shape, dtype) in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    with path.open("wb") as file:
        file.write(with_header(header))
        for part, rows in repeated.values():
            for _ in range(rows // len(part)):
                file.write(part.tobytes())
        for array in others.values():
            file.write(array.tobytes())


class Bench:
    """Makes inputs, runs commands in turn, and notes a row of the table."""

    def __init__(self, folder, *, timing):
        self.folder, self.timing = folder, timing
        self.rounds = ROUNDS if timing else 1

    def file(self, dtype, nbytes, tensors, columns=None):
        """A file of Gaussian values: `nbytes` when timed, a thousandth of it when not; in rows of `columns`."""
        path = self.folder / f"{dtype}_{nbytes}_{tensors}_{columns}.safetensors"
        if not path.exists():
            kind = np.dtype(TYPES[dtype])
            elements = nbytes // (1 if self.timing else 1000) // tensors // kind.itemsize
            shape = elements if columns is None else (elements // columns, columns)
            values = np.random.default_rng(0).standard_normal(shape, np.float32).astype(kind)
            _write_repeated(path, values, tensors)
        return path

    def gradients(self, dtype, nbytes, count, columns=None):
        """Several files of the same names and shapes, `nbytes` each."""
        first = self.file(dtype, nbytes, 48, columns)
        paths = [first.with_name(f"{first.stem}_{i}.safetensors") for i in range(count)]
        for path in paths:
            if not path.exists():
                shutil.copyfile(first, path)
        return [str(path) for path in paths]

    def near(self, dtype, nbytes, tensors):
        """A file and one whose values differ by about a thousandth."""
        first = self.file(dtype, nbytes, tensors)
        path = first.with_name(f"{first.stem}_near.safetensors")
        if not path.exists():
            kind = np.dtype(TYPES[dtype])
            elements = nbytes // (1 if self.timing else 1000) // tensors // kind.itemsize
            values, moves = (np.random.default_rng(seed).standard_normal(elements, np.float32) for seed in (0, 1))
            _write_repeated(path, (values.astype(kind).astype(np.float32) * (1 + moves / 1000)).astype(kind), tensors)
        return [str(first), str(path)]

    def layer(self, dtype, nbytes, columns=4096):
        """X and Y_grad of `nbytes` together (a thousandth of it when not timed), and what else a layer norm has."""
        path = self.folder / f"layer_{dtype}_{nbytes}.safetensors"
        if not path.exists():
            kind, rng = np.dtype(TYPES[dtype]), np.random.default_rng(0)
            rows = max(64, nbytes // (1 if self.timing else 1000) // 2 // kind.itemsize // columns // 64 * 64)
            part = rng.standard_normal((64, columns), np.float32).astype(kind)
            statistics = {name: np.ones((rows, 1), kind) for name in ("mean", "inv_std_dev")}
            weights = {name: rng.standard_normal(columns, np.float32).astype(kind) for name in ("scale", "bias")}
            _write_parts(path, {"X": (part, rows), "Y_grad": (part, rows)}, statistics | weights)
        return path

    def restored(self, source):
        """A copy of an input that a command may change, in the page cache."""
        return Path(shutil.copyfile(source, self.folder / "work.safetensors"))

    def in_turn(self, commands, restore=None, *, settled=False):
        """Each command once a round, after one that does not count; `settled`: when the disk has nothing else to do."""
        runs = [Run() for _ in commands]
        for number in range(self.rounds + self.timing):
            for run, command in zip(runs, commands, strict=True):
                if restore is not None:
                    # Twice, and the first is dropped: so all find as much memory that was used before, which in a
                    # virtual machine is much faster than what was not, whoever comes before them.
                    self.restored(restore).rename(self.folder / "dropped")
                    self.restored(restore)
                    if settled and self.timing:
                        os.sync()
                    (self.folder / "dropped").unlink()
                (run if number or not self.timing else Run()).measure(command)
        return runs

    def note(self, what, figure, target, detail=""):
        """A row of the table; with timing on, one that must reach its target."""
        _ROWS.append((what, figure, target, detail))


@pytest.fixture(scope="session")
def _bench_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def bench(request, _bench_folder):
    return Bench(_bench_folder, timing=request.config.getoption("--timing", default=False))


@pytest.fixture
def gradtool_command():
    script = Path(sys.executable).parent / "gradtool"
    return [str(script)] if script.exists() else COMMAND


@pytest.fixture
def peer_command():
    if not HAS_TORCH:
        pytest.skip("the peer needs torch: pip install '.[bench]'")
    return [sys.executable, str(PEER)]


def pytest_terminal_summary(terminalreporter, config):
    if _ROWS and config.getoption("--timing", default=False):
        terminalreporter.write_line(f"\n{'benchmark':44} {'figure':>10} {'target':>10}  detail")
        for what, figure, target, detail in _ROWS:
            terminalreporter.write_line(f"{what:44} {figure:>10} {target:>10}  {detail}")
