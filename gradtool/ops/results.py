"""What the results of all operations have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradtool.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.measurement import Measurement
    from gradtool.ops.passes import Session, Timings
    from gradtool.store.gradset import Selected


@dataclass(frozen=True)
class Facts:
    """What every result says: the norm of all selected tensors as one vector, what is in them, and the call itself.

    `max_abs` leaves NaN out; `threads` counts those that got work.
    """

    norm_type: float
    norm: float
    max_abs: float
    files: int
    tensors: int
    elements: int
    bytes: int
    nan: int
    inf: int
    zeros: int
    backend: str
    backend_why: str
    threads: int
    seconds: float
    timings: Timings


def facts(session: Session, found: Measurement, norm: float, *, unscale: float = 1.0) -> dict[str, Any]:
    """The facts of a call that is done, by name."""
    gathered = Facts(
        norm_type=found.terms.norm_type,
        norm=norm,
        max_abs=found.largest / unscale,
        files=len(session.shards),
        tensors=len(session.selected),
        elements=session.elements,
        bytes=session.nbytes,
        nan=int(found.nan.sum()),
        inf=int(found.inf.sum()),
        zeros=int(found.zeros.sum()),
        backend=session.backend.name,
        backend_why=session.backend_why,
        threads=session.workers,
        seconds=session.seconds,
        timings=session.timings,
    )
    return vars(gathered)


def nonfinite_problems(selected: Sequence[Selected], found: Measurement) -> list[Problem]:
    """One problem for each tensor that holds a NaN or Inf: how many, and where the first one is."""
    return [
        Problem(
            "nonfinite",
            f"{found.nan[number]} NaN, {found.inf[number]} Inf, the first at index {found.first_nonfinite[number]}",
            str(one.shard.path),
            one.tensor.name,
        )
        for number, one in enumerate(selected)
        if found.nan[number] or found.inf[number]
    ]


def overflow_problems(changed: Sequence[Selected], written: Measurement) -> list[Problem]:
    """One problem for each tensor that got a result which its type cannot hold."""
    return [
        Problem(
            "overflow",
            f"{written.nan[number] + written.inf[number]} results are beyond {one.tensor.dtype}, "
            f"the first at index {written.first_nonfinite[number]}",
            str(one.shard.path),
            one.tensor.name,
        )
        for number, one in enumerate(changed)
        if written.nan[number] or written.inf[number]
    ]
