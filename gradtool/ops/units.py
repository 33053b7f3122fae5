"""Clips units of tensors: a pass that computes the factor of each unit, and a pass that multiplies by it.

A unit is what belongs to one output: a row of a linear layer's weight, a filter of a convolution. Frameworks that store
outputs first (torch: OI, OIHW) have it at one index of the first axis. A tensor with at most one axis longer than 1, as
a bias or a scale, is a single unit. There may be half as many units as elements, so their factors are not held in
memory: the first pass writes them to an unnamed temporary file, from which the second pass reads them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool import tuning
from gradtool.backends.protocol import Stored, Units
from gradtool.backends.storage import STORAGE
from gradtool.backends.units import norms_of, set_factors
from gradtool.engines.tally import Column, Tally
from gradtool.errors import SystemRefusedError
from gradtool.ops.beside import read_one
from gradtool.ops.measurement import Measurement
from gradtool.ops.passes import Scaling, TensorPass, pieces_of
from gradtool.store import fs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gradtool.backends.protocol import BlockSums, Data, Factors, Piece, UnitCounts, UnitLimits
    from gradtool.engines.worker import Loaded, Worker
    from gradtool.store.format.gradset import Selected
    from gradtool.store.io.blocks import Block, Span


def units_of(selected: Selected) -> tuple[int, int]:
    """Return how many units a tensor has, and how many consecutive elements each of them has."""
    shape, elements = selected.tensor.shape, selected.tensor.elements
    if not elements:
        return 0, 1
    count = shape[0] if sum(size > 1 for size in shape) > 1 else 1
    return count, elements // count


class FactorFile:
    """The factors of all units, float64, tensor after tensor in an unnamed temporary file."""

    def __init__(self, fd: int, folder: str, grads: Sequence[Selected]) -> None:
        self._fd, self._folder = fd, folder
        self._begins = list(accumulate((8 * units_of(grad)[0] for grad in grads), initial=0))

    @classmethod
    @contextlib.contextmanager
    def create(cls, grads: Sequence[Selected]) -> Iterator[Self]:
        """Create the file in the folder for temporary files, TMPDIR.

        Raises:
            SystemRefusedError: there is no such folder, or, in any method, no room in it.
        """
        import tempfile  # slow to import

        folder = tempfile.gettempdir()
        with contextlib.ExitStack() as stack:
            with _storing_in(folder):
                file = stack.enter_context(tempfile.TemporaryFile(dir=folder, prefix="gradtool-", buffering=0))
            yield cls(file.fileno(), folder, grads)

    def write(self, tensor: int, first: int, factors: Factors) -> None:
        """Write the factors of consecutive units of a tensor."""
        with _storing_in(self._folder):
            fs.write_all(self._fd, [factors.cast("B")], self._begins[tensor] + 8 * first)

    def read(self, tensor: int, first: int, factors: Factors) -> None:
        """Read the factors of consecutive units of a tensor."""
        view, begin = factors.cast("B"), self._begins[tensor] + 8 * first
        with _storing_in(self._folder):
            while view:
                count = os.preadv(self._fd, [view], begin)
                if not count:
                    raise OSError(errno.EIO, "the temporary file is shorter than what was written")
                view, begin = view[count:], begin + count


@contextlib.contextmanager
def _storing_in(folder: str) -> Iterator[None]:
    """Turn an `OSError` about the factor file into an error that names its folder."""
    try:
        yield
    except OSError as error:
        message = f"cannot store the factors of units: {error.strerror}; set TMPDIR to another folder"
        raise SystemRefusedError(message, file=folder) from error


class UnitFactors(NamedTuple):
    """The factors of consecutive units of a tensor, what is counted of them, and the number of the first."""

    tensor: int
    first: int
    factors: Factors
    counts: UnitCounts


# Units above their limit; those with a factor other than 1, and with a norm of parameters that is not finite; and the
# first one whose factor is beyond the range of its type.
_COLUMNS = {
    "clipped": Column("q", "sum"),
    "changed": Column("q", "sum"),
    "nonfinite": Column("q", "sum"),
    "beyond": Column("q", "first"),
}


class UnitTally(Tally):
    """What is counted of the units of gradients, which take the place of elements."""

    clipped: array[int]
    changed: array[int]
    nonfinite: array[int]
    beyond: array[int]

    def __init__(self, grads: Sequence[Selected]) -> None:
        super().__init__(_COLUMNS, [], [1] * len(grads))

    def add(self, units: UnitFactors) -> None:
        """Add consecutive units."""
        rows = {name: [count] for name, count in units.counts._asdict().items()}
        self.merge([(units.tensor, units.first)], rows, [])


@dataclass(frozen=True, eq=False, repr=False)
class ComputeUnitFactors(TensorPass[tuple[Measurement, UnitTally]]):
    """Measures gradients, and writes the factors of their units; `params` are the parameters in the same places."""

    title = "comparing"
    by_tensor = ("params",)

    params: Sequence[Selected]
    limits: UnitLimits
    file: FactorFile

    @property
    def beside(self) -> Sequence[Selected]:
        """The parameters."""
        return self.params

    def tally(self) -> tuple[Measurement, UnitTally]:
        """Begin with nothing, of all gradients and of all units."""
        return Measurement(self.selected, self.spec), UnitTally(self.selected)

    def work(self, block: Block, worker: Worker, tally: tuple[Measurement, UnitTally]) -> None:
        """Compute the factors of the units that begin in a block; the last one may go on behind it."""
        with worker.load(block) as loaded, contextlib.ExitStack() as stack:
            measured = worker.backend.tile_sums(loaded.data, pieces_of(block), self.spec)
            units = []
            for span in block.spans:
                size = self._size(span)
                last, rest = divmod(span.start + span.elements, size)
                if rest and last * size >= span.start:
                    units.append(self._of_unit(span.tensor, last, worker))
            # The others come last: their memory is owned until they are written, and those above use the same before.
            units += self._in_block(loaded, worker, stack)
            # Nothing is added before all is known: a device that has no room gets the block in halves.
            sums, counts = tally
            sums.add(block, measured)
            for unit in units:
                counts.add(unit)
                self.file.write(unit.tensor, unit.first, unit.factors)

    def _size(self, span: Span) -> int:
        """Return how many elements a unit of the tensor of a span has."""
        return units_of(self.selected[span.tensor])[1]

    def _in_block(self, loaded: Loaded, worker: Worker, stack: contextlib.ExitStack) -> Iterator[UnitFactors]:
        """Compute the factors of units of which all elements are in a block; the stack owns their memory."""
        block = loaded.block
        whole = {span.tensor: units for span in block.spans if (units := _whole_units(span, self._size(span)))}
        if not whole:
            return
        sides = {number: self.params[number] for number in whole}
        beside, addends = stack.enter_context(read_one(sides, self.selected, block, worker))
        room = stack.enter_context(worker.memory(8 * sum(map(len, whole.values())))).cast("d")
        for span, addend in zip((span for span in block.spans if span.tensor in whole), addends, strict=True):
            units, size = whole[span.tensor], self._size(span)
            start, count = units.start * size - span.start, len(units) * size
            grads = _stored(loaded.view, span.dtype, span.offset, start, count)
            params = _stored(beside, addend.dtype, addend.offset, start, count)
            factors, room = room[: len(units)], room[len(units) :]
            counts = worker.backend.unit_factors(grads, params, size, self.limits, factors)
            yield UnitFactors(span.tensor, units.start, factors, counts)

    def _of_unit(self, tensor: int, unit: int, worker: Worker) -> UnitFactors:
        """Read a unit and compute its factor; a part at a time, if it is longer than a patch."""
        grad, param = self.selected[tensor], self.params[tensor]
        size, backend, factors = units_of(grad)[1], worker.backend, memoryview(bytearray(8)).cast("d")
        with _reading(grad, size, worker) as grads, _reading(param, size, worker) as params:
            if size <= tuning.PATCH_ELEMENTS:
                both = [Stored(read(unit * size, size), dtype) for read, dtype in (grads, params)]
                counts = backend.unit_factors(both[0], both[1], size, self.limits, factors)
            else:
                norms = [norms_of(*side, range(unit, unit + 1), size, backend) for side in (grads, params)]
                counts = set_factors(norms[0], norms[1], self.limits, grad.tensor.dtype, factors)
        return UnitFactors(tensor, unit, factors, counts)


@dataclass(frozen=True, eq=False, repr=False)
class ScaleUnits(Scaling):
    """Multiplies each unit by its factor, and measures what is written; `numbers` are those of tensors in the file."""

    numbers: Sequence[int]
    file: FactorFile

    def scale(self, data: Data, pieces: Sequence[Piece], block: Block, worker: Worker) -> BlockSums:
        """Multiply each unit by its factor, which has the type that the stored values call for."""
        units, ranges, count = [], [], 0
        for span in block.spans:
            size = units_of(self.selected[span.tensor])[1]
            first, phase = divmod(span.start, size)
            end = -(-(span.start + span.elements) // size)
            units.append(Units(size, phase, count))
            ranges.append((self.numbers[span.tensor], first, slice(count, count + end - first)))
            count += end - first
        with worker.memory(8 * count) as memory:
            factors = memory.cast("d")
            for span, piece, (number, first, place) in zip(block.spans, pieces, ranges, strict=True):
                self.file.read(number, first, factors[place])
                if span.dtype != piece.dtype:
                    factors[place] = array("d", array("f", factors[place]))
            return worker.backend.scale_units(data, pieces, units, factors, self.spec)


def _whole_units(span: Span, size: int) -> range:
    """Return the units of which all elements are in a span."""
    return range(-(-span.start // size), (span.start + span.elements) // size)


def _stored(view: memoryview, dtype: str, offset: int, start: int, count: int) -> Stored:
    """Return `count` elements from number `start` on, of those that begin at byte `offset` of a view."""
    itemsize = STORAGE[dtype].itemsize
    begin = offset + start * itemsize
    return Stored(view[begin : begin + count * itemsize], dtype)


@contextlib.contextmanager
def _reading(selected: Selected, size: int, worker: Worker) -> Iterator[tuple[Callable[[int, int], memoryview], str]]:
    """Have memory into which elements of a tensor are read, at most `size` or a patch, and their type."""
    tensor = selected.tensor
    itemsize = STORAGE[tensor.dtype].itemsize

    def read(start: int, elements: int) -> memoryview:
        worker.read(selected.shard, tensor.begin + start * itemsize, view[: elements * itemsize])
        return view[: elements * itemsize]

    with worker.memory(min(size, tuning.PATCH_ELEMENTS) * itemsize) as view:
        yield read, tensor.dtype
