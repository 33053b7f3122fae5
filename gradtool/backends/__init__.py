"""Arithmetic on one block of memory: what a backend must do, and which one is taken.

A block is a stretch of a file in memory; its pieces are the parts of tensors in it, each starting on a tile boundary.
A backend knows no path and no policy. The numpy backend (`cpu`) defines the bits of every result; any other is used
only because it gives the same ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from gradtool.errors import BackendUnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray


class Piece(NamedTuple):
    """`elements` values of one storage type, from byte `offset` of a block on; summed after division by `divisor`."""

    dtype: str
    offset: int
    elements: int
    divisor: float = 1.0


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
    without one it is the input, and (x - mean) · inv_std_dev. RMS norm has a mean, or a bias, of 0.
    """

    rows: int
    columns: int
    x: memoryview
    x_dtype: str
    y_grad: memoryview
    y_grad_dtype: str
    mean: NDArray[np.float64]
    inv_std_dev: NDArray[np.float64]
    scale: NDArray[np.float64]
    bias: NDArray[np.float64] | None = None


class Terms(NamedTuple):
    """What the sums are taken over: |x|^norm_type, and nothing but maxima where `norm_type` is infinite.

    With `drop_nonfinite` each NaN and Inf counts as, and is written as, zero.
    """

    norm_type: float = 2.0
    drop_nonfinite: bool = False


class BlockSums(NamedTuple):
    """What one pass over a block found: the canonical sum of every tile, and five facts of every piece.

    `max_abs` leaves NaN out (and Inf too, where they are dropped). `first_nonfinite` is an index into the piece, or -1.
    """

    sums: NDArray[np.float64]
    max_abs: NDArray[np.float64]
    nan: NDArray[np.int64]
    inf: NDArray[np.int64]
    zeros: NDArray[np.int64]
    first_nonfinite: NDArray[np.int64]


class Backend(Protocol):
    """The arithmetic that every operation is made of. Blocks are writable buffers of bytes, changed in place."""

    name: str

    def tile_sums(self, block: memoryview, pieces: Sequence[Piece], terms: Terms) -> BlockSums:
        """The sums of what the block holds."""

    def scale(
        self, block: memoryview, pieces: Sequence[Piece], factors: Sequence[float], limit: float, terms: Terms
    ) -> BlockSums:
        """Multiply each piece by its factor and limit it to [-limit, limit]; the sums of what was written.

        Factor and limit are rounded to the type that the piece computes in. NaN stays NaN.
        """

    def accumulate(
        self,
        block: memoryview,
        pieces: Sequence[Piece],
        sources: Iterable[tuple[memoryview, Sequence[Addend]]],
        rule: Rule,
        terms: Terms,
    ) -> BlockSums:
        """Add to each piece, in float64 and in the order of `sources`, and round once; the sums of what was written.

        The elements of all pieces, one piece after another, are what `Addend.at` counts. A source is done with before
        the next is asked for.
        """

    def row_sums(
        self, x: memoryview, dtype: str, rows: int, columns: int, center: NDArray[np.float64] | None
    ) -> NDArray[np.float64]:
        """Per row the sum of x, or with a center (rows,) of (x - center)²; float64, over 32 lanes."""

    def layer_norm_sums(self, patch: Patch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Per row the sums of y_grad·scale and of y_grad·scale·xh, xh being the normalized input; as `row_sums`."""

    def layer_norm_grads(
        self,
        patch: Patch,
        means: tuple[NDArray[np.float64], NDArray[np.float64]],
        x_grad: memoryview,
        dtype: str,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Write inv_std_dev · (y_grad·scale - means[0] - xh·means[1]), rounded once, to `x_grad`.

        The gradients of scale and bias, y_grad·xh and y_grad, are summed over the rows in order, in float64.
        """


class Choice(NamedTuple):
    """A backend, and why it was taken."""

    backend: Backend
    why: str


def choose(name: str = "auto") -> Choice:
    """The backend called `name`, or with `auto` the fastest one here.

    Raises:
        UsageError: there is no backend of that name.
        BackendUnavailableError: there is, but not in this build.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"no backend is called {name!r}; there are auto, cpu and cuda")
    if name == "cuda":
        raise BackendUnavailableError("gradtool has no CUDA backend yet; use --backend cpu or auto")
    try:
        from gradtool.backends.compiled import CompiledBackend  # may not have been built
    except ImportError as error:
        from gradtool.backends.cpu import NumpyBackend  # numpy is slow to import

        return Choice(NumpyBackend(), f"numpy, for the compiled kernels are missing: {error}")
    return Choice(CompiledBackend(), "compiled kernels")
