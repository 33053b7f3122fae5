"""Indexes of files that get gradients of layers, or would have to."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from gradtool.errors import BadInputError
from gradtool.store.format.index import mapped_in, reindexed
from gradtool.store.transaction.small import SmallFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.layernorm.layers import Layer
    from gradtool.ops.layernorm.placement import Files
    from gradtool.store.transaction.output import Output


def refuse_foreign_index(files: Files, layers: Sequence[Layer]) -> None:
    """Raise `BadInputError` for a shard that was named without its index, which would not map what is added."""
    # A folder of many layers is searched once.
    mapped = cache(mapped_in)
    for owner in {layer.owner.path: layer.owner for layer in layers}.values():
        shard, is_alone = owner.shards[0], owner.index is None and len(owner.shards) == 1
        adds = is_alone and shard in files.shards and not files.shards[shard].keeps_header
        index = mapped(shard.path.parent).get(shard.path.name) if adds else None
        if index is not None:
            raise BadInputError(
                f"is a shard of {index.name}, which must map added tensors; name the index instead", file=owner.path
            )


def new_indexes(files: Files, output: Output) -> list[SmallFile]:
    """The indexes that must be written: those that change, or all where the output is elsewhere."""
    if output.options.output is not None:
        return []
    found = []
    for one in output.sets:
        if one.index is not None:
            stat, content = one.read_index()
            news = {shard: files.shards[shard].layout.shard for shard in one.shards if shard in files.shards}
            if not output.is_elsewhere:
                news = {shard: news.get(shard, shard) for shard in one.shards}
            new = reindexed(one.index, {shard.path.name: new.tensors for shard, new in news.items()}, content)
            if output.is_elsewhere or new != content:
                found.append(SmallFile(one.index, stat, new))
    return found
