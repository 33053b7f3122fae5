"""The rows that `norm` reports on request: of tensors, files, binary exponents, and types that could store the values.

Only a call that asks for them imports this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, ClassVar

from gradtool.backends.storage import STORAGE
from gradtool.backends.values import Column
from gradtool.engines.passes import Pass
from gradtool.ops.passes import Measurement, pieces_of
from gradtool.store.format.gradset import totals

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Mapping, Sequence

    from gradtool.backends.values import NormSpec
    from gradtool.engines.worker import Worker
    from gradtool.options import NormOptions
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.inputs import OpenSets

# One in so many values, and parts of the squared norm, may be lost.
_VALUES_LOST, _SQUARES_LOST = 1_000, 10_000
# More than a norm is rounded by.
_ROUNDING = Fraction(1, 1 << 40)
_COLUMNS = {"counts": Column("q", "bins"), "largest_finite": Column("d", "max")}


@dataclass(frozen=True)
class ExponentCount:
    """The number of values with an exponent e: 2^(e-1) <= |x| < 2^e."""

    exponent: int
    count: int


@dataclass(frozen=True)
class StorageRange:
    """The effect of storing all finite values in a type, as far as their exponents tell.

    Between `overflow_at_least` and `overflow_at_most` values overflow. `to_subnormal` lie below the smallest normal
    number, and `to_zero` below half of the smallest number at all. Multiplied by 2^k, no value overflows for any k up
    to `max_scale_log2`, and none is below the smallest normal number from `min_scale_log2` on; at most 0.1 % of the
    values are from `min_scale_values_log2` on, and values with at most 0.01 % of the squared norm from
    `min_scale_norm_log2` on. All are None without values.
    """

    dtype: str
    overflow_at_least: int
    overflow_at_most: int
    to_subnormal: int
    to_zero: int
    min_scale_log2: int | None
    max_scale_log2: int | None
    min_scale_values_log2: int | None
    min_scale_norm_log2: int | None


@dataclass(frozen=True)
class TensorNorm:
    """Statistics of one tensor; `max_abs` leaves NaN out."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    norm: float
    max_abs: float
    nan: int
    inf: int
    zeros: int


@dataclass(frozen=True)
class TensorHistogram(TensorNorm):
    """The same statistics, and the number of values with each exponent."""

    histogram: tuple[ExponentCount, ...]


@dataclass(frozen=True)
class FileNorm:
    """Statistics of one path, which is `file` as it was given; `max_abs` leaves NaN out."""

    file: str
    tensors: int
    elements: int
    norm: float
    max_abs: float
    nan: int
    inf: int
    zeros: int


@dataclass(frozen=True)
class FileHistogram(FileNorm):
    """The same statistics, and the number of values with each exponent."""

    histogram: tuple[ExponentCount, ...]


class Histograms(Measurement):
    """A measurement with a histogram of each tensor; `largest_finite` are magnitudes."""

    counts: array[int]
    largest_finite: array[float]

    def __init__(self, selected: Sequence[Selected], spec: NormSpec) -> None:
        bins = {dtype: storage.bins for dtype, storage in STORAGE.items()}
        # An empty tensor is in no block, and has no bins.
        self._bins = [bins[tensor.dtype] if tensor.elements else range(0) for _, tensor in selected]
        super().__init__(selected, spec, _COLUMNS, [len(exponents) for exponents in self._bins])

    def exponents(self, first: int, end: int) -> dict[int, int]:
        """Count the exponents, in order, of the tensors with the numbers from `first` up to `end`."""
        total: dict[int, int] = {}
        for bins, group in groupby(range(first, end), key=self._bins.__getitem__):
            numbers = list(group)
            begin, stop = self._bounds[numbers[0]], self._bounds[numbers[-1] + 1]
            for at, exponent in enumerate(bins):
                total[exponent] = total.get(exponent, 0) + sum(self.counts[begin + at : stop : len(bins)])
        return {exponent: total[exponent] for exponent in sorted(total) if total[exponent]}


@dataclass(frozen=True, eq=False, repr=False)
class CountExponents(Pass[Histograms]):
    """A pass that measures tensors, and counts their exponents while a block is still in the cache."""

    title: ClassVar = "measuring"
    reads_only: ClassVar = True

    def tally(self) -> Histograms:
        return Histograms(self.selected, self.spec)

    def work(self, block: Block, worker: Worker, tally: Histograms) -> None:
        with worker.view(block, self.spec) as data:
            sums, counts = worker.backend.histogram(data, pieces_of(block), self.spec)
        tally.add(block, sums, counts=counts.counts, largest_finite=counts.largest)


def rows_of(
    opened: OpenSets, paths: Sequence[str], options: NormOptions, measurement: Measurement, norms: Sequence[float]
) -> dict[str, Any]:
    """Return the rows that the options of a call ask for; rows of tensors where their norms are given."""
    rows: dict[str, Any] = {}
    row: type[TensorNorm] = TensorNorm
    if isinstance(measurement, Histograms):
        row, counts = TensorHistogram, measurement.exponents(0, len(measurement))
        is_known = measurement.spec.order == 2 and measurement.is_finite  # noqa: PLR2004
        norm = measurement.norms().whole if is_known else 0.0
        ranges = storage_ranges(counts, max(measurement.largest_finite, default=0.0), norm)
        rows |= {"histogram": _exponent_rows(counts), "per_dtype": tuple(ranges)}
    tensors = [
        row(tensor.name, shard.name, tensor.dtype, tensor.shape, norm, **_statistics(measurement, number, number + 1))
        for number, ((shard, tensor), norm) in enumerate(zip(opened.selected, norms, strict=False))
    ]
    if options.top is not None:
        tensors = sorted(tensors, key=lambda row: (not math.isnan(row.norm), -row.norm))[: options.top]
    rows["per_tensor"] = tuple(tensors)
    if options.by_file:
        rows["per_file"] = tuple(_file_rows(opened, paths, measurement))
    return rows


def _file_rows(opened: OpenSets, paths: Sequence[str], measurement: Measurement) -> Iterator[FileNorm]:
    first, row = 0, FileHistogram if isinstance(measurement, Histograms) else FileNorm
    for path, gradset in zip(paths, opened.sets, strict=True):
        sums = totals(opened.selected_in(gradset))
        end = first + sums["tensors"]
        norm = measurement.part(range(first, end)).norms().whole
        yield row(path, sums["tensors"], sums["elements"], norm, **_statistics(measurement, first, end))
        first = end


def _statistics(measurement: Measurement, first: int, end: int) -> dict[str, Any]:
    """Return the fields that the rows of tensors and of files share, of the tensors from `first` up to `end`."""
    fields: dict[str, Any] = {name: sum(getattr(measurement, name)[first:end]) for name in ("nan", "inf", "zeros")}
    fields["max_abs"] = max(measurement.max_abs[first:end], default=0.0)
    if isinstance(measurement, Histograms):
        fields["histogram"] = _exponent_rows(measurement.exponents(first, end))
    return fields


def _exponent_rows(counts: Mapping[int, int]) -> tuple[ExponentCount, ...]:
    return tuple(ExponentCount(exponent, count) for exponent, count in counts.items())


def storage_ranges(counts: Mapping[int, int], largest: float, norm: float) -> Iterator[StorageRange]:
    """Yield a row for each type, from the counts of exponents, the largest magnitude, and the L2 norm or less."""

    def count(least: float, above: float) -> int:
        return sum(number for exponent, number in counts.items() if least <= exponent < above)

    mantissa, exponent = math.frexp(largest)
    # An exponent e stands for squares from 4^(e-1) to 4^e; those that are lost are taken to be the largest.
    squares = {exponent: number * Fraction(4) ** exponent for exponent, number in counts.items()}
    square = max(Fraction(sum(squares.values())) / 4, Fraction(norm if norm < math.inf else 0) ** 2 * (1 - _ROUNDING))
    values_kept = _smallest_kept(counts, Fraction(sum(counts.values()), _VALUES_LOST))
    squares_kept = _smallest_kept(squares, square / _SQUARES_LOST)
    for dtype, storage in STORAGE.items():
        # The largest k for which largest·2^k, rounded to the type, does not overflow.
        overflows = not math.isfinite(storage.rounded(math.ldexp(mantissa, storage.top)))
        room = storage.top - exponent - overflows if counts else 0
        over = count(storage.top + 1, math.inf)
        yield StorageRange(
            dtype=dtype,
            overflow_at_least=max(over, int(room < 0)),
            overflow_at_most=over + counts.get(storage.top, 0) if room < 0 else 0,
            to_subnormal=count(storage.least - 1, storage.normal),
            to_zero=count(-math.inf, storage.least - 1),
            min_scale_log2=storage.normal - min(counts) if counts else None,
            max_scale_log2=room if counts else None,
            min_scale_values_log2=None if values_kept is None else storage.normal - values_kept,
            min_scale_norm_log2=None if squares_kept is None else storage.normal - squares_kept,
        )


def _smallest_kept(weights: Mapping[int, Fraction | int], limit: Fraction) -> int | None:
    """Return the smallest exponent to keep so that those below weigh no more than a limit; None without any."""
    exponents = sorted(weights)
    sums = accumulate(weights[exponent] for exponent in exponents)
    return next((exponent for exponent, lost in zip(exponents, sums, strict=True) if lost > limit), None)
