"""Errors beside exact results, in units in the last place (ulps) of the type that is stored: ours, and torch's.

    pytest tests/benchmarks/test_accuracy.py --timing

The exact results are sums and quotients of numpy's longdouble, or of `math.fsum`, on the same values.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import gradtool

try:
    import torch
except ImportError:
    torch = None

if np.finfo(np.longdouble).nmant < 63:
    pytest.skip("needs a long double with more bits than float64", allow_module_level=True)

TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}


def ulps(found, exact, dtype):
    """The largest error, in ulps of a type at the exact value."""
    found, exact = np.asarray(found, np.longdouble), np.asarray(exact, np.longdouble)
    info = ml_dtypes.finfo(TYPES[dtype])
    _, exponent = np.frexp(np.maximum(np.abs(exact), np.longdouble(float(info.smallest_normal))))
    return float(np.max(np.abs(found - exact) / np.ldexp(np.longdouble(1), exponent - 1 - info.nmant)))


def exact_norm(values):
    return np.sqrt(np.longdouble(math.fsum(np.square(values, dtype=np.float64))))


def gaussian(elements, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(elements, np.float32).astype(TYPES[dtype])


def tensor(values):
    """The same values in torch."""
    if values.dtype == np.float32:
        return torch.from_numpy(values.copy())
    return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)


def numbers(one):
    return one.to(torch.float64).numpy()


def note(bench, what, ours, theirs, limit):
    """A row of the table; ours must keep within its limit."""
    detail = "" if theirs is None else f"torch {torch.__version__}: {theirs:,.3g}"
    bench.note(what, f"{ours:.2g} ulp", f"<= {limit}", detail)
    assert ours <= limit


@pytest.mark.parametrize("dtype", TYPES)
def test_the_norm(bench, tmp_path, dtype):
    values = gaussian(3_000_000 if bench.timing else 30_000, dtype)
    save_file({"g": values}, tmp_path / "g.safetensors")
    exact = exact_norm(values.astype(np.float64))
    ours = ulps(gradtool.norm(tmp_path / "g.safetensors").norm, exact, dtype)
    theirs = torch and ulps(float(torch.nn.utils.get_total_norm([tensor(values)])), exact, dtype)
    note(bench, f"norm of {values.size:,} {dtype} values", ours, theirs, 0.01)


@pytest.mark.parametrize("dtype", TYPES)
def test_clip(bench, tmp_path, dtype):
    values = gaussian(5_000_000 if bench.timing else 50_000, dtype)
    save_file({"g": values}, tmp_path / "g.safetensors")
    exact = values.astype(np.longdouble) / (exact_norm(values.astype(np.float64)) + np.longdouble("1e-6"))
    gradtool.clip(tmp_path / "g.safetensors", max_norm=1.0, fsync=False)
    ours = ulps(load_file(tmp_path / "g.safetensors")["g"], exact, dtype)
    theirs = None
    if torch:
        parameter = torch.nn.Parameter(torch.zeros(values.size, dtype=tensor(values).dtype))
        parameter.grad = tensor(values)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        theirs = ulps(numbers(parameter.grad), exact, dtype)
    # Half an ulp for each of two roundings, of the coefficient and of the product; that of the first may count twice.
    note(bench, f"clip of {values.size:,} {dtype} values", ours, theirs, 1.5)


@pytest.mark.parametrize("dtype", TYPES)
def test_accumulate(bench, tmp_path, dtype):
    count, elements = 64, 1_000_000 if bench.timing else 10_000
    gradients = [gaussian(elements, dtype, seed) for seed in range(count)]
    paths = [tmp_path / f"{number}.safetensors" for number in range(count)]
    for path, values in zip(paths, gradients, strict=True):
        save_file({"g": np.abs(values)}, path)
    exact = sum(np.abs(values.astype(np.longdouble)) for values in gradients)
    gradtool.accumulate(paths[1:], into=paths[0], fsync=False)
    ours = ulps(load_file(paths[0])["g"], exact, dtype)
    theirs = None
    if torch:
        total = tensor(np.abs(gradients[0]))
        for values in gradients[1:]:
            total += tensor(np.abs(values))
        theirs = ulps(numbers(total), exact, dtype)
    note(bench, f"{count} {dtype} gradients accumulated", ours, theirs, 0.51)


def test_layer_norm_backward_of_large_inputs(bench, tmp_path):
    rows, columns, eps = 256 if bench.timing else 16, 1024, np.longdouble("1e-5")
    x, y_grad = (gaussian(rows * columns, "f32", seed).reshape(rows, columns) for seed in range(2))
    x, scale = x + np.float32(1e4), gaussian(columns, "f32", 2)
    save_file({"X": x, "Y_grad": y_grad, "scale": scale}, tmp_path / "n.safetensors")
    wide, grad = x.astype(np.longdouble), y_grad.astype(np.longdouble) * scale
    away = wide - wide.mean(1, keepdims=True)
    inv_std_dev = 1 / np.sqrt(np.square(away).mean(1, keepdims=True) + eps)
    xh = away * inv_std_dev
    exact = inv_std_dev * (grad - grad.mean(1, keepdims=True) - xh * (grad * xh).mean(1, keepdims=True))
    gradtool.layernorm_backward(tmp_path / "n.safetensors", output=tmp_path / "out.safetensors", fsync=False)
    largest = np.full(exact.shape, np.abs(exact).max())

    def error(found):
        # Beside the largest gradient: small ones are differences of large numbers.
        return ulps(np.asarray(found, np.longdouble) - exact + largest, largest, "f32")

    ours = error(load_file(tmp_path / "out.safetensors")["X_grad"])
    theirs = None
    if torch:
        one = tensor(x).requires_grad_()
        torch.nn.functional.layer_norm(one, (columns,), tensor(scale), None, 1e-5).backward(tensor(y_grad))
        theirs = error(numbers(one.grad))
    note(bench, "layernorm-backward of inputs about 10,000", ours, theirs, 0.51)
