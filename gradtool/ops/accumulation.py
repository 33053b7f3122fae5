"""The pass of an accumulation: all gradients and the buffer side by side, block by block."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gradtool.backends.storage import STORAGE
from gradtool.errors import NonFiniteError
from gradtool.ops import contributions as reading
from gradtool.ops.measurement import Measurement, norms_of
from gradtool.ops.passes import by_shard, measure
from gradtool.ops.results import nonfinite_problems, overflow_problems
from gradtool.reduction import TILE
from gradtool.store.blocks import plan
from gradtool.store.stream import copying

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from gradtool.backends import Rule, Terms
    from gradtool.ops.contributions import Contribution
    from gradtool.ops.passes import Session
    from gradtool.store.blocks import Block
    from gradtool.store.channel import Channel
    from gradtool.store.gradset import Selected
    from gradtool.store.header import Shard
    from gradtool.store.layout import Layout
    from gradtool.store.stream import Task

# The float64 sums of a block, and what is added to them, should stay in a core's cache.
_TILES = 4


class Accumulation:
    """Adds contributions to the buffer's tensors (`targets`); those that nothing is added to are left alone."""

    def __init__(
        self, session: Session, terms: Terms, targets: Sequence[Selected], contributions: Sequence[Contribution]
    ) -> None:
        self._session = session
        self._terms = terms
        self._targets = targets
        touched = sorted({number for one in contributions for number in one.tensors})
        self._numbers = touched
        self._left = sorted(set(range(len(targets))) - set(touched))
        self._touched = [targets[number] for number in touched]
        position = {number: place for place, number in enumerate(touched)}
        self._contributions = [
            replace(one, tensors={position[number]: selected for number, selected in one.tensors.items()})
            for one in contributions
        ]
        self._left_alone: Measurement | None = None

    @property
    def shards(self) -> list[Shard]:
        """The files of the tensors that are added to."""
        return list(dict.fromkeys(one.shard for one in self._touched))

    def run(
        self,
        rule: Rule,
        destinations: Mapping[Shard, Path],
        *,
        created: Layout | None = None,
        looks_back: bool = False,
    ) -> tuple[float | None, float, Measurement]:
        """Do it once: the norms before (if it `looks_back`) and after, and what was found in the result.

        With `created`, the one destination is a new file.
        """
        before = Measurement(self._touched, self._terms) if looks_back and rule.keeps else None
        after = Measurement(self._touched, self._terms)
        header = b"" if created is None else created.header
        self._stream(rule, before, after, destinations, header)

        def again_before(numbers: Sequence[int], divisors: Sequence[float]) -> Measurement:
            return measure(self._session, [self._targets[number] for number in numbers], self._terms, divisors)

        def again_after(_: Sequence[int], divisors: Sequence[float]) -> Measurement:
            found = Measurement(self._touched, self._terms, [divisors[number] for number in self._numbers])
            self._stream(rule, None, found, {}, b"")
            return self._whole(found, divisors)

        whole = self._whole(after)
        then = None if before is None else norms_of(self._whole(before), again_before, per_tensor=False).whole
        return then, norms_of(whole, again_after, per_tensor=False).whole, whole

    def refuse_nonfinite(self, rule: Rule, after: Measurement) -> None:
        """Raise `NonFiniteError` if there is a NaN or Inf in a result, and name the inputs that it comes from."""
        bad = [number for number in self._numbers if after.nan[number] or after.inf[number]]
        if not bad:
            return
        problems = []
        for one in self._contributions:
            suspects = [selected for place, selected in one.tensors.items() if self._numbers[place] in bad]
            problems += nonfinite_problems(suspects, measure(self._session, suspects, self._terms))
        if rule.keeps:
            suspects = [self._targets[number] for number in bad]
            problems += nonfinite_problems(suspects, measure(self._session, suspects, self._terms))
        if problems:
            raise NonFiniteError(
                "nothing was written, for there are NaN or Inf values; --nonfinite skip leaves out gradients that hold "
                "one, propagate goes on",
                problems,
            )
        raise NonFiniteError(
            "nothing was written, for a sum does not fit its type; --mean or --max-norm makes it smaller, "
            "--nonfinite propagate lets it become Inf",
            overflow_problems(self._targets, after),
        )

    def _whole(self, touched: Measurement, divisors: Sequence[float] | None = None) -> Measurement:
        """A measurement of all targets, of which one of those that are added to is given."""
        whole = Measurement(self._targets, self._terms).updated(self._numbers, touched)
        if not self._left:
            return whole
        if divisors is not None or self._left_alone is None:
            left = [self._targets[number] for number in self._left]
            own = None if divisors is None else [divisors[number] for number in self._left]
            found = measure(self._session, left, self._terms, own)
            if divisors is not None:
                return whole.updated(self._left, found)
            self._left_alone = found
        return whole.updated(self._left, self._left_alone)

    def _stream(
        self,
        rule: Rule,
        before: Measurement | None,
        after: Measurement,
        destinations: Mapping[Shard, Path],
        header: bytes,
    ) -> None:
        nbytes = sum(one.tensor.nbytes for part in self._contributions for one in part.tensors.values())
        nbytes += sum(one.tensor.nbytes for one in self._touched) if rule.keeps else 0
        self._session.stream(self._tasks(rule, before, after, destinations, header), nbytes)

    def _tasks(
        self,
        rule: Rule,
        before: Measurement | None,
        after: Measurement,
        destinations: Mapping[Shard, Path],
        header: bytes,
    ) -> Iterator[Task]:
        def add(block: Block, channel: Channel) -> None:
            view = channel.memory("block", block.end - block.begin)
            pieces = after.pieces(block)
            covered = sum(piece.elements * STORAGE[piece.dtype].bits.itemsize for piece in pieces)
            if rule.keeps or covered < len(view):
                channel.read(block.shard, block.begin, view)
            if before is not None:
                before.add(block, self._session.backend.tile_sums(view, before.pieces(block), self._terms))
            sources = reading.read(self._contributions, self._touched, block, channel)
            after.add(block, self._session.backend.accumulate(view, pieces, sources, rule, self._terms))
            if block.shard in destinations:
                channel.write(destinations[block.shard], block.begin, view)

        def write_header(path: Path, channel: Channel) -> None:
            channel.write(path, 0, memoryview(header))

        for shard in destinations.keys() - set(self.shards):
            yield from copying(shard, [(0, shard.size, 0)], destinations[shard])
        for shard, wanted in by_shard(self._touched):
            if header and shard in destinations:
                yield partial(write_header, destinations[shard])
            itemsizes = {STORAGE[tensor.dtype].bits.itemsize for _, tensor in wanted}
            nbytes = TILE * max(_TILES * min(itemsizes), *itemsizes)
            whole = shard in destinations and not header
            for block in plan(shard, wanted, TILE, whole=whole, nbytes=nbytes):
                yield partial(add, block)
