"""Adaptive gradient clipping (`clip --agc`): each unit is limited by the norm of its own parameters.

A unit is what belongs to one output: a row of a linear layer's weight, a filter of a convolution. Frameworks that store
outputs first (torch: OI, OIHW) have it at one index of the first axis. A tensor with at most one axis longer than 1, as
a bias or a scale, is a single unit. There may be half as many units as elements, so their factors are not held in
memory: the first pass writes them to an unnamed temporary file, from which the second pass reads them.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from gradtool import tuning
from gradtool.backends.storage import STORAGE
from gradtool.backends.units import norms_of, set_factors
from gradtool.backends.values import Column, NormSpec, TypedView, UnitCounts, UnitLimits, Units
from gradtool.engines.passes import Pass, Tally
from gradtool.errors import BadInputError, Problem, SystemRefusedError, option, say
from gradtool.ops.aligned_read import read_beside
from gradtool.ops.clip.decide import Decision, check_finite, out_of_range
from gradtool.ops.passes import Measure, Measurement, Scaling, pieces_of
from gradtool.store import fs
from gradtool.store.format.selection import SHARED_NAMES, check_dtypes, require_unique_names
from gradtool.store.io.channel import fill
from gradtool.store.source import Reader, Source
from gradtool.store.transaction.inputs import Inputs, open_to_read
from gradtool.store.transaction.output import check_not_replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gradtool.backends.values import BlockSums, Data, Factors, Piece
    from gradtool.engines.worker import Loaded, Worker
    from gradtool.ops.call import Call
    from gradtool.options import ClipOptions
    from gradtool.store.format.gradset import GradientSet, Selected
    from gradtool.store.io.blocks import Block
    from gradtool.store.transaction.output import Output

    # Consecutive units: the number of their tensor, the number of the first unit, their factors, and their counts.
    UnitFactors = tuple[int, int, Factors, UnitCounts]


def decide_units(options: ClipOptions, call: Call, stack: contextlib.ExitStack) -> Decision:
    """Decide what becomes of each unit; the stack closes the file of the factors, which the decision's pass reads.

    New files may be read by those who may read gradients and parameters.

    Raises:
        UsageError: a file of the parameters would be replaced.
        BadInputError: the parameters do not fit the gradients, or a coefficient is out of range for its type.
        NonFiniteError: a gradient or a parameter is NaN or Inf.
        SystemRefusedError: a file cannot be read, or may be half changed; or there is no room for the factors.
    """
    grads, spec = call.selected, NormSpec()
    sets, params = _parameters(options, grads, call.output)
    limits = UnitLimits(options.agc or 0.0, options.agc_eps, options.unscale)
    file = stack.enter_context(contextlib.closing(FactorFile(grads)))
    before, units = call.run(ComputeUnitFactors(grads, spec, params, limits, file))
    check_finite(options, grads, before)
    suspects = [param for param, count in zip(params, units.nonfinite, strict=True) if count]
    if suspects and options.nonfinite == "error":
        # The norm of finite parameters may overflow, too.
        check_finite(options, suspects, call.run(Measure(suspects, spec)), "a parameter is NaN or Inf")
    for number, unit in enumerate(units.beyond):
        if unit >= 0:
            factor = memoryview(bytearray(8)).cast("d")
            hint = say("use a larger {}, or clip in several steps", option("agc"))
            file.read(number, unit, factor)
            raise out_of_range(grads[number], factor[0], hint)
    numbers = [number for number, count in enumerate(units.changed) if count or options.dtype is not None]
    scaling = ScaleUnits([grads[number] for number in numbers], spec, numbers, file)
    clipped = [count > 0 for count in units.clipped]
    counts = sum(units_of(grad)[0] for grad in grads), sum(units.clipped)
    norms = before.norms(unscale=options.unscale)
    call.output = call.output.with_sources(sets)
    return Decision(before, norms, None, (), clipped, scaling, numbers, units=counts)


def _parameters(
    options: ClipOptions, grads: Sequence[Selected], output: Output
) -> tuple[Sequence[GradientSet], Sequence[Selected]]:
    """Open the parameters of gradients: their sets, and for each gradient the tensor of the same name and shape."""
    opened = open_to_read(Inputs([os.fspath(options.params or "")]))
    check_not_replaced(opened.sets, "params", output.targets)
    require_unique_names(opened.selected, SHARED_NAMES)
    by_name = {param.tensor.name: param for param in opened.selected}
    problems = []
    for shard, tensor in grads:
        param = by_name.get(tensor.name)
        if param is None:
            message = say("is missing from {}", option("params", options.params))
            problems.append(Problem("missing-tensor", message, shard.name, tensor.name))
        elif param.tensor.shape != tensor.shape:
            mismatch = f"has shape {list(param.tensor.shape)}, but its gradient has {list(tensor.shape)}"
            problems.append(Problem("shape", mismatch, param.shard.name, tensor.name))
    if problems:
        raise BadInputError.from_problems(problems, say("use {} to skip tensors", option("exclude")))
    params = [by_name[grad.tensor.name] for grad in grads]
    check_dtypes(params, tuple(STORAGE))
    return opened.sets, params


def units_of(selected: Selected) -> tuple[int, int]:
    """Return how many units a tensor has, and how many consecutive elements each of them has."""
    shape, elements = selected.tensor.shape, selected.tensor.elements
    if not elements:
        return 0, 1
    count = shape[0] if sum(size > 1 for size in shape) > 1 else 1
    return count, elements // count


class FactorFile:
    """The factors of all units, float64, tensor after tensor in an unnamed temporary file.

    Raises:
        SystemRefusedError: the folder for temporary files, TMPDIR, has no room.
    """

    def __init__(self, grads: Sequence[Selected]) -> None:
        import tempfile  # slow to import

        self._begins = list(accumulate((8 * units_of(grad)[0] for grad in grads), initial=0))
        self._folder = tempfile.gettempdir()
        with self._errors():
            self._file = tempfile.TemporaryFile(dir=self._folder, prefix="gradtool-", buffering=0)  # noqa: SIM115
        self._reader = Reader(Source(self._folder, self._begins[-1]), self._file.fileno())
        self.close = self._file.close

    def write(self, tensor: int, first: int, factors: Factors) -> None:
        """Write the factors of consecutive units of a tensor."""
        with self._errors():
            fs.write_all(self._file.fileno(), [factors.cast("B")], self._begins[tensor] + 8 * first)

    def read(self, tensor: int, first: int, factors: Factors) -> None:
        """Read the factors of consecutive units of a tensor."""
        fill(self._reader, self._begins[tensor] + 8 * first, factors.cast("B"))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"cannot store the factors of units: {error.strerror}"
            raise SystemRefusedError(message, file=self._folder, hint="set TMPDIR to another folder") from error


class _UnitTally(Tally):
    """Counts of the units of gradients, as in `UnitCounts`; units take the place of elements."""

    clipped: array[int]
    changed: array[int]
    nonfinite: array[int]
    beyond: array[int]

    def __init__(self, grads: Sequence[Selected]) -> None:
        sums = dict.fromkeys(UnitCounts._fields, Column("q", "sum"))
        super().__init__(sums | {"beyond": Column("q", "first")}, [], [1] * len(grads))


@dataclass(frozen=True, eq=False, repr=False)
class ComputeUnitFactors(Pass[tuple[Measurement, _UnitTally]]):
    """Measures gradients, and writes the factors of their units; `params` are the parameters in the same places."""

    title = "comparing"
    by_tensor = ("params",)

    params: Sequence[Selected]
    limits: UnitLimits
    file: FactorFile

    @property
    def beside(self) -> Sequence[Selected]:
        return self.params

    def tally(self) -> tuple[Measurement, _UnitTally]:
        return Measurement(self.selected, self.spec), _UnitTally(self.selected)

    def work(self, block: Block, worker: Worker, tally: tuple[Measurement, _UnitTally]) -> None:
        with worker.load(block) as loaded, contextlib.ExitStack() as stack:
            sums = worker.backend.tile_sums(loaded.data, pieces_of(block), self.spec)
            units = [*self._cut_unit(block, worker, stack), *self._whole_units(loaded, worker, stack)]
            # Nothing is added before all is known: a device that has no room gets the block in halves.
            measurement, unit_tally = tally
            measurement.add(block, sums)
            for tensor, first, factors, counts in units:
                rows = {name: [count] for name, count in counts._asdict().items()}
                unit_tally.merge([(tensor, first)], rows, [])
                self.file.write(tensor, first, factors)

    def _whole_units(self, loaded: Loaded, worker: Worker, stack: contextlib.ExitStack) -> Iterator[UnitFactors]:
        """Compute the factors of units of which all elements are in a block; the stack owns their memory."""
        spans = []
        for span in loaded.block.spans:
            size = units_of(self.selected[span.tensor])[1]
            units = range(-(-span.start // size), (span.start + span.elements) // size)
            if units:
                spans.append((span, size, units))
        if not spans:
            return
        params = {span.tensor: self.params[span.tensor] for span, _, _ in spans}
        view, addends = stack.enter_context(read_beside(params, self.selected, loaded.block, worker))
        # Memory is asked for once, because a block may have thousands of tensors.
        memory = stack.enter_context(worker.memory(8 * sum(len(units) for _, _, units in spans))).cast("d")
        for (span, size, units), param in zip(spans, addends, strict=True):
            factors, memory = memory[: len(units)], memory[len(units) :]
            start, count = units.start * size - span.start, len(units) * size
            grad_values = _part(loaded.view, span.dtype, span.offset, start, count)
            param_values = _part(view, param.dtype, param.offset, start, count)
            counts = worker.backend.unit_factors(grad_values, param_values, size, self.limits, factors)
            yield span.tensor, units.start, factors, counts

    def _cut_unit(self, block: Block, worker: Worker, stack: contextlib.ExitStack) -> Iterator[UnitFactors]:
        """Read the last unit of a block, if it goes on behind it, and compute its factor.

        It is read in parts if it is longer than a patch.
        """
        for span in block.spans[-1:]:
            sides = self.selected[span.tensor], self.params[span.tensor]
            size, backend, factors = units_of(sides[0])[1], worker.backend, memoryview(bytearray(8)).cast("d")
            unit, elements = divmod(span.start + span.elements, size)
            if not elements or unit * size < span.start:
                return
            reads = []
            for side in sides:
                nbytes = min(size, tuning.PATCH_ELEMENTS) * STORAGE[side.tensor.dtype].itemsize
                view = stack.enter_context(worker.memory(nbytes))
                reads.append((partial(_read, worker, side, view), side.tensor.dtype))
            if size <= tuning.PATCH_ELEMENTS:
                grad_values, param_values = (TypedView(read(unit * size, size), dtype) for read, dtype in reads)
                counts = backend.unit_factors(grad_values, param_values, size, self.limits, factors)
            else:
                norms = [norms_of(*read, range(unit, unit + 1), size, backend) for read in reads]
                counts = set_factors(norms[0], norms[1], self.limits, sides[0].tensor.dtype, factors)
            yield span.tensor, unit, factors, counts


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


def _part(view: memoryview, dtype: str, offset: int, start: int, count: int) -> TypedView:
    """Return `count` elements from number `start` on, of those that begin at byte `offset` of a view."""
    itemsize = STORAGE[dtype].itemsize
    begin = offset + start * itemsize
    return TypedView(view[begin : begin + count * itemsize], dtype)


def _read(worker: Worker, selected: Selected, view: memoryview, start: int, elements: int) -> memoryview:
    """Read consecutive elements of a tensor into memory."""
    itemsize = STORAGE[selected.tensor.dtype].itemsize
    part = view[: elements * itemsize]
    worker.read(selected.shard, selected.tensor.begin + start * itemsize, part)
    return part
