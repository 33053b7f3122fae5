"""Tells how far apart two gradient sets are, and changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradtool.backends.protocol import NormSpec
from gradtool.declare import operation
from gradtool.ops.diff.comparison import COUNTS, INDICES, MAXIMA, Compare
from gradtool.ops.diff.pairs import Pairs, Side, UnmatchedRow, pair
from gradtool.ops.diff.thresholds import any_set, exceeded, must_be_close, nonfinite_problems, tolerance_of
from gradtool.ops.results import Result, call_summary
from gradtool.ops.session import Call
from gradtool.options import DiffOptions
from gradtool.store.format.rename import Renames

if TYPE_CHECKING:
    from gradtool.errors import Problem
    from gradtool.ops.diff.comparison import Comparison


@dataclass(frozen=True)
class TensorDiff:
    """How far one tensor of A is from that of B; the fields are those of `DiffResult`."""

    name: str
    file: str
    dtype_a: str
    dtype_b: str
    shape: tuple[int, ...]
    rel_l2: float
    cosine: float
    max_abs_diff: float
    max_abs_diff_index: int | None
    max_rel_diff: float
    max_rel_diff_index: int | None
    max_ulp: int
    max_ulp_index: int | None
    differing: int
    differing_bits: int
    not_close: int | None
    nonfinite_a: int
    nonfinite_b: int
    nonfinite_both: int
    norm_a: float
    norm_b: float


@dataclass(frozen=True, repr=False)
class DiffResult(Result):
    """How far A is from B, as one vector. `tensors` and `elements` count those that are compared, `bytes` both sides.

    All figures are over the elements that are finite on both sides. `nonfinite_a` counts NaN and Inf in A that B does
    not have in the same place, `nonfinite_b` the reverse, and `nonfinite_both` those that are the same; the first two
    count as `differing`, too. A maximum has the tensor and the index where it is, None where nothing differs.
    `not_close` is None without `rtol` and `atol`.
    """

    headline = (
        "rel_l2", "cosine",
        "max_abs_diff", "max_abs_diff_tensor", "max_abs_diff_index",
        "max_rel_diff", "max_rel_diff_tensor", "max_rel_diff_index",
        "max_ulp", "max_ulp_tensor", "max_ulp_index",
        "differing", "nonfinite_a", "nonfinite_b", "nonfinite_both", "not_close", "unmatched",
    )  # fmt: skip

    rel_l2: float
    cosine: float
    max_abs_diff: float
    max_abs_diff_tensor: str | None
    max_abs_diff_index: int | None
    max_rel_diff: float
    max_rel_diff_tensor: str | None
    max_rel_diff_index: int | None
    max_ulp: int
    max_ulp_tensor: str | None
    max_ulp_index: int | None
    differing: int
    not_close: int | None
    unmatched: int
    differing_bits: int
    nonfinite_a: int
    nonfinite_b: int
    nonfinite_both: int
    norm_a: float
    norm_b: float
    per_tensor: tuple[TensorDiff, ...]
    per_unmatched: tuple[UnmatchedRow, ...]
    problems: tuple[Problem, ...]


@operation(DiffOptions)
def diff(options: DiffOptions) -> DiffResult:
    """How far the tensors of A are from those of B, as one vector and tensor by tensor; they match by name.

    rel_l2 is ‖a-b‖/‖b‖, and the cosine Σab/(‖a‖·‖b‖). All is computed in float64, in the canonical order of
    `gradtool.reduction`, so the bits are the same for any thread count, block size and shard layout.
    `gradtool.backends.differences` defines every figure.

    Returns:
        The result. What is beyond `rtol` and `atol`, `max_ulp`, `max_rel_l2`, `min_cosine` or `bits` is not raised; it
        is in its `problems`.

    Raises:
        UsageError: an option is invalid.
        BadInputError: a file, index or tensor is invalid, or names or shapes do not match.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: a file cannot be read, changed meanwhile, or may be half changed.
    """
    call = Call.of(
        [os.fspath(options.a), os.fspath(options.b)],
        options,
        renames=Renames.of(options.map, slice(1)),
        may_repeat=True,
    )
    with call.open_to_read() as session:
        sides = [Side(one.path, session.opened.selected_in(one.shards)) for one in session.opened.sets]
        pairs = pair(*sides, skip=options.missing == "skip")
        comparison = session.run(Compare(pairs.a, NormSpec(), pairs.b, tolerance_of(options)))
        metrics = comparison.metrics()
        rows = _rows(pairs, comparison, options) if options.per_tensor or options.top is not None else []
        has_limits = any_set(options)
        summary = call_summary(session, pairs.a, warnings=() if has_limits else nonfinite_problems(pairs, comparison))
        return DiffResult(
            call=replace(summary, bytes=summary.bytes + sum(one.tensor.nbytes for one in pairs.b)),
            **metrics._asdict(),
            **_counts(options, {name: sum(getattr(comparison, name)) for name in COUNTS}),
            **_maxima(pairs, comparison),
            unmatched=len(pairs.unmatched),
            per_tensor=tuple(rows),
            per_unmatched=tuple(pairs.unmatched),
            problems=tuple(exceeded(options, pairs, comparison, metrics) if has_limits else ()),
        )


def _counts(options: DiffOptions, counts: dict[str, int]) -> dict[str, Any]:
    """Return the counts, without the one that has no meaning if nothing must be close."""
    return counts if must_be_close(options) else counts | {"not_close": None}


def _maxima(pairs: Pairs, comparison: Comparison) -> dict[str, Any]:
    """Return the maxima over all tensors, and where they are; of equal ones, that of the first name."""
    maxima: dict[str, Any] = {}
    for name, index in zip(MAXIMA, INDICES, strict=True):
        values = getattr(comparison, name)
        maxima[name] = largest = max(values, default=0)
        equal = [(pairs.a[number].tensor.name, number) for number, value in enumerate(values) if value == largest]
        tensor, number = min(equal) if largest else (None, 0)
        maxima |= {f"{name}_tensor": tensor, index: getattr(comparison, index)[number] if largest else None}
    return maxima


def _rows(pairs: Pairs, comparison: Comparison, options: DiffOptions) -> list[TensorDiff]:
    """Return a row for each tensor, or for the `top` ones with the largest rel_l2, NaN or Inf on one side first."""
    rows = []
    for number, ((shard, tensor), other) in enumerate(zip(pairs.a, pairs.b, strict=True)):
        values: dict[str, Any] = {name: getattr(comparison, name)[number] for name in (*MAXIMA, *INDICES)}
        values |= {index: None for name, index in zip(MAXIMA, INDICES, strict=True) if not values[name]}
        rows.append(
            TensorDiff(
                name=tensor.name,
                file=str(shard.path),
                dtype_a=tensor.dtype,
                dtype_b=other.tensor.dtype,
                shape=tensor.shape,
                **comparison.metrics(number)._asdict(),
                **values,
                **_counts(options, {name: getattr(comparison, name)[number] for name in COUNTS}),
            )
        )
    if options.top is None:
        return rows
    rows.sort(key=lambda row: (not row.nonfinite_a + row.nonfinite_b, -row.rel_l2, -row.max_abs_diff))
    return rows[: options.top]
