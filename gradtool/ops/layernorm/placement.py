"""Where the gradients of layers go: into the files of their layers, or into new files of their own; and the indexes."""

from __future__ import annotations

import os
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, option, say
from gradtool.store.format.gradset import Selected
from gradtool.store.format.index import mapped_in, reindexed
from gradtool.store.format.layout import Layout, lay_out
from gradtool.store.format.tensors import BITS
from gradtool.store.io.destination import NewFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradtool.ops.layernorm.layers import Layer
    from gradtool.store.format.tensors import Shard, Tensor
    from gradtool.store.source import SmallFile
    from gradtool.store.transaction.output import Output

    # What becomes of tensors of the old files: another takes the place of one, or None if it goes.
    Replacements = Mapping[tuple[Shard, str], Tensor | None]


class NewShard(NamedTuple):
    """What takes a shard's place: its layout, and what is copied into it, by (begin, end): where it begins there.

    Where no tensor is added or removed, the layout has no header: it is copied like everything else.
    """

    layout: Layout
    copies: dict[tuple[int, int], int]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors of the new file."""
        return self.layout.shard.tensors


class Files(NamedTuple):
    """The new files, by the shard that they come from; and of each layer, the places of its tensors in them.

    A place is a shard and a tensor of the file that takes its place. `inputs` are X and Y_grad, if the pass that reads
    them writes them there.
    """

    shards: dict[Shard, NewShard]
    outputs: list[list[Selected]]
    inputs: list[list[Selected | None]]

    @property
    def new_files(self) -> list[NewFile]:
        """The files as they are written: headers that are new, and copies of what stays."""
        changes = dict.fromkeys(self.shards, 0)
        for shard, tensor in chain.from_iterable(self.outputs):
            changes[shard] += tensor.nbytes
        return [
            NewFile(shard, new.layout.shard.size, new.layout.header, _joined(new.copies), changes=changes[shard])
            for shard, new in self.shards.items()
        ]


def separate_files(layers: Sequence[Layer]) -> Files:
    """Plan new files with nothing but the gradients, one for each file that has a layer's Y_grad."""
    outputs = [[(layer.y_grad.shard, output) for output in layer.outputs] for layer in layers]
    shards = dict.fromkeys(layer.y_grad.shard for layer in layers)
    return _files(outputs, {(shard, tensor.name): None for shard in shards for tensor in shard.tensors})


def changed_files(layers: Sequence[Layer], *, x_grad_in_place: bool) -> Files:
    """Plan the files of the layers with the gradients added, or in the place of tensors of the same names.

    Raises:
        BadInputError: X_grad cannot replace a Y_grad, a result would replace an input, or an index would be outdated.
    """
    owners = {layer.owner.name: layer.owner for layer in layers}
    shards_of = {
        path: {tensor.name: shard for shard in owner.shards for tensor in shard.tensors}
        for path, owner in owners.items()
    }
    outputs: list[list[tuple[Shard, Tensor]]] = []
    replacements: dict[tuple[Shard, str], Tensor | None] = {}
    for layer in layers:
        (y_shard, y_grad), shard_of = layer.y_grad, shards_of[layer.owner.name]
        outputs.append([(shard_of.get(output.name, y_shard), output) for output in layer.outputs])
        replacements |= {(shard, output.name): output for shard, output in outputs[-1] if output.name in shard_of}
        if x_grad_in_place:
            old_shard, x_grad = outputs[-1][0]
            if (y_grad.dtype, y_grad.shape) != (x_grad.dtype, x_grad.shape):
                message = f"has type {y_grad.dtype}, so X_grad of {x_grad.dtype} cannot replace it in place"
                hint = say("leave out {}", option("x_grad_in_place", True))
                raise BadInputError(message, file=y_shard.name, tensor=y_grad.name, code="dtype", hint=hint)
            outputs[-1][0] = y_shard, x_grad
            replacements[y_shard, y_grad.name] = x_grad
            if x_grad.name in shard_of:
                replacements[old_shard, x_grad.name] = None
    files = _files(outputs, replacements)
    _check_inputs_stay(layers)
    # A folder of many layers is searched once.
    mapped = cache(mapped_in)
    for path, owner in owners.items():
        shard, is_alone = owner.shards[0], owner.index is None and len(owner.shards) == 1
        adds = is_alone and shard in files.shards and bool(files.shards[shard].layout.header)
        index = mapped(os.path.dirname(shard.name)).get(shard.file_name) if adds else None  # noqa: PTH120 - may be ""
        if index is not None:
            message = f"is a shard of {index.name}, which must map added tensors"
            raise BadInputError(message, file=path, hint="name the index instead")
    return files


def _check_inputs_stay(layers: Sequence[Layer]) -> None:
    """Raise `BadInputError` if a result beside the inputs has the name of one, but for an X_grad like its Y_grad."""
    sets = {shard: layer.owner.name for layer in layers for shard in layer.owner.shards}
    results = {(layer.owner.name, output.name): (layer, output) for layer in layers for output in layer.outputs}
    for layer in layers:
        for shard, tensor in layer.inputs:
            other, new = results.get((sets[shard], tensor.name), (None, tensor)) if shard in sets else (None, tensor)
            if other is None or (other is layer and (new.dtype, new.shape) == (tensor.dtype, tensor.shape)):
                continue
            message = f"is an input, and a result of {new.dtype} {list(new.shape)} would take its name"
            if other is not layer:
                message = f"is an input of {layer.name!r}, and a result of {other.name!r} would take its name"
            hint = say("choose another name, or use {} or {}", option("output"), option("output_dir"))
            raise BadInputError(message, file=shard.name, tensor=tensor.name, hint=hint)


def check_in_place(layers: Sequence[Layer], files: Files) -> None:
    """Raise `BadInputError` for what cannot be done in place: tensors that are added, inputs that are overwritten."""
    inputs = {(shard, tensor.name) for layer in layers for shard, tensor in layer.inputs}
    for shard, tensor in chain.from_iterable(files.outputs):
        if files.shards[shard].layout.header:
            message, hint = "is not in the file yet, and cannot be added in place", "leave out {} the first time"
        elif (shard, tensor.name) in inputs:
            message, hint = "is an input, and would be overwritten", "leave out {}"
        else:
            continue
        hint = say(hint, option("write", "inplace"))
        raise BadInputError(message, file=shard.name, tensor=tensor.name, code="header", hint=hint)


def with_inputs(files: Files, layers: Sequence[Layer]) -> Files:
    """Have the pass write each X and Y_grad that stays, which is then not read again to be copied."""

    def take(selected: Selected) -> Selected | None:
        shard, tensor = selected
        copies = files.shards[shard].copies if shard in files.shards else {}
        begin = copies.pop((tensor.begin, tensor.end), None)
        return None if begin is None else Selected(shard, tensor._replace(begin=begin, end=begin + tensor.nbytes))

    return files._replace(inputs=[[take(layer.x), take(layer.y_grad)] for layer in layers])


def new_indexes(files: Files, output: Output) -> list[SmallFile]:
    """Return the indexes that must be written: those that change, or all in another folder."""
    indexes = []
    for owner in output.sets:
        # With results in one file, there is no set with an index.
        if (index := owner.read_index()) is not None:
            tensors = {
                shard.file_name: files.shards[shard].tensors if shard in files.shards else shard.tensors
                for shard in owner.shards
                if shard in files.shards or not output.is_elsewhere
            }
            new = reindexed(index, tensors)
            if output.is_elsewhere or new != index:
                indexes.append(new)
    return indexes


def _files(outputs: Sequence[Sequence[tuple[Shard, Tensor]]], replacements: Replacements) -> Files:
    added: dict[Shard, list[Tensor]] = {}
    for shard, output in chain.from_iterable(outputs):
        added.setdefault(shard, []).append(output)
    for shard, _ in replacements:
        added.setdefault(shard, [])
    shards = {shard: _new_shard(shard, tensors, replacements) for shard, tensors in added.items()}
    tensors = {(shard, tensor.name): tensor for shard, new in shards.items() for tensor in new.tensors}
    places = [[Selected(shard, tensors[shard, output.name]) for shard, output in entries] for entries in outputs]
    return Files(shards, places, [[None, None] for _ in outputs])


def _new_shard(shard: Shard, outputs: Sequence[Tensor], replacements: Replacements) -> NewShard:
    order: list[Tensor] = []
    for tensor in shard.tensors:
        new = replacements.get((shard, tensor.name), tensor)
        if new is not None and (new.dtype, new.shape) == (tensor.dtype, tensor.shape):
            order.append(new)
    present = set(order)
    added = [output for output in outputs if output not in present]
    # As the format's writers have it: larger elements first, so that every tensor is aligned.
    for bits in sorted({BITS[output.dtype] for output in added}, reverse=True):
        after = max((at + 1 for at, tensor in enumerate(order) if BITS[tensor.dtype] >= bits), default=0)
        order[after:after] = [output for output in added if BITS[output.dtype] == bits]
    if [tensor[:3] for tensor in order] == [tensor[:3] for tensor in shard.tensors]:
        layout, copies = Layout(b"", shard), {(0, shard.data_start): 0}
    else:
        layout, copies = lay_out(shard.name, order, shard.metadata), {}
    computed = set(outputs)
    for old, new in zip(order, layout.shard.tensors, strict=True):
        if old not in computed:
            copies[old.begin, old.end] = new.begin
    return NewShard(layout, copies)


def _joined(copies: Mapping[tuple[int, int], int]) -> list[tuple[int, int, int]]:
    """Join copies that follow one another, both where they come from and where they go."""
    joined: list[tuple[int, int, int]] = []
    for (begin, end), to in copies.items():
        if joined and joined[-1][1] == begin and joined[-1][2] + begin - joined[-1][0] == to:
            joined[-1] = (joined[-1][0], end, joined[-1][2])
        elif end > begin:
            joined.append((begin, end, to))
    return joined
