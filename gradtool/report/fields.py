"""The fields of a result that are printed, and in which order, whatever the format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gradtool.errors import as_command, printable, size_of
from gradtool.ops.results import fields_of, is_rows, plain

if TYPE_CHECKING:
    from gradtool.ops.results import AnyResult

# The fields printed below the headline without --verbose.
_BRIEF = (
    "units", "units_clipped", "limit", "steps", "nan", "inf", "zeros", "zeros_before",
    "files", "tensors", "elements", "bytes", "files_written", "bytes_written", "seconds",
)  # fmt: skip

# Numbers that JSON does not have.
NONFINITE = ("NaN", "Infinity", "-Infinity")


def data_of(result: AnyResult, *, with_rows: bool = True) -> dict[str, Any]:
    """Return the fields of a result for JSON, in the order of `to_dict`."""
    return {key: as_json(value) for key, value in fields_of(result, with_rows=with_rows).items()}


def kind_of(key: str) -> str:
    """Return what each row of a field is about."""
    return key.removeprefix("per_")


def summary_of(result: AnyResult, data: dict[str, Any], *, verbose: bool) -> dict[str, Any]:
    """Return the fields to print, all of them if `verbose`; paths written, warnings and rows are printed elsewhere."""
    if verbose:
        data = data | data.get("timings", {})
        keys = [key for key in data if key not in {"wrote", "warnings", "timings"} and not is_rows(key)]
    else:
        keys = [*result.first_fields, *(key for key in _BRIEF if key in data)]
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
    # What looks like 1 must be 1.
    if key in {"coef", "cosine"} and value != 1 and as_short_text(value) == "1":
        return as_text(value)
    if type(value) is int and key != "pid":
        return size_of(value) if "bytes" in key.split("_") else f"{value:,}"
    return as_short_text(value)


def as_json(value: Any) -> Any:
    """Return a value for JSON: NaN and Inf are strings, and messages are those of the command."""
    return plain(value, _json_leaf)


def _json_leaf(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return NONFINITE[0] if math.isnan(value) else NONFINITE[1] if value > 0 else NONFINITE[2]
    return as_command(value)
