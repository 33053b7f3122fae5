"""The backend that a call uses, and why."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from gradtool.errors import BackendUnavailableError, UsageError, option, say

if TYPE_CHECKING:
    from gradtool.backends.protocol import Backend


class Choice(NamedTuple):
    """A backend, why it was chosen, and how to get a faster backend, if that is possible."""

    backend: Backend
    why: str
    remedy: str | None = None


def requested(name: str | None) -> str | None:
    """Return the name of a backend, by default that in GRADTOOL_BACKEND; or raise `UsageError`."""
    value = os.environ.get("GRADTOOL_BACKEND", "").lower() or None if name is None else name
    if value not in (None, "auto", "cpu", "cuda"):
        source = "GRADTOOL_BACKEND" if name is None else option("backend")
        raise UsageError(say("{} must be auto, cpu or cuda, not {!r}", source, value))
    return value


def choose(name: str | None = None, device: int | None = None) -> Choice:
    """Return the backend of this name, by default that of GRADTOOL_BACKEND or "auto"; on GPU `device`, by default 0.

    "auto" is the CPU: no operation on files has been measured to be faster on a GPU.

    Raises:
        UsageError: no backend has this name, a device is given and the backend is not "cuda", or GRADTOOL_KERNELS has a
            value that it cannot have.
        BackendUnavailableError: this machine does not have the backend.
    """
    backend = requested(name) or "auto"
    if backend == "cuda":
        from gradtool.backends.cuda.backend import CudaBackend
        from gradtool.backends.cuda.device import open_device  # imports CuPy, which takes a third of a second

        try:
            gpu = open_device(device or 0)
        except BackendUnavailableError as error:
            if name is not None:
                raise
            (problem,) = error.problems
            raise BackendUnavailableError(say("GRADTOOL_BACKEND: {}", problem.message), hint=problem.hint) from error
        return Choice(CudaBackend(gpu), gpu.name)
    if device is not None:
        raise UsageError(say("{} requires {}", option("device"), option("backend", "cuda")))
    cpu = _cpu()
    if backend == "cpu":
        return cpu
    return cpu._replace(why=say("{}; auto leaves GPUs to {}", cpu.why, option("backend", "cuda")))


def _cpu() -> Choice:
    kernels, why, remedy = os.environ.get("GRADTOOL_KERNELS", "").lower(), "of GRADTOOL_KERNELS=numpy", None
    # "required" is about the build (setup.py).
    if kernels not in ("", "numpy", "required"):
        raise UsageError(f"GRADTOOL_KERNELS must be numpy, required or empty, not {kernels!r}")
    if kernels != "numpy":
        try:
            from gradtool.backends.compiled import CompiledBackend  # may not have been built
        except ImportError as error:
            why = f"the compiled kernels are missing: {error}"
            remedy = "install gradtool again on a machine with a C compiler"
        else:
            return Choice(CompiledBackend(), "compiled kernels")
    from gradtool.backends.cpu import NumpyBackend  # numpy is slow to import

    return Choice(NumpyBackend(), f"numpy, because {why}", remedy)
