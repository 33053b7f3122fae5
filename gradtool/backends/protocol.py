"""The arithmetic that every backend has, and the values that go in and out.

A block is a part of a file in memory; its pieces are the parts of tensors in it, each starting on a tile boundary. A
backend knows no path and no policy; to read a block itself, it gets a descriptor. The numpy backend (`cpu`) is the
reference: all others give the same bits.
"""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from gradtool.arrays import float64s, int32s
from gradtool.reduction import tile_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from gradtool.backends.tiles import BlockHistogram, Extremes
    from gradtool.backends.units import TypedView, UnitCounts, UnitLimits

    Array = NDArray[np.float64]
    Floats = Array | array[float]
    Pieces = Sequence["Piece"]
    # Batches of what is added, and the memory that each is in.
    Sources = Iterable[tuple[memoryview, Sequence["Addend"]]]
    # Of units, float64, `unscale` included.
    Factors = memoryview[float]
    # A block, or the copy of it that `Backend.to_device` returns; a block that is only read may be a `FileBlock`.
    Data = Any


class Piece(NamedTuple):
    """`elements` values of one storage type, from byte `offset` of a block on."""

    dtype: str
    offset: int
    elements: int


class Addend(NamedTuple):
    """`elements` values of one storage type, from byte `offset` of a source on, to add to the sums from `at` on."""

    dtype: str
    offset: int
    elements: int
    at: int
    weight: float


class AddMode(NamedTuple):
    """The value that is rounded and written, from Σ w·g: (old + Σ) · factor, or (old + Σ / divisor) · factor.

    Without `include_buffer`, the old value is left out. Without `rounds`, the float64 sums are measured and nothing is
    written.
    """

    include_buffer: bool = True
    divisor: float | None = None
    factor: float = 1.0
    rounds: bool = True


class Trim(NamedTuple):
    """The number of smallest and of largest values `dropped` before the mean; None for all but the middle.

    The middle of an even number of values is two of them, so that their mean is the median. If all must be `finite`,
    any other value makes the mean NaN.
    """

    dropped: int | None = None
    finite: bool = False

    def dropped_from(self, count: int) -> int:
        """Return how many of `count` values are dropped at each end."""
        return (count - 1) // 2 if self.dropped is None else self.dropped


class Units(NamedTuple):
    """The units of a piece, which are `size` consecutive elements of its tensor each.

    The first element of the piece is number `phase` of its unit, whose factor is number `first`.
    """

    size: int
    phase: int
    first: int


class Patch(NamedTuple):
    """Some rows of a layer norm: its input and the gradient of its output, (rows, columns) each, and their parameters.

    `x` and `y_grad` are blocks of one storage type each; `mean` and `inv_std_dev` are float64 (rows,), `scale` and
    `bias` float64 (columns,). With a bias, `x` is the layer's output and the normalized input is (x - bias) / scale.
    Without a bias, `x` is the input and the normalized input is (x - mean) · inv_std_dev. RMS norm (`rms`) has a mean,
    or a bias, of 0. Each group of `height` rows has its own sums over rows.
    """

    rows: int
    columns: int
    height: int
    x: Data
    x_dtype: str
    y_grad: Data
    y_grad_dtype: str
    mean: Floats
    inv_std_dev: Floats
    scale: Floats
    bias: Floats | None = None
    rms: bool = False

    @property
    def groups(self) -> int:
        """The number of groups of rows; the last may be short."""
        return -(-self.rows // self.height)


class NormSpec(NamedTuple):
    """The order of the norm and the policy for NaN: sums are over |x|^order; for an infinite order nothing is summed.

    With `drop_nonfinite`, NaN and Inf are summed and written as zero.
    """

    order: float = 2.0
    drop_nonfinite: bool = False


class Column(NamedTuple):
    """A statistic of each tensor: its type, and how the values of parts of a tensor are merged.

    A `sum` adds them and, unless it is `signed`, is no smaller than 0. A `max` is the largest; if it has a `place`,
    that is the column with the index of the first element that has it. A `first` is the smallest index, or -1; a
    `place` is merged with its maximum. A `bins` column has several sums for each tensor.
    """

    typecode: str
    merge: Literal["sum", "max", "first", "place", "bins"]
    signed: bool = False
    place: str = ""


# A column in the class, and in each object its values.
_column: Any = Column


class Statistics:
    """The statistics of each piece that a pass over a block measures. The kernels have structs of the same order.

    `max_abs` ignores NaN, and Inf too if it is dropped. `first_nonfinite` is an index into the piece, or -1.

    `new_zeros` and `new_subnormals` say what a write has lost, and are 0 where nothing was written: how many values
    became 0, and how many more than before are subnormal. What is multiplied by 0 loses nothing, nor does a sum that
    is subnormal without being rounded.
    """

    max_abs: array[float] = _column("d", "max")
    nan: array[int] = _column("q", "sum")
    inf: array[int] = _column("q", "sum")
    zeros: array[int] = _column("q", "sum")
    first_nonfinite: array[int] = _column("q", "first")
    new_zeros: array[int] = _column("q", "sum")
    # Negative where a write leaves fewer subnormal values.
    new_subnormals: array[int] = _column("q", "sum", signed=True)


STATISTICS = {name: column for name, column in vars(Statistics).items() if isinstance(column, Column)}


class BlockSums(Statistics):
    """The result of a pass over a block: sum and exponent of every tile, and the statistics of every piece.

    `gradtool.reduction` defines sums and exponents.
    """

    def __init__(self, sums: array[float], exponents: array[int], words: array[int]) -> None:
        """Take the statistics from `words` of 8 bytes: those of a piece follow those of the piece before it."""
        self.sums, self.exponents = sums, exponents
        for number, (name, column) in enumerate(STATISTICS.items()):
            setattr(self, name, array(column.typecode, words[number :: len(STATISTICS)].tobytes()))

    @classmethod
    def empty(cls, pieces: Pieces) -> BlockSums:
        """Return the sums of pieces before anything is counted."""
        tiles = sum(tile_count(piece.elements) for piece in pieces)
        words = [-1 if column.merge == "first" else 0 for column in STATISTICS.values()]
        return cls(float64s(tiles), int32s(tiles), array("q", words * len(pieces)))


class FileBlock(NamedTuple):
    """A block that is still in a file: its descriptor, where the block begins, its bytes, and memory to read them into.

    As much as the memory holds is read at a time, and is worked on while it is in the cache. The memory must have room
    for a tile. The backend sets the three numbers of `report`: the bytes that were read, the nanoseconds that it took,
    and the number of an error, or -1 where the file ends within the block. After an error, the result is of no use.
    """

    fd: int
    begin: int
    nbytes: int
    memory: memoryview
    report: array[int]

    def check(self) -> None:
        """Raise `OSError`, or `EOFError` where the file ends early, if the block could not be read."""
        problem = self.report[2]
        if problem < 0:
            raise EOFError
        if problem:
            raise OSError(problem, os.strerror(problem))


class Tolerance(NamedTuple):
    """The distance within which a is close to b: |a - b| <= absolute + relative·|b|."""

    absolute: float = 0.0
    relative: float = 0.0


class BlockDifferences(NamedTuple):
    """The differences of two blocks, tile by tile; `gradtool.backends.differences` defines them.

    `sums` are Σ(a-b)², Σa², Σb² and Σab; `exponents` those of the first three, and that of Σab is the sum of the last
    two. `ulps` is uint64. `places` are the first indices in the tile of max_abs, max_rel and ulps, which are 0 where
    the values do not differ. `counts` are: values that differ, stored bits that differ, values that are not close, NaN
    or Inf in a and not the same in b, NaN or Inf in b and not the same in a, the same NaN or Inf in both.
    """

    sums: array[float]
    exponents: array[int]
    max_abs: array[float]
    max_rel: array[float]
    ulps: array[int]
    places: array[int]
    counts: array[int]

    @property
    def maxima(self) -> list[array[Any]]:
        """The maxima of which `places` has the places."""
        return [self.max_abs, self.max_rel, self.ulps]


class Backend(Protocol):
    """The arithmetic of all operations: sums, scale, add, differences, sums over rows, and layer norm.

    A block is a writable buffer of bytes, or what `to_device` returned for it; it is changed in place.
    """

    name: str

    @property
    def block_bytes(self) -> int:
        """The size of block that this backend is fastest with."""

    def memory(self, nbytes: int) -> memoryview:
        """Allocate host memory for blocks, of the kind that the backend reads fastest."""

    def to_device(self, block: memoryview, *, copies: bool = True, align: int = 0) -> Data:
        """Copy a block to the device, with byte `align` of it aligned. If the device is the CPU, return the block.

        Without `copies`, only allocate.

        Raises:
            DeviceMemoryError: the device has no room.
        """

    def to_host(self, data: Data, block: memoryview) -> None:
        """Copy what `to_device` returned back to its block."""

    def stays_on_device(self, nbytes: int) -> bool:
        """Check whether the device has room to keep a block of this size until the next pass."""

    def reads_files(self, spec: NormSpec) -> bool:
        """Check whether `tile_sums` and `histogram`, with this spec, and `differences` read a `FileBlock`."""

    def tile_sums(self, block: Data, pieces: Pieces, spec: NormSpec) -> BlockSums:
        """Sum the pieces."""

    def histogram(self, block: Data, pieces: Pieces, spec: NormSpec) -> tuple[BlockSums, BlockHistogram]:
        """Sum the pieces, and count the finite values other than zero by their exponent e: 2^(e-1) <= |x| < 2^e."""

    def extremes(self, block: Data, pieces: Pieces) -> Extremes:
        """Count, for each piece, the subnormal values and those of the largest finite magnitude of its type."""

    def scale(self, block: Data, pieces: Pieces, factors: Sequence[float], limit: float, spec: NormSpec) -> BlockSums:
        """Multiply each piece by its factor, clamp it to [-limit, limit], write it, and sum what was written.

        The factor is rounded to float32 (for F64, to float64), the limit to the type of the piece, and the exact
        product, once, to the type of the piece. NaN stays NaN.
        """

    def scale_units(
        self, block: Data, pieces: Pieces, units: Sequence[Units], factors: Factors, spec: NormSpec
    ) -> BlockSums:
        """Multiply each unit of each piece by its factor, with products as in `scale`, and sum what was written."""

    def unit_factors(
        self, grads: TypedView, params: TypedView, size: int, limits: UnitLimits, factors: Factors
    ) -> UnitCounts:
        """Set the factors of consecutive units of `size` elements; `gradtool.backends.units` defines them."""

    def accumulate(self, block: Data, pieces: Pieces, sources: Sources, mode: AddMode, spec: NormSpec) -> BlockSums:
        """Add to each piece, in float64 and in the order of `sources`, round once, and sum what was written.

        `Addend.at` counts the elements of all pieces, piece after piece. The memory of a source is no longer used
        when the next source is taken.
        """

    def trimmed_means(self, source: memoryview, addends: Sequence[Addend], trim: Trim, elements: int) -> Array:
        """Compute the trimmed mean of the values w·g of each element, shape (elements,), in float64.

        Addends of the same elements are adjacent and have the same `at`; elements without any addend are 0. The
        values are sorted, -0 counting as 0; those that are left are added in ascending order and divided by their
        number. A NaN among the values makes the mean NaN. More than twice `trim.dropped` addends are needed.
        """

    def differences(
        self, a: Data, a_pieces: Pieces, b: Data, b_pieces: Pieces, tolerance: Tolerance
    ) -> BlockDifferences:
        """Compare each piece of a with the piece of b in the same place, which has as many elements."""

    def row_sums(self, x: Data, dtype: str, rows: int, columns: int, center: Floats | None) -> Array:
        """Sum each row of x, or with a center (rows,) of (x - center)², in float64.

        A row is cut into chunks of 1,024. Within a chunk, element j belongs to lane j mod 32; a lane adds in order,
        starting at +0; the lanes are folded, neighbours first. The chunks are added in order.
        """

    def layer_norm_sums(self, patch: Patch) -> tuple[Array, Array]:
        """Sum each row of y_grad·scale and of y_grad·scale·xh, as `row_sums` adds; xh is the normalized input."""

    def layer_norm_grads(self, patch: Patch, means: tuple[Array, Array] | None, x_grad: Data, dtype: str) -> Data:
        """Write inv_std_dev · (y_grad·scale - means[0] - xh·means[1]), rounded once, to `x_grad`.

        The means are those of `layer_norm_sums`, unless given; means[0] is 0 for RMS norm. Return the gradients of
        scale and bias for `add_groups`: the float64 sums of y_grad·xh and of y_grad over the rows of each group, in
        order.
        """

    def add_groups(self, totals: array[float], grads: Data) -> None:
        """Add the gradients that `layer_norm_grads` returned to totals (2, columns), group after group."""

    def widen(self, view: memoryview, dtype: str, offset: float = -0.0) -> array[float]:
        """Return stored values as float64, plus an offset: -0 changes none."""

    def narrow(self, values: array[float], dtype: str) -> memoryview:
        """Return float64 values as a type stores them, rounded once."""
