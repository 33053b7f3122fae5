"""Clip, accumulate, zero and measure gradients in safetensors files, in place, with bit-for-bit reproducible results.

The functions here are the commands of the command line: same names, same arguments, same results. They are loaded when
first used, so that `import gradtool` costs nothing.
"""

from __future__ import annotations

from gradtool._version import __version__ as __version__

# Not from typing, whose import would take most of the time of `import gradtool`.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from gradtool.errors import (
        BackendUnavailableError,
        BadInputError,
        GradtoolError,
        NonFiniteError,
        SystemRefusedError,
        TooFewError,
        UsageError,
    )
    from gradtool.ops.accumulate import AccumulateResult, accumulate
    from gradtool.ops.check import CheckResult, check
    from gradtool.ops.clip import ClipResult, clip
    from gradtool.ops.diff import DiffResult, diff
    from gradtool.ops.digest import DigestResult, digest
    from gradtool.ops.doctor import DoctorResult, doctor
    from gradtool.ops.info import InfoResult, info
    from gradtool.ops.layernorm import LayerNormResult, layernorm_backward
    from gradtool.ops.norm import NormResult, norm
    from gradtool.ops.recover import RecoverResult, recover
    from gradtool.ops.zero import ZeroResult, zero

__all__ = [
    "AccumulateResult", "BackendUnavailableError", "BadInputError", "CheckResult", "ClipResult", "DiffResult",
    "DigestResult", "DoctorResult", "GradtoolError", "InfoResult", "LayerNormResult", "NonFiniteError", "NormResult",
    "RecoverResult", "SystemRefusedError", "TooFewError", "UsageError", "ZeroResult", "__version__", "accumulate",
    "check", "clip", "diff", "digest", "doctor", "info", "layernorm_backward", "norm", "recover", "zero",
]  # fmt: skip


def module_of(name: str) -> str:
    """Return the module that has a public function, result or error."""
    if name.endswith("Error"):
        return "gradtool.errors"
    return f"gradtool.ops.{name.removesuffix('Result').removesuffix('_backward').lower()}"


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'gradtool' has no attribute {name!r}")
    from importlib import import_module  # kept off the start-up path

    value = getattr(import_module(module_of(name)), name)
    if name.islower():
        from gradtool.declare import document

        value = document(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
