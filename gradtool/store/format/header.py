"""The header of a safetensors file, read and checked.

The safetensors library decides whether a header is valid; if it refuses one, this module says what is wrong and where.
The byte offsets, which the library does not return, are then read from the same header, and must fill the file. Headers
beyond the limits of `gradtool.store.format.limits` never reach the library, and no file does: the library would map it
into memory, and if another process truncated it, the system would end this one. The contents of the last headers are
remembered.

Format: https://github.com/huggingface/safetensors#format - eight bytes of header length N (little endian), N bytes of
JSON, the tensors' bytes without gaps.
"""

from __future__ import annotations

import contextlib
import functools
import json
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gradtool.errors import BadInputError, changed_meanwhile, os_errors_about, say, shortened
from gradtool.store.format.limits import MAX_TEXT, check_cost, check_length, check_name_lengths
from gradtool.store.format.tensors import BITS, Shard, Tensor
from gradtool.store.source import SmallFile, Source, read_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.store.source import Reader

    Tensors = tuple[Tensor, ...]

METADATA = "__metadata__"
# The entry of the metadata that says where the pieces in a file belong: see `gradtool.store.format.pieces`.
PIECES_KEY = "DCP_SHARDING_INFO"
# Bytes of the largest header to remember.
_MAX_REMEMBERED = 16_384
# A sound header of a tensor, which the library refuses without the data.
_SOUND = b'{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
# More dimensions than numpy supports; the library says what is wrong with such a shape.
_MAX_RANK = 64
_MAX_NUMBER = 2**64 - 1


class FileTypeError(BadInputError):
    """A file that is not even a damaged file of the type that it should have."""


def read_shard(path: Path, *, is_named: bool = True) -> Shard:
    """Read and check the header of a safetensors file, which the user named, or a folder or an index did.

    Raises:
        BadInputError: the file is missing, not a regular file, or refused by the safetensors library.
        SystemRefusedError: it cannot be read, or another user's link leads there.
    """
    with _opened(path, is_named=is_named) as (source, text):
        parsed = _remembered if len(text) <= _MAX_REMEMBERED else _checked
        metadata, tensors = parsed(path, text, source.size)
        return Shard(source, 8 + len(text), dict(metadata), tensors)


def read_outline(path: Path, *, is_named: bool = True) -> Shard:
    """Read a header without asking the library, which is slow to import and refuses types that it does not know.

    Raises:
        BadInputError: the file is missing, not a regular file, or does not say what its tensors are.
        SystemRefusedError: it cannot be read, or another user's link leads there.
    """
    with _opened(path, is_named=is_named) as (source, text):
        _check_fields(path, text)
        return Shard(source, 8 + len(text), *_parsed(path, text, source.size))


def new_header(path: Path | str, text: bytes, nbytes: int) -> tuple[bytes, Shard]:
    """Check a new header, for so many bytes of data, as that of an input; return its bytes and the file they describe.

    Every header that is written is made here, so that gradtool can read what it writes: a header that it would refuse
    is a `BadInputError`.
    """
    path, size = Path(path), 8 + len(text) + nbytes
    try:
        check_length(path, "the header", len(text))
        check_cost(path, text)
        metadata, tensors = _checked(path, text, size)
    except BadInputError as error:
        (problem,) = error.problems
        message = say("nothing written, because the new header would be invalid: {}", problem.message)
        raise BadInputError.from_problems([replace(problem, message=message, file=str(path))]) from error
    shard = Shard(Source(str(path), size), 8 + len(text), metadata, tensors)
    return len(text).to_bytes(8, "little") + text, shard


def encoded(value: object, indent: int | None = None) -> bytes:
    """Return the JSON of a value; half a surrogate, which has no UTF-8, stays an escape."""
    separators = None if indent else (",", ":")
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators).encode(errors="backslashreplace")


def read_text(shard: Shard) -> bytes:
    """Read the JSON of a shard's header once more; raise `SystemRefusedError` if it changed or cannot be read."""
    with os_errors_about(shard.name), contextlib.closing(shard.source.open()) as reader:
        text = read_range(reader, 8, shard.data_start - 8)
        if not reader.is_unchanged:
            raise changed_meanwhile(shard.name)
        return text


def read_small(path: Path, limit: int = MAX_TEXT, *, is_named: bool = True) -> SmallFile:
    """Read a small file as a whole.

    Raises:
        BadInputError: the file is missing, larger than the limit, or not a regular file.
        SystemRefusedError: it cannot be read, or changed meanwhile; or another user's link leads there.
    """
    with os_errors_about(path), contextlib.closing(Source.kind_of(path).at(path, is_named=is_named)) as reader:
        size = reader.source.size
        check_length(path, "the file", size, limit)
        content = read_range(reader, 0, size)
        if len(content) != size or not reader.is_unchanged:
            raise changed_meanwhile(path)
        return SmallFile(path, reader.source.status, content)


@contextlib.contextmanager
def _opened(path: Path, *, is_named: bool) -> Iterator[tuple[Source, bytes]]:
    """Open a file that must not change until the end of the block, and read the JSON of its header."""
    with os_errors_about(path), contextlib.closing(Source.kind_of(path).at(path, is_named=is_named)) as reader:
        try:
            yield reader.source, _read_header(path, reader)
        except BadInputError:
            # It may look invalid only because it is being written.
            if not reader.source.is_unchanged:
                raise changed_meanwhile(path) from None
            raise
        if not reader.source.is_unchanged:
            raise changed_meanwhile(path)


def _read_header(path: Path, reader: Reader) -> bytes:
    start, size = read_range(reader, 0, 8), reader.source.size
    length = int.from_bytes(start, "little")
    if len(start) < 8:  # noqa: PLR2004 - the length field
        raise FileTypeError(f"is not a safetensors file: {size} bytes are too few", file=path)
    if length > MAX_TEXT:
        limit = f"exceeds the limit of {MAX_TEXT:,} bytes (it has {length:,})"
        message = f"is not a safetensors file, or its header {limit}"
        raise BadInputError(message, file=path, hint="split the file if it is that large")
    if 8 + length > size:
        message = f"truncated: the header should have {length:,} bytes, but the whole file has {size:,}"
        raise BadInputError(message, file=path, hint="copy it again")
    text = read_range(reader, 8, length)
    if len(text) < length:
        raise changed_meanwhile(path)
    check_cost(path, text)
    return text


def _checked(path: Path, text: bytes, size: int) -> tuple[dict[str, str], Tensors]:
    """Return the metadata and the tensors of a header, if it is valid for a file of that size."""
    refusal = _refusal(text)
    # The library looks for the data last, so a header that is refused only for them is sound.
    if refusal is not None and refusal != _refusal(_SOUND):
        raise _explained(path, text, refusal)
    return _parsed(path, text, size)


# For callers that read the same files again and again.
_remembered = functools.lru_cache(maxsize=64)(_checked)


def _parsed(path: Path, text: bytes, size: int) -> tuple[dict[str, str], Tensors]:
    """Return the metadata and the tensors of a sound header; raise `BadInputError` unless they fill the file."""
    header: dict[str, Any] = json.loads(text)
    metadata = header.pop(METADATA, None) or {}
    check_name_lengths(path, header)
    data_start = 8 + len(text)
    tensors = []
    while header:
        # One by one, so that the parsed header frees its memory meanwhile.
        tensors.append(_tensor(*header.popitem(), data_start))
    tensors.reverse()
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_file_size(path, tensors, data_start, size)
    return metadata, tuple(tensors)


def _tensor(name: str, entry: Any, data_start: int = 0) -> Tensor:
    """Make a tensor from its entry in a header."""
    # The library also accepts an array of the three fields, and a dtype as the only key of an object.
    fields = entry if isinstance(entry, list) else [entry[key] for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, (begin, end) = fields
    if isinstance(dtype, dict):
        (dtype,) = dtype
    return Tensor(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _refusal(text: bytes) -> str | None:
    """Return why the library refuses a file that is only this header, or None."""
    from safetensors import SafetensorError, deserialize  # kept off the start-up path

    try:
        deserialize(len(text).to_bytes(8, "little") + text)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        return str(error)
    return None


def _explained(path: Path, text: bytes, refusal: str) -> BadInputError:
    """Say which offsets are wrong in a file that the library refused; or else what the library says."""
    try:
        _check_offsets(path, text)
    except BadInputError as error:
        return error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        pass
    return BadInputError(f"is not a valid safetensors file: {shortened(refusal, 400)}", file=path)


def _check_offsets(path: Path, text: bytes) -> None:
    """Raise `BadInputError` for the first tensor with wrong offsets.

    If a number is wrong in a way that only the library can describe, raise `ValueError`.
    """
    header, expected = json.loads(text), 0
    check_name_lengths(path, header)
    header.pop(METADATA, None)
    tensors = [_tensor(name, entry) for name, entry in header.items()]
    for tensor in tensors:
        numbers = (*tensor.shape, *tensor[3:])
        if len(numbers) > _MAX_RANK or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("shape and offsets must be a few whole numbers")
    tensors.sort(key=lambda tensor: tensor[3:])
    for tensor in tensors:
        needed = -(-tensor.elements * BITS[tensor.dtype] // 8)
        message = ""
        if tensor.begin != expected or tensor.end < tensor.begin:
            message = f"begins at {tensor.begin:,} instead of {expected:,} (tensors may neither overlap nor leave gaps)"
        elif tensor.nbytes != needed:
            shape = f"{list(tensor.shape)} of {tensor.dtype}"
            message = f"{shape} takes {needed:,} bytes, the offsets span {tensor.nbytes:,}"
        if message:
            raise BadInputError(f"bad offsets: {message}", file=path, tensor=tensor.name)
        # The library counts elements in 64 bits.
        if tensor.elements * BITS[tensor.dtype] % 8 or any(n > _MAX_NUMBER for n in accumulate(tensor.shape, mul)):
            raise ValueError(f"{tensor.name!r} ends within a byte, or its shape overflows")
        expected = tensor.end


def _check_fields(path: Path, text: bytes) -> None:
    """Raise `BadInputError` unless a header says the type, the shape and the place of each tensor; of any type."""
    try:
        header = json.loads(text)
        check_name_lengths(path, header)
        metadata = header.pop(METADATA, None) or {}
        unclear = [key for key, value in metadata.items() if not isinstance(value, str)]
        tensors = [_tensor(name, entry) for name, entry in header.items()]
        unclear += [tensor.name for tensor in tensors if not _is_clear(tensor)]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if isinstance(error, BadInputError):
            raise
        message = f"is not a valid safetensors file: {shortened(repr(error), 400)}"
        raise BadInputError(message, file=path) from error
    if unclear:
        raise BadInputError(f"is not a valid safetensors file: {shortened(repr(unclear[0]))} is unclear", file=path)


def _is_clear(tensor: Tensor) -> bool:
    """Check whether the fields of a tensor have the types that they should, and make sense."""
    numbers, dtype = (*tensor.shape, *tensor[3:]), cast("object", tensor.dtype)
    are_numbers = all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers)
    return isinstance(dtype, str) and len(tensor.shape) <= _MAX_RANK and are_numbers and tensor.nbytes >= 0


def _check_file_size(path: Path, tensors: Sequence[Tensor], data_start: int, size: int) -> None:
    expected = max((tensor.end for tensor in tensors), default=data_start)
    counts = f"the header says {expected:,} bytes, the file has {size:,}"
    if expected > size:
        whole = [tensor.name for tensor in tensors if tensor.end <= size]
        last = f"the last whole tensor is {whole[-1]!r}" if whole else "no tensor is whole"
        message = f"truncated: {counts} ({expected - size:,} missing); {last}"
    elif expected < size:
        message = f"trailing bytes: {counts} ({size - expected:,} too many)"
    else:
        return
    raise BadInputError(message, file=path, hint="copy it again")
