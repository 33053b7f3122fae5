"""Every option, declared once: type, default, range, help. Functions, commands and docs/cli.md are made from this.

Python evaluates the annotations, which hold all but names and defaults.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, cast, get_args

from gradtool.declare import GENERAL, PYTHON, Options, field
from gradtool.errors import option, say
from gradtool.validators import (
    ALL_FINITE,
    AT_LEAST_ONE,
    AT_LEAST_TWO,
    CALLBACK,
    FINITE,
    FROM_MINUS_ONE_TO_ONE,
    NOT_NAN,
    NOT_NEGATIVE,
    NOT_NEGATIVE_FINITE,
    ORDER,
    POSITIVE_FINITE,
    call_id,
    name_list,
    path_list,
    reduction,
    size,
)

# The first type of a union decides how a value is checked.
StrPath = os.PathLike[str] | str
Paths = StrPath | Iterable[StrPath]
# Called with the title of a pass, its bytes done and its total bytes; from one thread at a time.
Progress = Callable[[str, int, int], None]
Format = Literal["text", "json", "jsonl", "tsv", "csv", "github"]
Dtype = Literal["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]


_VECTOR = "Files, folders or index files, taken together as one gradient vector."
_CONCAT: bool = field("Allow the same tensor name in several paths, as parts of one vector.", default=False)
_NORM_TYPE: float = field("Order of the norm; inf for the largest magnitude.", "P", ORDER, default=2.0)
_ONCE: str | None = field(
    "Record ID together with the results; change nothing if the files have it already.",
    "ID",
    default=None,
    check=call_id,
)

_OUTPUTS = option("output"), option("output_dir")
_ZERO_WITH_ATOL, _ZERO_WITH_RTOL = say("0 with {}", option("atol")), say("0 with {}", option("rtol"))
_Z, _PERCENTILE = option("limit", "z=T"), option("limit", "percentile=P")


class NameOptions(Options):
    """The tensors to read."""

    title = "Selection"

    include: Sequence[str] = field(
        "Only process tensors whose name matches REGEX. Can be repeated.", "REGEX", default=()
    )
    exclude: Sequence[str] = field("Skip tensors whose name matches REGEX. Can be repeated.", "REGEX", default=())
    shapes_from: StrPath | None = field(
        "Require the shapes that tensors have in PATH, a model of which the files may lack pieces.",
        "PATH",
        default=None,
    )


class PathOptions(Options):
    """The paths of a call."""

    paths: Paths = field("Files, folders or index files.", "PATH...", default=(), check=path_list, kw_only=False)

    @property
    def named(self) -> list[str]:
        """The paths, as strings."""
        return list(cast("list[str]", self.paths))


class SelectionOptions(NameOptions):
    """The tensors and paths to read."""

    title = "Selection"

    files_from: StrPath | None = field(
        "Read more paths from FILE (- for standard input), separated by newlines or NULs.", "FILE", default=None
    )


class WriteOptions(Options):
    """Where results are written, and how."""

    title = "Output"

    output: StrPath | None = field("Write the result to FILE; leave the inputs unchanged.", "FILE", default=None)
    output_dir: StrPath | None = field("Write the results to DIR; leave the inputs unchanged.", "DIR", default=None)
    no_clobber: bool = field("Fail if an output file exists, instead of replacing it.", default=False)
    dry_run: bool = field("Do everything except writing files.", default=False)
    write: Literal["replace", "inplace"] = field(
        "Build new files and rename them into place, or overwrite changed bytes, protected by a redo log.",
        default="replace",
    )
    fsync: bool = field("Sync files to disk, so that they survive a power cut.", default=True)
    lock_timeout: float = field(
        "Seconds to wait for files that another run has locked.", "SECONDS", NOT_NEGATIVE_FINITE, default=0.0
    )

    @property
    def in_place(self) -> bool:
        """Check whether files are overwritten, from a redo log."""
        return self.write == "inplace"

    @property
    def is_elsewhere(self) -> bool:
        """Check whether results go to new files, not into the inputs."""
        return self.output is not None or self.output_dir is not None


class LocalComputeOptions(Options):
    """The backend and the threads of this process."""

    title = "Compute"

    backend: Literal["auto", "cpu", "cuda"] | None = field(
        "Compute backend.", default=None, unset="$GRADTOOL_BACKEND, or auto"
    )
    device: int | None = field("GPU number, from 0 (cuda backend only).", "N", NOT_NEGATIVE, default=None)
    threads: int | None = field(
        "Number of worker threads.", "N", AT_LEAST_ONE, default=None, unset="one per core, at most 16"
    )


class ComputeOptions(LocalComputeOptions):
    """Where passes run: in this process or elsewhere."""

    title = "Compute"

    engine: str | None = field(
        "Where to run: threads, or dask:ADDRESS for the workers of a Dask scheduler.",
        "ENGINE",
        default=None,
        unset="$GRADTOOL_ENGINE, or threads",
    )
    worker_timeout: float | None = field(
        "Seconds to wait for a Dask scheduler and its workers.",
        "SECONDS",
        POSITIVE_FINITE,
        default=None,
        unset="60, or 5 if an address refuses connections",
    )


class DisplayOptions(Options):
    """What a command prints. Functions do not have these options, because they return it."""

    title = GENERAL

    format: Format | None = field(
        "Output format: text, json, jsonl (JSON Lines), tsv or csv (one table), or github (text with annotations).",
        "FORMAT",
        default=None,
        unset="$GRADTOOL_FORMAT, or text",
    )
    columns: Sequence[str] = field(
        "Print one table with these columns, such as name,norm; tab-separated, except on a terminal.",
        "NAMES",
        default=(),
        check=name_list,
    )
    json: bool = field(say("Same as {}.", option("format", "json")), default=False)
    quiet: bool = field("Print only errors.", default=False, short="-q")
    verbose: bool = field("Print all fields, including the timings of each phase.", default=False, short="-v")


class ProgressOptions(Options):
    """Options of functions alone; commands show progress themselves."""

    title = PYTHON

    progress: Progress | bool | None = field(
        "True for a progress bar on stderr, or a function called with the pass, the bytes done and the total bytes.",
        range=CALLBACK,
        default=None,
    )


class ReadOptions(SelectionOptions, ComputeOptions, ProgressOptions):
    """The options of every operation."""


class RewriteOptions(ReadOptions, WriteOptions):
    """The options of every operation that writes."""


class NormOptions(PathOptions, ReadOptions):
    """The options of `norm`."""

    operation = "norm"

    paths: Paths = field(_VECTOR, "PATH...", default=(), check=path_list, kw_only=False)

    norm_type: float = _NORM_TYPE
    per_tensor: bool = field("Also report the norm of each tensor.", default=False)
    top: int | None = field("Report the K tensors with the largest norms, NaN first.", "K", AT_LEAST_ONE, default=None)
    group: Sequence[str] = field(
        "Also report the norm of the tensors whose name matches REGEX. Can be repeated.", "REGEX", default=()
    )
    by_file: bool = field("Also report the norm of each path.", default=False)
    histogram: bool = field(
        "Count values by binary exponent, and report which storage types can hold them.", default=False
    )
    concat: bool = _CONCAT
    fail_above: float | None = field("Exit with code 1 if the norm is above X.", "X", NOT_NAN, default=None)
    allow_unfinished: bool = field("Read files even if a run is modifying them or has crashed.", default=False)


class DiffOptions(NameOptions, ComputeOptions, ProgressOptions):
    """The options of `diff`."""

    operation = "diff"

    a: StrPath = field("Gradient set to compare.", "A", kw_only=False)
    b: StrPath = field("Gradient set to compare it with.", "B", kw_only=False)

    map: Sequence[str] = field(
        "Rename tensors of A first, as re.sub does. Can be repeated; applied in order.", "REGEX=REPLACEMENT", default=()
    )
    missing: Literal["error", "skip"] = field(
        "If only one set has a tensor, or its shapes differ: fail, or leave the tensor out.", default="error"
    )
    per_tensor: bool = field("Also report the metrics of each tensor.", default=False)
    top: int | None = field("Report the K tensors that differ most (by rel_l2).", "K", AT_LEAST_ONE, default=None)
    rtol: float | None = field(
        "Fail if |a - b| > atol + R·|b| for any element.", "R", NOT_NEGATIVE_FINITE, default=None, unset=_ZERO_WITH_ATOL
    )
    atol: float | None = field(
        "Fail if |a - b| > T + rtol·|b| for any element.", "T", NOT_NEGATIVE_FINITE, default=None, unset=_ZERO_WITH_RTOL
    )
    max_ulp: int | None = field(
        "Fail if any two values are more than N ulps apart (in ulps of the coarser type).",
        "N",
        NOT_NEGATIVE,
        default=None,
    )
    max_rel_l2: float | None = field("Fail if rel_l2 over all tensors is above X.", "X", NOT_NEGATIVE, default=None)
    min_cosine: float | None = field(
        "Fail if the cosine similarity over all tensors is below X.", "X", FROM_MINUS_ONE_TO_ONE, default=None
    )
    close: bool = field(
        "Fail if any element is outside the usual tolerance of its type (as torch.testing.assert_close).", default=False
    )
    bits: bool = field("Fail unless all tensors are bitwise identical.", default=False)
    rule: Sequence[str] = field(
        "Fail if a tensor does not meet CONDITION, such as '.*: rel_l2<=1e-3 or max_abs<=1e-6'. The first rule whose "
        "REGEX matches the whole name decides. Can be repeated.",
        "REGEX:CONDITION",
        default=(),
    )
    rules: StrPath | None = field(
        say("Read more rules from FILE (- for standard input), after those of {}.", option("rule")),
        "FILE",
        default=None,
    )

    @property
    def must_be_close(self) -> bool:
        """Check whether there is a limit on the differences of values."""
        return self.close or self.rtol is not None or self.atol is not None


class DigestOptions(PathOptions, ReadOptions):
    """The options of `digest`."""

    operation = "digest"

    check: StrPath | None = field(
        "Compare with the output of an earlier call, FILE (- for standard input); exit with code 1 if it differs.",
        "FILE",
        default=None,
    )


class ClipOptions(PathOptions, RewriteOptions):
    """The options of `clip`."""

    operation = "clip"

    paths: Paths = field(_VECTOR, "PATH...", default=(), check=path_list, kw_only=False)

    max_norm: float | None = field("Maximum norm after clipping.", "C", NOT_NEGATIVE, default=None)
    max_value: float | None = field("Clamp each element to [-V, V] instead.", "V", NOT_NEGATIVE, default=None)
    norm_type: float = _NORM_TYPE
    eps: float = field(
        "Added to the norm before dividing (torch: 1e-6, Lucid: 1e-7, Optax and Keras: 0).",
        "E",
        NOT_NEGATIVE_FINITE,
        default=1e-6,
    )
    per_tensor: bool = field("Clip each tensor by its own norm.", default=False)
    agc: float | None = field(
        "Adaptive gradient clipping: limit each unit (such as a weight row) to R times the norm of its parameters.",
        "R",
        POSITIVE_FINITE,
        default=None,
    )
    params: StrPath | None = field(
        say("Gradient set with the parameters for {}. It is never modified.", option("agc")), "PATH", default=None
    )
    agc_eps: float = field(
        say("Lower bound on parameter norms for {}.", option("agc")), "E", NOT_NEGATIVE_FINITE, default=1e-3
    )
    group: Sequence[str] = field(
        "Clip the tensors whose name matches REGEX, as a group, to a norm of at most C. Can be repeated.",
        "REGEX:C",
        default=(),
    )
    limit: str | None = field(
        "Adaptive maximum norm, computed from earlier norms: z=T (ZClip) or percentile=P (AutoClip).",
        "RULE",
        default=None,
    )
    state: StrPath | None = field(
        say("File that stores the norm history for {}; created if missing.", option("limit")), "FILE", default=None
    )
    warmup: int | None = field(
        say("Number of norms to collect before {} clips.", _Z), "N", AT_LEAST_TWO, default=None, unset="25"
    )
    window: int | None = field(
        say("Number of recent norms used by {}.", _PERCENTILE), "N", AT_LEAST_ONE, default=None, unset="10000"
    )
    skip_above: float | None = field(
        "Write nothing and exit with code 1 if the norm is above X.", "X", NOT_NAN, default=None
    )
    concat: bool = _CONCAT
    total_norm: float | None = field(
        "Clip by this norm instead of the measured one.", "N", NOT_NEGATIVE_FINITE, default=None
    )
    unscale: float = field("Divide by this loss scale before clipping.", "S", POSITIVE_FINITE, default=1.0)
    dtype: Dtype | None = field(
        say("Storage type of the new files, with {} or {} ({}).", *_OUTPUTS, ", ".join(get_args(Dtype))),
        "TYPE",
        default=None,
        unset="that of each tensor",
    )
    nonfinite: Literal["error", "propagate", "zero"] = field(
        "On NaN or Inf: write nothing, continue as torch does, or set them to 0.", default="error"
    )
    once: str | None = _ONCE


class AccumulateOptions(RewriteOptions):
    """The options of `accumulate`."""

    operation = "accumulate"

    gradients: Paths = field(
        "Files, folders or index files; each is one gradient.", "GRAD...", default=(), check=path_list, kw_only=False
    )

    @property
    def named(self) -> list[str]:
        """The paths of the gradients, as strings."""
        return list(cast("list[str]", self.gradients))

    @property
    def is_new(self) -> bool:
        """Check whether there is no buffer, so that the sum becomes a new set."""
        return self.into is None

    @property
    def adds_to_old(self) -> bool:
        """Check whether the old content of the buffer is part of the result."""
        return self.buffer_weight != 0

    @property
    def buffer_weight(self) -> float:
        """The factor of the old content of the buffer in the result."""
        if self.overwrite or self.is_new:
            return 0.0
        return 1.0 if self.into_weight is None else self.into_weight

    @property
    def is_mean(self) -> bool:
        """Check whether the sum is divided by the total weight."""
        return self.mean or self.reduce == "mean"

    into: StrPath | None = field(
        say("Gradient set to add to. It must exist. With {}, it is not modified.", option("output")),
        "BUFFER",
        default=None,
    )
    overwrite: bool = field("Discard the buffer's old content, even NaN.", default=False)
    into_weight: float | None = field(
        "Multiply the buffer's old content by W before adding: 0.9 for momentum; 0 discards it, even NaN.",
        "W",
        FINITE,
        default=None,
        unset="1",
    )
    update: bool = field("Add the gradients, or only check headers and write nothing.", default=True)
    weight: Sequence[float] = field(
        "Weight of a gradient. Give one for each gradient, in order.", "W", ALL_FINITE, default=(), unset="1"
    )
    weight_key: str | None = field(
        "Read the weights from the metadata key KEY of each gradient, such as num_tokens.", "KEY", default=None
    )
    weights: StrPath | None = field(
        "Read the weights from FILE (- for standard input): on each line a path, and its weight behind it.",
        "FILE",
        default=None,
    )
    mean: bool = field(say("Divide the sum by the total weight. Same as {}.", option("reduce", "mean")), default=False)
    reduce: str | None = field(
        "Combine gradients by sum, mean, median, or trimmed=K (the mean without the K smallest and K largest values).",
        "HOW",
        default=None,
        unset="sum",
        check=reduction,
    )
    map: Sequence[str] = field(
        "Rename tensors of the gradients first, as re.sub does. Can be repeated; applied in order.",
        "REGEX=REPLACEMENT",
        default=(),
    )
    missing: Literal["error", "skip", "zero"] = field(
        "If a set lacks a tensor: write nothing, leave the set out for this tensor, or count zeros.",
        default="error",
    )
    shard_like: StrPath | None = field(
        say("Shard a new set in {} like the set at PATH: same files, same tensors in each.", _OUTPUTS[1]),
        "PATH",
        default=None,
    )
    max_shard_size: int | str | None = field(
        "Shard a new set into files of at most SIZE (such as 5GB or 1GiB), with an index.",
        "SIZE",
        default=None,
        unset="5GB",
        check=size,
    )
    dtype: Dtype | None = field(
        f"Storage type of a new set ({', '.join(get_args(Dtype))}).",
        "TYPE",
        default=None,
        unset="for each tensor, that of the first gradient that has it",
    )
    others: Literal["error", "copy"] = field(
        "If tensors are integers or Booleans, such as counters and masks: write nothing, or copy each to a new set, "
        "from the first gradient that has it.",
        default="error",
    )
    max_norm: float | None = field(
        "Clip the sum to a norm of at most C, before rounding.", "C", NOT_NEGATIVE, default=None
    )
    unscale: float = field("Divide each gradient by this loss scale.", "S", POSITIVE_FINITE, default=1.0)
    clip_each: float | None = field(
        "Clip each gradient to a norm of at most C, before adding.", "C", NOT_NEGATIVE, default=None
    )
    norm_type: float = _NORM_TYPE
    eps: float = field("Added to a norm before dividing by it.", "E", NOT_NEGATIVE_FINITE, default=1e-6)
    per_gradient: bool = field("Also report each gradient.", default=False)
    screen: Sequence[str] = field(
        "Leave out gradients that fail RULE: readable, weighted, complete, finite, norm<=Kx or norm>=Kx (K times the "
        "median norm), or cosine>=C (to the result). Can be repeated.",
        "RULE",
        default=(),
    )
    at_least: int | None = field(
        say("Write nothing and exit with code 1 if {} leaves fewer than N gradients.", option("screen")),
        "N",
        AT_LEAST_ONE,
        default=None,
        unset="1",
    )
    nonfinite: Literal["error", "propagate", "skip"] = field(
        "On NaN or Inf: write nothing, continue, or skip the gradients that contain any.", default="error"
    )
    once: str | None = _ONCE


class ZeroOptions(PathOptions, RewriteOptions):
    """The options of `zero`."""

    operation = "zero"

    once: str | None = _ONCE


class LayerNormOptions(PathOptions, RewriteOptions):
    """The options of `layernorm_backward`."""

    operation = "layernorm_backward"

    kind: Literal["layernorm", "rmsnorm"] = field("Kind of layer.", default="layernorm")
    invertible: bool = field("Read Y (and bias) instead of X (and mean).", default=False)
    affine: bool = field("Layers have a scale. Without one, scale counts as 1 and gets no gradient.", default=True)
    axis: int = field("First normalized axis; negative ones count from the end.", "N", default=-1)
    norm_eps: float = field(
        "Added to the variance if the statistics are computed.", "E", NOT_NEGATIVE_FINITE, default=1e-5
    )
    scale_offset: float = field("Added to scale; 1 if weights are stored as gamma - 1.", "S", FINITE, default=0.0)
    nonfinite: Literal["error", "propagate"] = field(
        "On NaN or Inf in a result: write nothing, or continue.", default="error"
    )
    prefix: Sequence[str] = field("Only process the layer with this prefix. Can be repeated.", "PREFIX", default=())
    y_grad: str = field("Name of the output gradient, after the prefix.", "NAME", default="Y_grad")
    x: str = field("Name of the input.", "NAME", default="X")
    y: str = field("Name of the output, read in the invertible form.", "NAME", default="Y")
    scale: str = field("Name of the weight.", "NAME", default="scale")
    bias: str = field("Name of the bias, read in the invertible form.", "NAME", default="bias")
    mean: str = field("Name of the mean of each row.", "NAME", default="mean")
    inv_std_dev: str = field("Name of 1 / sqrt(variance + eps) of each row.", "NAME", default="inv_std_dev")
    x_grad: str = field("Name for the gradient of X.", "NAME", default="X_grad")
    scale_grad: str = field("Name for the gradient of the weight.", "NAME", default="scale_grad")
    bias_grad: str = field("Name for the gradient of the bias.", "NAME", default="bias_grad")
    x_grad_in_place: bool = field("Replace Y_grad with X_grad.", default=False)


class RecoverOptions(PathOptions):
    """The options of `recover`."""

    operation = "recover"

    force: bool = field("Recover even if another program has written to a file since the crash.", default=False)


class CheckOptions(PathOptions, SelectionOptions, LocalComputeOptions, ProgressOptions):
    """The options of `check`."""

    operation = "check"

    fast: bool = field("Read only headers, no values.", default=False)
    strict: bool = field("Treat notes as faults (exit code 1).", default=False)


class InfoOptions(PathOptions, SelectionOptions):
    """The options of `info`."""

    operation = "info"


class DoctorOptions(Options):
    """The options of `doctor`."""

    operation = "doctor"

    path: StrPath = field(
        "Folder to report on, or a file in it.", "PATH", default=".", unset="the current folder", kw_only=False
    )


# The options that several operations share, by the title that they have in help.
SHARED = {
    "Selection": SelectionOptions,
    "Output": WriteOptions,
    "Compute": ComputeOptions,
    GENERAL: DisplayOptions,
    PYTHON: ProgressOptions,
}
