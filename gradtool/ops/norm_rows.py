"""The rows of a measured norm: what was found in each tensor, and in each path."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradtool.ops.histogram import ExponentCount, histogram_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.ops.histogram import Histograms
    from gradtool.ops.measurement import Measurement
    from gradtool.ops.session import Session
    from gradtool.store.format.gradset import Selected


@dataclass(frozen=True)
class TensorNorm:
    """What was found in one tensor; `max_abs` leaves NaN out."""

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
    """The same, and how many values have which exponent."""

    histogram: tuple[ExponentCount, ...]


@dataclass(frozen=True)
class FileNorm:
    """What was found in one path, which is `file` as it was given; `max_abs` leaves NaN out."""

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
    """The same, and how many values have which exponent."""

    histogram: tuple[ExponentCount, ...]


def tensor_rows(
    session: Session, found: Measurement, exponents: Histograms | None, norms: Sequence[float], top: int | None
) -> list[TensorNorm]:
    """A row for each tensor, or for the `top` ones with the largest norms, NaN first."""
    rows = [_row(session.selected[number], found, exponents, number, one) for number, one in enumerate(norms)]
    return rows if top is None else sorted(rows, key=lambda row: (not math.isnan(row.norm), -row.norm))[:top]


def _row(one: Selected, found: Measurement, exponents: Histograms | None, number: int, value: float) -> TensorNorm:
    row = TensorNorm(
        name=one.tensor.name,
        file=str(one.shard.path),
        dtype=one.tensor.dtype,
        shape=one.tensor.shape,
        norm=value,
        max_abs=found.max_abs[number],
        nan=found.nan[number],
        inf=found.inf[number],
        zeros=found.zeros[number],
    )
    if exponents is None:
        return row
    return TensorHistogram(**vars(row), histogram=histogram_rows(exponents.exponents(number, number + 1)))


def file_rows(
    paths: Sequence[str], session: Session, found: Measurement, exponents: Histograms | None
) -> Iterator[FileNorm]:
    """A row for each path."""
    first = 0
    for path, one in zip(paths, session.opened.sets, strict=True):
        selected = session.opened.selected_in(one.shards)
        end = first + len(selected)
        own = found.between(first, end)
        row = FileNorm(
            file=path,
            tensors=len(selected),
            elements=sum(one.tensor.elements for one in selected),
            norm=own.norms().whole,
            max_abs=own.largest,
            nan=sum(own.nan),
            inf=sum(own.inf),
            zeros=sum(own.zeros),
        )
        if exponents is not None:
            row = FileHistogram(**vars(row), histogram=histogram_rows(exponents.exponents(first, end)))
        yield row
        first = end
