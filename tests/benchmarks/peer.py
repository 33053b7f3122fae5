"""What a user writes today: load everything with torch, work it out, save, rename.

python peer.py norm|clip FILE
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


COMMANDS = {"norm": norm, "clip": clip, "accumulate": accumulate, "median": median, "layernorm": layernorm}
COMMANDS[sys.argv[1]](*sys.argv[2:])
