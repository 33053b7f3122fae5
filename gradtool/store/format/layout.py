"""The layout of new files: their header, and the offsets of their tensors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError
from gradtool.store.format.header import new_header
from gradtool.store.format.tensors import BITS, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from gradtool.store.format.header import Shard

# A header is padded with spaces, so that the tensors behind it are aligned.
_ALIGNMENT = 8


class Layout(NamedTuple):
    """The bytes before the first tensor, and the file that they describe."""

    header: bytes
    shard: Shard


def lay_out(path: Path | str, tensors: Iterable[Tensor], metadata: Mapping[str, str], *, spare: int = 0) -> Layout:
    """A file of these tensors, in this order, with new offsets, and `spare` bytes in its header.

    Raises:
        BadInputError: a name occurs twice, or the file could not be read again.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        if tensor.name in entries:
            what = "nothing written, because another tensor of the new file, or its metadata, has this name"
            raise BadInputError(what, file=path, tensor=tensor.name, code="duplicate-name")
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    if not metadata:
        del entries["__metadata__"]
    return Layout(*new_header(path, padded(encoded(entries), spare), end))


def encoded(value: object, indent: int | None = None) -> bytes:
    """Return the JSON of a value; half a surrogate, which has no UTF-8, stays an escape."""
    separators = None if indent else (",", ":")
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators).encode(errors="backslashreplace")


def padded(text: bytes, spare: int) -> bytes:
    """The JSON of a header with `spare` spaces behind it, and those that align the tensors."""
    length = len(text) + spare
    return text.ljust(length + -length % _ALIGNMENT)


def new_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor without a place in a file."""
    tensor = Tensor(name, dtype, shape, 0, 0)
    return tensor._replace(end=tensor.elements * BITS[dtype] // 8)
