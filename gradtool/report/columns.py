"""The columns of a table on a terminal: which ones it has room for, and what stands out in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len

from gradtool.report.paths import least_width

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    # The texts of a table, by the keys of its columns.
    Columns = dict[str, list[str]]

# The key of the column of bars, which needs no heading.
BARS = ""
# Between two columns.
_GAP = 3
# The columns to leave out where there is no room, the first one first. The others always have room: those that a
# command is for.
_LEFT_OUT = {
    "accumulate": ("coef", "missing", "extra", "distance", "weight", BARS, "inf", "nan", "taken", "norm"),
    "diff": (
        "norm_a", "norm_b", "nonfinite_both", "differing_bits", "max_rel_diff_index", "max_ulp_index",
        "max_abs_diff_index", "dtype_b", "dtype_a", "shape", "max_rel_diff", "max_ulp", "file", "cosine",
        "nonfinite_b", "nonfinite_a", "max_abs_diff", "not_close", "differing",
    ),
    "info": ("file", "bytes", "elements", "tensors", "dtype"),
}  # fmt: skip
_OTHERS_LEFT_OUT = (
    "gb_per_s", "seconds", "columns", "rows", "zeros", "bytes", "elements", "tensors", "files", "pid", BARS,
    "shape", "dtype", "max_abs", "subnormal", "file", "saturated", "inf", "nan", "clipped", "coef",
)  # fmt: skip
_NOTHING = {"0", "-", "no", ""}
# The colours of values other than these, and of some values.
_COLOURS = {
    **dict.fromkeys(("nan", "inf", "nonfinite_a", "nonfinite_b", "not_close", "faults", "failed"), "red"),
    **dict.fromkeys(("saturated", "clipped", "units_clipped", "skipped", "screened", "unmatched"), "yellow"),
}
_COLOURS_OF_VALUES = {("sound", "no"): "red", ("taken", "no"): "yellow"}


class Fit(NamedTuple):
    """The columns that there is room for, those left out that have one value in all rows, and the others."""

    columns: Columns
    same: dict[str, str]
    left_out: list[str]


def fit(columns: Columns, command: str, width: int) -> Fit:
    """Leave out columns until there is room for the rest, or none can go; those without values, and a file of all rows.

    Columns that say nothing go first, then those with one value, then those that matter less to the command.
    """
    same, ranks = _same(columns), {key: rank for rank, key in enumerate(_LEFT_OUT.get(command, _OTHERS_LEFT_OUT))}
    gone = {key for key, text in same.items() if key == "file" or text == "-"}
    droppable = [key for key in columns if key in same or (key in ranks and key != next(iter(columns)))]
    for key in sorted(droppable, key=lambda key: (_tells(columns[key]), key not in same, ranks.get(key, len(ranks)))):
        # Names of files matter more than what all rows have.
        if needed(_without(columns, gone), with_names=key in same) > width:
            gone.add(key)
    return _fit(columns, same, gone)


def fit_blocks(columns: Columns) -> Fit:
    """Leave out the columns that have one value in all rows, for rows that take a few lines each."""
    same = _same(columns)
    return _fit(columns, same, same.keys())


def _fit(columns: Columns, same: dict[str, str], gone: Collection[str]) -> Fit:
    named = [key for key in columns if key in gone and key != BARS]
    told = {key: same[key] for key in named if same.get(key, "-") != "-"}
    return Fit(_without(columns, gone), told, [key for key in named if key not in same])


def _without(columns: Columns, gone: Collection[str]) -> Columns:
    return {key: texts for key, texts in columns.items() if key not in gone}


def _tells(texts: Sequence[str]) -> bool:
    return not set(texts) <= _NOTHING


def _same(columns: Columns) -> dict[str, str]:
    """Return the value of each column that has one value in all of several rows; the first column names the rows."""
    keys = [key for key in list(columns)[1:] if len(columns[key]) > 1 and len(set(columns[key])) == 1]
    return {key: columns[key][0] for key in keys}


def needed(columns: Columns, *, with_names: bool = False) -> int:
    """Return the columns of the terminal that a table takes, with paths as short as they may be, or as `with_names`."""
    widths = [needed_by(key, texts, with_names=with_names) for key, texts in columns.items()]
    return sum(widths) + _GAP * (len(widths) - 1)


def needed_by(key: str, texts: Sequence[str], *, with_names: bool = False) -> int:
    """Return the columns of the terminal that a column takes, without the gap beside it."""
    width = max(map(cell_len, [key, *texts]))
    is_path = key == "file" and len(texts) > 0
    return min(width, max(cell_len(key), least_width(texts, with_names=with_names))) if is_path else width


def colour_of(key: str, text: str) -> str:
    """Return the colour of a value: what is wrong is red, what was changed or left out yellow, all else plain."""
    if text in {"NaN", "Infinity", "-Infinity"}:
        return "red"
    if text not in _NOTHING and key in _COLOURS:
        return _COLOURS[key]
    return _COLOURS_OF_VALUES.get((key, text), "")
