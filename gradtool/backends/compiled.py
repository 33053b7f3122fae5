"""The compiled kernels: the numpy backend's bits in one pass over memory."""

from __future__ import annotations

import math
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any

import gradtool.backends._kernels as kernels
from gradtool import tuning
from gradtool.arrays import float64s, int32s, int64s, np
from gradtool.backends.cpu import NumpyBackend, sorting_network
from gradtool.backends.storage import STORAGE
from gradtool.backends.tiles import empty_histogram
from gradtool.backends.values import STATISTICS, Addend, BlockSums, Extremes, FileBlock, NormSpec, Piece, UnitCounts
from gradtool.reduction import tile_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.backends.values import (
        Array,
        BlockDifferences,
        BlockHistogram,
        Data,
        Factors,
        Floats,
        Patch,
        Pieces,
        Tolerance,
        Trim,
        TypedView,
        UnitLimits,
        Units,
    )

# As `enum term` in _kernels.c.
_TERMS = {math.inf: 0, 1.0: 1, 2.0: 2}
# What is fastest where no sums are needed.
_MAXIMA = NormSpec(math.inf)
# As COLUMNS in _order.h.
_COLUMNS = 128


class CompiledBackend(NumpyBackend):
    """The numpy backend with compiled kernels, for norms of order 1, 2 and infinity."""

    def reads_files(self, spec: NormSpec) -> bool:
        return spec.order in _TERMS

    def tile_sums(self, block: memoryview | FileBlock, pieces: Pieces, spec: NormSpec) -> BlockSums:
        if isinstance(block, FileBlock) or spec.order in _TERMS:
            return _run(block, pieces, spec)
        return super().tile_sums(block, pieces, spec)

    def histogram(
        self, block: memoryview | FileBlock, pieces: Pieces, spec: NormSpec
    ) -> tuple[BlockSums, BlockHistogram]:
        if spec.order not in _TERMS:
            return self.tile_sums(block, pieces, spec), self.histogram(block, pieces, _MAXIMA)[1]
        histogram = empty_histogram(pieces)
        return _run(block, pieces, spec, histogram=histogram), histogram

    def extremes(self, block: memoryview, pieces: Pieces) -> Extremes:
        bounds = array("Q", [bound for piece in pieces for bound in STORAGE[piece.dtype].bounds])
        counts = int64s(2 * len(pieces))
        kernels.extremes(block, _table(pieces), bounds, counts)
        return Extremes(counts[::2], counts[1::2])

    def scale(
        self, block: memoryview, pieces: Pieces, factors: Sequence[float], limit: float, spec: NormSpec
    ) -> BlockSums:
        if spec.order not in _TERMS:
            return super().scale(block, pieces, factors, limit, spec)
        return _run(block, pieces, spec, factors=array("d", factors), limit=limit)

    def scale_units(
        self, block: memoryview, pieces: Pieces, units: Sequence[Units], factors: Factors, spec: NormSpec
    ) -> BlockSums:
        table = array("q")
        for (dtype, offset, elements), (size, phase, first) in zip(pieces, units, strict=True):
            table.extend((STORAGE[dtype].code, offset, elements, phase, size, first))
        losses = int64s(2 * len(pieces))
        kernels.scale_units(block, table, factors, losses)
        sums = self.tile_sums(block, pieces, spec)
        sums.new_zeros, sums.new_subnormals = losses[::2], losses[1::2]
        return sums

    def unit_factors(
        self, grads: TypedView, params: TypedView, size: int, limits: UnitLimits, factors: Factors
    ) -> UnitCounts:
        if size <= tuning.PATCH_ELEMENTS:
            sides = (grads.view, STORAGE[grads.dtype].code, params.view, STORAGE[params.dtype].code)
            counts = kernels.unit_factors(*sides, size, *limits, factors)
            if counts is not None:
                return UnitCounts(*counts)
        # Sums that are out of range are rare.
        return super().unit_factors(grads, params, size, limits, factors)

    def differences(
        self,
        a: memoryview | FileBlock,
        a_pieces: Pieces,
        b: memoryview | FileBlock,
        b_pieces: Pieces,
        tolerances: Sequence[Tolerance],
    ) -> BlockDifferences:
        from gradtool.backends.differences import empty_differences

        result = empty_differences(a_pieces)
        table = array("d", chain.from_iterable(tolerances))
        kernels.differences(a, _table(a_pieces), b, _table(b_pieces), table, *result)
        return result

    def row_sums(self, x: memoryview, dtype: str, rows: int, columns: int, center: Floats | None) -> Array:
        sums = np.empty(rows)
        kernels.row_sums(x, STORAGE[dtype].code, rows, columns, center, sums)
        return sums

    def layer_norm_sums(self, patch: Patch) -> tuple[Array, Array]:
        sums = np.zeros(patch.rows), np.zeros(patch.rows)
        kernels.layer_norm(*_arguments(patch), *sums, patch.rms, None, 0, 1, None, None)
        return sums

    def layer_norm_grads(self, patch: Patch, means: tuple[Array, Array] | None, x_grad: memoryview, dtype: str) -> Data:
        grads = [float64s(patch.groups * patch.columns) for _ in range(2)]
        code, height = STORAGE[dtype].code, patch.height
        kernels.layer_norm(*_arguments(patch), *(means or (None, None)), patch.rms, x_grad, code, height, *grads)
        return grads

    def add_groups(self, totals: array[float], grads: Data) -> None:
        columns = memoryview(totals).nbytes // 16
        for number, sums in enumerate(grads):
            starts = range(0, 8 * len(sums), max(1, 8 * columns))
            self._add(totals, sums, [Addend("F64", start, columns, number * columns, 1.0) for start in starts])

    def widen(self, view: memoryview, dtype: str, offset: float = -0.0) -> array[float]:
        values = array("d", [offset]) * (len(view) // STORAGE[dtype].itemsize)
        self._add(values, view, [Addend(dtype, 0, len(values), 0, 1.0)])
        return values

    def narrow(self, values: array[float], dtype: str) -> memoryview:
        view = memoryview(bytearray(len(values) * STORAGE[dtype].itemsize))
        _run(view, [Piece(dtype, 0, len(values))], _MAXIMA, wide=values)
        return view

    def _add(self, sums: Floats, source: memoryview, addends: Sequence[Addend], *, fresh: bool = False) -> None:
        kernels.add(sums, source, *_addends(addends), fresh)

    def _trim(self, means: Array, source: memoryview, groups: Sequence[Sequence[Addend]], trim: Trim) -> None:
        count, dropped = len(groups[0]), trim.dropped_from(len(groups[0]))
        scratch = np.empty((count + 1) * _COLUMNS)
        table = _addends([addend for group in groups for addend in group])
        network = sorting_network(count, dropped)
        kernels.trimmed_means(means, source, *table, count, dropped, trim.finite, network, scratch)

    def _round(self, sums: Array, block: memoryview, pieces: Pieces, spec: NormSpec) -> BlockSums:
        if spec.order not in _TERMS:
            return super()._round(sums, block, pieces, spec)
        return _run(block, pieces, spec, wide=sums)


def _addends(addends: Sequence[Addend]) -> tuple[array[int], array[float]]:
    """Return addends as the kernels take them, and their weights."""
    rows = [(STORAGE[dtype].code, offset, elements, at) for dtype, offset, elements, at, _ in addends]
    return array("q", [number for row in rows for number in row]), array("d", [addend.weight for addend in addends])


def _arguments(patch: Patch) -> tuple[Any, ...]:
    codes = STORAGE[patch.x_dtype].code, STORAGE[patch.y_grad_dtype].code
    vectors = patch.mean, patch.inv_std_dev, patch.scale, patch.bias
    return patch.x, codes[0], patch.y_grad, codes[1], patch.rows, patch.columns, *vectors


def _table(pieces: Pieces) -> array[int]:
    """Return a row for each piece: its dtype's code, its offset and its elements."""
    return array("q", [number for p in pieces for number in (STORAGE[p.dtype].code, p.offset, p.elements)])


def _run(
    block: memoryview | FileBlock,
    pieces: Pieces,
    spec: NormSpec,
    *,
    factors: array[float] | None = None,
    limit: float = math.inf,
    wide: Floats | None = None,
    histogram: BlockHistogram | tuple[None, None] = (None, None),
) -> BlockSums:
    tiles = sum(tile_count(piece.elements) for piece in pieces)
    results = float64s(tiles), int32s(tiles), int64s(len(STATISTICS) * len(pieces))
    term = _TERMS[spec.order]
    kernels.run(block, _table(pieces), factors, wide, limit, term, spec.drop_nonfinite, *results, *histogram)
    return BlockSums(*results)
