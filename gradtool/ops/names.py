"""Names that two gradient sets have for the same tensors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from gradtool.wording import option, say

if TYPE_CHECKING:
    from collections.abc import Sequence


class Prefix(NamedTuple):
    """What all names of a set begin with, and those of the other do not; the first set has it if it `is_extra`."""

    prefix: str
    is_extra: bool

    @property
    def remedy(self) -> str:
        """The option that makes the names the same."""
        if self.is_extra:
            return say("use {} to remove it", option("map", f"^{re.escape(self.prefix)}="))
        replacement = self.prefix.replace("\\", "\\\\")
        return say("use {} to add it", option("map", f"^={replacement}"))


def prefix_between(names: Sequence[str], others: Sequence[str]) -> Prefix | None:
    """The prefix by which all names of one set differ from those of the other, such as DDP's `module.`."""
    for short, long, is_extra in ((others, names, True), (names, others, False)):
        prefix = _common_prefix(short, long)
        if prefix is not None:
            return Prefix(prefix, is_extra)
    return None


def _common_prefix(names: Sequence[str], longer: Sequence[str]) -> str | None:
    """The prefix that makes all of the names the longer ones."""
    if len(names) != len(longer):
        return None
    for one in longer:
        if names[0] and one.endswith(names[0]):
            prefix = one.removesuffix(names[0])
            if {prefix + name for name in names} == set(longer):
                return prefix
    return None
