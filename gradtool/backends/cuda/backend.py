"""The CUDA backend: the numpy backend's bits, by kernels on a GPU.

This is the host's side of them: what goes where in the device's memory, and which kernel is launched on it. One launch
works on all pieces of one storage type in a block, however many they are. The device itself is behind `Device`, so
that the tests can put the processor in its place.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gradtool import tuning
from gradtool.backends import Piece
from gradtool.backends.cuda import jobs
from gradtool.backends.storage import STORAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from gradtool.backends import Addend, BlockSums, Data, NormSpec, Patch, Rule

    Floats = NDArray[np.float64]


class Buffer(Protocol):
    """Memory of a device, given back when it is dropped."""

    address: int


class Device(Protocol):
    """One GPU. What one thread asks of it is done in the order in which it was asked."""

    name: str

    def memory(self, nbytes: int) -> memoryview:
        """Memory of the host that is copied from and to the device at full speed."""

    def allocate(self, nbytes: int) -> Buffer:
        """Memory of the device, at an address that suits every type; or `DeviceMemoryError`."""

    def free_bytes(self) -> int:
        """How much memory may still be allocated, about."""

    def upload(self, address: int, content: Any) -> None:
        """Copy a buffer of the host to the device; it may be changed once `wait` is over."""

    def download(self, address: int, content: Any) -> None:
        """Copy to a buffer of the host, which is filled once `wait` is over."""

    def clear(self, address: int, nbytes: int) -> None:
        """Fill with zeros."""

    def launch(self, module: str, kernel: str, blocks: int, threads: int, job: NDArray[Any]) -> None:
        """Run a kernel of a module on so many blocks of threads; `job` is its argument."""

    def wait(self) -> None:
        """Return when everything that this thread asked for is done."""


class DeviceBlock(NamedTuple):
    """A block in the device's memory."""

    buffer: Buffer
    address: int
    nbytes: int


class DeviceGroups(NamedTuple):
    """The gradients of scale and bias of each group of rows, float64 (2, groups, columns), in the device's memory."""

    buffer: Buffer | None
    groups: int
    columns: int


class _Table(NamedTuple):
    """Arrays on the device, and the address of each; the content lives until it is copied."""

    buffer: Buffer
    addresses: list[int]
    content: bytes


_TERMS = {math.inf: "maximum", 1.0: "absolute", 2.0: "square"}
# What is kept between passes leaves so much of the memory to the blocks that come and go.
_RESERVE_BYTES = 4 << 30
_ALIGNMENT = 256


class CudaBackend:
    """Each method does what `gradtool.backends.Backend` says. Blocks may be the host's, and then come and go."""

    name = "cuda"

    def __init__(self, device: Device) -> None:
        self.device = device

    @property
    def block_bytes(self) -> int:
        """16 MiB: beside such a copy, its latency and that of a launch do not count."""
        return 8 * tuning.BLOCK_BYTES

    def memory(self, nbytes: int) -> memoryview:
        """Page-locked memory."""
        return self.device.memory(nbytes)

    def to_device(self, block: memoryview, *, copies: bool = True, align: int = 0) -> DeviceBlock:
        """Copy a block to the device."""
        held = self._room(len(block), align)
        if copies:
            self.device.upload(held.address, block)
        return held

    def to_host(self, data: DeviceBlock, block: memoryview) -> None:
        """Copy a block back."""
        self.device.download(data.address, block)
        self.device.wait()

    def stays_on_device(self, nbytes: int) -> bool:
        """Whether enough memory would be left for the blocks that come and go."""
        return self.device.free_bytes() - nbytes > _RESERVE_BYTES

    def tile_sums(self, block: Data, pieces: Sequence[Piece], spec: NormSpec) -> BlockSums:
        """The sums of what the block holds."""
        return self._run(self._held(block), pieces, None, math.inf, spec)

    def scale(
        self, block: Data, pieces: Sequence[Piece], factors: Sequence[float], limit: float, spec: NormSpec
    ) -> BlockSums:
        """Multiply and limit in place; the sums of what was written."""
        held = self._held(block)
        found = self._run(held, pieces, factors, limit, spec)
        self._return(held, block)
        return found

    def accumulate(
        self,
        block: Data,
        pieces: Sequence[Piece],
        sources: Iterable[tuple[memoryview, Sequence[Addend]]],
        rule: Rule,
        spec: NormSpec,
    ) -> BlockSums:
        """Add in float64, round once; the sums of what was written."""
        held, starts = self._held(block), [0, *accumulate(piece.elements for piece in pieces)]
        sums = self._add(held, pieces, starts, sources, rule)
        if sums is not None:
            wide = [Piece("F64", 8 * at, p.elements) for p, at in zip(pieces, starts, strict=False)]
            return self._run(sums, wide, None, math.inf, spec)
        found = self._run(held, pieces, None, math.inf, spec)
        self._return(held, block)
        return found

    def row_sums(self, x: Data, dtype: str, rows: int, columns: int, center: Floats | None) -> Floats:
        """Per row the sum of x, or of (x - center)²."""
        if not rows or not columns:
            return np.zeros(rows)
        held, vectors = self._held(x), self._vectors(center)
        sums = self.device.allocate(8 * rows)
        job = jobs.job(
            jobs.PATCH_JOB,
            x=held.address,
            x_dtype=STORAGE[dtype].code,
            rows=rows,
            columns=columns,
            mean=vectors.addresses[0],
            weighted=sums.address,
        )
        self.device.launch(dtype, "row_sums", jobs.row_blocks(rows, columns), jobs.TEAM, job)
        return self._floats(sums, rows)

    def layer_norm_sums(self, patch: Patch) -> tuple[Floats, Floats]:
        """Per row the sums of y_grad·scale and of y_grad·scale·xh."""
        if not patch.rows or not patch.columns:
            return np.zeros(patch.rows), np.zeros(patch.rows)
        job, _kept = self._patch_job(patch)
        sums = self.device.allocate(16 * patch.rows)
        job["weighted"], job["projected"] = sums.address, sums.address + 8 * patch.rows
        module = jobs.layer_module(patch.x_dtype, patch.y_grad_dtype)
        self.device.launch(module, "layer_norm_sums", jobs.row_blocks(patch.rows, patch.columns), jobs.TEAM, job)
        weighted, projected = self._floats(sums, 2 * patch.rows).reshape(2, patch.rows)
        return weighted, projected

    def layer_norm_grads(
        self, patch: Patch, means: tuple[Floats, Floats] | None, x_grad: Data, dtype: str
    ) -> DeviceGroups:
        """Write the gradient of x; the sums over each group's rows of those of scale and bias."""
        if not patch.rows or not patch.columns:
            return DeviceGroups(None, patch.groups, patch.columns)
        job, _kept = self._patch_job(patch)
        out, vectors = self._held(x_grad, copies=False), self._vectors(*(means or (None, None)))
        grads = self.device.allocate(16 * patch.groups * patch.columns)
        job["x_grad"], job["x_grad_dtype"], job["grads"] = out.address, STORAGE[dtype].code, grads.address
        job["weighted"], job["projected"] = vectors.addresses
        job["has_means"] = means is not None
        module = jobs.layer_module(patch.x_dtype, patch.y_grad_dtype, dtype)
        self.device.launch(module, "layer_norm_grads", jobs.gradient_blocks(patch), jobs.TEAM, job)
        self.device.wait()
        self._return(out, x_grad)
        return DeviceGroups(grads, patch.groups, patch.columns)

    def add_groups(self, totals: Floats, grads: DeviceGroups) -> None:
        """Add group after group."""
        if grads.buffer is None:
            return
        table = self._vectors(totals)
        address, columns = table.addresses[0], grads.columns
        job = jobs.job(
            jobs.GROUPS_JOB, totals=address, grads=grads.buffer.address, groups=grads.groups, columns=columns
        )
        blocks = -(-totals.size // jobs.GROUPS_TEAM)
        self.device.launch("mixed", "add_groups", blocks, jobs.GROUPS_TEAM, job)
        self.device.download(address, totals)
        self.device.wait()

    def _add(
        self,
        held: DeviceBlock,
        pieces: Sequence[Piece],
        starts: Sequence[int],
        sources: Iterable[tuple[memoryview, Sequence[Addend]]],
        rule: Rule,
    ) -> DeviceBlock | None:
        """Add batch after batch; the float64 sums, where it is them that are asked for."""
        batches, is_first = iter(sources), True
        batch, sums = next(batches, None), None
        while is_first or batch is not None:
            source, addends = (memoryview(b""), ()) if batch is None else batch
            room = self.to_device(source)
            additions = jobs.Additions.of(pieces, starts, addends)
            table = self._table(additions.addends, *(rows for rows, _ in additions.targets.values()))
            # The memory of a batch is used again for the next.
            self.device.wait()
            batch = next(batches, None)
            if sums is None and not (batch is None and rule.rounds):
                sums = self._room(8 * starts[-1])
            job = jobs.job(
                jobs.ADD_JOB,
                block=held.address,
                source=room.address,
                sums=0 if sums is None else sums.address,
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

    def _room(self, nbytes: int, align: int = 0) -> DeviceBlock:
        buffer = self.device.allocate(nbytes + _ALIGNMENT)
        return DeviceBlock(buffer, buffer.address + -align % _ALIGNMENT, nbytes)

    def _held(self, block: Data, *, copies: bool = True) -> DeviceBlock:
        return block if isinstance(block, DeviceBlock) else self.to_device(block, copies=copies)

    def _return(self, held: DeviceBlock, block: Data) -> None:
        if held is not block:
            self.to_host(held, block)

    def _floats(self, buffer: Buffer, count: int) -> Floats:
        values = np.empty(count)
        self.device.download(buffer.address, values)
        self.device.wait()
        return values

    def _table(self, *parts: NDArray[Any]) -> _Table:
        """Arrays on the device, one after another."""
        content = b"".join(part.tobytes() for part in parts)
        buffer = self.device.allocate(len(content) + 1)
        self.device.upload(buffer.address, content)
        starts = accumulate((part.nbytes for part in parts), initial=buffer.address)
        return _Table(buffer, [start for start, _ in zip(starts, parts, strict=False)], content)

    def _vectors(self, *vectors: Floats | None) -> _Table:
        """Float64 arrays on the device; the address of one that is not there is 0."""
        table = self._table(*(np.empty(0) if one is None else one for one in vectors))
        there = zip(vectors, table.addresses, strict=True)
        return table._replace(addresses=[0 if one is None else address for one, address in there])

    def _patch_job(self, patch: Patch) -> tuple[NDArray[Any], Any]:
        """The job of a layer norm's kernel, and what must live until it is done."""
        x, y_grad = self._held(patch.x), self._held(patch.y_grad)
        vectors = self._vectors(patch.mean, patch.inv_std_dev, patch.scale, patch.bias)
        names = ("mean", "inv_std_dev", "scale", "bias")
        job = jobs.job(
            jobs.PATCH_JOB,
            **dict(zip(names, vectors.addresses, strict=True)),
            x=x.address,
            x_dtype=STORAGE[patch.x_dtype].code,
            y_grad=y_grad.address,
            y_grad_dtype=STORAGE[patch.y_grad_dtype].code,
            rows=patch.rows,
            columns=patch.columns,
            height=patch.height,
            rms=patch.rms,
        )
        return job, (x, y_grad, vectors)

    def _run(
        self, held: DeviceBlock, pieces: Sequence[Piece], factors: Sequence[float] | None, limit: float, spec: NormSpec
    ) -> BlockSums:
        """Measure all pieces of a block; with factors, what is written there first."""
        tiles = jobs.Tiles.of(pieces, factors)
        results = self.device.allocate(8 * tiles.results + 1)
        self.device.clear(results.address, 8 * tiles.results)
        parts = list(tiles.by_type())
        # Of every type, before the first is launched: a block is done with wholly, or is as it was.
        table = self._table(*(rows for _, rows, _ in parts))
        term = _TERMS.get(spec.order, "power")
        for (dtype, rows, blocks), address in zip(parts, table.addresses, strict=True):
            job = jobs.job(
                jobs.TILES_JOB,
                block=held.address,
                sums=results.address,
                exponents=results.address + 8 * tiles.total,
                facts=results.address + 16 * tiles.total,
                piece=address,
                pieces=len(rows),
                limit=limit,
                order=spec.order,
                drops=spec.drop_nonfinite,
            )
            kernels = [f"{'measure' if factors is None else 'scale'}_{term}"]
            if term == "power" or (term != "maximum" and dtype == "F64"):
                kernels.append(f"again_{term}")
            for kernel in kernels:
                self.device.launch(dtype, kernel, blocks, jobs.THREADS, job)
        found = np.empty(tiles.results, np.int64)
        self.device.download(results.address, found)
        self.device.wait()
        return tiles.found(found)
