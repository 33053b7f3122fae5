"""Decides which format a call prints its result in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, get_args

from gradtool.errors import UsageError
from gradtool.options import Format
from gradtool.validators import one_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_VARIABLE = "GRADTOOL_FORMAT"


def chosen_format(given: str | None, *, json: bool) -> str:
    """Return the format asked for by `--format` or `--json`, by default that of GRADTOOL_FORMAT or "text".

    Raises:
        UsageError: there is no such format, or the two options contradict each other.
    """
    source = _VARIABLE if given is None else "--format"
    name = one_of(source, (os.environ.get(_VARIABLE) or "text") if given is None else given, get_args(Format))
    if json and given is not None and name != "json":
        raise UsageError(f"--json means --format json; leave out --json or --format {name}")
    return "json" if json else name


def asked_format(arguments: Iterable[str]) -> str:
    """Return the format that a command line asks for, which may be wrong otherwise, or end before it is parsed."""
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
