"""What `diff` says first on a terminal: how much differs, in sentences, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradtool.errors import number_of
from gradtool.report.fields import as_cell, as_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    Row = dict[str, Any]

_MAXIMA = ("max_abs_diff", "max_rel_diff", "max_ulp")
_SIDES = ("a", "b")
# The fields that are part of a sentence, or of the line of another field.
TOLD = {
    "identical", "differing", "rel_l2", "within_permille", "first_differing_tensor", "first_differing_index",
    "unmatched",
    *_MAXIMA, *(f"{name}_{end}" for name in _MAXIMA for end in ("tensor", "index", *_SIDES)),
}  # fmt: skip


def verdict_of(data: Row) -> Iterator[list[str]]:
    """Yield lines, as words that stay whole: how many elements differ, and how many are within a tolerance."""
    if "identical" not in data:
        return
    differing, elements, bits = data["differing"], data["elements"], data["differing_bits"]
    words: list[str] = []
    if differing:
        verb = "differs" if differing == 1 else "differ"
        text = f"{differing:,} of {number_of(elements, 'element')} {verb},"
        words = [f"rel_l2 {as_cell('rel_l2', data['rel_l2'])}"]
    elif bits:
        text = f"equal: all {number_of(elements, 'element')} have the same values; the bits of {bits:,} differ"
    else:
        text = f"identical: all {number_of(elements, 'element')} have the same bits"
    words = [*text.split(" "), *words]
    if data["unmatched"]:
        words = [*words[:-1], f"{words[-1]};", number_of(data["unmatched"], "tensor"), "not", "compared"]
    yield words
    if not differing:
        return
    for row in data["per_tolerance"]:
        tolerance = f"within rtol {row['rtol']:g} and atol {row['atol']:g} in {row['dtype']}:"
        if row["usual"]:
            tolerance = f"within the usual tolerance of {row['dtype']}:"
        yield [*tolerance.split(" "), _percentage(row["close"], row["elements"])]
    yield ["within", "0.1 %", "of", "b:", _percentage(data["within_permille"], elements)]


def places_of(data: Row) -> Iterator[tuple[str, list[str]]]:
    """Yield the first difference and the largest ones, each with its tensor, its index and the values there."""
    if not data.get("differing"):
        return
    yield "first difference", [f"{as_text(data['first_differing_tensor'])} [{data['first_differing_index']}]"]
    for name in _MAXIMA:
        if data[f"{name}_index"] is not None:
            values = [f"{side} {as_cell(side, data[f'{name}_{side}'])}" for side in _SIDES]
            place = f"{as_text(data[f'{name}_tensor'])} [{data[f'{name}_index']}]"
            yield name.replace("_", " "), [as_cell(name, data[name]), *values, place]


def _percentage(part: int, whole: int) -> str:
    """Return a part in percent, rounded down, with as many digits as it takes to tell it from the whole."""
    if part == whole:
        return "100 %"
    digits = 2
    while (whole - part) * 10 ** (digits + 2) < whole:
        digits += 1
    units, fraction = divmod(part * 10 ** (digits + 2) // whole, 10**digits)
    return f"{units}.{fraction:0{digits}} %"
