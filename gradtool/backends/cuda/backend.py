"""The CUDA backend: the bits of the numpy backend, from kernels on a GPU.

One launch works on all pieces of one storage type in a block, however many there are.
"""

from __future__ import annotations

import math
from array import array
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtool import tuning
from gradtool.backends.cuda import jobs
from gradtool.backends.cuda.memory import (
    DeviceBlock,
    DeviceGroups,
    allocate_block,
    upload_arrays,
    upload_vectors,
)
from gradtool.backends.network import network
from gradtool.backends.protocol import BlockHistogram, Extremes, NormSpec, Piece, group_addends
from gradtool.backends.storage import STORAGE, narrowed, widened
from gradtool.backends.units import compare_units

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from gradtool.backends.cuda.memory import Buffer, Device, Table
    from gradtool.backends.protocol import (
        Addend,
        AddMode,
        BlockDifferences,
        BlockSums,
        Data,
        Factors,
        Patch,
        Tolerance,
        Trim,
        TypedView,
        UnitCounts,
        UnitLimits,
        Units,
    )

    Floats = NDArray[np.float64]

# Memory that blocks which stay between passes leave to those that come and go.
_RESERVE_BYTES = 4 << 30


class CudaBackend:
    """A `gradtool.backends.protocol.Backend` on a GPU. Blocks that are not on the device are copied there and back."""

    name = "cuda"

    def __init__(self, device: Device) -> None:
        self.device = device

    @property
    def block_bytes(self) -> int:
        """16 MiB, which take much longer to copy than the latencies of a copy and a launch."""
        return 8 * tuning.BLOCK_BYTES

    def memory(self, nbytes: int) -> memoryview:
        """Page-locked memory."""
        return self.device.memory(nbytes)

    def to_device(self, block: memoryview, *, copies: bool = True, align: int = 0) -> DeviceBlock:
        """Copy a block to the device."""
        data = allocate_block(self.device, len(block), align)
        if copies:
            self.device.upload(data.address, block)
        return data

    def to_host(self, data: DeviceBlock, block: memoryview) -> None:
        """Copy a block back."""
        self.device.download(data.address, block)
        self.device.wait()

    def stays_on_device(self, nbytes: int) -> bool:
        """Whether enough memory would be left for the blocks that come and go."""
        return self.device.free_bytes() - nbytes > _RESERVE_BYTES

    def reads_files(self, spec: NormSpec) -> bool:  # noqa: ARG002
        """No: blocks are copied to the device first."""
        return False

    def tile_sums(self, block: Data, pieces: Sequence[Piece], spec: NormSpec) -> BlockSums:
        """Sum the pieces."""
        return self._sum(self._on_device(block), pieces, None, math.inf, spec)

    def histogram(self, block: Data, pieces: Sequence[Piece], spec: NormSpec) -> tuple[BlockSums, BlockHistogram]:
        """Sum the pieces, and count values by exponent."""
        data, tiles = self._on_device(block), jobs.Tiles.of(pieces, None)
        bins = np.array([len(STORAGE[piece.dtype].bins) for piece in pieces], np.int64)
        # The kernel adds to bins where others put sums.
        tiles.table["first_sum"] = np.cumsum(bins) - bins
        # The counts, and the largest magnitudes behind them.
        total = int(bins.sum())
        results, (_table, parts) = self._cleared(total + len(pieces)), self._parts(tiles)
        addresses = {"block": data.address, "counts": results.address, "largest": results.address + 8 * total}
        for dtype, blocks, rows in parts:
            job = jobs.job(jobs.HISTOGRAM_JOB, **addresses, **rows)
            self.device.launch(dtype, "histogram", blocks, jobs.THREADS, job)
        counts, largest = np.split(self._words(results, total + len(pieces)), [total])
        histogram = BlockHistogram(array("q", counts.tobytes()), array("d", largest.tobytes()))
        return self.tile_sums(data, pieces, spec), histogram

    def extremes(self, block: Data, pieces: Sequence[Piece]) -> Extremes:
        """Count subnormal and saturated values."""
        data, results = self._on_device(block), self._cleared(2 * len(pieces))
        _table, parts = self._parts(jobs.Tiles.of(pieces, None))
        for dtype, blocks, rows in parts:
            bounds = dict(zip(("normal", "largest"), STORAGE[dtype].bounds, strict=True))
            job = jobs.job(jobs.EXTREMES_JOB, block=data.address, found=results.address, **bounds, **rows)
            self.device.launch(dtype, "extremes", blocks, jobs.THREADS, job)
        counts = array("q", self._words(results, 2 * len(pieces)).tobytes())
        return Extremes(counts[::2], counts[1::2])

    def scale(
        self, block: Data, pieces: Sequence[Piece], factors: Sequence[float], limit: float, spec: NormSpec
    ) -> BlockSums:
        """Multiply and clamp in place; the sums of what was written."""
        data = self._on_device(block)
        found = self._sum(data, pieces, factors, limit, spec)
        self._copy_back(data, block)
        return found

    def scale_units(
        self, block: Data, pieces: Sequence[Piece], units: Sequence[Units], factors: Factors, spec: NormSpec
    ) -> BlockSums:
        """Multiply each unit by its factor in place; the sums of what was written."""
        data, rows, own, numbers = self._on_device(block), [], [], []
        for k, (piece, (size, phase, first)) in enumerate(zip(pieces, units, strict=True)):
            # A row of the table for each unit: their sums are not those of tiles, and are not used.
            itemsize, done = STORAGE[piece.dtype].itemsize, 0
            while done < piece.elements:
                number, begin = divmod(phase + done, size)
                count = min(size - begin, piece.elements - done)
                rows.append(Piece(piece.dtype, piece.offset + done * itemsize, count))
                own.append(float(factors[first + number]))
                numbers.append(k)
                done += count
        scaled = self._sum(data, rows, own, math.inf, NormSpec(math.inf))
        found = self._sum(data, pieces, None, math.inf, spec)
        for k, zeros, subnormals in zip(numbers, scaled.new_zeros, scaled.new_subnormals, strict=True):
            found.new_zeros[k] += zeros
            found.new_subnormals[k] += subnormals
        self._copy_back(data, block)
        return found

    def unit_factors(
        self, grads: TypedView, params: TypedView, size: int, limits: UnitLimits, factors: Factors
    ) -> UnitCounts:
        """Set what units are multiplied by, from sums on the device."""
        return compare_units(self, grads, params, size, limits, factors)

    def accumulate(
        self,
        block: Data,
        pieces: Sequence[Piece],
        sources: Iterable[tuple[memoryview, Sequence[Addend]]],
        rule: AddMode,
        spec: NormSpec,
    ) -> BlockSums:
        """Add in float64, round once; the sums of what was written."""
        data, starts = self._on_device(block), [0, *accumulate(piece.elements for piece in pieces)]
        losses = self._cleared(2 * len(pieces))
        sums = self._add(data, pieces, starts, sources, rule, losses=losses)
        if sums is not None:
            wide = [Piece("F64", 8 * at, p.elements) for p, at in zip(pieces, starts, strict=False)]
            return self._sum(sums, wide, None, math.inf, spec)
        found = self._sum(data, pieces, None, math.inf, spec)
        lost = array("q", self._words(losses, 2 * len(pieces)).tobytes())
        self._copy_back(data, block)
        found.new_zeros, found.new_subnormals = lost[::2], lost[1::2]
        return found

    def differences(
        self, a: Data, pieces: Sequence[Piece], b: Data, others: Sequence[Piece], tolerance: Tolerance
    ) -> BlockDifferences:
        """Compare pieces in the same places."""
        pairs = jobs.PiecePairs.of(pieces, others)
        found = np.empty(0, np.int64)
        if pairs.tiles:
            ours, theirs = self._on_device(a), self._on_device(b)
            results, table = self.device.allocate(pairs.nbytes), upload_arrays(self.device, pairs.table)
            job = jobs.job(
                jobs.DIFFERENCES_JOB,
                a=ours.address,
                b=theirs.address,
                pair=table.addresses[0],
                results=results.address,
                absolute=tolerance.absolute,
                relative=tolerance.relative,
                pairs=len(pairs.table),
            )
            for kernel in ("differences", "differences_again")[: 1 + pairs.has_f64]:
                self.device.launch("mixed", kernel, pairs.tiles, jobs.THREADS, job)
            found = self._words(results, pairs.nbytes // 8)
        return pairs.found(found)

    def trimmed_means(self, source: memoryview, addends: Sequence[Addend], trim: Trim, elements: int) -> Floats:
        """The means of the middle values."""
        data, means = self.to_device(source), self._cleared(elements)
        for count, alike in groupby(group_addends(addends), key=len):
            self._trim(data, means, jobs.Columns.of(list(alike)), trim.of(count), finite=trim.finite)
        return self._words(means, elements).view(np.float64)

    def row_sums(self, x: Data, dtype: str, rows: int, columns: int, center: Floats | array[float] | None) -> Floats:
        """Per row the sum of x, or of (x - center)²."""
        if not rows or not columns:
            return np.zeros(rows)
        data, vectors = self._on_device(x), upload_vectors(self.device, center)
        sums = self.device.allocate(8 * rows)
        job = jobs.job(
            jobs.PATCH_JOB,
            x=data.address,
            x_dtype=STORAGE[dtype].code,
            rows=rows,
            columns=columns,
            mean=vectors.addresses[0],
            weighted=sums.address,
        )
        self.device.launch(dtype, "row_sums", jobs.row_blocks(rows, columns), jobs.TEAM, job)
        return self._words(sums, rows).view(np.float64)

    def layer_norm_sums(self, patch: Patch) -> tuple[Floats, Floats]:
        """Per row the sums of y_grad·scale and of y_grad·scale·xh."""
        if not patch.rows or not patch.columns:
            return np.zeros(patch.rows), np.zeros(patch.rows)
        job, _memory = self._patch_job(patch)
        sums = self.device.allocate(16 * patch.rows)
        job["weighted"], job["projected"] = sums.address, sums.address + 8 * patch.rows
        module = jobs.layer_module(patch.x_dtype, patch.y_grad_dtype)
        self.device.launch(module, "layer_norm_sums", jobs.row_blocks(patch.rows, patch.columns), jobs.TEAM, job)
        weighted, projected = self._words(sums, 2 * patch.rows).view(np.float64).reshape(2, patch.rows)
        return weighted, projected

    def layer_norm_grads(
        self, patch: Patch, means: tuple[Floats, Floats] | None, x_grad: Data, dtype: str
    ) -> DeviceGroups:
        """Write the gradient of x; the gradients of scale and bias of each group of rows."""
        if not patch.rows or not patch.columns:
            return DeviceGroups(None, patch.groups, patch.columns)
        job, _memory = self._patch_job(patch)
        out, vectors = self._on_device(x_grad, copies=False), upload_vectors(self.device, *(means or (None, None)))
        grads = self.device.allocate(16 * patch.groups * patch.columns)
        job["x_grad"], job["x_grad_dtype"], job["grads"] = out.address, STORAGE[dtype].code, grads.address
        job["weighted"], job["projected"] = vectors.addresses
        job["has_means"] = means is not None
        module = jobs.layer_module(patch.x_dtype, patch.y_grad_dtype, dtype)
        self.device.launch(module, "layer_norm_grads", jobs.gradient_blocks(patch), jobs.TEAM, job)
        self.device.wait()
        self._copy_back(out, x_grad)
        return DeviceGroups(grads, patch.groups, patch.columns)

    def add_groups(self, totals: array[float], grads: DeviceGroups) -> None:
        """Add group after group."""
        if grads.buffer is None:
            return
        sums = np.asarray(totals)
        table = upload_vectors(self.device, sums)
        address, columns = table.addresses[0], grads.columns
        job = jobs.job(
            jobs.GROUPS_JOB, totals=address, grads=grads.buffer.address, groups=grads.groups, columns=columns
        )
        blocks = -(-sums.size // jobs.GROUPS_TEAM)
        self.device.launch("mixed", "add_groups", blocks, jobs.GROUPS_TEAM, job)
        self.device.download(address, sums)
        self.device.wait()

    def widen(self, view: memoryview, dtype: str, offset: float = -0.0) -> array[float]:
        """TypedView values as float64, plus an offset; on the host."""
        return widened(view, dtype, offset)

    def narrow(self, values: array[float], dtype: str) -> memoryview:
        """Float64 values as they are stored, rounded once; on the host."""
        return narrowed(values, dtype)

    def _on_device(self, block: Data, *, copies: bool = True) -> DeviceBlock:
        return block if isinstance(block, DeviceBlock) else self.to_device(block, copies=copies)

    def _copy_back(self, data: DeviceBlock, block: Data) -> None:
        if data is not block:
            self.to_host(data, block)

    def _sum(
        self, data: DeviceBlock, pieces: Sequence[Piece], factors: Sequence[float] | None, limit: float, spec: NormSpec
    ) -> BlockSums:
        """Sum the pieces of a block; with factors, multiply and clamp them in place first."""
        tiles = jobs.Tiles.of(pieces, factors)
        results, (_table, parts) = self._cleared(tiles.results), self._parts(tiles)
        for dtype, blocks, rows in parts:
            job = jobs.job(
                jobs.TILES_JOB,
                block=data.address,
                sums=results.address,
                exponents=results.address + 8 * tiles.total,
                facts=results.address + 16 * tiles.total,
                **rows,
                limit=STORAGE[dtype].rounded(limit),
                order=spec.order,
                drops=spec.drop_nonfinite,
            )
            for kernel in jobs.tile_kernels(dtype, spec.order, writes=factors is not None):
                self.device.launch(dtype, kernel, blocks, jobs.THREADS, job)
        return tiles.found(self._words(results, tiles.results))

    def _cleared(self, words: int) -> Buffer:
        """Room for so many results of 8 bytes, all zero."""
        buffer = self.device.allocate(8 * words + 1)
        self.device.clear(buffer.address, 8 * words)
        return buffer

    def _words(self, buffer: Buffer, count: int) -> NDArray[np.int64]:
        """Copy results from the device, and wait for them."""
        words = np.empty(count, np.int64)
        self.device.download(buffer.address, words)
        self.device.wait()
        return words

    def _parts(self, tiles: jobs.Tiles) -> tuple[Table, list[tuple[str, int, dict[str, int]]]]:
        """The pieces of each storage type: how many thread blocks, and the fields of a job that say where they are.

        The table must live until the kernels are done. There is a single one for all types, so that memory runs short
        before the first launch or never.
        """
        parts = list(tiles.by_type())
        table = upload_arrays(self.device, *(rows for _, rows, _ in parts))
        return table, [
            (dtype, blocks, {"piece": address, "pieces": len(rows)})
            for (dtype, rows, blocks), address in zip(parts, table.addresses, strict=True)
        ]

    def _add(
        self,
        data: DeviceBlock,
        pieces: Sequence[Piece],
        starts: Sequence[int],
        sources: Iterable[tuple[memoryview, Sequence[Addend]]],
        rule: AddMode,
        *,
        losses: Buffer,
    ) -> DeviceBlock | None:
        """Add batch after batch. Returns the float64 sums if the rule leaves them unrounded."""
        batches, is_first = iter(sources), True
        batch, sums = next(batches, None), None
        while is_first or batch is not None:
            host, addends = (memoryview(b""), ()) if batch is None else batch
            source = self.to_device(host)
            additions = jobs.Additions.of(pieces, starts, addends)
            table = upload_arrays(self.device, additions.addends, *(rows for rows, _ in additions.targets.values()))
            # The next batch is read into the same host memory.
            self.device.wait()
            batch = next(batches, None)
            if sums is None and not (batch is None and rule.rounds):
                sums = allocate_block(self.device, 8 * starts[-1])
            job = jobs.job(
                jobs.ADD_JOB,
                block=data.address,
                source=source.address,
                sums=0 if sums is None else sums.address,
                losses=losses.address,
                addend=table.addresses[0],
                divisor=rule.divisor or 1.0,
                factor=rule.factor,
                flags=jobs.add_flags(rule, is_first=is_first, is_last=batch is None),
            )
            for (dtype, (rows, blocks)), address in zip(additions.targets.items(), table.addresses[1:], strict=True):
                job["target"], job["targets"] = address, len(rows)
                self.device.launch(dtype, "accumulate", blocks, jobs.THREADS, job)
            self.device.wait()
            is_first = False
        return None if rule.rounds else sums

    def _trim(self, data: DeviceBlock, means: Buffer, columns: jobs.Columns, dropped: int, *, finite: bool) -> None:
        """Set the means of groups of addends, all of the same number."""
        pairs, threads = network(columns.each, dropped), columns.blocks * jobs.THREADS
        table = upload_arrays(self.device, columns.groups, columns.addends, pairs)
        scratch = self.device.allocate(8 * threads * columns.each)
        job = jobs.job(
            jobs.TRIM_JOB,
            **dict(zip(("group", "addend", "pair"), table.addresses, strict=True)),
            source=data.address,
            means=means.address,
            scratch=scratch.address,
            groups=len(columns.groups),
            elements=columns.elements,
            pairs=len(pairs),
            count=columns.each,
            dropped=dropped,
            finite=finite,
            threads=threads,
        )
        self.device.launch("mixed", "trimmed_means", columns.blocks, jobs.THREADS, job)
        self.device.wait()

    def _patch_job(self, patch: Patch) -> tuple[NDArray[Any], Any]:
        """The job of a layer norm's kernel, and the memory that must live until the kernel is done."""
        x, y_grad = self._on_device(patch.x), self._on_device(patch.y_grad)
        vectors = upload_vectors(self.device, patch.mean, patch.inv_std_dev, patch.scale, patch.bias)
        job = jobs.patch_job(patch, x.address, y_grad.address, vectors.addresses)
        return job, (x, y_grad, vectors)
