"""The fields of a result that are printed, and in which order, whatever the format."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from gradtool.errors import Problem, as_command, size_of
from gradtool.report.messages import printable

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gradtool.ops.check import CheckResult
    from gradtool.ops.doctor import DoctorResult
    from gradtool.ops.info import InfoResult
    from gradtool.ops.recover import RecoverResult
    from gradtool.ops.results import Result as OperationResult

    Result = OperationResult | CheckResult | DoctorResult | InfoResult | RecoverResult

# The fields that several results have, in the order of the output: those of the output, then those of the call.
_SHARED = (
    "dry_run", "files_written", "bytes_written", "warnings",
    "files", "tensors", "elements", "bytes", "backend", "backend_why", "threads", "engine",
    "workers", "hosts", "retries", "seconds", "timings",
)  # fmt: skip
# The fields of a result that JSON does not nest.
SUMMARIES = ("call", "output")
# The fields printed below the headline without --verbose.
_BRIEF = (
    "units", "units_clipped", "limit", "steps", "nan", "inf", "zeros", "zeros_before",
    "files", "tensors", "elements", "bytes", "files_written", "bytes_written", "seconds",
)  # fmt: skip

# Numbers that JSON does not have.
NONFINITE = ("NaN", "Infinity", "-Infinity")


def data_of(result: Result, *, with_rows: bool = True) -> dict[str, Any]:
    """Return the fields of a result for JSON: the headline, its other fields, those shared with others, its rows."""
    values = flat(result)
    return {key: as_json(values[key]) for key in ordered(values, result.headline) if with_rows or not is_rows(key)}


def ordered(names: Collection[str], headline: Sequence[str]) -> list[str]:
    """Return the names of fields in the order of JSON."""
    more = [key for key in names if key not in _SHARED and key != "problems" and not is_rows(key)]
    keys = dict.fromkeys(("wrote", *headline, *more, *_SHARED, *filter(is_rows, names)))
    return [key for key in keys if key in names]


def flat(result: Result) -> dict[str, Any]:
    """Return the fields of a result, with those of its summaries among them."""
    values = dict(vars(result))
    for name in SUMMARIES:
        values |= vars(values.pop(name)) if name in values else {}
    return values


def is_rows(key: str) -> bool:
    """Check whether a field has a row for each tensor, layer, or whatever follows `per_`, or for each exponent."""
    return key.startswith("per_") or key == "histogram"


def kind_of(key: str) -> str:
    """Return what each row of a field is about."""
    return key.removeprefix("per_")


def summary_of(result: Result, data: dict[str, Any], *, verbose: bool) -> dict[str, Any]:
    """Return the fields to print, all of them if `verbose`; paths written, warnings and rows are printed elsewhere."""
    if verbose:
        data = data | data.get("timings", {})
        keys = [key for key in data if key not in {"wrote", "warnings", "timings"} and not is_rows(key)]
    else:
        keys = [*result.headline, *(key for key in _BRIEF if key in data)]
        keys += ["dry_run"] if data.get("dry_run") else []
    return {key: data[key] for key in keys if data[key] is not None}


def as_text(value: Any) -> str:
    """Return a value as text that reads back to the same value."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "x".join(map(str, value)) or "scalar"
    return repr(value) if isinstance(value, float) else printable(str(value))


def as_short_text(value: Any) -> str:
    """Return a value as text for people, who compare it with its neighbours."""
    return f"{value:.6g}" if isinstance(value, float) else as_text(value)


def as_cell(key: str, value: Any) -> str:
    """Return a field as text for people: counts with separators, and bytes in larger units."""
    # A factor that looks like 1 must be 1.
    if key == "coef" and value != 1 and as_short_text(value) == "1":
        return as_text(value)
    if type(value) is int and key != "pid":
        return size_of(value) if "bytes" in key.split("_") else f"{value:,}"
    return as_short_text(value)


def as_json(value: Any) -> Any:
    """Return a value for JSON: NaN and Inf are strings; of an error or a warning, only the fields that are set."""
    if isinstance(value, float) and not math.isfinite(value):
        return NONFINITE[0] if math.isnan(value) else NONFINITE[1] if value > 0 else NONFINITE[2]
    if isinstance(value, Problem):
        value = {key: text for key, text in vars(value).items() if text is not None}
    if isinstance(value, str):
        return as_command(value)
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return value
