"""Every option, declared once: type, default, range, help. Functions, commands and docs/cli.md are made from these.

Python evaluates the annotations, which hold all but names and defaults.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal, cast, get_args

from gradtool.declare import GENERAL, PYTHON, Option, Options, argument
from gradtool.validators import (
    ALL_FINITE,
    AT_LEAST_ONE,
    AT_LEAST_TWO,
    FINITE,
    FROM_MINUS_ONE_TO_ONE,
    NOT_NAN,
    NOT_NEGATIVE,
    NOT_NEGATIVE_FINITE,
    ORDER,
    POSITIVE_FINITE,
    callback,
    path_list,
    reduction,
    size,
)
from gradtool.wording import option, say

# The first type of a union decides how a value is checked.
StrPath = os.PathLike[str] | str
Paths = StrPath | Iterable[StrPath]
# Called with the title of a pass, its bytes done and its total bytes; from one thread at a time.
Progress = Callable[[str, int, int], None]
Format = Literal["text", "json", "jsonl", "github"]
Dtype = Literal["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]

Vector = Annotated[
    Paths, Option("Files, folders or index files; together they form one gradient vector.", "PATH...", check=path_list)
]
Sets = Annotated[Paths, Option("Files, folders or index files.", "PATH...", check=path_list)]
Place = Annotated[StrPath, Option("Folder, or a file in it.", "PATH", unset="the current folder")]
Gradients = Annotated[Paths, Option("Files, folders or index files; each is one gradient.", "GRAD...", check=path_list)]

_Concat = Annotated[bool, Option("Tensors of the same name in several paths are parts of one vector.")]
First = Annotated[StrPath, Option("Gradient set that is compared.", "A")]
Second = Annotated[StrPath, Option("Gradient set that it is compared with.", "B")]
_NormType = Annotated[float, Option("Order of the norm; inf for the largest magnitude.", "P", ORDER)]

_OUTPUTS = option("output"), option("output_dir")
_Z, _PERCENTILE = option("limit", "z=T"), option("limit", "percentile=P")


class Names(Options):
    """Which tensors are read."""

    title = "Selection"

    include: Annotated[Sequence[str], Option("Only tensors whose name matches REGEX; repeatable.", "REGEX")] = ()
    exclude: Annotated[Sequence[str], Option("Skip tensors whose name matches REGEX. Can be repeated.", "REGEX")] = ()


class Located(Options):
    """Where the files of a call are."""

    paths: Sets = argument(default=(), kw_only=False)

    @property
    def named(self) -> list[str]:
        """The paths, as strings."""
        return list(cast("list[str]", self.paths))


class Selection(Names):
    """What is read."""

    title = "Selection"

    files_from: Annotated[
        StrPath | None,
        Option("Read more paths from FILE, or from standard input if -; newline or NUL between them.", "FILE"),
    ] = None


class Writing(Options):
    """Where results go, and how they get there."""

    title = "Output"

    output: Annotated[StrPath | None, Option("Write to FILE; leave the input unchanged.", "FILE")] = None
    output_dir: Annotated[StrPath | None, Option("Write all files to DIR; leave the inputs unchanged.", "DIR")] = None
    no_clobber: Annotated[bool, Option("Fail if an output file exists, instead of replacing it.")] = False
    dry_run: Annotated[bool, Option("Do everything except write.")] = False
    write: Annotated[
        Literal["replace", "inplace"],
        Option("Build new files and rename them into place, or overwrite changed bytes under an undo log."),
    ] = "replace"
    fsync: Annotated[bool, Option("Sync to disk, to survive a power cut.")] = True
    lock_timeout: Annotated[float, Option("Seconds to wait for a lock.", "SECONDS", NOT_NEGATIVE_FINITE)] = 0.0

    @property
    def in_place(self) -> bool:
        """Check whether files are overwritten, under an undo log."""
        return self.write == "inplace"

    @property
    def is_elsewhere(self) -> bool:
        """Check whether the inputs are left alone."""
        return self.output is not None or self.output_dir is not None

    @property
    def only_reads(self) -> bool:
        """Check whether no input is written."""
        return self.dry_run or self.is_elsewhere


class Local(Options):
    """What does the arithmetic in this process."""

    title = "Compute"

    backend: Annotated[
        Literal["auto", "cpu", "cuda"] | None, Option("Compute backend.", unset="$GRADTOOL_BACKEND, or auto")
    ] = None
    device: Annotated[int | None, Option("GPU number, from 0; only for the cuda backend.", "N", range=NOT_NEGATIVE)] = (
        None
    )
    threads: Annotated[
        int | None, Option("Number of worker threads.", "N", range=AT_LEAST_ONE, unset="one per core, at most 16")
    ] = None


class Compute(Local):
    """What does the arithmetic, here or elsewhere."""

    title = "Compute"

    engine: Annotated[
        str | None,
        Option(
            "Where tasks run: threads, or dask:ADDRESS for the workers of a Dask scheduler.",
            "ENGINE",
            unset="$GRADTOOL_ENGINE, or threads",
        ),
    ] = None
    worker_timeout: Annotated[
        float, Option("Seconds to wait for a worker of the engine.", "SECONDS", POSITIVE_FINITE)
    ] = 60.0


class Display(Options):
    """What a command prints; functions return it."""

    title = GENERAL

    format: Annotated[
        Format | None,
        Option(
            "Output format: text, JSON, JSON Lines, or text with GitHub annotations.", unset="$GRADTOOL_FORMAT, or text"
        ),
    ] = None
    json: Annotated[bool, Option(say("Same as {}.", option("format", "json")))] = False
    quiet: Annotated[bool, Option("Print errors only.", short="-q")] = False
    verbose: Annotated[bool, Option("Print all fields, with the timings of each phase.", short="-v")] = False


class Callback(Options):
    """What functions alone have; commands show progress themselves."""

    title = PYTHON

    progress: Annotated[
        Progress | bool | None,
        Option(
            "True for a bar on stderr, or a function of the pass, the bytes done and the total bytes.", check=callback
        ),
    ] = None


class Reading(Selection, Compute, Callback):
    """The options of every operation."""


class Rewriting(Reading, Writing):
    """The options of every operation that writes."""


class NormOptions(Located, Reading):
    """The options of `norm`."""

    operation = "norm"

    paths: Vector = argument(default=(), kw_only=False)

    norm_type: _NormType = 2.0
    per_tensor: Annotated[bool, Option("Report the norm of each tensor, too.")] = False
    top: Annotated[
        int | None, Option("Report the K tensors with the largest norms, NaN first.", "K", range=AT_LEAST_ONE)
    ] = None
    group: Annotated[
        Sequence[str], Option("Report the norm of the tensors whose name matches REGEX, too; repeatable.", "REGEX")
    ] = ()
    by_file: Annotated[bool, Option("Report the norm of each path by itself, too.")] = False
    histogram: Annotated[
        bool, Option("Count values by binary exponent, and say which storage types can hold them.")
    ] = False
    concat: _Concat = False
    fail_above: Annotated[
        float | None, Option("Report a norm above X as a problem, with exit code 1.", "X", range=NOT_NAN)
    ] = None
    ignore_journal: Annotated[bool, Option("Read files even if a run is changing them or crashed.")] = False


class DiffOptions(Names, Compute, Callback):
    """The options of `diff`."""

    operation = "diff"

    a: First = argument(kw_only=False)
    b: Second = argument(kw_only=False)

    map: Annotated[
        Sequence[str],
        Option("Rename tensors of A first, as re.sub does; repeatable, in order.", "REGEX=REPLACEMENT"),
    ] = ()
    missing: Annotated[
        Literal["error", "skip"],
        Option("Tensors on one side only, or of different shapes: stop, or compare the others."),
    ] = "error"
    per_tensor: Annotated[bool, Option("Report the figures of each tensor, too.")] = False
    top: Annotated[int | None, Option("Report the K tensors that differ most, by rel_l2.", "K", range=AT_LEAST_ONE)] = (
        None
    )
    rtol: Annotated[
        float | None,
        Option(
            "Fail where |a - b| > atol + R·|b|.", "R", range=NOT_NEGATIVE_FINITE, unset=say("0 with {}", option("atol"))
        ),
    ] = None
    atol: Annotated[
        float | None,
        Option(
            "Fail where |a - b| > T + rtol·|b|.", "T", range=NOT_NEGATIVE_FINITE, unset=say("0 with {}", option("rtol"))
        ),
    ] = None
    max_ulp: Annotated[
        int | None, Option("Fail where values are more than N ulps of the coarser type apart.", "N", range=NOT_NEGATIVE)
    ] = None
    max_rel_l2: Annotated[
        float | None, Option("Fail if rel_l2 of all tensors is above X.", "X", range=NOT_NEGATIVE)
    ] = None
    min_cosine: Annotated[
        float | None, Option("Fail if the cosine of all tensors is below X.", "X", range=FROM_MINUS_ONE_TO_ONE)
    ] = None
    bits: Annotated[bool, Option("Fail unless all tensors have the same bytes.")] = False


class ClipOptions(Located, Rewriting):
    """The options of `clip`."""

    operation = "clip"

    paths: Vector = argument(default=(), kw_only=False)

    max_norm: Annotated[float | None, Option("Maximum norm after clipping.", "C", range=NOT_NEGATIVE)] = None
    max_value: Annotated[float | None, Option("Clamp each element to [-V, V] instead.", "V", range=NOT_NEGATIVE)] = None
    norm_type: _NormType = 2.0
    eps: Annotated[
        float,
        Option(
            "Added to the norm before dividing (torch: 1e-6, Lucid: 1e-7, Optax and Keras: 0).",
            "E",
            NOT_NEGATIVE_FINITE,
        ),
    ] = 1e-6
    per_tensor: Annotated[bool, Option("Clip each tensor by its own norm.")] = False
    agc: Annotated[
        float | None,
        Option(
            "Adaptive gradient clipping: limit each unit (such as a weight row) to R times the norm of its parameters.",
            "R",
            range=POSITIVE_FINITE,
        ),
    ] = None
    params: Annotated[
        StrPath | None, Option(say("Gradient set with the parameters, for {}; only read.", option("agc")), "PATH")
    ] = None
    agc_eps: Annotated[
        float, Option(say("Lower bound on parameter norms for {}.", option("agc")), "E", NOT_NEGATIVE_FINITE)
    ] = 1e-3
    group: Annotated[
        Sequence[str],
        Option("Clip the tensors whose name matches REGEX to a norm of their own of at most C; repeatable.", "REGEX:C"),
    ] = ()
    limit: Annotated[
        str | None,
        Option("Adaptive maximum norm, computed from earlier norms: z=T (ZClip) or percentile=P (AutoClip).", "RULE"),
    ] = None
    state: Annotated[
        StrPath | None,
        Option(say("File that stores the norm history for {}; created if missing.", option("limit")), "FILE"),
    ] = None
    warmup: Annotated[
        int | None,
        Option(say("Number of norms before {} clips.", _Z), "N", range=AT_LEAST_TWO, unset="25"),
    ] = None
    window: Annotated[
        int | None,
        Option(say("Number of recent norms used by {}.", _PERCENTILE), "N", range=AT_LEAST_ONE, unset="10000"),
    ] = None
    skip_above: Annotated[
        float | None, Option("Write nothing if the norm is above X, with exit code 1.", "X", range=NOT_NAN)
    ] = None
    concat: _Concat = False
    total_norm: Annotated[
        float | None, Option("Use this norm instead of the measured one.", "N", range=NOT_NEGATIVE_FINITE)
    ] = None
    unscale: Annotated[float, Option("Divide by this loss scale first.", "S", POSITIVE_FINITE)] = 1.0
    dtype: Annotated[
        Dtype | None,
        Option(
            say("Storage type of the new files, with {} or {} ({}).", *_OUTPUTS, ", ".join(get_args(Dtype))),
            "TYPE",
            unset="that of each tensor",
        ),
    ] = None
    nonfinite: Annotated[
        Literal["error", "propagate", "zero"],
        Option("NaN and Inf: write nothing, continue as torch does, or set them to 0."),
    ] = "error"


class AccumulateOptions(Rewriting):
    """The options of `accumulate`."""

    operation = "accumulate"

    gradients: Gradients = argument(default=(), kw_only=False)

    @property
    def named(self) -> list[str]:
        """The paths of the gradients, as strings."""
        return list(cast("list[str]", self.gradients))

    into: Annotated[
        StrPath | None,
        Option(say("Gradient set to add to. It must exist; with {}, it is only read.", option("output")), "BUFFER"),
    ] = None
    overwrite: Annotated[bool, Option("Drop the buffer's old content, even NaN.")] = False
    update: Annotated[bool, Option("Add the gradients, or only check their headers and write nothing.")] = True
    weight: Annotated[
        Sequence[float], Option("Weight of a gradient; once for each, in order.", "W", ALL_FINITE, unset="1")
    ] = ()
    weight_key: Annotated[
        str | None, Option("Read the weights from the files' metadata under KEY, such as num_tokens.", "KEY")
    ] = None
    mean: Annotated[
        bool, Option(say("Divide the sum by the sum of the weights; the same as {}.", option("reduce", "mean")))
    ] = False
    reduce: Annotated[
        str | None,
        Option(
            "Add the gradients' sum, mean, median, or trimmed=K, the mean without the K smallest and K largest.",
            "HOW",
            unset="sum",
            check=reduction,
        ),
    ] = None
    map: Annotated[
        Sequence[str],
        Option("Rename tensors of gradients first, as re.sub does; repeatable, in order.", "REGEX=REPLACEMENT"),
    ] = ()
    missing: Annotated[
        Literal["error", "skip", "zero"],
        Option("Tensors that some sets lack: write nothing, leave out the sets that lack them, or count zeros there."),
    ] = "error"
    shard_like: Annotated[
        StrPath | None,
        Option(say("Shard a new set in {} as the set PATH is: same files, same tensors in each.", _OUTPUTS[1]), "PATH"),
    ] = None
    max_shard_size: Annotated[
        int | str | None,
        Option(
            "Shard it into files of at most SIZE, such as 5GB or 1GiB, with an index.", "SIZE", unset="5GB", check=size
        ),
    ] = None
    dtype: Annotated[
        Dtype | None,
        Option(
            f"Storage type of a new set: {', '.join(get_args(Dtype))}.",
            "TYPE",
            unset="of each tensor, that in the first gradient that has it",
        ),
    ] = None
    max_norm: Annotated[
        float | None, Option("Maximum norm of the sum; clip it before rounding.", "C", range=NOT_NEGATIVE)
    ] = None
    clip_each: Annotated[
        float | None, Option("Maximum norm of each gradient; clip it before adding.", "C", range=NOT_NEGATIVE)
    ] = None
    norm_type: _NormType = 2.0
    eps: Annotated[float, Option("Added to a norm before dividing by it.", "E", NOT_NEGATIVE_FINITE)] = 1e-6
    per_gradient: Annotated[bool, Option("Report each gradient, too.")] = False
    nonfinite: Annotated[
        Literal["error", "propagate", "skip"],
        Option("NaN and Inf: write nothing, continue, or skip the gradients that have any."),
    ] = "error"


class ZeroOptions(Located, Rewriting):
    """The options of `zero`."""

    operation = "zero"

    weight_key: Annotated[
        str | None, Option("Set the weight under KEY in the files' metadata to 0 where there is one.", "KEY")
    ] = None


class LayerNormOptions(Located, Rewriting):
    """The options of `layernorm_backward`."""

    operation = "layernorm_backward"

    kind: Annotated[Literal["layernorm", "rmsnorm"], Option("Kind of layer.")] = "layernorm"
    invertible: Annotated[bool, Option("Read Y (and bias) instead of X (and mean).")] = False
    affine: Annotated[bool, Option("Layers have a scale; without, it counts as 1 and gets no gradient.")] = True
    axis: Annotated[int, Option("First axis normalized over; negative ones count from the end.", "N")] = -1
    norm_eps: Annotated[
        float, Option("Added to the variance, for statistics that are computed.", "E", NOT_NEGATIVE_FINITE)
    ] = 1e-5
    scale_offset: Annotated[float, Option("Added to scale: 1 if weights are stored as gamma - 1.", "S", FINITE)] = 0.0
    nonfinite: Annotated[
        Literal["error", "propagate"], Option("NaN and Inf in a result: write nothing, or continue.")
    ] = "error"
    prefix: Annotated[Sequence[str], Option("Only the layer with this prefix; repeatable.", "PREFIX")] = ()
    y_grad: Annotated[str, Option("Name of the output gradient, after the prefix.", "NAME")] = "Y_grad"
    x: Annotated[str, Option("Name of the input.", "NAME")] = "X"
    y: Annotated[str, Option("Name of the output, read in the invertible form.", "NAME")] = "Y"
    scale: Annotated[str, Option("Name of the weight.", "NAME")] = "scale"
    bias: Annotated[str, Option("Name of the bias, read in the invertible form.", "NAME")] = "bias"
    mean: Annotated[str, Option("Name of the mean of each row.", "NAME")] = "mean"
    inv_std_dev: Annotated[str, Option("Name of 1 / sqrt(variance + eps) of each row.", "NAME")] = "inv_std_dev"
    x_grad: Annotated[str, Option("Name for the gradient of X.", "NAME")] = "X_grad"
    scale_grad: Annotated[str, Option("Name for the gradient of the weight.", "NAME")] = "scale_grad"
    bias_grad: Annotated[str, Option("Name for the gradient of the bias.", "NAME")] = "bias_grad"
    x_grad_in_place: Annotated[bool, Option("Write X_grad in place of Y_grad, which is dropped.")] = False


class RecoverOptions(Located):
    """The options of `recover`."""

    operation = "recover"

    force: Annotated[bool, Option("Continue even if another program has written to a file since.")] = False


class CheckOptions(Located, Selection, Local, Callback):
    """The options of `check`."""

    operation = "check"

    fast: Annotated[bool, Option("Read headers only, and no values.")] = False
    strict: Annotated[bool, Option("Treat notes as faults (exit code 1).")] = False


class InfoOptions(Located, Selection):
    """The options of `info`."""

    operation = "info"


class DoctorOptions(Options):
    """The options of `doctor`."""

    operation = "doctor"

    path: Place = argument(default=".", kw_only=False)


# The options that several operations share, by the title that they have in help.
SHARED = {"Selection": Selection, "Output": Writing, "Compute": Compute, GENERAL: Display, PYTHON: Callback}
