"""The values that go into a backend and come out of it.

A block is a part of a file in memory; its pieces are the parts of tensors in it, each starting on a tile boundary.
"""

from __future__ import annotations

import os
from array import array
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gradtool.arrays import float64s, int32s
from gradtool.reduction import tile_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

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
    """The value that is rounded and written, from Σ w·g: (W·old + Σ) · factor, or (W·old + Σ / divisor) · factor.

    W is `buffer_weight`; if it is 0, the old value is left out, even NaN. Without `rounds`, the float64 sums are
    measured and nothing is written.
    """

    buffer_weight: float = 1.0
    divisor: float | None = None
    factor: float = 1.0
    rounds: bool = True

    @property
    def include_buffer(self) -> bool:
        """Check whether the old value is part of the result."""
        return self.buffer_weight != 0


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


class TypedView(NamedTuple):
    """Values of one storage type, and nothing else, in memory of the host."""

    view: memoryview
    dtype: str


class UnitLimits(NamedTuple):
    """The limit ratio · max(|W|, eps) of the norm |G| of a unit of gradients, divided by `unscale`.

    |W| is the norm of its parameters.
    """

    ratio: float
    eps: float
    unscale: float


class UnitCounts(NamedTuple):
    """The number of units above their limit, with a factor that changes values, and with parameters of no finite norm.

    `beyond` is the first factor that is out of range for the type it is rounded to, or -1.
    """

    clipped: int
    changed: int
    nonfinite: int
    beyond: int


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


class BlockHistogram(NamedTuple):
    """The number of values with each binary exponent: the bins of each piece, piece after piece.

    `Storage.bins` says which bins a type has. `largest` is the largest finite magnitude of each piece.
    """

    counts: array[int]
    largest: array[float]


class Extremes(NamedTuple):
    """The number of subnormal values, and of values of the largest magnitude, for each piece of a block."""

    subnormal: array[int]
    saturated: array[int]


class Tolerance(NamedTuple):
    """The distance within which a is close to b, |a - b| <= absolute + relative·|b|, and near it, <= near·|b|."""

    absolute: float = 0.0
    relative: float = 0.0
    near: float = 0.0


class BlockDifferences(NamedTuple):
    """The differences of two blocks, tile by tile; `gradtool.backends.differences` defines them.

    `sums` are Σ(a-b)², Σa², Σb² and Σab; `exponents` those of the first three, and that of Σab is the sum of the last
    two. `ulps` is uint64. `places` are the first indices in the tile of max_abs, max_rel and ulps, which are 0 where
    the values do not differ, and of a value that differs, which is -1 there. `counts` are: values that differ, stored
    bits that differ, values that are not close, NaN or Inf in a and not the same in b, NaN or Inf in b and not the same
    in a, the same NaN or Inf in both, values that are not near.
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
