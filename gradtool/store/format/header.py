"""One safetensors file: its header, read and checked.

The safetensors library decides whether a file is valid; if it refuses one, this module says what is wrong and where.
The byte offsets, which the library does not return, are then read from the same header. Headers beyond the limits of
`gradtool.store.format.limits` never reach the library. It maps the whole file into memory; without enough address space
for that, it checks a header whose tensors are all empty, and this module checks their shapes and offsets. Short headers
are first checked in that way too, which is faster; and what the last ones held is remembered.

Format: https://github.com/huggingface/safetensors#format - eight bytes of header length N (little endian), N bytes of
JSON, the tensors' bytes without gaps.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtool.errors import BadInputError, changed_meanwhile, os_errors_about, say, shortened
from gradtool.store import system
from gradtool.store.format.limits import MAX_TEXT, check_header_size, check_length, check_name_lengths
from gradtool.store.format.tensors import Tensor, check_fields, check_offsets, emptied, tensor_of
from gradtool.store.source import SmallFile, Source, read_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.store.source import Reader

    Tensors = tuple[Tensor, ...]

# Bytes of a header that is quickly checked without a file, and of one that is worth remembering.
_SHORT, _SHORT_ENOUGH = 512, 16_384


class FileTypeError(BadInputError):
    """A file that is not even a damaged file of the type that it should have."""


class _WithoutNumpy:
    """Bytes of longer headers that are still checked without a file.

    To open one, the library imports numpy; that takes as long as to check a million bytes.
    """

    left = 1 << 18


@dataclass(frozen=True, eq=False, repr=False)
class Shard:
    """One file of a gradient set: a header over a source; `tensors` are in the order of their bytes."""

    source: Source
    data_start: int
    metadata: dict[str, str]
    tensors: tuple[Tensor, ...]

    @property
    def name(self) -> str:
        """Its path as it was named, for messages."""
        return self.source.name

    @property
    def file_name(self) -> str:
        """Its name in its folder."""
        return os.path.basename(self.source.name)  # noqa: PTH119 - no path of this system, perhaps

    @property
    def files(self) -> Sequence[Shard]:
        """The files that it is read from: itself."""
        return (self,)

    def ranges(self, tensor: Tensor) -> Iterator[tuple[Shard, int, int]]:
        """Yield which bytes of which files a tensor takes."""
        yield self, tensor.begin, tensor.end

    def runs(self, begin: int, nbytes: int) -> Iterator[tuple[Shard, int, slice]]:
        """Yield where bytes from `begin` on lie: in which file, from which byte on, and which of them follow there."""
        yield self, begin, slice(nbytes)

    @property
    def has_fd(self) -> bool:
        """Whether it is read by a descriptor, which others may read by, too."""
        return self.source.status is not None

    @property
    def size(self) -> int:
        """Its bytes, those of the header among them."""
        return self.source.size


def read_shard(path: Path, *, is_named: bool = True) -> Shard:
    """Read and check the header of a safetensors file, which the user named, or a folder or an index did.

    Raises:
        BadInputError: the file is missing, not a regular file, or refused by the safetensors library.
        SystemRefusedError: it cannot be read, or another user's link leads there.
    """
    with _judged(path, is_named=is_named) as reader:
        text = _read_header(path, reader)
        read = _remembered if len(text) <= _SHORT_ENOUGH else _checked
        return _shard(reader.source, text, *read(path, text, reader.source.size))


def read_outline(path: Path, *, is_named: bool = True) -> Shard:
    """Read a header without asking the library, which is slow to import and refuses types that it does not know.

    Raises:
        BadInputError: the file is missing, not a regular file, or does not say what its tensors are.
        SystemRefusedError: it cannot be read, or another user's link leads there.
    """
    with _judged(path, is_named=is_named) as reader:
        text = _read_header(path, reader)
        check_fields(path, text, reader.source.size)
        return _shard(reader.source, text, *_parsed(path, text))


def new_header(path: Path | str, text: bytes, nbytes: int) -> tuple[bytes, Shard]:
    """Judge a new header, for so many bytes of data, as that of an input; return its bytes and the file they describe.

    Every header that is written is made here: what gradtool writes, it can read again.

    Raises:
        BadInputError: it would be beyond the limits, or refused by the safetensors library.
    """
    path, size = Path(path), 8 + len(text) + nbytes
    try:
        check_length(path, "the header", len(text))
        check_header_size(path, text)
        if (refusal := _refusal(path, text, size)) is not None:
            raise _explain(path, text, size, shortened(str(refusal), 400))
    except BadInputError as error:
        (problem,) = error.problems
        message = say("nothing written, because the new header would be invalid: {}", problem.message)
        raise BadInputError.from_problems([replace(problem, message=message, file=str(path))]) from error
    return len(text).to_bytes(8, "little") + text, _shard(Source(str(path), size), text, *_parsed(path, text))


def read_text(shard: Shard) -> bytes:
    """Read the JSON of a shard's header once more.

    Raises:
        SystemRefusedError: it cannot be read, or the file is no longer the one that was read.
    """
    with os_errors_about(shard.name), contextlib.closing(shard.source.open()) as reader:
        text = read_range(reader, 8, shard.data_start - 8)
        if not reader.is_unchanged:
            raise changed_meanwhile(shard.name)
        return text


def read_small(path: Path, most: int | None = None, *, is_named: bool = True) -> SmallFile:
    """Read a small file as a whole.

    Raises:
        BadInputError: the file is missing, too large, or not a regular file.
        SystemRefusedError: it cannot be read, or changed meanwhile; or another user's link leads there.
    """
    with _opened(path, is_named=is_named) as reader:
        size = reader.source.size
        check_length(path, "the file", size, most)
        content = read_range(reader, 0, size)
        if len(content) != size or not reader.is_unchanged:
            raise changed_meanwhile(path)
        return SmallFile(path, reader.source.status, content)


@contextlib.contextmanager
def _opened(path: Path, *, is_named: bool) -> Iterator[Reader]:
    with os_errors_about(path), contextlib.closing(Source.kind_of(path).at(path, is_named=is_named)) as reader:
        yield reader


@contextlib.contextmanager
def _judged(path: Path, *, is_named: bool) -> Iterator[Reader]:
    """As `_opened`, for a file that must not change until the end of the block."""
    with _opened(path, is_named=is_named) as reader:
        try:
            yield reader
        except BadInputError:
            # It may look invalid only because it is being written.
            if not reader.source.is_unchanged:
                raise changed_meanwhile(path) from None
            raise
        if not reader.source.is_unchanged:
            raise changed_meanwhile(path)


def _shard(source: Source, text: bytes, metadata: dict[str, str], tensors: Tensors) -> Shard:
    return Shard(source, 8 + len(text), dict(metadata), tensors)


def _checked(path: Path, text: bytes, size: int) -> tuple[dict[str, str], Tensors]:
    """Return the metadata and the tensors of a header, if it is valid for a file of that size."""
    is_short = len(text) <= _SHORT
    if not is_short and "numpy" not in sys.modules and len(text) <= _WithoutNumpy.left:
        _WithoutNumpy.left -= len(text)
        is_short = True
    # The full check says what is wrong.
    if not is_short or _refusal(path, text, size) is not None:
        _ask_library(path, text, size)
    return _parsed(path, text)


def _parsed(path: Path, text: bytes) -> tuple[dict[str, str], Tensors]:
    """Return the metadata and the tensors of a sound header."""
    header: dict[str, Any] = json.loads(text)
    metadata = header.pop("__metadata__", None) or {}
    check_name_lengths(path, header)
    data_start = 8 + len(text)
    tensors = []
    while header:
        # One by one, so that the parsed header frees its memory meanwhile.
        tensors.append(tensor_of(*header.popitem(), data_start))
    tensors.reverse()
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    return metadata, tuple(tensors)


# For those who call again and again for the same files.
_remembered = functools.lru_cache(maxsize=64)(_checked)


def _read_header(path: Path, reader: Reader) -> bytes:
    """Read the JSON of a header, unless it is too large."""
    start, size = read_range(reader, 0, 8), reader.source.size
    length = int.from_bytes(start, "little")
    if len(start) < 8:  # noqa: PLR2004 - the length field
        raise FileTypeError(f"is not a safetensors file: {size} bytes are too few", file=path)
    if length > MAX_TEXT:
        what = f"is not a safetensors file, or its header exceeds the limit of {MAX_TEXT:,} bytes (it has {length:,})"
        raise BadInputError(what, file=path, hint="split the file if it is that large")
    if 8 + length > size:
        what = f"truncated: the header should have {length:,} bytes, but the whole file has {size:,}"
        raise BadInputError(what, file=path, hint="copy it again")
    text = read_range(reader, 8, length)
    if len(text) < length:
        raise changed_meanwhile(path)
    check_header_size(path, text)
    return text


def _refusal(path: Path, text: bytes, size: int) -> Exception | None:
    """Judge a header without a file of that size; return why it is refused, or None."""
    from safetensors import SafetensorError, deserialize  # kept off the start-up path

    judged = emptied(text)
    try:
        deserialize(len(judged).to_bytes(8, "little") + judged)  # type: ignore[no-untyped-call]
        check_offsets(path, text, size)
    except (SafetensorError, ValueError) as error:
        return error
    return None


def _ask_library(path: Path, text: bytes, size: int) -> None:
    from safetensors import SafetensorError, safe_open  # kept off the start-up path

    try:
        with _copied(path, text, size) as copy, safe_open(copy, framework="numpy"):
            refusal: Exception | None = None
    except MemoryError:  # There is a limit on memory, and the file is larger.
        refusal = _refusal(path, text, size)
    except (SafetensorError, ValueError) as error:
        refusal = error
    if refusal is not None:
        raise _explain(path, text, size, shortened(str(refusal), 400)) from refusal


@contextlib.contextmanager
def _copied(path: Path, text: bytes, size: int) -> Iterator[Path | str]:
    """Copy the header into a private file of the same size, with a hole for the data; or else yield the file itself.

    The library maps its file into memory; if another process truncated that file, the system would kill this one. The
    copy is also certain to have the header that was read.
    """
    with contextlib.ExitStack() as stack:
        copy: Path | str = path
        with contextlib.suppress(OSError):
            content = [len(text).to_bytes(8, "little"), text]
            copy = stack.enter_context(system.unnamed_file(content, size))
        yield copy


def _explain(path: Path, text: bytes, size: int, verdict: str) -> BadInputError:
    """Say what is wrong with a file that the library refused: its own `verdict`, unless another reason is found."""
    try:
        check_offsets(path, text, size)
    except BadInputError as error:
        return error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        pass
    return BadInputError(f"is not a valid safetensors file: {verdict}", file=path)
