"""Indexes (`*.safetensors.index.json`): which shard each tensor is in."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradtool.errors import BadInputError, SystemRefusedError, shortened
from gradtool.store.format.header import encoded, read_small
from gradtool.store.format.limits import MAX_TEXT, check_cost, check_length, check_name_lengths, check_shard_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradtool.store.format.tensors import Tensor
    from gradtool.store.source import SmallFile

INDEX_SUFFIX = ".safetensors.index.json"


def reindexed(index: SmallFile, files: Mapping[str, Sequence[Tensor]]) -> SmallFile:
    """Return an index for other tensors in the files of a set; as it is, if it still fits."""
    document: dict[str, Any] = json.loads(index.content)
    names = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    known = {name: names[name] for name in document["weight_map"] if name in names}
    new = document | {"weight_map": known | names}
    if isinstance(metadata := document.get("metadata"), dict):
        tensors = [tensor for part in files.values() for tensor in part]
        totals = {
            "total_size": sum(tensor.nbytes for tensor in tensors),
            "total_parameters": sum(tensor.elements for tensor in tensors),
        }
        new["metadata"] = metadata | {key: total for key, total in totals.items() if key in metadata}
    return index if new == document else index._replace(content=new_index(index.path, new))


def new_index(path: Path, document: Mapping[str, Any]) -> bytes:
    """Return the content of a new index; raise `BadInputError` if it could not be read again.

    Every index that is written is made here.
    """
    text = encoded(document, indent=2) + b"\n"
    check_length(path, "the index", len(text))
    _parsed(path, text)
    return text


def read_weight_map(index: Path, *, is_named: bool = True) -> dict[str, str]:
    """Read the file name of each tensor's shard from an index that the user named, or that a folder has.

    Raises:
        BadInputError: the index is missing or invalid, or a shard is not in its folder.
        SystemRefusedError: it cannot be read, or another user's link leads there.
    """
    return _parsed(index, read_small(index, is_named=is_named).content)


def _parsed(index: Path, text: bytes) -> dict[str, str]:
    check_cost(index, text, is_index=True)
    try:
        document = json.loads(text, object_pairs_hook=partial(_without_duplicates, index))
        weight_map: dict[str, Any] = document["weight_map"]
        check_name_lengths(index, weight_map)
        check_name_lengths(index, (file for file in weight_map.values() if isinstance(file, str)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(f"is not a valid index: {shortened(repr(error))}", file=index) from error
    for name, file in weight_map.items():
        if not is_file_name(file):
            message = f"the index maps it to {shortened(repr(file))}, which is not the name of a file beside the index"
            raise BadInputError(message, file=index, tensor=name)
    if not weight_map:
        raise BadInputError("the index maps no tensors", file=index)
    check_shard_count(index, set(weight_map.values()))
    return weight_map


def _without_duplicates(index: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise BadInputError(f"the index has the key {shortened(name)!r} twice", file=index)
    return document


def is_file_name(name: Any) -> bool:
    """Check whether it is the name of a file in a folder, and leads nowhere else."""
    # Not by a Path: there may be a hundred thousand of them.
    if not isinstance(name, str) or name in {"", ".", ".."} or "/" in name or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeError:
        return False
    return True


def mapped_in(folder: str) -> dict[str, Path]:
    """Return the files that indexes in a folder map to, each with its index; an index that cannot be read is ignored.

    If the indexes together are larger than an index may be, raise `BadInputError`.
    """
    # By device and inode: an index may have many names.
    indexes: dict[tuple[int, int], tuple[Path, int]] = {}
    with contextlib.suppress(OSError):
        for path in Path(folder).iterdir():
            if path.name.endswith(INDEX_SUFFIX) and os.path.exists(path):  # noqa: PTH110 - Path's own may raise
                status = path.stat()
                indexes[status.st_dev, status.st_ino] = path, status.st_size
    nbytes = sum(size for _, size in indexes.values())
    if len(indexes) > 1 and nbytes > MAX_TEXT:
        message = f"its indexes together exceed the limit of {MAX_TEXT:,} bytes (they have {nbytes:,})"
        hint = "move indexes away that map none of its files"
        raise BadInputError(message, file=folder, code="limit", hint=hint)
    mapped: dict[str, Path] = {}
    for index, _ in indexes.values():
        with contextlib.suppress(BadInputError, SystemRefusedError):
            mapped |= dict.fromkeys(read_weight_map(index, is_named=False).values(), index)
    return mapped
