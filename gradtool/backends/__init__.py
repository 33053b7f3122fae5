"""Arithmetic on one block of memory: what a backend must do, and which one is taken.

A block is a stretch of a file in memory; its pieces are the parts of tensors in it, each starting on a tile boundary.
A backend knows no path and no policy. The numpy backend (`cpu`) defines the bits of every result; any other is used
only because it gives the same ones.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gradtool.errors import BackendUnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    # A block, or what a backend holds of it.
    Data = Any


class Piece(NamedTuple):
    """`elements` values of one storage type, from byte `offset` of a block on."""

    dtype: str
    offset: int
    elements: int


class Addend(NamedTuple):
    """`elements` values of one storage type, from byte `offset` of a source on, for the sums from `at` on."""

    dtype: str
    offset: int
    elements: int
    at: int
    weight: float


class Rule(NamedTuple):
    """What becomes of Σ w·g before it is rounded: (old + Σ) · factor, or with a divisor (old + Σ / divisor) · factor.

    Without `keeps`, nothing is old. Without `rounds`, it is the float64 sums that are measured, and nothing is written.
    """

    keeps: bool = True
    divisor: float | None = None
    factor: float = 1.0
    rounds: bool = True


class Patch(NamedTuple):
    """Rows of a layer norm's input and of its output's gradient, (rows, columns) each, and what belongs to them.

    `x` and `y_grad` are blocks of one storage type each; `mean` and `inv_std_dev` (rows,), `scale` and `bias`
    (columns,) float64. With a bias, `x` is the layer's output, from which the normalized input is (x - bias) / scale;
    without one it is the input, and (x - mean) · inv_std_dev. RMS norm (`rms`) has a mean, or a bias, of 0. Sums over
    rows are taken for each group of `height` rows by itself.
    """

    rows: int
    columns: int
    height: int
    x: Data
    x_dtype: str
    y_grad: Data
    y_grad_dtype: str
    mean: NDArray[np.float64]
    inv_std_dev: NDArray[np.float64]
    scale: NDArray[np.float64]
    bias: NDArray[np.float64] | None = None
    rms: bool = False

    @property
    def groups(self) -> int:
        """How many groups of rows there are; the last may be short."""
        return -(-self.rows // self.height)


class NormSpec(NamedTuple):
    """The order of the norm and the policy for NaN: sums are over |x|^order; for an infinite order nothing is summed.

    With `drop_nonfinite` each NaN and Inf counts as, and is written as, zero.
    """

    order: float = 2.0
    drop_nonfinite: bool = False


class BlockSums(NamedTuple):
    """The result of one pass over a block: sum and exponent of every tile, and five facts of every piece.

    `gradtool.reduction` defines sums and exponents. `max_abs` leaves NaN out (and Inf too, where they are dropped).
    `first_nonfinite` is an index into the piece, or -1.
    """

    sums: NDArray[np.float64]
    exponents: NDArray[np.int32]
    max_abs: NDArray[np.float64]
    nan: NDArray[np.int64]
    inf: NDArray[np.int64]
    zeros: NDArray[np.int64]
    first_nonfinite: NDArray[np.int64]


class Backend(Protocol):
    """The arithmetic that every operation is made of.

    A block is a writable buffer of bytes, or what `to_device` made of one; it is changed in place.
    """

    name: str

    @property
    def block_bytes(self) -> int:
        """The size of block that this backend is fastest with."""

    def memory(self, nbytes: int) -> memoryview:
        """Memory for blocks that are read from files, of the kind that this backend is quickest to take them from."""

    def to_device(self, block: memoryview, *, copies: bool = True, align: int = 0) -> Data:
        """Copy a block to the device, so that byte `align` of it is aligned; the CPU's device memory is the block.

        Without `copies`, allocate only.

        Raises:
            DeviceMemoryError: the device has no room.
        """

    def to_host(self, data: Data, block: memoryview) -> None:
        """Copy what `to_device` returned back to its block."""

    def stays_on_device(self, nbytes: int) -> bool:
        """Whether the device has room to leave that much there until the next pass."""

    def tile_sums(self, block: Data, pieces: Sequence[Piece], spec: NormSpec) -> BlockSums:
        """The sums of what the block holds."""

    def scale(
        self, block: Data, pieces: Sequence[Piece], factors: Sequence[float], limit: float, spec: NormSpec
    ) -> BlockSums:
        """Multiply each piece by its factor and limit it to [-limit, limit]; the sums of what was written.

        Factor and limit are rounded to the type that the piece computes in. NaN stays NaN.
        """

    def accumulate(
        self,
        block: Data,
        pieces: Sequence[Piece],
        sources: Iterable[tuple[memoryview, Sequence[Addend]]],
        rule: Rule,
        spec: NormSpec,
    ) -> BlockSums:
        """Add to each piece, in float64 and in the order of `sources`, and round once; the sums of what was written.

        The elements of all pieces, one piece after another, are what `Addend.at` counts. A source is done with before
        the next is asked for.
        """

    def row_sums(
        self, x: Data, dtype: str, rows: int, columns: int, center: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        """Per row the sum of x, or with a center (rows,) of (x - center)², in float64.

        A row is cut into chunks of 1,024. Within one, element j belongs to lane j mod 32; a lane adds in order,
        starting at +0; the lanes are folded, neighbours first; and the chunks are added in order.
        """

    def layer_norm_sums(self, patch: Patch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Per row the sums of y_grad·scale and of y_grad·scale·xh, xh being the normalized input; as `row_sums`."""

    def layer_norm_grads(
        self,
        patch: Patch,
        means: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
        x_grad: Data,
        dtype: str,
    ) -> Data:
        """Write inv_std_dev · (y_grad·scale - means[0] - xh·means[1]), rounded once, to `x_grad`.

        Without means they are `layer_norm_sums` over the columns, the first of them 0 for RMS norm. What is given back,
        for `add_groups`, are the gradients of scale and bias: the sums of y_grad·xh and of y_grad over the rows of each
        group, in order, in float64.
        """

    def add_groups(self, totals: NDArray[np.float64], grads: Data) -> None:
        """Add to totals (2, columns), in order, what `layer_norm_grads` found in each group."""


class Choice(NamedTuple):
    """A backend, and why it was taken."""

    backend: Backend
    why: str


def choose(name: str | None = None, device: int | None = None) -> Choice:
    """The backend called `name`, or as GRADTOOL_BACKEND has it, or "auto"; the GPU is number `device`, or 0.

    "auto" takes the CPU: no operation on files has been measured to be faster on a GPU.

    Raises:
        UsageError: there is no backend of that name, or a device is given and the backend is not "cuda".
        BackendUnavailableError: there is one, but not on this machine.
    """
    source = "" if name is not None else "GRADTOOL_BACKEND: "
    asked = (os.environ.get("GRADTOOL_BACKEND") or "auto") if name is None else name
    if asked not in ("auto", "cpu", "cuda"):
        raise UsageError(f"{source}no backend is called {asked!r}; there are auto, cpu and cuda")
    if asked == "cuda":
        from gradtool.backends.cuda.backend import CudaBackend
        from gradtool.backends.cuda.device import open_device  # imports CuPy, which takes a third of a second

        try:
            gpu = open_device(device or 0)
        except BackendUnavailableError as error:
            raise BackendUnavailableError(f"{source}{error}") from error
        return Choice(CudaBackend(gpu), gpu.name)
    if device is not None:
        raise UsageError("--device is the number of a GPU; it needs --backend cuda")
    backend, why = _cpu()
    return Choice(backend, f"{why}; auto leaves GPUs to --backend cuda" if asked == "auto" else why)


def _cpu() -> tuple[Backend, str]:
    try:
        from gradtool.backends.compiled import CompiledBackend  # may not have been built
    except ImportError as error:
        from gradtool.backends.cpu import NumpyBackend  # numpy is slow to import

        return NumpyBackend(), f"numpy, for the compiled kernels are missing: {error}"
    return CompiledBackend(), "compiled kernels"
