"""Where the gradients of layers go: into the files of their layers, or into new files with nothing else."""

from __future__ import annotations

import os
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING

from gradtool.errors import BadInputError, option, say
from gradtool.store.format.gradset import Selected
from gradtool.store.format.index import mapped_in
from gradtool.store.format.tensors import BITS
from gradtool.store.io.destination import FilePlan

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gradtool.ops.layernorm.layers import Layer
    from gradtool.options import LayerNormOptions
    from gradtool.store.format.tensors import Shard, Tensor

    # By shard and name of an old tensor: the result that takes its place, or None if it goes.
    Replacements = Mapping[tuple[Shard, str], Tensor | None]


def place_results(layers: Sequence[Layer], options: LayerNormOptions) -> tuple[list[list[Selected]], FilePlan]:
    """Choose the shards that the results of each layer go to, and plan the new files.

    Elsewhere, files have nothing but the gradients: one for each file that has a layer's Y_grad. Otherwise the
    gradients are added to the files of the layers, or take the place of tensors of the same names.

    Raises:
        BadInputError: X_grad cannot replace a Y_grad, a result would replace an input or cannot be written in place, or
            an index would be outdated.
    """
    if options.is_elsewhere:
        results = [[Selected(layer.y_grad.file, output) for output in layer.outputs] for layer in layers]
        sources = dict.fromkeys(layer.y_grad.file for layer in layers)
        plan = _plan(results, {(shard, tensor.name): None for shard in sources for tensor in shard.tensors}, ())
        return results, plan
    results, replacements = _beside_inputs(layers, options)
    inputs = {selected for layer in layers for selected in (layer.x, layer.y_grad)}
    plan = _plan(results, replacements, () if options.in_place else inputs)
    _check_inputs_stay(layers)
    _check_indexes(layers, plan)
    if options.in_place:
        _check_in_place(layers, results, plan)
    return results, plan


def _beside_inputs(
    layers: Sequence[Layer], options: LayerNormOptions
) -> tuple[list[list[Selected]], dict[tuple[Shard, str], Tensor | None]]:
    """Choose the shards of results beside the inputs, and what they replace there."""
    _check_whole(layers, options)
    owners = {layer.owner.name: layer.owner for layer in layers}
    shards_of = {
        path: {tensor.name: shard for shard in owner.shards for tensor in shard.tensors}
        for path, owner in owners.items()
    }
    results: list[list[Selected]] = []
    replacements: dict[tuple[Shard, str], Tensor | None] = {}
    for layer in layers:
        y_shard, y_grad, shard_of = layer.y_grad.file, layer.y_grad.tensor, shards_of[layer.owner.name]
        results.append([Selected(shard_of.get(output.name, y_shard), output) for output in layer.outputs])
        replacements |= {(shard, output.name): output for shard, output in results[-1]}
        if options.x_grad_in_place:
            old_shard, x_grad = results[-1][0]
            if (y_grad.dtype, y_grad.shape) != (x_grad.dtype, x_grad.shape):
                message = f"has type {y_grad.dtype}, so X_grad of {x_grad.dtype} cannot replace it in place"
                hint = say("leave out {}", option("x_grad_in_place", True))
                raise BadInputError(message, file=y_shard.name, tensor=y_grad.name, code="dtype", hint=hint)
            results[-1][0] = Selected(y_shard, x_grad)
            replacements |= {(y_shard, y_grad.name): x_grad, (old_shard, x_grad.name): None}
    return results, replacements


def _check_whole(layers: Sequence[Layer], options: LayerNormOptions) -> None:
    """Raise `BadInputError` if a result would replace a tensor that lies in pieces in several files."""
    for layer in layers:
        in_pieces = {tensor.name for shard in layer.owner.split for tensor in shard.tensors}
        replaced = [*layer.outputs, *([layer.y_grad.tensor] if options.x_grad_in_place else [])]
        for tensor in replaced:
            if tensor.name in in_pieces:
                hint = say("use {} or {}", option("output"), option("output_dir"))
                message = "lies in pieces, and cannot be replaced by a result"
                raise BadInputError(message, file=layer.owner.name, tensor=tensor.name, code="pieces", hint=hint)


def _plan(results: Sequence[Sequence[Selected]], replacements: Replacements, inputs: Collection[Selected]) -> FilePlan:
    """Plan the files that get results, or lose a tensor; the pass writes the `inputs`, too, so they are read once."""
    results_of: dict[Shard, list[Tensor]] = {}
    for shard, output in chain.from_iterable(results):
        results_of.setdefault(shard, []).append(output)
    for shard, _ in replacements:
        results_of.setdefault(shard, [])
    plan, from_pass = FilePlan(), {*chain.from_iterable(results), *inputs}
    for shard, outputs in results_of.items():
        plan.add(shard, _order(shard, outputs, replacements), from_pass)
    return plan


def _order(shard: Shard, outputs: Sequence[Tensor], replacements: Replacements) -> list[Tensor]:
    """Return the tensors of a new file: those that stay, results like those that they replace, and all other results.

    As the format's writers have it, larger elements come first, so that every tensor is aligned.
    """
    order: list[Tensor] = []
    for tensor in shard.tensors:
        new = replacements.get((shard, tensor.name), tensor)
        if new is not None and (new.dtype, new.shape) == (tensor.dtype, tensor.shape):
            order.append(new)
    present = set(order)
    added = [output for output in outputs if output not in present]
    for bits in sorted({BITS[output.dtype] for output in added}, reverse=True):
        after = max((at + 1 for at, tensor in enumerate(order) if BITS[tensor.dtype] >= bits), default=0)
        order[after:after] = [output for output in added if BITS[output.dtype] == bits]
    return order


def _check_inputs_stay(layers: Sequence[Layer]) -> None:
    """Raise `BadInputError` if a result would take the name of an input; only X_grad may, that of a Y_grad like it."""
    sets = {shard: layer.owner.name for layer in layers for shard in layer.owner.shards}
    results = {(layer.owner.name, output.name): (layer, output) for layer in layers for output in layer.outputs}
    for layer in layers:
        for shard, tensor in layer.inputs:
            if (sets.get(shard, ""), tensor.name) not in results:
                continue
            result_layer, result = results[sets[shard], tensor.name]
            if result_layer is not layer:
                message = f"is an input of {layer.name!r}, and a result of {result_layer.name!r} would take its name"
            elif (result.dtype, result.shape) != (tensor.dtype, tensor.shape):
                message = f"is an input, and a result of {result.dtype} {list(result.shape)} would take its name"
            else:
                continue
            hint = say("choose another name, or use {} or {}", option("output"), option("output_dir"))
            raise BadInputError(message, file=shard.name, tensor=tensor.name, hint=hint)


def _check_indexes(layers: Sequence[Layer], plan: FilePlan) -> None:
    """Raise `BadInputError` if tensors are added to a file of an index that was not named, and would not have them."""
    # A folder of many layers is searched once.
    mapped = cache(mapped_in)
    for owner in {layer.owner.name: layer.owner for layer in layers}.values():
        shard = owner.shards[0]
        if owner.index is None and len(owner.shards) == 1 and shard in plan.files and plan.files[shard].header:
            index = mapped(os.path.dirname(shard.name)).get(shard.file_name)  # noqa: PTH120 - may be ""
            if index is not None:
                message = f"is a shard of {index.name}, which must map added tensors"
                raise BadInputError(message, file=owner.name, hint="name the index instead")


def _check_in_place(layers: Sequence[Layer], results: Sequence[Sequence[Selected]], plan: FilePlan) -> None:
    """Raise `BadInputError` for what cannot be done in place: tensors that are added, inputs that are overwritten."""
    inputs = {(shard, tensor.name) for layer in layers for shard, tensor in layer.inputs}
    for shard, tensor in chain.from_iterable(results):
        if plan.files[shard].header:
            message, hint = "is not in the file yet, and cannot be added in place", "leave out {} the first time"
        elif (shard, tensor.name) in inputs:
            message, hint = "is an input, and would be overwritten", "leave out {}"
        else:
            continue
        hint = say(hint, option("write", "inplace"))
        raise BadInputError(message, file=shard.name, tensor=tensor.name, code="header", hint=hint)
