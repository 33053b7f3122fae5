"""Tensors that torch's distributed writer has cut: each file has a box of a tensor, and says where the box begins.

The metadata of such a file are JSON under `DCP_SHARDING_INFO`: {name: {"saved_offsets": [...]}}, an offset along each
axis. Nothing stores the shape of the whole tensor, so that the loss of a last piece does not show.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, number_of, shortened
from gradtool.store.format.header import PIECES_KEY
from gradtool.store.format.tensors import BITS, Extent, SplitShard, Tensor
from gradtool.store.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradtool.errors import GradtoolError
    from gradtool.store.format.tensors import Shape, Shard

_MAX_INDEX = 2**63 - 1


class _Piece(NamedTuple):
    """A box of a tensor in a file: its first index in the whole tensor, and where it lies."""

    start: Shape
    shard: Shard
    tensor: Tensor

    @property
    def end(self) -> Shape:
        return tuple(low + size for low, size in zip(self.start, self.tensor.shape, strict=True))


class Joined(NamedTuple):
    """The tensors that files have in pieces, in a shard of whole ones; and those with `faulty` pieces, and why."""

    split: tuple[SplitShard, ...]
    faulty: set[str]
    errors: Sequence[GradtoolError]


def join_pieces(path: str, shards: Sequence[Shard]) -> Joined:
    """Put together the pieces in the files of a path; a tensor that is a single piece from index 0 on is not cut."""
    pieces: dict[str, list[_Piece]] = {}
    errors: list[GradtoolError] = []
    for shard in shards:
        if PIECES_KEY in shard.metadata:
            try:
                for piece in _pieces_in(shard):
                    pieces.setdefault(piece.tensor.name, []).append(piece)
            except BadInputError as error:
                errors.append(error)
    cut = {name: each for name, each in pieces.items() if len(each) > 1 or any(each[0].start)}
    tensors: list[Tensor] = []
    extents: list[list[Extent]] = []
    faulty: set[str] = set()
    end = 0
    for name, each in cut.items():
        fault = _fault(path, name, each)
        if fault is not None:
            errors.append(fault)
            faulty.add(name)
            continue
        dtype, shape = each[0].tensor.dtype, _whole_shape(each)
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        tensors.append(Tensor(name, dtype, shape, begin, end))
        extents.append([Extent(shard, tensor.begin, start, tensor.shape) for start, shard, tensor in each])
    split = SplitShard(Source(path, end), 0, {}, tuple(tensors), extents)
    return Joined((split,) if tensors else (), faulty, errors)


def _pieces_in(shard: Shard) -> Iterator[_Piece]:
    """Yield the pieces in a file; a tensor without offsets begins at index 0."""
    hint = "save it again, or restore the metadata"
    try:
        entries = json.loads(shard.metadata[PIECES_KEY])
        offsets = {name: entry["saved_offsets"] for name, entry in entries.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        message = f"the metadata {PIECES_KEY} are not JSON that has saved_offsets for each tensor"
        raise BadInputError(message, file=shard.name, code="pieces", hint=hint) from error
    for tensor in shard.tensors:
        start = offsets.get(tensor.name, [0] * len(tensor.shape))
        is_list = isinstance(start, list) and len(start) == len(tensor.shape)
        if not is_list or not all(type(low) is int and low >= 0 for low in start):
            wanted = number_of(len(tensor.shape), "whole number")
            message = f"saved_offsets {shortened(json.dumps(start))} must be {wanted} from 0 on, one for each axis"
            raise BadInputError(message, file=shard.name, tensor=tensor.name, code="pieces", hint=hint)
        if any(low + size > _MAX_INDEX for low, size in zip(start, tensor.shape, strict=True)):
            message = f"saved_offsets {shortened(json.dumps(start))} are beyond 2^63"
            raise BadInputError(message, file=shard.name, tensor=tensor.name, code="pieces", hint=hint)
        yield _Piece(tuple(start), shard, tensor)


def _whole_shape(pieces: Sequence[_Piece]) -> Shape:
    return tuple(map(max, zip(*(piece.end for piece in pieces), strict=True)))


def _fault(path: str, name: str, pieces: Sequence[_Piece]) -> BadInputError | None:
    """Return what is wrong with the pieces of a tensor: together, they must have each element once."""
    first = pieces[0]
    for piece in pieces:
        for noun, here, there in (
            ("type", piece.tensor.dtype, first.tensor.dtype),
            ("number of axes", len(piece.start), len(first.start)),
        ):
            if here != there:
                message = f"its pieces differ in the {noun}: {here} here, {there} in {first.shard.file_name}"
                hint = "restore the files of one save"
                return BadInputError(message, file=piece.shard.name, tensor=name, code="pieces", hint=hint)
    if BITS[first.tensor.dtype] < 8:  # noqa: PLR2004 - a byte
        message = f"lies in pieces, and an element of {first.tensor.dtype} is less than a byte"
        return BadInputError(message, file=path, tensor=name, code="pieces", hint="save it whole")
    wrong = _first_fault(pieces, _whole_shape(pieces))
    if wrong is None:
        return None
    inside, low, high = wrong
    if not inside:
        message = f"no file has its part {_box(low, high)}"
        hint = "name the folder that has all pieces, or copy the missing file"
        return BadInputError(message, file=path, tensor=name, code="pieces", hint=hint)
    file, other = (piece.shard for piece in inside[:2])
    same = " at the same place" if inside[0].start == inside[1].start else ""
    message = f"its part {_box(low, high)} is in two files{same}: {file.file_name} and {other.file_name}"
    hint = "name only files of one save"
    return BadInputError(message, file=other.name, tensor=name, code="pieces", hint=hint)


def _first_fault(
    pieces: Iterable[_Piece], whole: Shape, axis: int = 0
) -> tuple[Sequence[_Piece], list[int], list[int]] | None:
    """Return the pieces that have a part of a tensor, if they are not one, and its bounds from an axis on.

    Along each axis, the edges of the pieces cut the tensor into slabs; each is looked at along the next axis.
    """
    pieces = list(pieces)
    if axis == len(whole):
        return None if len(pieces) == 1 else (pieces, [], [])
    waiting = sorted(pieces, key=lambda piece: piece.start[axis], reverse=True)
    inside: list[_Piece] = []
    edges = sorted({0, whole[axis], *(piece.start[axis] for piece in pieces), *(piece.end[axis] for piece in pieces)})
    for low, high in pairwise(edges):
        inside = [piece for piece in inside if piece.end[axis] > low]
        while waiting and waiting[-1].start[axis] <= low:
            piece = waiting.pop()
            if piece.end[axis] > low:
                inside.append(piece)
        wrong = _first_fault(inside, whole, axis + 1)
        if wrong is not None:
            return wrong[0], [low, *wrong[1]], [high, *wrong[2]]
    return None


def _box(low: Sequence[int], high: Sequence[int]) -> str:
    return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(low, high, strict=True))}]"
