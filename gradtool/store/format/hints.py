"""Explains paths that lead nowhere, files named twice and names that do not match, and guesses what was meant.

Loaded only to explain such an error.
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
from typing import TYPE_CHECKING

from gradtool.errors import NO_SUCH_FILE, NO_SUCH_FOLDER, BadInputError, Problem, Text, option, say
from gradtool.store.format.filetypes import entries_of, not_a_list_error
from gradtool.store.format.index import INDEX_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.errors import GradtoolError
    from gradtool.store.format.tensors import Shard

    # A message, and perhaps a hint.
    Explanation = tuple[str, str | None]

# Entries of a folder that are compared with a name that does not exist.
_MAX_COMPARED = 2_000
# From 0 to 1: lower, and names that have nothing to do with each other are close; above all those with one suffix.
_LIKENESS = 0.75
_LIKENESS_OF_ALL = 0.95
_QUOTES = "'\"`\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"
_AS_REGEX = {"*": ".*", "?": "."}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_DOWNLOADERS = {"s3": "aws s3 cp", "gs": "gcloud storage cp", "hf": "hf download", "http": "curl", "https": "curl -L"}
# What is wrong with a path that begins with ~/, and what to do.
_UNEXPANDED = Text("~ is not expanded", "the shell did not expand the ~")
_EXPAND = Text("use Path.expanduser", "remove the quotes around it, or write $HOME")


def url_problem(path: str) -> Problem | None:
    """Say what is wrong with a path that is a URL; None for any other path."""
    match = _URL.match(path)
    if match is None:
        return None
    scheme = match[1].lower()
    if scheme == "file":
        return Problem("missing-file", "is a URL, not a path", path, hint="remove file://")
    example = f" (such as with {_DOWNLOADERS[scheme]})" if scheme in _DOWNLOADERS else ""
    hint = f"download the file{example} or mount the storage first"
    return Problem("missing-file", "is a URL, which gradtool cannot read", path, hint=hint)


def output_problem(path: str) -> Problem | None:
    """Say what is wrong with an output whose folder the shell, or a mount, should have provided."""
    if _URL.match(path):
        hint = "name a local path and upload the result"
        return Problem("missing-file", "is a URL, which gradtool cannot write to", path, hint=hint)
    if path.partition(os.sep)[0] == "~" and not os.path.lexists("~"):
        return Problem("missing-file", say("{}", _UNEXPANDED), path, hint=_EXPAND)
    return None


def no_such_file(path: str) -> Problem:
    """Say what is wrong with a path that does not exist, and what to name instead if that can be guessed."""
    return url_problem(path) or _missing(path, path, NO_SUCH_FILE)


def no_such_folder(path: str) -> Problem:
    """Say what is wrong with a path where no folder is, and what to name instead if that can be guessed."""
    name = path.rstrip(os.sep) or path
    if os.path.exists(name) and not os.path.isdir(name):  # noqa: PTH110, PTH112 - Path's own raise without permission
        hint = "remove the slash at the end" if name != path else None
        return Problem("missing-file", f"{NO_SUCH_FOLDER}, but a file of that name", path, hint=hint)
    return url_problem(path) or _missing(path, name, NO_SUCH_FOLDER)


def _missing(file: str, path: str, fact: str) -> Problem:
    message, hint = (
        _standard_input(path, fact)
        or _broken_link(path)
        or _misspelled(path, fact)
        or _unexpanded(path, fact)
        or _missing_folder(path, fact)
        or (fact, _suggestion(path))
    )
    return Problem("missing-file", message, file, hint=hint)


def _standard_input(path: str, fact: str) -> Explanation | None:
    return (f"{fact}: gradients cannot be read from standard input", None) if path == "-" else None


def _broken_link(path: str) -> Explanation | None:
    try:
        target = os.readlink(path)  # noqa: PTH115 - a Path drops what is odd
    except (OSError, ValueError):
        return None
    return f"is a symbolic link to {target}, which does not exist", "restore that file or correct the link"


def _misspelled(path: str, fact: str) -> Explanation | None:
    """Explain a path that exists without the quotes or white space around it, or in another notation."""
    for spelling, hint in (
        (path.removesuffix("\r"), "remove the carriage return, which ends lines on Windows, with tr -d '\\r'"),
        (path.strip(), "remove the white space around the name"),
        (path.strip(string.whitespace + _QUOTES), "remove the quotes that are part of the name"),
        (path.replace("\\", "/"), "separate folders by /"),
    ):
        if spelling not in ("", path) and os.path.lexists(spelling):
            return f"{fact}, but {spelling} exists", hint
    return None


def _unexpanded(path: str, fact: str) -> Explanation | None:
    """Explain a path with a tilde or a pattern that the shell did not replace."""
    if path.startswith("~") and os.sep in path:
        return say("{}: {}", fact, _UNEXPANDED), _EXPAND
    if not re.search(r"[*?\[]", path):
        return None
    folder, pattern = os.path.split(path)
    if any(fnmatch.fnmatchcase(entry.name, pattern) for entry in entries_of(folder)):
        why = Text("patterns are not expanded", "the shell expands patterns, and gradtool does not")
        return say("{}: {}", fact, why), Text("use glob.glob", "remove the quotes around it")
    return (f"{fact}: nothing matches the pattern", None) if re.search(r"[*?]", path) else None


def _missing_folder(path: str, fact: str) -> Explanation | None:
    """Explain a path whose folder does not exist."""
    missing = above = os.path.dirname(path.rstrip(os.sep))  # noqa: PTH120 - a Path drops what is odd
    while above and not os.path.isdir(above):  # noqa: PTH112 - Path's own raises without permission
        missing, above = above, os.path.dirname(above)  # noqa: PTH120
    if missing == above:
        return None
    if os.path.lexists(missing):
        why, hint = _broken_link(missing) or ("is not a folder", None)
        return f"{fact}: {missing} {why}", hint
    return f"{fact}: there is no folder {missing}", _suggestion(missing)


def _suggestion(path: str) -> str | None:
    folder, name = os.path.split(path)
    close = _closest(name, [entry.name for entry in entries_of(folder)])
    return f"did you mean {os.path.join(folder, close)}?" if close else None  # noqa: PTH118 - as it was typed


def _closest(name: str, entries: Iterable[str]) -> str | None:
    """Return the entry that is most like a name, unless they differ in numbers alone: that is another shard or rank."""
    candidates = [entry for entry in entries if entry != name and not _differ_in_numbers(_stem(entry), _stem(name))]
    for key, likeness in ((str.lower, _LIKENESS_OF_ALL), (_stem, _LIKENESS)):
        typed = key(name)
        limit = 1 + len(typed) // 4
        by_key = {key(entry): entry for entry in candidates if abs(len(key(entry)) - len(typed)) <= limit}
        if close := difflib.get_close_matches(typed, islice(by_key, _MAX_COMPARED), n=1, cutoff=likeness):
            return by_key[close[0]]
    return None


def _differ_in_numbers(a: str, b: str) -> bool:
    return a != b and re.sub(r"\d+", "0", a) == re.sub(r"\d+", "0", b)


def _stem(name: str) -> str:
    """Remove the suffix that many names share, which would make all of them alike."""
    return name.removesuffix(INDEX_SUFFIX).removesuffix(".safetensors").lower()


def path_error(error: GradtoolError, path: str, place: str, listed: tuple[str, bytes] | None) -> GradtoolError:
    """Return the error for a path of a call: that the list it comes from is none, or why it leads nowhere.

    Of that list, `listed` are the name and the first bytes.
    """
    if not isinstance(error, BadInputError):
        return error
    if listed is not None and (not_a_list := not_a_list_error(*listed)) is not None:
        return not_a_list
    (problem,) = error.problems
    if problem.message not in (NO_SUCH_FILE, NO_SUCH_FOLDER) or problem.file is None:
        return error
    explain = no_such_file if problem.message == NO_SUCH_FILE else no_such_folder
    if problem.file not in (path, str(Path(path))):
        return BadInputError.from_problems([explain(problem.file)])
    explanation = explain(path)
    message = say("{}{}", explanation.message, place)
    return BadInputError.from_problems([replace(explanation, message=message)])


def named_twice_error(second: tuple[Shard, str, str], first: tuple[Shard, str, str]) -> BadInputError:
    """Return the error for a file to which two paths of a call lead, perhaps by two names.

    Each is its shard, the path, and the place of the path in a list of paths.
    """
    file, names = second[0].name, []
    for _, path, place in (first, second):
        is_folder = os.path.isdir(path)  # noqa: PTH112 - Path's own raises without permission
        kind = "folder" if is_folder else "index" if path.endswith(INDEX_SUFFIX) else "path"
        names.append(f"the {kind} {path}{place}")
    same = "" if file == first[0].name else f"is the same file as {first[0].name} and "
    by = f"both times by {names[0]}" if names[0] == names[1] else f"by {names[0]} and by {names[1]}"
    return BadInputError(f"{same}is named twice: {by}", file=file, code="duplicate-file", hint="name each file once")


def shell_pattern_hint(name: str, pattern: str, names: Iterable[str] | None = None) -> str | None:
    """Say what to give to an option instead, if a pattern looks like a glob, which must match any of the names."""
    # This option takes more than a pattern.
    if name == "map" or not any(wildcard in pattern for wildcard in _AS_REGEX):
        return None
    regex = "".join(_AS_REGEX.get(part) or re.escape(part) for part in re.sub(r"\*+", "*", pattern))
    # As fnmatch has it, matching takes no long time, whatever the pattern.
    with warnings.catch_warnings(action="ignore"):
        anywhere = re.compile(fnmatch.translate(f"*{pattern}*"))
    if regex == pattern or not (names is None or any(map(anywhere.match, names))):
        return None
    return say("if it is a shell pattern, write {}", option(name, regex))


def prefix_problem(names: Sequence[str], expected: Sequence[str], file: str, reference: object) -> Problem | None:
    """Return the problem of a set whose names differ from those of a reference by a prefix, such as DDP's `module.`.

    The names are those that only the set has, and those expected only the reference; None if there is no such prefix.
    """
    for longer, shorter, have, lack, change in (
        (names, expected, "have", "lack", "remove"),
        (expected, names, "lack", "have", "add"),
    ):
        prefix = _common_prefix(shorter, longer)
        if prefix is not None:
            rule = f"^{re.escape(prefix)}=" if change == "remove" else "^=" + prefix.replace("\\", r"\\")
            message = f"{len(names)} tensor names {have} the prefix {prefix!r}, which those of {reference} {lack}"
            return Problem("extra-tensor", message, file, hint=say("use {} to {} it", option("map", rule), change))
    return None


def _common_prefix(names: Sequence[str], longer: Sequence[str]) -> str | None:
    """Return the prefix that makes all of the names the longer ones."""
    if len(names) != len(longer):
        return None
    for name in longer:
        if names[0] and name.endswith(names[0]):
            prefix = name.removesuffix(names[0])
            if {prefix + short for short in names} == set(longer):
                return prefix
    return None
