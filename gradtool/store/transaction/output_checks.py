"""Whether an output fits the options and the inputs of a call: what is checked before anything is written."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from gradtool.errors import UsageError, option, say
from gradtool.store.format.index import INDEX_SUFFIX
from gradtool.store.format.paths import check_output_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from gradtool.options import Writing
    from gradtool.store.format.gradset import GradientSet
    from gradtool.store.format.tensors import Shard


def check_options(options: Writing, state: Path | None) -> None:
    """Check whatever does not depend on the inputs.

    Raises:
        UsageError: the options contradict each other, or cannot be meant.
        BadInputError: an output is a URL, or a path that the shell should have expanded.
    """
    output, output_dir = options.output, options.output_dir
    names = option("output"), option("output_dir")
    for name in ("output", "output_dir"):
        if getattr(options, name) == "-":
            what = say("{} is not supported: results are files, not streams", option(name, "-"))
            raise UsageError(what, hint="use ./- for a file or folder named -")
    for path in (output, output_dir, state):
        if path is not None:
            check_output_path(os.fspath(path))
    if options.in_place and options.is_elsewhere:
        raise UsageError(say("{} cannot be combined with {} or {}", option("write", "inplace"), *names))
    if output is not None and output_dir is not None:
        raise UsageError(say("{} and {} cannot be combined", *names))
    if options.no_clobber and not options.is_elsewhere:
        raise UsageError(say("{} requires {} or {}", option("no_clobber", True), *names))
    if output is not None and os.fspath(output).endswith((os.sep, INDEX_SUFFIX)):
        what = say("{} is a folder or an index, not a file", option("output", output))
        raise UsageError(what, hint=say("use {}", names[1]))
    # Not Path's questions, which raise where there is no permission.
    if output_dir is not None and os.path.lexists(output_dir) and not os.path.isdir(output_dir):  # noqa: PTH112
        raise UsageError(say("{} is not a folder", option("output_dir", output_dir)))


def check_collisions(
    targets: Sequence[Path], shards: Sequence[Shard], indexes: Iterable[Path] = (), originals: Iterable[Shard] = ()
) -> None:
    """Raise `UsageError` if two files would be written to one target, or one is an input or no regular file.

    `originals` are the inputs that would be replaced without an output.
    """
    inputs, replaceable = ({shard.source.identity for shard in each} for each in (shards, originals))
    for index in indexes:
        with contextlib.suppress(OSError):
            inputs.add((index.stat().st_dev, index.stat().st_ino))
    seen: set[str] = set()
    for target in targets:
        real = os.path.realpath(target)
        if real in seen:
            one_each = say("use one {} for each", option("output_dir"))
            raise UsageError("two inputs would be written to this file", file=target, hint=one_each)
        seen.add(real)
        try:
            status = target.stat()
        except OSError:
            continue  # It does not exist, or writing will say what is wrong.
        identity = status.st_dev, status.st_ino
        if identity in inputs:
            other = "leave out the output option to replace it" if identity in replaceable else "use another output"
            raise UsageError("is an input", file=target, hint=other)
        if stat.S_ISDIR(status.st_mode):
            into = say("use {} to write into it", option("output_dir"))
            raise UsageError("is a folder", file=target, hint=into)
        if not stat.S_ISREG(status.st_mode):
            nothing = say("use {} to write nothing", option("dry_run", True))
            raise UsageError("is not a regular file", file=target, hint=nothing)


def check_not_replaced(sets: Sequence[GradientSet], name: str, targets: Sequence[Path]) -> None:
    """Raise `UsageError` for a target that is a file of sets that are only read, and that an option names."""
    files = [str(path) for one in sets for path in (*(shard.name for shard in one.shards), one.index) if path]
    read = set(map(os.path.realpath, files))
    for target in targets:
        if os.path.realpath(target) in read:
            what = say("is a file of {}, which would be replaced", option(name))
            raise UsageError(what, file=target, hint="write to another file")


def check_state(targets: Sequence[Path], state: Path) -> None:
    """Raise `UsageError` for a state that is the file of a gradient or an index, which are written too."""
    if os.path.realpath(state) in map(os.path.realpath, targets):
        what = say("{} is a file that the gradients are written to", option("state", state))
        raise UsageError(what, hint="use another file for the state")
