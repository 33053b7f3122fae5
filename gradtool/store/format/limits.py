"""Hard limits on headers, indexes and lists: far above anything real, and checked before parsing costs time or memory.

The cost of JSON depends more on the number of its values than on its bytes, so values are counted before it is parsed,
by the characters that come with each. Characters in names count too; the limits allow for that.

The limits keep a file at about 1 s and below 300 MiB. The safetensors library has a single limit: 100 MB of header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtool.errors import BadInputError, shortened

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

# Headers and indexes usually take 100 to 150 bytes a tensor and reach the limits on tensors first.
MAX_TEXT = 50_000_000
# A string takes four times the memory if one of its characters is not ASCII, or an escape stands for such a character.
MAX_ODD_TEXT = 25_000_000
# In a file. The largest models have some 200,000, in a hundred files.
MAX_TENSORS = 150_000
# In an index, which covers all those files.
MAX_MAPPED = 400_000
# Characters in the name of a tensor or a shard.
MAX_NAME = 4096
# Files that an index names. The largest models have some hundreds.
MAX_SHARDS = 20_000
# Paths of a list, and bytes of a path: as many as Linux takes.
MAX_PATHS = 100_000
MAX_PATH = 4096
# Bytes of a list of paths, and of the output of `digest`, which may come from an endless device or pipe.
MAX_PATH_LIST, MAX_DIGESTS = 50_000_000, 200_000_000

# How many of a character a tensor may have: an entry of rank 4 in a header has 2, 1, 7 and 10 of them.
_PER_TENSOR = {b"[": 2, b"{": 2, b",": 10, b'"': 12}
_PER_MAPPING = {b"[": 1, b"{": 1, b",": 1, b'"': 4}


def check_length(path: Path, subject: str, length: int, limit: int = MAX_TEXT) -> None:
    """Raise `BadInputError` for a header, an index or a state with too many bytes; called before it is read."""
    if length > limit:
        raise _over(path, subject, f"{limit:,} bytes", f"it has {length:,}")


def check_cost(path: Path, text: bytes, *, is_index: bool = False) -> None:
    """Raise `BadInputError` for a header or an index that would cost too much to parse."""
    name, per_tensor, limit, hint = "the header", _PER_TENSOR, MAX_TENSORS, "split the file"
    if is_index:
        name, per_tensor, limit, hint = "the index", _PER_MAPPING, MAX_MAPPED, "split the set"
    if len(text) > MAX_ODD_TEXT and not (text.isascii() and b"\\" not in text):
        raise _over(path, f"{name}, which is not plain ASCII,", f"{MAX_ODD_TEXT:,} bytes", f"it has {len(text):,}")
    count = max(text.count(character) // times for character, times in per_tensor.items())
    if count > limit:
        raise _over(path, name, f"{limit:,} tensors", f"it is as large as for {count:,}", hint)


def check_shard_count(path: Path, files: Collection[str]) -> None:
    """Raise `BadInputError` for an index of too many files; called before any of them is looked for."""
    if len(files) > MAX_SHARDS:
        raise _over(path, "the index", f"{MAX_SHARDS:,} shards", f"it names {len(files):,}")


def check_name_lengths(path: Path, names: Iterable[str]) -> None:
    """Raise `BadInputError` for a name of a tensor or a shard that is too long."""
    for name in names:
        if len(name) > MAX_NAME:
            limit, actual = f"{MAX_NAME:,} characters", f"it has {len(name):,}"
            raise _over(path, f"the name {shortened(name)!r}", limit, actual, "rename it")


def _over(
    path: Path, subject: str, limit: str, actual: str, hint: str = "check that this is the right file"
) -> BadInputError:
    return BadInputError(f"{subject} exceeds the limit of {limit} ({actual})", file=path, code="limit", hint=hint)
