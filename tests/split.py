"""Sets whose tensors lie in pieces: files that say where each piece belongs, as torch's distributed writer does."""

import itertools
import json
import math

import numpy as np
from support import read, write

from gradtool.store.format.header import PIECES_KEY, read_shard
from gradtool.store.format.tensors import BITS, SplitShard, Tensor
from gradtool.store.source import Source


def boxes(shape, cuts):
    """The boxes of a grid, by the inner edges along each axis: their first indices and their shapes."""
    edges = [[0, *sorted(inner), size] for inner, size in zip(cuts, shape, strict=True)]
    for box in itertools.product(*map(itertools.pairwise, edges)):
        yield tuple(low for low, _ in box), tuple(high - low for low, high in box)


def write_split(folder, tensors, cuts, files=3):
    """Write tensors in pieces, each in a file of its own, as torch's distributed writer does; those without cuts whole.

    There are more files if a tensor has more pieces.
    """
    cut = {name: list(boxes(array.shape, cuts.get(name, [()] * array.ndim))) for name, array in tensors.items()}
    contents = [({}, {}) for _ in range(max(files, *map(len, cut.values())))]
    for turn, (name, array) in enumerate(tensors.items()):
        for number, (start, shape) in enumerate(cut[name], turn):
            pieces, offsets = contents[number % len(contents)]
            pieces[name] = np.ascontiguousarray(_in(array, start, shape)).reshape(shape)
            offsets[name] = {"saved_offsets": start}
    folder.mkdir()
    for number, (pieces, offsets) in enumerate(contents, 1):
        metadata = {PIECES_KEY: json.dumps(offsets), "DCP_VERSION": "1.0"}
        write(folder / f"shard-{number:05}-model-00001-of-00001.safetensors", pieces, metadata)
    return folder


def _in(array, start, shape):
    return array[(*(slice(low, low + size) for low, size in zip(start, shape, strict=True)), ...)]


def split_shard(wholes):
    """A shard of tensors, by name and shape, of which the type and the extents are given."""
    tensors, end = [], 0
    for (name, shape), (dtype, _) in wholes.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        tensors.append(Tensor(name, dtype, shape, begin, end))
    return SplitShard(Source("pieces", end), 0, {}, tuple(tensors), [extents for _, extents in wholes.values()])


def joined(folder):
    """The tensors of such a set, put together by numpy."""
    pieces, tensors = [], {}
    for path in sorted(folder.iterdir()):
        offsets = json.loads(read_shard(path).metadata[PIECES_KEY])
        for name, piece in read(path).items():
            start = offsets[name]["saved_offsets"] if name in offsets else [0] * piece.ndim
            pieces.append((name, start, piece))
    for name in dict.fromkeys(name for name, _, _ in pieces):
        mine = [(start, piece) for other, start, piece in pieces if other == name]
        shape = np.max([np.add(start, piece.shape) for start, piece in mine], axis=0).astype(int)
        tensors[name] = np.empty(shape, mine[0][1].dtype)
        for start, piece in mine:
            _in(tensors[name], start, piece.shape)[...] = piece
    return tensors
