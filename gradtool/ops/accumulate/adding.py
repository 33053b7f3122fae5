"""The pass that adds gradients as the options of a call say, and what it requires: enough gradients, and weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtool.backends.values import AddMode, NormSpec, Trim
from gradtool.errors import BadInputError, UsageError, option, say
from gradtool.ops.accumulate.buffer import Add
from gradtool.ops.aligned_read import Operand
from gradtool.ops.weights import divisor_of, sum_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.accumulate.gradients import Contribution
    from gradtool.options import AccumulateOptions
    from gradtool.store.format.gradset import Selected


def check_count(options: AccumulateOptions, count: int) -> None:
    """Raise `UsageError` if there is no gradient, or no value is left when the largest and smallest are dropped."""
    if not count:
        raise UsageError(
            "no gradient given", hint=say("name a file, a folder or an index, or use {}", option("files_from"))
        )
    if count < min_count(options):
        needed = f"{min_count(options)} gradients, but {count} {'was' if count == 1 else 'were'} given"
        raise UsageError(say("{} needs at least {}", option("reduce", options.reduce), needed))


def trim_of(options: AccumulateOptions) -> Trim | None:
    """Return how values are trimmed before their mean is taken; None for sums and for plain means."""
    if options.reduce in (None, "sum", "mean"):
        return None
    dropped = None if options.reduce == "median" else int(options.reduce.removeprefix("trimmed="))
    return Trim(dropped, finite=options.nonfinite != "propagate")


def min_count(options: AccumulateOptions) -> int:
    """Return how many values a trimmed mean needs; 0 for other reductions."""
    trim = trim_of(options)
    return 0 if trim is None or trim.dropped is None else 2 * trim.dropped + 1


def adding_pass(
    options: AccumulateOptions, targets: Sequence[Selected], accepted: Sequence[Contribution], weight_sum: float
) -> tuple[list[int], Add]:
    """Return the numbers of the targets that something is added to, and the pass over these; check their divisors."""
    numbers = sorted({number for contribution in accepted for number in contribution.tensors})
    if options.missing == "zero" and options.buffer_weight != 1:
        # Zeros that are added to old content change nothing, unless that is multiplied or discarded.
        numbers = list(range(len(targets)))
    targets = [targets[number] for number in numbers]
    divisors: list[float] = []
    if options.is_mean and options.missing == "skip" and any(len(grad.tensors) < len(targets) for grad in accepted):
        divisors = [sum_of([grad.weight.value for grad in accepted if number in grad.tensors]) for number in numbers]
    if 0 in divisors:
        target = targets[divisors.index(0)]
        message = "the weights of the gradients that have it add up to 0, so the mean is undefined"
        raise BadInputError(message, file=target.shard.name, tensor=target.tensor.name, code="weight")
    divisor = None
    if options.is_mean or options.unscale != 1:
        divisor = divisor_of(weight_sum if options.is_mean else 1.0, options.unscale)
    places = {number: place for place, number in enumerate(numbers)}
    return numbers, Add(
        targets,
        NormSpec(options.norm_type),
        # In the order of their files, in which they may have to be measured.
        [Operand({places[number]: tensor for number, tensor in grad.tensors.items()}, grad.scale) for grad in accepted],
        AddMode(options.buffer_weight, divisor),
        trim_of(options),
        [divisor_of(weights, options.unscale) for weights in divisors],
        fills=options.missing == "zero",
        is_new=options.is_new,
        measures_before=options.adds_to_old,
    )


def sum_of_weights(options: AccumulateOptions, contributions: Sequence[Contribution]) -> float:
    """Add up weights; raise `BadInputError` if a mean cannot be divided by their sum."""
    weight_sum = sum_of([contribution.weight.value for contribution in contributions])
    if options.is_mean and weight_sum == 0:
        raise BadInputError("the weights add up to 0, so the mean is undefined", code="weight")
    return weight_sum


def check_counts(options: AccumulateOptions, targets: Sequence[Selected], accepted: Sequence[Contribution]) -> None:
    """Raise `BadInputError` if too few gradients have some tensor for a trimmed mean."""
    needed = min_count(options)
    for number, target in enumerate(targets if needed else ()):
        count = sum(options.missing == "zero" or number in contribution.tensors for contribution in accepted)
        if 0 < count < needed:
            message = say("{} needs {} gradients with this tensor", option("reduce", options.reduce), needed)
            message = say("{}, but {} {} left; nothing written", message, count, "is" if count == 1 else "are")
            hint = say("use a smaller K, or {}", option("reduce", "median"))
            file, name = target.shard.name, target.tensor.name
            raise BadInputError(message, file=file, tensor=name, code="too-few", hint=hint)
