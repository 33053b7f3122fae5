"""The command line: the help of each command, and the way into and out of all of them; imports nothing heavy."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

import gradtool
from gradtool import options, process, report
from gradtool.command import Command, Request, parse
from gradtool.errors import EXIT_OK
from gradtool.report.progress import progress as progress_bar

# The options of each command, with its line in the list of commands and its help.
COMMANDS = {
    "norm": Command(options.NormOptions,
        "top per_tensor by_file group norm_type fail_above include histogram columns json",
        """Measure norms, and find NaN and Inf.

Measure the norm of all tensors of all paths, as one vector. Nothing is changed.

Reports NaN and Inf values, and exits with code 1 if there are any.

\b
Examples:
  gradtool norm grads/ --top 5
  gradtool norm rank*.safetensors --concat --columns norm
  gradtool norm micro_*.safetensors --by-file --fail-above 5
"""),
    "diff": Command(options.DiffOptions,
        "close rtol atol max_rel_l2 bits per_tensor top map missing json",
        """Compare two sets, and judge the differences.

Compare the tensors of A with those of B, as one vector and tensor by tensor. Nothing is changed.

Tensors are matched by name, whatever their shards and types. With a limit (--rtol, --atol, --max-ulp,
--max-rel-l2, --bits, --min-cosine, --rule), exits with code 1 if any difference exceeds it.

\b
Examples:
  gradtool diff new.safetensors old.safetensors --top 5
  gradtool diff ddp/ single.safetensors --map '^module\\.=' --rtol 1e-3
  gradtool diff upgraded/ golden/ --bits --quiet
  gradtool diff new/ old/ --rule '.*norm.*: max_ulp<=4' \\
      --rule '.*: rel_l2<=1e-3'
"""),
    "digest": Command(
        options.DigestOptions,
        "check include exclude files_from threads columns json quiet",
        """Print or check digests of tensors.

Compute a SHA-256 digest of each tensor, and one of all tensors of all paths. Nothing is changed.

Digests depend on names, types, shapes and values, and not on files: a sharded set and its copy in one file have the
same. Tensors may be of any type.

\b
Examples:
  gradtool digest grads/ > grads.digests
  gradtool digest copy.safetensors --check grads.digests
  ssh node7 gradtool digest /data/grads | gradtool digest grads/ --check -
"""),
    "check": Command(
        options.CheckOptions,
        "fast strict include exclude files_from threads columns json quiet",
        """Check files for damage, and suggest fixes.

Check files and sets for damage and other problems. Nothing is changed.

Exits with code 1 if any fault is found (a damaged header, an index that does not match its shards, NaN, files left
half changed). Notes (subnormal values, tensors of zeros, leftovers of runs) count only with --strict, because
healthy files have some.

\b
Examples:
  gradtool check grads/
  gradtool check --fast step_*/ --json | jq '.data.per_finding[]'
  gradtool check sums.safetensors --strict && echo healthy
"""),
    "info": Command(options.InfoOptions,
        "include exclude files_from columns json",
        """List tensors, types, sizes and metadata.

List the tensors of all paths with type, shape and bytes, the totals per type, and the metadata.

Only headers are read. Tensors may be of any type.

\b
Examples:
  gradtool info model.safetensors
  gradtool info grads/ --include '^lm_head'
  gradtool info grads/ --columns dtype,tensors,bytes
"""),
    "clip": Command(options.ClipOptions,
        "max_norm max_value per_tensor group unscale nonfinite output output_dir dry_run json",
        """Clip by norm (global or in parts) or by value.

Clip all tensors of all paths, as one vector, to a maximum norm, in place.

No file is replaced until all new files are ready. If there is nothing to clip, no file is touched.

\b
Examples:
  gradtool clip grads/ --max-norm 1.0
  gradtool clip grads/ --group '^lm_head:0.5' --max-norm 1.0
  gradtool clip grads/ --limit z=2.5 --state clip.json
  gradtool clip rank*.safetensors --concat --max-norm 1.0
  gradtool clip scaled.safetensors --output clipped.safetensors \\
      --unscale 1024 --max-norm 1.0 --dtype F32
"""),
    "accumulate": Command(options.AccumulateOptions,
        "into output output_dir mean weight_key reduce screen max_norm nonfinite json",
        """Sum, average or screen gradients, rounded once.

Add gradients in float64, rounded once at the end: into a buffer, in place (--into), or into a new set (--output).

Tensors are matched by name, whatever their shards, and broadcast to the buffer's shape. Gradients are never modified.
With both --into and --output, BUFFER is not modified either, and the new set is the sum of all.

\b
Examples:
  gradtool accumulate micro_*.safetensors --into buffer.safetensors \\
      --once step-100
  gradtool accumulate rank*/ --output mean.safetensors --mean \\
      --weight-key num_tokens --max-norm 1
  gradtool accumulate micro_*.safetensors --output-dir sums \\
      --shard-like model/
"""),
    "zero": Command(options.ZeroOptions,
        "include exclude output output_dir write dry_run json",
        """Set every element to +0.

Set every element of all tensors of all paths to +0, in place. Tensors may be of any type.

On file systems that support holes, no zeros are written, so gigabytes take no longer than kilobytes.

\b
Examples:
  gradtool zero buffer.safetensors
  gradtool zero grads/ --include '^lm_head'
"""),
    "layernorm-backward": Command(options.LayerNormOptions,
        "kind axis prefix output output_dir norm_eps scale_offset nonfinite dry_run json",
        """Compute the gradients of layer norms.

Compute X_grad, scale_grad and bias_grad of every layer that has a Y_grad, and add them to its file.

The tensors of a layer share a prefix: Y_grad, X, scale, mean and inv_std_dev. If the last two are missing, they are
computed. Tensors missing from the Y_grad file are looked up in the other paths, which are never modified.

--include and --exclude select layers by the name of their Y_grad. With --output or --output-dir, only the gradients
are written, and only there.

\b
Examples:
  gradtool layernorm-backward step_100/ --output-dir grads/
  gradtool layernorm-backward acts.safetensors weights.safetensors
  gradtool layernorm-backward acts.safetensors \\
      --kind rmsnorm --scale-offset 1 --prefix model.norm
"""),
    "recover": Command(options.RecoverOptions,
        "force json quiet",
        """Complete crashed runs, or clean up after them.

Complete crashed runs (killed, power cut) that were ready to change files, and clean up after all others.

Afterwards, the files of each run are either all new or all old. Live runs are left alone.

\b
Examples:
  gradtool recover grads/
  gradtool recover buffer.safetensors
"""),
    "doctor": Command(options.DoctorOptions,
        "json",
        """Print diagnostics for bug reports.

Print diagnostics about this machine and a folder, for bug reports.

Nothing is written, and no data is read.

\b
Examples:
  gradtool doctor
  gradtool doctor /mnt/gradients --json | jq .data.file_system
"""),
}  # fmt: skip


def main() -> NoReturn:
    """Run the command line; it always ends with an exit code and at most a few lines on stderr."""
    process.replace_std_streams()
    process.adjust_limits()
    try:
        process.install_handlers()
        try:
            request = parse(COMMANDS, sys.argv[1:])
            code = EXIT_OK if request is None else _run(request)
        except Exception as error:  # noqa: BLE001 - no traceback reaches a user
            code = process.fail(error)
        process.end_signals()
    except KeyboardInterrupt as error:
        code = process.interrupted(error)
    sys.exit(code)


def _run(request: Request) -> int:
    """Call the function that a command line names, and print its result; return the exit code."""
    command, given, display = request
    form = report.format_from(display)
    if form != "text" or not display.quiet:
        process.require_stdout()
    function = getattr(import_module(gradtool.module_of(given.operation)), given.operation)
    table = report.table_from(form, display, getattr(gradtool, function.__annotations__["return"]), given)
    with progress_bar(command, wanted=not display.quiet) as progress:
        # As a function of options, without what Python callers need around it.
        result = function.__wrapped__(given.replace(progress=progress))
    return process.finish(command, result, form, quiet=display.quiet, verbose=display.verbose, table=table)
