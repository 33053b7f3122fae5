"""What the tests share: files made byte by byte, and truth that does not come from gradtool."""

import hashlib
import json
import math
import os
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from runner import run
from schema import check_printed

from gradtool import BackendUnavailableError
from gradtool.backends.choose import choose
from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.cuda.backend import CudaBackend
from gradtool.backends.values import STATISTICS as ALL_STATISTICS
from gradtool.backends.values import Piece
from gradtool.store.fs import File, Folder
from gradtool.store.transaction.commit import Commit, Target
from gradtool.store.transaction.open import acquire
from gradtool.store.transaction.targets import Targets
from gradtool.store.transaction.transaction import Transaction

# The types that carry values, as others implement them: numpy and ml_dtypes.
NUMPY_TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
VALUE_TYPES = tuple(NUMPY_TYPES)
# The only NaN that is ever written, by type.
QUIET_NANS = {
    name: int.from_bytes(np.array(math.nan).astype(kind).tobytes(), "little") for name, kind in NUMPY_TYPES.items()
}
NUMPY_TYPES |= {"I32": np.dtype(np.int32), "U8": np.dtype(np.uint8)}
SAMPLES = Path(__file__).parent.parent / "sample_data"
# -P: what is installed, and not what lies in the current folder.
COMMAND = [sys.executable, "-P", "-m", "gradtool"]
ONES = np.ones(2, np.float32)
# What a write has lost.
LOSSES = ("new_zeros", "new_subnormals")
# What else a backend finds in a block.
STATISTICS = ("sums", "exponents", *(name for name in ALL_STATISTICS if name not in LOSSES))


def backends():
    """Every backend that there may be: its name, and what makes it or raises `ImportError` saying why not."""
    levels = {f"compiled {level}": partial(compiled, level) for level in ("x86-64-v4", "x86-64-v3", "any")}
    return {"numpy": NumpyBackend, "compiled": compiled, **levels, "shim": shim, "cuda": cuda}


def compiled(level=None):
    """The compiled kernels, from now on those for a level of the processor; by default the best that it runs."""
    from gradtool.backends import _kernels
    from gradtool.backends.compiled import CompiledBackend

    levels = _kernels.levels()
    if level is not None and level not in levels:
        raise ImportError(f"the kernels for {level} do not run here, only those for {', '.join(levels)}")
    _kernels.use(level or levels[0])
    return CompiledBackend()


def shim(**options):
    """The CUDA backend, on a GPU made of the processor."""
    import shim_device

    if shim_device.COMPILER is None:
        raise ImportError("no C++ compiler is found, which the CUDA kernels' source needs to run on the processor")
    return CudaBackend(shim_device.ShimDevice(**options))


def cuda():
    """The CUDA backend on the GPU with the number GRADTOOL_TEST_DEVICE, or 0."""
    try:
        return choose("cuda", int(os.environ.get("GRADTOOL_TEST_DEVICE", "0"))).backend
    except BackendUnavailableError as error:
        raise ImportError(f"no GPU: {error}") from error


def bytes_of_memory(nbytes):
    return memoryview(bytearray(nbytes))


def bits_of(array):
    return array.view(f"u{array.dtype.itemsize}")


def encode(values, dtype):
    """Numbers as an array of a storage type."""
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(NUMPY_TYPES[dtype])


@np.errstate(all="ignore")
def rounded_once(values, dtype):
    """Float64 values in a storage type: the nearest of all its values, or of two the one with the even code.

    Found by comparing exact distances, because ml_dtypes goes through float32. What overflows is infinite, or NaN where
    there is no infinity; every NaN is the quiet one.
    """
    kind = NUMPY_TYPES[dtype]
    if kind.itemsize >= 4:
        codes = bits_of(values.astype(kind))
        return np.where(np.isnan(values), QUIET_NANS[dtype], codes).astype(codes.dtype).view(kind)
    unsigned = np.arange(2 ** (8 * kind.itemsize - 1)).astype(f"u{kind.itemsize}")
    numbers = unsigned.view(kind).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    # One step more, to which what overflows is nearest.
    numbers = np.append(numbers, 2 * numbers[-1] - numbers[-2])
    magnitudes = np.minimum(np.abs(values), numbers[-1])
    above = np.clip(np.searchsorted(numbers, magnitudes), 1, len(numbers) - 1)
    # Exact where it matters: a distance between neighbours is, unless it is longer than the other one.
    below, up = magnitudes - numbers[above - 1], numbers[above] - magnitudes
    codes = np.where((up < below) | ((up == below) & (above % 2 == 0)), above, above - 1).astype(unsigned.dtype)
    sign = unsigned.dtype.type(1 << (8 * kind.itemsize - 1))
    codes = np.where(np.signbit(values), codes | sign, codes)
    is_nan = np.isnan(values) | np.isnan(codes.view(kind).astype(np.float64))
    return np.where(is_nan, QUIET_NANS[dtype], codes).astype(unsigned.dtype).view(kind)


def gaussian(elements, dtype, seed=3):
    """Values over many orders of magnitude, with zeros of both signs among them."""
    rng = np.random.default_rng(seed)
    spread = 3 if dtype.startswith("F8") else 8
    values = rng.standard_normal(elements) * 10.0 ** rng.integers(-spread, 2, elements)
    values[rng.random(elements) < 0.01] = 0.0
    values[rng.random(elements) < 0.01] = -0.0
    return encode(values, dtype)


def block_of(*arrays, lead=0):
    """A writable block that holds the arrays one after another, and the pieces in it."""
    data = bytearray(b"\xff" * lead)
    pieces = []
    names = {dtype: name for name, dtype in NUMPY_TYPES.items()}
    for array in arrays:
        pieces.append(Piece(names[array.dtype], len(data), array.size))
        data += array.tobytes()
    return memoryview(data), pieces


def stored(block, piece):
    itemsize = NUMPY_TYPES[piece.dtype].itemsize
    raw = np.frombuffer(block, np.uint8, piece.elements * itemsize, piece.offset)
    return raw.copy().view(NUMPY_TYPES[piece.dtype])


def build(tensors, metadata=None, padding=0):
    """The bytes of a safetensors file; `tensors` maps names to arrays."""
    header, data = {} if metadata is None else {"__metadata__": metadata}, b""
    names = {dtype: name for name, dtype in NUMPY_TYPES.items()}
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    return with_header(header, data, padding)


def with_header(header, data=b"", padding=0, length=None):
    """A file with any header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * padding
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write(path, tensors, metadata=None, padding=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(build(tensors, metadata, padding))
    return path


def sample(folder):
    """A file whose norm is 5."""
    return write(folder / "x.safetensors", {"a": encode([3, 4], "F32"), "b": encode([0, 0], "BF16")})


def write_index(folder, shards, weight_map=None):
    """An index and its shards; `shards` maps file names to tensors."""
    mapped = {name: file for file, tensors in shards.items() for name in tensors}
    for file, tensors in shards.items():
        write(folder / file, tensors)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": mapped if weight_map is None else weight_map}))
    return index


def read(path):
    """Name to array, by offsets and nothing else."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]], np.uint8)
        .view(NUMPY_TYPES[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in header.items()
    }


def canonical_tile_sums(terms):
    """The tile sums of DESIGN's section on arithmetic, spelled out with Python floats."""
    return [_canonical_sum(terms[start : start + 65_536]) for start in range(0, len(terms), 65_536)]


# Each backend in turn is compared with the same sums.
_SUMS = {}


def _canonical_sum(tile):
    key = hashlib.sha256(struct.pack(f"{len(tile)}d", *tile)).digest()
    if key not in _SUMS:
        lanes = [0.0] * 2048
        for i, term in enumerate(tile):
            lanes[i % 2048] += term
        while len(lanes) > 1:
            lanes = [lanes[j] + lanes[j + 1] for j in range(0, len(lanes), 2)]
        _SUMS[key] = lanes[0]
    return _SUMS[key]


def canonical_norm(arrays):
    """The L2 norm by the contract, from the values as Python floats."""
    sums = [
        one for array in arrays for one in canonical_tile_sums([x * x for x in array.astype(float).ravel().tolist()])
    ]
    return math.sqrt(math.fsum(sums))


def registered(paths, *, fsync=True):
    """A run that keeps others from some files, until it is closed."""
    run = Transaction(Targets(map(Path, paths)), fsync=fsync)
    try:
        acquire(run)
    except BaseException:
        run.close()
        raise
    return run


def targets_of(run, paths):
    """The files of a run that are changed in place."""
    located = [(*run.targets.locate(path), path.stat()) for path in paths]
    return [Target(file_in(folder, name), status, status.st_size) for folder, name, status in located]


def in_place(run, paths):
    """The commit of a run that changes files in place, and its redo log."""
    commit = Commit(run)
    return commit, commit.overwrite(targets_of(run, paths))


_folders = []


def file_in(folder, name):
    """A file of an open folder."""
    status = folder.status(name)
    return File(folder, name, status.st_dev, status.st_ino)


def file_at(path):
    """A file as the store writes to it."""
    _folders.append(Folder.at(path.parent))
    return file_in(_folders[-1], path.name)


def close_folders():
    """Close the folders of such files, once a test has ended."""
    while _folders:
        _folders.pop().close()


def write_back_in_time(path, content):
    """Write to a file, from its end backwards, and set its date back, as `rsync --inplace --times` does."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-len(content), os.SEEK_END)
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    until_told(path, before)


def until_told(path, before):
    """Wait until the clock of the file system tells a change of a file from what it was before."""
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, path.stat().st_mtime_ns))


def snapshot(folder):
    """Everything about the files of a folder that a run which changes nothing must leave alone."""
    return {
        path: (path.read_bytes(), path.stat().st_ino, path.stat().st_mtime_ns, path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def gradtool(*arguments, cwd=None, env=None, **streams):
    """Run the real command, in a process of its own where it is given streams or settings of Python, else in a fork."""
    env = env or {}
    if not streams and not any(name.startswith("PYTHON") for name in env):
        done = run(*arguments, cwd=cwd, env=env)
        return subprocess.CompletedProcess(arguments, done.code, done.out, done.err)
    # Python's usual buffers, because unbuffered streams hide what fails at the end.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | env
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        check=False,
        cwd=cwd,
        env=environment,
        timeout=120,
        **{"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams,
    )
    check_printed(arguments, done.stdout)
    return done


def gradtool_json(*arguments, **options):
    """Run the real command with --json; the parsed object, checked against the exit code."""
    done = gradtool(*arguments, "--json", **options)
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == done.returncode
    return answer
