"""What is printed of a result, and in which order, whatever the format."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from gradtool.errors import Problem, as_command
from gradtool.report.messages import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.check import CheckResult
    from gradtool.ops.doctor import DoctorResult
    from gradtool.ops.info import InfoResult
    from gradtool.ops.recover import RecoverResult
    from gradtool.ops.results import Result as OperationResult

    Result = OperationResult | CheckResult | DoctorResult | InfoResult | RecoverResult

# The facts that several results have, in the order of the output: those of the output, then those of the call.
_SHARED = (
    "dry_run", "files_written", "bytes_written", "warnings",
    "files", "tensors", "elements", "bytes", "backend", "backend_why", "threads", "engine",
    "workers", "hosts", "retries", "seconds", "timings",
)  # fmt: skip
# The fields of a result that JSON does not nest.
SUMMARIES = ("call", "output")
# The rows that a terminal does not show: errors and warnings say the same in words.
TOLD = ("per_finding",)
# What is printed below the headline, unless all is asked for.
_BRIEF = (
    "units", "units_clipped", "limit", "steps", "nan", "inf", "zeros", "zeros_before",
    "files", "tensors", "elements", "bytes", "files_written", "bytes_written", "seconds",
)  # fmt: skip

# Numbers that JSON does not have.
NONFINITE = ("NaN", "Infinity", "-Infinity")


def data_of(result: Result) -> dict[str, Any]:
    """The fields of a result for JSON: what users call for, its other facts, those that others have too, its rows."""
    return facts_data_of(result) | {key: plain(rows) for key, rows in rows_of(result).items()}


def facts_data_of(result: Result) -> dict[str, Any]:
    """The same without the rows."""
    values = {name: value for name, value in flat(result).items() if name != "problems" and not is_rows(name)}
    first = [key for key in ("wrote", *result.headline) if key in values]
    own = [key for key in values if key not in (*first, *_SHARED)]
    shared = [key for key in _SHARED if key in values and key not in first]
    return {key: plain(values[key]) for key in (*first, *own, *shared)}


def flat(result: Result) -> dict[str, Any]:
    """Return the fields of a result, with those of its summaries among them."""
    values = dict(vars(result))
    for name in SUMMARIES:
        values |= vars(values.pop(name)) if name in values else {}
    return values


def rows_of(result: Result) -> dict[str, Sequence[Any]]:
    """The rows of a result, by the keys that they have in JSON."""
    return {name: value for name, value in vars(result).items() if is_rows(name)}


def kind_of(key: str) -> str:
    """What each row of a key is about."""
    return key.removeprefix("per_")


def is_rows(key: str) -> bool:
    """Whether a field has one row for each tensor, layer, or whatever follows `per_`, or for each exponent."""
    return key.startswith("per_") or key == "histogram"


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
    return {key: flat[key] for key in dict.fromkeys(keys) if flat[key] is not None}


def field(value: Any) -> str:
    """A value as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "x".join(map(str, value)) or "scalar"
    return repr(value) if isinstance(value, float) else printable(str(value))


def short(value: Any) -> str:
    """A value as text for people, who compare it with its neighbours."""
    return f"{value:.6g}" if isinstance(value, float) else field(value)


def plain(value: Any) -> Any:
    """A value as JSON has it: NaN and Inf are strings; of an error or a warning, the fields that say something."""
    if isinstance(value, float) and not math.isfinite(value):
        return NONFINITE[0] if math.isnan(value) else NONFINITE[1] if value > 0 else NONFINITE[2]
    if isinstance(value, Problem):
        value = {key: text for key, text in vars(value).items() if text is not None}
    if isinstance(value, str):
        return as_command(value)
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
