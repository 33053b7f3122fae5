"""Computes digests of tensors, which do not depend on their files, and compares them with those of an earlier call."""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from gradtool.backends.values import NormSpec
from gradtool.declare import operation
from gradtool.engines.passes import Pass
from gradtool.errors import BadInputError, Problem, call, printable, say
from gradtool.ops.call import Call
from gradtool.ops.results import Result
from gradtool.options import DigestOptions
from gradtool.store.format.gradset import GradientSet, Selected
from gradtool.store.format.limits import MAX_DIGESTS
from gradtool.store.format.paths import read_stream
from gradtool.store.format.selection import select
from gradtool.store.format.tensors import BITS, Shard, Tensor
from gradtool.store.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gradtool.backends.protocol import Backend
    from gradtool.engines.passes import Places
    from gradtool.engines.worker import Worker
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.destination import Destination

# The bytes of a leaf, which decide digests; of its hash; and of a block.
LEAF, _HASH, _BLOCK = 1 << 20, 32, 2 << 20
_BYTE = 8
# Sums nothing.
_SPEC = NormSpec()
_DIGEST = re.compile("[0-9a-f]{64}")
# Digits of a digest in a message.
_DIGITS = 16


@dataclass(frozen=True)
class TensorDigest:
    """The digest of one tensor, in hexadecimal."""

    name: str
    file: str
    digest: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class DigestResult(Result):
    """The digests of all selected tensors together and of each, in hexadecimal, and whether they are as expected."""

    headline = ("digest", "same")

    digest: str
    same: bool | None
    per_tensor: tuple[TensorDigest, ...]
    problems: tuple[Problem, ...]


@operation(DigestOptions)
def digest(options: DigestOptions) -> DigestResult:
    """Compute a SHA-256 digest of each tensor, and one of all tensors of all paths.

    The digest of a tensor covers its type, its shape and its values, and that of a set the names and digests of its
    tensors. Files, shards, pieces and metadata do not matter, nor does the order of tensors. Tensors may have any type.
    docs/numerics.md has the definition.

    Returns:
        The result. Differences from `check` are not raised; they are its `problems`.

    Raises:
        UsageError: an option is invalid.
        BadInputError: a file or an index is invalid, a name is in several paths, or `check` is not such a file.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: a file cannot be read, changed during the call, or may be half changed.
    """
    expected = None if options.check is None else _Expected.read(os.fspath(options.check))
    # There is no norm of a sum to ask for.
    hint = say("run {} for each path", call("digest"))
    reading = Call(options.named, options, dtypes=None, unique_names=hint)
    with reading.open_to_read():
        selected = reading.selected
        leaves = reading.run(HashLeaves([_as_bytes(entry) for entry in selected]))
        rows = [
            TensorDigest(tensor.name, shard.name, _digest_of(tensor, leaves.hashes_of(number)), *tensor[1:3])
            for number, (shard, tensor) in enumerate(selected)
        ]
        whole = _digest_of_set({row.name: row.digest for row in rows})
        problems = [] if expected is None else expected.problems(reading.opened.sets, options, rows, whole)
        return DigestResult(
            call=reading.summary(selected, why="nothing to compute"),
            digest=whole,
            same=None if expected is None else not problems,
            per_tensor=tuple(rows),
            problems=tuple(problems),
        )


def _digest_of(tensor: Tensor, hashes: bytes) -> str:
    """Return the digest of a tensor, given the hashes of its leaves."""
    head = f"gradtool.tensor.1\0{tensor.dtype}\0{','.join(map(str, tensor.shape))}\0"
    return hashlib.sha256(head.encode() + hashes).hexdigest()


def _digest_of_set(digests: Mapping[str, str]) -> str:
    """Return the digest of a set, given those of its tensors by name."""
    whole = hashlib.sha256(b"gradtool.set.1\0")
    for name, digest in sorted(digests.items()):
        # JSON may have half a surrogate in a name.
        encoded = name.encode(errors="surrogatepass")
        whole.update(len(encoded).to_bytes(8, "little") + encoded + bytes.fromhex(digest))
    return whole.hexdigest()


def _as_bytes(entry: Selected) -> Selected:
    """Return a tensor as the bytes that it is stored in."""
    shard, tensor = entry
    if BITS[tensor.dtype] < _BYTE and shard.pieces(tensor):
        message = f"lies in pieces, which cannot be joined for type {tensor.dtype}"
        raise BadInputError(message, file=shard.name, tensor=tensor.name, code="pieces")
    return Selected(shard, tensor._replace(dtype="U8", shape=(tensor.nbytes,)))


class Leaves:
    """The hashes of the leaves of tensors, filled from any thread: each has its place, so that no lock is needed."""

    sent_names = ("hashes",)

    def __init__(self, sizes: Iterable[int]) -> None:
        """Begin with nothing, for tensors of so many bytes."""
        self._bounds = [0, *accumulate(-(-size // LEAF) * _HASH for size in sizes)]
        self.hashes = array("B", bytes(self._bounds[-1]))

    def add(self, number: int, start: int, hashes: bytes) -> None:
        """Add the hashes of leaves of a tensor, from byte `start` of it on."""
        at = self._bounds[number] + start // LEAF * _HASH
        memoryview(self.hashes)[at : at + len(hashes)] = hashes

    def hashes_of(self, number: int) -> bytes:
        """Return the hashes of the leaves of a tensor."""
        return self.hashes[self._bounds[number] : self._bounds[number + 1]].tobytes()

    def compact(self) -> Self:
        """Return what is sent: all of it."""
        return self

    def merge_part(self, places: Places, part: Self) -> None:
        """Add the hashes of parts of tensors, which another process may have sent; `ValueError` if it is of others."""
        for (number, start), (begin, end) in zip(places, pairwise(part._bounds), strict=True):
            self.add(number, start, part.hashes[begin:end].tobytes())


@dataclass(frozen=True, eq=False, repr=False)
class HashLeaves(Pass[Leaves]):
    """A pass that hashes tensors, which are bytes to it."""

    title: ClassVar = "hashing"
    unit: ClassVar = LEAF

    spec: NormSpec = _SPEC

    def tally(self) -> Leaves:
        return Leaves(tensor.nbytes for _, tensor in self.selected)

    def block_bytes(self, backend: Backend, destination: Destination) -> int:  # noqa: ARG002 - none computes
        return _BLOCK

    def work(self, block: Block, worker: Worker, tally: Leaves) -> None:
        with worker.memory(block.end - block.begin) as view:
            worker.read(block.shard, block.begin, view)
            for span in block.spans:
                # hashlib releases the interpreter lock.
                data = view[span.offset : span.offset + span.elements]
                leaves = (data[at : at + LEAF] for at in range(0, len(data), LEAF))
                tally.add(span.tensor, span.start, b"".join(hashlib.sha256(leaf).digest() for leaf in leaves))


class _Expected(NamedTuple):
    """What `digest` printed: the digest of the set, and those of tensors by name, with escapes where it was text."""

    where: str
    whole: str | None
    digests: dict[str, str]

    @classmethod
    def read(cls, source: str) -> Self:
        """Read a file, or standard input for `-`: text, JSON or JSON lines; else raise `BadInputError`."""
        where, data = read_stream(source, MAX_DIGESTS)
        if len(data) > MAX_DIGESTS:
            message = f"exceeds the limit of {MAX_DIGESTS:,} bytes in a file of digests"
            raise BadInputError(message, file=where, code="limit")
        try:
            lines = data.decode().rstrip("\n").split("\n")
            whole, rows = _from_json(lines) if lines[0].startswith("{") else _from_text(lines)
            expected = cls(where, whole, dict(rows))
            digests = [*expected.digests.values(), *([] if whole is None else [whole])]
            is_valid = digests and all(map(_DIGEST.fullmatch, digests)) and len(expected.digests) == len(rows)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            is_valid = False
        if not is_valid:
            hint = say("make it with {}; to compare two sets, use {}", call("digest"), call("diff", bits=True))
            raise BadInputError(say("is not what {} prints", call("digest")), file=where, hint=hint)
        return expected

    def problems(
        self, sets: Sequence[GradientSet], options: DigestOptions, rows: Sequence[TensorDigest], whole: str
    ) -> list[Problem]:
        """Return a problem for each tensor that differs, is extra or is missing; for all, if none is listed."""
        if not self.digests and self.whole is not None:
            return [] if whole == self.whole else [Problem("different", self._difference(whole, self.whole))]
        problems = []
        for row in rows:
            digest = self.digests.get(printable(row.name))
            if digest is None:
                problems.append(Problem("extra-tensor", f"is not in {self.where}", row.file, row.name))
            elif row.digest != digest:
                problems.append(Problem("different", self._difference(row.digest, digest), row.file, row.name))
        # Patterns may match in the sets, or only here.
        shard = Shard(Source(self.where, 0), 0, {}, tuple(Tensor(name, "", (), 0, 0) for name in self.digests))
        selected = select([*sets, GradientSet(self.where, (shard,))], options.include, options.exclude)
        names = {printable(row.name) for row in rows}
        missing = [tensor.name for file, tensor in selected if file is shard and tensor.name not in names]
        return problems + [Problem("missing-tensor", f"is only in {self.where}", None, name) for name in missing]

    def _difference(self, new: str, old: str) -> str:
        return f"the digest is {new[:_DIGITS]}…, but {old[:_DIGITS]}… in {self.where}"


def _from_text(lines: Sequence[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the digest of the set, if it is there, and the names and digests of tensors."""
    whole, rows = None, []
    for kind, *values in (line.split("\t") for line in lines):
        if kind == "tensor":
            digest, _, _, name, _ = values
            rows.append((name, digest))
        elif kind == "digest":
            (whole,) = values
    return whole, rows


def _from_json(lines: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the same from an object, or from JSON lines, of which the last has the digest of the set."""
    rows: list[Any]
    *rows, last = map(json.loads, lines)
    rows += last["data"].get("per_tensor", ())
    return last["data"]["digest"], [(printable(row["name"]), row["digest"]) for row in rows]
