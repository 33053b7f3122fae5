"""Many small files, or many calls: with gradtool's functions, or with a plain loop of safetensors and numpy.

    python many.py norm|clip|accumulate FOLDER
    python many.py gradtool|plain norm|clip FILE COUNT

The first is a script of its own, which halves, or adds to the first file. The second makes the same call again and
again, and takes the time of each.
"""

import math
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def norm(files):
    squares = 0.0
    for file in files:
        for grad in load_file(file).values():
            wide = grad.ravel().astype(np.float64)
            squares += float(np.dot(wide, wide))
    return math.sqrt(squares)


def clip(files):
    if norm(files) > 0:
        for file in files:
            replace(file, {name: grad * np.float32(0.5) for name, grad in load_file(file).items()})


def accumulate(files):
    sums = {name: grad.astype(np.float64) for name, grad in load_file(files[0]).items()}
    for file in files[1:]:
        for name, grad in load_file(file).items():
            sums[name] += grad
    replace(files[0], {name: total.astype(np.float32) for name, total in sums.items()})


def replace(path, tensors):
    save_file(tensors, f"{path}.new")
    os.replace(f"{path}.new", path)  # noqa: PTH105 - nothing imported that a script would not


def milliseconds(whose, what, path, count):
    """The median of so many calls, after one that does not count."""
    import gradtool

    functions = {
        "gradtool norm": lambda: gradtool.norm(path),
        "gradtool clip": lambda: gradtool.clip(path, max_norm=0.5, total_norm=1, fsync=False),
        "plain norm": lambda: norm([path]),
        "plain clip": lambda: clip([path]),
    }
    seconds = []
    for _ in range(count + 1):
        began = time.perf_counter()
        functions[f"{whose} {what}"]()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) * 1e3


if __name__ == "__main__":
    if sys.argv[1] in ("gradtool", "plain"):
        print(milliseconds(*sys.argv[1:4], int(sys.argv[4])))  # noqa: T201
    else:
        {"norm": norm, "clip": clip, "accumulate": accumulate}[sys.argv[1]](sorted(Path(sys.argv[2]).iterdir()))
