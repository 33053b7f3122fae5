"""The fields that the results of all operations share, and the problems and warnings that follow from values."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from gradtool.errors import Problem, number_of, option, say

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from gradtool.ops.passes import Measurement
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.channel import Clock

# The fields of a result that are not nested when it is printed.
SUMMARIES = ("call", "output")
# The fields that several results have, in the order of the output: those of the output, then those of the call.
_SHARED = (
    "dry_run", "already_done", "files_written", "bytes_written", "warnings",
    "files", "tensors", "elements", "bytes", "backend", "backend_why", "threads", "engine",
    "workers", "hosts", "retries", "seconds", "timings",
)  # fmt: skip
# One value in so many may become 0 or subnormal without a warning.
_LOSSES = 1000


class AnyResult:
    """A result of any operation."""

    # The fields that users ask for first: printed first, and alone in the repr.
    headline: ClassVar[tuple[str, ...]] = ()

    @property
    def first_fields(self) -> tuple[str, ...]:
        """The headline; of a call that found its ID, only that it did nothing."""
        return ("already_done",) if getattr(self, "already_done", False) else self.headline

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON has them under `data`: numbers, strings, lists and dicts. NaN and Inf are floats.

        In messages, options are spelled as in Python.
        """
        return {key: plain(value, _python_leaf) for key, value in fields_of(self).items()}


def fields_of(result: AnyResult, *, with_rows: bool = True) -> dict[str, Any]:
    """Return the fields of a result, in the order of JSON."""
    values = flat(result)
    return {key: values[key] for key in ordered(values, result.headline) if with_rows or not is_rows(key)}


def ordered(names: Collection[str], headline: Sequence[str]) -> list[str]:
    """Return the names of fields in order: the headline, other fields, those shared with other results, and rows."""
    more = [key for key in names if key not in _SHARED and key != "problems" and not is_rows(key)]
    keys = dict.fromkeys(("wrote", *headline, *more, *_SHARED, *filter(is_rows, names)))
    return [key for key in keys if key in names]


def flat(result: AnyResult) -> dict[str, Any]:
    """Return the fields of a result, with those of its summaries among them."""
    values = dict(vars(result))
    for name in SUMMARIES:
        values |= vars(values.pop(name)) if name in values else {}
    return values


def is_rows(key: str) -> bool:
    """Check whether a field has a row for each tensor, layer, or whatever follows `per_`, or for each exponent."""
    return key.startswith("per_") or key == "histogram"


def _python_leaf(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


def plain(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a value as lists, dicts and what `leaf` makes of all else; of a problem, only the fields that are set."""
    if isinstance(value, Problem):
        value = {key: text for key, text in vars(value).items() if text is not None}
    elif is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {key: plain(item, leaf) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, leaf) for item in value]
    return leaf(value)


@dataclass(frozen=True)
class Timings:
    """Seconds of work, and the bytes over them; a phase is the mean over the threads that worked.

    `total_gb_per_s` counts the bytes that all passes went over, as a progress bar does, and not what was written.
    `commit_seconds` is the time to sync new files and to put them in place.
    """

    read_bytes: int
    read_seconds: float
    read_gb_per_s: float
    compute_seconds: float
    compute_gb_per_s: float
    write_seconds: float
    write_gb_per_s: float
    commit_seconds: float
    total_seconds: float
    total_gb_per_s: float

    @classmethod
    def from_clock(cls, clock: Clock, commit: float, total: float) -> Self:
        """Return the timings of a call that took so many seconds in all, and these to commit."""
        return cls(
            read_bytes=clock.read_bytes,
            read_seconds=clock.read,
            read_gb_per_s=_speed(clock.read_bytes, clock.read),
            compute_seconds=clock.compute,
            compute_gb_per_s=_speed(clock.read_bytes, clock.compute),
            write_seconds=clock.write,
            write_gb_per_s=_speed(clock.written_bytes, clock.write),
            commit_seconds=commit,
            total_seconds=total,
            total_gb_per_s=_speed(clock.done_bytes, total),
        )


def _speed(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9 if seconds else 0.0


@dataclass(frozen=True)
class CallSummary:
    """The summary of a call: how much it was about, what did it, and how long it took.

    `threads` counts those that got work; with workers on other machines, those of a single worker. `workers` and
    `hosts` count processes and machines, and `retries` waits for late files and tasks that were moved.
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
    """A summary of what a call wrote. `wrote` are the paths that were written, as the caller named them."""

    wrote: tuple[str, ...]
    dry_run: bool
    files_written: int
    bytes_written: int


# No object is made of the bases of results, so they need no methods but those that keep them frozen: each method that a
# dataclass generates costs 0.1 ms of every start.
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Result(AnyResult):
    """The result of an operation: a summary of the call, which JSON does not nest, and fields of its own."""

    call: CallSummary

    def __repr__(self) -> str:
        """Return the result in one line; rows are only counted."""
        values = vars(self.call) | vars(self)
        shown = [f"{key}={values[key]!r}" for key in (*self.first_fields, "files", "tensors")]
        rows = [(key, len(value)) for key, value in vars(self).items() if key.startswith("per_") and value]
        shown += [f"{key}=<{number_of(count, 'row')}>" for key, count in rows]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, init=False, eq=False, repr=False)
class StatisticsResult(Result):
    """A result with statistics of its tensors, taken as one vector; `max_abs` leaves NaN out."""

    norm_type: float
    max_abs: float
    nan: int
    inf: int
    zeros: int


@dataclass(frozen=True, init=False, eq=False, repr=False)
class OnceResult(Result):
    """A result with statistics of its tensors, which are None if an earlier call with the same ID did the work.

    Then `already_done` is True, nothing was read but headers, and nothing was written.
    """

    norm_type: float
    max_abs: float | None = None
    nan: int | None = None
    inf: int | None = None
    zeros: int | None = None


def loss_warnings(selected: Sequence[Selected], after: Measurement, remedy: str = "") -> list[Problem]:
    """Warn if more than 0.1 % of the values other than 0 became 0 or subnormal in the tensors that were written.

    The remedy has a place for a type that holds them; without a remedy, it is the option for the type of new files.
    """
    zeros, subnormals = sum(after.new_zeros), max(0, sum(after.new_subnormals))
    nonzero = sum(tensor.elements for _, tensor in selected) - sum(after.zeros) + zeros
    if (zeros + subnormals) * _LOSSES <= nonzero:
        return []
    losses = zip(selected, after.new_zeros, after.new_subnormals, strict=True)
    dtypes = sorted({tensor.dtype for (_, tensor), zeros, subnormals in losses if zeros or subnormals > 0})
    message = f"of {number_of(nonzero, 'value')} other than 0, {zeros:,} became 0 and {subnormals:,} more than before "
    message += f"are subnormal: too small for {' and '.join(dtypes)}"
    # F32 has no smaller exponents than BF16.
    wider = "F64" if {"F32", "BF16", "F64"} & set(dtypes) else "F32"
    outputs = option("output"), option("output_dir")
    hint = remedy.format(wider) or say("use {} with {} or {} to keep them", option("dtype", wider), *outputs)
    return [Problem("underflow", message, hint=None if dtypes == ["F64"] else hint)]


def nonfinite_problems(selected: Sequence[Selected], sums: Measurement) -> list[Problem]:
    """Return a problem for each tensor that contains NaN or Inf: how many, and where the first is."""
    problems = []
    for (shard, tensor), nan, inf, first in zip(selected, sums.nan, sums.inf, sums.first_nonfinite, strict=True):
        if nan or inf:
            message = f"{nan:,} NaN, {inf:,} Inf, the first at {tensor.index_of(first)}"
            problems.append(Problem("nonfinite", message, shard.name, tensor.name, index=first))
    return problems


def overflow_problems(selected: Sequence[Selected], after: Measurement) -> list[Problem]:
    """Return a problem for each tensor whose results overflow its type."""
    problems = []
    for (shard, tensor), nan, inf, first in zip(selected, after.nan, after.inf, after.first_nonfinite, strict=True):
        if nan or inf:
            verb = "overflows" if nan + inf == 1 else "overflow"
            message = f"{number_of(nan + inf, 'result')} {verb} {tensor.dtype}, the first at {tensor.index_of(first)}"
            problems.append(Problem("overflow", message, shard.name, tensor.name, index=first))
    return problems
