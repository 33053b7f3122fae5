"""Which tensors of two gradient sets are compared: those of the same name and shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, Problem
from gradtool.store.format.rename import prefix_problem
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gradtool.store.format.gradset import Selected


@dataclass(frozen=True)
class UnmatchedRow:
    """A tensor that is not compared: `why` is "only a", "only b" or "shape". One that is not there has no shape."""

    name: str
    file: str
    why: str
    shape_a: tuple[int, ...] | None
    shape_b: tuple[int, ...] | None


class Side(NamedTuple):
    """A gradient set, as it was named, and the tensors that are selected in it."""

    path: Path
    selected: Sequence[Selected]


class Pairs(NamedTuple):
    """Tensors of a and of b that are compared, in the order of a; and those that are not."""

    a: Sequence[Selected]
    b: Sequence[Selected]
    unmatched: Sequence[UnmatchedRow]


def pair(a: Side, b: Side, *, skip: bool) -> Pairs:
    """Pair the tensors of two sets.

    Raises:
        BadInputError: a tensor is only in one of them, or has another shape in the other, unless `skip`; or nothing is
            left. Every such tensor is named.
    """
    a_tensors, b_tensors = ({one.tensor.name: one for one in side.selected} for side in (a, b))
    pairs = [(one, b_tensors[name]) for name, one in a_tensors.items() if name in b_tensors]
    same = [(x, y) for x, y in pairs if x.tensor.shape == y.tensor.shape]
    unmatched = [
        *(_row(one, "only a", one.tensor.shape, None) for name, one in a_tensors.items() if name not in b_tensors),
        *(_row(one, "only b", None, one.tensor.shape) for name, one in b_tensors.items() if name not in a_tensors),
        *(_row(x, "shape", x.tensor.shape, y.tensor.shape) for x, y in pairs if x.tensor.shape != y.tensor.shape),
    ]
    if unmatched and not (skip and same):
        hint = say("use {} to compare only those whose names and shapes match", option("missing", "skip"))
        error = BadInputError.from_problems(list(_problems(unmatched, a.path, b.path, hint if same else None)))
        error.summary = "no tensor is left to compare" if skip else None
        raise error
    return Pairs([x for x, _ in same], [y for _, y in same], unmatched)


def _row(one: Selected, why: str, a_shape: tuple[int, ...] | None, b_shape: tuple[int, ...] | None) -> UnmatchedRow:
    return UnmatchedRow(one.tensor.name, str(one.shard.path), why, a_shape, b_shape)


def _problems(unmatched: Sequence[UnmatchedRow], a: Path, b: Path, hint: str | None) -> Iterator[Problem]:
    """Yield a problem for each row, but a single one for names that differ by a prefix."""
    only_a, only_b = ([row.name for row in unmatched if row.why == why] for why in ("only a", "only b"))
    prefix = prefix_problem(only_a, only_b, a, b)
    if prefix is not None:
        yield prefix
    for row in unmatched:
        if row.why == "shape":
            message = f"shape {list(row.shape_a or ())} is not {list(row.shape_b or ())}, the shape in {b}"
            yield Problem("shape", message, row.file, row.name, hint)
        elif prefix is None and row.why == "only a":
            yield Problem("extra-tensor", f"is not in {b}", row.file, row.name, hint)
        elif prefix is None:
            yield Problem("missing-tensor", f"is only in {row.file}", str(a), row.name, hint)
