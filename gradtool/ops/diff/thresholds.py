"""The limits on how far two gradient sets may differ, and what exceeds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradtool.backends.protocol import Tolerance
from gradtool.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradtool.ops.diff.comparison import Comparison, Metrics
    from gradtool.ops.diff.pairs import Pairs
    from gradtool.options import DiffOptions

# Tensors that are named where the limit is one for all of them together.
_MAX_NAMED = 3


def any_set(options: DiffOptions) -> bool:
    """Tell whether there is a limit at all."""
    limits = (options.max_ulp, options.max_rel_l2, options.min_cosine)
    return options.bits or must_be_close(options) or any(limit is not None for limit in limits)


def must_be_close(options: DiffOptions) -> bool:
    """Tell whether values must be close."""
    return options.rtol is not None or options.atol is not None


def tolerance_of(options: DiffOptions) -> Tolerance:
    """Return what counts as close."""
    return Tolerance(options.atol or 0.0, options.rtol or 0.0)


def exceeded(options: DiffOptions, pairs: Pairs, comparison: Comparison, metrics: Metrics) -> list[Problem]:
    """List what exceeds the limits: all tensors as one vector, then tensor by tensor, the worst first."""
    problems = []
    if options.max_rel_l2 is not None and not metrics.rel_l2 <= options.max_rel_l2:
        message = f"rel_l2 {metrics.rel_l2!r} is above the limit {options.max_rel_l2!r}"
        problems.append(_of_all(message, pairs, comparison, "rel_l2", sign=-1))
    if options.min_cosine is not None and not metrics.cosine >= options.min_cosine:
        message = f"cosine {metrics.cosine!r} is below the limit {options.min_cosine!r}"
        problems.append(_of_all(message, pairs, comparison, "cosine", sign=1))
    problems += nonfinite_problems(pairs, comparison)
    if must_be_close(options):
        absolute, relative = tolerance_of(options)
        problems += _by_tensor(
            pairs,
            comparison.not_close,
            lambda number: (
                f"{comparison.not_close[number]:,} of {pairs.a[number].tensor.elements:,} values differ by more than "
                f"{absolute!r} + {relative!r}·|b|; max_abs_diff {comparison.max_abs_diff[number]!r} at index "
                f"{comparison.max_abs_diff_index[number]}"
            ),
        )
    if (limit := options.max_ulp) is not None:
        problems += _by_tensor(
            pairs,
            [ulps if ulps > limit else 0 for ulps in comparison.max_ulp],
            lambda number: (
                f"max_ulp {comparison.max_ulp[number]:,} at index {comparison.max_ulp_index[number]} "
                f"is above the limit {limit:,}"
            ),
        )
    if options.bits:
        problems += _by_tensor(pairs, comparison.differing_bits, lambda number: _bits(pairs, comparison, number))
    return problems


def nonfinite_problems(pairs: Pairs, comparison: Comparison) -> list[Problem]:
    """Return a problem for each tensor with NaN or Inf that the other side does not have."""
    a, b = comparison.nonfinite_a, comparison.nonfinite_b
    counts = [x + y for x, y in zip(a, b, strict=True)]
    return list(
        _by_tensor(
            pairs,
            counts,
            lambda number: f"{a[number]:,} NaN or Inf in A and {b[number]:,} in B that the other does not have",
            code="nonfinite",
        )
    )


def _bits(pairs: Pairs, comparison: Comparison, number: int) -> str:
    a, b = pairs.a[number].tensor, pairs.b[number].tensor
    if a.dtype != b.dtype:
        return f"type {a.dtype} is not {b.dtype}, so the bytes differ"
    return f"{comparison.differing_bits[number]:,} of {a.elements:,} values have other bits"


def _by_tensor(
    pairs: Pairs, extents: Sequence[int], describe: Callable[[int], str], code: str = "different"
) -> Iterator[Problem]:
    """Yield a problem for each tensor with an extent above 0, the largest first."""
    numbers = [number for number, extent in enumerate(extents) if extent]
    for number in sorted(numbers, key=lambda number: -extents[number]):
        shard, tensor = pairs.a[number]
        yield Problem(code, describe(number), str(shard.path), tensor.name)


def _of_all(message: str, pairs: Pairs, comparison: Comparison, metric: str, *, sign: int) -> Problem:
    """Return the problem of all tensors together, which names those with the worst metric."""
    if len(pairs.a) > 1:
        values = [(getattr(comparison.metrics(number), metric), one) for number, one in enumerate(pairs.a)]
        values.sort(key=lambda entry: sign * entry[0])
        worst = ", ".join(f"{one.tensor.name!r} ({value:.3g})" for value, one in values[:_MAX_NAMED])
        message = f"{message}; worst: {worst}"
    return Problem("different", message)
