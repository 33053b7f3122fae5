"""The command line: flags to plain values, one short function a command, nothing heavy imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import gradtool
from gradtool import process, streams
from gradtool.errors import EXIT_USAGE, GradtoolError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typer.models import CommandInfo

EXIT_BUG = 70

app = typer.Typer(
    name="gradtool",
    add_completion=False,
    # Plain help: rich would cost as much again as everything else that --help does.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What every wrong use of the command line is an instance of; its home differs between versions of Typer.
_UsageProblem: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

Paths = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATH...", help="Files, folders or index files; together they are one gradient vector."),
]
Sets = Annotated[list[str] | None, typer.Argument(metavar="PATH...", help="Files, folders or index files.")]
Include = Annotated[
    list[str] | None, typer.Option("--include", metavar="REGEX", help="Only tensors whose name this finds.")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="REGEX", help="No tensors whose name this finds.")
]
FilesFrom = Annotated[
    str | None, typer.Option(metavar="FILE", help="Read more paths from a file or - (newline or NUL between them).")
]
NormType = Annotated[float, typer.Option(metavar="P", help="The order of the norm, above 0; inf for the maximum.")]
Output = Annotated[str | None, typer.Option(metavar="FILE", help="Write here; leave the input alone.")]
OutputDir = Annotated[str | None, typer.Option(metavar="DIR", help="Write all files here; leave the inputs alone.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Do everything but write.")]
Write = Annotated[
    str, typer.Option(metavar="replace|inplace", help="Replace files, or overwrite what changes in them.")
]
Fsync = Annotated[bool, typer.Option(help="Be safe from power cuts too.")]
LockTimeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="Wait so long for other runs that write the same files.")
]
Backend = Annotated[
    str | None,
    typer.Option(metavar="auto|cpu|cuda", help="What computes.  [default: $GRADTOOL_BACKEND, or auto]"),
]
Device = Annotated[int | None, typer.Option(metavar="N", help="The GPU, from 0; with --backend cuda.")]
Threads = Annotated[
    int | None, typer.Option(metavar="N", help="Worker threads.  [default: one for each core, at most 16]")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Clip, accumulate, zero and measure gradients in safetensors files, in place, to the last bit."""
    if version:
        typer.echo(f"gradtool {gradtool.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(short_help="Measure the norm of all tensors, as one vector.")
def norm(
    paths: Paths = None,
    *,
    norm_type: NormType = 2.0,
    per_tensor: Annotated[bool, typer.Option("--per-tensor", help="Show every tensor's own norm.")] = False,
    top: Annotated[int | None, typer.Option(metavar="K", help="Show the K tensors of the largest norms.")] = None,
    fail_above: Annotated[float | None, typer.Option(metavar="X", help="Exit with 1 when the norm is above X.")] = None,
    ignore_journal: Annotated[
        bool, typer.Option("--ignore-journal", help="Look even at files that a run may have left half changed.")
    ] = False,
    include: Include = None,
    exclude: Exclude = None,
    files_from: FilesFrom = None,
    backend: Backend = None,
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Measure the norm of all tensors of all paths, as one vector, and change nothing.

    NaN and Inf values are named, and make the exit code 1.

    \b
    Example:  gradtool norm grads/ --top 5
              gradtool norm rank*.safetensors --json | jq .data.norm
    """
    return _run("norm", **locals())


@app.command(short_help="Clip by global norm, by tensor or by value.")
def clip(
    paths: Paths = None,
    *,
    max_norm: Annotated[float | None, typer.Option(metavar="C", help="The largest norm to leave.")] = None,
    max_value: Annotated[float | None, typer.Option(metavar="V", help="Clamp each element to [-V, V] instead.")] = None,
    norm_type: NormType = 2.0,
    eps: Annotated[
        float, typer.Option(metavar="E", help="coef = C / (norm + E): torch has 1e-6, Lucid 1e-7, Optax 0.")
    ] = 1e-6,
    per_tensor: Annotated[bool, typer.Option("--per-tensor", help="Clip each tensor by its own norm.")] = False,
    total_norm: Annotated[
        float | None, typer.Option(metavar="N", help="Use this norm instead of the one measured.")
    ] = None,
    unscale: Annotated[float, typer.Option(metavar="S", help="Divide by this loss scale first.")] = 1.0,
    nonfinite: Annotated[
        str,
        typer.Option(
            metavar="error|propagate|zero", help="NaN and Inf: write nothing, go on as torch does, or zero them."
        ),
    ] = "error",
    include: Include = None,
    exclude: Exclude = None,
    files_from: FilesFrom = None,
    output: Output = None,
    output_dir: OutputDir = None,
    dry_run: DryRun = False,
    write: Write = "replace",
    fsync: Fsync = True,
    lock_timeout: LockTimeout = 0.0,
    backend: Backend = None,
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Clip all tensors of all paths, as one vector, to a norm of at most C; in place.

    Files are replaced only when all of them are ready; when nothing is to be clipped, none is touched.

    \b
    Example:  gradtool clip grads/ --max-norm 1.0
              gradtool clip scaled.safetensors --unscale 1024 --max-norm 1.0 --output clipped.safetensors
    """
    return _run("clip", **locals())


@app.command(short_help="Add gradients to a buffer, in float64.")
def accumulate(
    buffer: Annotated[str, typer.Argument(metavar="BUFFER", help="The gradient set that is added to.")],
    gradients: Annotated[
        list[str] | None, typer.Argument(metavar="GRAD...", help="Files, folders or index files; each is one gradient.")
    ] = None,
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop the buffer's old content, even NaN.")] = False,
    update: Annotated[bool, typer.Option(help="Add; or only check, and write nothing.")] = True,
    weight: Annotated[
        list[float] | None, typer.Option(metavar="W", help="A gradient's weight; once for each, in order.")
    ] = None,
    weight_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Take the weights from the files' metadata, such as num_tokens.")
    ] = None,
    mean: Annotated[bool, typer.Option("--mean", help="Divide the sum by the sum of the weights.")] = False,
    missing: Annotated[
        str, typer.Option(metavar="error|skip", help="Tensors missing on either side: refuse, or add what there is.")
    ] = "error",
    create: Annotated[
        bool, typer.Option("--create", help="Make the buffer, with the names and shapes of the first gradient.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="The type of a buffer that is created.  [default: F32]")
    ] = None,
    max_norm: Annotated[float | None, typer.Option(metavar="C", help="Clip the sum to this norm.")] = None,
    clip_each: Annotated[
        float | None, typer.Option(metavar="C", help="Limit each gradient's own norm before it is added.")
    ] = None,
    norm_type: NormType = 2.0,
    eps: Annotated[float, typer.Option(metavar="E", help="coef = C / (norm + E).")] = 1e-6,
    nonfinite: Annotated[
        str,
        typer.Option(
            metavar="error|propagate|skip",
            help="NaN and Inf: write nothing, go on, or leave out the gradients that hold one.",
        ),
    ] = "error",
    include: Include = None,
    exclude: Exclude = None,
    files_from: FilesFrom = None,
    output: Output = None,
    output_dir: OutputDir = None,
    dry_run: DryRun = False,
    write: Write = "replace",
    fsync: Fsync = True,
    lock_timeout: LockTimeout = 0.0,
    backend: Backend = None,
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Add gradients to a buffer in float64, with one rounding at the end; in place.

    Tensors match by name, whatever shard they are in, and broadcast to the buffer's shape.

    \b
    Example:  gradtool accumulate buffer.safetensors micro_*.safetensors
              gradtool accumulate mean.safetensors rank*/ --create --mean --weight-key num_tokens --max-norm 1
    """
    return _run("accumulate", **locals())


@app.command(short_help="Make every element +0.")
def zero(
    paths: Sets = None,
    *,
    include: Include = None,
    exclude: Exclude = None,
    files_from: FilesFrom = None,
    output: Output = None,
    output_dir: OutputDir = None,
    dry_run: DryRun = False,
    write: Write = "replace",
    fsync: Fsync = True,
    lock_timeout: LockTimeout = 0.0,
    backend: Backend = None,
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Make every element of all tensors of all paths +0, whatever its type; in place.

    Zeros are not written but left out where the file system can do that, so gigabytes take no longer than kilobytes.

    \b
    Example:  gradtool zero buffer.safetensors
              gradtool zero grads/ --include '^lm_head'
    """
    return _run("zero", **locals())


@app.command("layernorm-backward", short_help="Work out the gradients of layer norms.")
def layernorm_backward(
    paths: Sets = None,
    *,
    kind: Annotated[str, typer.Option(metavar="layernorm|rmsnorm", help="What kind of layer.")] = "layernorm",
    invertible: Annotated[
        bool, typer.Option("--invertible", help="Read Y (and bias) instead of X (and mean).")
    ] = False,
    axis: Annotated[int, typer.Option(metavar="N", help="The first axis that is normalized over.")] = -1,
    norm_eps: Annotated[float, typer.Option(metavar="E", help="For statistics that are not in the files.")] = 1e-5,
    scale_offset: Annotated[
        float, typer.Option(metavar="S", help="Added to scale: 1 where weights are stored as gamma - 1.")
    ] = 0.0,
    nonfinite: Annotated[
        str, typer.Option(metavar="error|propagate", help="NaN and Inf: write nothing, or go on.")
    ] = "error",
    prefix: Annotated[
        list[str] | None, typer.Option(metavar="PREFIX", help="Only the layer of this prefix; repeatable.")
    ] = None,
    y_grad: Annotated[
        str, typer.Option(metavar="NAME", help="The gradient of the output, after the prefix.")
    ] = "Y_grad",
    x: Annotated[str, typer.Option("--x", metavar="NAME", help="The input.")] = "X",
    y: Annotated[str, typer.Option("--y", metavar="NAME", help="The output, for --invertible.")] = "Y",
    scale: Annotated[str, typer.Option(metavar="NAME", help="The weight.")] = "scale",
    bias: Annotated[str, typer.Option(metavar="NAME", help="The bias, for --invertible.")] = "bias",
    mean: Annotated[str, typer.Option(metavar="NAME", help="The mean of each row.")] = "mean",
    inv_std_dev: Annotated[
        str, typer.Option(metavar="NAME", help="1 / sqrt(variance + eps) of each row.")
    ] = "inv_std_dev",
    x_grad_in_place: Annotated[
        bool, typer.Option("--x-grad-in-place", help="Put X_grad in the place of Y_grad, which goes.")
    ] = False,
    include: Include = None,
    exclude: Exclude = None,
    files_from: FilesFrom = None,
    output: Output = None,
    output_dir: OutputDir = None,
    dry_run: DryRun = False,
    write: Write = "replace",
    fsync: Fsync = True,
    lock_timeout: LockTimeout = 0.0,
    backend: Backend = None,
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Work out X_grad, scale_grad and bias_grad of every layer that has a Y_grad, and add them to its file.

    A layer is a common prefix of Y_grad, X, scale, mean and inv_std_dev; the last two are computed where they are
    missing. With --output or --output-dir, the gradients alone are written there.

    \b
    Example:  gradtool layernorm-backward step_100/ --output-dir grads/
              gradtool layernorm-backward acts.safetensors --kind rmsnorm --scale-offset 1 --prefix model.norm
    """
    return _run("layernorm-backward", **locals())


@app.command(short_help="Finish or undo what a killed run left.")
def recover(
    paths: Sets = None,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also where a file was written to by somebody else since.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Finish or undo what runs that were killed left unfinished, and remove the files they made.

    Of each run, all files are new afterwards or all are old. What a live run works on is left alone.

    \b
    Example:  gradtool recover grads/
              gradtool recover buffer.safetensors
    """
    return _run("recover", **locals())


def _run(command: str, *, json: bool, quiet: bool, **arguments: Any) -> int:
    """Call the function of the same name; what is not given has its default there."""
    given = {name: value for name, value in arguments.items() if value is not None}

    def call(progress: Any) -> Any:
        # Looked up here, for this is what imports numpy and all else, and a signal must not meet Typer meanwhile.
        function = getattr(gradtool, command.replace("-", "_"))
        return function(**given) if command == "recover" else function(**given, progress=progress)

    return process.perform(command, call, json=json, quiet=quiet)


def main() -> NoReturn:
    """Run the command line; every way out of it is an exit code and at most a line or two on stderr."""
    streams.take_streams()
    process.allow_open_files()
    try:
        process.take_signals()
        code = _guarded()
        process.leave_signals()
        sys.exit(code if process.pending is None else process.interrupted(process.pending))
    except KeyboardInterrupt as error:
        sys.exit(process.interrupted(error))


def _guarded() -> int:
    try:
        _prepare_only(sys.argv[1:2])
        return int(app(standalone_mode=False) or 0)
    except GradtoolError as error:
        process.show_traceback()
        return process.fail(*error.problems, exit_code=error.exit_code, summary=error.summary)
    except _UsageProblem as error:
        message = error.format_message()
        return process.fail(Problem("usage", f"{message} (see gradtool --help)"), exit_code=EXIT_USAGE)
    except (OSError, MemoryError, ImportError) as error:
        process.show_traceback()
        refused = process.refused(error)
        return process.fail(*refused.problems, exit_code=refused.exit_code)
    except Exception as error:  # noqa: BLE001 - no traceback reaches a user
        process.show_traceback()
        message = f"a bug in gradtool: {type(error).__name__}: {error}; GRADTOOL_DEBUG=1 shows where"
        return process.fail(Problem("bug", message), exit_code=EXIT_BUG)


def _prepare_only(first: Sequence[str]) -> None:
    """Leave out the other commands where one is named: Typer would prepare each, needed or not."""
    commands = app.registered_commands
    app.registered_commands = [one for one in commands if [_name_of(one)] == first] or commands


def _name_of(command: CommandInfo) -> str:
    return str(command.name or getattr(command.callback, "__name__", ""))
