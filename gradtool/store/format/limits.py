"""Hard limits on headers, indexes and lists: far above anything real, and checked before they cost time or memory.

What JSON costs depends on how many values it holds more than on its bytes, so values are counted, by the characters
that go with each, before anybody parses them. A character within a name counts too, which the limits have room for.

The limits keep one file at about 1 s and below 300 MiB. The safetensors library, which accepts more, knows only one of
its own: 100 MB of header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtool.errors import BadInputError, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# A header and an index of 100 to 150 bytes a tensor reach the limits on tensors below first.
MAX_TEXT = 50_000_000
# A character takes four times the memory where one of its string is not ASCII, and an escape may stand for such a one.
MAX_ODD_TEXT = 25_000_000
# In one file. The largest models have some 200,000 in all of their hundred files together.
MAX_TENSORS = 150_000
# In one index, which is of such a hundred files.
MAX_MAPPED = 400_000
# Characters of the name of a tensor or a shard; it is printed when something is wrong with it.
MAX_NAME = 4096
# Bytes of a list of paths, which may be what a device or a pipe has no end of.
MAX_PATH_LIST = 50_000_000

# How many of a character one tensor may have: an entry of rank 4 has 2, 1, 7 and 10 of them.
_OF_TENSOR = {b"[": 2, b"{": 2, b",": 10, b'"': 12}
_OF_MAPPING = {b"[": 1, b"{": 1, b",": 1, b'"': 4}


def refuse_long(path: Path, what: str, length: int) -> None:
    """Raise `BadInputError` for a header or an index of more bytes than any may have; asked before they are read."""
    if length > MAX_TEXT:
        raise _over(path, f"{what} has {length:,} bytes", MAX_TEXT)


def refuse_large_header(path: Path, text: bytes) -> None:
    """Raise `BadInputError` for a header that it would cost too much to parse."""
    _refuse_odd(path, "the header", text)
    count = _count(text, _OF_TENSOR)
    if count > MAX_TENSORS:
        raise _over(path, f"the header is as large as that of {count:,} tensors", MAX_TENSORS, "; split the file")


def memory_to_judge(text: bytes) -> int:
    """Bytes that the library takes at most for a header which is not too large; measured, and rounded up."""
    return 3 * len(text) + 1000 * _count(text, _OF_TENSOR)


def refuse_large_index(path: Path, text: bytes) -> None:
    """The same for an index."""
    _refuse_odd(path, "the index", text)
    count = _count(text, _OF_MAPPING)
    if count > MAX_MAPPED:
        raise _over(path, f"the index is as large as that of {count:,} tensors", MAX_MAPPED, "; split the set")


def refuse_long_names(path: Path, names: Iterable[str]) -> None:
    """Raise `BadInputError` for a name of a tensor or a shard that is none."""
    for name in names:
        if len(name) > MAX_NAME:
            raise _over(
                path,
                f"the name {shortened(name)!r} has {len(name):,} characters",
                MAX_NAME,
                "; rename it",
            )


def _refuse_odd(path: Path, what: str, text: bytes) -> None:
    if len(text) > MAX_ODD_TEXT and not (text.isascii() and b"\\" not in text):
        raise _over(path, f"{what} has {len(text):,} bytes and more in it than plain ASCII", MAX_ODD_TEXT)


def _count(text: bytes, of_one: Mapping[bytes, int]) -> int:
    """How many entries there are at most, or would be, of what there is."""
    return max(text.count(character) // most for character, most in of_one.items())


def _over(path: Path, what: str, limit: int, remedy: str = "; is it what it should be?") -> BadInputError:
    return BadInputError(f"{what}, where {limit:,} are allowed{remedy}", file=path, code="limit")
