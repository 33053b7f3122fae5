"""The pass of an accumulation: all gradients and the buffer side by side, block by block."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gradtool import tuning
from gradtool.backends.storage import STORAGE
from gradtool.errors import NonFiniteError
from gradtool.ops.accumulate.read import read
from gradtool.ops.measurement import Measurement, norms_of
from gradtool.ops.passes import by_shard, in_blocks, measure, measuring_again
from gradtool.ops.results import nonfinite_problems, overflow_problems
from gradtool.reduction import TILE
from gradtool.store.io.blocks import covered, plan
from gradtool.store.io.workers import copying, writing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gradtool.backends import NormSpec, Rule
    from gradtool.ops.accumulate.match import Contribution
    from gradtool.ops.passes import Session
    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.header import Shard
    from gradtool.store.format.layout import Layout
    from gradtool.store.fs import File
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.channel import Channel
    from gradtool.store.io.workers import Task

NONFINITE_REMEDY = "--nonfinite skip leaves out gradients that hold one, --overwrite drops what the buffer holds"


class Accumulation:
    """Adds contributions to the buffer's tensors (`targets`); those that nothing is added to are left alone.

    With `created` the buffer is that new file, and there is nothing to add to but zeros. Unless `may_be_nonfinite`, a
    NaN or Inf in a sum is an error, and the inputs that it comes from are named.
    """

    def __init__(
        self,
        session: Session,
        spec: NormSpec,
        targets: Sequence[Selected],
        contributions: Sequence[Contribution],
        *,
        created: Layout | None,
        may_be_nonfinite: bool,
    ) -> None:
        self._session, self._spec, self._targets, self._created = session, spec, targets, created
        self._may_be_nonfinite = may_be_nonfinite
        self._numbers = sorted({number for one in contributions for number in one.tensors})
        self._touched = [targets[number] for number in self._numbers]
        position = {number: place for place, number in enumerate(self._numbers)}
        self._contributions = [
            one._replace(tensors={position[number]: selected for number, selected in one.tensors.items()})
            for one in contributions
        ]
        self._left = sorted(set(range(len(targets))) - set(self._numbers))
        self._left_alone: Measurement | None = None

    @property
    def touched(self) -> list[Selected]:
        """The tensors that are added to."""
        return self._touched

    def measure_sums(self, rule: Rule) -> tuple[float | None, float, Measurement]:
        """The norm of the buffer as it is, that of the sums before they are rounded, and what was found in them."""
        unrounded = rule._replace(rounds=False)
        before, sums = self._pass(unrounded, {}, looks_back=True)
        self._refuse_nonfinite(rule, sums, before)

        def again(_: Sequence[int], divisors: Sequence[float]) -> Measurement:
            return self._pass(unrounded, {}, divisors)[1]

        return self._norm_before(before), norms_of(sums, again, per_tensor=False).whole, sums

    def run(
        self, rule: Rule, destinations: Mapping[Shard, File], *, looks_back: bool, was: Measurement | None = None
    ) -> tuple[float | None, float, Measurement]:
        """Add and write: the norms of the buffer before (if it `looks_back`) and after, and what is in it then.

        What the targets held before may be given, if it is known.
        """
        before, after = self._pass(rule, destinations, looks_back=looks_back)
        self._refuse_nonfinite(rule, after, before if was is None else was.part(self._touched, self._numbers))

        def again(_: Sequence[int], divisors: Sequence[float]) -> Measurement:
            if self._session.journal is not None:
                return measure(self._session, self._targets, self._spec, divisors)
            touched = self._pass(rule, {}, [divisors[number] for number in self._numbers])[1]
            return self._whole(touched, divisors)

        whole = self._whole(after)
        return self._norm_before(before), norms_of(whole, again, per_tensor=False).whole, whole

    def _refuse_nonfinite(self, rule: Rule, touched: Measurement, before: Measurement | None) -> None:
        bad = [place for place in range(len(self._touched)) if touched.nan[place] or touched.inf[place]]
        if self._may_be_nonfinite or not bad:
            return
        problems, places = [], set(bad)
        for one in self._contributions:
            suspects = [part for place, part in one.tensors.items() if place in places]
            problems += nonfinite_problems(suspects, measure(self._session, suspects, self._spec))
        results = [self._touched[place] for place in bad]
        if rule.keeps and before is not None:
            problems += nonfinite_problems(results, before.part(results, bad))
        if problems:
            raise NonFiniteError(f"nothing was written, for there are NaN or Inf values; {NONFINITE_REMEDY}", problems)
        raise NonFiniteError(
            "nothing was written, for a sum does not fit its type; --mean, --max-norm or smaller weights may make it "
            "fit, --nonfinite propagate lets it become Inf",
            overflow_problems(results, touched.part(results, bad)),
        )

    def _norm_before(self, touched: Measurement | None) -> float | None:
        if touched is None:
            return None

        again = measuring_again(self._session, self._targets, self._spec)
        return norms_of(self._whole(touched), again, per_tensor=False).whole

    def _whole(self, touched: Measurement, divisors: Sequence[float] | None = None) -> Measurement:
        """A measurement of all targets, of which one of those that are added to is given."""
        whole = Measurement(self._targets, self._spec).updated(self._numbers, touched)
        if not self._left:
            return whole
        left = [self._targets[number] for number in self._left]
        if self._created is not None:
            empty = Measurement(left, self._spec)
            empty.zeros[:] = [one.tensor.elements for one in left]
            return whole.updated(self._left, empty)
        if divisors is not None:
            own = [divisors[number] for number in self._left]
            return whole.updated(self._left, measure(self._session, left, self._spec, own))
        self._left_alone = self._left_alone or measure(self._session, left, self._spec)
        return whole.updated(self._left, self._left_alone)

    def _pass(
        self,
        rule: Rule,
        destinations: Mapping[Shard, File],
        divisors: Sequence[float] | None = None,
        *,
        looks_back: bool = False,
    ) -> tuple[Measurement | None, Measurement]:
        """What was found in the tensors that are added to, before (if it `looks_back`) and after."""
        before = Measurement(self._touched, self._spec) if looks_back and rule.keeps else None
        after = Measurement(self._touched, self._spec, divisors)
        nbytes = sum(one.tensor.nbytes for part in self._contributions for one in part.tensors.values())
        if destinations and self._created is None and self._session.journal is None:
            nbytes += sum(shard.size for shard in destinations)
        elif rule.keeps:
            nbytes += sum(one.tensor.nbytes for one in self._touched)
        self._session.stream(self._tasks(rule, before, after, destinations), nbytes)
        return before, after

    def _tasks(
        self, rule: Rule, before: Measurement | None, after: Measurement, destinations: Mapping[Shard, File]
    ) -> Iterator[Task]:
        touched = {one.shard for one in self._touched}
        for shard, file in destinations.items():
            if self._created is not None:
                yield writing(file, self._created.header)
            elif shard not in touched:
                yield from copying(shard, [(0, shard.size, 0)], file)
        for shard, wanted in by_shard(self._touched):
            itemsizes = {STORAGE[tensor.dtype].itemsize for _, tensor in wanted}
            tiles = tuning.SUM_TILES * self._session.backend.block_bytes // tuning.BLOCK_BYTES
            nbytes = TILE * max(tiles * min(itemsizes), *itemsizes)
            whole = shard in destinations and self._created is None and self._session.journal is None
            blocks = plan(shard, wanted, TILE, whole=whole, nbytes=nbytes)
            yield from in_blocks(partial(self._add, rule, (before, after), destinations.get(shard)), blocks)

    def _add(
        self,
        rule: Rule,
        found: tuple[Measurement | None, Measurement],
        destination: File | None,
        block: Block,
        channel: Channel,
    ) -> None:
        (before, after), backend = found, self._session.backend
        view = channel.memory("block", block.end - block.begin)
        pieces = after.pieces(block)
        filled = sum(piece.elements * STORAGE[piece.dtype].itemsize for piece in pieces)
        reads = self._created is None and (rule.keeps or filled < len(view))
        if reads:
            channel.read(block.shard, block.begin, view)
        elif filled < len(view):
            view[:] = bytes(len(view))
        if pieces:
            held = backend.to_device(view, copies=reads or filled < len(view), align=pieces[0].offset)
            was = None if before is None else backend.tile_sums(held, before.pieces(block), self._spec)
            batch_bytes = tuning.BATCH_BYTES * backend.block_bytes // tuning.BLOCK_BYTES
            sources = read(self._contributions, self._touched, block, channel, batch_bytes)
            became = backend.accumulate(held, pieces, sources, rule, self._spec)
            if before is not None and was is not None:
                before.add(block, was)
            after.add(block, became)
        if destination is not None:
            if pieces:
                backend.to_host(held, view)
            parts = covered(block) if self._session.journal is not None else None
            channel.write(destination, block.begin, view, parts)
