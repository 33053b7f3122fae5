"""One safetensors file: its header, read and checked.

The safetensors library judges whether a file is valid; where it refuses, this module says what is wrong and where. The
byte offsets, which the library does not give, are then read from the same header. What the limits of
`gradtool.store.limits` refuse is refused before the library sees it.

Format: https://github.com/huggingface/safetensors#format - eight bytes of header length N (little endian), N bytes of
JSON, the tensors' bytes without a hole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.errors import BadInputError, SystemRefusedError, from_os_error, shortened
from gradtool.store.limits import MAX_TEXT, refuse_large_header, refuse_long, refuse_long_names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# More dimensions than numpy has; what is wrong with such a shape is left to the library to say.
_MAX_RANK = 64
_OTHER_FORMATS = {b"PK\x03\x04": "a zip archive, as torch.save writes", b"\x80\x02": "a pickle", b"GGUF": "GGUF"}


class Tensor(NamedTuple):
    """One tensor of a file; `begin` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the file."""
        return self.end - self.begin

    @property
    def elements(self) -> int:
        """The product of its shape; 1 for rank 0."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Shard:
    """One file of a gradient set; `tensors` are in the order of their bytes."""

    path: Path
    data_start: int
    size: int
    metadata: dict[str, str]
    tensors: tuple[Tensor, ...]
    stat: os.stat_result

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode: the same for every name of the file."""
        return self.stat.st_dev, self.stat.st_ino


def read_shard(path: Path) -> Shard:
    """Read and check the header of a safetensors file.

    Raises:
        BadInputError: the file is missing, no regular file, or not what the safetensors library accepts.
        SystemRefusedError: it cannot be read.
    """
    with _opened(path) as (fd, status):
        try:
            shard = _read_shard(path, fd, status)
        except BadInputError:
            # What is wrong with it may be no more than that somebody is writing it.
            if is_unchanged(path, status):
                raise
            raise changed_meanwhile(path) from None
        if not is_unchanged(path, status):
            raise changed_meanwhile(path)
        return shard


def is_unchanged(path_or_fd: Path | int, before: os.stat_result) -> bool:
    """Whether a file is still the one that `before` describes, and nobody has written to it since."""
    try:
        now = os.stat(path_or_fd)  # noqa: PTH116 - a descriptor has no Path
    except OSError:
        return False
    return (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns) == (
        before.st_dev,
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )


def changed_meanwhile(path: Path) -> SystemRefusedError:
    """The error for a file that is not what it was when its header was read."""
    return SystemRefusedError("was changed by somebody else in the meantime; run again", file=path, code="changed")


def read_regular(path: Path) -> tuple[os.stat_result, bytes]:
    """The status and the content of a small regular file; all else is refused, and a FIFO does not keep us waiting.

    Raises:
        BadInputError: the file is missing, too large, or no regular file.
        SystemRefusedError: it cannot be read, or was changed while it was.
    """
    with _opened(path) as (fd, status):
        refuse_long(path, "the file", status.st_size)
        content = _pread(fd, status.st_size, 0)
        if len(content) != status.st_size or not is_unchanged(fd, status):
            raise changed_meanwhile(path)
        return status, content


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file, open to be read; all else is refused, and what the system says becomes an error of gradtool's."""
    fd = None
    try:
        # Without O_NONBLOCK a FIFO would keep us waiting for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise BadInputError("is a folder, where a file is expected", file=path)
        if not stat.S_ISREG(status.st_mode):
            raise BadInputError("is not a regular file", file=path)
        yield fd, status
    except OSError as error:
        if isinstance(error, SystemRefusedError):
            raise
        raise from_os_error(error, path) from error
    finally:
        if fd is not None:
            os.close(fd)


def _read_shard(path: Path, fd: int, status: os.stat_result) -> Shard:
    text = _read_header(path, fd, status.st_size)
    _ask_library(path, text, status.st_size)
    header = _parse(text)
    metadata = header.pop("__metadata__", None) or {}
    refuse_long_names(path, header)
    data_start = 8 + len(text)
    tensors = []
    while header:
        # One by one, so that the parsed header makes room for what it becomes.
        tensors.append(_tensor(*header.popitem(), data_start))
    tensors.reverse()
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    return Shard(path, data_start, status.st_size, metadata, tuple(tensors), status)


def _read_header(path: Path, fd: int, size: int) -> bytes:
    """The header's JSON, of a size that can be worked with."""
    start = os.pread(fd, 8, 0)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > MAX_TEXT or 8 + length > size:  # noqa: PLR2004 - the length field
        raise _explain_start(path, start, size)
    text = _pread(fd, length, 8)
    if len(text) < length:
        raise changed_meanwhile(path)
    refuse_large_header(path, text)
    return text


def _ask_library(path: Path, text: bytes, size: int) -> None:
    from safetensors import SafetensorError, safe_open  # kept off the start-up path

    try:
        with _copied(path, text, size) as copy, safe_open(copy, framework="numpy"):
            pass
    except SafetensorError as error:
        raise _explain(path, text, size, shortened(str(error), 400)) from error


@contextlib.contextmanager
def _copied(path: Path, text: bytes, size: int) -> Iterator[Path | str]:
    """The name of a file with the same header and of the same size that nobody else has, with a hole for the data.

    The library maps the file that it is given into memory; should another process make that shorter meanwhile, the
    system would kill us. And what it judges is what we go by. Where a system has no such file, it is the file itself.
    """
    with contextlib.ExitStack() as stack:
        copy: Path | str = path
        with contextlib.suppress(AttributeError, OSError):
            fd = os.memfd_create("gradtool-header", os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            written = os.writev(fd, [len(text).to_bytes(8, "little"), text])
            os.ftruncate(fd, size)
            name = f"/proc/self/fd/{fd}"
            if written == 8 + len(text) and os.stat(name).st_size == size:  # noqa: PTH116 - it lives as long as fd
                copy = name
        yield copy


def _parse(text: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(text)
    return header


def _tensor(name: str, entry: Any, data_start: int) -> Tensor:
    dtype, shape, (begin, end) = _fields(entry)
    return Tensor(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _fields(entry: Any) -> tuple[str, list[int], list[int]]:
    # The library reads an entry from an array of its three fields as well.
    if isinstance(entry, list):
        dtype, shape, offsets = entry
    else:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    # And a type from an object of which it is the only key.
    if isinstance(dtype, dict):
        (dtype,) = dtype
    return dtype, shape, offsets


def _pread(fd: int, length: int, offset: int) -> bytes:
    """All of a range, or as much of it as the file has."""
    parts = []
    while length > 0 and (part := os.pread(fd, length, offset)):
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)


def _explain_start(path: Path, start: bytes, size: int) -> BadInputError:
    """What is wrong with a file of which not even the header can be read; `start` are its first eight bytes."""
    other = _other_format(path, start)
    if other is not None:
        return other
    if len(start) < 8:  # noqa: PLR2004 - the length field
        return BadInputError(f"is not a safetensors file: {size} bytes are too few", file=path)
    length = int.from_bytes(start, "little")
    if length > MAX_TEXT:
        return BadInputError(
            f"is not a safetensors file, or its header is over the limit: "
            f"{length:,} bytes, where {MAX_TEXT:,} are allowed; split a file that is as large",
            file=path,
        )
    return BadInputError(
        f"truncated: the header says {length:,} bytes of header, the file has {size:,} bytes; copy it again",
        file=path,
    )


def _other_format(path: Path, start: bytes) -> BadInputError | None:
    for magic, name in _OTHER_FORMATS.items():
        if start.startswith(magic):
            return BadInputError(f"is not a safetensors file but {name}; convert it first", file=path)
    return None


def _explain(path: Path, text: bytes, size: int, verdict: str) -> BadInputError:
    """What is wrong with a file that the library refused; `verdict` are its words, where we have no better ones."""
    other = _other_format(path, len(text).to_bytes(8, "little"))
    if other is not None:
        return other
    try:
        header = _parse(text)
        refuse_long_names(path, header)
        return _explain_tensors(path, size - 8 - len(text), header, 8 + len(text))
    except BadInputError as error:
        return error
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        return BadInputError(f"is not a valid safetensors file: {verdict}", file=path)


def _checked(tensor: Tensor) -> Tensor:
    """A tensor of a header that the library refused, if its numbers are such that they can be worked with."""
    numbers = (*tensor.shape, tensor.begin, tensor.end)
    if len(numbers) > _MAX_RANK or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("shape and offsets must be a few whole numbers")
    return tensor


def _explain_tensors(path: Path, data_size: int, header: dict[str, Any], data_start: int) -> BadInputError:
    """The first tensor whose offsets lie, or the bytes that the file has too few or too many of."""
    header.pop("__metadata__", None)
    tensors = [_checked(_tensor(name, entry, 0)) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: tensor[3:])
    expected = 0
    for tensor in tensors:
        needed = -(-tensor.elements * BITS[tensor.dtype] // 8)
        if tensor.begin != expected or tensor.end < tensor.begin:
            return BadInputError(
                f"bad offsets: begins at {tensor.begin:,}, where {expected:,} is the end of the one before it "
                f"(tensors may neither overlap nor leave a hole)",
                file=path,
                tensor=tensor.name,
            )
        if tensor.nbytes != needed:
            return BadInputError(
                f"bad offsets: {list(tensor.shape)} of {tensor.dtype} takes {needed:,} bytes, "
                f"the offsets span {tensor.nbytes:,}",
                file=path,
                tensor=tensor.name,
            )
        expected = tensor.end
    says = f"the header says {data_start + expected:,} bytes, the file has {data_start + data_size:,}"
    if expected > data_size:
        whole = [tensor.name for tensor in tensors if tensor.end <= data_size]
        last = f"the last whole tensor is {whole[-1]!r}" if whole else "no tensor is whole"
        return BadInputError(f"truncated: {says} ({expected - data_size:,} missing); {last}; copy it again", file=path)
    if expected < data_size:
        return BadInputError(f"trailing bytes: {says} ({data_size - expected:,} too many)", file=path)
    raise LookupError  # Nothing that we look for; the library knows more.
