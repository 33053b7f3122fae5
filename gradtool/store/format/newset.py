"""A gradient set that is written anew, as a whole: its files, and the tensors in each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BadInputError, Problem, option, say
from gradtool.store.format.index import INDEX_SUFFIX, new_index
from gradtool.store.format.layout import new_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.format.tensors import Tensor

# What huggingface's save_pretrained calls the files of a model, and what loaders look for in a folder.
_STEM = "model"
INDEX_NAME = f"{_STEM}{INDEX_SUFFIX}"


class NewSet(NamedTuple):
    """A set that will have every tensor of other sets, of a single type if `dtype` says so.

    It is one file; or a folder, if it is to have the files of the set `like`, or files of at most `shard_bytes`.
    """

    path: Path
    dtype: str | None
    like: GradientSet | None = None
    shard_bytes: int | None = None

    @property
    def folder(self) -> Path | None:
        """The folder that holds it, if it is sharded."""
        return None if self.like is None and self.shard_bytes is None else self.path

    def files(self, selected: Sequence[Selected]) -> dict[Path, list[Tensor]]:
        """Return the tensors of each file, without a place yet: for each name, as the first that is selected has it.

        Raises:
            BadInputError: the set `like` has no such tensor; each one is named.
        """
        firsts: dict[str, Selected] = {}
        for each in selected:
            firsts.setdefault(each.tensor.name, each)
        tensors = [new_tensor(name, self.dtype or tensor.dtype, tensor.shape) for name, (_, tensor) in firsts.items()]
        if self.like is not None:
            _require_places(self.like, list(firsts.values()))
            return _in_files_of(self.like, tensors, self.path)
        if self.shard_bytes is None:
            return {self.path: tensors}
        parts = _by_size(tensors, self.shard_bytes)
        if len(parts) == 1:
            return {self.path / f"{_STEM}.safetensors": tensors}
        names = [f"{_STEM}-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
        return {self.path / name: part for name, part in zip(names, parts, strict=True)}

    def index_over(self, files: Mapping[Path, Sequence[Tensor]]) -> tuple[Path, bytes] | None:
        """Return the index of these files and its content; None if there is none: for one file, or if `like` has none.

        Raises:
            BadInputError: it would be beyond the limits of what is read.
        """
        if self.folder is None:
            return None
        like = None if self.like is None else self.like.index
        if like is None and (self.like is not None or len(files) == 1):
            return None
        path = self.folder / (INDEX_NAME if like is None else like.name)
        weight_map = {tensor.name: file.name for file, tensors in files.items() for tensor in tensors}
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
        return path, new_index(path, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def targets(self, selected: Sequence[Selected]) -> list[Path]:
        """List every file that will be written, the index last."""
        files = self.files(selected)
        index = self.index_over(files)
        return [*files, *([] if index is None else [index[0]])]


def _require_places(like: GradientSet, selected: Sequence[Selected]) -> None:
    """Raise `BadInputError` for tensors that have no place in the files of a set, or if there is no tensor at all."""
    known = {tensor.name for shard in like.shards for tensor in shard.tensors}
    message = say("is not in {} ({})", like.name, option("shard_like"))
    hint = say("name a set of the same model, or use {}", option("exclude"))
    extra = [(shard, tensor) for shard, tensor in selected if tensor.name not in known]
    problems = [Problem("extra-tensor", message, shard.name, tensor.name) for shard, tensor in extra]
    if problems:
        raise BadInputError.from_problems(problems, hint)
    if not selected:
        what = say("the gradients have no tensors, so {} makes no file", option("shard_like"))
        raise BadInputError(what, code="no-match")


def _in_files_of(like: GradientSet, tensors: Sequence[Tensor], folder: Path) -> dict[Path, list[Tensor]]:
    """Return tensors in the files and in the order in which a set has them, without files that would have none."""
    new = {tensor.name: tensor for tensor in tensors}
    parts = ((shard.file_name, [new[old.name] for old in shard.tensors if old.name in new]) for shard in like.shards)
    return {folder / name: part for name, part in parts if part}


def _by_size(tensors: Sequence[Tensor], most: int) -> list[list[Tensor]]:
    """Return parts of at most so many bytes, as huggingface_hub makes them; a tensor of more is a part of its own.

    After such a tensor, the part before it is filled further. Parts are in the order in which they are completed.
    """
    parts: list[list[Tensor]] = []
    part: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if tensor.nbytes > most:
            parts.append([tensor])
            continue
        if filled + tensor.nbytes > most:
            parts.append(part)
            part, filled = [], 0
        part.append(tensor)
        filled += tensor.nbytes
    return [*parts, part] if part or not parts else parts
