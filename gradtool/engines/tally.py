"""What a pass collects: columns of statistics, with a row for each tensor, and sums of tiles.

A column says how the values of parts of a tensor become one. Locking, merging, what is sent by other processes, and
copies of some rows are written once, here: a new statistic is a new column.
"""

from __future__ import annotations

import threading
from array import array
from copy import copy
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradtool.reduction import TileSums

    # For parts of tensors: the number of its tensor, and the element that it begins at.
    Places = Sequence[tuple[int, int]]


AnyTally = TypeVar("AnyTally", bound="Tally")


class Column(NamedTuple):
    """A statistic of each tensor: its type, and how the values of parts of a tensor are merged.

    A `sum` adds them and, unless it is `signed`, is no smaller than 0. A `max` is the largest; if it has a `place`,
    that is the column with the index of the first element that has it. A `first` is an index, or -1, and the smallest
    one is kept; a `place` is merged with its maximum. A `bins` column has several sums for each tensor.
    """

    typecode: str
    merge: Literal["sum", "max", "first", "place", "bins"]
    signed: bool = False
    place: str = ""


class Tally:
    """Statistics of some tensors, filled block by block from any thread. A column is an attribute: an array."""

    def __init__(self, columns: Mapping[str, Column], sums: Sequence[TileSums], widths: Sequence[int]) -> None:
        """Begin with nothing: empty sums of tiles and, for each tensor, so many bins."""
        self.columns, self.tile_sums = columns, sums
        self._bounds = [0, *accumulate(widths)]
        for name, (typecode, merge, _, _) in columns.items():
            count = self._bounds[-1] if merge == "bins" else len(widths)
            setattr(self, name, array(typecode, [-1 if merge == "first" else 0]) * count)
        self._lock = threading.Lock()

    @property
    def sent_names(self) -> tuple[str, ...]:
        """The names of the attributes that a worker sends."""
        return ("tile_sums", *self.columns)

    @property
    def signed_names(self) -> tuple[str, ...]:
        """The names of those that may be negative."""
        return tuple(name for name, column in self.columns.items() if column.signed or column.merge == "first")

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._bounds) - 1

    def merge(self, places: Places, rows: Mapping[str, Any], sums: Iterable[tuple[Any, Any, Any]]) -> None:
        """Merge what was found in parts of tensors: for each column a value a part, and tile sums of the tensors.

        The tile sums are (numbers of their tensors, sums, exponents), for each order.
        """
        with self._lock:
            for known, more in zip(self.tile_sums, sums, strict=True):
                known.extend(*more)
            for name, column in self.columns.items():
                values, new = getattr(self, name), rows[name]
                if column.merge == "sum":
                    for (number, _), value in zip(places, new, strict=True):
                        values[number] += value
                elif column.merge == "max":
                    self._merge_largest(places, values, new, column.place, rows)
                elif column.merge == "first":
                    for (number, start), index in zip(places, new, strict=True):
                        if index >= 0 and (values[number] < 0 or start + index < values[number]):
                            values[number] = start + index
                elif column.merge == "bins":
                    self._merge_bins(places, values, new)

    def _merge_largest(
        self, places: Places, values: array[Any], new: Sequence[Any], place: str, rows: Mapping[str, Any]
    ) -> None:
        if not place:
            for (number, _), value in zip(places, new, strict=True):
                values[number] = max(values[number], value)
            return
        indices = getattr(self, place)
        for (number, start), value, index in zip(places, new, rows[place], strict=True):
            at = start + index
            if value > values[number] or (value == values[number] > 0 and at < indices[number]):
                values[number], indices[number] = value, at

    def _merge_bins(self, places: Places, values: array[Any], new: array[Any]) -> None:
        at = 0
        for number, _ in places:
            bins = slice(self._bounds[number], self._bounds[number + 1])
            known, more = values[bins], new[at : at + bins.stop - bins.start]
            values[bins] = array(values.typecode, map(add, known, more)) if any(known) else more
            at += len(known)

    def compact(self) -> Self:
        """Return the same with as few tile sums as possible, to be sent."""
        for sums in self.tile_sums:
            sums.condense()
        return self

    def merge_part(self, places: Places, other: Self) -> None:
        """Merge what another process found in parts of tensors.

        Raises:
            ValueError: it is not about these parts, or no statistic of any.
        """
        if type(other) is not type(self) or self._bounds_of([number for number, _ in places]) != other._bounds:
            raise ValueError("a tally of other tensors")
        if [sums.order for sums in self.tile_sums] != [sums.order for sums in other.tile_sums]:
            raise ValueError("a tally of another norm")
        for name, column in self.columns.items():
            if len(getattr(other, name)) != (other._bounds[-1] if column.merge == "bins" else len(places)):
                raise ValueError("a tally of other tensors")
        for sums in other.tile_sums:
            sums.require_valid(len(places))
        numbers = {position: number for position, (number, _) in enumerate(places)}
        renumbered = [sums.renumbered(numbers) for sums in other.tile_sums]
        self.merge(places, vars(other), [(sums.numbers, sums.sums, sums.exponents) for sums in renumbered])

    def part(self, numbers: Sequence[int]) -> Self:
        """Return a tally of the tensors with the given numbers alone."""
        part = copy(self)
        vars(part).update(_bounds=self._bounds_of(numbers))
        renumbered = {old: new for new, old in enumerate(numbers)}
        part.tile_sums = [sums.renumbered(renumbered) for sums in self.tile_sums]
        for name, column in self.columns.items():
            values, items = getattr(self, name), iter(numbers)
            if column.merge == "bins":
                items = (at for number in numbers for at in range(self._bounds[number], self._bounds[number + 1]))
            setattr(part, name, array(values.typecode, map(values.__getitem__, items)))
        return part

    def between(self, first: int, end: int) -> Self:
        """Return a tally of consecutive tensors, those with the numbers from `first` up to `end`."""
        part = copy(self)
        vars(part).update(_bounds=self._bounds_of(range(first, end)))
        part.tile_sums = [sums.between(first, end) for sums in self.tile_sums]
        for name, column in self.columns.items():
            begin, stop = (self._bounds[first], self._bounds[end]) if column.merge == "bins" else (first, end)
            setattr(part, name, getattr(self, name)[begin:stop])
        return part

    def updated(self, numbers: Sequence[int], other: Self) -> Self:
        """Return a copy in which the tensors with the given numbers come from another tally, of just these."""
        if list(numbers) == list(range(len(self))):
            return other
        copied, replaced = copy(self), dict(enumerate(numbers))
        others = set(range(len(self))) - set(numbers)
        copied.tile_sums = [sums.renumbered({number: number for number in others}) for sums in self.tile_sums]
        for sums, theirs in zip(copied.tile_sums, other.tile_sums, strict=True):
            more = theirs.renumbered(replaced)
            sums.extend(more.numbers, more.sums, more.exponents)
        for name, column in self.columns.items():
            values, new = getattr(self, name)[:], getattr(other, name)
            for position, number in replaced.items():
                if column.merge == "bins":
                    begin, end = other._bounds[position : position + 2]
                    values[self._bounds[number] : self._bounds[number + 1]] = new[begin:end]
                else:
                    values[number] = new[position]
            setattr(copied, name, values)
        return copied

    def _bounds_of(self, numbers: Iterable[int]) -> list[int]:
        """Return where the bins of tensors would begin and end in a tally of these."""
        return list(accumulate((self._bounds[number + 1] - self._bounds[number] for number in numbers), initial=0))


class Tallies(NamedTuple, Generic[AnyTally]):
    """Several tallies that one pass fills."""

    each: Sequence[AnyTally]

    def compact(self) -> Self:
        """Return the same with as few tile sums as possible, to be sent."""
        return self._replace(each=[tally.compact() for tally in self.each])

    def merge_part(self, places: Places, other: Self) -> None:
        """Merge what another process found in parts of tensors; `ValueError` if it is not about these."""
        for tally, more in zip(self.each, other.each, strict=True):
            tally.merge_part(places, more)
