"""The limits on how far two gradient sets may differ, and what exceeds them."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, Any

from gradtool.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.ops.diff.comparison import Comparison, Metrics
    from gradtool.options import DiffOptions
    from gradtool.store.format.gradset import Selected

# Tensors that are named where the limit is one for all of them together.
_MAX_NAMED = 3


def any_set(options: DiffOptions) -> bool:
    """Tell whether there is a limit at all."""
    limits = (options.rtol, options.atol, options.max_ulp, options.max_rel_l2, options.min_cosine)
    return options.bits or any(limit is not None for limit in limits)


def exceeded(
    options: DiffOptions, a: Sequence[Selected], b: Sequence[Selected], comparison: Comparison, metrics: Metrics
) -> list[Problem]:
    """List what exceeds the limits: all tensors as one vector, then tensor by tensor, the worst first."""
    problems = []
    for name, limit, sign in (("rel_l2", options.max_rel_l2, -1), ("cosine", options.min_cosine, 1)):
        value = getattr(metrics, name)
        if limit is not None and not sign * value >= sign * limit:
            message = f"{name} {value!r} is {'below' if sign > 0 else 'above'} the limit {limit!r}"
            if len(a) > 1:
                values = [
                    (getattr(comparison.metrics(number), name), tensor.name) for number, (_, tensor) in enumerate(a)
                ]
                values.sort(key=lambda entry: sign * entry[0])
                worst = ", ".join(f"{tensor_name!r} ({metric:.3g})" for metric, tensor_name in values[:_MAX_NAMED])
                message += f"; worst: {worst}"
            problems.append(Problem("different", message))
    problems += nonfinite_problems(a, comparison)
    if options.must_be_close:
        message = f"{{:,}} of {{:,}} values differ by more than {options.atol or 0.0!r} + {options.rtol or 0.0!r}·|b|; "
        message += "max_abs_diff {!r} at index {}"
        counts = comparison.not_close
        elements = [tensor.elements for _, tensor in a]
        maxima = comparison.max_abs_diff, comparison.max_abs_diff_index
        problems += _by_tensor(a, counts, message, counts, elements, *maxima)
    if (limit := options.max_ulp) is not None:
        ulps = [ulps if ulps > limit else 0 for ulps in comparison.max_ulp]
        message = f"max_ulp {{:,}} at index {{}} is above the limit {limit:,}"
        problems += _by_tensor(a, ulps, message, ulps, comparison.max_ulp_index)
    if options.bits:
        counts = comparison.differing_bits
        messages = [
            f"{count:,} of {x.elements:,} values have other bits"
            if x.dtype == y.dtype
            else f"type {x.dtype} is not {y.dtype}, so the bytes differ"
            for count, (_, x), (_, y) in zip(counts, a, b, strict=True)
        ]
        problems += _by_tensor(a, counts, "{}", messages)
    return problems


def nonfinite_problems(a: Sequence[Selected], comparison: Comparison) -> list[Problem]:
    """Return a problem for each tensor with NaN or Inf that the other side does not have."""
    counts = comparison.nonfinite_a, comparison.nonfinite_b
    message = "{:,} NaN or Inf in A and {:,} in B that the other does not have"
    return list(_by_tensor(a, list(map(add, *counts)), message, *counts, code="nonfinite"))


def _by_tensor(
    tensors: Sequence[Selected], extents: Sequence[int], message: str, *columns: Sequence[Any], code: str = "different"
) -> Iterator[Problem]:
    """Yield a problem for each tensor with an extent above 0, the largest first; its message has values of columns."""
    numbers = [number for number, extent in enumerate(extents) if extent]
    for number in sorted(numbers, key=lambda number: -extents[number]):
        shard, tensor = tensors[number]
        yield Problem(code, message.format(*(column[number] for column in columns)), shard.name, tensor.name)
