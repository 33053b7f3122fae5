"""The layout of new files: their header, and the offsets of their tensors."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, NamedTuple

from gradtool.store.format.header import Shard
from gradtool.store.format.limits import refuse_large_header, refuse_long
from gradtool.store.format.tensors import BITS, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# A header is padded with spaces, so that the tensors behind it are aligned.
_ALIGNMENT = 8


class Layout(NamedTuple):
    """The bytes before the first tensor, and the file that they describe."""

    header: bytes
    shard: Shard


def lay_out(path: Path, tensors: Iterable[Tensor], metadata: Mapping[str, str], *, spare: int = 0) -> Layout:
    """A file of these tensors, in this order, with new offsets, and `spare` bytes in its header.

    Raises:
        BadInputError: it would be beyond the limits of what is read.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    placed: list[Tensor] = []
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        placed.append(tensor._replace(begin=begin, end=end))
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text = padded(text, spare)
    refuse_long(path, "the header", len(text))
    refuse_large_header(path, text)
    start = 8 + len(text)
    moved = tuple(one._replace(begin=start + one.begin, end=start + one.end) for one in placed)
    shard = Shard(path, start, start + end, dict(metadata), moved, os.stat_result([0] * 10))
    return Layout(len(text).to_bytes(8, "little") + text, shard)


def padded(text: bytes, spare: int) -> bytes:
    """The JSON of a header with `spare` spaces behind it, and those that align the tensors."""
    length = len(text) + spare
    return text.ljust(length + -length % _ALIGNMENT)


def new_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor without a place in a file."""
    tensor = Tensor(name, dtype, shape, 0, 0)
    return tensor._replace(end=tensor.elements * BITS[dtype] // 8)
