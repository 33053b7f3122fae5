"""Tells how far apart two gradient sets are, and changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradtool.backends.protocol import NormSpec
from gradtool.declare import operation
from gradtool.ops.diff.compare import Compare
from gradtool.ops.diff.comparison import MAX_ABS, MAX_REL, ULPS, Counts
from gradtool.ops.diff.gates import Gates, nonfinite_problems
from gradtool.ops.diff.pair import Pairs, Side, UnmatchedRow, pair
from gradtool.ops.results import Result, call_summary
from gradtool.ops.session import Call
from gradtool.options import DiffOptions
from gradtool.store.format.rename import Renames

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        "rel_l2",
        "cosine",
        "max_abs_diff",
        "max_abs_diff_tensor",
        "max_abs_diff_index",
        "max_rel_diff",
        "max_rel_diff_tensor",
        "max_rel_diff_index",
        "max_ulp",
        "max_ulp_tensor",
        "max_ulp_index",
        "differing",
        "nonfinite_a",
        "nonfinite_b",
        "nonfinite_both",
        "not_close",
        "unmatched",
    )

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
    gates = Gates.of(options)
    opening = Call.of(
        [os.fspath(options.a), os.fspath(options.b)],
        options,
        renames=Renames.parse(options.map, slice(1)),
        may_repeat=True,
    )
    with opening.open_to_read() as session:
        sides = [Side(one.path, session.opened.selected_in(one.shards)) for one in session.opened.sets]
        pairs = pair(*sides, skip=options.missing == "skip")
        found = session.run(Compare(pairs.a, NormSpec(), pairs.b, gates.tolerance))
        whole = found.figures()
        rows = _rows(pairs, found, gates) if options.per_tensor or options.top is not None else []
        call = call_summary(session, pairs.a, warnings=() if gates.is_any else nonfinite_problems(pairs, found))
        return DiffResult(
            call=replace(call, bytes=call.bytes + sum(one.tensor.nbytes for one in pairs.b)),
            **whole._asdict(),
            **_facts(pairs, found, gates),
            unmatched=len(pairs.unmatched),
            per_tensor=tuple(rows if options.top is None else _worst(rows, options.top)),
            per_unmatched=tuple(pairs.unmatched),
            problems=tuple(gates.problems(pairs, found, whole) if gates.is_any else ()),
        )


_MAXIMA = {"max_abs_diff": MAX_ABS, "max_rel_diff": MAX_REL, "max_ulp": ULPS}


def _facts(pairs: Pairs, found: Comparison, gates: Gates) -> dict[str, Any]:
    """The counts of all tensors, and the maxima over them; of equal ones, that of the first name."""
    facts = _counts(found.all_counts(), gates)
    names = [one.tensor.name for one in pairs.a]
    for key, which in _MAXIMA.items():
        values = getattr(found, which)
        largest = max(values, default=0)
        equal = [number for number, value in enumerate(values) if value == largest]
        number = min(equal, key=names.__getitem__) if largest else None
        facts[key] = largest
        facts[f"{key}_tensor"] = None if number is None else names[number]
        facts[f"{key}_index"] = None if number is None else found.maximum(which, number)[1]
    return facts


def _counts(counts: Counts, gates: Gates) -> dict[str, Any]:
    return counts._asdict() | ({} if gates.is_close else {"not_close": None})


def _rows(pairs: Pairs, found: Comparison, gates: Gates) -> list[TensorDiff]:
    rows = []
    for number, (one, other) in enumerate(zip(pairs.a, pairs.b, strict=True)):
        maxima: dict[str, Any] = {}
        for key, which in _MAXIMA.items():
            maxima[key], index = found.maximum(which, number)
            maxima[f"{key}_index"] = index if maxima[key] else None
        rows.append(
            TensorDiff(
                name=one.tensor.name,
                file=str(one.shard.path),
                dtype_a=one.tensor.dtype,
                dtype_b=other.tensor.dtype,
                shape=one.tensor.shape,
                **found.figures_of(number)._asdict(),
                **maxima,
                **_counts(found.counts_of(number), gates),
            )
        )
    return rows


def _worst(rows: Sequence[TensorDiff], count: int) -> list[TensorDiff]:
    """Those with the largest rel_l2; before them, those with NaN or Inf on one side only."""
    return sorted(rows, key=lambda row: (not row.nonfinite_a + row.nonfinite_b, -row.rel_l2, -row.max_abs_diff))[:count]
