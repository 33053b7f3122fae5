"""What a user writes today: load everything with torch, work it out, save, rename.

python peer.py norm|clip FILE
python peer.py diff A B
python peer.py accumulate BUFFER GRADIENT...
python peer.py median BUFFER GRADIENT...
python peer.py layernorm FILE [OUTPUT]
"""

import os
import sys

import torch
from safetensors.torch import load_file, save_file


def norm(path):
    print(torch.nn.utils.get_total_norm(load_file(path).values()).item())  # noqa: T201


def clip(path):
    grads = load_file(path)
    norm = torch.nn.utils.get_total_norm(grads.values())
    coef = 1.0 / (norm + 1e-6)
    if coef < 1:
        for grad in grads.values():
            grad.mul_(coef)
    replace(path, grads)


def diff(path, other):
    a, b = load_file(path), load_file(other)
    gaps = squares_a = squares_b = products = 0.0
    max_abs = max_rel = differing = ulps = 0
    for name, first in a.items():
        x, y = first.double(), b[name].double()
        gap = (x - y).abs()
        gaps += gap.square().sum().item()
        squares_a += x.square().sum().item()
        squares_b += y.square().sum().item()
        products += (x * y).sum().item()
        max_abs = max(max_abs, gap.max().item())
        max_rel = max(max_rel, (gap / y.abs()).nan_to_num(0, torch.inf).max().item())
        differing += (first != b[name]).sum().item()
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
        codes = [one.view(kind).to(torch.int64) for one in (first, b[name])]
        lowest = torch.iinfo(kind).min
        p, q = (torch.where(one < 0, lowest - one, one) for one in codes)
        ulps = max(ulps, (p - q).abs().max().item())
    figures = (gaps / squares_b) ** 0.5, products / (squares_a * squares_b) ** 0.5
    print(*figures, max_abs, max_rel, differing, ulps)  # noqa: T201


def accumulate(path, *gradients):
    buffer = load_file(path)
    for gradient in gradients:
        for name, grad in load_file(gradient).items():
            buffer[name] += grad
    replace(path, buffer)


def median(path, *gradients):
    loaded = [load_file(gradient) for gradient in gradients]
    replace(path, {name: torch.stack([one[name] for one in loaded]).median(dim=0).values for name in loaded[0]})


def layernorm(path, output=None):
    tensors = load_file(path)
    x, y_grad, mean, inv_std_dev = (tensors[name] for name in ("X", "Y_grad", "mean", "inv_std_dev"))
    weights = tensors["scale"], tensors["bias"]
    grads = torch.ops.aten.native_layer_norm_backward(
        y_grad, x, x.shape[-1:], mean, inv_std_dev, *weights, [True, True, True]
    )
    named = dict(zip(("X_grad", "scale_grad", "bias_grad"), grads, strict=True))
    replace(output or path, named if output else tensors | named)


def replace(path, tensors):
    save_file(tensors, path + ".new")
    os.replace(path + ".new", path)  # noqa: PTH105 - nothing imported that a script would not


COMMANDS = {
    "norm": norm, "diff": diff, "clip": clip, "accumulate": accumulate, "median": median, "layernorm": layernorm,
}  # fmt: skip
COMMANDS[sys.argv[1]](*sys.argv[2:])
