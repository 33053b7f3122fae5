"""What a user writes today: load everything with torch, take the norm, multiply, save, rename.

python peer.py norm|clip FILE
"""

import os
import sys

import torch
from safetensors.torch import load_file, save_file

command, path = sys.argv[1:]
grads = load_file(path)
norm = torch.nn.utils.get_total_norm(grads.values())
if command == "clip":
    coef = 1.0 / (norm + 1e-6)
    if coef < 1:
        for grad in grads.values():
            grad.mul_(coef)
    save_file(grads, path + ".new")
    os.replace(path + ".new", path)  # noqa: PTH105 - nothing imported that a script would not
print(norm.item())  # noqa: T201
