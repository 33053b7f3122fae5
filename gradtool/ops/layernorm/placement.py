"""Where the gradients of layers go: into the files of their layers, or into new files of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError
from gradtool.store.format.gradset import Selected
from gradtool.store.format.layout import Layout, lay_out
from gradtool.store.format.tensors import BITS
from gradtool.store.transaction.destination import NewFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.layernorm.layers import Layer
    from gradtool.store.format.header import Shard
    from gradtool.store.format.tensors import Tensor


class NewShard(NamedTuple):
    """What takes a shard's place: its layout, and what is copied into it, as (begin, end, begin there)."""

    layout: Layout
    copies: Sequence[tuple[int, int, int]]

    @property
    def keeps_header(self) -> bool:
        """Whether the header is copied like everything else."""
        return bool(self.copies) and self.copies[0][0] == 0

    @property
    def header(self) -> bytes:
        """The new header, if it is not copied."""
        return b"" if self.keeps_header else self.layout.header


class Place(NamedTuple):
    """Where an output goes: a tensor of the new file that takes a shard's place."""

    shard: Shard
    selected: Selected


class Files(NamedTuple):
    """The new files by the shard that they come from, and by layer where its outputs are in them.

    `inputs` are the places of X and of Y_grad, if the pass that reads them writes them there; else None.
    """

    shards: dict[Shard, NewShard]
    places: list[list[Place]]
    inputs: list[tuple[Place | None, Place | None]]

    @property
    def new_files(self) -> list[NewFile]:
        """The files as they are written: headers that are new, and copies of what stays."""
        changes = dict.fromkeys(self.shards, 0)
        for shard, selected in (place for places in self.places for place in places):
            changes[shard] += selected.tensor.nbytes
        return [
            NewFile(shard, new.layout.shard.size, new.header, _joined(new.copies), changes=changes[shard])
            for shard, new in self.shards.items()
        ]

    def with_inputs(self, layers: Sequence[Layer]) -> Files:
        """The same, but the pass writes each X and Y_grad that stays, which then is not read again to be copied."""
        left = {shard: {(begin, end): to for begin, end, to in new.copies} for shard, new in self.shards.items()}
        inputs = [(self._taken(layer.x, left), self._taken(layer.y_grad, left)) for layer in layers]
        shards = {
            shard: new._replace(copies=[(begin, end, to) for (begin, end), to in left[shard].items()])
            for shard, new in self.shards.items()
        }
        return self._replace(shards=shards, inputs=inputs)

    def _taken(self, one: Selected, left: dict[Shard, dict[tuple[int, int], int]]) -> Place | None:
        """The place of an input in its new file, if it stays; it is no longer left to be copied."""
        shard, tensor = one
        to = left.get(shard, {}).pop((tensor.begin, tensor.end), None)
        if to is None:
            return None
        there = tensor._replace(begin=to, end=to + tensor.nbytes)
        return Place(shard, Selected(self.shards[shard].layout.shard, there))


def apart(layers: Sequence[Layer]) -> Files:
    """New files that hold the gradients and nothing else, one for each file that has a layer's `Y_grad`."""
    return _files({}, [[(layer.y_grad.shard, output) for output in layer.outputs] for layer in layers], {})


def beside(layers: Sequence[Layer], *, x_grad_in_place: bool) -> Files:
    """The files of the layers, with the gradients added, or in the place of tensors of the same names."""
    homes: list[list[tuple[Shard, Tensor]]] = []
    owners = {id(layer.owner): layer.owner for layer in layers}
    kept = {shard: {tensor.name: tensor for tensor in shard.tensors} for one in owners.values() for shard in one.shards}
    home_in = {
        key: {tensor.name: shard for shard in owner.shards for tensor in shard.tensors} for key, owner in owners.items()
    }
    instead: dict[tuple[Shard, str], Tensor] = {}
    for layer in layers:
        home = home_in[id(layer.owner)]
        homes.append([(home.get(output.name, layer.y_grad.shard), output) for output in layer.outputs])
        if x_grad_in_place:
            x_grad = layer.outputs[0]
            _check_alike(layer, x_grad)
            if x_grad.name in home:
                del kept[home[x_grad.name]][x_grad.name]
            homes[-1][0] = (layer.y_grad.shard, x_grad)
            instead[layer.y_grad.shard, layer.y_grad.tensor.name] = x_grad
        for shard, output in homes[-1][x_grad_in_place:]:
            if output.name in home:
                instead[shard, output.name] = output
    return _files({shard: list(tensors.values()) for shard, tensors in kept.items()}, homes, instead)


def _check_alike(layer: Layer, x_grad: Tensor) -> None:
    own = layer.y_grad.tensor
    if (own.dtype, own.shape) != (x_grad.dtype, x_grad.shape):
        raise BadInputError(
            f"has type {own.dtype}, so X_grad of {x_grad.dtype} cannot replace it in place",
            file=layer.y_grad.shard.path,
            tensor=own.name,
            code="dtype",
        )


def _files(
    kept: dict[Shard, list[Tensor]],
    homes: Sequence[Sequence[tuple[Shard, Tensor]]],
    instead: dict[tuple[Shard, str], Tensor],
) -> Files:
    outputs: dict[Shard, list[Tensor]] = {}
    for of_layer in homes:
        for shard, output in of_layer:
            outputs.setdefault(shard, []).append(output)
    changed = {shard: outputs.get(shard, []) for shard in (*outputs, *kept) if shard in outputs or _lost(shard, kept)}
    shards = {shard: _new_shard(shard, kept.get(shard, []), new, instead) for shard, new in changed.items()}
    named = {(shard, one.name): one for shard, new in shards.items() for one in new.layout.shard.tensors}
    places = [
        [Place(shard, Selected(shards[shard].layout.shard, named[shard, one.name])) for shard, one in h] for h in homes
    ]
    return Files(shards, places, [(None, None) for _ in homes])


def _lost(shard: Shard, kept: dict[Shard, list[Tensor]]) -> bool:
    return shard in kept and len(kept[shard]) != len(shard.tensors)


def _new_shard(
    shard: Shard, kept: Sequence[Tensor], outputs: Sequence[Tensor], instead: dict[tuple[Shard, str], Tensor]
) -> NewShard:
    order: list[Tensor] = []
    placed: set[str] = set()
    for tensor in kept:
        new = instead.get((shard, tensor.name))
        if new is None:
            order.append(tensor)
        elif (new.dtype, new.shape) == (tensor.dtype, tensor.shape):
            order.append(new)
            placed.add(new.name)
    added = [output for output in outputs if output.name not in placed]
    # As the format's writers have it: larger elements first, so that every tensor is aligned.
    for bits in sorted({BITS[output.dtype] for output in added}, reverse=True):
        after = max((at + 1 for at, tensor in enumerate(order) if BITS[tensor.dtype] >= bits), default=0)
        order[after:after] = [output for output in added if BITS[output.dtype] == bits]
    if [one[:3] for one in order] == [one[:3] for one in shard.tensors]:
        written = {output.name for output in outputs}
        copies = [(0, shard.data_start, 0)]
        copies += [(one.begin, one.end, one.begin) for one in shard.tensors if one.name not in written]
        return NewShard(Layout(b"", shard), copies)
    layout = lay_out(shard.path, order, shard.metadata)
    copies = [
        (old.begin, old.end, new.begin)
        for old, new in zip(order, layout.shard.tensors, strict=True)
        if old.begin  # Nothing has its place at the very beginning of a file but what is yet to be written.
    ]
    return NewShard(layout, copies)


def _joined(copies: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    joined: list[tuple[int, int, int]] = []
    for begin, end, to in copies:
        if joined and joined[-1][1] == begin and joined[-1][2] + begin - joined[-1][0] == to:
            joined[-1] = (joined[-1][0], end, joined[-1][2])
        elif end > begin:
            joined.append((begin, end, to))
    return joined
