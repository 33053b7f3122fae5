"""IDs of calls: files record them in the same commit as the results, so that a repeated call changes nothing.

A file has the last IDs of each command in its metadata, as a JSON list, the newest last.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from gradtool.errors import BadInputError, Problem, UsageError, option, say, shortened
from gradtool.store.format.header import encoded
from gradtool.validators import call_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradtool.options import AccumulateOptions, ClipOptions, ZeroOptions
    from gradtool.store.format.tensors import Shard

_KEY = "gradtool.once."
MAX_IDS = 64
# Headers get room for the lists of all commands, and for IDs that become so many bytes longer.
_COMMANDS, _KEY_BYTES, _LONGER_BYTES = 3, 48, 8


class Once(NamedTuple):
    """The ID of a call, which counts for its command alone."""

    command: str
    id: str

    @classmethod
    def from_options(cls, options: AccumulateOptions | ClipOptions | ZeroOptions) -> Self | None:
        """Return the ID that a call is given; None if it has none.

        Raises:
            UsageError: the results go to new files, which have no history.
        """
        if options.once is not None and options.is_elsewhere:
            message = say("{} cannot be combined with {} or {}", *map(option, ("once", "output", "output_dir")))
            raise UsageError(message, hint=say("use {} to write new files only once", option("no_clobber", True)))
        return None if options.once is None else cls(options.operation, options.once)

    @property
    def key(self) -> str:
        """The key of the metadata that the list is stored under."""
        return _KEY + self.command

    @property
    def spare(self) -> int:
        """The room that a header gets when it must grow: enough for all later IDs of about this length."""
        nbytes = len(encoded(encoded(self.id).decode())) + _LONGER_BYTES
        return _COMMANDS * (_KEY_BYTES + MAX_IDS * nbytes)

    def ids_in(self, shard: Shard) -> Sequence[str]:
        """Return the IDs that a file has; raise `BadInputError` if another program has written something else."""
        text = shard.metadata.get(self.key, "[]")
        try:
            return checked_ids(json.loads(text))
        except (ValueError, RecursionError) as error:
            message = f"{self.key!r} = {shortened(text)!r} in its metadata is not a list of IDs"
            raise BadInputError(message, file=shard.name, code="once", hint="restore the file from a copy") from error

    def added_to(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Return IDs with this one, without those that are too old to be kept."""
        return (*ids, self.id)[-MAX_IDS:]

    def entry(self, shard: Shard) -> dict[str, str]:
        """Return the entry of the metadata that records the ID in a file."""
        return {self.key: encoded(self.added_to(self.ids_in(shard))).decode()}

    def is_recorded(self, ids_of: Mapping[str, Sequence[str]]) -> bool:
        """Check whether the files of a call have its ID; raise `BadInputError` if only some of them do."""
        first = next((file for file, ids in ids_of.items() if self.id in ids), None)
        message = say("has no record of {}, but {} has", option("once", self.id), first)
        problems = [Problem("once", message, file) for file, ids in ids_of.items() if self.id not in ids]
        if first is not None and problems:
            hint = "name the files of the call that recorded it, or use another ID to repeat it on all of these"
            raise BadInputError.from_problems(problems, hint)
        return first is not None


def checked_ids(value: Any) -> Sequence[str]:
    """Return a list of IDs that was read from a file; raise `ValueError` if it is anything else."""
    if not isinstance(value, list) or len(value) > MAX_IDS:
        raise ValueError("it is not a list of IDs")
    return [call_id("each ID", text) for text in value]
