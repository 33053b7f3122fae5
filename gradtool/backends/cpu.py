"""The reference backend: plain numpy, which defines the bits of every result."""

from __future__ import annotations

import mmap
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

from gradtool import tuning
from gradtool.arrays import np
from gradtool.backends.protocol import (
    Addend,
    AddMode,
    BlockDifferences,
    BlockHistogram,
    BlockSums,
    NormSpec,
    Patch,
    Piece,
    Tolerance,
    Trim,
    Units,
    group_addends,
)
from gradtool.backends.storage import STORAGE, narrowed, widened
from gradtool.backends.tiles import count_exponents, count_extremes, count_losses, sum_pieces
from gradtool.reduction import fold

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from gradtool.backends.protocol import Data, Extremes, Factors, Floats, TypedView, UnitCounts, UnitLimits

_ROW_LANES, _CHUNK = 32, 1024


class NumpyBackend:
    """A `gradtool.backends.protocol.Backend`; sums are taken a tile at a time."""

    name = "cpu"

    @property
    def block_bytes(self) -> int:
        """A block that fits in a core's cache."""
        return tuning.BLOCK_BYTES

    def memory(self, nbytes: int) -> memoryview:
        """Pages that the system allocates when they are first touched."""
        return memoryview(mmap.mmap(-1, nbytes))

    def to_device(self, block: memoryview, *, copies: bool = True, align: int = 0) -> memoryview:  # noqa: ARG002
        """The block itself."""
        return block

    def to_host(self, data: memoryview, block: memoryview) -> None:
        """Nothing to do."""

    def stays_on_device(self, nbytes: int) -> bool:  # noqa: ARG002
        """No: memory must not grow with the data, and the page cache has the files."""
        return False

    def reads_files(self, spec: NormSpec) -> bool:  # noqa: ARG002
        """No: numpy makes several passes over a tile anyway."""
        return False

    def tile_sums(self, block: memoryview, pieces: Sequence[Piece], spec: NormSpec) -> BlockSums:
        """Sum the pieces."""
        return sum_pieces(block, pieces, spec)

    def histogram(self, block: memoryview, pieces: Sequence[Piece], spec: NormSpec) -> tuple[BlockSums, BlockHistogram]:
        """Sum the pieces, and count values by exponent."""
        return self.tile_sums(block, pieces, spec), count_exponents(block, pieces)

    def extremes(self, block: memoryview, pieces: Sequence[Piece]) -> Extremes:
        """Count subnormal and saturated values."""
        return count_extremes(block, pieces)

    def scale(
        self, block: memoryview, pieces: Sequence[Piece], factors: Sequence[float], limit: float, spec: NormSpec
    ) -> BlockSums:
        """Multiply and clamp in place; the sums of what was written."""
        return sum_pieces(block, pieces, spec, factors, limit)

    def scale_units(
        self,
        block: memoryview,
        pieces: Sequence[Piece],
        units: Sequence[Units],
        factors: Factors,
        spec: NormSpec,
    ) -> BlockSums:
        """Multiply each unit by its factor in place; the sums of what was written."""
        before = []
        with np.errstate(all="ignore"):
            for piece, own in zip(pieces, units, strict=True):
                storage = STORAGE[piece.dtype]
                raw = np.frombuffer(block, np.uint8, piece.elements * storage.itemsize, piece.offset)
                values = storage.widen(raw.copy().view(storage.bits)).astype(np.float64)
                number = own.first + (own.phase + np.arange(piece.elements)) // own.size
                # As the factors of `scale`: float64 only for F64.
                each = np.asarray(factors).astype(storage.work).astype(np.float64)[number]
                before.append(np.where(each == 0, 0, values))
                raw[:] = storage.narrow_wide(values * each).view(np.uint8)
        found = self.tile_sums(block, pieces, spec)
        for k, (piece, values) in enumerate(zip(pieces, before, strict=True)):
            count_losses(found, k, values, _stored(block, piece), piece.dtype)
        return found

    def unit_factors(
        self, grads: TypedView, params: TypedView, size: int, limits: UnitLimits, factors: Factors
    ) -> UnitCounts:
        """Set what units are multiplied by."""
        from gradtool.backends.units import compare_units

        return compare_units(self, grads, params, size, limits, factors)

    def accumulate(
        self,
        block: memoryview,
        pieces: Sequence[Piece],
        sources: Iterable[tuple[memoryview, Sequence[Addend]]],
        rule: AddMode,
        spec: NormSpec,
    ) -> BlockSums:
        """Add in float64, round once; the sums of what was written."""
        starts = [0, *accumulate(piece.elements for piece in pieces)]
        old = [Addend(p.dtype, p.offset, p.elements, at, 1.0) for p, at in zip(pieces, starts, strict=False)]
        sums = np.empty(starts[-1])
        with np.errstate(all="ignore"):
            if rule.include_buffer and rule.divisor is None:
                self._add(sums, block, old, fresh=True)
            else:
                # -0 + x is x for every x; 0 + -0 would be 0.
                sums.fill(-0.0)
            for source, addends in sources:
                self._add(sums, source, addends)
            if rule.divisor is not None:
                sums /= rule.divisor
                if rule.include_buffer:
                    self._add(sums, block, old)
            if rule.factor != 1:
                sums *= rule.factor
        if rule.rounds:
            return self._round(sums, block, pieces, spec)
        wide = [Piece("F64", 8 * at, p.elements) for p, at in zip(pieces, starts, strict=False)]
        return self.tile_sums(sums.data.cast("B"), wide, spec)

    def differences(
        self, a: memoryview, pieces: Sequence[Piece], b: memoryview, others: Sequence[Piece], tolerance: Tolerance
    ) -> BlockDifferences:
        """Compare pieces in the same places."""
        from gradtool.backends.differences import compare_pieces

        return compare_pieces(a, pieces, b, others, tolerance)

    def trimmed_means(
        self, source: memoryview, addends: Sequence[Addend], trim: Trim, elements: int
    ) -> NDArray[np.float64]:
        """The means of the middle values."""
        means = np.zeros(elements)
        for count, alike in groupby(group_addends(addends), key=len):
            self._trim(means, source, list(alike), trim.of(count), finite=trim.finite)
        return means

    def row_sums(
        self, x: memoryview, dtype: str, rows: int, columns: int, center: Floats | None
    ) -> NDArray[np.float64]:
        """Per row the sum of x, or of (x - center)²."""
        values = _wide(x, dtype, rows, columns)
        with np.errstate(all="ignore"):
            if center is not None:
                values -= np.asarray(center)[:, None]
                values *= values
            return _row_sums(values)

    def layer_norm_sums(self, patch: Patch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Per row the sums of y_grad·scale and of y_grad·scale·xh."""
        with np.errstate(all="ignore"):
            weighted = _wide(patch.y_grad, patch.y_grad_dtype, patch.rows, patch.columns) * np.asarray(patch.scale)
            return _row_sums(weighted), _row_sums(weighted * _normalized(patch))

    def layer_norm_grads(
        self,
        patch: Patch,
        means: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
        x_grad: memoryview,
        dtype: str,
    ) -> Data:
        """Write the gradient of x; the gradients of scale and bias of each group of rows."""
        first, second = self._means(patch) if means is None else means
        y_grad, xh = _wide(patch.y_grad, patch.y_grad_dtype, patch.rows, patch.columns), _normalized(patch)
        grads = np.zeros((2, patch.groups, patch.columns))
        with np.errstate(all="ignore"):
            grad = y_grad * np.asarray(patch.scale) - first[:, None] - xh * second[:, None]
            grad *= np.asarray(patch.inv_std_dev)[:, None]
            np.frombuffer(x_grad, np.uint8)[:] = STORAGE[dtype].narrow_wide(grad.ravel()).view(np.uint8)
            xh *= y_grad
            for row in range(patch.rows):
                grads[0, row // patch.height] += xh[row]
                grads[1, row // patch.height] += y_grad[row]
        return grads

    def add_groups(self, totals: array[float], grads: Data) -> None:
        """Add group after group."""
        sums = np.asarray(totals).reshape(2, -1)
        with np.errstate(all="ignore"):
            for group in range(grads.shape[1]):
                sums += grads[:, group]

    def widen(self, view: memoryview, dtype: str, offset: float = -0.0) -> array[float]:
        """TypedView values as float64, plus an offset."""
        return widened(view, dtype, offset)

    def narrow(self, values: array[float], dtype: str) -> memoryview:
        """Float64 values as they are stored, rounded once."""
        return narrowed(values, dtype)

    def _means(self, patch: Patch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        weighted, projected = self.layer_norm_sums(patch)
        with np.errstate(all="ignore"):
            return np.zeros(patch.rows) if patch.rms else weighted / patch.columns, projected / patch.columns

    def _add(
        self, sums: NDArray[np.float64], source: memoryview, addends: Sequence[Addend], *, fresh: bool = False
    ) -> None:
        for one in addends:
            storage = STORAGE[one.dtype]
            raw = np.frombuffer(source, np.uint8, one.elements * storage.itemsize, one.offset)
            values = storage.widen(raw.copy().view(storage.bits)).astype(np.float64)
            part = sums[one.at : one.at + one.elements]
            part[:] = values * one.weight if fresh else part + values * one.weight

    def _trim(
        self,
        means: NDArray[np.float64],
        source: memoryview,
        groups: Sequence[Sequence[Addend]],
        dropped: int,
        *,
        finite: bool,
    ) -> None:
        """Set the means of groups of addends, all of the same number."""
        with np.errstate(all="ignore"):
            for group in groups:
                values = np.zeros((len(group), group[0].elements))
                for row, one in zip(values, group, strict=True):
                    self._add(row, source, [one._replace(at=0)], fresh=True)
                values += 0.0  # -0 becomes 0, so that equal values have equal bits
                bad = (~np.isfinite(values) if finite else np.isnan(values)).any(axis=0)
                values.sort(axis=0)
                # A loop, because numpy promises no order of its reductions.
                total = values[dropped].copy()
                for row in values[dropped + 1 : len(values) - dropped]:
                    total += row
                # What underflows to -0 becomes 0, too.
                own = total / (len(values) - 2 * dropped) + 0.0
                means[group[0].at : group[0].at + len(own)] = np.where(bad, np.nan, own)

    def _round(
        self, sums: NDArray[np.float64], block: memoryview, pieces: Sequence[Piece], spec: NormSpec
    ) -> BlockSums:
        at = 0
        with np.errstate(all="ignore"):
            for piece in pieces:
                codes = STORAGE[piece.dtype].narrow_wide(sums[at : at + piece.elements])
                raw = np.frombuffer(block, np.uint8, codes.nbytes, piece.offset)
                raw[:] = codes.view(np.uint8)
                at += piece.elements
            found, at = self.tile_sums(block, pieces, spec), 0
            for k, piece in enumerate(pieces):
                wide = sums[at : at + piece.elements]
                count_losses(found, k, wide, _stored(block, piece), piece.dtype, rounds=True)
                at += piece.elements
        return found


def _stored(block: memoryview, piece: Piece) -> NDArray[Any]:
    """The values of a piece."""
    storage = STORAGE[piece.dtype]
    raw = np.frombuffer(block, np.uint8, piece.elements * storage.itemsize, piece.offset)
    return storage.widen(raw.copy().view(storage.bits))


def _wide(block: memoryview, dtype: str, rows: int, columns: int) -> NDArray[np.float64]:
    storage = STORAGE[dtype]
    codes = np.frombuffer(block, np.uint8, rows * columns * storage.itemsize).copy().view(storage.bits)
    with np.errstate(all="ignore"):
        return storage.widen(codes).astype(np.float64).reshape(rows, columns)


def _normalized(patch: Patch) -> NDArray[np.float64]:
    """The normalized input, from the layer's input and its statistics, or from its output."""
    values = _wide(patch.x, patch.x_dtype, patch.rows, patch.columns)
    with np.errstate(all="ignore"):
        if patch.bias is None:
            values -= np.asarray(patch.mean)[:, None]
            values *= np.asarray(patch.inv_std_dev)[:, None]
        else:
            values -= np.asarray(patch.bias)
            values /= np.asarray(patch.scale)
    return values


def _row_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of the rows of a (rows, columns) array, in the order of `Backend.row_sums`."""
    rows, columns = values.shape
    sums = np.zeros(rows)
    for begin in range(0, columns, _CHUNK):
        chunk = values[:, begin : begin + _CHUNK]
        lanes = np.zeros((rows, _ROW_LANES))
        for start in range(0, chunk.shape[1], _ROW_LANES):
            part = chunk[:, start : start + _ROW_LANES]
            lanes[:, : part.shape[1]] += part
        sums += fold(lanes)
    return sums
