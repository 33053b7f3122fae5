"""What a rule makes of one more norm: the limit now, and the state that a later call reads."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import UsageError
from gradtool.store.format.index import INDEX_SUFFIX

if TYPE_CHECKING:
    from gradtool.ops.limits import Rule
    from gradtool.ops.limits.state import Kept
    from gradtool.options import ClipOptions
    from gradtool.store.transaction.small import SmallFile

_OF_SETS = (".safetensors", INDEX_SUFFIX)


class Learned(NamedTuple):
    """The limit for a norm, None where nothing is clipped; the norms seen so far, this one included; the new file."""

    limit: float | None
    steps: int
    state: SmallFile

    @classmethod
    def of(cls, rule: Rule, kept: Kept, norm: float) -> Self:
        """What a rule learns from a norm; raises `BadInputError` for a norm that it cannot take."""
        limit, after = rule.limit(kept.state, norm), rule.after(kept.state, norm)
        return cls(None if math.isinf(limit) else limit, after.steps, kept.new(after))


def state_path(options: ClipOptions) -> Path | None:
    """The path of the state, if one is given; raises `UsageError` for a name that a set would take for its own."""
    if options.state is None:
        return None
    path = os.fspath(options.state)
    if path.endswith(_OF_SETS):
        raise UsageError(f"--state {path} has a name of gradients; give it another one, such as clip.json")
    if path == "-" or path.endswith(os.sep) or os.path.isdir(path):  # noqa: PTH112 - Path's own raises
        raise UsageError(f"--state {path} must be a file")
    return Path(path)
