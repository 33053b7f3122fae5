"""The CUDA backend: the bits of the numpy backend, from kernels on a GPU.

One launch works on all pieces of a storage type in a block, however many there are.
"""

from __future__ import annotations

import math
from array import array
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from gradtool import tuning
from gradtool.backends.cpu import NumpyBackend, group_addends, sorting_network
from gradtool.backends.cuda import jobs
from gradtool.backends.cuda.device import DeviceBlock, allocate_block, allocate_zeros, download_words
from gradtool.backends.cuda.jobs import Job, make_job
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import BlockHistogram, Extremes, NormSpec, Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gradtool.backends.cuda.device import Buffer, Device
    from gradtool.backends.values import (
        Addend,
        AddMode,
        Array,
        BlockDifferences,
        BlockSums,
        Data,
        Factors,
        Floats,
        Patch,
        Pieces,
        Sources,
        Tolerance,
        Trim,
        Units,
    )

# Memory that blocks which stay between passes leave to those that come and go.
_RESERVE_BYTES = 4 << 30


class CudaBackend(NumpyBackend):
    """The numpy backend with kernels on a GPU. Blocks that are not on the device are copied there and back.

    A few values, such as a scale, are widened and narrowed on the host.
    """

    name = "cuda"

    def __init__(self, device: Device) -> None:
        self.device = device

    @property
    def block_bytes(self) -> int:
        # 16 MiB, which take much longer to copy than the latencies of a copy and a launch.
        return 8 * tuning.BLOCK_BYTES

    def memory(self, nbytes: int) -> memoryview:
        return self.device.memory(nbytes)

    def to_device(self, block: memoryview, *, copies: bool = True, align: int = 0) -> DeviceBlock:
        data = allocate_block(self.device, len(block), align)
        if copies:
            self.device.upload(data.address, block)
        return data

    def to_host(self, data: DeviceBlock, block: memoryview) -> None:
        self.device.download(data.address, block)
        self.device.wait()

    def stays_on_device(self, nbytes: int) -> bool:
        return self.device.free_bytes() - nbytes > _RESERVE_BYTES

    def tile_sums(self, block: Data, pieces: Pieces, spec: NormSpec) -> BlockSums:
        return self._sum(self._on_device(block), pieces, spec)

    def histogram(self, block: Data, pieces: Pieces, spec: NormSpec) -> tuple[BlockSums, BlockHistogram]:
        data, tiles = self._on_device(block), jobs.Tiles.from_pieces(pieces)
        bins = np.array([len(STORAGE[piece.dtype].bins) for piece in pieces], np.int64)
        # The kernel adds to bins where other kernels write sums.
        tiles.table["first_sum"] = np.cumsum(bins) - bins
        # The counts, and the largest magnitudes behind them.
        total = int(bins.sum())
        results = allocate_zeros(self.device, total + len(pieces))
        fields = {"block": data, "counts": results, "largest": results.address + 8 * total}
        parts = self._jobs(jobs.HISTOGRAM_JOB, tiles.by_type(), **fields)
        for dtype, blocks, job in parts:
            self.device.launch(dtype, "histogram", blocks, jobs.THREADS, job.argument)
        counts, largest = np.split(download_words(self.device, results, total + len(pieces)), [total])
        histogram = BlockHistogram(array("q", counts.tobytes()), array("d", largest.tobytes()))
        return self.tile_sums(data, pieces, spec), histogram

    def extremes(self, block: Data, pieces: Pieces) -> Extremes:
        data, results = self._on_device(block), allocate_zeros(self.device, 2 * len(pieces))
        tables = jobs.Tiles.from_pieces(pieces).by_type()
        parts = self._jobs(jobs.EXTREMES_JOB, tables, block=data, counts=results)
        for dtype, blocks, job in parts:
            job.argument["normal"], job.argument["largest"] = STORAGE[dtype].bounds
            self.device.launch(dtype, "extremes", blocks, jobs.THREADS, job.argument)
        counts = array("q", download_words(self.device, results, 2 * len(pieces)).tobytes())
        return Extremes(counts[::2], counts[1::2])

    def scale(self, block: Data, pieces: Pieces, factors: Sequence[float], limit: float, spec: NormSpec) -> BlockSums:
        data = self._on_device(block)
        sums = self._sum(data, pieces, spec, factors, limit)
        self._copy_back(data, block)
        return sums

    def scale_units(
        self, block: Data, pieces: Pieces, units: Sequence[Units], factors: Factors, spec: NormSpec
    ) -> BlockSums:
        data, rows, row_factors, numbers = self._on_device(block), [], [], []
        for k, (piece, (size, phase, first)) in enumerate(zip(pieces, units, strict=True)):
            # A row of the table for each unit: their sums are not those of tiles, and are not used.
            itemsize, done = STORAGE[piece.dtype].itemsize, 0
            while done < piece.elements:
                number, begin = divmod(phase + done, size)
                count = min(size - begin, piece.elements - done)
                rows.append(Piece(piece.dtype, piece.offset + done * itemsize, count))
                row_factors.append(float(factors[first + number]))
                numbers.append(k)
                done += count
        scaled = self._sum(data, rows, NormSpec(math.inf), row_factors)
        sums = self._sum(data, pieces, spec)
        for k, zeros, subnormals in zip(numbers, scaled.new_zeros, scaled.new_subnormals, strict=True):
            sums.new_zeros[k] += zeros
            sums.new_subnormals[k] += subnormals
        self._copy_back(data, block)
        return sums

    def accumulate(self, block: Data, pieces: Pieces, sources: Sources, mode: AddMode, spec: NormSpec) -> BlockSums:
        data, starts = self._on_device(block), [0, *accumulate(piece.elements for piece in pieces)]
        losses = allocate_zeros(self.device, 2 * len(pieces))
        wide = self._add_batches(data, pieces, starts, sources, mode, losses=losses)
        if wide is not None:
            wide_pieces = [Piece("F64", 8 * at, piece.elements) for piece, at in zip(pieces, starts, strict=False)]
            return self._sum(wide, wide_pieces, spec)
        sums = self._sum(data, pieces, spec)
        counts = array("q", download_words(self.device, losses, 2 * len(pieces)).tobytes())
        self._copy_back(data, block)
        sums.new_zeros, sums.new_subnormals = counts[::2], counts[1::2]
        return sums

    def trimmed_means(self, source: memoryview, addends: Sequence[Addend], trim: Trim, elements: int) -> Array:
        data, means = self.to_device(source), allocate_zeros(self.device, elements)
        for groups in group_addends(addends):
            columns = jobs.Columns.from_groups(groups)
            dropped, threads = trim.dropped_from(columns.height), columns.blocks * jobs.THREADS
            pairs = sorting_network(columns.height, dropped)
            job = make_job(
                self.device,
                jobs.TRIM_JOB,
                group=columns.groups,
                addend=columns.addends,
                pair=pairs,
                source=data,
                means=means,
                scratch=self.device.allocate(8 * threads * columns.height),
                groups=len(columns.groups),
                elements=columns.elements,
                pairs=len(pairs),
                count=columns.height,
                dropped=dropped,
                finite=trim.finite,
                threads=threads,
            )
            self.device.launch("mixed", "trimmed_means", columns.blocks, jobs.THREADS, job.argument)
            self.device.wait()
        return download_words(self.device, means, elements).view(np.float64)

    def differences(
        self, a: Data, a_pieces: Pieces, b: Data, b_pieces: Pieces, tolerances: Sequence[Tolerance]
    ) -> BlockDifferences:
        table, tiles = jobs.pair_table(a_pieces, b_pieces, tolerances)
        if not tiles:
            return jobs.unpack_differences(np.empty(0, np.int64))
        results = self.device.allocate(8 * jobs.DIFFERENCE_WORDS * tiles)
        job = make_job(
            self.device,
            jobs.DIFFERENCES_JOB,
            a=self._on_device(a),
            b=self._on_device(b),
            pair=table,
            results=results,
            pairs=len(table),
        )
        # Only sums of F64 may be out of range.
        has_f64 = any(piece.dtype == "F64" for piece in (*a_pieces, *b_pieces))
        for kernel in ("differences", "differences_again")[: 1 + has_f64]:
            self.device.launch("mixed", kernel, tiles, jobs.THREADS, job.argument)
        return jobs.unpack_differences(download_words(self.device, results, jobs.DIFFERENCE_WORDS * tiles))

    def row_sums(self, x: Data, dtype: str, rows: int, columns: int, center: Floats | None) -> Array:
        if not rows or not columns:
            return np.zeros(rows)
        sums, shape = self.device.allocate(8 * rows), {"rows": rows, "columns": columns}
        data = {"x": self._on_device(x), "x_dtype": STORAGE[dtype].code}
        job = make_job(self.device, jobs.PATCH_JOB, **data, **shape, mean=center, weighted=sums)
        self.device.launch(dtype, "row_sums", jobs.row_blocks(rows, columns), jobs.TEAM, job.argument)
        return download_words(self.device, sums, rows).view(np.float64)

    def layer_norm_sums(self, patch: Patch) -> tuple[Array, Array]:
        if not patch.rows or not patch.columns:
            return np.zeros(patch.rows), np.zeros(patch.rows)
        sums, blocks = self.device.allocate(16 * patch.rows), jobs.row_blocks(patch.rows, patch.columns)
        job = self._patch_job(patch, weighted=sums, projected=sums.address + 8 * patch.rows)
        module = jobs.layer_module(patch.x_dtype, patch.y_grad_dtype)
        self.device.launch(module, "layer_norm_sums", blocks, jobs.TEAM, job.argument)
        weighted, projected = download_words(self.device, sums, 2 * patch.rows).view(np.float64).reshape(2, patch.rows)
        return weighted, projected

    def layer_norm_grads(
        self, patch: Patch, means: tuple[Array, Array] | None, x_grad: Data, dtype: str
    ) -> DeviceBlock:
        grads = allocate_block(self.device, 16 * patch.groups * patch.columns)
        if not grads.nbytes:
            return grads
        result, (weighted, projected) = self._on_device(x_grad, copies=False), means or (None, None)
        job = self._patch_job(
            patch,
            weighted=weighted,
            projected=projected,
            has_means=means is not None,
            x_grad=result,
            x_grad_dtype=STORAGE[dtype].code,
            grads=grads,
        )
        module = jobs.layer_module(patch.x_dtype, patch.y_grad_dtype, dtype)
        self.device.launch(module, "layer_norm_grads", jobs.gradient_blocks(patch), jobs.TEAM, job.argument)
        self.device.wait()
        self._copy_back(result, x_grad)
        return grads

    def add_groups(self, totals: array[float], grads: DeviceBlock) -> None:
        if not grads.nbytes:
            return
        view = memoryview(totals).cast("B")
        sums, count = self.to_device(view), view.nbytes // 8
        shape = {"groups": grads.nbytes // sums.nbytes, "columns": count // 2}
        job = make_job(self.device, jobs.GROUPS_JOB, totals=sums, grads=grads, **shape)
        self.device.launch("mixed", "add_groups", -(-count // jobs.GROUPS_TEAM), jobs.GROUPS_TEAM, job.argument)
        self.to_host(sums, view)

    def _on_device(self, block: Data, *, copies: bool = True) -> DeviceBlock:
        return block if isinstance(block, DeviceBlock) else self.to_device(block, copies=copies)

    def _copy_back(self, data: DeviceBlock, block: Data) -> None:
        if data is not block:
            self.to_host(data, block)

    def _sum(
        self,
        data: DeviceBlock,
        pieces: Pieces,
        spec: NormSpec,
        factors: Sequence[float] | None = None,
        limit: float = math.inf,
    ) -> BlockSums:
        """Sum the pieces of a block; with factors, multiply and clamp them in place first."""
        tiles = jobs.Tiles.from_pieces(pieces, factors)
        results = allocate_zeros(self.device, tiles.results)
        parts = self._jobs(
            jobs.TILES_JOB,
            tiles.by_type(),
            block=data,
            sums=results,
            exponents=results.address + 8 * tiles.total,
            statistics=results.address + 16 * tiles.total,
            order=spec.order,
            drops=spec.drop_nonfinite,
        )
        for dtype, blocks, job in parts:
            job.argument["limit"] = STORAGE[dtype].rounded(limit)
            for kernel in jobs.tile_kernels(dtype, spec.order, writes=factors is not None):
                self.device.launch(dtype, kernel, blocks, jobs.THREADS, job.argument)
        return tiles.unpack(download_words(self.device, results, tiles.results))

    def _jobs(
        self, kind: np.dtype[Any], tables: Iterable[tuple[str, int, dict[str, Any]]], **fields: Any
    ) -> list[tuple[str, int, Job]]:
        """Return for each storage type the number of thread blocks, and the job.

        All jobs are made before the first launch, so that memory runs short before it or never.
        """
        return [(dtype, blocks, make_job(self.device, kind, **table, **fields)) for dtype, blocks, table in tables]

    def _add_batches(
        self,
        data: DeviceBlock,
        pieces: Pieces,
        starts: Sequence[int],
        sources: Sources,
        mode: AddMode,
        *,
        losses: Buffer,
    ) -> DeviceBlock | None:
        """Add batch after batch. Return the float64 sums if the mode leaves them unrounded."""
        batches, is_first = iter(sources), True
        batch, sums = next(batches, None), None
        while is_first or batch is not None:
            host, addends = (memoryview(b""), ()) if batch is None else batch
            source, tables = self.to_device(host), list(jobs.additions(pieces, starts, addends))
            # The next batch is read into the same host memory.
            self.device.wait()
            batch = next(batches, None)
            if sums is None and not (batch is None and mode.rounds):
                sums = allocate_block(self.device, 8 * starts[-1])
            parts = self._jobs(
                jobs.ADD_JOB,
                tables,
                block=data,
                source=source,
                sums=sums,
                losses=losses,
                divisor=mode.divisor or 1.0,
                factor=mode.factor,
                weight=mode.buffer_weight,
                flags=jobs.add_flags(mode, is_first=is_first, is_last=batch is None),
            )
            for dtype, blocks, job in parts:
                self.device.launch(dtype, "accumulate", blocks, jobs.THREADS, job.argument)
            self.device.wait()
            is_first = False
        return None if mode.rounds else sums

    def _patch_job(self, patch: Patch, **fields: Any) -> Job:
        return make_job(
            self.device,
            jobs.PATCH_JOB,
            x=self._on_device(patch.x),
            x_dtype=STORAGE[patch.x_dtype].code,
            y_grad=self._on_device(patch.y_grad),
            y_grad_dtype=STORAGE[patch.y_grad_dtype].code,
            mean=patch.mean,
            inv_std_dev=patch.inv_std_dev,
            scale=patch.scale,
            bias=patch.bias,
            rows=patch.rows,
            columns=patch.columns,
            height=patch.height,
            rms=patch.rms,
            **fields,
        )
