"""Which format a call prints its result in; imports next to nothing, because it is asked where there is no memory."""

from __future__ import annotations

import os

# Not from typing, whose import would be most of what this one costs.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterable

_VARIABLE = "GRADTOOL_FORMAT"


def chosen_format(given: str | None, *, json: bool) -> str:
    """The format asked for by `--format` or `--json`, by default that of GRADTOOL_FORMAT or "text".

    Raises:
        UsageError: there is no such format, or the two options contradict each other.
    """
    from typing import get_args

    from gradtool.checks import one_of
    from gradtool.errors import UsageError
    from gradtool.options import Format

    source = _VARIABLE if given is None else "--format"
    name = one_of(source, (os.environ.get(_VARIABLE) or "text") if given is None else given, get_args(Format))
    if json and given is not None and name != "json":
        raise UsageError(f"--json means --format json; leave out --json or --format {name}")
    return "json" if json else name


def asked_format(arguments: Iterable[str]) -> str:
    """The format that a command line asks for, which may be wrong otherwise, or end before it is parsed."""
    words, given = iter(arguments), ""
    for word in words:
        if word == "--":
            break
        if word == "--json":
            return "json"
        if word == "--format":
            given = next(words, "")
        elif word.startswith("--format="):
            given = word.removeprefix("--format=")
    return (given or os.environ.get(_VARIABLE) or "text").lower()
