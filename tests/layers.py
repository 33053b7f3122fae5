"""What the tests of layernorm-backward share: layers, the formula in float64, and how far a result may be off."""

import math

import ml_dtypes
import numpy as np
import pytest
from support import NUMPY_TYPES, VALUE_TYPES, encode, read, snapshot, write

from gradtool import BadInputError, NonFiniteError, UsageError, layernorm_backward

FORMS = {
    "layernorm": {"kind": "layernorm", "invertible": False},
    "rmsnorm": {"kind": "rmsnorm", "invertible": False},
    "layernorm, invertible": {"kind": "layernorm", "invertible": True},
    "rmsnorm, invertible": {"kind": "rmsnorm", "invertible": True},
}
OUTPUTS = ("X_grad", "scale_grad", "bias_grad")
# What one rounding to a type may add: half a unit in the last place, as a part of the value, and half of the smallest
# value that is there.
ROUNDING = {
    dtype: (float(info.eps) / 2, float(info.smallest_subnormal) / 2)
    for dtype, info in ((dtype, ml_dtypes.finfo(NUMPY_TYPES[dtype])) for dtype in VALUE_TYPES)
}
# Float64 sums in another order than numpy's, over max|reference|; at most 2e-15 was seen, DESIGN promises 1e-14.
ARITHMETIC = 1e-14


def layer(shape, axis=-1, types=("F32", "F32", "F32"), *, statistics=True, prefix="", seed=0):
    """All that any form reads, X of the first type, the statistics of the second, all else of the third."""
    rng = np.random.default_rng(seed)
    columns = shape[axis:]
    x = rng.standard_normal(shape) * 2 + 1
    scale = rng.choice([-1, 1], columns) * (rng.random(columns) + 0.5)
    bias = rng.standard_normal(columns)
    rows = x.reshape(math.prod(shape[:axis]), math.prod(columns))
    mean = rows.sum(axis=1) / max(1, rows.shape[1])
    inv_std_dev = 1 / np.sqrt(((rows - mean[:, None]) ** 2).sum(axis=1) / max(1, rows.shape[1]) + 1e-5)
    y = ((rows - mean[:, None]) * inv_std_dev[:, None]).reshape(shape) * scale + bias
    values = {"Y_grad": (types[2], rng.standard_normal(shape)), "X": (types[0], x), "Y": (types[2], y)}
    values |= {"scale": (types[2], scale), "bias": (types[2], bias)}
    if statistics:
        values |= {"mean": (types[1], mean), "inv_std_dev": (types[1], inv_std_dev)}
    return {f"{prefix}{name}": encode(array, dtype) for name, (dtype, array) in values.items()}


def reference(tensors, kind, *, invertible, axis=-1, norm_eps=1e-5):
    """The formulas of DESIGN's section 3, in float64 from the stored values."""
    wide = {name: array.astype(np.float64) for name, array in tensors.items()}
    shape, rms = tensors["Y_grad"].shape, kind == "rmsnorm"
    rows, columns = math.prod(shape[:axis]), math.prod(shape[axis:])
    y_grad, g = wide["Y_grad"].reshape(rows, columns), wide["scale"].ravel()
    if invertible:
        xh = (wide["Y"].reshape(rows, columns) - (0.0 if rms else wide["bias"].ravel())) / g
        r = wide["inv_std_dev"].reshape(rows, 1)
    else:
        x = wide["X"].reshape(rows, columns)
        own_mean = 0.0 if rms else x.mean(axis=1, keepdims=True)
        own_r = 1 / np.sqrt(((x - own_mean) ** 2).mean(axis=1, keepdims=True) + norm_eps)
        mean = 0.0 if rms else wide["mean"].reshape(rows, 1) if "mean" in wide else own_mean
        r = wide["inv_std_dev"].reshape(rows, 1) if "inv_std_dev" in wide else own_r
        xh = (x - mean) * r
    weighted = y_grad * g
    shift = 0.0 if rms else weighted.mean(axis=1, keepdims=True)
    x_grad = r * (weighted - shift - xh * (weighted * xh).mean(axis=1, keepdims=True))
    grads = {"X_grad": x_grad.reshape(shape), "scale_grad": (y_grad * xh).sum(axis=0).reshape(shape[axis:])}
    return grads if rms else grads | {"bias_grad": y_grad.sum(axis=0).reshape(shape[axis:])}


def gradients(path, prefix=""):
    """The outputs that a file holds."""
    return {name: array for name, array in read(path).items() if name.removeprefix(prefix) in OUTPUTS}


def assert_is(found, expected, dtype):
    """Whether a gradient is what the float64 formula gives, rounded once."""
    relative, smallest = ROUNDING[dtype]
    assert found.dtype == NUMPY_TYPES[dtype]
    assert found.shape == expected.shape
    slack = ARITHMETIC * np.abs(expected).max(initial=0)
    assert (np.abs(found.astype(np.float64) - expected) <= relative * np.abs(expected) + smallest + slack).all()


def assert_all(found, expected, x_dtype, scale_dtype):
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert_is(found[name], values, x_dtype if name == "X_grad" else scale_dtype)


KNOWN = {
    "Y_grad": np.array([[0.5, -1, 2, 0.25], [1, 1, -2, 0.5]]),
    "X": np.array([[1.0, 2, 3, 4], [-1, 0, 5, 2]]),
    "scale": np.array([1, 0.5, -2, 3]),
}


def two_layers(folder):
    return write(folder / "x", layer((6, 9), prefix="a.0.") | layer((4, 5), prefix="a.1.", seed=2))


def refused(folder, error, **options):
    """The problems of a call that must be refused and must not change a byte."""
    before = snapshot(folder)
    with pytest.raises(error) as caught:
        layernorm_backward(folder / "x", **options)
    assert snapshot(folder) == before
    assert caught.value.exit_code == {BadInputError: 3, NonFiniteError: 1, UsageError: 2}[error]
    return caught.value.problems
