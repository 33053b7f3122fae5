"""Lists the contents of gradient sets, from their headers alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from gradtool.declare import operation
from gradtool.ops.results import AnyResult
from gradtool.options import InfoOptions
from gradtool.store.format.gradset import GradientSet, SetReader, totals
from gradtool.store.format.header import read_outline
from gradtool.store.format.paths import paths_of
from gradtool.store.format.selection import select

if TYPE_CHECKING:
    from gradtool.store.format.gradset import Selected


@dataclass(frozen=True)
class DtypeTotal:
    """All tensors of one type."""

    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class MetadataRow:
    """One entry of the metadata of a file."""

    key: str
    value: str
    file: str


@dataclass(frozen=True)
class TensorRow:
    """One tensor; `bytes` are those in its file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class InfoResult(AnyResult):
    """The contents of the files; `bytes` are those of the selected tensors. Rows are in the order of the files."""

    headline: ClassVar[tuple[str, ...]] = ("files", "tensors", "elements", "bytes")

    files: int
    tensors: int
    elements: int
    bytes: int
    seconds: float
    per_dtype: tuple[DtypeTotal, ...]
    per_metadata: tuple[MetadataRow, ...]
    per_tensor: tuple[TensorRow, ...]


@operation(InfoOptions)
def info(options: InfoOptions) -> InfoResult:
    """List the types, shapes and sizes of tensors, and the metadata, from the headers of files.

    Tensors may have any type, because a header says how many bytes a tensor takes. Values are not read, and an index is
    not compared with its shards; `check` does both. Files that a run is changing are shown as they are.

    Raises:
        UsageError: no path is given, or a pattern is invalid.
        BadInputError: a file or an index is missing or invalid, or nothing is selected.
        SystemRefusedError: a file cannot be read.
    """
    began = perf_counter()
    sets = [_read_outline(path) for path in paths_of(options.named, options.files_from)]
    selected = select(sets, options.include, options.exclude)
    shards = [shard for gradset in sets for shard in gradset.shards]
    groups: dict[str, list[Selected]] = defaultdict(list)
    for entry in selected:
        groups[entry.tensor.dtype].append(entry)
    rows = [DtypeTotal(dtype, **totals(group)) for dtype, group in groups.items()]
    metadata = [MetadataRow(key, value, shard.name) for shard in shards for key, value in shard.metadata.items()]
    return InfoResult(
        files=len(shards),
        **totals(selected),
        seconds=perf_counter() - began,
        per_dtype=tuple(sorted(rows, key=lambda row: (-row.bytes, row.dtype))),
        per_metadata=tuple(metadata),
        per_tensor=tuple(
            TensorRow(tensor.name, shard.name, tensor.dtype, tensor.shape, tensor.nbytes) for shard, tensor in selected
        ),
    )


def _read_outline(path: str) -> GradientSet:
    reader = SetReader(path, read_outline)
    for error in chain(reader.list_files(), reader.read_files()):
        from gradtool.store.format.hints import path_error  # only needed for the error

        raise path_error(error, path, "", None)
    return reader.gradset
