"""The compiled kernels: the numpy backend's bits in one pass over memory."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Any

import gradtool.backends._kernels as kernels
from gradtool import tuning
from gradtool.arrays import float64s, int32s, int64s, np
from gradtool.backends.cpu import NumpyBackend
from gradtool.backends.protocol import (
    STATISTICS,
    Addend,
    BlockDifferences,
    BlockHistogram,
    BlockSums,
    Extremes,
    FileBlock,
    NormSpec,
    Patch,
    Piece,
    Tolerance,
    UnitCounts,
    Units,
)
from gradtool.backends.storage import STORAGE
from gradtool.backends.tiles import empty_histogram
from gradtool.reduction import tile_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gradtool.backends.protocol import Data, Factors, Floats, TypedView, UnitLimits

# As `enum term` in _kernels.c.
_TERMS = {math.inf: 0, 1.0: 1, 2.0: 2}
# What is fastest where no sums are needed.
_MAXIMA = NormSpec(math.inf)
# As COLUMNS in _order.h.
_COLUMNS = 128


class CompiledBackend(NumpyBackend):
    """The numpy backend with compiled kernels, for norms of order 1, 2 and infinity."""

    def reads_files(self, spec: NormSpec) -> bool:
        """For the orders that have a kernel."""
        return spec.order in _TERMS

    def tile_sums(self, block: memoryview | FileBlock, pieces: Sequence[Piece], spec: NormSpec) -> BlockSums:
        """Sum the pieces."""
        if isinstance(block, FileBlock) or spec.order in _TERMS:
            return _run(block, pieces, None, math.inf, spec)
        return super().tile_sums(block, pieces, spec)

    def histogram(
        self, block: memoryview | FileBlock, pieces: Sequence[Piece], spec: NormSpec
    ) -> tuple[BlockSums, BlockHistogram]:
        """Sum the pieces, and count values by exponent."""
        if spec.order not in _TERMS:
            return self.tile_sums(block, pieces, spec), self.histogram(block, pieces, _MAXIMA)[1]
        found = empty_histogram(pieces)
        return _run(block, pieces, None, math.inf, spec, counts=found), found

    def extremes(self, block: memoryview, pieces: Sequence[Piece]) -> Extremes:
        """Count subnormal and saturated values."""
        bounds = array("Q", [bound for piece in pieces for bound in STORAGE[piece.dtype].bounds])
        counts = int64s(2 * len(pieces))
        kernels.extremes(block, _table(pieces), bounds, counts)
        return Extremes(counts[::2], counts[1::2])

    def scale(
        self, block: memoryview, pieces: Sequence[Piece], factors: Sequence[float], limit: float, spec: NormSpec
    ) -> BlockSums:
        """Multiply and clamp in place; the sums of what was written."""
        if spec.order not in _TERMS:
            return super().scale(block, pieces, factors, limit, spec)
        return _run(block, pieces, array("d", factors), limit, spec)

    def differences(
        self,
        a: memoryview | FileBlock,
        pieces: Sequence[Piece],
        b: memoryview | FileBlock,
        others: Sequence[Piece],
        tolerance: Tolerance,
    ) -> BlockDifferences:
        """Compare pieces in the same places."""
        from gradtool.backends.differences import empty_differences

        found = empty_differences(sum(tile_count(piece.elements) for piece in pieces))
        kernels.differences(a, _table(pieces), b, _table(others), *tolerance, *found)
        return found

    def scale_units(
        self,
        block: memoryview,
        pieces: Sequence[Piece],
        units: Sequence[Units],
        factors: Factors,
        spec: NormSpec,
    ) -> BlockSums:
        """Multiply each unit by its factor in place; the sums of what was written."""
        table = array("q")
        for piece, own in zip(pieces, units, strict=True):
            table.extend((STORAGE[piece.dtype].code, piece.offset, piece.elements, own.phase, own.size, own.first))
        losses = int64s(2 * len(pieces))
        kernels.scale_units(block, table, factors, losses)
        found = self.tile_sums(block, pieces, spec)
        found.new_zeros, found.new_subnormals = losses[::2], losses[1::2]
        return found

    def unit_factors(
        self, grads: TypedView, params: TypedView, size: int, limits: UnitLimits, factors: Factors
    ) -> UnitCounts:
        """Set what units are multiplied by."""
        if size <= tuning.PATCH_ELEMENTS:
            sides = (grads.view, STORAGE[grads.dtype].code, params.view, STORAGE[params.dtype].code)
            counts = kernels.unit_factors(*sides, size, *limits, factors)
            if counts is not None:
                return UnitCounts(*counts)
        # Sums that are out of range are rare.
        return super().unit_factors(grads, params, size, limits, factors)

    def row_sums(
        self, x: memoryview, dtype: str, rows: int, columns: int, center: Floats | None
    ) -> NDArray[np.float64]:
        """Per row the sum of x, or of (x - center)²."""
        sums = np.empty(rows)
        kernels.row_sums(x, STORAGE[dtype].code, rows, columns, center, sums)
        return sums

    def layer_norm_sums(self, patch: Patch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Per row the sums of y_grad·scale and of y_grad·scale·xh."""
        sums = np.zeros(patch.rows), np.zeros(patch.rows)
        kernels.layer_norm(*_arguments(patch), *sums, patch.rms, None, 0, 1, None, None)
        return sums

    def layer_norm_grads(
        self,
        patch: Patch,
        means: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
        x_grad: memoryview,
        dtype: str,
    ) -> Data:
        """Write the gradient of x; the gradients of scale and bias of each group of rows."""
        grads = [float64s(patch.groups * patch.columns) for _ in range(2)]
        code, height = STORAGE[dtype].code, patch.height
        kernels.layer_norm(*_arguments(patch), *(means or (None, None)), patch.rms, x_grad, code, height, *grads)
        return grads

    def add_groups(self, totals: array[float], grads: Data) -> None:
        """Add group after group."""
        columns = memoryview(totals).nbytes // 16
        for number, own in enumerate(grads):
            starts = range(0, 8 * len(own), max(1, 8 * columns))
            groups = [Addend("F64", start, columns, number * columns, 1.0) for start in starts]
            kernels.add(totals, own, *_addends(groups), False)

    def widen(self, view: memoryview, dtype: str, offset: float = -0.0) -> array[float]:
        """TypedView values as float64, plus an offset."""
        count = len(view) // STORAGE[dtype].itemsize
        values = array("d", [offset]) * count
        kernels.add(values, view, *_addends([Addend(dtype, 0, count, 0, 1.0)]), False)
        return values

    def narrow(self, values: array[float], dtype: str) -> memoryview:
        """Float64 values as they are stored, rounded once."""
        view = memoryview(bytearray(len(values) * STORAGE[dtype].itemsize))
        _run(view, [Piece(dtype, 0, len(values))], None, math.inf, NormSpec(), wide=values)
        return view

    def _add(
        self, sums: NDArray[np.float64], source: memoryview, addends: Sequence[Addend], *, fresh: bool = False
    ) -> None:
        kernels.add(sums, source, *_addends(addends), fresh)

    def _trim(
        self,
        means: NDArray[np.float64],
        source: memoryview,
        groups: Sequence[Sequence[Addend]],
        dropped: int,
        *,
        finite: bool,
    ) -> None:
        from gradtool.backends.network import network

        count = len(groups[0])
        scratch = np.empty((count + 1) * _COLUMNS)
        table = _addends([one for group in groups for one in group])
        kernels.trimmed_means(means, source, *table, count, dropped, finite, network(count, dropped), scratch)

    def _round(
        self, sums: NDArray[np.float64], block: memoryview, pieces: Sequence[Piece], spec: NormSpec
    ) -> BlockSums:
        if spec.order not in _TERMS:
            return super()._round(sums, block, pieces, spec)
        return _run(block, pieces, None, math.inf, spec, wide=sums)


def _addends(addends: Sequence[Addend]) -> tuple[array[int], array[float]]:
    """Addends as the kernels take them, and their weights."""
    rows = [number for one in addends for number in (STORAGE[one.dtype].code, one.offset, one.elements, one.at)]
    return array("q", rows), array("d", [one.weight for one in addends])


def _arguments(patch: Patch) -> tuple[Any, ...]:
    return (
        patch.x,
        STORAGE[patch.x_dtype].code,
        patch.y_grad,
        STORAGE[patch.y_grad_dtype].code,
        patch.rows,
        patch.columns,
        patch.mean,
        patch.inv_std_dev,
        patch.scale,
        patch.bias,
    )


def _table(pieces: Sequence[Piece]) -> array[int]:
    """One row a piece: its dtype's code, its offset and its elements."""
    return array("q", [number for p in pieces for number in (STORAGE[p.dtype].code, p.offset, p.elements)])


def _run(
    block: memoryview | FileBlock,
    pieces: Sequence[Piece],
    factors: array[float] | None,
    limit: float,
    spec: NormSpec,
    *,
    wide: Floats | None = None,
    counts: BlockHistogram | tuple[None, None] = (None, None),
) -> BlockSums:
    tiles = sum(tile_count(piece.elements) for piece in pieces)
    sums, exponents, facts = float64s(tiles), int32s(tiles), int64s(len(STATISTICS) * len(pieces))
    term = _TERMS[spec.order]
    kernels.run(block, _table(pieces), factors, wide, limit, term, spec.drop_nonfinite, sums, exponents, facts, *counts)
    return BlockSums(sums, exponents, facts)
