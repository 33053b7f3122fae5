"""New headers: those of new files, and those of files that get other entries in their `__metadata__`.

Where only metadata change, all other bytes of a header stay as they are, and it is as long as the old one if it fits,
with spaces at its end. So a file may be changed in place, and both ways to write give the same bytes. If a header must
grow, it gets spare bytes for the next time.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError
from gradtool.store.format.header import new_header, read_text
from gradtool.store.format.tensors import BITS, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from gradtool.store.format.header import Shard

# Spare bytes of a header with an entry that is a number: enough for any other number.
SPARE = 32
# A header is padded with spaces, so that the tensors behind it are aligned.
_ALIGNMENT = 8
_METADATA = "__metadata__"
_SPACES = re.compile(r"[ \t\r\n]*")


class Layout(NamedTuple):
    """The bytes before the first tensor, and the file that they describe."""

    header: bytes
    shard: Shard


def new_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Make a tensor without a place in a file."""
    tensor = Tensor(name, dtype, shape, 0, 0)
    return tensor._replace(end=tensor.elements * BITS[dtype] // 8)


def lay_out(path: Path | str, tensors: Iterable[Tensor], metadata: Mapping[str, str], *, spare: int = 0) -> Layout:
    """Lay out a file of these tensors, in this order, with new offsets, and `spare` bytes in its header.

    Raises:
        BadInputError: a name occurs twice, or the file could not be read again.
    """
    entries: dict[str, object] = {_METADATA: dict(metadata)}
    end = 0
    for tensor in tensors:
        if tensor.name in entries:
            what = "nothing written, because another tensor of the new file, or its metadata, has this name"
            raise BadInputError(what, file=path, tensor=tensor.name, code="duplicate-name")
        begin, end = end, end + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    if not metadata:
        del entries[_METADATA]
    return Layout(*new_header(path, _padded(encoded(entries), spare), end))


def rewritten(shard: Shard, entries: Mapping[str, str | None]) -> bytes:
    """Return the bytes before the first tensor with those entries of the metadata set, or removed if they are None.

    Raises:
        BadInputError: the file could not be read again.
        SystemRefusedError: the old one cannot be read, or the file changed since.
    """
    old = read_text(shard)
    text = with_entries(old, entries)
    text = text.ljust(len(old)) if len(text) <= len(old) else _padded(text, SPARE)
    return new_header(shard.name, text, shard.size - shard.data_start)[0]


def with_entries(header: bytes, entries: Mapping[str, str | None]) -> bytes:
    """Return the JSON of a header with those entries of the metadata set or removed, without spaces at its end."""
    text = header.decode().rstrip(" \t\r\n")
    begin, end, metadata = _metadata_in(text)
    changed = {key: value for key, value in {**metadata, **entries}.items() if value is not None}
    value = encoded(changed).decode()
    if begin == end:
        is_last = text[_skip(text, begin)] == "}"
        value = f'"{_METADATA}":{value}' + ("" if is_last else ",")
    return (text[:begin] + value + text[end:]).encode()


def _metadata_in(text: str) -> tuple[int, int, dict[str, str]]:
    """Find where the metadata begin and end, and their entries; or where they would begin, if there are none."""
    decoder = json.JSONDecoder()
    first = at = text.index("{") + 1
    while text[at := _skip(text, at)] != "}":
        key, at = decoder.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        value, end = decoder.raw_decode(text, begin)
        if key == _METADATA:
            return begin, end, value or {}
        at = _skip(text, end)
        at += text[at] == ","
    return first, first, {}


def _skip(text: str, at: int) -> int:
    """Find the next position that is no space."""
    match = _SPACES.match(text, at)
    return match.end() if match else at


def encoded(value: object, indent: int | None = None) -> bytes:
    """Return the JSON of a value; half a surrogate, which has no UTF-8, stays an escape."""
    separators = None if indent else (",", ":")
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators).encode(errors="backslashreplace")


def _padded(text: bytes, spare: int) -> bytes:
    """Return the JSON of a header with `spare` spaces behind it, and those that align the tensors."""
    length = len(text) + spare
    return text.ljust(length + -length % _ALIGNMENT)
