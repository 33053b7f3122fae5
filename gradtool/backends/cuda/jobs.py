"""The arguments of the CUDA kernels: the structs of the .cuh files as numpy types, and the tables they point to."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradtool.backends.storage import STORAGE
from gradtool.backends.values import STATISTICS, BlockDifferences, BlockSums
from gradtool.reduction import tile_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from gradtool.backends.cuda.device import Device
    from gradtool.backends.values import Addend, AddMode, Patch, Piece, Tolerance


def record(*fields: str) -> np.dtype[Any]:
    """Declare a struct of 8-byte fields: float64 for those with a star, else int64."""
    return np.dtype([(name.lstrip("*"), "<f8" if name.startswith("*") else "<i8") for name in fields])


_PIECE = record("offset", "elements", "first_block", "first_sum", "number", "*factor")
_TARGET = record("offset", "elements", "first_block", "at", "first_addend", "addends", "number")
_ADDEND = record("dtype", "offset", "start", "elements", "*weight")
TILES_JOB = record("block", "sums", "exponents", "statistics", "piece", "*limit", "*order", "drops", "pieces")
EXTREMES_JOB = record("block", "counts", "piece", "normal", "largest", "pieces")
HISTOGRAM_JOB = record("block", "counts", "largest", "piece", "pieces")
ADD_JOB = record(
    "block", "source", "sums", "losses", "target", "addend", "*divisor", "*factor", "*weight", "flags", "targets"
)
_GROUP = record("first", "at", "first_addend")
TRIM_JOB = record(
    *("source", "means", "scratch", "group", "addend", "pair"),
    *("groups", "elements", "pairs", "count", "dropped", "finite", "threads"),
)
PATCH_JOB = record(
    *("x", "y_grad", "x_grad", "mean", "inv_std_dev", "weighted", "projected", "scale", "bias", "grads"),
    *("x_dtype", "y_grad_dtype", "x_grad_dtype", "rows", "columns", "height", "rms", "has_means"),
)
_PAIR = record(
    "dtype_a", "offset_a", "dtype_b", "offset_b", "elements", "first_block", "*absolute", "*relative", "*near"
)
# Four sums, three exponents, three maxima and their places, the first difference, and seven counts.
DIFFERENCE_WORDS = 21
DIFFERENCES_JOB = record("a", "b", "pair", "results", "pairs")
GROUPS_JOB = record("totals", "grads", "groups", "columns")

# As the enums of the .cuh files.
THREADS, TEAM, GROUPS_TEAM = 256, 512, 256
_CHUNK, _MAX_CHUNKS = 1024, 256
_SLICE = TEAM * 16
_FIRST, _LAST, _KEEPS, _DIVIDES, _MULTIPLIES, _ROUNDS = (1 << bit for bit in range(6))
_TERMS = {math.inf: "maximum", 1.0: "absolute", 2.0: "square"}
_NEVER = 1 << 62
_SCRATCH_BYTES = 64 << 20


class Job(NamedTuple):
    """The argument of a kernel, and the memory that must live until the kernel is done."""

    argument: NDArray[Any]
    memory: list[Any]


def make_job(device: Device, kind: np.dtype[Any], **fields: Any) -> Job:
    """Return a job with the address of each field that is memory of the device; fields that are None or missing are 0.

    Arrays of the host are copied to the device, in order.
    """
    arrays = {name: np.asarray(field) for name, field in fields.items() if isinstance(field, np.ndarray | array)}
    content = b"".join(field.tobytes() for field in arrays.values())
    buffer = device.allocate(len(content) + 1)
    device.upload(buffer.address, content)
    starts = accumulate((field.nbytes for field in arrays.values()), initial=buffer.address)
    values = fields | dict(zip(arrays, starts, strict=False))
    argument = np.zeros(1, kind)
    for name, value in values.items():
        argument[name] = 0 if value is None else getattr(value, "address", value)
    return Job(argument, [buffer, content, *fields.values()])


class Tiles(NamedTuple):
    """The pieces of a block as a table, and the number of tiles of each."""

    table: NDArray[Any]
    counts: NDArray[np.int64]
    codes: NDArray[np.int64]

    @classmethod
    def from_pieces(cls, pieces: Sequence[Piece], factors: Sequence[float] | None = None) -> Tiles:
        """Make the table of pieces, with their factors if they are scaled."""
        table = np.zeros(len(pieces), _PIECE)
        table["offset"] = [piece.offset for piece in pieces]
        table["elements"] = [piece.elements for piece in pieces]
        table["factor"] = 1.0 if factors is None else factors
        table["number"] = np.arange(len(pieces))
        counts = np.array([tile_count(piece.elements) for piece in pieces], np.int64)
        table["first_sum"] = np.cumsum(counts) - counts
        return cls(table, counts, np.array([STORAGE[piece.dtype].code for piece in pieces], np.int64))

    @property
    def total(self) -> int:
        """The number of all tiles."""
        return int(self.counts.sum())

    @property
    def results(self) -> int:
        """The number of 8-byte results: the sums of all tiles, their exponents, and the statistics of each piece."""
        return 2 * self.total + len(STATISTICS) * len(self.table)

    def by_type(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield for each storage type the number of thread blocks, a block for each tile, and its part of the table."""
        for dtype, storage in STORAGE.items():
            numbers = np.flatnonzero((self.codes == storage.code) & (self.counts > 0))
            if numbers.size:
                rows, counts = self.table[numbers], self.counts[numbers]
                rows["first_block"] = np.cumsum(counts) - counts
                yield dtype, int(counts.sum()), {"piece": rows, "pieces": len(rows)}

    def unpack(self, results: NDArray[np.int64]) -> BlockSums:
        """Return the results of a kernel as a backend does."""
        sums, exponents, statistics = np.split(results, [self.total, 2 * self.total])
        statistics = statistics.reshape(-1, len(STATISTICS))
        distances = statistics[:, list(STATISTICS).index("first_nonfinite")]
        distances[:] = np.where(distances > 0, _NEVER - distances, -1)
        words = array("q", statistics.tobytes())
        return BlockSums(array("d", sums.tobytes()), array("i", exponents.tolist()), words)


def tile_kernels(dtype: str, order: float, *, writes: bool) -> list[str]:
    """Return the kernel that sums tiles, and the kernel that then repeats the sums that are out of range."""
    term = _TERMS.get(order, "power")
    kernels = [f"{'scale' if writes else 'measure'}_{term}"]
    # The magnitudes of all types but F64, and their squares, are in range.
    if term == "power" or (term != "maximum" and dtype == "F64"):
        kernels.append(f"again_{term}")
    return kernels


def additions(
    pieces: Sequence[Piece], starts: Sequence[int], addends: Iterable[Addend]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield for each storage type the number of thread blocks, a block for each tile, and its pieces and addends.

    Addends are cut at the ends of pieces. The sums of a piece begin at its entry of `starts`.
    """
    rows: list[list[tuple[int, int, int, int, float]]] = [[] for _ in pieces]
    for dtype, offset, elements, at, weight in addends:
        # An addend can span several pieces.
        number, done = bisect_right(starts, at, hi=len(pieces)) - 1, 0
        while done < elements:
            start = at + done - starts[number]
            count = min(elements - done, pieces[number].elements - start)
            if count > 0:
                code, part = STORAGE[dtype].code, offset + done * STORAGE[dtype].itemsize
                rows[number].append((code, part, start, count, weight))
                done += count
            number += 1
    for dtype in dict.fromkeys(piece.dtype for piece in pieces if piece.elements):
        targets: list[tuple[int, ...]] = []
        table: list[tuple[int, int, int, int, float]] = []
        blocks = 0
        for number, (piece, at) in enumerate(zip(pieces, starts, strict=False)):
            if piece.elements and piece.dtype == dtype:
                targets.append((piece.offset, piece.elements, blocks, at, len(table), len(rows[number]), number))
                table += rows[number]
                blocks += tile_count(piece.elements)
        fields = {"target": np.array(targets, _TARGET), "targets": len(targets), "addend": np.array(table, _ADDEND)}
        yield dtype, blocks, fields


def pair_table(
    a_pieces: Sequence[Piece], b_pieces: Sequence[Piece], tolerances: Sequence[Tolerance]
) -> tuple[NDArray[Any], int]:
    """Return a table of pieces and those that they are compared with, without empty pieces, and the number of tiles."""
    rows, tiles = [], 0
    for a, b, tolerance in zip(a_pieces, b_pieces, tolerances, strict=True):
        elements = a.elements
        if elements:
            codes = STORAGE[a.dtype].code, STORAGE[b.dtype].code
            rows.append((codes[0], a.offset, codes[1], b.offset, elements, tiles, *tolerance))
            tiles += tile_count(elements)
    return np.array(rows, _PAIR), tiles


def unpack_differences(results: NDArray[np.int64]) -> BlockDifferences:
    """Return the results of a kernel, a struct for each tile, as a backend does."""
    words = results.reshape(-1, DIFFERENCE_WORDS)
    columns = (words[:, start:end].tobytes() for start, end in pairwise((0, 4, 7, 8, 9, 10, 14, 21)))
    fields: list[array[Any]] = [array(code, column) for code, column in zip("dqddQqq", columns, strict=True)]
    fields[1] = array("i", fields[1])
    return BlockDifferences(*fields)


class Columns(NamedTuple):
    """Groups of addends of the same elements, all of `height` addends, as tables."""

    groups: NDArray[Any]
    addends: NDArray[Any]
    height: int
    elements: int

    @classmethod
    def from_groups(cls, groups: Sequence[Sequence[Addend]]) -> Columns:
        """Make the tables of groups."""
        height, firsts = len(groups[0]), list(accumulate((group[0].elements for group in groups), initial=0))
        rows = [(firsts[i], group[0].at, i * height) for i, group in enumerate(groups)]
        addends = [
            (STORAGE[dtype].code, offset, 0, elements, weight)
            for dtype, offset, elements, _, weight in chain.from_iterable(groups)
        ]
        return cls(np.array(rows, _GROUP), np.array(addends, _ADDEND), height, firsts[-1])

    @property
    def blocks(self) -> int:
        """The number of thread blocks: as many as keep a GPU busy, and whose columns take little memory."""
        limit = max(1, _SCRATCH_BYTES // (8 * THREADS * self.height))
        return max(1, min(limit, -(-self.elements // THREADS)))


def add_flags(mode: AddMode, *, is_first: bool, is_last: bool) -> int:
    """Return the steps of a batch beside adding."""
    flags = _FIRST * is_first
    if is_last:
        flags |= _LAST | _MULTIPLIES * (mode.factor != 1) | _ROUNDS * mode.rounds
        flags |= _DIVIDES * (mode.divisor is not None)
    # The old values are not divided.
    if mode.include_buffer and (is_first if mode.divisor is None else is_last):
        flags |= _KEEPS
    return flags


def layer_module(*dtypes: str) -> str:
    """Return the module for a layer norm whose tensors have these storage types."""
    return dtypes[0] if len(set(dtypes)) == 1 else "mixed"


def row_blocks(rows: int, columns: int) -> int:
    """Count the thread blocks that sum rows; a block takes as many rows as it has warps for their chunks.

    Raises:
        ValueError: the rows are too long.
    """
    at_once = max(1, TEAM // 32 // _chunks(columns))
    return -(-rows // at_once)


def gradient_blocks(patch: Patch) -> int:
    """Count the thread blocks that compute gradients: one for each group of rows and slice of the columns.

    Raises:
        ValueError: the rows are too long.
    """
    _chunks(patch.columns)
    return patch.groups * -(-patch.columns // _SLICE)


def _chunks(columns: int) -> int:
    chunks = -(-columns // _CHUNK)
    if chunks > _MAX_CHUNKS:
        raise ValueError("a patch has at most 262,144 columns")
    return chunks
