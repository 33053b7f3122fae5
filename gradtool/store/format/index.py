"""Indexes (`*.safetensors.index.json`): which shard each tensor is in."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from gradtool.errors import BadInputError, SystemRefusedError, shortened
from gradtool.store.format.header import read_regular
from gradtool.store.format.limits import refuse_large_index, refuse_long_names
from gradtool.store.format.paths import is_file_name

if TYPE_CHECKING:
    from pathlib import Path

INDEX_SUFFIX = ".safetensors.index.json"


def read_weight_map(index: Path, *, is_named: bool = True) -> dict[str, str]:
    """The file name of each tensor's shard, by an index that the user named, or that a folder has.

    Raises:
        BadInputError: the index is missing or invalid, or a shard is not in its folder.
        SystemRefusedError: it cannot be read, or another user's link leads there.
    """
    _, text = read_regular(index, is_named=is_named)
    refuse_large_index(index, text)
    try:
        document = json.loads(text, object_pairs_hook=partial(_without_duplicates, index))
        weight_map: dict[str, Any] = document["weight_map"]
        refuse_long_names(index, weight_map)
        files = list(weight_map.values())
        refuse_long_names(index, (file for file in files if isinstance(file, str)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, BadInputError):
            raise
        raise _other_format(index, text) or BadInputError(
            f"is not a valid index: {shortened(repr(error))}", file=index
        ) from error
    for name, file in zip(weight_map, files, strict=True):
        if not is_file_name(file):
            message = f"the index maps it to {shortened(repr(file))}; a shard must lie beside its index"
            raise BadInputError(message, file=index, tensor=name)
    if not weight_map:
        raise BadInputError("the index maps no tensor", file=index)
    return weight_map


def index_of(file: Path) -> Path | None:
    """An index beside a file that maps to it, if there is one that can be read."""
    try:
        indexes = [entry for entry in file.parent.iterdir() if entry.name.endswith(INDEX_SUFFIX)]
    except OSError:
        return None
    for index in indexes:
        with contextlib.suppress(BadInputError, SystemRefusedError):
            if file.name in read_weight_map(index, is_named=False).values():
                return index
    return None


def _other_format(index: Path, text: bytes) -> BadInputError | None:
    """The error for a refused index that is something else than JSON."""
    from gradtool.store.format import sniff  # only needed for what is refused

    return sniff.foreign_index(index, text[: sniff.HEAD], len(text))


def _without_duplicates(index: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise BadInputError(f"the index has the key {shortened(name)!r} twice", file=index)
            seen.add(name)
    return document
