"""Why a path leads nowhere: what is said instead of a bare "no such file". Looked into only after that was found."""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import string
from itertools import islice
from typing import TYPE_CHECKING

from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.paths import url_message

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of a folder, no more names are looked at, and no more are compared.
_MAX_LISTED = 10_000
_MAX_COMPARED = 2_000
# From 0 to 1: lower, and names that have nothing to do with each other are close; above all those with one suffix.
_LIKENESS = 0.75
_LIKENESS_OF_ALL = 0.95
_QUOTES = "'\"`\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"
_SUFFIXES = (INDEX_SUFFIX, ".safetensors")


def no_such_file(path: str) -> str:
    """What is wrong with a path that does not exist, and what to name instead if that can be guessed."""
    return (
        url_message(path)
        or _broken_link(path)
        or _misspelled(path)
        or _unexpanded(path)
        or _missing_folder(path)
        or "no such file" + _suggestion(path)
    )


def no_such_folder(path: str) -> str:
    """The same for a path that should be that of a folder."""
    name = path.rstrip(os.sep) or path
    if os.path.exists(name) and not os.path.isdir(name):  # noqa: PTH110, PTH112 - Path's own raise without permission
        return "no such folder, but a file of that name" + ("; leave out the slash at its end" if name != path else "")
    return url_message(path) or no_such_file(name).replace("no such file", "no such folder", 1)


def _broken_link(path: str) -> str | None:
    try:
        target = os.readlink(path)  # noqa: PTH115 - a Path drops what is odd
    except (OSError, ValueError):
        return None
    return f"is a symbolic link to {target}, which does not exist; restore that file or correct the link"


def _misspelled(path: str) -> str | None:
    """The message for a path that exists without the quotes or white space around it, or in another notation."""
    bare = path.strip(string.whitespace)
    unquoted = bare.strip(_QUOTES + string.whitespace)
    for other, why in (
        (path.removesuffix("\r"), "remove the carriage return, which ends lines on Windows, with tr -d '\\r'"),
        (bare, "leave out the white space around its name"),
        (unquoted, "leave out the quotes that are part of its name"),
        (path.replace("\\", "/"), "separate folders by /"),
    ):
        if other not in ("", path) and os.path.lexists(other):
            return f"no such file, but there is {other}; {why}"
    return None


def _unexpanded(path: str) -> str | None:
    """The message for a path with a tilde or a pattern that the shell did not replace."""
    if path.startswith("~") and os.sep in path:
        return "no such file; the shell did not expand the ~: leave it out of quotes, or write $HOME"
    if not re.search(r"[*?\[]", path):
        return None
    folder, pattern = os.path.split(path)
    if any(fnmatch.fnmatchcase(name, pattern) for name in _listed(folder)):
        return "no such file; patterns are expanded by the shell, not by gradtool: leave out the quotes"
    return "no such file; nothing matches the pattern" if re.search(r"[*?]", path) else None


def _missing_folder(path: str) -> str | None:
    """The message for a path whose folder does not exist."""
    missing = above = os.path.dirname(path.rstrip(os.sep))  # noqa: PTH120 - a Path drops what is odd
    while above and not os.path.isdir(above):  # noqa: PTH112 - Path's own raises without permission
        missing, above = above, os.path.dirname(above)  # noqa: PTH120
    if missing == above:
        return None
    if os.path.lexists(missing):
        return f"no such file; {missing} {_broken_link(missing) or 'is not a folder'}"
    return f"no such file; there is no folder {missing}{_suggestion(missing)}"


def _suggestion(path: str) -> str:
    folder, name = os.path.split(path)
    close = _closest(name, _listed(folder))
    return f"; did you mean {os.path.join(folder, close)}?" if close else ""  # noqa: PTH118 - as it was typed


def _closest(name: str, names: Iterator[str]) -> str | None:
    """The name that is most like another; one that differs in numbers alone is another shard or rank, and is not."""
    candidates = [one for one in names if one != name and not _differ_in_numbers(one, name)]
    for key, likeness in ((str.lower, _LIKENESS_OF_ALL), (_stem, _LIKENESS)):
        wanted = key(name)
        by_key = {key(one): one for one in candidates if abs(len(key(one)) - len(wanted)) <= 1 + len(wanted) // 4}
        close = difflib.get_close_matches(wanted, islice(by_key, _MAX_COMPARED), n=1, cutoff=likeness)
        if close:
            return by_key[close[0]]
    return None


def _differ_in_numbers(one: str, other: str) -> bool:
    one, other = _stem(one), _stem(other)
    return one != other and re.sub(r"\d+", "0", one) == re.sub(r"\d+", "0", other)


def _stem(name: str) -> str:
    """What tells a name from others: without the suffix that many share, which would make all of them alike."""
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name.lower()


def _listed(folder: str) -> Iterator[str]:
    """The names in a folder; of many, some."""
    try:
        with os.scandir(folder or ".") as entries:
            yield from (entry.name for entry in islice(entries, _MAX_LISTED))
    except (OSError, ValueError):
        return
