"""Recipes of the cookbook that compute something new, against numpy, hashlib and torch."""

import hashlib
import os
import re
import shutil

import numpy as np
import pytest
from pages import ROOT, console_blocks, in_a_shell, lay_out_checkout
from support import encode, read, rounded_once, write_index

from gradtool import accumulate

COOKBOOK = console_blocks(ROOT / "docs" / "cookbook.md")
DILOCO, EMA = "Take DiLoCo's outer step", "Average checkpoints as they come"
NOISE, REPLICAS = "Estimate the gradient noise scale", "Find the rank whose replica differs"
# The learning rate and the momentum of the recipe.
RATE, MOMENTUM = 0.7, 0.9


def tensors(path):
    """The tensors of a file, or of all files of a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: array for file in files for name, array in read(file).items()}


def wide(path):
    return {name: array.astype(np.float64) for name, array in tensors(path).items()}


def bits(arrays):
    return {name: (str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()}


@pytest.fixture
def recipe(tmp_path):
    """Run a section of the cookbook; the folder that it ran in, and what each command printed."""

    def run(heading):
        folder, environment = lay_out_checkout(tmp_path)
        done = in_a_shell(COOKBOOK[heading], folder, environment)
        assert done.returncode == 0, done.stdout
        return folder, done.stdout.split("\0")[:-1]

    return run


def test_the_outer_step_of_diloco_is_float64_rounded_once_at_each_stored_step(recipe):
    folder, printed = recipe(DILOCO)
    samples = folder / "sample_data"
    model = {name: rounded_once(array, "BF16").astype(np.float64) for name, array in wide(samples / "sharded").items()}
    workers = [
        {name: rounded_once(model[name] - 0.5 * array, "BF16").astype(np.float64) for name, array in grad.items()}
        for grad in (wide(samples / f"micro_{worker}.safetensors") for worker in (0, 1))
    ]
    outer, momentum, new = {}, {}, {}
    for name, old in model.items():
        outer[name] = rounded_once(old - 0.5 * workers[0][name] - 0.5 * workers[1][name], "F32")
        grad = outer[name].astype(np.float64)
        momentum[name] = rounded_once(MOMENTUM * 0.0 + grad, "F32")
        new[name] = rounded_once(old - RATE * grad - 0.63 * momentum[name].astype(np.float64), "BF16")
    assert bits(tensors(folder / "outer")) == bits(outer)
    assert bits(tensors(folder / "momentum")) == bits(momentum)
    assert bits(tensors(folder / "model")) == bits(new)
    norms = [
        float(np.sqrt(sum((each.astype(np.float64) ** 2).sum() for each in sums.values()))) for sums in (outer, new)
    ]
    assert [float(text.split()[-1]) for text in (printed[3], printed[5])] == pytest.approx(norms, rel=1e-14)
    assert [path.name for path in sorted((folder / "model").iterdir())] == [
        path.name for path in sorted((samples / "sharded").iterdir())
    ]


@pytest.mark.parametrize("done", [1, 2, 3])
def test_an_outer_step_that_was_killed_can_be_repeated(recipe, done):
    folder, _ = recipe(DILOCO)
    expected = [bits(tensors(folder / name)) for name in ("momentum", "model")]
    for path in ("momentum", "model", "outer", "worker_0", "worker_1"):
        shutil.rmtree(folder / path)
    *start, outer, momentum, model = COOKBOOK[DILOCO]
    step = [outer, momentum, model]
    environment = {"PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}"}
    assert in_a_shell([*start, *step[:done], *step], folder, environment).returncode == 0
    assert [bits(tensors(folder / name)) for name in ("momentum", "model")] == expected


def ulps_apart(a, b):
    """How many values of their type lie between two arrays, at most."""
    codes = [each.view(f"i{each.dtype.itemsize}").astype(np.int64) for each in (a, b)]
    low = np.int64(-1) << (8 * a.dtype.itemsize - 1)
    ordered = [np.where(each < 0, low - each, each) for each in codes]
    return int(np.abs(ordered[0] - ordered[1]).max())


def test_outer_steps_are_those_of_torch_within_an_ulp(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(34)
    start = {f"t{number}": rng.standard_normal((50, 40)) for number in range(4)}

    def shards(path, values, dtype):
        arrays = {name: encode(value, dtype) for name, value in values.items()}
        parts = [dict(list(arrays.items())[part::2]) for part in range(2)]
        write_index(path, {f"{part}.safetensors": each for part, each in enumerate(parts)})
        return path

    model = shards(tmp_path / "model", start, "BF16")
    momentum = shards(tmp_path / "momentum", {name: 0 * value for name, value in start.items()}, "F32")
    params = {name: torch.nn.Parameter(torch.zeros(value.shape, dtype=torch.float64)) for name, value in start.items()}
    optimizer = torch.optim.SGD(params.values(), lr=RATE, momentum=MOMENTUM, nesterov=True)
    for step in range(4):
        old = wide(model)
        trained = [
            shards(
                tmp_path / f"w{step}{worker}", {n: v - rng.standard_normal(v.shape) / 8 for n, v in old.items()}, "BF16"
            )
            for worker in range(3)
        ]
        outer = tmp_path / f"outer{step}"
        accumulate([model, *trained], weight=[1, *[-1 / 3] * 3], dtype="F32", output_dir=outer, shard_like=model)
        accumulate(outer, into=momentum, into_weight=MOMENTUM)
        accumulate([outer, momentum], into=model, weight=[-RATE, -0.63], write="inplace")
        new = [wide(path) for path in trained]
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(torch.from_numpy(old[name]))
                param.grad = torch.from_numpy(old[name] - sum(each[name] for each in new) / 3)
        optimizer.step()
        for name, param in params.items():
            buffer = optimizer.state[param]["momentum_buffer"]
            assert ulps_apart(tensors(model)[name], rounded_once(param.detach().numpy(), "BF16")) <= 1
            # Not in ulps of sums that nearly cancel, because each step was stored.
            assert np.abs(wide(momentum)[name] - buffer.numpy()).max() <= np.spacing(np.float32(2))


def test_a_moving_average_is_float64_rounded_once(recipe):
    folder, printed = recipe(EMA)
    old, new = (wide(folder / "sample_data" / f"micro_{number}.safetensors") for number in (0, 1))
    expected = {name: rounded_once(0.999 * array + 0.001 * new[name], "F32") for name, array in old.items()}
    assert bits(tensors(folder / "ema.safetensors")) == bits(expected)
    norm = np.sqrt(sum((array.astype(np.float64) ** 2).sum() for array in expected.values()))
    assert float(printed[-1].split()[-1]) == pytest.approx(norm, rel=1e-14)


def test_the_gradient_noise_scale_is_that_of_its_formula(recipe):
    folder, printed = recipe(NOISE)
    names = ["micro_0.safetensors", "micro_1.safetensors", "buffer.safetensors", "sharded"]
    # The numbers of samples, from the page about the data.
    sizes = [128, 96, 64, 160]
    grads = [
        np.concatenate([array.ravel() for _, array in sorted(wide(folder / "sample_data" / name).items())])
        for name in names
    ]
    whole, small = sum(sizes), len(sizes) / sum(1 / size for size in sizes)
    square = float(((sum(size * grad for size, grad in zip(sizes, grads, strict=True)) / whole) ** 2).sum())
    mean = sum(float((grad**2).sum()) for grad in grads) / len(grads)
    noise = (mean - square) / (1 / small - 1 / whole)
    signal = (whole * square - small * mean) / (whole - small)
    assert printed[-1] == f"S {noise:.6g}  |G|^2 {signal:.6g}  noise scale {noise / signal:.4g}\n"
    assert not (folder / "mean.safetensors").exists()


def test_both_estimates_of_the_noise_scale_are_unbiased():
    # Gradients of a known mean, and of a known variance for each sample.
    rng, sizes, dim = np.random.default_rng(1), np.array([128, 96, 64, 160]), 64
    whole, small = sizes.sum(), len(sizes) / (1 / sizes).sum()
    truth = np.ones(dim)
    grads = truth + rng.standard_normal((4000, len(sizes), dim)) * 8 / np.sqrt(sizes)[:, None]
    square = ((sizes[:, None] * grads).sum(1) / whole) ** 2
    mean = (grads**2).sum(2).mean(1)
    noise = ((mean - square.sum(1)) / (1 / small - 1 / whole)).mean()
    signal = ((whole * square.sum(1) - small * mean) / (whole - small)).mean()
    assert (noise, signal) == (pytest.approx(64 * dim, rel=0.01), pytest.approx(dim, rel=0.01))


def test_digests_find_the_replica_that_differs(recipe):
    folder, printed = recipe(REPLICAS)
    (name,) = re.findall("tensor '([^']+)'", printed[4])
    replicas = [tensors(folder / f"rank_{rank}") for rank in range(3)]
    assert bits(replicas[0]) == bits(replicas[2])
    assert [key for key in replicas[0] if replicas[0][key].tobytes() != replicas[1][key].tobytes()] == [name]
    whole = hashlib.sha256(b"gradtool.set.1\0")
    for key, array in sorted(replicas[1].items()):
        shape = ",".join(map(str, array.shape))
        leaf = hashlib.sha256(array.tobytes()).digest()
        digest = hashlib.sha256(f"gradtool.tensor.1\0F32\0{shape}\0".encode() + leaf).digest()
        whole.update(len(key).to_bytes(8, "little") + key.encode() + digest)
    assert f"rank 1: {whole.hexdigest()[:16]}" in printed[2]
