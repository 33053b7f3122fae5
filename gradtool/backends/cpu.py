"""The reference backend: plain numpy, which defines the bits of every result."""

from __future__ import annotations

import mmap
from array import array
from functools import lru_cache
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from gradtool import tuning
from gradtool.arrays import np
from gradtool.backends.storage import STORAGE
from gradtool.backends.tiles import count_exponents, count_extremes, count_losses, sum_pieces
from gradtool.backends.values import Addend, Piece
from gradtool.reduction import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from gradtool.backends.values import (
        AddMode,
        Array,
        BlockDifferences,
        BlockHistogram,
        BlockSums,
        Data,
        Extremes,
        Factors,
        Floats,
        NormSpec,
        Patch,
        Pieces,
        Sources,
        Tolerance,
        Trim,
        TypedView,
        UnitCounts,
        UnitLimits,
        Units,
    )

_ROW_LANES, _CHUNK = 32, 1024


class NumpyBackend:
    """A `gradtool.backends.protocol.Backend`; sums are taken a tile at a time."""

    name = "cpu"

    @property
    def block_bytes(self) -> int:
        # Fits in a core's cache.
        return tuning.BLOCK_BYTES

    def memory(self, nbytes: int) -> memoryview:
        # The system allocates the pages when they are first touched.
        return memoryview(mmap.mmap(-1, nbytes))

    def to_device(self, block: memoryview, *, copies: bool = True, align: int = 0) -> Data:  # noqa: ARG002
        return block

    def to_host(self, data: Data, block: memoryview) -> None:
        """Do nothing: `data` is the block."""

    def stays_on_device(self, nbytes: int) -> bool:  # noqa: ARG002
        # Memory must not grow with the data, and the page cache has the files.
        return False

    def reads_files(self, spec: NormSpec) -> bool:  # noqa: ARG002
        # Several passes over a tile need it in memory.
        return False

    def tile_sums(self, block: memoryview, pieces: Pieces, spec: NormSpec) -> BlockSums:
        return sum_pieces(block, pieces, spec)

    def histogram(self, block: memoryview, pieces: Pieces, spec: NormSpec) -> tuple[BlockSums, BlockHistogram]:
        return self.tile_sums(block, pieces, spec), count_exponents(block, pieces)

    def extremes(self, block: memoryview, pieces: Pieces) -> Extremes:
        return count_extremes(block, pieces)

    def scale(
        self, block: memoryview, pieces: Pieces, factors: Sequence[float], limit: float, spec: NormSpec
    ) -> BlockSums:
        return sum_pieces(block, pieces, spec, factors, limit)

    def scale_units(
        self, block: memoryview, pieces: Pieces, units: Sequence[Units], factors: Factors, spec: NormSpec
    ) -> BlockSums:
        before = []
        with np.errstate(all="ignore"):
            for (dtype, offset, elements), (size, phase, first) in zip(pieces, units, strict=True):
                storage = STORAGE[dtype]
                values = storage.values_at(block, offset, elements).astype(np.float64)
                # As the factors of `scale`: float64 only for F64.
                factor = np.asarray(factors).astype(storage.work).astype(np.float64)
                factor = factor[first + (phase + np.arange(elements)) // size]
                before.append(np.where(factor == 0, 0, values))
                storage.store(values * factor, block, offset)
        sums = self.tile_sums(block, pieces, spec)
        for k, (piece, values) in enumerate(zip(pieces, before, strict=True)):
            count_losses(
                sums, k, values, STORAGE[piece.dtype].values_at(block, piece.offset, piece.elements), piece.dtype
            )
        return sums

    def unit_factors(
        self, grads: TypedView, params: TypedView, size: int, limits: UnitLimits, factors: Factors
    ) -> UnitCounts:
        from gradtool.backends.units import unit_factors

        return unit_factors(self, grads, params, size, limits, factors)

    def accumulate(
        self, block: memoryview, pieces: Pieces, sources: Sources, mode: AddMode, spec: NormSpec
    ) -> BlockSums:
        starts = [0, *accumulate(piece.elements for piece in pieces)]
        old = [Addend(*piece, at, mode.buffer_weight) for piece, at in zip(pieces, starts, strict=False)]
        sums = np.empty(starts[-1])
        with np.errstate(all="ignore"):
            if mode.include_buffer and mode.divisor is None:
                self._add(sums, block, old, fresh=True)
            else:
                # -0 + x is x for every x; 0 + -0 would be 0.
                sums.fill(-0.0)
            for source, addends in sources:
                self._add(sums, source, addends)
            if mode.divisor is not None:
                sums /= mode.divisor
                if mode.include_buffer:
                    self._add(sums, block, old)
            if mode.factor != 1:
                sums *= mode.factor
        if mode.rounds:
            return self._round(sums, block, pieces, spec)
        wide = [Piece("F64", 8 * at, piece.elements) for piece, at in zip(pieces, starts, strict=False)]
        return self.tile_sums(sums.data.cast("B"), wide, spec)

    def trimmed_means(self, source: memoryview, addends: Sequence[Addend], trim: Trim, elements: int) -> Array:
        means = np.zeros(elements)
        for groups in group_addends(addends):
            self._trim(means, source, groups, trim)
        return means

    def differences(
        self, a: memoryview, a_pieces: Pieces, b: memoryview, b_pieces: Pieces, tolerances: Sequence[Tolerance]
    ) -> BlockDifferences:
        from gradtool.backends.differences import compare_pieces

        return compare_pieces(a, a_pieces, b, b_pieces, tolerances)

    def row_sums(self, x: memoryview, dtype: str, rows: int, columns: int, center: Floats | None) -> Array:
        values = _rows(x, dtype, rows, columns)
        with np.errstate(all="ignore"):
            if center is not None:
                values -= np.asarray(center)[:, None]
                values *= values
            return _row_sums(values)

    def layer_norm_sums(self, patch: Patch) -> tuple[Array, Array]:
        with np.errstate(all="ignore"):
            weighted = _rows(patch.y_grad, patch.y_grad_dtype, patch.rows, patch.columns) * np.asarray(patch.scale)
            return _row_sums(weighted), _row_sums(weighted * _normalized(patch))

    def layer_norm_grads(self, patch: Patch, means: tuple[Array, Array] | None, x_grad: memoryview, dtype: str) -> Data:
        y_grad, xh = _rows(patch.y_grad, patch.y_grad_dtype, patch.rows, patch.columns), _normalized(patch)
        grads = np.zeros((2, patch.groups, patch.columns))
        with np.errstate(all="ignore"):
            if means is None:
                weighted, projected = (sums / patch.columns for sums in self.layer_norm_sums(patch))
                means = (np.zeros(patch.rows) if patch.rms else weighted), projected
            grad = y_grad * np.asarray(patch.scale) - means[0][:, None] - xh * means[1][:, None]
            grad *= np.asarray(patch.inv_std_dev)[:, None]
            STORAGE[dtype].store(grad.ravel(), x_grad)
            xh *= y_grad
            for row in range(patch.rows):
                grads[0, row // patch.height] += xh[row]
                grads[1, row // patch.height] += y_grad[row]
        return grads

    def add_groups(self, totals: array[float], grads: Data) -> None:
        sums = np.asarray(totals).reshape(2, -1)
        with np.errstate(all="ignore"):
            for group in range(grads.shape[1]):
                sums += grads[:, group]

    def widen(self, view: memoryview, dtype: str, offset: float = -0.0) -> array[float]:
        storage = STORAGE[dtype]
        with np.errstate(all="ignore"):
            values = storage.values_at(view, 0, len(view) // storage.itemsize).astype(np.float64) + offset
        return array("d", values.tobytes())

    def narrow(self, values: array[float], dtype: str) -> memoryview:
        with np.errstate(all="ignore"):
            return STORAGE[dtype].narrow_wide(np.asarray(values)).view(np.uint8).data

    def _add(self, sums: Array, source: memoryview, addends: Sequence[Addend], *, fresh: bool = False) -> None:
        for dtype, offset, elements, at, weight in addends:
            values = STORAGE[dtype].values_at(source, offset, elements).astype(np.float64) * weight
            sums[at : at + elements] = values if fresh else sums[at : at + elements] + values

    def _trim(self, means: Array, source: memoryview, groups: Sequence[Sequence[Addend]], trim: Trim) -> None:
        """Set the means of groups of equally many addends."""
        dropped = trim.dropped_from(len(groups[0]))
        with np.errstate(all="ignore"):
            for group in groups:
                values = np.zeros((len(group), group[0].elements))
                for row, addend in zip(values, group, strict=True):
                    self._add(row, source, [addend._replace(at=0)], fresh=True)
                values += 0.0  # -0 becomes 0, so that equal values have equal bits
                bad = (~np.isfinite(values) if trim.finite else np.isnan(values)).any(axis=0)
                values.sort(axis=0)
                # A loop, because numpy promises no order of its reductions.
                total = values[dropped].copy()
                for row in values[dropped + 1 : len(values) - dropped]:
                    total += row
                # What underflows to -0 becomes 0, too.
                total = total / (len(values) - 2 * dropped) + 0.0
                means[group[0].at : group[0].at + len(total)] = np.where(bad, np.nan, total)

    def _round(self, sums: Array, block: memoryview, pieces: Pieces, spec: NormSpec) -> BlockSums:
        parts = np.split(sums, list(accumulate(piece.elements for piece in pieces)))
        with np.errstate(all="ignore"):
            for (dtype, offset, _), part in zip(pieces, parts, strict=False):
                STORAGE[dtype].store(part, block, offset)
            result = self.tile_sums(block, pieces, spec)
            for k, ((dtype, offset, elements), part) in enumerate(zip(pieces, parts, strict=False)):
                count_losses(result, k, part, STORAGE[dtype].values_at(block, offset, elements), dtype, rounds=True)
        return result


def _rows(block: memoryview, dtype: str, rows: int, columns: int) -> Array:
    with np.errstate(all="ignore"):
        return STORAGE[dtype].values_at(block, 0, rows * columns).astype(np.float64).reshape(rows, columns)


def _normalized(patch: Patch) -> Array:
    """Compute the normalized input, from the layer's input and its statistics, or from its output."""
    values = _rows(patch.x, patch.x_dtype, patch.rows, patch.columns)
    with np.errstate(all="ignore"):
        if patch.bias is None:
            values -= np.asarray(patch.mean)[:, None]
            values *= np.asarray(patch.inv_std_dev)[:, None]
        else:
            values -= np.asarray(patch.bias)
            values /= np.asarray(patch.scale)
    return values


def _row_sums(values: Array) -> Array:
    """Sum the rows of a (rows, columns) array, in the order of `Backend.row_sums`."""
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


def group_addends(addends: Iterable[Addend]) -> Iterator[list[list[Addend]]]:
    """Group adjacent addends of the same elements; yield adjacent groups of equally many addends together."""
    groups = (list(group) for _, group in groupby(addends, key=lambda addend: (addend.at, addend.elements)))
    for _, alike in groupby(groups, key=len):
        yield list(alike)


@lru_cache(maxsize=64)
def sorting_network(count: int, dropped: int) -> NDArray[np.int32]:
    """Return pairs (low, high), shape (n, 2), that sort `count` values where the `dropped` ends need not be in order.

    Each pair puts the smaller of two values at `low` and the larger at `high`, whatever the values are: kernels apply
    it to many columns at once. Any way to sort gives the same bits, because values that are equal have the same bits
    here. It is Batcher's merge exchange (Knuth, The Art of Computer Programming 3, algorithm 5.2.2M), without the pairs
    that none of the middle values depends on.
    """
    needed, pairs = set(range(dropped, count - dropped)), []
    for low, high in reversed(_merge_exchange(count)):
        if low in needed or high in needed:
            needed.update((low, high))
            pairs.append((low, high))
    return np.array(pairs[::-1], np.int32).reshape(-1, 2)


def _merge_exchange(count: int) -> list[tuple[int, int]]:
    pairs = []
    top = step = 1 << max(0, (count - 1).bit_length() - 1)
    while step:
        stride, remainder, distance = top, 0, step
        while True:
            pairs += [(i, i + distance) for i in range(count - distance) if i & step == remainder]
            if stride == step:
                break
            distance, stride, remainder = stride - step, stride // 2, step
        step //= 2
    return pairs
