"""A header with other entries in its `__metadata__`; all of its other bytes stay as they are.

A new header takes the bytes of the old one if it fits, the rest being spaces. So a file may be changed in place, and
both ways to write give the same bytes. A header that must grow gets spare bytes for the next time.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from gradtool.store.format.header import new_header, read_text
from gradtool.store.format.layout import encoded, padded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradtool.store.format.header import Shard

# Spare bytes of a header with an entry that is a number: enough for any other number.
SPARE = 32
_KEY = "__metadata__"
_SPACES = re.compile(r"[ \t\r\n]*")


def rewritten(shard: Shard, entries: Mapping[str, str | None]) -> bytes:
    """The bytes before the first tensor with those entries of the metadata set, or removed where they are None.

    Raises:
        BadInputError: the file could not be read again.
        SystemRefusedError: the old one cannot be read, or the file changed since.
    """
    old = read_text(shard)
    text = with_entries(old, entries)
    text = text.ljust(len(old)) if len(text) <= len(old) else padded(text, SPARE)
    return new_header(shard.name, text, shard.size - shard.data_start)[0]


def with_entries(header: bytes, entries: Mapping[str, str | None]) -> bytes:
    """The JSON of a header with those entries of the metadata set or removed, without spaces at its end."""
    text = header.decode().rstrip(" \t\r\n")
    begin, end, metadata = _metadata_in(text)
    for key, value in entries.items():
        if value is None:
            metadata.pop(key, None)
        else:
            metadata[key] = value
    value = encoded(metadata).decode()
    if begin == end:
        is_last = text[_skip(text, begin)] == "}"
        value = f'"{_KEY}":{value}' + ("" if is_last else ",")
    return (text[:begin] + value + text[end:]).encode()


def _metadata_in(text: str) -> tuple[int, int, dict[str, str]]:
    """Where the metadata begin and end, and their entries; or where they would begin, if there are none."""
    decoder = json.JSONDecoder()
    first = at = text.index("{") + 1
    while text[at := _skip(text, at)] != "}":
        key, at = decoder.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)
        value, end = decoder.raw_decode(text, begin)
        if key == _KEY:
            return begin, end, value or {}
        at = _skip(text, end)
        at += text[at] == ","
    return first, first, {}


def _skip(text: str, at: int) -> int:
    """The next position that is no space."""
    match = _SPACES.match(text, at)
    return match.end() if match else at
