"""What clipping does to each tensor, and which options go together."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from gradtool import validators
from gradtool.arrays import np
from gradtool.backends.storage import STORAGE
from gradtool.backends.values import NormSpec
from gradtool.errors import BadInputError, NonFiniteError, Problem, UsageError, option, say
from gradtool.ops.passes import SMALLEST_NORMAL, Measure, Rewrite, clip_coef
from gradtool.ops.results import nonfinite_problems

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradtool.ops.call import Call
    from gradtool.ops.clip.limits import StateFile
    from gradtool.ops.passes import Measurement, Norms, Scaling
    from gradtool.options import ClipOptions
    from gradtool.store.format.gradset import Selected
    from gradtool.store.format.selection import Group

    # A norm that may be limited: its maximum, infinite without a limit, the norm, and the numbers of its tensors.
    _Scope = tuple[float, float, Sequence[int]]

# Below, a float32 loses precision, and then is 0.
_SMALLEST_NORMAL32 = 2.0**-126
_LIMITS = ("max_norm", "max_value", "group", "limit", "agc")
_REQUIRES = {"params": "agc", "agc_eps": "agc", "agc": "params", "limit": "state", "state": "limit"}
_AGC = "max_norm max_value norm_type eps per_tensor total_norm group limit state warmup window skip_above"
# What an option does, and the options that this excludes.
_EXCLUDES = {
    "agc": ("limits each unit by the L2 norm of its parameters", _AGC),
    "max_value": ("uses no norm", "max_norm limit per_tensor group total_norm eps"),
    "limit": ("applies to the global norm", "per_tensor group"),
    "per_tensor": ("limits the norm of each tensor", "group total_norm"),
    "group": ("limits the norm of each group", "total_norm"),
}


def check_options(options: ClipOptions) -> None:
    """Raise `UsageError` for options that need or exclude others."""
    given = {name for name in vars(options) if not options.is_default(name)}
    for name, (effect, excluded) in _EXCLUDES.items():
        for other in excluded.split():
            if {name, other} <= given:
                raise UsageError(say("{} {} and cannot be combined with {}", option(name), effect, option(other)))
    for name, needed in _REQUIRES.items():
        if name in given and needed not in given:
            raise UsageError(say("{} requires {}", option(name), option(needed)))
    if given.isdisjoint(_LIMITS):
        raise UsageError(say("one of {}, {}, {}, {} and {} is required", *map(option, _LIMITS)))
    if options.agc is not None and options.nonfinite == "zero":
        raise UsageError(say("{} cannot be combined with {}", option("agc"), option("nonfinite", "zero")))
    if options.dtype is not None and not options.is_elsewhere:
        raise UsageError(say("{} requires {} or {}", option("dtype"), option("output"), option("output_dir")))


def group_limits(options: ClipOptions) -> list[tuple[str, float]]:
    """Return the regular expression and the maximum norm of each group; raise `UsageError` for what is not REGEX:C."""
    limits = []
    for text in options.group:
        pattern, _, limit = text.rpartition(":")
        if not pattern:
            raise UsageError(say("{} must be REGEX:C, such as '^lm_head:0.5', not {!r}", option("group"), text))
        name = say("the C of {}", option("group", text))
        max_norm = validators.number_from(name, limit)
        validators.NOT_NEGATIVE.require(name, max_norm)
        limits.append((pattern, max_norm))
    return limits


def check_finite(
    options: ClipOptions, selected: Sequence[Selected], sums: Measurement, message: str = "input contains NaN or Inf"
) -> None:
    """Raise `NonFiniteError` for tensors that contain NaN or Inf, unless the options say what becomes of these."""
    problems = nonfinite_problems(selected, sums) if options.nonfinite == "error" else ()
    if problems:
        ways = option("nonfinite", "zero"), option("nonfinite", "propagate")
        hint = say("use {} or {} to continue", *ways) if options.agc is None else say("use {} to continue", ways[1])
        raise NonFiniteError(f"{message}; nothing written", problems, hint)


class Decision(NamedTuple):
    """The measured gradients, the coefficient of each tensor, whether each is clipped, and the pass that clips them.

    The pass rewrites the tensors with these `numbers`; with `problems` there is none. A coefficient is 1 where it clips
    nothing, and None without a limit; `coef` is also None where tensors have different ones. `limit` is that of the
    rule, whose state is in `state_file`. `units` counts all units, and those that are clipped.
    """

    before: Measurement
    norms: Norms
    coef: float | None
    coefs: Sequence[float | None]
    clipped: Sequence[bool]
    scaling: Scaling | None = None
    numbers: Sequence[int] = ()
    limit: float | None = None
    state_file: StateFile | None = None
    units: tuple[int | None, int | None] = (None, None)
    problems: Sequence[Problem] = ()


def decide(options: ClipOptions, call: Call, groups: Sequence[Group], state_file: StateFile | None) -> Decision:
    """Measure gradients, and decide what becomes of each tensor.

    Raises:
        NonFiniteError: a value is NaN or Inf.
        BadInputError: a norm overflows, or a coefficient is out of range for its type.
    """
    selected = call.selected
    spec = NormSpec(options.norm_type, drop_nonfinite=options.nonfinite == "zero")
    before = call.run(Measure(selected, spec, keep_on_device=True))
    check_finite(options, selected, before)
    members = [group.numbers for group in groups]
    norms = before.norms(per_tensor=options.per_tensor, groups=members, unscale=options.unscale)
    norm = norms.whole if options.total_norm is None else options.total_norm
    max_norm = math.inf if options.max_norm is None else options.max_norm
    scopes: list[_Scope] = [(max_norm, norm, range(len(selected)))]
    if options.per_tensor:
        scopes = [(max_norm, tensor_norm, [number]) for number, tensor_norm in enumerate(norms.tensors)]
    elif groups:
        # The last limit is that of all other tensors, if there are any.
        limits = [*(limit for _, limit in group_limits(options)), max_norm]
        scopes = list(zip(limits, norms.groups, members, strict=False))
    if before.is_finite and math.inf in [norm for limit, norm, _ in scopes if state_file or limit < math.inf]:
        hint = say("use {} to limit the values first", option("max_value"))
        raise BadInputError("the norm overflows float64; nothing written", hint=hint)
    if options.skip_above is not None and not norm <= options.skip_above:
        relation = "is NaN, which is not within" if math.isnan(norm) else f"{norm!r} is above"
        template = "the norm {} the limit {!r} of {}; nothing written"
        problem = Problem("above-limit", say(template, relation, options.skip_above, option("skip_above")))
        coefs, clipped = [1.0] * len(selected), [False] * len(selected)
        return Decision(before, norms, 1.0, coefs, clipped, state_file=state_file, problems=[problem])
    if state_file is None:
        return _decide_each(options, selected, scopes, before, norms)
    limit, state = state_file.rule.learn(state_file.state, norm)
    scopes = [(min(limit, max_norm), norm, range(len(selected)))]
    decision = _decide_each(options, selected, scopes, before, norms)
    limit_or_none = None if math.isinf(limit) else limit
    return decision._replace(limit=limit_or_none, state_file=state_file._replace(state=state))


def _decide_each(
    options: ClipOptions, selected: Sequence[Selected], scopes: Sequence[_Scope], before: Measurement, norms: Norms
) -> Decision:
    """Decide what becomes of each tensor, given the norms that are limited."""
    coefs: list[float | None] = [None] * len(selected)
    for limit, norm, numbers in scopes:
        for number in numbers if limit < math.inf else ():
            coefs[number] = clip_coef(limit, norm, options.eps)
    clamp = math.inf if options.max_value is None else abs(options.max_value)
    clamps = {dtype: STORAGE[dtype].rounded(clamp) for dtype in {tensor.dtype for _, tensor in selected}}
    clipped, factors = [], {}
    # Whether nothing else changes values than the coefficient.
    is_alone = options.unscale == 1 and options.dtype is None
    for number, (_, tensor) in enumerate(selected):
        limited = coefs[number]
        # NaN goes through.
        coef = 1.0 if limited is None or limited >= 1 else limited
        clips = not _is_one(tensor.dtype if is_alone else _factor_type(tensor.dtype), coef)
        if limited is not None and not clips:
            coefs[number] = 1.0
        factor = (coef if clips or not is_alone else 1.0) / options.unscale
        rounded, is_precise = _rounded(tensor.dtype, factor)
        if coef and (coef < SMALLEST_NORMAL or not is_precise):
            small = coef if coef < SMALLEST_NORMAL else factor
            raise out_of_range(selected[number], small, "clip in several steps")
        is_clamped = before.max_abs[number] / options.unscale > clamps[tensor.dtype]
        drops = options.nonfinite == "zero" and bool(before.nan[number] or before.inf[number])
        clipped.append(is_clamped or clips)
        if options.dtype is not None or (tensor.elements and (rounded != 1 or is_clamped or drops)):
            factors[number] = rounded
    scaling = Rewrite([selected[number] for number in factors], before.spec, list(factors.values()), clamp)
    has_own = options.per_tensor or options.group or options.max_value is not None
    common_coef = None if has_own else next((coef for coef in coefs if coef != 1), 1.0)
    return Decision(before, norms, common_coef, coefs, clipped, scaling, list(factors))


def _factor_type(dtype: str) -> str:
    """Return the type of the factors for a storage type."""
    return "F64" if dtype == "F64" else "F32"


@lru_cache(maxsize=64)
def _is_one(dtype: str, coef: float) -> bool:
    """Check whether a coefficient rounds to 1 in a type; then every product with a value of that type rounds back."""
    return STORAGE[dtype].rounded(coef) == 1


# It is nearly always called with the same few numbers for all tensors.
@lru_cache(maxsize=64)
def _rounded(dtype: str, factor: float) -> tuple[float, bool]:
    """Round a factor to its type for a storage type, and check whether that is normal and finite, or NaN."""
    rounded = STORAGE[_factor_type(dtype)].rounded(factor)
    smallest = SMALLEST_NORMAL if dtype == "F64" else _SMALLEST_NORMAL32
    return rounded, not (rounded < smallest or math.isinf(rounded))


def out_of_range(selected: Selected, coef: float, hint: str) -> BadInputError:
    """Return the error for a coefficient that the type of the factors of a tensor cannot hold."""
    shard, tensor = selected
    work = np.finfo(STORAGE[tensor.dtype].work)
    bounds = f"{work.dtype} ({work.tiny:.3g} to {work.max:.3g}), its type for {tensor.dtype} tensors"
    message = f"the coefficient {coef!r} is out of range for {bounds}; nothing written"
    return BadInputError(message, file=shard.name, tensor=tensor.name, hint=hint)
