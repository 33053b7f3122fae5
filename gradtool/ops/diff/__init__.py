"""Compares two gradient sets, checks limits on how far they differ, and changes nothing."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from operator import add
from typing import TYPE_CHECKING, Any

from gradtool.backends.storage import STORAGE
from gradtool.backends.values import NormSpec
from gradtool.declare import operation
from gradtool.errors import BadInputError, Problem, UsageError, option, say
from gradtool.ops.call import Call
from gradtool.ops.diff.comparison import COUNTS, INDICES, MAXIMA, Compare
from gradtool.ops.diff.rules import RuleRow, assign, check_rules, rules_of
from gradtool.ops.diff.tolerance import ToleranceRow, coarser_types, tolerance_rows, tolerances_of
from gradtool.ops.results import Result
from gradtool.options import DiffOptions
from gradtool.store.format.selection import Renames
from gradtool.store.io.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradtool.ops.diff.comparison import Comparison, Metrics
    from gradtool.store.format.gradset import Selected
    from gradtool.store.transaction.inputs import OpenSets

_LIMITS = ("rtol", "atol", "max_ulp", "max_rel_l2", "min_cosine", "close", "bits", "rule", "rules")
# Tensors that are named where a limit is for all of them together.
_MAX_NAMED = 3


@dataclass(frozen=True)
class TensorDiff:
    """The differences of one tensor of A and B; the fields are those of `DiffResult`."""

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


@dataclass(frozen=True)
class UnmatchedRow:
    """A tensor that is not compared: `why` is "only a", "only b" or "shape". A side that lacks it has no shape."""

    name: str
    file: str
    why: str
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None


@dataclass(frozen=True, repr=False)
class DiffResult(Result):
    """The differences of A and B, as one vector. `tensors` and `elements` count one set, `bytes` both sets.

    All metrics cover only the elements that are finite in both sets. `nonfinite_a` counts NaN and Inf in A that B does
    not have in the same place, `nonfinite_b` the reverse, and `nonfinite_both` those that are the same; the first two
    also count as `differing`. A maximum comes with its tensor and index and the values a and b there, which are None if
    nothing differs; so are the tensor and index of the first element that differs, in the order of the files of A. Sets
    are `identical` if all bits are the same and no tensor is unmatched. `within_permille` counts the elements with
    |a - b| <= 0.001·|b|. `per_tolerance` has a row for each type, with the usual tolerance of that type or with `rtol`
    and `atol`; `not_close` counts the elements outside, and is None without `rtol`, `atol` and `close`. `per_rule` has
    a row for each rule.
    """

    headline = (
        "identical", "differing", "elements", "rel_l2", "cosine", "within_permille",
        "first_differing_tensor", "first_differing_index",
        *(f"{name}{end}" for name in MAXIMA for end in ("", "_tensor", "_index", "_a", "_b")),
        "nonfinite_a", "nonfinite_b", "nonfinite_both", "not_close", "unmatched",
    )  # fmt: skip

    identical: bool
    differing: int
    rel_l2: float
    cosine: float
    within_permille: int
    first_differing_tensor: str | None
    first_differing_index: int | None
    max_abs_diff: float
    max_abs_diff_tensor: str | None
    max_abs_diff_index: int | None
    max_abs_diff_a: float | None
    max_abs_diff_b: float | None
    max_rel_diff: float
    max_rel_diff_tensor: str | None
    max_rel_diff_index: int | None
    max_rel_diff_a: float | None
    max_rel_diff_b: float | None
    max_ulp: int
    max_ulp_tensor: str | None
    max_ulp_index: int | None
    max_ulp_a: float | None
    max_ulp_b: float | None
    not_close: int | None
    unmatched: int
    differing_bits: int
    nonfinite_a: int
    nonfinite_b: int
    nonfinite_both: int
    norm_a: float
    norm_b: float
    per_tolerance: tuple[ToleranceRow, ...]
    per_tensor: tuple[TensorDiff, ...]
    per_unmatched: tuple[UnmatchedRow, ...]
    per_rule: tuple[RuleRow, ...]
    problems: tuple[Problem, ...]


@operation(DiffOptions)
def diff(options: DiffOptions) -> DiffResult:
    """Compare the tensors of A with the tensors of the same names in B, as one vector and tensor by tensor.

    rel_l2 is ‖a-b‖/‖b‖, and the cosine Σab/(‖a‖·‖b‖). Everything is computed in float64, in the canonical order of
    `gradtool.reduction`, so the bits are the same for any thread count, block size and shard layout.
    `gradtool.backends.differences` defines every figure.

    Returns:
        The result. Differences beyond `rtol` and `atol`, `close`, `max_ulp`, `max_rel_l2`, `min_cosine`, `bits`
        or rules are not raised; they are in its `problems`.

    Raises:
        UsageError: an option is invalid.
        BadInputError: a file, index, rule or tensor is invalid, names or shapes do not match, or a tensor has no rule.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: a file cannot be read, changed during the call, or may be half changed.
    """
    paths, renames = [os.fspath(options.a), os.fspath(options.b)], Renames.parse(options.map, slice(1))
    call = Call(paths, options, renames=renames, may_repeat=True)
    rules = rules_of(options)
    has_limits = any(not options.is_default(name) for name in _LIMITS)
    for name in ("rtol", "atol"):
        if options.close and not options.is_default(name):
            raise UsageError(say("{} cannot be combined with {}", option("close"), option(name)))
    with call.open_to_read():
        a, b, unmatched = pair(call.opened, skip=options.missing == "skip")
        numbers = assign(rules, a) if options.rule or options.rules else []
        dtypes, sizes = coarser_types(a, b), [tensor.elements for _, tensor in a]
        comparison = call.run(Compare(a, NormSpec(), b, tolerances_of(options, dtypes)))
        metrics = comparison.metrics()
        rule_rows, rule_problems = check_rules(rules, numbers, a, comparison)
        summary = call.summary(a, warnings=() if has_limits else _nonfinite_problems(a, comparison))
        return DiffResult(
            call=replace(summary, bytes=summary.bytes + sum(tensor.nbytes for _, tensor in b)),
            **metrics._asdict(),
            **_counts(options, {name: sum(getattr(comparison, name)) for name in COUNTS}),
            **_maxima(a, b, comparison),
            **_first(a, comparison),
            identical=not any(comparison.differing_bits) and not unmatched,
            within_permille=sum(sizes) - sum(comparison.not_near),
            unmatched=len(unmatched),
            per_tolerance=tuple(tolerance_rows(options, dtypes, sizes, comparison.not_close)),
            per_tensor=_rows(a, b, comparison, options),
            per_unmatched=tuple(unmatched),
            per_rule=tuple(rule_rows),
            problems=(*(_beyond_limits(options, a, b, comparison, metrics) if has_limits else ()), *rule_problems),
        )


def pair(opened: OpenSets, *, skip: bool) -> tuple[list[Selected], list[Selected], list[UnmatchedRow]]:
    """Return the tensors of A and of B with the same name and shape, which are compared, and a row for all others.

    Raises:
        BadInputError: a tensor is only in one of them, or has another shape in the other, unless `skip`; or nothing is
            left. Every such tensor is named.
    """
    a, b = ({grad.tensor.name: grad for grad in opened.selected_in(gradset)} for gradset in opened.sets)
    pairs = [(grad, b[name]) for name, grad in a.items() if name in b]
    same = [(x, y) for x, y in pairs if x.tensor.shape == y.tensor.shape]
    rows: list[tuple[Selected, str, Any, Any]]
    rows = [(x, "only a", x.tensor.shape, None) for name, x in a.items() if name not in b]
    rows += [(y, "only b", None, y.tensor.shape) for name, y in b.items() if name not in a]
    rows += [(x, "shape", x.tensor.shape, y.tensor.shape) for x, y in pairs if x.tensor.shape != y.tensor.shape]
    unmatched = [UnmatchedRow(tensor.name, shard.name, *fields) for (shard, tensor), *fields in rows]
    if unmatched and not (skip and same):
        hint = say("use {} to compare only those whose names and shapes match", option("missing", "skip"))
        names = [gradset.name for gradset in opened.sets]
        error = BadInputError.from_problems([*_unmatched_problems(unmatched, *names)], hint if same else None)
        error.summary = "no tensor is left to compare" if skip else None
        raise error
    return [x for x, _ in same], [y for _, y in same], unmatched


def _unmatched_problems(unmatched: Sequence[UnmatchedRow], a: str, b: str) -> Iterator[Problem]:
    """Yield a problem for each tensor, but a single one for names that differ by a prefix."""
    from gradtool.store.format.hints import prefix_problem  # only needed for the error

    only_a, only_b = ([row.name for row in unmatched if row.why == why] for why in ("only a", "only b"))
    prefix = prefix_problem(only_a, only_b, a, b)
    if prefix is not None:
        yield prefix
    for row in unmatched:
        if row.why == "shape":
            message = f"has shape {list(row.shape_a or ())}, but {list(row.shape_b or ())} in {b}"
            yield Problem("shape", message, row.file, row.name)
        elif prefix is None and row.why == "only a":
            yield Problem("extra-tensor", f"is not in {b}", row.file, row.name)
        elif prefix is None:
            yield Problem("missing-tensor", f"is only in {row.file}", a, row.name)


def _counts(options: DiffOptions, counts: Mapping[str, float]) -> dict[str, Any]:
    """Return the counts; `not_close` is None if values need not be close."""
    return dict(counts) if options.must_be_close else {**counts, "not_close": None}


def _first(a: Sequence[Selected], comparison: Comparison) -> dict[str, Any]:
    """Return the first element that differs, in the order of the files."""
    number = next((number for number, count in enumerate(comparison.differing) if count), None)
    tensor, index = (None, None) if number is None else (a[number].tensor.name, comparison.first_differing[number])
    return {"first_differing_tensor": tensor, "first_differing_index": index}


def _maxima(a: Sequence[Selected], b: Sequence[Selected], comparison: Comparison) -> dict[str, Any]:
    """Return the maxima over all tensors, and where they are, with the values there; of equal maxima, the first name's.

    The values are read again.
    """
    maxima: dict[str, Any] = {}
    for name, index in zip(MAXIMA, INDICES, strict=True):
        values = getattr(comparison, name)
        maxima[name] = largest = max(values, default=0)
        equal = [(a[number].tensor.name, number) for number, value in enumerate(values) if value == largest]
        tensor, number = min(equal) if largest else (None, 0)
        place = getattr(comparison, index)[number] if largest else None
        maxima |= {f"{name}_tensor": tensor, index: place}
        for side, tensors in (("a", a), ("b", b)):
            maxima[f"{name}_{side}"] = None if place is None else _value(tensors[number], place)
    return maxima


def _value(selected: Selected, index: int) -> float:
    """Read one element."""
    storage = STORAGE[selected.tensor.dtype]
    view = memoryview(bytearray(storage.itemsize))
    with contextlib.closing(Channel(1, lambda nbytes: memoryview(bytearray(nbytes)))) as channel:
        channel.read(selected.shard, selected.tensor.begin + index * storage.itemsize, view)
        channel.check()
    return storage.value_of(int.from_bytes(view, "little"))


def _rows(
    a: Sequence[Selected], b: Sequence[Selected], comparison: Comparison, options: DiffOptions
) -> tuple[TensorDiff, ...]:
    """Return a row for each tensor, or the `top` tensors by rel_l2, those with NaN or Inf on one side first."""
    if options.top is None and not options.per_tensor:
        return ()
    rows = []
    for number, ((shard, tensor), (_, b_tensor)) in enumerate(zip(a, b, strict=True)):
        figures: dict[str, Any] = _counts(options, comparison.figures(number))
        for name, index in zip(MAXIMA, INDICES, strict=True):
            figures[index] = getattr(comparison, index)[number] if figures[name] else None
        dtypes = tensor.dtype, b_tensor.dtype
        rows.append(TensorDiff(tensor.name, shard.name, *dtypes, shape=tensor.shape, **figures))
    if options.top is not None:
        rows.sort(key=lambda row: (not row.nonfinite_a + row.nonfinite_b, -row.rel_l2, -row.max_abs_diff))
    return tuple(rows[: options.top])


def _beyond_limits(
    options: DiffOptions, a: Sequence[Selected], b: Sequence[Selected], comparison: Comparison, metrics: Metrics
) -> Iterator[Problem]:
    """Yield the differences beyond limits: of all tensors as one vector, then tensor by tensor, the worst first."""
    for name, limit, sign in (("rel_l2", options.max_rel_l2, -1), ("cosine", options.min_cosine, 1)):
        value = getattr(metrics, name)
        if limit is not None and not sign * value >= sign * limit:
            message = f"{name} {value!r} is {'below' if sign > 0 else 'above'} the limit {limit!r}"
            if len(a) > 1:
                values = [(getattr(comparison.metrics(n), name), tensor.name) for n, (_, tensor) in enumerate(a)]
                values.sort(key=lambda entry: sign * entry[0])
                worst = [f"{tensor_name!r} ({metric:.3g})" for metric, tensor_name in values[:_MAX_NAMED]]
                message += f"; worst: {', '.join(worst)}"
            yield Problem("different", message)
    yield from _nonfinite_problems(a, comparison)
    if options.must_be_close:
        message = "{:,} of {:,} values differ by more than {!r} + {!r}·|b|; max_abs_diff {!r} at {}"
        sizes = [tensor.elements for _, tensor in a]
        tolerances = tolerances_of(options, coarser_types(a, b))
        limits = [tolerance.absolute for tolerance in tolerances], [tolerance.relative for tolerance in tolerances]
        columns = (
            comparison.not_close,
            sizes,
            *limits,
            comparison.max_abs_diff,
            _places(a, comparison.max_abs_diff_index),
        )
        yield from _by_tensor(a, comparison.not_close, message, *columns)
    if (limit := options.max_ulp) is not None:
        ulps = [ulps if ulps > limit else 0 for ulps in comparison.max_ulp]
        message = f"max_ulp {{:,}} at {{}} is above the limit {limit:,}"
        yield from _by_tensor(a, ulps, message, ulps, _places(a, comparison.max_ulp_index))
    if options.bits:
        messages = [
            f"{count:,} of {x.elements:,} values have different bits"
            if x.dtype == y.dtype
            else f"has type {x.dtype}, but {y.dtype} in B, so the bytes differ"
            for count, (_, x), (_, y) in zip(comparison.differing_bits, a, b, strict=True)
        ]
        yield from _by_tensor(a, comparison.differing_bits, "{}", messages)


def _places(tensors: Sequence[Selected], elements: Sequence[int]) -> list[list[int]]:
    """Return the index of an element of each tensor, given its number; of an empty tensor, no index."""
    pairs = zip(tensors, elements, strict=True)
    return [tensor.index_of(element) if tensor.elements else [] for (_, tensor), element in pairs]


def _nonfinite_problems(a: Sequence[Selected], comparison: Comparison) -> list[Problem]:
    """Return a problem for each tensor with NaN or Inf on one side only."""
    counts = comparison.nonfinite_a, comparison.nonfinite_b
    message = "{:,} NaN or Inf only in A, and {:,} only in B"
    return list(_by_tensor(a, list(map(add, *counts)), message, *counts, code="nonfinite"))


def _by_tensor(
    tensors: Sequence[Selected], extents: Sequence[int], message: str, *columns: Sequence[Any], code: str = "different"
) -> Iterator[Problem]:
    """Yield a problem for each tensor with an extent above 0, the largest first; columns fill in the message."""
    numbers = [number for number, extent in enumerate(extents) if extent]
    for number in sorted(numbers, key=lambda number: -extents[number]):
        shard, tensor = tensors[number]
        yield Problem(code, message.format(*(column[number] for column in columns)), shard.name, tensor.name)
