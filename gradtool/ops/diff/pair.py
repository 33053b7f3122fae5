"""Which tensors of two gradient sets are compared: those of the same name and shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, Problem
from gradtool.ops.names import prefix_between
from gradtool.wording import say

if TYPE_CHECKING:
    from collections.abc import Sequence
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


_SKIP = "use --missing skip to compare only those whose names and shapes match"


def pair(a: Side, b: Side, *, skip: bool) -> Pairs:
    """The pairs of two sets.

    Raises:
        BadInputError: a tensor is only in one of them, or has another shape in the other, unless `skip`; or nothing is
            left. Every such tensor is named.
    """
    home_a, home_b = ({one.tensor.name: one for one in side.selected} for side in (a, b))
    both = [(one, home_b[name]) for name, one in home_a.items() if name in home_b]
    same = [(one, other) for one, other in both if one.tensor.shape == other.tensor.shape]
    misfits = [(one, other) for one, other in both if one.tensor.shape != other.tensor.shape]
    only_a = [one for name, one in home_a.items() if name not in home_b]
    only_b = [one for name, one in home_b.items() if name not in home_a]
    problems = [*_unmatched(a, b, only_a, only_b), *(_misfit(one, other) for one, other in misfits)]
    if problems and not (skip and same):
        nothing_left = "no tensor is left to compare" if skip else None
        raise BadInputError.from_problems(problems, _SKIP if same else nothing_left)
    rows = [
        *(UnmatchedRow(one.tensor.name, str(one.shard.path), "only a", one.tensor.shape, None) for one in only_a),
        *(UnmatchedRow(one.tensor.name, str(one.shard.path), "only b", None, one.tensor.shape) for one in only_b),
        *(
            UnmatchedRow(one.tensor.name, str(one.shard.path), "shape", one.tensor.shape, other.tensor.shape)
            for one, other in misfits
        ),
    ]
    return Pairs([one for one, _ in same], [other for _, other in same], rows)


def _unmatched(a: Side, b: Side, only_a: Sequence[Selected], only_b: Sequence[Selected]) -> list[Problem]:
    found = prefix_between([one.tensor.name for one in only_a], [one.tensor.name for one in only_b])
    if found is not None:
        have, lack = ("have", "lack") if found.is_extra else ("lack", "have")
        message = f"{len(only_a)} tensor names {have} the prefix {found.prefix!r}, which those of {b.path} {lack}"
        return [Problem("extra-tensor", say("{}; {}", message, found.remedy), str(a.path))]
    return [
        *(Problem("extra-tensor", f"is not in {b.path}", str(one.shard.path), one.tensor.name) for one in only_a),
        *(Problem("missing-tensor", f"is only in {one.shard.path}", str(a.path), one.tensor.name) for one in only_b),
    ]


def _misfit(one: Selected, other: Selected) -> Problem:
    message = f"shape {list(one.tensor.shape)} is not {list(other.tensor.shape)}, the shape in {other.shard.path}"
    return Problem("shape", message, str(one.shard.path), one.tensor.name)
