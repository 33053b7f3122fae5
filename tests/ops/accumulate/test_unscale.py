"""`accumulate --unscale`: gradients are divided by the loss scale, once, before their sum is rounded."""

import math
from fractions import Fraction

import numpy as np
import pytest
from buffers import f32, lay_out
from support import gaussian, gradtool, read, rounded_once, write

from gradtool import BadInputError, UsageError, accumulate, clip


def test_gradients_are_divided_and_the_buffer_is_not(tmp_path):
    path, grads = lay_out(tmp_path, f32(1, 2, 3), f32(1024, 2048, 0), f32(0, 1024, 512))
    result = accumulate(grads, into=path, unscale=1024, per_gradient=True)
    assert read(path)["a"].tolist() == [2, 5, 3.5]
    assert (result.unscale, result.weight_sum) == (1024.0, 2.0)
    assert [row.norm for row in result.per_gradient] == [math.sqrt(5), math.sqrt(1.25)]
    # As between the sum of what was added and each gradient.
    assert [row.distance for row in result.per_gradient] == [math.sqrt(1.25), math.sqrt(5)]


@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16"])
@pytest.mark.parametrize("unscale", [1024.0, 3.0, 1000.0, 0.7])
def test_the_division_is_rounded_once(tmp_path, dtype, unscale):
    grad = gaussian(5000, dtype, seed=3)
    path, grads = lay_out(tmp_path, np.zeros(5000, grad.dtype), grad)
    accumulate(grads, into=path, overwrite=True, unscale=unscale)
    # Python divides whole numbers with a single rounding.
    quotients = [Fraction(float(value)) / Fraction(unscale) for value in grad]
    expected = np.array([quotient.numerator / quotient.denominator for quotient in quotients])
    assert np.array_equal(read(path)["a"], rounded_once(expected, dtype))


def test_a_power_of_two_gives_the_bits_that_unscaled_gradients_give(tmp_path):
    scaled, plain = [gaussian(1000, "F32", seed=seed) for seed in (1, 2)], tmp_path / "plain"
    _, grads = lay_out(tmp_path, gaussian(1000, "F32", seed=9), *scaled)
    accumulate(grads, output=tmp_path / "scaled", unscale=65536, weight=[0.3, 0.6], mean=True, max_norm=1e-5)
    halves = []
    for number, grad in enumerate(grads):
        clip(grad, unscale=65536, max_norm=math.inf, output=tmp_path / f"{number}")
        halves.append(tmp_path / f"{number}")
    accumulate(halves, output=plain, weight=[0.3, 0.6], mean=True, max_norm=1e-5)
    assert (tmp_path / "scaled").read_bytes() == plain.read_bytes()


def test_weights_means_medians_and_limits_are_those_of_unscaled_gradients(tmp_path):
    path, grads = lay_out(tmp_path, f32(0, 0), f32(30, 40), f32(6, 8), f32(0, 0))
    accumulate(grads, into=path, overwrite=True, unscale=10, weight=[2, 3, 5], mean=True)
    assert read(path)["a"].tolist() == f32(0.78, 1.04).tolist()
    accumulate(grads, into=path, overwrite=True, unscale=2, reduce="median")
    assert read(path)["a"].tolist() == [3, 4]
    result = accumulate(grads, into=path, overwrite=True, unscale=10, clip_each=2.5, eps=0, per_gradient=True)
    assert read(path)["a"].tolist() == f32(2.1, 2.8).tolist()
    assert [(row.norm, row.coef) for row in result.per_gradient] == [(5, 0.5), (1, 1), (0, 1)]
    result = accumulate(grads, into=path, overwrite=True, unscale=4, max_norm=3, eps=0)
    assert (read(path)["a"].tolist(), result.sum_norm) == (f32(1.8, 2.4).tolist(), 15)


def test_tensors_with_divisors_of_their_own_are_unscaled_too(tmp_path):
    a = write(tmp_path / "a", {"x": f32(8), "y": f32(8)})
    b = write(tmp_path / "b", {"x": f32(24)})
    accumulate([a, b], output=tmp_path / "new", unscale=8, mean=True, missing="skip")
    assert {name: values.tolist() for name, values in read(tmp_path / "new").items()} == {"x": [2], "y": [1]}


def test_a_scale_out_of_range_is_refused(tmp_path):
    path, grads = lay_out(tmp_path, f32(1), f32(1))
    before = path.read_bytes()
    for value in (0, -1, math.inf, math.nan):
        with pytest.raises(UsageError, match="^unscale must be above 0 and finite"):
            accumulate(grads, into=path, unscale=value)
    with pytest.raises(BadInputError, match=r"the weights add up to 1e\+100, out of range for unscale=1e\+300"):
        accumulate(grads, into=path, unscale=1e300, weight=[1e100], mean=True)
    assert path.read_bytes() == before


def test_the_command_takes_it(tmp_path):
    path, grads = lay_out(tmp_path, f32(0, 0), f32(30, 40))
    done = gradtool("accumulate", *grads, "--into", path, "--unscale", "10")
    assert (done.returncode, read(path)["a"].tolist()) == (0, [3, 4])
