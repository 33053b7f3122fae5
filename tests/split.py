"""Sets whose tensors lie in pieces, which no format has yet: files of pieces that say where each belongs."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from support import read, write

from gradtool.store.format.gradset import GradientSet, SetReader
from gradtool.store.format.header import read_shard
from gradtool.store.format.tensors import BITS, Extent, SplitShard, Tensor
from gradtool.store.source import Source

# The metadata with the first index of each piece in its tensor, and that tensor's name and shape.
KEY = "pieces"


def boxes(shape, cuts):
    """The boxes of a grid, by the inner edges along each axis: their first indices and their shapes."""
    edges = [[0, *sorted(inner), size] for inner, size in zip(cuts, shape, strict=True)]
    for box in itertools.product(*map(itertools.pairwise, edges)):
        yield tuple(low for low, _ in box), tuple(high - low for low, high in box)


def write_split(folder, tensors, cuts, files=3):
    """Write the tensors that have cuts in pieces, one file after another getting one, and the others whole."""
    contents = [({}, {}) for _ in range(files)]
    turns, numbers = itertools.cycle(contents), itertools.count()
    for name, array in tensors.items():
        for start, shape in boxes(array.shape, cuts.get(name, [()] * array.ndim)):
            pieces, places = next(turns)
            key = f"{name}|{next(numbers)}" if name in cuts else name
            pieces[key] = np.ascontiguousarray(_in(array, start, shape)).reshape(shape)
            if name in cuts:
                places[key] = [start, name, array.shape]
    folder.mkdir()
    for number, (pieces, places) in enumerate(contents):
        write(folder / f"{number}.safetensors", pieces, {KEY: json.dumps(places)})
    return folder


def _in(array, start, shape):
    return array[(*(slice(low, low + size) for low, size in zip(start, shape, strict=True)), ...)]


def open_split(folder):
    """Such a set: the files with their whole tensors, and a shard of the others."""
    files, wholes = [], {}
    for path in sorted(folder.iterdir()):
        shard = read_shard(path)
        places = json.loads(shard.metadata[KEY])
        files.append(replace(shard, tensors=tuple(one for one in shard.tensors if one.name not in places)))
        for tensor in shard.tensors:
            if tensor.name in places:
                start, name, shape = places[tensor.name]
                _, extents = wholes.setdefault((name, tuple(shape)), (tensor.dtype, []))
                extents.append(Extent(files[-1], tensor.begin, tuple(start), tensor.shape))
    return GradientSet(str(folder), tuple(files), None, (split_shard(wholes),))


def split_shard(wholes):
    """A shard of tensors, by name and shape, of which the type and the extents are given."""
    tensors, end = [], 0
    for (name, shape), (dtype, _) in wholes.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        tensors.append(Tensor(name, dtype, shape, begin, end))
    return SplitShard(Source("pieces", end), 0, {}, tuple(tensors), [extents for _, extents in wholes.values()])


def joined(folder):
    """The tensors of such a set, put together by numpy."""
    tensors = {}
    for path in sorted(folder.iterdir()):
        places = json.loads(read_shard(path).metadata[KEY])
        for key, piece in read(path).items():
            if key in places:
                start, name, shape = places[key]
                _in(tensors.setdefault(name, np.empty(shape, piece.dtype)), start, piece.shape)[...] = piece
            else:
                tensors[key] = piece
    return tensors


def open_such_folders(monkeypatch):
    """Have calls open folders that hold such sets."""
    others = SetReader.gradset.fget

    def gradset_of(reader):
        opened = others(reader)
        return open_split(Path(opened.name)) if KEY in opened.shards[0].metadata else opened

    monkeypatch.setattr(SetReader, "gradset", property(gradset_of))
