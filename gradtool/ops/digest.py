"""Computes digests of tensors, which do not depend on their files, and compares them with those of an earlier call."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from array import array
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar, Self

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
from gradtool.store.format.tensors import Shard, Tensor
from gradtool.store.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gradtool.engines.passes import Places
    from gradtool.engines.worker import Worker
    from gradtool.store.io.blocks import Block

    # What messages call it, and digests by the names of tensors, as text has them; that of the set by None.
    Expected = tuple[str, dict[str | None, str]]

# The bytes of a leaf, which decide digests, and of its hash.
LEAF, _HASH = 1 << 20, 32
_DIGEST = re.compile("[0-9a-f]{64}")


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
    tensors, of any type; docs/numerics.md has the definition. Files, shards, pieces, metadata and order do not matter.

    Returns:
        The result. Differences from `check` are not raised; they are its `problems`.

    Raises:
        UsageError: an option is invalid.
        BadInputError: a file or an index is invalid, a name is in several paths, or `check` is not such a file.
        BackendUnavailableError: the backend is not available.
        SystemRefusedError: a file cannot be read, changed during the call, or may be half changed.
    """
    expected = None if options.check is None else _read_expected(os.fspath(options.check))
    reading = Call(options.named, options, dtypes=None, unique_names=say("run {} for each path", call("digest")))
    with reading.open_to_read():
        leaves = reading.run(HashLeaves([_as_bytes(*entry) for entry in reading.selected], NormSpec()))
        rows = [
            TensorDigest(tensor.name, shard.name, _digest_of(tensor, leaves.hashes_of(number)), *tensor[1:3])
            for number, (shard, tensor) in enumerate(reading.selected)
        ]
        whole = _digest_of_set({row.name: row.digest for row in rows})
        problems = [] if expected is None else _problems(expected, rows, whole, reading.opened.sets, options)
        return DigestResult(
            call=reading.summary(reading.selected, why="nothing to compute"),
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
        encoded = name.encode()
        whole.update(len(encoded).to_bytes(8, "little") + encoded + bytes.fromhex(digest))
    return whole.hexdigest()


def _as_bytes(shard: Shard, tensor: Tensor) -> Selected:
    """Return a tensor as the bytes that it is stored in."""
    return Selected(shard, tensor._replace(dtype="U8", shape=(tensor.nbytes,)))


class Leaves:
    """The hashes of the leaves of tensors of these sizes. Each has its place, so any thread may add it, unlocked."""

    sent_names = ("hashes",)

    def __init__(self, sizes: Iterable[int]) -> None:
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
    """A pass that hashes tensors, which are bytes to it; hashlib releases the interpreter lock."""

    title: ClassVar = "hashing"
    unit: ClassVar = LEAF

    def tally(self) -> Leaves:
        return Leaves(tensor.nbytes for _, tensor in self.selected)

    def work(self, block: Block, worker: Worker, tally: Leaves) -> None:
        with worker.memory(block.end - block.begin) as view:
            worker.read(block.shard, block.begin, view)
            for span in block.spans:
                data = view[span.offset : span.offset + span.elements]
                leaves = (data[at : at + LEAF] for at in range(0, len(data), LEAF))
                tally.add(span.tensor, span.start, b"".join(hashlib.sha256(leaf).digest() for leaf in leaves))


def _read_expected(source: str) -> Expected:
    """Read what `digest` printed, from a file or, for `-`, standard input; raise `BadInputError` for anything else."""
    where, data = read_stream(source, MAX_DIGESTS)
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        rows = [row for line in data.decode().rstrip("\n").split("\n") for row in _digests_in(line)]
        digests = dict(rows)
        if 0 < len(rows) == len(digests) and len(data) <= MAX_DIGESTS and all(map(_DIGEST.fullmatch, digests.values())):
            return where, digests
    hint = say("make it with {}; to compare two sets, use {}", call("digest"), call("diff", bits=True))
    raise BadInputError(say("is not what {} prints", call("digest")), file=where, hint=hint)


def _digests_in(line: str) -> Iterator[tuple[str | None, str]]:
    """Yield the names and digests of tensors in a line of text or JSON, and that of the set with None."""
    kind, *values = line.split("\t")
    if line.startswith("{"):
        row = json.loads(line)
        data = row.get("data", row)
        for entry in (data, *data.get("per_tensor", ())):
            yield printable(entry["name"]) if "name" in entry else None, entry["digest"]
    elif kind == "tensor":
        digest, _, _, name, _ = values
        yield name, digest
    elif kind == "digest":
        (digest,) = values
        yield None, digest


def _problems(
    expected: Expected, rows: Sequence[TensorDigest], whole: str, sets: Sequence[GradientSet], options: DigestOptions
) -> list[Problem]:
    """Return a problem for each tensor that differs, is extra or is missing; for the set, if no tensor is expected."""
    (where, digests), problems = expected, []
    listed = tuple(Tensor(name, "", (), 0, 0) for name in digests if name is not None)
    computed = [(row.digest, row.file, row.name) for row in rows] if listed else [(whole, None, None)]
    for new, file, tensor in computed:
        old = digests.get(None if tensor is None else printable(tensor))
        if old is None:
            problems.append(Problem("extra-tensor", f"is not in {where}", file, tensor))
        elif old != new:
            message = f"has the digest {new[:16]}…, not {old[:16]}… as in {where}"
            problems.append(Problem("different", message, file, tensor))
    # Patterns may match in the sets, or only in what is expected.
    shard, names = Shard(Source(where, 0), 0, {}, listed), {printable(row.name) for row in rows}
    selected = select([*sets, GradientSet(where, (shard,))], options.include, options.exclude)
    missing = [tensor.name for file, tensor in selected if file is shard and tensor.name not in names]
    return problems + [Problem("missing-tensor", f"is only in {where}", None, name) for name in missing]
