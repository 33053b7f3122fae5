"""What becomes of the total weight in a buffer's metadata when gradients are added to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, Problem
from gradtool.ops.accumulate.policy import added_up
from gradtool.ops.totals import (
    NewMetadata,
    Total,
    changed,
    has,
    has_values,
    is_whole,
    stored_key,
    total_of,
    without,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.accumulate.buffer import OpenBuffer
    from gradtool.ops.accumulate.match import Contribution
    from gradtool.ops.accumulate.policy import Policy
    from gradtool.ops.measurement import Measurement
    from gradtool.store.format.gradset import GradientSet

_UNCHANGED = NewMetadata({})


class NewTotal(NamedTuple):
    """The metadata of a buffer that is there; `needs_zeros` if they are true only of a buffer that was all zeros."""

    metadata: NewMetadata = _UNCHANGED
    needs_zeros: bool = False


def new_total(buffer: OpenBuffer, policy: Policy, taken: Sequence[Contribution]) -> NewTotal:
    """The total of a buffer once those contributions are added to it; or none, with a warning, where none is true."""
    if policy.weight_key is not None and not has_one_total(buffer, policy, taken):
        return NewTotal(_uneven(buffer, policy.weight_key))
    if buffer.there is None:
        return NewTotal()
    if policy.weight_key is None:
        return NewTotal(_without_weights(buffer.there, policy))
    weights, whole = [one.weight for one in taken], is_whole(buffer.there, buffer.targets)
    if policy.keeps:
        return _added(buffer.there, policy, policy.weight_key, weights, whole=whole)
    return NewTotal(_overwritten(buffer.there, policy, policy.weight_key, weights, whole=whole))


def has_one_total(buffer: OpenBuffer, policy: Policy, taken: Sequence[Contribution]) -> bool:
    """Whether every tensor gets something of every gradient, so that the sum of all weights is true of each."""
    numbers = [number for number, one in enumerate(buffer.targets) if has_values(one.tensor)]
    return policy.missing != "skip" or all(number in one.tensors for one in taken for number in numbers)


def _uneven(buffer: OpenBuffer, key: str) -> NewMetadata:
    why, remedy = "some gradients lack tensors", "To have one, use --missing zero"
    metadata = _UNCHANGED if buffer.there is None else without(buffer.there, key, why, remedy)
    path = None if buffer.there is None else str(buffer.there.path)
    warning = Problem("weight-dropped", f"{why}, so no weight under {key!r} is true of all. {remedy}", path)
    return NewMetadata(metadata.entries, metadata.warnings or [warning])


def _without_weights(buffer: GradientSet, policy: Policy) -> NewMetadata:
    key = stored_key(buffer)
    if key is None:
        return _UNCHANGED
    what, remedy = "it was overwritten", f"To keep it true, use --weight-key {key}"
    if policy.keeps:
        old, what = _old_total(buffer, key), "gradients were added"
        remedy = _merge(key) if old is not None and old.weight and not old.is_sum else remedy
    if policy.trim is not None:
        return without(buffer, None, what, "Medians and trimmed means have no total weight")
    return without(buffer, None, f"{what} without --weight-key", remedy)


def _overwritten(
    buffer: GradientSet, policy: Policy, key: str, weights: Sequence[float], *, whole: bool
) -> NewMetadata:
    if not whole:
        return without(buffer, key, "only some of its tensors were overwritten", "To keep it true, overwrite all")
    entries = Total(added_up(weights), is_sum=not policy.mean).entries(key)
    why = f"it was overwritten by gradients weighted by {key!r}"
    return without(buffer, key, why, "Only one total is kept", instead=entries)


def _added(buffer: GradientSet, policy: Policy, key: str, weights: Sequence[float], *, whole: bool) -> NewTotal:
    own, old = stored_key(buffer), _old_total(buffer, key)
    if own is None and not has(buffer, key):
        return NewTotal()
    adds_to_sum = old is not None and old.is_sum and not policy.mean
    if own not in {None, key}:
        why, remedy = f"gradients were added with weights from {key!r}", f"To keep it true, use --weight-key {own}"
    elif not whole:
        why, remedy = "gradients were added to some of its tensors only", "To keep it true, add to all"
    elif old is None:
        why, remedy = "gradients were added, and its own weight cannot be read", "To start again, use --overwrite"
    elif adds_to_sum or old.weight == 0:
        total = Total(added_up([old.weight, *weights]), is_sum=not policy.mean)
        return NewTotal(changed(buffer, total.entries(key)), needs_zeros=not adds_to_sum)
    elif old.is_sum:
        why, remedy = "a mean was added to a sum", "To keep it true, leave out --mean"
    else:
        why, remedy = "gradients were added to a mean", _merge(key)
    return NewTotal(without(buffer, key, why, remedy))


def _old_total(buffer: GradientSet, key: str) -> Total | None:
    """The total that a buffer has under a key, if it has one that can be read."""
    try:
        return total_of(buffer, key)
    except BadInputError:
        return None


def _merge(key: str) -> str:
    return f"To merge them, use gradtool accumulate OLD GRAD... with --output NEW, --mean and --weight-key {key}"


def refuse_nonzero(buffer: OpenBuffer, key: str | None, before: Measurement) -> None:
    """Raise `BadInputError` for a buffer whose total is 0, as that of a zeroed one, and which holds something."""
    if buffer.there is not None and sum(before.zeros) < sum(one.tensor.elements for one in buffer.targets):
        remedy = "Use --overwrite, or gradtool zero first"
        message = f"{key!r} = 0 in its metadata, but it is not all zeros; nothing written. {remedy}"
        raise BadInputError(message, file=buffer.there.path, code="weight")
