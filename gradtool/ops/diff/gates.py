"""How far apart two gradient sets may be: the limits of a call, and what is beyond them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.backends.protocol import Tolerance
from gradtool.errors import Problem
from gradtool.ops.diff.comparison import MAX_ABS, ULPS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gradtool.ops.diff.comparison import Comparison, Counts
    from gradtool.ops.diff.figures import Figures
    from gradtool.ops.diff.pair import Pairs
    from gradtool.options import DiffOptions

# Tensors that are named where the limit is one for all of them together.
_MOST_NAMES = 3


class Gates(NamedTuple):
    """The limits; None where there is none."""

    rtol: float | None
    atol: float | None
    max_ulp: int | None
    max_rel_l2: float | None
    min_cosine: float | None
    bits: bool

    @classmethod
    def of(cls, options: DiffOptions) -> Self:
        """The limits of complete options."""
        return cls(
            rtol=options.rtol,
            atol=options.atol,
            max_ulp=options.max_ulp,
            max_rel_l2=options.max_rel_l2,
            min_cosine=options.min_cosine,
            bits=options.bits,
        )

    @property
    def is_close(self) -> bool:
        """Whether values must be close."""
        return self.rtol is not None or self.atol is not None

    @property
    def tolerance(self) -> Tolerance:
        """What counts as close."""
        return Tolerance(self.atol or 0.0, self.rtol or 0.0)

    @property
    def is_any(self) -> bool:
        """Whether there is a limit at all."""
        limits = (self.rtol, self.atol, self.max_ulp, self.max_rel_l2, self.min_cosine)
        return self.bits or any(limit is not None for limit in limits)

    def problems(self, pairs: Pairs, found: Comparison, whole: Figures) -> list[Problem]:
        """What is beyond the limits: first of all tensors as one vector, then tensor by tensor, the worst first."""
        problems = []
        if self.max_rel_l2 is not None and not whole.rel_l2 <= self.max_rel_l2:
            message = f"rel_l2 {whole.rel_l2!r} is above the limit {self.max_rel_l2!r}"
            problems.append(_of_all(message, pairs, found, "rel_l2", lambda one: -one.rel_l2))
        if self.min_cosine is not None and not whole.cosine >= self.min_cosine:
            message = f"cosine {whole.cosine!r} is below the limit {self.min_cosine!r}"
            problems.append(_of_all(message, pairs, found, "cosine", lambda one: one.cosine))
        problems += nonfinite_problems(pairs, found)
        if self.is_close:
            problems += _by_tensor(pairs, found, self._not_close)
        if self.max_ulp is not None:
            problems += _by_tensor(pairs, found, self._too_many_ulps)
        if self.bits:
            problems += _by_tensor(pairs, found, self._other_bits)
        return problems

    def _not_close(self, pairs: Pairs, found: Comparison, number: int, counts: Counts) -> tuple[int, str]:
        elements, most = pairs.a[number].tensor.elements, f"{self.atol or 0.0!r} + {self.rtol or 0.0!r}·|b|"
        gap, at = found.maximum(MAX_ABS, number)
        message = f"{counts.not_close:,} of {elements:,} values differ by more than {most}"
        return counts.not_close, f"{message}; max_abs_diff {gap!r} at index {at}"

    def _too_many_ulps(self, pairs: Pairs, found: Comparison, number: int, counts: Counts) -> tuple[int, str]:  # noqa: ARG002
        ulps, at = found.maximum(ULPS, number)
        message = f"max_ulp {ulps:,} at index {at} is above the limit {self.max_ulp:,}"
        return ulps if ulps > (self.max_ulp or 0) else 0, message

    def _other_bits(self, pairs: Pairs, found: Comparison, number: int, counts: Counts) -> tuple[int, str]:  # noqa: ARG002
        ours, theirs = pairs.a[number].tensor, pairs.b[number].tensor
        if ours.dtype != theirs.dtype:
            return counts.differing_bits, f"type {ours.dtype} is not {theirs.dtype}, so the bytes differ"
        return counts.differing_bits, f"{counts.differing_bits:,} of {ours.elements:,} values have other bits"


def nonfinite_problems(pairs: Pairs, found: Comparison) -> list[Problem]:
    """One problem for each tensor with NaN or Inf that the other side does not have."""
    return list(_by_tensor(pairs, found, _nonfinite, code="nonfinite"))


def _nonfinite(pairs: Pairs, found: Comparison, number: int, counts: Counts) -> tuple[int, str]:  # noqa: ARG001
    message = f"{counts.nonfinite_a:,} NaN or Inf in A and {counts.nonfinite_b:,} in B that the other does not have"
    return counts.nonfinite_a + counts.nonfinite_b, message


def _by_tensor(
    pairs: Pairs,
    found: Comparison,
    judge: Callable[[Pairs, Comparison, int, Counts], tuple[int, str]],
    code: str = "different",
) -> Iterator[Problem]:
    """A problem for each tensor for which `judge` has more than 0, the most first."""
    judged = [(*judge(pairs, found, number, found.counts_of(number)), one) for number, one in enumerate(pairs.a)]
    for extent, message, one in sorted(judged, key=lambda entry: -entry[0]):
        if extent:
            yield Problem(code, message, str(one.shard.path), one.tensor.name)


def _of_all(message: str, pairs: Pairs, found: Comparison, field: str, badness: Callable[[Figures], float]) -> Problem:
    """The problem of all tensors together, which names the worst of them."""
    figures = sorted(
        ((one.tensor.name, found.figures_of(number)) for number, one in enumerate(pairs.a)),
        key=lambda entry: badness(entry[1]),
    )
    worst = ", ".join(f"{name!r} ({getattr(one, field):.3g})" for name, one in figures[:_MOST_NAMES])
    return Problem("different", f"{message}; worst: {worst}" if len(figures) > 1 else message)
