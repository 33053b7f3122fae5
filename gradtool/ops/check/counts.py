"""What was counted in tensors, and in all tensors of a type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.ops.check.census import Census
    from gradtool.store.format.gradset import Selected


@dataclass(frozen=True)
class DtypeCounts:
    """What was counted in all tensors of one type; None where values were not read, or the type carries none."""

    dtype: str
    tensors: int
    elements: int
    bytes: int
    nan: int | None
    inf: int | None
    zeros: int | None
    subnormal: int | None
    saturated: int | None


class Counted(NamedTuple):
    """What was counted in one tensor."""

    nan: int
    inf: int
    zeros: int
    subnormal: int
    saturated: int
    first_nonfinite: int


def counts_of(census: Census, number: int) -> Counted:
    """The counts of the tensor with that number."""
    return Counted(*(int(getattr(census, name)[number]) for name in Counted._fields))


def by_dtype(selected: Sequence[Selected], valued: Sequence[Selected], census: Census | None) -> list[DtypeCounts]:
    """The counts by type, the type with most bytes first."""
    counted = {} if census is None else {id(one): counts_of(census, number) for number, one in enumerate(valued)}
    groups: dict[str, list[Selected]] = {}
    for one in selected:
        groups.setdefault(one.tensor.dtype, []).append(one)
    rows = []
    for dtype, group in groups.items():
        counts = [counted[id(one)] for one in group if id(one) in counted]
        known = ("nan", "inf", "zeros", "subnormal", "saturated")
        sums = {key: sum(getattr(one, key) for one in counts) if counts else None for key in known}
        elements, nbytes = sum(one.tensor.elements for one in group), sum(one.tensor.nbytes for one in group)
        rows.append(DtypeCounts(dtype, len(group), elements, nbytes, **sums))
    return sorted(rows, key=lambda row: (-row.bytes, row.dtype))


def total(rows: Iterable[DtypeCounts], key: str, census: Census | None) -> int | None:
    """The sum of a column; None where nothing was counted."""
    return None if census is None else sum(getattr(row, key) or 0 for row in rows)
