"""The arithmetic that every backend has.

A backend knows no path and no policy; to read a block itself, it gets a descriptor. The numpy backend (`cpu`) is the
reference: all others give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from gradtool.backends.values import (
        Addend,
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

        The weighted old value comes first in the sum; with a divisor, it is added to the quotient.

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
        self, a: Data, a_pieces: Pieces, b: Data, b_pieces: Pieces, tolerances: Sequence[Tolerance]
    ) -> BlockDifferences:
        """Compare each piece of a, by its tolerance, with the piece of b in the same place, which is as long."""

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
