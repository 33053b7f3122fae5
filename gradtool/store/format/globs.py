"""The regular expression that is meant by a pattern which was written as a glob. Imported only for an error."""

from __future__ import annotations

import fnmatch
import re
import shlex
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_AS_REGEX = {"*": ".*", "?": "."}


def hint(option: str, pattern: str, names: Iterable[str] | None = None) -> str:
    """The option to give instead, if the pattern looks like a glob; of the names, it must then match one."""
    # The pattern is not all that --map takes.
    if option == "--map" or not any(one in pattern for one in _AS_REGEX):
        return ""
    regex = "".join(_AS_REGEX.get(one) or re.escape(one) for one in re.sub(r"\*+", "*", pattern))
    # As fnmatch has it, matching takes no long time, whatever the pattern.
    if regex == pattern or not (names is None or any(map(re.compile(_anywhere(pattern)).match, names))):
        return ""
    return f"; if it is a shell pattern, write {option} {shlex.quote(regex)}"


def _anywhere(pattern: str) -> str:
    with warnings.catch_warnings(action="ignore"):
        return fnmatch.translate(f"*{pattern}*")
