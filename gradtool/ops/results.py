"""What the results of all operations have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from gradtool.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.measurement import Measurement
    from gradtool.ops.passes import Session, Timings
    from gradtool.store.gradset import Selected


class Facts(TypedDict):
    """What every result says about the call itself."""

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


def facts(session: Session, found: Measurement) -> Facts:
    """The facts of a call that is done."""
    return {
        "files": len(session.shards),
        "tensors": len(session.selected),
        "elements": session.elements,
        "bytes": session.nbytes,
        "nan": int(found.nan.sum()),
        "inf": int(found.inf.sum()),
        "zeros": int(found.zeros.sum()),
        "backend": session.backend.name,
        "backend_why": session.backend_why,
        "threads": session.workers,
        "seconds": session.seconds,
        "timings": session.timings,
    }


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
