"""The header of a safetensors file, read and checked.

The safetensors library decides whether a file is valid; if it refuses a file, this module says what is wrong and where.
The byte offsets, which the library does not return, are then read from the same header. Headers beyond the limits of
`gradtool.store.format.limits` never reach the library. It maps the whole file into memory; without enough address space
for that, it checks a header whose tensors are all empty, and this module checks their shapes and offsets. Short headers
are first checked in that way too, which is faster; and the contents of the last headers are remembered.

Format: https://github.com/huggingface/safetensors#format - eight bytes of header length N (little endian), N bytes of
JSON, the tensors' bytes without gaps.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gradtool.errors import BadInputError, changed_meanwhile, os_errors_about, say, shortened
from gradtool.store import system
from gradtool.store.format.limits import MAX_TEXT, check_cost, check_length, check_name_lengths
from gradtool.store.format.tensors import BITS, Shard, Tensor
from gradtool.store.source import SmallFile, Source, read_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.store.source import Reader

    Tensors = tuple[Tensor, ...]

METADATA = "__metadata__"
# Bytes of a header that is quickly checked without a file, and of the largest header to remember.
_SHORT, _MAX_REMEMBERED = 512, 16_384
# More dimensions than numpy supports; the library says what is wrong with such a shape.
_MAX_RANK = 64
_MAX_NUMBER = 2**64 - 1
# Strings, so that their content is not matched; empty lists; and numbers below 10**19 and so 2**64. A string need not
# end, because otherwise every quote in it would be tried as the start of a string.
_TOKEN = re.compile(
    rb'("(?:[^"\\]++|\\.)*+"?)|(\[[ \t\r\n]*\])|((?<![\w.+-])(?:0|[1-9][0-9]{0,18})(?![\w.+-]))', re.DOTALL
)


class FileTypeError(BadInputError):
    """A file that is not even a damaged file of the type that it should have."""


class _WithoutNumpy:
    """Bytes of longer headers that are still checked without a file.

    To open a file, the library imports numpy; that takes as long as to check a million bytes.
    """

    left = 1 << 18


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
        _check_fields(path, text, source.size)
        return Shard(source, 8 + len(text), *_parsed(path, text))


def new_header(path: Path | str, text: bytes, nbytes: int) -> tuple[bytes, Shard]:
    """Check a new header, for so many bytes of data, as that of an input; return its bytes and the file they describe.

    Every header that is written is made here, so that gradtool can read what it writes: a header that it would refuse
    is a `BadInputError`.
    """
    path, size = Path(path), 8 + len(text) + nbytes
    try:
        check_length(path, "the header", len(text))
        check_cost(path, text)
        if (refusal := _refusal(path, text, size)) is not None:
            raise _explained(path, text, size, refusal)
    except BadInputError as error:
        (problem,) = error.problems
        message = say("nothing written, because the new header would be invalid: {}", problem.message)
        raise BadInputError.from_problems([replace(problem, message=message, file=str(path))]) from error
    shard = Shard(Source(str(path), size), 8 + len(text), *_parsed(path, text))
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


def read_small(path: Path, limit: int | None = None, *, is_named: bool = True) -> SmallFile:
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
    is_short = len(text) <= _SHORT
    if not is_short and "numpy" not in sys.modules and len(text) <= _WithoutNumpy.left:
        _WithoutNumpy.left -= len(text)
        is_short = True
    # The full check says what is wrong.
    if not is_short or _refusal(path, text, size) is not None:
        _ask_library(path, text, size)
    return _parsed(path, text)


# For callers that read the same files again and again.
_remembered = functools.lru_cache(maxsize=64)(_checked)


def _parsed(path: Path, text: bytes) -> tuple[dict[str, str], Tensors]:
    """Return the metadata and the tensors of a sound header."""
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
    return metadata, tuple(tensors)


def _tensor(name: str, entry: Any, data_start: int = 0) -> Tensor:
    """Make a tensor from its entry in a header."""
    # The library also accepts an array of the three fields, and a dtype as the only key of an object.
    fields = entry if isinstance(entry, list) else [entry[key] for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, (begin, end) = fields
    if isinstance(dtype, dict):
        (dtype,) = dtype
    return Tensor(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _refusal(path: Path, text: bytes, size: int) -> Exception | None:
    """Check a header without a file of that size; return why it is refused, or None."""
    from safetensors import SafetensorError, deserialize  # kept off the start-up path

    header = emptied(text)
    try:
        deserialize(len(header).to_bytes(8, "little") + header)  # type: ignore[no-untyped-call]
        _check_offsets(path, text, size)
    except (SafetensorError, ValueError) as error:
        return error
    return None


def _ask_library(path: Path, text: bytes, size: int) -> None:
    """Raise `BadInputError` if the library refuses a file.

    It maps its file into memory; if another process truncated that file, the system would kill this one. So it gets a
    private file of the same size, with a hole for the data. That copy is also certain to have the header that was read.
    Where none can be made, the library gets the file itself.
    """
    from safetensors import SafetensorError, safe_open  # kept off the start-up path

    refusal: Exception | None = None
    try:
        with contextlib.ExitStack() as stack:
            copy: Path | str = path
            with contextlib.suppress(OSError):
                copy = stack.enter_context(system.unnamed_file([len(text).to_bytes(8, "little"), text], size))
            stack.enter_context(safe_open(copy, framework="numpy"))
    except MemoryError:  # There is a limit on memory, and the file is larger.
        refusal = _refusal(path, text, size)
    except (SafetensorError, ValueError) as error:
        refusal = error
    if refusal is not None:
        raise _explained(path, text, size, refusal) from refusal


def _explained(path: Path, text: bytes, size: int, refusal: Exception) -> BadInputError:
    """Say which offsets are wrong in a file that the library refused; or else what the library says."""
    try:
        _check_offsets(path, text, size)
    except BadInputError as error:
        return error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        pass
    return BadInputError(f"is not a valid safetensors file: {shortened(str(refusal), 400)}", file=path)


def emptied(text: bytes) -> bytes:
    """Put a zero into each shape of a header, and set all offsets to zero; it is as valid as before, but for numbers.

    A number that is not valid there, such as -1, 1.0, 007 or 2**64, stays for the library to refuse.
    """
    return _TOKEN.sub(lambda token: token[1] or (b"[0]" if token[2] else b"0"), text)


def _check_offsets(path: Path, text: bytes, size: int) -> None:
    """Raise `BadInputError` for the first tensor with wrong offsets, or for too few or too many bytes.

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
    _check_file_size(path, tensors, 8 + len(text), size)


def _check_fields(path: Path, text: bytes, size: int) -> None:
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
    tensors.sort(key=lambda tensor: tensor[3:])
    _check_file_size(path, tensors, 8 + len(text), size)


def _is_clear(tensor: Tensor) -> bool:
    """Check whether the fields of a tensor have the types that they should, and make sense."""
    numbers, dtype = (*tensor.shape, *tensor[3:]), cast("object", tensor.dtype)
    are_numbers = all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers)
    return isinstance(dtype, str) and len(tensor.shape) <= _MAX_RANK and are_numbers and tensor.nbytes >= 0


def _check_file_size(path: Path, tensors: Sequence[Tensor], data_start: int, size: int) -> None:
    expected = data_start + max((tensor.end for tensor in tensors), default=0)
    counts = f"the header says {expected:,} bytes, the file has {size:,}"
    if expected > size:
        whole = [tensor.name for tensor in tensors if data_start + tensor.end <= size]
        last = f"the last whole tensor is {whole[-1]!r}" if whole else "no tensor is whole"
        message = f"truncated: {counts} ({expected - size:,} missing); {last}"
    elif expected < size:
        message = f"trailing bytes: {counts} ({size - expected:,} too many)"
    else:
        return
    raise BadInputError(message, file=path, hint="copy it again")
