"""NaN, Inf, overflow and underflow are results: numpy's warnings about them never reach a user, nor stop a command."""

import itertools
import os
import shutil
import subprocess

import numpy as np
import pytest
from layers import FORMS, layer
from support import COMMAND, NUMPY_TYPES, VALUE_TYPES, read, write

import gradtool
from gradtool import tuning
from gradtool.backends.choose import Choice
from gradtool.backends.storage import STORAGE

COMMANDS = {"compiled": COMMAND, "numpy": ["env", "GRADTOOL_KERNELS=numpy", *COMMAND]}
KINDS = ("every", "huge", "tiny")
# Signaling NaNs, which trap wherever they are converted; the types have 32 and 64 bits.
SIGNALING = {4: 0x7F80_0001, 8: 0x7FF0_0000_0000_0001}


def values(kind, dtype, shape, seed):
    """Values of a kind: NaN, Inf, signaling NaNs and all between; or the largest; or the smallest above 0."""
    storage, rng = STORAGE[dtype], np.random.default_rng(seed)
    codes = rng.integers(0, 2 ** (8 * storage.itemsize) - 1, shape, np.uint64, endpoint=True).astype(storage.bits)
    # By their codes: 0, the smallest, 1 and the largest.
    one = {
        "F64": 1023 << 52,
        "F32": 127 << 23,
        "F16": 15 << 10,
        "BF16": 127 << 7,
        "F8_E4M3": 7 << 3,
        "F8_E5M2": 15 << 2,
    }
    infinite = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "BF16": 0xFF << 7}.get(dtype, storage.overflow)
    if kind == "every":
        fixed = [0, 1, one[dtype], infinite - 1, infinite, storage.quiet_nan, SIGNALING.get(storage.itemsize, 1)]
        codes = np.where(rng.random(shape) < 0.5, rng.choice(np.array(fixed, storage.bits), shape), codes)
    else:
        sign = rng.integers(0, 2, shape).astype(storage.bits) << storage.bits.type(8 * storage.itemsize - 1)
        codes = sign | storage.bits.type({"huge": infinite - 1, "tiny": 1}[kind])
    return codes.astype(storage.bits).view(NUMPY_TYPES[dtype])


def tensors(seed):
    """A tensor of every kind and type."""
    every = itertools.product(KINDS, VALUE_TYPES)
    return {f"{kind}.{dtype}": values(kind, dtype, 300, seed + i) for i, (kind, dtype) in enumerate(every)}


def nonzero(array):
    """The array with ones in the place of zeros."""
    with np.errstate(all="ignore"):
        return np.where(array.astype(np.float64) == 0, np.ones((), array.dtype), array)


def layers(kinds=KINDS, types=VALUE_TYPES, *, statistics=True):
    """A layer of every kind and type, and for overflow those whose scale has another type than X."""
    found = {}
    mixes = [*((dtype, dtype) for dtype in types), *((dtype, "F64") for dtype in types if dtype != "F64")]
    for i, (kind, (dtype, other)) in enumerate(itertools.product(kinds, mixes)):
        parts = {"X": (4, 15), "Y": (4, 15), "mean": 4} if statistics else {"X": (4, 15), "Y": (4, 15)}
        one = {name: values(kind, dtype, shape, 10 * i + n) for n, (name, shape) in enumerate(parts.items())}
        parts = {"Y_grad": (4, 15), "scale": 15, "bias": 15} | ({"inv_std_dev": 4} if statistics else {})
        one |= {name: values(kind, other, shape, 10 * i + n + 4) for n, (name, shape) in enumerate(parts.items())}
        # Nothing can be divided by 0.
        one["scale"] = nonzero(one["scale"])
        found |= {f"{kind}.{dtype}.{other}.{name}": array for name, array in one.items()}
    return found


# By what is run: its arguments, and its exit code.
CALLS = {
    "norm x --per-tensor": 1,
    "norm x --norm-type 3": 1,
    "norm x --norm-type 1000": 1,
    "clip x --max-norm 1 --nonfinite propagate": 0,
    "clip x --max-norm 1 --nonfinite propagate --norm-type 3": 0,
    "clip x --max-norm 1 --nonfinite zero --include F64 --per-tensor --unscale 1e-300": 3,
    "clip x --max-norm 1": 1,
    "clip x --max-value 0.5 --nonfinite zero": 0,
    "accumulate y --into x --nonfinite propagate --weight 1e300": 0,
    "accumulate y y2 --into x --nonfinite propagate --weight 1e300 --weight 1e300 --mean": 0,
    "accumulate y --into x --nonfinite propagate --max-norm 1 --clip-each 1e-300": 0,
    "accumulate y --into x --nonfinite skip": 1,
    "accumulate y --output new --nonfinite propagate --dtype F16": 0,
    "zero x": 0,
    "layernorm-backward layers": 1,
    **{
        f"layernorm-backward layers --nonfinite propagate --kind {form['kind']}"
        + " --invertible" * form["invertible"]: 0
        for form in FORMS.values()
    },
    "layernorm-backward layers --nonfinite propagate --no-affine": 0,
    "layernorm-backward bare --nonfinite propagate": 0,
    "layernorm-backward bare --nonfinite propagate --kind rmsnorm --scale-offset 1e308": 0,
    "layernorm-backward flat --norm-eps 0": 3,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The files that the commands are run on."""
    folder = tmp_path_factory.mktemp("inputs")
    for seed, name in enumerate(("x", "y", "y2")):
        write(folder / name, tensors(100 * seed))
    write(folder / "layers", layers())
    # Squares of huge values of F64 are beyond float64, which is an error of its own.
    write(folder / "bare", layers(("every", "tiny"), VALUE_TYPES[1:], statistics=False))
    flat = np.ones((2, 3), np.float32)
    write(folder / "flat", {"X": flat, "Y_grad": flat, "scale": flat[0]})
    return folder


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", COMMANDS)
def test_a_command_ends_as_it_should_where_warnings_are_errors(tmp_path, inputs, backend, call):
    if backend == "compiled":
        pytest.importorskip("gradtool.backends._kernels")
    shutil.copytree(inputs, tmp_path / "x")
    done = subprocess.run(
        [*COMMANDS[backend], *call.split()],
        cwd=tmp_path / "x",
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == CALLS[call], done.stderr
    messages = [line for line in done.stderr.splitlines() if not line.startswith("  hint: ")]
    assert all(line.startswith("gradtool: ") for line in messages)
    # One of gradtool's own, of what became 0 or subnormal, is no error.
    others = [line for line in messages if "too small for" not in line]
    assert bool(others) == bool(done.returncode)
    assert not any(line.startswith("gradtool: warning: ") for line in others)


def in_threads(folder):
    """Every operation on files that are large enough for two threads."""
    large = {dtype: values("every", dtype, 1 << 18, seed) for seed, dtype in enumerate(VALUE_TYPES)}
    paths = [write(folder / name, large) for name in ("x", "y")]
    yield gradtool.norm(paths[0], norm_type=3, threads=2)
    yield gradtool.clip(paths[0], max_norm=1, nonfinite="propagate", threads=2, fsync=False)
    yield gradtool.clip(paths[0], max_value=0.5, nonfinite="zero", norm_type=3, threads=2, fsync=False)
    yield gradtool.accumulate(paths[1], into=paths[0], weight=[1e300], nonfinite="propagate", threads=2, fsync=False)
    # X that is narrower than the gradient overflows.
    tensors = {f"{dtype}.X": array.reshape(256, 1024) for dtype, array in large.items()}
    for dtype in VALUE_TYPES:
        tensors[f"{dtype}.Y_grad"] = values("every", "F32", (256, 1024), 7)
        tensors[f"{dtype}.scale"] = values("every", "F32", 1024, 8)
        tensors |= {f"{dtype}.{name}": values("every", "F64", 256, 9) for name in ("mean", "inv_std_dev")}
    path = write(folder / "layers", tensors)
    yield gradtool.layernorm_backward(path, nonfinite="propagate", threads=2, fsync=False)


def test_threads_do_not_warn(tmp_path, monkeypatch, backend):
    monkeypatch.setattr("gradtool.engines.choose.choose_backend", lambda *_: Choice(backend, "for a test"))
    # With two threads, none is that of the call; one of them may do all the work.
    assert all(result.call.threads in (1, 2) for result in in_threads(tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_sums_of_wide_rows_do_not_warn(tmp_path, monkeypatch, backend, form):
    monkeypatch.setattr("gradtool.engines.choose.choose_backend", lambda *_: Choice(backend, "for a test"))
    monkeypatch.setattr(tuning, "PATCH_ELEMENTS", 8)
    tensors = layer((2, 16))
    # The sums of the two halves of the first row are Inf and -Inf.
    tensors["Y_grad"][0, 3], tensors["Y_grad"][0, 12] = [np.inf, -np.inf] * np.sign(tensors["scale"][[3, 12]])
    path = write(tmp_path / "x", tensors)
    gradtool.layernorm_backward(path, nonfinite="propagate", **FORMS[form])
    finite = np.isfinite(read(path)["X_grad"])
    assert not finite[0].any()
    assert finite[1].all()


@pytest.mark.parametrize("backend", COMMANDS)
@pytest.mark.parametrize("stored", [True, False])
def test_the_total_of_a_row_that_overflows_does_not_warn(tmp_path, backend, stored):
    # The sum of each of the two stretches is finite, that of both is not.
    tensors = {
        "X": np.tile([1.0, -1.0], (1, 150_000)),
        "Y_grad": np.full((1, 300_000), 4e302),
        "scale": np.ones(300_000),
    }
    tensors["Y_grad"][:, 1 << 18 :] *= 10
    tensors |= {"mean": np.zeros(1), "inv_std_dev": np.ones(1)} if stored else {}
    path = write(tmp_path / "x", tensors)
    command = [*COMMANDS[backend], "layernorm-backward", str(path), "--nonfinite", "propagate"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not np.isfinite(read(path)["X_grad"]).any()


def test_the_settings_of_numpy_are_those_of_the_caller_again(tmp_path):
    path = write(tmp_path / "x", tensors(1))
    with np.errstate(all="raise"):
        before = np.geterr()
        gradtool.norm(path)
        gradtool.clip(path, max_norm=1, nonfinite="propagate")
        with pytest.raises(gradtool.NonFiniteError):
            gradtool.clip(path, max_norm=1)
        assert np.geterr() == before
