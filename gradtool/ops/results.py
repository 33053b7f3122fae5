"""What the results of all operations have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gradtool.errors import Problem, number_of
from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.measurement import Measurement
    from gradtool.ops.session import Session, Timings
    from gradtool.store.format.gradset import Selected
    from gradtool.store.transaction.destination import Destination
    from gradtool.store.transaction.output import Output

# More than this takes numpy long enough to be worth a warning.
_SLOW_BYTES = 64 << 20
# So small a part of the values may become 0 or subnormal without a warning: one in a thousand.
_LOSSES = 1000


@dataclass(frozen=True)
class CallSummary:
    """What every call reports: how much it was about, what did it, and how long it took.

    `threads` counts those that got work; with workers on other machines, those of one of them. `workers` and `hosts`
    count processes and machines, and `retries` waits for late files and tasks that were moved.
    """

    files: int
    tensors: int
    elements: int
    bytes: int
    backend: str
    backend_why: str
    threads: int
    engine: str
    workers: int
    hosts: int
    retries: int
    seconds: float
    timings: Timings
    warnings: tuple[Problem, ...]


@dataclass(frozen=True)
class OutputSummary:
    """What a call wrote. `wrote` are the paths that were written, as the caller named them."""

    wrote: tuple[str, ...]
    dry_run: bool
    files_written: int
    bytes_written: int


# The bases of results are never made themselves, so they need no methods but those that keep them frozen: each method
# that a dataclass generates costs 0.1 ms of every start.
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Result:
    """What an operation returns: a summary of the call, which JSON does not nest, and fields of its own."""

    # What users call for. It is printed first, and alone in the repr.
    headline: ClassVar[tuple[str, ...]] = ()

    call: CallSummary

    def __repr__(self) -> str:
        """Return what was found or done, in one line; rows are only counted."""
        values = vars(self.call) | vars(self)
        shown = [f"{key}={values[key]!r}" for key in (*self.headline, "files", "tensors")]
        rows = [(key, len(value)) for key, value in vars(self).items() if key.startswith("per_") and value]
        shown += [f"{key}=<{number_of(count, 'row')}>" for key, count in rows]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Statistics(Result):
    """A result with statistics of its tensors, taken as one vector; `max_abs` leaves NaN out."""

    norm_type: float
    max_abs: float
    nan: int
    inf: int
    zeros: int


def call_summary(
    session: Session, selected: Sequence[Selected], *, why: str | None = None, warnings: Sequence[Problem] = ()
) -> CallSummary:
    """Sum up a call that is done; `selected` are the tensors that it was about."""
    workers, timings = session.engine.workers, session.timings
    nbytes = sum(one.tensor.nbytes for one in selected)
    remedy = None if session.choice is None else session.choice.remedy
    if why is None and nbytes > _SLOW_BYTES and remedy is not None:
        message = "computed by numpy, several times slower than the compiled kernels"
        warnings = [Problem("slow", message, hint=remedy), *warnings]
    return CallSummary(
        files=len(session.opened.shards),
        tensors=len(selected),
        elements=sum(one.tensor.elements for one in selected),
        bytes=nbytes,
        backend=workers.backend,
        backend_why=why or workers.why,
        threads=max(1, session.engine.clock.workers),
        engine=session.engine.name,
        workers=workers.workers,
        hosts=workers.hosts,
        retries=workers.retries,
        seconds=timings.total_seconds,
        timings=timings,
        warnings=(*session.warnings, *warnings),
    )


def output_summary(session: Session, output: Output, destination: Destination) -> OutputSummary:
    """Sum up what was written, after the destination is closed."""
    return OutputSummary(
        wrote=output.wrote(destination.shards),
        dry_run=output.options.dry_run,
        files_written=destination.count,
        bytes_written=session.engine.clock.written_bytes,
    )


def statistics(
    session: Session,
    selected: Sequence[Selected],
    found: Measurement,
    *,
    unscale: float = 1.0,
    after: Measurement | None = None,
    warnings: Sequence[Problem] = (),
) -> dict[str, Any]:
    """Return the fields of `Statistics`, for tensors that were measured; `after` is what was written."""
    return {
        "call": call_summary(session, selected, warnings=warnings),
        "norm_type": found.spec.order,
        "max_abs": found.largest / unscale,
        "nan": sum(found.nan),
        "inf": sum(found.inf),
        "zeros": sum((after or found).zeros),
    }


def loss_warnings(selected: Sequence[Selected], written: Measurement, remedy: str = "") -> list[Problem]:
    """Warn if more than 0.1 % of the values other than 0 became 0 or subnormal in the tensors that were written.

    The remedy has a place for a type that holds them; without one, it is the option for the type of new files.
    """
    zeros, subnormals = sum(written.new_zeros), max(0, sum(written.new_subnormals))
    nonzero = sum(tensor.elements for _, tensor in selected) - sum(written.zeros) + zeros
    if (zeros + subnormals) * _LOSSES <= nonzero:
        return []
    losses = zip(selected, written.new_zeros, written.new_subnormals, strict=True)
    dtypes = sorted({entry.tensor.dtype for entry, zeros, subnormals in losses if zeros or subnormals > 0})
    message = f"of {number_of(nonzero, 'value')} other than 0, {zeros:,} became 0 and {subnormals:,} more than before "
    message += f"are subnormal: too small for {' and '.join(dtypes)}"
    # F32 has no smaller exponents than BF16.
    wider = "F64" if {"F32", "BF16", "F64"} & set(dtypes) else "F32"
    outputs = option("output"), option("output_dir")
    hint = remedy.format(wider) or say("use {} with {} or {} to keep them", option("dtype", wider), *outputs)
    return [Problem("underflow", message, hint=None if dtypes == ["F64"] else hint)]


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
    problems = []
    for number, one in enumerate(changed):
        count = written.nan[number] + written.inf[number]
        if count:
            what = f"{number_of(count, 'result')} {'overflows' if count == 1 else 'overflow'} {one.tensor.dtype}"
            message = f"{what}, the first at index {written.first_nonfinite[number]}"
            problems.append(Problem("overflow", message, str(one.shard.path), one.tensor.name))
    return problems
