"""What the results of all operations have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from gradtool.errors import NonFiniteError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.measurement import Measurement
    from gradtool.ops.session import Session, Timings
    from gradtool.store.format.gradset import Selected


@dataclass(frozen=True)
class CallFacts:
    """What every result says of its call: how much it was about, what did it, and how long it took.

    `threads` counts those that got work.
    """

    files: int
    tensors: int
    elements: int
    bytes: int
    backend: str
    backend_why: str
    threads: int
    seconds: float
    timings: Timings


@dataclass(frozen=True)
class Facts(CallFacts):
    """What a result says of the tensors it is about, taken as one vector; `max_abs` leaves NaN out."""

    norm_type: float
    norm: float
    max_abs: float
    nan: int
    inf: int
    zeros: int


class CallFields(TypedDict):
    """The fields of `CallFacts`."""

    files: int
    tensors: int
    elements: int
    bytes: int
    backend: str
    backend_why: str
    threads: int
    seconds: float
    timings: Timings


class FactFields(CallFields):
    """The fields of `Facts`."""

    norm_type: float
    norm: float
    max_abs: float
    nan: int
    inf: int
    zeros: int


def call_facts(session: Session, selected: Sequence[Selected], *, why: str | None = None) -> CallFields:
    """The facts of a call that is done; `selected` are the tensors that it was about."""
    return CallFields(
        files=len(session.opened.shards),
        tensors=len(selected),
        elements=sum(one.tensor.elements for one in selected),
        bytes=sum(one.tensor.nbytes for one in selected),
        backend=session.engine.backend.name,
        backend_why=why or session.backend_why,
        threads=max(1, session.engine.clock.workers),
        seconds=session.seconds,
        timings=session.timings,
    )


def facts(
    session: Session, selected: Sequence[Selected], found: Measurement, norm: float, *, unscale: float = 1.0
) -> FactFields:
    """The facts of a call, and of what was found in the tensors that it was about."""
    return FactFields(
        **call_facts(session, selected),
        norm_type=found.spec.order,
        norm=norm,
        max_abs=found.largest / unscale,
        nan=int(found.nan.sum()),
        inf=int(found.inf.sum()),
        zeros=int(found.zeros.sum()),
    )


def nonfinite_problems(selected: Sequence[Selected], found: Measurement) -> list[Problem]:
    """One problem for each tensor that contains NaN or Inf: how many, and where the first one is."""
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
    """One problem for each tensor whose results overflow its type."""
    return [
        Problem(
            "overflow",
            f"{written.nan[number] + written.inf[number]} results overflow {one.tensor.dtype}, "
            f"the first at index {written.first_nonfinite[number]}",
            str(one.shard.path),
            one.tensor.name,
        )
        for number, one in enumerate(changed)
        if written.nan[number] or written.inf[number]
    ]


def refuse_nonfinite(selected: Sequence[Selected], found: Measurement, remedy: str) -> None:
    """Raise `NonFiniteError` for tensors that contain NaN or Inf."""
    problems = nonfinite_problems(selected, found)
    if problems:
        raise NonFiniteError(f"input contains NaN or Inf; nothing written. {remedy}", problems)


def refuse_overflow(selected: Sequence[Selected], written: Measurement) -> None:
    """Raise `NonFiniteError` for tensors whose results overflow their type."""
    problems = overflow_problems(selected, written)
    if problems:
        raise NonFiniteError("results overflow their type; nothing written. Use a larger --unscale", problems)
