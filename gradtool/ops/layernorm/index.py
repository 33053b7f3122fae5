"""Indexes of files that get gradients of layers, or would have to."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gradtool.errors import BadInputError
from gradtool.store.format.gradset import foreign_index
from gradtool.store.transaction.small import NewIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.layernorm.layers import Layer
    from gradtool.ops.layernorm.placement import Files
    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.transaction.output import Output


def refuse_foreign_index(files: Files, layers: Sequence[Layer]) -> None:
    """Raise `BadInputError` for a shard that was named without its index, which would not map what is added."""
    for owner in {layer.owner.path: layer.owner for layer in layers}.values():
        adds = any(not files.shards[shard].keeps_header for shard in owner.shards if shard in files.shards)
        index = foreign_index(owner) if adds else None
        if index is not None:
            raise BadInputError(
                f"is a shard of {index.name}, which must map added tensors; name the index instead", file=owner.path
            )


def new_indexes(files: Files, output: Output) -> list[NewIndex]:
    """The indexes that must be written: those that change, or all where the output is elsewhere."""
    if output.options.file is not None:
        return []
    found = []
    for one in output.sets:
        if one.index is not None:
            stat, content = one.read_index()
            new = reindexed(files, one, content, alone=output.is_elsewhere)
            if output.is_elsewhere or new != content:
                found.append(NewIndex(one.index, stat, new))
    return found


def reindexed(files: Files, owner: GradientSet, content: bytes, *, alone: bool) -> bytes:
    """An index for the new files of a set; `alone` where those hold the gradients and nothing else."""
    document: dict[str, Any] = json.loads(content)
    news = {shard: files.shards[shard].layout.shard for shard in owner.shards if shard in files.shards}
    if not alone:
        news = {shard: news.get(shard, shard) for shard in owner.shards}
    names = {tensor.name: shard.path.name for shard, new in news.items() for tensor in new.tensors}
    changed = names != document["weight_map"]
    known = {name: names[name] for name in document["weight_map"] if name in names}
    document["weight_map"] = known | names
    metadata = document.get("metadata")
    tensors = [tensor for new in news.values() for tensor in new.tensors]
    totals = {
        "total_size": sum(one.nbytes for one in tensors),
        "total_parameters": sum(one.elements for one in tensors),
    }
    for key, total in totals.items():
        if isinstance(metadata, dict) and key in metadata:
            changed = changed or metadata[key] != total
            metadata[key] = total
    if not changed:
        return content
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
