"""The forms of a layer-norm backward pass: which tensors each reads and writes, and what they are called."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple, Self

from gradtool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradtool.options import LayerNormOptions

# The tensors of a layer, by the options that name them.
_INPUTS = ("y_grad", "x", "y", "scale", "bias", "mean", "inv_std_dev")
_RESULTS = ("x_grad", "scale_grad", "bias_grad")


class Form(NamedTuple):
    """Which backward pass it is, and what each tensor is called after a layer's prefix.

    Layers that are not `affine` have no scale and no bias: scale counts as 1.
    """

    rms: bool
    invertible: bool
    affine: bool
    axis: int
    suffixes: Mapping[str, str]

    @classmethod
    def of(cls, options: LayerNormOptions) -> Self:
        """The form that complete options ask for.

        Raises:
            UsageError: the options contradict each other.
        """
        suffixes = {role: str(getattr(options, role)) for role in (*_INPUTS, *_RESULTS)}
        form = cls(options.kind == "rmsnorm", options.invertible, options.affine, options.axis, suffixes)
        if not form.affine and options.scale_offset:
            raise UsageError("--scale-offset is added to a scale, and with --no-affine there is none")
        return form

    @property
    def x(self) -> str:
        """The tensor that the normalized input is computed from."""
        return "y" if self.invertible else "x"

    @property
    def has_bias(self) -> bool:
        """Whether a layer has a bias."""
        return self.affine and not self.rms

    @property
    def inputs(self) -> list[str]:
        """The tensors that are read, where they exist."""
        unread = {"x" if self.invertible else "y"}
        if not self.affine:
            unread.add("scale")
        if not (self.invertible and self.has_bias):
            unread.add("bias")
        if self.rms or self.invertible:
            unread.add("mean")
        return [role for role in _INPUTS if role not in unread]

    @property
    def results(self) -> list[str]:
        """The tensors that are written."""
        there = {"x_grad": True, "scale_grad": self.affine, "bias_grad": self.has_bias}
        return [role for role in _RESULTS if there[role]]


def refuse_equal_names(form: Form, *, is_elsewhere: bool) -> None:
    """Raise `UsageError` if two results have one name, or a result beside the inputs has the name of one.

    X_grad may be called as Y_grad, which it replaces then.
    """
    for one, other in combinations(form.results, 2):
        if form.suffixes[one] == form.suffixes[other]:
            raise UsageError(f"{_both(form, one, other)}; give each result a name of its own")
    if is_elsewhere:
        return
    for result in form.results:
        for role in form.inputs:
            if form.suffixes[result] == form.suffixes[role] and (result, role) != ("x_grad", "y_grad"):
                what = f"{_both(form, result, role)}, so the result would replace the input"
                raise UsageError(f"{what}; give it another name, or use --output or --output-dir")


def flag_of(role: str) -> str:
    """The option that names a tensor."""
    return f"--{role.replace('_', '-')}"


def _both(form: Form, one: str, other: str) -> str:
    return f"{flag_of(one)} and {flag_of(other)} are both {form.suffixes[one]!r}"
