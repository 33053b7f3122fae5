"""The tensors of a header, and whether their shapes and offsets are consistent and fill the file."""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import BadInputError, shortened
from gradtool.store.format.limits import check_name_lengths

if TYPE_CHECKING:
    from pathlib import Path

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# More dimensions than numpy supports; the library says what is wrong with such a shape.
_MAX_RANK = 64
# Strings, so that their content is not matched; empty lists; and numbers below 10**19 and so 2**64. A string need not
# end, because otherwise every quote in it would be tried as the start of one.
_OUTSIDE_STRINGS = re.compile(
    rb'"(?:[^"\\]++|\\.)*+"?|\[[ \t\r\n]*\]|(?<![\w.+-])(?:0|[1-9][0-9]{0,18})(?![\w.+-])', re.DOTALL
)
_MAX_NUMBER = 2**64 - 1


class Tensor(NamedTuple):
    """One tensor of a file; `begin` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return self.end - self.begin

    @property
    def elements(self) -> int:
        """The product of its shape; 1 for rank 0."""
        return math.prod(self.shape)


def tensor_of(name: str, entry: Any, data_start: int) -> Tensor:
    """Make a tensor of its name and its entry in the header."""
    # The library also accepts an array of the three fields, and a dtype as the only key of an object.
    fields = entry if isinstance(entry, list) else [entry[key] for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, (begin, end) = fields
    if isinstance(dtype, dict):
        (dtype,) = dtype
    return Tensor(name, dtype, tuple(shape), data_start + begin, data_start + end)


def emptied(text: bytes) -> bytes:
    """Put a zero into each shape of a header, and set all offsets to zero; it is as valid as before, but for numbers.

    A number that is not valid there, such as -1, 1.0, 007 or 2**64, stays for the library to refuse.
    """
    return _OUTSIDE_STRINGS.sub(_emptied_token, text)


def _emptied_token(token: re.Match[bytes]) -> bytes:
    start = token[0][:1]
    return token[0] if start == b'"' else b"[0]" if start == b"[" else b"0"


def check_offsets(path: Path, text: bytes, size: int) -> None:
    """Raise `BadInputError` for the first tensor with wrong offsets, or for too few or too many bytes.

    Raises:
        ValueError: a number is wrong in a way that only the library can describe.
    """
    header, data_start, expected = json.loads(text), 8 + len(text), 0
    check_name_lengths(path, header)
    header.pop("__metadata__", None)
    tensors = [tensor_of(name, entry, 0) for name, entry in header.items()]
    for tensor in tensors:
        numbers = (*tensor.shape, tensor.begin, tensor.end)
        if len(numbers) > _MAX_RANK or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("shape and offsets must be a few whole numbers")
    tensors.sort(key=lambda tensor: tensor[3:])
    for tensor in tensors:
        needed = -(-tensor.elements * BITS[tensor.dtype] // 8)
        if tensor.begin != expected or tensor.end < tensor.begin:
            what = f"begins at {tensor.begin:,} instead of {expected:,}"
            message = f"bad offsets: {what} (tensors may neither overlap nor leave gaps)"
            raise BadInputError(message, file=path, tensor=tensor.name)
        if tensor.nbytes != needed:
            what = f"{list(tensor.shape)} of {tensor.dtype} takes {needed:,} bytes"
            message = f"bad offsets: {what}, the offsets span {tensor.nbytes:,}"
            raise BadInputError(message, file=path, tensor=tensor.name)
        # The library counts elements in 64 bits.
        if tensor.elements * BITS[tensor.dtype] % 8 or any(n > _MAX_NUMBER for n in accumulate(tensor.shape, mul)):
            raise ValueError(f"{tensor.name!r} ends within a byte, or its shape overflows")
        expected = tensor.end
    _check_file_size(path, tensors, data_start + expected, size, data_start)


def check_fields(path: Path, text: bytes, size: int) -> None:
    """Raise `BadInputError` unless a header says the type, the shape and the place of each tensor; of any type."""
    try:
        header = json.loads(text)
        check_name_lengths(path, header)
        metadata = header.pop("__metadata__", None) or {}
        unclear = [key for key, value in metadata.items() if not isinstance(value, str)]
        tensors = [tensor_of(name, entry, 0) for name, entry in header.items()]
        unclear += [tensor.name for tensor in tensors if not _is_clear(tensor)]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        if isinstance(error, BadInputError):
            raise
        message = f"is not a valid safetensors file: {shortened(repr(error), 400)}"
        raise BadInputError(message, file=path) from error
    if unclear:
        raise BadInputError(f"is not a valid safetensors file: {shortened(repr(unclear[0]))} is unclear", file=path)
    tensors.sort(key=lambda tensor: tensor[3:])
    data_start, end = 8 + len(text), max((tensor.end for tensor in tensors), default=0)
    _check_file_size(path, tensors, data_start + end, size, data_start)


def _is_clear(tensor: Tensor) -> bool:
    """Check whether the fields of a tensor have the types that they should, and make sense."""
    dtype: object = tensor.dtype
    if not isinstance(dtype, str) or len(tensor.shape) > _MAX_RANK:
        return False
    numbers = (*tensor.shape, tensor.begin, tensor.end)
    return all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers) and tensor.nbytes >= 0


def _check_file_size(path: Path, tensors: list[Tensor], expected: int, size: int, data_start: int) -> None:
    says = f"the header says {expected:,} bytes, the file has {size:,}"
    if expected > size:
        whole = [tensor.name for tensor in tensors if data_start + tensor.end <= size]
        last = f"the last whole tensor is {whole[-1]!r}" if whole else "no tensor is whole"
        what = f"truncated: {says} ({expected - size:,} missing); {last}"
    elif expected < size:
        what = f"trailing bytes: {says} ({size - expected:,} too many)"
    else:
        return
    raise BadInputError(what, file=path, hint="copy it again")
