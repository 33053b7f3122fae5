"""Paths in less room on a terminal: what all of them share goes first, so that what differs remains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len, chop_cells

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# A path has this much room, unless less shows what differs; and this much before columns with one value have any.
_SHORTEST, _LONGEST_NAME = 24, 32
_SEPARATORS = "/._-= "
# How much of a text that is still too long may be its end; the first that keeps most texts apart is used.
_TAILS = (2 / 3, 1.0, 0.5, 0.0, 5 / 6, 1 / 3)


def shortened_paths(paths: Sequence[str], width: int) -> list[str]:
    """Return paths no wider than that: without their shared folders, then shared end, then shared beginning.

    If that is not enough, the middle is left out, where possible so that different paths remain different.
    """
    distinct = list(dict.fromkeys(paths))
    forms = list(_forms(distinct))
    texts = next((form for form in forms if _width(form) <= width), None)
    if texts is None:
        cuts = ([middle(text, width, tail) for text in forms[-2]] for tail in _TAILS)
        texts = max(cuts, key=lambda cut: len(set(cut)))
    return list(map(dict(zip(distinct, texts, strict=True)).__getitem__, paths))


def least_width(paths: Sequence[str], *, with_names: bool = False) -> int:
    """Return the room that paths need, within reason, to show what differs; `with_names`, to show how names begin."""
    forms = list(_forms(list(dict.fromkeys(paths))))
    return min(_LONGEST_NAME, _width(forms[2])) if with_names else min(_SHORTEST, *map(_width, forms[:-1]))


def middle(text: str, width: int, tail: float = _TAILS[0]) -> str:
    """Leave out the middle of text that is wider; more remains of its end, which tells files apart."""
    if cell_len(text) <= width:
        return text
    end = int(max(0, width - 1) * tail)
    head = chop_cells(text, width - 1 - end)[0] if end < width - 1 else ""
    return head + "…" + (chop_cells(text[::-1], end)[0][::-1] if end else "")


def _forms(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yield the paths, and less and less of them; whole words, up to the last form."""
    yield list(paths)
    prefix = _shared(paths) if len(paths) > 1 else paths[0][: paths[0].rfind("/") + 1]
    suffix = _shared([path[len(prefix) :][::-1] for path in paths])[::-1] if len(paths) > 1 else ""
    folders = prefix.rfind("/") + 1
    begin = max(map(prefix.rfind, _SEPARATORS)) + 1
    end = next((len(suffix) - at for at, letter in enumerate(suffix) if letter in _SEPARATORS), 0)
    for cut in ((folders, 0), (folders, end), (begin, end), (len(prefix), len(suffix))):
        yield [_without(path, *cut) for path in paths]


def _shared(texts: Sequence[str]) -> str:
    """Return the beginning that texts share."""
    first, last = min(texts), max(texts)
    return first[: next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def _without(path: str, head: int, tail: int) -> str:
    """Leave out so many characters at both ends; the path goes on at a folder, or in the middle of a name."""
    begin = head - 1 if path[:head].endswith("/") else head
    core = path[begin : len(path) - tail]
    return ("…" if begin > 0 else "") + core + ("…" if tail and core else "")


def _width(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts))
