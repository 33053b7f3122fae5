"""What is said of paths that lead nowhere, files named twice and patterns that match nothing, and what may be meant.

Imported only once there is such an error.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import string
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import NO_SUCH_FILE, NO_SUCH_FOLDER, BadInputError, Problem
from gradtool.store.format.filetypes import not_a_list_error
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.paths import EXPAND, UNEXPANDED, url_problem
from gradtool.wording import Text, Wording, option, say

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gradtool.store.format.paths import PathList

    # What is wrong, and perhaps what to do.
    Explanation = tuple[str, str | None]

# Of a folder, no more names are looked at, and no more are compared.
_MAX_LISTED = 10_000
_MAX_COMPARED = 2_000
# From 0 to 1: lower, and names that have nothing to do with each other are close; above all those with one suffix.
_LIKENESS = 0.75
_LIKENESS_OF_ALL = 0.95
_QUOTES = "'\"`\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"
_SUFFIXES = (INDEX_SUFFIX, ".safetensors")
_AS_REGEX = {"*": ".*", "?": "."}


class NamedPath(NamedTuple):
    """A path as it was given: as an argument, or as an entry of a list, numbered from 1."""

    path: str
    listed: PathList | None = None
    entry: int = 0

    @classmethod
    def from_call(cls, paths: Sequence[str | os.PathLike[str]], listed: PathList | None, number: int) -> NamedPath:
        """Return the path of a call with a number, from 0; the last paths are those of the list, if there is one."""
        path = os.fspath(paths[number])
        entry = 0 if listed is None else number - len(paths) + len(listed.paths) + 1
        return cls(path, listed, entry) if entry > 0 else cls(path)

    def __str__(self) -> str:
        """Say what the path is, and where it was given."""
        is_folder = os.path.isdir(self.path)  # noqa: PTH112 - Path's own raises without permission
        kind = "folder" if is_folder else "index" if self.path.endswith(INDEX_SUFFIX) else "path"
        return f"the {kind} {self.path}{self._place}"

    @property
    def _place(self) -> str:
        return "" if self.listed is None else f" (entry {self.entry:,} of {self.listed.where})"

    def explained(self, error: BadInputError) -> BadInputError | None:
        """Return the same error with its reason and a hint, if the path leads nowhere or its list is no list."""
        if self.listed is not None:
            not_a_list = not_a_list_error(self.listed.where, self.listed.head)
            if not_a_list is not None:
                return not_a_list
        (problem,) = error.problems
        if problem.message not in (NO_SUCH_FILE, NO_SUCH_FOLDER) or problem.file is None:
            return None
        is_own = problem.file in (self.path, str(Path(self.path)))
        explain = no_such_file if problem.message == NO_SUCH_FILE else no_such_folder
        explained = explain(self.path if is_own else problem.file)
        if is_own:
            explained = replace(explained, message=say("{}{}", explained.message, self._place))
        return BadInputError.from_problems([explained])


def named_twice_error(file: str, named: NamedPath, other: str, other_named: NamedPath) -> BadInputError:
    """Return the error for a file that two paths of a call lead to, one of them perhaps by another name."""
    same = "" if file == other else f"is the same file as {other} and "
    by = f"both times by {named}" if str(named) == str(other_named) else f"by {other_named} and by {named}"
    return BadInputError(f"{same}is named twice: {by}", file=file, code="duplicate-file", hint="name each file once")


def no_such_file(path: str) -> Problem:
    """Say what is wrong with a path that does not exist, and what to name instead if that can be guessed."""
    return url_problem(path) or _missing(path, path, NO_SUCH_FILE)


def no_such_folder(path: str) -> Problem:
    """Say the same of a path that should be that of a folder."""
    name = path.rstrip(os.sep) or path
    if os.path.exists(name) and not os.path.isdir(name):  # noqa: PTH110, PTH112 - Path's own raise without permission
        hint = "remove the slash at the end" if name != path else None
        return Problem("missing-file", f"{NO_SUCH_FOLDER}, but a file of that name", path, hint=hint)
    return url_problem(path) or _missing(path, name, NO_SUCH_FOLDER)


def _missing(file: str, path: str, what: str) -> Problem:
    explained = _broken_link(path)
    explained = explained or _misspelled(path, what) or _unexpanded(path, what) or _missing_folder(path, what)
    message, hint = explained or (what, _suggestion(path))
    return Problem("missing-file", message, file, hint=hint)


def _broken_link(path: str) -> Explanation | None:
    try:
        target = os.readlink(path)  # noqa: PTH115 - a Path drops what is odd
    except (OSError, ValueError):
        return None
    return f"is a symbolic link to {target}, which does not exist", "restore that file or correct the link"


def _misspelled(path: str, what: str) -> Explanation | None:
    """Explain a path that exists without the quotes or white space around it, or in another notation."""
    bare = path.strip(string.whitespace)
    unquoted = bare.strip(_QUOTES + string.whitespace)
    for other, hint in (
        (path.removesuffix("\r"), "remove the carriage return, which ends lines on Windows, with tr -d '\\r'"),
        (bare, "remove the white space around the name"),
        (unquoted, "remove the quotes that are part of the name"),
        (path.replace("\\", "/"), "separate folders by /"),
    ):
        if other not in ("", path) and os.path.lexists(other):
            return f"{what}, but {other} exists", hint
    return None


def _unexpanded(path: str, what: str) -> Explanation | None:
    """Explain a path with a tilde or a pattern that the shell did not replace."""
    if path.startswith("~") and os.sep in path:
        return say("{}: {}", what, UNEXPANDED), EXPAND
    if not re.search(r"[*?\[]", path):
        return None
    folder, pattern = os.path.split(path)
    if any(fnmatch.fnmatchcase(name, pattern) for name in _listed(folder)):
        hint = Text("use glob.glob", "remove the quotes around it")
        why = Wording("the shell expands patterns, and gradtool does not", "patterns are not expanded")
        return say("{}: {}", what, why), hint
    return (f"{what}: nothing matches the pattern", None) if re.search(r"[*?]", path) else None


def _missing_folder(path: str, what: str) -> Explanation | None:
    """Explain a path whose folder does not exist."""
    missing = above = os.path.dirname(path.rstrip(os.sep))  # noqa: PTH120 - a Path drops what is odd
    while above and not os.path.isdir(above):  # noqa: PTH112 - Path's own raises without permission
        missing, above = above, os.path.dirname(above)  # noqa: PTH120
    if missing == above:
        return None
    if os.path.lexists(missing):
        why, hint = _broken_link(missing) or ("is not a folder", None)
        return f"{what}: {missing} {why}", hint
    return f"{what}: there is no folder {missing}", _suggestion(missing)


def _suggestion(path: str) -> str | None:
    folder, name = os.path.split(path)
    close = _closest(name, _listed(folder))
    return f"did you mean {os.path.join(folder, close)}?" if close else None  # noqa: PTH118 - as it was typed


def _closest(name: str, names: Iterator[str]) -> str | None:
    """Find the name that is most like another; if they differ in numbers alone, it is another shard or rank."""
    candidates = [other for other in names if other != name and not _differ_in_numbers(other, name)]
    for key, likeness in ((str.lower, _LIKENESS_OF_ALL), (_stem, _LIKENESS)):
        wanted = key(name)
        by_key = {
            key(other): other for other in candidates if abs(len(key(other)) - len(wanted)) <= 1 + len(wanted) // 4
        }
        close = difflib.get_close_matches(wanted, islice(by_key, _MAX_COMPARED), n=1, cutoff=likeness)
        if close:
            return by_key[close[0]]
    return None


def _differ_in_numbers(a: str, b: str) -> bool:
    a, b = _stem(a), _stem(b)
    return a != b and re.sub(r"\d+", "0", a) == re.sub(r"\d+", "0", b)


def _stem(name: str) -> str:
    """Remove the suffix that many names share, which would make all of them alike."""
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name.lower()


def _listed(folder: str) -> Iterator[str]:
    """List the names in a folder; of many, some."""
    try:
        with os.scandir(folder or ".") as entries:
            yield from (entry.name for entry in islice(entries, _MAX_LISTED))
    except (OSError, ValueError):
        return


def shell_pattern_hint(name: str, pattern: str, names: Iterable[str] | None = None) -> str | None:
    """Say what to give to an option instead, if a pattern looks like a glob; of the names, it must then match one."""
    # The pattern is not all that this option takes.
    if name == "map" or not any(wildcard in pattern for wildcard in _AS_REGEX):
        return None
    regex = "".join(_AS_REGEX.get(part) or re.escape(part) for part in re.sub(r"\*+", "*", pattern))
    # As fnmatch has it, matching takes no long time, whatever the pattern.
    if regex == pattern or not (names is None or any(map(re.compile(_anywhere(pattern)).match, names))):
        return None
    return say("if it is a shell pattern, write {}", option(name, regex))


def _anywhere(pattern: str) -> str:
    with warnings.catch_warnings(action="ignore"):
        return fnmatch.translate(f"*{pattern}*")
