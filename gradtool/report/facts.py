"""What is printed of a result, and in which order, whatever the format."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gradtool.report.messages import printable

if TYPE_CHECKING:
    from gradtool.ops.doctor import DoctorResult
    from gradtool.ops.recover import RecoverResult
    from gradtool.ops.results import CallFacts

    Result = CallFacts | DoctorResult | RecoverResult

# The facts that several results have, in the order of the output: those of the output, then those of the call.
_SHARED = (
    "dry_run", "files_written", "bytes_written", "warnings",
    "files", "tensors", "elements", "bytes", "backend", "backend_why", "threads", "engine",
    "workers", "hosts", "retries", "seconds", "timings",
)  # fmt: skip
# What is printed below the headline, unless all is asked for.
_BRIEF = ("nan", "inf", "zeros", "files", "tensors", "elements", "bytes", "files_written", "bytes_written", "seconds")


def data_of(result: Result) -> dict[str, Any]:
    """The fields of a result for JSON: what users call for, its other facts, those that others have too, its rows."""
    data = asdict(result)
    data.pop("problems", None)
    if "warnings" in data:
        data["warnings"] = [known_of(one) for one in data["warnings"]]
    shared = [key for key in _SHARED if key in data]
    first = [key for key in ("wrote", *result.headline) if key in data]
    own = [key for key in data if key not in (*first, *_SHARED) and not is_rows(key)]
    exact: dict[str, Any] = _exact({key: data[key] for key in (*first, *own, *shared, *filter(is_rows, data))})
    return exact


def known_of(problem: dict[str, Any]) -> dict[str, Any]:
    """The fields of an error or a warning that say something."""
    return {key: value for key, value in problem.items() if value is not None}


def is_rows(key: str) -> bool:
    """Whether a field has one row for each tensor, layer, or whatever follows `per_`."""
    return key.startswith("per_")


def facts_of(result: Result, data: dict[str, Any], *, verbose: bool) -> dict[str, Any]:
    """The facts to print: those that users call for first, then what was read and how long it took; or all.

    What was written, warnings and rows are not among them.
    """
    if verbose:
        flat = data | data.get("timings", {})
        keys = [key for key in flat if key not in {"wrote", "warnings", "timings"} and not is_rows(key)]
    else:
        flat = data
        keys = [*result.headline, *(key for key in _BRIEF if key in data)]
        keys += ["dry_run"] if data.get("dry_run") else []
    return {key: flat[key] for key in keys if flat[key] is not None}


def field(value: Any) -> str:
    """A value as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "x".join(map(str, value)) or "scalar"
    return repr(value) if isinstance(value, float) else printable(str(value))


def _exact(value: Any) -> Any:
    """The value with NaN and Inf, which JSON does not have, as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    return value
