"""The rows of a measured norm: what was found in each tensor, and in each path."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def tensor_rows(session: Session, found: Measurement, norms: Sequence[float], top: int | None) -> list[TensorNorm]:
    """A row for each tensor, or for the `top` ones with the largest norms, NaN first."""
    rows = [_row(session.selected[number], found, number, one) for number, one in enumerate(norms)]
    return rows if top is None else sorted(rows, key=lambda row: (not math.isnan(row.norm), -row.norm))[:top]


def _row(one: Selected, found: Measurement, number: int, value: float) -> TensorNorm:
    return TensorNorm(
        name=one.tensor.name,
        file=str(one.shard.path),
        dtype=one.tensor.dtype,
        shape=one.tensor.shape,
        norm=value,
        max_abs=float(found.max_abs[number]),
        nan=int(found.nan[number]),
        inf=int(found.inf[number]),
        zeros=int(found.zeros[number]),
    )


def file_rows(paths: Sequence[str], session: Session, found: Measurement) -> list[FileNorm]:
    """A row for each path."""
    rows, first = [], 0
    for path, one in zip(paths, session.opened.sets, strict=True):
        selected = session.opened.selected_in(one.shards)
        own = found.between(first, first + len(selected))
        first += len(selected)
        rows.append(
            FileNorm(
                file=path,
                tensors=len(selected),
                elements=sum(one.tensor.elements for one in selected),
                norm=own.norms().whole,
                max_abs=own.largest,
                nan=int(own.nan.sum()),
                inf=int(own.inf.sum()),
                zeros=int(own.zeros.sum()),
            )
        )
    return rows
