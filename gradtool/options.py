"""Every option, declared once: type, default, range, help. Functions, commands and docs/cli.md are made from these.

The classes type keywords: `**options: Unpack[ClipOptions]`. Python evaluates their annotations, which hold the rest.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args

from gradtool.checks import (
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
    Range,
    reduction,
    size,
)


class Option(NamedTuple):
    """What is declared of an option besides its name and type; `unset` says what None stands for."""

    help: str
    metavar: str = ""
    default: Any = None
    range: Range | None = None
    unset: str = ""
    short: str = ""
    # Converts a value, if its type does not say how.
    check: Callable[[str, Any], Any] | None = None


# The first type of a union decides how a value is checked.
StrPath = os.PathLike[str] | str
Paths = StrPath | Iterable[StrPath]
# Called with the title of a pass, its bytes done and its total bytes; from one thread at a time.
Progress = Callable[[str, int, int], None]
Format = Literal["text", "json", "jsonl", "github"]
Dtype = Literal["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]

Vector = Annotated[Paths, Option("Files, folders or index files; together they form one gradient vector.", "PATH...")]
Sets = Annotated[Paths, Option("Files, folders or index files.", "PATH...")]
Place = Annotated[StrPath, Option("Folder, or a file in it.", "PATH", unset="the current folder")]
Gradients = Annotated[Paths, Option("Files, folders or index files; each is one gradient.", "GRAD...")]

_Concat = Annotated[bool, Option("Tensors of the same name in several paths are parts of one vector.", default=False)]
First = Annotated[StrPath, Option("Gradient set that is compared.", "A")]
Second = Annotated[StrPath, Option("Gradient set that it is compared with.", "B")]
_NormType = Annotated[float, Option("Order of the norm; inf for the largest magnitude.", "P", 2.0, ORDER)]


class Names(TypedDict, total=False):
    """Which tensors are read."""

    include: Annotated[Sequence[str], Option("Only tensors whose name matches REGEX; repeatable.", "REGEX", ())]
    exclude: Annotated[Sequence[str], Option("Skip tensors whose name matches REGEX. Can be repeated.", "REGEX", ())]


class Selection(Names, total=False):
    """What is read."""

    files_from: Annotated[
        StrPath | None,
        Option("Read more paths from FILE, or from standard input if -; newline or NUL between them.", "FILE"),
    ]


class Writing(TypedDict, total=False):
    """Where results go, and how they get there."""

    output: Annotated[StrPath | None, Option("Write to FILE; leave the input unchanged.", "FILE")]
    output_dir: Annotated[StrPath | None, Option("Write all files to DIR; leave the inputs unchanged.", "DIR")]
    no_clobber: Annotated[bool, Option("Fail if an output file exists, instead of replacing it.", default=False)]
    dry_run: Annotated[bool, Option("Do everything except write.", default=False)]
    write: Annotated[
        Literal["replace", "inplace"],
        Option(
            "Build new files and rename them into place, or overwrite changed bytes under an undo log.",
            default="replace",
        ),
    ]
    fsync: Annotated[bool, Option("Sync to disk, to survive a power cut.", default=True)]
    lock_timeout: Annotated[float, Option("Seconds to wait for a lock.", "SECONDS", 0.0, NOT_NEGATIVE_FINITE)]


class Local(TypedDict, total=False):
    """What does the arithmetic in this process."""

    backend: Annotated[
        Literal["auto", "cpu", "cuda"] | None, Option("Compute backend.", unset="$GRADTOOL_BACKEND, or auto")
    ]
    device: Annotated[int | None, Option("GPU number, from 0; only for the cuda backend.", "N", range=NOT_NEGATIVE)]
    threads: Annotated[
        int | None, Option("Number of worker threads.", "N", range=AT_LEAST_ONE, unset="one per core, at most 16")
    ]


class Compute(Local, total=False):
    """What does the arithmetic, here or elsewhere."""

    engine: Annotated[
        str | None,
        Option(
            "Where tasks run: threads, or dask:ADDRESS for the workers of a Dask scheduler.",
            "ENGINE",
            unset="$GRADTOOL_ENGINE, or threads",
        ),
    ]
    worker_timeout: Annotated[
        float, Option("Seconds to wait for a worker of the engine.", "SECONDS", 60.0, POSITIVE_FINITE)
    ]


class Display(TypedDict, total=False):
    """What a command prints; functions return it."""

    format: Annotated[
        Format | None,
        Option(
            "Output format: text, JSON, JSON Lines, or text with GitHub annotations.",
            unset="$GRADTOOL_FORMAT, or text",
        ),
    ]
    json: Annotated[bool, Option("Same as --format json.", default=False)]
    quiet: Annotated[bool, Option("Print errors only.", default=False, short="-q")]
    verbose: Annotated[bool, Option("Print all fields, with the timings of each phase.", default=False, short="-v")]


class Callback(TypedDict, total=False):
    """What functions alone have; commands show progress themselves."""

    progress: Annotated[
        Progress | bool | None,
        Option("True for a bar on stderr, or a function of the pass, the bytes done and the total bytes."),
    ]


class Reading(Selection, Compute, Callback, total=False):
    """The options of every operation."""


class Rewriting(Reading, Writing, total=False):
    """The options of every operation that writes."""


class NormOptions(Reading, total=False):
    """The options of `norm`."""

    norm_type: _NormType
    per_tensor: Annotated[bool, Option("Report the norm of each tensor, too.", default=False)]
    top: Annotated[
        int | None, Option("Report the K tensors with the largest norms, NaN first.", "K", range=AT_LEAST_ONE)
    ]
    group: Annotated[
        Sequence[str], Option("Report the norm of the tensors whose name matches REGEX, too; repeatable.", "REGEX", ())
    ]
    by_file: Annotated[bool, Option("Report the norm of each path by itself, too.", default=False)]
    histogram: Annotated[
        bool, Option("Count values by binary exponent, and say which storage types can hold them.", default=False)
    ]
    concat: _Concat
    fail_above: Annotated[
        float | None, Option("Report a norm above X as a problem, with exit code 1.", "X", range=NOT_NAN)
    ]
    ignore_journal: Annotated[bool, Option("Read files even if a run is changing them or crashed.", default=False)]


class DiffOptions(Names, Compute, Callback, total=False):
    """The options of `diff`."""

    map: Annotated[
        Sequence[str],
        Option("Rename tensors of A first, as re.sub does; repeatable, in order.", "REGEX=REPLACEMENT", ()),
    ]
    missing: Annotated[
        Literal["error", "skip"],
        Option("Tensors on one side only, or of different shapes: stop, or compare the others.", default="error"),
    ]
    per_tensor: Annotated[bool, Option("Report the figures of each tensor, too.", default=False)]
    top: Annotated[int | None, Option("Report the K tensors that differ most, by rel_l2.", "K", range=AT_LEAST_ONE)]
    rtol: Annotated[
        float | None,
        Option("Fail where |a - b| > atol + R·|b|.", "R", range=NOT_NEGATIVE_FINITE, unset="0 with --atol"),
    ]
    atol: Annotated[
        float | None,
        Option("Fail where |a - b| > T + rtol·|b|.", "T", range=NOT_NEGATIVE_FINITE, unset="0 with --rtol"),
    ]
    max_ulp: Annotated[
        int | None, Option("Fail where values are more than N ulps of the coarser type apart.", "N", range=NOT_NEGATIVE)
    ]
    max_rel_l2: Annotated[float | None, Option("Fail if rel_l2 of all tensors is above X.", "X", range=NOT_NEGATIVE)]
    min_cosine: Annotated[
        float | None, Option("Fail if the cosine of all tensors is below X.", "X", range=FROM_MINUS_ONE_TO_ONE)
    ]
    bits: Annotated[bool, Option("Fail unless all tensors have the same bytes.", default=False)]


class ClipOptions(Rewriting, total=False):
    """The options of `clip`."""

    max_norm: Annotated[float | None, Option("Maximum norm after clipping.", "C", range=NOT_NEGATIVE)]
    max_value: Annotated[float | None, Option("Clamp each element to [-V, V] instead.", "V", range=NOT_NEGATIVE)]
    norm_type: _NormType
    eps: Annotated[
        float,
        Option(
            "Added to the norm before dividing (torch: 1e-6, Lucid: 1e-7, Optax and Keras: 0).",
            "E",
            1e-6,
            NOT_NEGATIVE_FINITE,
        ),
    ]
    per_tensor: Annotated[bool, Option("Clip each tensor by its own norm.", default=False)]
    agc: Annotated[
        float | None,
        Option(
            "Adaptive gradient clipping: limit each unit (such as a weight row) to R times the norm of its parameters.",
            "R",
            range=POSITIVE_FINITE,
        ),
    ]
    params: Annotated[StrPath | None, Option("Gradient set with the parameters, for --agc; only read.", "PATH")]
    agc_eps: Annotated[float, Option("Lower bound on parameter norms for --agc.", "E", 1e-3, NOT_NEGATIVE_FINITE)]
    group: Annotated[
        Sequence[str],
        Option(
            "Clip the tensors whose name matches REGEX to a norm of their own of at most C; repeatable.", "REGEX:C", ()
        ),
    ]
    limit: Annotated[
        str | None,
        Option("Adaptive maximum norm, computed from earlier norms: z=T (ZClip) or percentile=P (AutoClip).", "RULE"),
    ]
    state: Annotated[
        StrPath | None, Option("File that stores the norm history for --limit; created if missing.", "FILE")
    ]
    warmup: Annotated[
        int | None,
        Option("Number of norms before --limit z=T clips.", "N", range=AT_LEAST_TWO, unset="25"),
    ]
    window: Annotated[
        int | None,
        Option("Number of recent norms used by --limit percentile=P.", "N", range=AT_LEAST_ONE, unset="10000"),
    ]
    skip_above: Annotated[
        float | None, Option("Write nothing if the norm is above X, with exit code 1.", "X", range=NOT_NAN)
    ]
    concat: _Concat
    total_norm: Annotated[
        float | None, Option("Use this norm instead of the measured one.", "N", range=NOT_NEGATIVE_FINITE)
    ]
    unscale: Annotated[float, Option("Divide by this loss scale first.", "S", 1.0, POSITIVE_FINITE)]
    dtype: Annotated[
        Dtype | None,
        Option(
            f"Storage type of the new files, with --output or --output-dir ({', '.join(get_args(Dtype))}).",
            "TYPE",
            unset="that of each tensor",
        ),
    ]
    nonfinite: Annotated[
        Literal["error", "propagate", "zero"],
        Option("NaN and Inf: write nothing, continue as torch does, or set them to 0.", default="error"),
    ]


class AccumulateOptions(Rewriting, total=False):
    """The options of `accumulate`."""

    into: Annotated[
        StrPath | None, Option("Gradient set to add to. It must exist; with --output, it is only read.", "BUFFER")
    ]
    overwrite: Annotated[bool, Option("Drop the buffer's old content, even NaN.", default=False)]
    update: Annotated[bool, Option("Add the gradients, or only check their headers and write nothing.", default=True)]
    weight: Annotated[
        Sequence[float], Option("Weight of a gradient; once for each, in order.", "W", (), ALL_FINITE, unset="1")
    ]
    weight_key: Annotated[
        str | None, Option("Read the weights from the files' metadata under KEY, such as num_tokens.", "KEY")
    ]
    mean: Annotated[bool, Option("Divide the sum by the sum of the weights; the same as --reduce mean.", default=False)]
    reduce: Annotated[
        str | None,
        Option(
            "Add the gradients' sum, mean, median, or trimmed=K, the mean without the K smallest and K largest.",
            "HOW",
            unset="sum",
            check=reduction,
        ),
    ]
    map: Annotated[
        Sequence[str],
        Option("Rename tensors of gradients first, as re.sub does; repeatable, in order.", "REGEX=REPLACEMENT", ()),
    ]
    missing: Annotated[
        Literal["error", "skip", "zero"],
        Option(
            "Tensors that some sets lack: write nothing, leave out the sets that lack them, or count zeros there.",
            default="error",
        ),
    ]
    shard_like: Annotated[
        StrPath | None,
        Option("Shard a new set in --output-dir as the set PATH is: same files, same tensors in each.", "PATH"),
    ]
    max_shard_size: Annotated[
        int | str | None,
        Option(
            "Shard it into files of at most SIZE, such as 5GB or 1GiB, with an index.",
            "SIZE",
            unset="5GB",
            check=size,
        ),
    ]
    dtype: Annotated[
        Dtype | None,
        Option(
            f"Storage type of a new set: {', '.join(get_args(Dtype))}.",
            "TYPE",
            unset="of each tensor, that in the first gradient that has it",
        ),
    ]
    max_norm: Annotated[
        float | None, Option("Maximum norm of the sum; clip it before rounding.", "C", range=NOT_NEGATIVE)
    ]
    clip_each: Annotated[
        float | None, Option("Maximum norm of each gradient; clip it before adding.", "C", range=NOT_NEGATIVE)
    ]
    norm_type: _NormType
    eps: Annotated[float, Option("Added to a norm before dividing by it.", "E", 1e-6, NOT_NEGATIVE_FINITE)]
    per_gradient: Annotated[bool, Option("Report each gradient, too.", default=False)]
    nonfinite: Annotated[
        Literal["error", "propagate", "skip"],
        Option("NaN and Inf: write nothing, continue, or skip the gradients that have any.", default="error"),
    ]


class ZeroOptions(Rewriting, total=False):
    """The options of `zero`."""

    weight_key: Annotated[
        str | None, Option("Set the weight under KEY in the files' metadata to 0 where there is one.", "KEY")
    ]


class LayerNormOptions(Rewriting, total=False):
    """The options of `layernorm_backward`."""

    kind: Annotated[Literal["layernorm", "rmsnorm"], Option("Kind of layer.", default="layernorm")]
    invertible: Annotated[bool, Option("Read Y (and bias) instead of X (and mean).", default=False)]
    affine: Annotated[bool, Option("Layers have a scale; without, it counts as 1 and gets no gradient.", default=True)]
    axis: Annotated[int, Option("First axis normalized over; negative ones count from the end.", "N", -1)]
    norm_eps: Annotated[
        float, Option("Added to the variance, for statistics that are computed.", "E", 1e-5, NOT_NEGATIVE_FINITE)
    ]
    scale_offset: Annotated[float, Option("Added to scale: 1 if weights are stored as gamma - 1.", "S", 0.0, FINITE)]
    nonfinite: Annotated[
        Literal["error", "propagate"], Option("NaN and Inf in a result: write nothing, or continue.", default="error")
    ]
    prefix: Annotated[Sequence[str], Option("Only the layer with this prefix; repeatable.", "PREFIX", ())]
    y_grad: Annotated[str, Option("Name of the output gradient, after the prefix.", "NAME", "Y_grad")]
    x: Annotated[str, Option("Name of the input.", "NAME", "X")]
    y: Annotated[str, Option("Name of the output, read in the invertible form.", "NAME", "Y")]
    scale: Annotated[str, Option("Name of the weight.", "NAME", "scale")]
    bias: Annotated[str, Option("Name of the bias, read in the invertible form.", "NAME", "bias")]
    mean: Annotated[str, Option("Name of the mean of each row.", "NAME", "mean")]
    inv_std_dev: Annotated[str, Option("Name of 1 / sqrt(variance + eps) of each row.", "NAME", "inv_std_dev")]
    x_grad: Annotated[str, Option("Name for the gradient of X.", "NAME", "X_grad")]
    scale_grad: Annotated[str, Option("Name for the gradient of the weight.", "NAME", "scale_grad")]
    bias_grad: Annotated[str, Option("Name for the gradient of the bias.", "NAME", "bias_grad")]
    x_grad_in_place: Annotated[bool, Option("Write X_grad in place of Y_grad, which is dropped.", default=False)]


class RecoverOptions(TypedDict, total=False):
    """The options of `recover`."""

    force: Annotated[bool, Option("Continue even if another program has written to a file since.", default=False)]


class CheckOptions(Selection, Local, Callback, total=False):
    """The options of `check`."""

    fast: Annotated[bool, Option("Read headers only, and no values.", default=False)]
    strict: Annotated[bool, Option("Treat notes as faults (exit code 1).", default=False)]


class InfoOptions(Selection, total=False):
    """The options of `info`."""
