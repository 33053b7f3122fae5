"""Clip, accumulate, zero and measure gradients in safetensors files, in place, with reproducible bits.

The functions here are the commands of the command line: same names, same arguments, same results. They are loaded when
first used, so that `import gradtool` costs nothing.
"""

from __future__ import annotations

from gradtool._version import __version__ as __version__

# As typing has it, whose import would be most of what `import gradtool` costs.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from gradtool.errors import BackendUnavailableError as BackendUnavailableError
    from gradtool.errors import BadInputError as BadInputError
    from gradtool.errors import GradtoolError as GradtoolError
    from gradtool.errors import NonFiniteError as NonFiniteError
    from gradtool.errors import SystemRefusedError as SystemRefusedError
    from gradtool.errors import UsageError as UsageError
    from gradtool.ops.accumulate import AccumulateResult as AccumulateResult
    from gradtool.ops.accumulate import accumulate as accumulate
    from gradtool.ops.check import CheckResult as CheckResult
    from gradtool.ops.check import check as check
    from gradtool.ops.clip import ClipResult as ClipResult
    from gradtool.ops.clip import clip as clip
    from gradtool.ops.diff import DiffResult as DiffResult
    from gradtool.ops.diff import diff as diff
    from gradtool.ops.doctor import DoctorResult as DoctorResult
    from gradtool.ops.doctor import doctor as doctor
    from gradtool.ops.info import InfoResult as InfoResult
    from gradtool.ops.info import info as info
    from gradtool.ops.layernorm import LayerNormResult as LayerNormResult
    from gradtool.ops.layernorm import layernorm_backward as layernorm_backward
    from gradtool.ops.norm import NormResult as NormResult
    from gradtool.ops.norm import norm as norm
    from gradtool.ops.recover import RecoverResult as RecoverResult
    from gradtool.ops.recover import recover as recover
    from gradtool.ops.zero import ZeroResult as ZeroResult
    from gradtool.ops.zero import zero as zero

MODULES = {
    "AccumulateResult": "gradtool.ops.accumulate",
    "BackendUnavailableError": "gradtool.errors",
    "BadInputError": "gradtool.errors",
    "CheckResult": "gradtool.ops.check",
    "ClipResult": "gradtool.ops.clip",
    "DiffResult": "gradtool.ops.diff",
    "DoctorResult": "gradtool.ops.doctor",
    "GradtoolError": "gradtool.errors",
    "InfoResult": "gradtool.ops.info",
    "LayerNormResult": "gradtool.ops.layernorm",
    "NonFiniteError": "gradtool.errors",
    "NormResult": "gradtool.ops.norm",
    "RecoverResult": "gradtool.ops.recover",
    "SystemRefusedError": "gradtool.errors",
    "UsageError": "gradtool.errors",
    "ZeroResult": "gradtool.ops.zero",
    "accumulate": "gradtool.ops.accumulate",
    "check": "gradtool.ops.check",
    "clip": "gradtool.ops.clip",
    "diff": "gradtool.ops.diff",
    "doctor": "gradtool.ops.doctor",
    "info": "gradtool.ops.info",
    "layernorm_backward": "gradtool.ops.layernorm",
    "norm": "gradtool.ops.norm",
    "recover": "gradtool.ops.recover",
    "zero": "gradtool.ops.zero",
}

__all__ = ["__version__", *MODULES]  # noqa: PLE0604 - names of strings, all of them


def __getattr__(name: str) -> object:
    if name not in MODULES:
        raise AttributeError(f"module 'gradtool' has no attribute {name!r}")
    from importlib import import_module  # kept off the start-up path

    value = getattr(import_module(MODULES[name]), name)
    if name.islower():
        from gradtool.declare import document

        value = document(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
