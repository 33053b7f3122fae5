"""The pass that reads two gradient sets side by side, and the metrics of how far they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from gradtool.backends.storage import STORAGE
from gradtool.backends.values import Column, Piece
from gradtool.engines.passes import Pass, Tally
from gradtool.engines.worker import reads_files
from gradtool.ops.aligned_read import read_beside
from gradtool.ops.passes import pieces_of
from gradtool.reduction import TILE, TileSums, scaled_total
from gradtool.store.io.blocks import BRIDGE_BYTES, Span, block_around

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

    from gradtool.backends.protocol import Backend
    from gradtool.backends.values import BlockDifferences, Tolerance
    from gradtool.engines.worker import Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.io.destination import Destination

    # A number m·2^k as m and k, with 0.5 <= |m| < 1, or m = 0.
    Scaled = tuple[float, int]

# In the order of `BlockDifferences.maxima` and, with `not_near`, `BlockDifferences.counts`.
MAXIMA = ("max_abs_diff", "max_rel_diff", "max_ulp")
COUNTS = ("differing", "differing_bits", "not_close", "nonfinite_a", "nonfinite_b", "nonfinite_both")
# The index of the first element that has each maximum.
INDICES = tuple(f"{name}_index" for name in MAXIMA)
_COLUMNS = {name: Column("Q" if name == "max_ulp" else "d", "max", place=f"{name}_index") for name in MAXIMA}
_COLUMNS |= {name: Column("q", "place") for name in INDICES}
_COLUMNS |= {name: Column("q", "sum") for name in (*COUNTS, "not_near")} | {"first_differing": Column("q", "first")}
# A block whose parts are smaller on average is read as a whole, because each part takes Python some time.
_PART_BYTES = 64 << 10


class Metrics(NamedTuple):
    """‖a-b‖/‖b‖, the cosine of the angle between a and b, and their norms."""

    rel_l2: float
    cosine: float
    norm_a: float
    norm_b: float


class Comparison(Tally):
    """The differences of tensors; the tile sums are those of (a-b)², a², b² and ab.

    Their exponents are those of the sums themselves, which for squares are twice those of tiles.
    """

    differing: array[int]
    max_abs_diff: array[float]
    max_abs_diff_index: array[int]
    max_ulp: array[int]
    max_ulp_index: array[int]
    differing_bits: array[int]
    not_close: array[int]
    nonfinite_a: array[int]
    nonfinite_b: array[int]
    nonfinite_both: array[int]
    not_near: array[int]
    first_differing: array[int]

    def __init__(self, targets: Sequence[Selected]) -> None:
        sums = [TileSums(1.0, signed=is_signed, finite=True) for is_signed in (False, False, False, True)]
        super().__init__(_COLUMNS, sums, [1] * len(targets))

    def add(self, block: Block, differences: BlockDifferences) -> None:
        """Add the differences in the tiles of a block."""
        places = [
            (span.tensor, start)
            for span in block.spans
            for start in range(span.start, span.start + span.elements, TILE)
        ]
        rows = dict(zip(MAXIMA, differences.maxima, strict=True))
        rows |= {name: differences.places[at::4] for at, name in enumerate((*INDICES, "first_differing"))}
        rows |= {name: differences.counts[at::7] for at, name in enumerate((*COUNTS, "not_near"))}
        gaps, a, b = (differences.exponents[at::3] for at in range(3))
        numbers = [number for number, _ in places]
        exponents = enumerate(((gaps, gaps), (a, a), (b, b), (a, b)))
        self.merge(places, rows, [(numbers, differences.sums[at::4], map(add, *pair)) for at, pair in exponents])

    def metrics(self, number: int | None = None) -> Metrics:
        """Compute the metrics of one tensor, or of all tensors as one vector."""
        parts = self.tile_sums if number is None else [sums.between(number, number + 1) for sums in self.tile_sums]
        gaps, a, b, products = (scaled_total(sums.sums, sums.exponents) for sums in parts)
        norm_a, norm_b = _root(a), _root(b)
        return Metrics(_quotient(_root(gaps), norm_b), _cosine(a, b, products), _number(norm_a), _number(norm_b))

    def figures(self, number: int) -> dict[str, float]:
        """Return the metrics, the maxima and the counts of one tensor."""
        columns = {name: getattr(self, name)[number] for name in (*MAXIMA, *COUNTS)}
        return self.metrics(number)._asdict() | columns

    def distance(self) -> float:
        """Compute ‖a-b‖ of all tensors as one vector."""
        return _number(_root(scaled_total(self.tile_sums[0].sums, self.tile_sums[0].exponents)))


def _root(square: Scaled) -> Scaled:
    mantissa, exponent = square
    return math.sqrt(mantissa * (1 + exponent % 2)), exponent // 2


def _number(scaled: Scaled) -> float:
    """Return the number, infinite where it is beyond float64."""
    try:
        return math.ldexp(*scaled)
    except OverflowError:
        return math.inf


def _quotient(x: Scaled, y: Scaled) -> float:
    """Return x/y, with 0/0 = 0 and any other x/0 infinite."""
    if not y[0]:
        return math.inf if x[0] else 0.0
    return _number((x[0] / y[0], x[1] - y[1]))


def _cosine(a: Scaled, b: Scaled, products: Scaled) -> float:
    """Return Σab / √(Σa²·Σb²), which is 1 to the last bit where a and b are equal; 1 for two zeros, 0 for one."""
    if not a[0] or not b[0]:
        return float(a[0] == b[0])
    exponent = a[1] + b[1]
    root = math.sqrt(a[0] * b[0] * (1 + exponent % 2))
    return max(-1.0, min(1.0, _number((products[0] / root, products[1] - exponent // 2))))


@dataclass(frozen=True, eq=False, repr=False)
class Compare(Pass[Comparison]):
    """A pass that compares each selected tensor, of A, with its counterpart in `b_tensors`, by its tolerance."""

    title: ClassVar = "comparing"
    reads_only: ClassVar = True
    by_tensor = ("b_tensors", "tolerances")

    b_tensors: Sequence[Selected]
    tolerances: Sequence[Tolerance]

    @property
    def beside(self) -> Sequence[Selected]:
        return self.b_tensors

    def tally(self) -> Comparison:
        return Comparison(self.selected)

    def block_bytes(self, backend: Backend, destination: Destination) -> int:
        """Return a size that makes a block and its counterpart together about as large as usual."""
        nbytes = max(super().block_bytes(backend, destination), 2 * backend.block_bytes)
        a, b = ([STORAGE[tensor.dtype].itemsize for _, tensor in side] for side in (self.selected, self.b_tensors))
        return max(TILE * max(a), nbytes * min(a) // (min(a) + max(b))) if a else nbytes

    def work(self, block: Block, worker: Worker, tally: Comparison) -> None:
        shards = [block.shard, *(self.b_tensors[span.tensor].shard for span in block.spans)]
        reads = reads_files(worker.backend, worker.destination, self.spec, shards)
        parts = list(_side_by_side(block, self.b_tensors)) if reads else []
        if parts and (len(parts) - 1) * _PART_BYTES <= block.end - block.begin:
            for a_part, b_part in parts:
                with worker.file_block(a_part, sides=2) as a, worker.file_block(b_part, sides=2) as b:
                    tolerances = [self.tolerances[span.tensor] for span in a_part.spans]
                    differences = worker.backend.differences(a, pieces_of(a_part), b, pieces_of(b_part), tolerances)
                tally.add(a_part, differences)
            return
        beside = {span.tensor: self.b_tensors[span.tensor] for span in block.spans}
        with worker.load(block) as loaded, read_beside(beside, self.selected, block, worker) as (view, addends):
            pieces = [Piece(addend.dtype, addend.offset, addend.elements) for addend in addends]
            b = worker.backend.to_device(view, align=pieces[0].offset)
            tolerances = [self.tolerances[span.tensor] for span in block.spans]
            differences = worker.backend.differences(loaded.data, pieces_of(block), b, pieces, tolerances)
        tally.add(block, differences)


def _side_by_side(block: Block, b_tensors: Sequence[Selected]) -> Iterator[tuple[Block, Block]]:
    """Cut a block of A into parts whose counterparts each lie in a single stretch of a file of B."""
    a_spans: list[Span] = []
    b_spans: list[Span] = []
    shard, end = block.shard, 0
    for span in block.spans:
        b_shard, tensor = b_tensors[span.tensor]
        itemsize = STORAGE[tensor.dtype].itemsize
        begin = tensor.begin + span.start * itemsize
        if a_spans and (b_shard is not shard or not 0 <= begin - end <= BRIDGE_BYTES):
            yield block_around(block.shard, a_spans), block_around(shard, b_spans)
            a_spans, b_spans = [], []
        shard, end = b_shard, begin + span.elements * itemsize
        a_spans.append(span._replace(offset=block.begin + span.offset))
        b_spans.append(span._replace(dtype=tensor.dtype, offset=begin))
    if a_spans:
        yield block_around(block.shard, a_spans), block_around(shard, b_spans)
