"""The inputs of a call: its gradient sets and the tensors that it selects, and how they are opened to be read."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from gradtool.errors import BadInputError, os_errors_about
from gradtool.store.format.gradset import open_sets, require_shapes
from gradtool.store.format.selection import check_dtypes, require_unique_names, select
from gradtool.store.format.tensors import INTEGERS
from gradtool.store.fs import PREFIX, Folder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from gradtool.errors import GradtoolError, Text
    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.layout import NewSet
    from gradtool.store.format.paths import PathList
    from gradtool.store.format.selection import Renames
    from gradtool.store.format.tensors import Shard
    from gradtool.store.transaction.once import Once
    from gradtool.store.transaction.runs import Scope


@dataclass(frozen=True, eq=False)
class OpenSets:
    """The gradient sets of a call, headers read and checked, and the tensors that are selected in them.

    The `others` are selected too, but are only copied, because their types carry no values.
    """

    sets: list[GradientSet]
    selected: list[Selected]
    others: Sequence[Selected] = ()

    @property
    def shards(self) -> list[Shard]:
        """Every file of the call."""
        return [shard for gradset in self.sets for shard in gradset.shards]

    @property
    def local_paths(self) -> list[Path]:
        """The files that runs may leave half changed."""
        return [Path(shard.name) for shard in self.shards if shard.source.status]

    @property
    def in_file_order(self) -> list[Selected]:
        """The selected tensors and the others, in the order of the files."""
        if not self.others:
            return self.selected
        places = {shard: place for place, shard in enumerate(chain.from_iterable(map(_shards_of, self.sets)))}
        return sorted([*self.selected, *self.others], key=lambda entry: (places[entry.shard], entry.tensor.begin))

    def restricted_to(self, sets: list[GradientSet]) -> OpenSets:
        """Return some of the sets, with what is selected in them."""
        shards = set(chain.from_iterable(map(_shards_of, sets)))
        selected, others = ([each for each in both if each.shard in shards] for both in (self.selected, self.others))
        return OpenSets(sets, selected, others)

    def selected_in(self, gradients: GradientSet) -> list[Selected]:
        """List the selected tensors of a set."""
        return [selected for shard in _shards_of(gradients) for selected in self._by_shard.get(shard, ())]

    @cached_property
    def _by_shard(self) -> dict[Shard, list[Selected]]:
        return {shard: list(group) for shard, group in groupby(self.selected, key=attrgetter("shard"))}


def _shards_of(gradients: GradientSet) -> Sequence[Shard]:
    """Return every shard that has whole tensors of a set."""
    return (*gradients.shards, *gradients.split)


class WritePlan(NamedTuple):
    """The sets that a call writes, besides what its options say: the first `writes` of them, or all.

    Or else those with a file of `output_files`, or a new set that is `created` elsewhere. `state` is a small file that
    is written together with the sets, and says what a later call must know of this call. All of them record `once`.
    """

    writes: int | None = None
    created: NewSet | None = None
    output_files: Collection[str] | None = None
    state: Path | None = None
    once: Once | None = None


EVERYTHING = WritePlan()


class Inputs(NamedTuple):
    """The paths of a call and its selection; only tensors of the given `dtypes` are accepted, or all with None.

    With `unique_names`, the hint of the error, no name may be selected in several sets. Files may be named twice only
    with `may_repeat`. `others` says what becomes of integers that are not accepted, where they can be copied.
    """

    paths: Sequence[str]
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    dtypes: Sequence[str] | None = None
    unique_names: Text | None = None
    # The list that the last of the paths come from.
    listed: PathList | None = None
    renames: Renames | None = None
    may_repeat: bool = False
    # A set with the shapes that tensors in pieces should have.
    shapes_from: str | None = None
    others: Literal["error", "copy"] | None = None

    def open(self) -> OpenSets:
        """Read the headers, and check all that can be checked before a byte of data is read."""
        sets = open_sets(self.paths, self.listed, may_repeat=self.may_repeat)
        if self.shapes_from is not None:
            require_shapes(sets, self.shapes_from)
        if self.renames is not None:
            sets = self.renames.applied(sets)
        selected = select(sets, self.include, self.exclude)
        if self.unique_names is not None and len(sets) > 1:
            require_unique_names(selected, self.unique_names)
        others = []
        if self.others == "copy":
            others = [entry for entry in selected if entry.tensor.dtype in INTEGERS]
            selected = [entry for entry in selected if entry.tensor.dtype not in INTEGERS]
        if self.dtypes is not None:
            self.check_dtypes(selected)
        return OpenSets(sets, selected, others)

    def check_dtypes(self, selected: Iterable[Selected]) -> None:
        """Raise `BadInputError` for the first tensor whose type is not accepted."""
        check_dtypes(selected, self.dtypes or (), can_copy=self.others is not None)

    def scopes(self, error: GradtoolError | None = None) -> list[Scope]:
        """Return where the paths lead, whether they can be opened or not; or the files that an error is about."""
        from gradtool.store.transaction.runs import all_scopes_of  # only needed for errors, and to write

        files = [problem.file for problem in error.problems if problem.file] if error else []
        return all_scopes_of(files or self.paths)


def open_to_read(inputs: Inputs) -> OpenSets:
    """Open inputs that are only read, unless a run is changing them, or has left them half changed.

    Raises:
        SystemRefusedError: a file may be half changed.
        BadInputError: as `Inputs.open`.
    """
    try:
        opened = inputs.open()
    except BadInputError as error:
        from gradtool.store.transaction.runs import require_finished_at  # only needed for the error

        # A file may be invalid because it is half changed.
        for scope in inputs.scopes(error):
            require_finished_at(scope)
        raise
    require_finished(opened.local_paths)
    return opened


def require_finished(paths: Iterable[Path], run: str | None = None) -> None:
    """Raise `SystemRefusedError` if a file may be half changed, by a run other than `run`."""
    names: dict[Path, dict[str, Path]] = {}
    real_folders: dict[Path, Path] = {}
    for path in paths:
        if os.path.islink(path):  # noqa: PTH114 - Path's own may raise
            real = Path(os.path.realpath(path))
            folder, name = real.parent, real.name
        else:
            parent, name = path.parent, path.name
            if parent not in real_folders:
                real_folders[parent] = Path(os.path.realpath(parent))
            folder = real_folders[parent]
        names.setdefault(folder, {})[name] = path
    for real_folder, files in names.items():
        with os_errors_about(real_folder), Folder.at(real_folder) as opened:
            if _may_have_logs(opened):
                from gradtool.store.transaction.runs import require_finished_in

                require_finished_in(opened, files, run)


def _may_have_logs(folder: Folder) -> bool:
    # A folder that cannot be listed may.
    try:
        return any(name.startswith(PREFIX) for name in folder.names())
    except OSError as error:
        if error.errno != errno.EACCES:
            raise
        return True
