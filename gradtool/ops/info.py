"""Tells what is in gradient sets, from their headers alone."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar

from gradtool.declare import operation
from gradtool.options import InfoOptions
from gradtool.store.format.gradset import GradientSet, read_mapped, select
from gradtool.store.format.header import read_outline
from gradtool.store.format.index import read_weight_map
from gradtool.store.format.listing import listing_of
from gradtool.store.format.paths import no_path_error, read_path_list

if TYPE_CHECKING:
    from collections.abc import Iterable

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
class InfoResult:
    """What is in the files: `bytes` are those of the selected tensors. Rows are in the order of the files."""

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
    """Tell the types, shapes and sizes of tensors, and the metadata, from the headers of files.

    Types need not be known: a header says how many bytes a tensor takes. Values are not read, nor is an index compared
    with its shards; `check` does that. Files that a run is changing are shown as they are.

    Raises:
        UsageError: no path is given, or a pattern is invalid.
        BadInputError: a file or an index is missing or invalid, or nothing is selected.
        SystemRefusedError: a file cannot be read.
    """
    began = perf_counter()
    named = options.named
    if options.files_from is not None:
        named += read_path_list(os.fspath(options.files_from)).paths
    if not named:
        raise no_path_error()
    sets = [_outlined(path) for path in dict.fromkeys(named)]
    selected = select(sets, options.include, options.exclude)
    shards = [shard for one in sets for shard in one.shards]
    return InfoResult(
        files=len(shards),
        tensors=len(selected),
        elements=sum(one.tensor.elements for one in selected),
        bytes=sum(one.tensor.nbytes for one in selected),
        seconds=perf_counter() - began,
        per_dtype=tuple(_totals(selected)),
        per_metadata=tuple(
            MetadataRow(key, value, str(one.path)) for one in shards for key, value in one.metadata.items()
        ),
        per_tensor=tuple(
            TensorRow(one.tensor.name, str(one.shard.path), one.tensor.dtype, one.tensor.shape, one.tensor.nbytes)
            for one in selected
        ),
    )


def _outlined(path: str) -> GradientSet:
    """A set as its headers describe it."""
    listing = listing_of(path)
    if listing.index is None:
        shards = tuple(read_outline(file, is_named=listing.is_named) for file in listing.files)
    else:
        files = dict.fromkeys(read_weight_map(listing.index, is_named=listing.is_named).values())
        shards = tuple(read_mapped(listing.index, file, read_outline) for file in files)
    return GradientSet(listing.path, shards, listing.index)


def _totals(selected: Iterable[Selected]) -> list[DtypeTotal]:
    """The totals of each type, the type with most bytes first."""
    groups: dict[str, list[Selected]] = defaultdict(list)
    for one in selected:
        groups[one.tensor.dtype].append(one)
    rows = [
        DtypeTotal(
            dtype=dtype,
            tensors=len(group),
            elements=sum(one.tensor.elements for one in group),
            bytes=sum(one.tensor.nbytes for one in group),
        )
        for dtype, group in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.bytes, row.dtype))
