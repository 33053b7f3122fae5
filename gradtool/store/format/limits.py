"""Hard limits on headers, indexes and lists: far above anything real, and checked before parsing costs time or memory.

The cost of JSON depends more on the number of its values than on its bytes, so values are counted before it is parsed,
by the characters that come with each. Characters in names count too; the limits allow for that.

The limits keep one file at about 1 s and below 300 MiB. The safetensors library has a single limit: 100 MB of header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradtool.errors import BadInputError, shortened
from gradtool.wording import say

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from gradtool.wording import Wording

# Headers and indexes usually take 100 to 150 bytes a tensor and reach the limits on tensors first.
MAX_TEXT = 50_000_000
# A string takes four times the memory if one of its characters is not ASCII, or an escape stands for such a character.
MAX_ODD_TEXT = 25_000_000
# In one file. The largest models have some 200,000, in a hundred files.
MAX_TENSORS = 150_000
# In one index, which covers all those files.
MAX_MAPPED = 400_000
# Characters in the name of a tensor or a shard.
MAX_NAME = 4096
# Files that one index names. The largest models have some hundreds.
MAX_SHARDS = 20_000
# Paths of one list, and bytes of a path: as many as Linux takes.
MAX_PATHS = 100_000
MAX_PATH = 4096
# Bytes of a list of paths, which may come from an endless device or pipe.
MAX_PATH_LIST = 50_000_000

# How many of a character one tensor may have: an entry of rank 4 has 2, 1, 7 and 10 of them.
_OF_TENSOR = {b"[": 2, b"{": 2, b",": 10, b'"': 12}
_OF_MAPPING = {b"[": 1, b"{": 1, b",": 1, b'"': 4}

_RIGHT_FILE = "check that this is the right file"


def check_length(path: Path, what: str, length: int, most: int | None = None) -> None:
    """Raise `BadInputError` for a header, an index or a state with too many bytes; called before it is read."""
    limit = MAX_TEXT if most is None else most
    if length > limit:
        raise _over(path, what, f"{limit:,} bytes", f"it has {length:,}")


def check_header_size(path: Path, text: bytes) -> None:
    """Raise `BadInputError` for a header that would cost too much to parse."""
    _check_odd_text(path, "the header", text)
    count = _count(text, _OF_TENSOR)
    if count > MAX_TENSORS:
        actual = f"it is as large as for {count:,}"
        raise _over(path, "the header", f"{MAX_TENSORS:,} tensors", actual, "split the file")


def check_index_size(path: Path, text: bytes) -> None:
    """Raise `BadInputError` for an index that would cost too much to parse."""
    _check_odd_text(path, "the index", text)
    count = _count(text, _OF_MAPPING)
    if count > MAX_MAPPED:
        actual = f"it is as large as for {count:,}"
        raise _over(path, "the index", f"{MAX_MAPPED:,} tensors", actual, "split the set")


def check_shard_count(path: Path, files: Iterable[Any]) -> None:
    """Raise `BadInputError` for an index of too many files; called before one of them is looked for."""
    if (count := len(set(files))) > MAX_SHARDS:
        raise _over(path, "the index", f"{MAX_SHARDS:,} shards", f"it names {count:,}")


def check_name_lengths(path: Path, names: Iterable[str]) -> None:
    """Raise `BadInputError` for a name of a tensor or a shard that is too long."""
    for name in names:
        if len(name) > MAX_NAME:
            what = f"the name {shortened(name)!r}"
            raise _over(path, what, f"{MAX_NAME:,} characters", f"it has {len(name):,}", "rename it")


def check_new_name(file: str, tensor: str, new: str, option: Wording) -> None:
    """Raise `BadInputError` for a name that no tensor can have, and that an option gives to one or to its gradient."""
    what, code = say("{} makes the new name {!r}", option, shortened(new)), ""
    if new == "__metadata__":
        what = say("{}, which the format reserves", what)
    elif len(new) > MAX_NAME:
        what, code = (
            say("{}, which exceeds the limit of {:,} characters (it has {:,})", what, MAX_NAME, len(new)),
            "limit",
        )
    else:
        return
    raise BadInputError(what, file=file, tensor=tensor, code=code, hint="choose another name")


def _check_odd_text(path: Path, what: str, text: bytes) -> None:
    if len(text) > MAX_ODD_TEXT and not (text.isascii() and b"\\" not in text):
        raise _over(path, f"{what}, which is not plain ASCII,", f"{MAX_ODD_TEXT:,} bytes", f"it has {len(text):,}")


def _count(text: bytes, of_tensor: Mapping[bytes, int]) -> int:
    """Count the tensors that would have so many of each character."""
    return max(text.count(character) // most for character, most in of_tensor.items())


def _over(path: Path, what: str, limit: str, actual: str, hint: str = _RIGHT_FILE) -> BadInputError:
    return BadInputError(f"{what} exceeds the limit of {limit} ({actual})", file=path, code="limit", hint=hint)
