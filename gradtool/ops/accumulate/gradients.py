"""The contributions of gradients: their tensors by name, their weights, and measurements of each by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from gradtool.backends.values import AddMode, NormSpec
from gradtool.errors import BadInputError, NonFiniteError, Problem, UsageError, number_of, option, say
from gradtool.ops.accumulate.buffer import Add, CompareGradients
from gradtool.ops.aligned_read import Operand, is_broadcastable
from gradtool.ops.passes import SMALLEST_NORMAL, Measure, clip_coef
from gradtool.ops.results import nonfinite_problems
from gradtool.ops.weights import Weight, read_weight
from gradtool.store.format.gradset import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradtool.ops.call import Call
    from gradtool.ops.passes import Measurement
    from gradtool.options import AccumulateOptions
    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.transaction.inputs import OpenSets

SKIP_HINT = say(
    "use {} to leave out such gradients, or {} to drop such a buffer",
    option("nonfinite", "skip"),
    option("overwrite", True),
)


@dataclass(frozen=True, kw_only=True)
class GradientRow:
    """One gradient set: its weight, whether it was added, and its statistics if it was measured by itself.

    `norm` is that of what it adds, as it is broadcast, without its weight and `coef`. `cosine` and `distance` are
    between that and the sum, mean or median of all, before that is clipped; a tensor that it lacks counts as zeros.
    `missing` and `extra` count the tensors that it lacks, and those that the buffer lacks. `screened` is the rule that
    left it out; what was not known by then is None.
    """

    weight: float | None = None
    taken: bool = True
    norm: float | None = None
    coef: float | None = None
    nan: int | None = None
    inf: int | None = None
    cosine: float | None = None
    distance: float | None = None
    missing: int | None = None
    extra: int | None = None
    screened: str | None = None
    file: str


class Contribution(NamedTuple):
    """The tensors of a gradient, by the number of the target of each, its weight, and its row in the result.

    The tensors of a sum are multiplied by its weight already.
    """

    tensors: Mapping[int, Selected]
    weight: Weight
    row: GradientRow

    @property
    def factor(self) -> float:
        """The factor of its values, before they are clipped."""
        return 1.0 if self.weight.is_sum else self.weight.value

    @property
    def unscale(self) -> float:
        """The number that its values are divided by to get the gradient; a sum of weight 0 stays as it is."""
        return self.weight.value or 1.0 if self.weight.is_sum else 1.0

    @property
    def scale(self) -> float:
        """The factor of its values."""
        return self.factor if self.row.coef is None else self.factor * self.row.coef

    def with_row(self, **fields: Any) -> Contribution:
        """Return the same contribution with other fields in its row."""
        return self._replace(row=replace(self.row, **fields))


def _weights(options: AccumulateOptions, gradients: Sequence[GradientSet]) -> list[Weight]:
    """Return the weight of each gradient: as given, or as its files have it under a key, or else 1.

    Raises:
        UsageError: the number of weights is not that of gradients.
        BadInputError: a file has no such key, or no finite number under it, or shards of one set differ.
    """
    if options.weight_key is not None:
        return [read_weight(gradient, options.weight_key) for gradient in gradients]
    check_weight_count(options, len(gradients))
    return [Weight(weight) for weight in options.weight or [1.0] * len(gradients)]


def check_weight_count(options: AccumulateOptions, count: int) -> None:
    """Raise `UsageError` if weights are given, but not one for each gradient."""
    if options.weight and len(options.weight) != count:
        given, needed = number_of(len(options.weight), "weight"), number_of(count, "gradient")
        raise UsageError(say("{} gives {} for {}", option("weight"), given, needed), hint="give one for each, in order")


def match(
    options: AccumulateOptions,
    targets: Sequence[Selected],
    opened: OpenSets,
    gradients: Sequence[GradientSet],
) -> tuple[list[Contribution], list[Problem]]:
    """Return the contribution of each gradient to the targets, and a warning for each that has other tensors.

    The targets are the tensors of the buffer; or of a new set, which has those of all gradients.

    Raises:
        UsageError: the number of weights is not that of gradients.
        BadInputError: a gradient lacks a tensor of the buffer or has one that the buffer lacks, unless the options
            allow that; or its shape does not broadcast to the buffer's. Every such tensor is named. The first gradient
            stands for the buffer where there is none. Or a weight is missing or invalid.
    """
    numbers = {target.tensor.name: number for number, target in enumerate(targets)}
    expected = {entry.tensor.name: None for entry in (opened.selected_in(gradients[0]) if options.is_new else targets)}
    whole = "the first gradient" if options.is_new else "the buffer"
    problems: list[Problem] = []
    warnings: list[Problem] = []
    contributions: list[Contribution] = []
    for gradient, weight in zip(gradients, _weights(options, gradients), strict=True):
        selected = opened.selected_in(gradient)
        by_name = {entry.tensor.name: entry for entry in selected}
        missing = [name for name in expected if name not in by_name]
        extra = [entry for entry in selected if entry.tensor.name not in expected]
        if (missing or extra) and (options.missing == "error" or (expected and len(missing) == len(expected))):
            problems += _unmatched_problems(options, gradient, missing, extra, whole)
        if options.is_new and options.missing != "error":
            missing, extra = [name for name in numbers if name not in by_name], []
        if missing or extra:
            warnings.append(_unmatched_warning(options, gradient, missing, extra))
        matched = {numbers[name]: entry for name, entry in by_name.items() if name in numbers}
        for number, (shard, tensor) in matched.items():
            if not is_broadcastable(tensor.shape, targets[number].tensor.shape):
                target = list(targets[number].tensor.shape)
                message = f"shape {list(tensor.shape)} does not broadcast to {target}, its shape in {whole}"
                problems.append(Problem("shape", message, shard.name, tensor.name))
        row = GradientRow(weight=weight.value, missing=len(missing), extra=len(extra), file=gradient.name)
        contributions.append(Contribution(matched, weight, row))
    if problems:
        hint = None
        if warnings and options.missing == "error":
            hint = "rename tensors"
            # A gradient that shares no name cannot be added in part either.
            if all((contribution.row.missing or 0) < len(expected) for contribution in contributions):
                hint = "rename tensors, or use {} to leave out a gradient where it lacks a tensor, or {} to count zeros"
                hint = say(hint, option("missing", "skip"), option("missing", "zero"))
        raise BadInputError.from_problems(problems, hint)
    return contributions, warnings


def _unmatched_problems(
    options: AccumulateOptions, gradient: GradientSet, missing: Sequence[str], extra: Sequence[Selected], whole: str
) -> list[Problem]:
    """Return a problem for each tensor on one side only; if options allow these, for a gradient that shares none."""
    from gradtool.store.format.hints import prefix_problem  # only needed for the error

    prefix = prefix_problem([tensor.name for _, tensor in extra], missing, gradient.name, whole)
    if prefix is not None:
        return [prefix]
    if options.missing != "error":
        message = say("has no tensor of the buffer; {} needs at least one", option("missing", options.missing))
        return [] if options.is_new else [Problem("missing-tensor", message, gradient.name)]
    return [
        *(Problem("missing-tensor", f"is only in {whole}", gradient.name, name) for name in missing),
        *(Problem("extra-tensor", f"is not in {whole}", shard.name, tensor.name) for shard, tensor in extra),
    ]


def _unmatched_warning(
    options: AccumulateOptions, gradient: GradientSet, missing: Sequence[str], extra: Sequence[Selected]
) -> Problem:
    parts = []
    if missing:
        consequence = ", counted as zeros" if options.missing == "zero" else " and is left out for them"
        parts.append(f"lacks {number_of(len(missing), 'tensor')} ({quoted(missing)}){consequence}")
    if extra:
        names = quoted([tensor.name for _, tensor in extra])
        parts.append(f"has {number_of(len(extra), 'tensor')} that the buffer lacks ({names}), not added")
    return Problem("unmatched", "; ".join(parts), gradient.name)


def measure_each(
    call: Call, options: AccumulateOptions, targets: Sequence[Selected], contributions: Sequence[Contribution]
) -> Iterator[tuple[Contribution, list[Problem]]]:
    """Measure each gradient by itself; yield it with its norm, and a problem for each tensor that has NaN or Inf."""
    for contribution in contributions:
        selected = list(contribution.tensors.values())
        sums = call.run(Measure(selected, NormSpec(options.norm_type)))
        unscale = abs(contribution.unscale) * options.unscale
        norm = _broadcast(call, targets, contribution, sums).norms(unscale=unscale).whole
        row = {"norm": norm, "nan": sum(sums.nan), "inf": sum(sums.inf)}
        yield contribution.with_row(**row), nonfinite_problems(selected, sums)


def limited(options: AccumulateOptions, contribution: Contribution) -> Contribution:
    """Return a gradient that was measured, with the coefficient that limits its norm if `clip_each` does."""
    norm, is_finite = contribution.row.norm, not (contribution.row.nan or contribution.row.inf)
    if options.clip_each is None or norm is None:
        return contribution
    return contribution.with_row(coef=coef_for(options, "clip_each", norm, is_finite, contribution))


def apply_nonfinite(
    call: Call, options: AccumulateOptions, targets: Sequence[Selected], contributions: Sequence[Contribution]
) -> tuple[Sequence[Contribution], list[Problem]]:
    """Measure each gradient by itself where an option asks for that: limit its norm, or skip it with a warning.

    Raises:
        NonFiniteError: a gradient holds NaN or Inf and may not be skipped, or every one does.
        BadInputError: a norm overflows float64, or a coefficient underflows.
    """
    if options.clip_each is None and options.nonfinite != "skip" and not options.per_gradient:
        return contributions, []
    measured, warnings, problems = [], [], []
    for contribution, nonfinite in measure_each(call, options, targets, contributions):
        taken = not nonfinite or options.nonfinite != "skip"
        measured.append(limited(options, contribution).with_row(taken=taken))
        problems += nonfinite
        if not taken:
            message = f"whole gradient skipped: {nonfinite[0].message}"
            warnings.append(replace(nonfinite[0], code="skipped", message=message, file=contribution.row.file))
    if problems and options.nonfinite == "error":
        raise NonFiniteError("input contains NaN or Inf; nothing written", problems, SKIP_HINT)
    if len(warnings) == len(contributions):
        raise NonFiniteError("every gradient contains NaN or Inf; nothing written", problems)
    return measured, warnings


def _broadcast(call: Call, targets: Sequence[Selected], contribution: Contribution, sums: Measurement) -> Measurement:
    """Measure what a gradient adds, without its weight: if nothing is broadcast, these are the sums of its files."""
    numbers = sorted(contribution.tensors)
    gradient, targets = Operand(contribution.tensors).restricted_to(numbers), [targets[number] for number in numbers]
    if all(gradient.tensors[n].tensor.elements == target.tensor.elements for n, target in enumerate(targets)):
        return sums
    added = Add(targets, sums.spec, [gradient], AddMode(buffer_weight=0, rounds=False), is_new=True)
    measurement: Measurement = call.run(added).each[0]
    return measurement


def coef_for(
    options: AccumulateOptions, name: str, norm: float, is_finite: bool, gradient: Contribution | None = None
) -> float:
    """Return the coefficient that clips a norm to the limit of an option, 1 where it is within; NaN goes through."""
    limit, file, factor = getattr(options, name), None, 1.0
    if gradient is not None:
        file, factor = gradient.row.file, gradient.factor
    if limit < math.inf and is_finite and math.isinf(norm):
        raise BadInputError("the norm overflows float64 and cannot be clipped; nothing written", file=file)
    coef = clip_coef(limit, norm, options.eps)
    if coef >= 1:
        return 1.0
    # A weight of 0 is no reason to refuse a coefficient.
    product = coef if coef < SMALLEST_NORMAL or not factor else abs(factor * coef)
    if coef > 0 and product < SMALLEST_NORMAL:
        bounds = f"float64 (from {SMALLEST_NORMAL:.3g})"
        message = f"the coefficient {product!r} is out of range for {bounds}; nothing written"
        raise BadInputError(message, file=file, hint=say("use a larger {}", option(name)))
    return coef


def compare(
    call: Call, options: AccumulateOptions, adding: Add, contributions: Sequence[Contribution]
) -> list[Contribution]:
    """Fill in the cosine and the distance of the gradients that are added."""
    unscales = [contribution.unscale * options.unscale for contribution in contributions if contribution.row.taken]
    comparisons = iter(call.run(CompareGradients(**vars(adding), unscales=unscales)).each)
    compared = []
    for contribution in contributions:
        fields: dict[str, float] = {}
        if contribution.row.taken:
            comparison = next(comparisons)
            fields = {"cosine": math.nan, "distance": math.nan}
            if not any(map(any, (comparison.nonfinite_a, comparison.nonfinite_b, comparison.nonfinite_both))):
                fields = {"cosine": comparison.metrics().cosine, "distance": comparison.distance()}
        compared.append(contribution.with_row(**fields))
    return compared
