"""Measurements, the norms that follow from them, and the passes of most operations: measure tensors, rewrite them."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from gradtool.backends.values import STATISTICS, Piece, Statistics
from gradtool.engines.passes import Pass, Tally
from gradtool.reduction import TileSums, tile_count
from gradtool.store.format.gradset import Selected

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.backends.values import BlockSums, Column, Data, NormSpec
    from gradtool.engines.worker import Worker
    from gradtool.store.format.tensors import Shard, Tensor
    from gradtool.store.io.blocks import Block

# Below, a float64 loses precision, and then is 0.
SMALLEST_NORMAL = sys.float_info.min


class Norms(NamedTuple):
    """The norm of all tensors as one vector, and of each of them and of each group if asked for."""

    whole: float
    tensors: list[float]
    groups: list[float]


class Measurement(Statistics, Tally):
    """Sums and statistics of tensors, as `BlockSums` has them for parts of tensors; there may be more columns."""

    def __init__(
        self,
        selected: Sequence[Selected],
        spec: NormSpec,
        more: dict[str, Column] | None = None,
        widths: Sequence[int] | None = None,
    ) -> None:
        widths = [1] * len(selected) if widths is None else widths
        super().__init__(STATISTICS | (more or {}), [TileSums(spec.order)], widths)
        self.spec = spec

    def add(self, block: Block, sums: BlockSums, **more: Any) -> None:
        """Add what a backend has summed in the pieces of a block, and a value a piece for each further column."""
        numbers = chain.from_iterable(repeat(span.tensor, tile_count(span.elements)) for span in block.spans)
        places = [(span.tensor, span.start) for span in block.spans]
        self.merge(places, vars(sums) | more, [(numbers, sums.sums, sums.exponents)])

    @property
    def is_finite(self) -> bool:
        """Whether no NaN and no Inf was summed."""
        return self.spec.drop_nonfinite or not (any(self.nan) or any(self.inf))

    @property
    def stored_zeros(self) -> int:
        """The number of zeros, without NaN and Inf that count as zero because they are dropped."""
        dropped = sum(self.nan) + sum(self.inf) if self.spec.drop_nonfinite else 0
        return sum(self.zeros) - dropped

    def norms(self, *, per_tensor: bool = False, groups: Sequence[Sequence[int]] = (), unscale: float = 1.0) -> Norms:
        """Compute the norm of all tensors as one vector, with `per_tensor` of each, and of each group of numbers.

        All norms are divided by `unscale`.
        """
        (sums,), every = self.tile_sums, range(len(self.max_abs))
        return Norms(
            self._norm(every, sums, unscale),
            [self._norm([n], sums.between(n, n + 1), unscale) for n in every] if per_tensor else [],
            [self._norm(group, sums.renumbered({n: n for n in group}), unscale) for group in groups],
        )

    def _norm(self, numbers: Sequence[int], sums: TileSums, unscale: float) -> float:
        if not math.isinf(self.spec.order):
            return sums.norm(unscale)
        if not self.spec.drop_nonfinite and any(self.nan[number] for number in numbers):
            return math.nan
        return max((self.max_abs[number] for number in numbers), default=0.0) / unscale


def clip_coef(limit: float, norm: float, eps: float) -> float:
    """Return the coefficient limit / (norm + eps), infinite where there is nothing to clip; NaN goes through.

    It is 0 for a limit of 0 or an infinite norm. A quotient that underflows is the smallest number above 0.
    """
    # An infinite limit changes nothing, not even where the norm is infinite too.
    if math.isinf(limit) or norm + eps == 0:
        return math.inf
    is_zero = limit == 0 or math.isinf(norm)
    return limit / (norm + eps) or (0.0 if is_zero else math.ulp(0.0))


@dataclass(frozen=True, eq=False, repr=False)
class Measure(Pass[Measurement]):
    """Sums tensors, and counts what is not finite. Blocks may stay on the device for the next pass."""

    title: ClassVar = "measuring"
    reads_only: ClassVar = True

    keep_on_device: bool = False

    def tally(self) -> Measurement:
        return Measurement(self.selected, self.spec)

    def restricted_to(self, selected: Sequence[Selected], places: Sequence[tuple[int, int]]) -> Self:
        """Return the same pass for parts of tensors; the next pass may run anywhere."""
        return replace(super().restricted_to(selected, places), keep_on_device=False)

    def work(self, block: Block, worker: Worker, tally: Measurement) -> None:
        with worker.view(block, self.spec) as data:
            sums = worker.backend.tile_sums(data, pieces_of(block), self.spec)
            if self.keep_on_device:
                worker.keep_on_device(block, data)
        tally.add(block, sums)


class Scaling(Pass[Measurement]):
    """Multiplies blocks in place, and measures what is written."""

    title: ClassVar = "clipping"

    def tally(self) -> Measurement:
        return Measurement(self.selected, self.spec)

    def work(self, block: Block, worker: Worker, tally: Measurement) -> None:
        with worker.load(block) as loaded:
            if block.spans:
                tally.add(block, self.scale(loaded.data, pieces_of(block), block, worker))
            worker.store(loaded)

    def scale(self, data: Data, pieces: Sequence[Piece], block: Block, worker: Worker) -> BlockSums:
        """Multiply the spans of a block, which are these pieces of the data: as they are stored, or as F64."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Rewrite(Scaling):
    """Multiplies tensors by their factors, limits them to [-limit, limit], and measures what is written."""

    by_tensor = ("factors",)

    factors: Sequence[float]
    limit: float

    def scale(self, data: Data, pieces: Sequence[Piece], block: Block, worker: Worker) -> BlockSums:
        factors = [self.factors[span.tensor] for span in block.spans]
        return worker.backend.scale(data, pieces, factors, self.limit, self.spec)


def pieces_of(block: Block) -> list[Piece]:
    """Return the spans of a block, as a backend takes them."""
    return [Piece(span.dtype, span.offset, span.elements) for span in block.spans]


def in_file_order(selected: Iterable[Selected]) -> list[Selected]:
    """Sort tensors as passes need them: each once, file by file, in the order of their bytes."""
    tensors: dict[Shard, set[Tensor]] = {}
    for shard, tensor in selected:
        tensors.setdefault(shard, set()).add(tensor)
    return [Selected(shard, tensor) for shard in tensors for tensor in sorted(tensors[shard], key=lambda t: t.begin)]
