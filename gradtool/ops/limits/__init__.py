"""Limits that follow from the norms of earlier calls: what --limit says, and the rules that it may name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gradtool import validators
from gradtool.errors import UsageError
from gradtool.ops.limits.percentile import WINDOW, Percentile
from gradtool.ops.limits.state import MOST_NORMS
from gradtool.ops.limits.zscore import WARMUP, ZScore

if TYPE_CHECKING:
    from gradtool.options import ClipOptions

Rule = ZScore | Percentile

_FORMS = "z=T, such as z=2.5, or percentile=P, such as percentile=10"


def rule_of(options: ClipOptions) -> Rule | None:
    """The rule that complete options name; None without one. Raises `UsageError` where they contradict each other."""
    text, warmup, window = options.limit, options.warmup, options.window
    name, _, value = (text or "").partition("=")
    if (text is None) != (options.state is None):
        raise UsageError("--limit and --state need each other: the state holds the norms that the limit follows from")
    if warmup is not None and name != "z":
        raise UsageError("--warmup is about --limit z=T")
    if window is not None and name != "percentile":
        raise UsageError("--window is about --limit percentile=P")
    for option, count in (("--warmup", warmup), ("--window", window)):
        if count is not None and count > MOST_NORMS:
            raise UsageError(f"{option} must be at most {MOST_NORMS:,}, not {count:,}")
    if text is None:
        return None
    number = validators.number(f"the number in --limit {text!r}", value) if value else math.nan
    if name == "z" and 0 < number < math.inf:
        return ZScore(number, WARMUP if warmup is None else warmup)
    if name == "percentile" and 0 <= number <= 100:  # noqa: PLR2004
        return Percentile(number, WINDOW if window is None else window)
    raise UsageError(f"--limit must be {_FORMS}, not {text!r}")
