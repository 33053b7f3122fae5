"""Every kind of bad input to every command: one line, an exit code, and no changed byte."""

import numpy as np
import pytest
from support import (
    ONES,
    SAMPLES,
    encode,
    gradtool,
    gradtool_json,
    sample,
    snapshot,
    with_header,
    write,
    write_index,
)

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def lay_out_bad_inputs(folder):
    good = sample(folder)
    (folder / "truncated").write_bytes(good.read_bytes()[:-3])
    (folder / "trailing").write_bytes(good.read_bytes() + b"\0")
    (folder / "text").write_text("not a tensor in sight")
    (folder / "over").write_bytes(with_header({}, length=2**40))
    (folder / "overlap").write_bytes(with_header({"a": GOOD, "b": GOOD | {"data_offsets": [4, 12]}}, bytes(12)))
    write(folder / "integers", {"ids": np.ones(2, np.int32)})
    write_index(folder / "lost", {"1.safetensors": {"a": ONES}}, {"a": "1.safetensors", "b": "2.safetensors"})
    write_index(folder / "unheld", {"1.safetensors": {"a": ONES}}, {"a": "1.safetensors", "b": "1.safetensors"})
    write_index(folder / "unmapped", {"1.safetensors": {"a": ONES, "b": ONES}}, {"a": "1.safetensors"})
    for name in ("1", "2"):
        write(folder / "twice" / f"{name}.safetensors", {"a": ONES})
    (folder / "empty").mkdir()
    write(folder / "larger", {"a": np.ones((2, 2), np.float32), "b": encode([0, 0], "BF16")})
    write(folder / "fewer", {"a": ONES}, {"num_tokens": "many"})
    write(folder / "norm", {"X": np.ones((2, 3)), "Y_grad": np.ones((2, 3)), "scale": np.ones(4)})


# By what is wrong: the arguments, the exit code, and what the message says.
BAD_INPUTS = {
    "no safetensors file": ("text", 3, "not a safetensors file"),
    "truncated": ("truncated", 3, "truncated: the header says"),
    "trailing bytes": ("trailing", 3, "trailing bytes"),
    "header over the limit": ("over", 3, "exceeds the limit"),
    "overlapping offsets": ("overlap", 3, "bad offsets"),
    "index names a missing shard": ("lost", 3, "2.safetensors, which does not exist; copy it, or correct the index"),
    "index names a missing tensor": ("unheld", 3, "does not contain it; correct the index, or copy the set again"),
    "index leaves a tensor out": ("unmapped", 3, "does not map it; correct the index, or copy the set again"),
    "same file twice": ("x.safetensors x.safetensors", 3, "named twice"),
    "same name twice": ("twice", 3, "is in 1.safetensors too"),
    "unsupported type": ("integers", 3, "--exclude"),
    "pattern without a match": ("x.safetensors --include zzz", 3, "matches no tensor"),
    "pattern that is none": ("x.safetensors --include (", 2, "not a regular expression"),
    "NaN limit": ("x.safetensors --max-norm nan", 2, "not nan"),
    "negative limit": ("x.safetensors --max-norm -1", 2, "0 or more"),
    "order too small": ("x.safetensors --norm-type 1e-5", 2, "0.01 or more, not 1e-05: below that, rounding errors"),
    "no number": ("x.safetensors --max-norm x", 2, "--max-norm"),
    "unknown option": ("x.safetensors --nope", 2, "--nope"),
    "unknown policy": ("x.safetensors --nonfinite x", 2, "--nonfinite"),
    "no path": ("", 2, "no path"),
    "missing file": ("missing", 3, "no such file"),
    "missing folder": ("missing/x", 3, "no such file"),
    "folder without safetensors": ("empty", 3, "no .safetensors file"),
    "missing list": ("x.safetensors --files-from missing", 3, "no such file"),
    "backend that is not there": ("x.safetensors --backend cuda", 4, "CUDA"),
    "backend that is none": ("x.safetensors --backend tpu", 2, "tpu"),
    "output into nowhere": ("x.safetensors --output missing/x", 3, "no such folder"),
}


# The same for the commands that came later, whose ways to the files are the same.
BAD_CALLS = {f"clip --max-norm 1 {arguments}": expected for arguments, *expected in BAD_INPUTS.values()} | {
    "diff": (2, "A"),
    "diff x.safetensors": (2, "B"),
    "diff x.safetensors missing": (3, "no such file"),
    "diff truncated x.safetensors": (3, "truncated: the header says"),
    "diff x.safetensors fewer": (3, "use --missing skip to compare only those"),
    "diff x.safetensors larger": (3, "has shape [2], but [2, 2] in"),
    "diff integers integers": (3, "--exclude"),
    "diff x.safetensors x.safetensors --map x": (2, "must be REGEX=REPLACEMENT"),
    "diff x.safetensors x.safetensors --map zzz=": (3, "matches no tensor name"),
    "diff x.safetensors x.safetensors --rtol inf": (2, "0 or more and finite"),
    "diff x.safetensors x.safetensors --min-cosine 2": (2, "from -1 to 1"),
    "diff x.safetensors x.safetensors --max-ulp -1": (2, "0 or more"),
    "diff x.safetensors x.safetensors --max-rel-l2 nan": (2, "0 or more"),
    "accumulate x.safetensors --into x.safetensors --map x": (2, "must be REGEX=REPLACEMENT"),
    "clip x.safetensors --agc 1 --params x.safetensors --eps 0": (2, "cannot be combined with --eps"),
    "clip x.safetensors --agc 1 --params x.safetensors --warmup 9": (2, "cannot be combined with --warmup"),
    "clip x.safetensors --agc 1 --params x.safetensors --window 9": (2, "cannot be combined with --window"),
    "clip x.safetensors --max-norm 1 --agc-eps 1": (2, "--agc-eps requires --agc"),
    "clip x.safetensors --max-value 1 --eps 0": (2, "--max-value uses no norm and cannot be combined with --eps"),
    "accumulate x.safetensors --into x.safetensors --eps 0": (2, "--eps requires --max-norm or --clip-each"),
    "clip x.safetensors --group a": (2, "--group must be REGEX:C, such as '^lm_head:0.5', not 'a'"),
    "clip x.safetensors --group :1": (2, "--group must be REGEX:C"),
    "clip x.safetensors --max-norm ٣": (2, "--max-norm must be a number, not '٣'"),
    "clip x.safetensors --group a:1_0": (2, "the C of --group a:1_0 must be a number, not '1_0'"),
    "norm x.safetensors --top \uff13": (2, "--top must be a whole number, not '\uff13'"),
    "accumulate x.safetensors x.safetensors --weight 1_0": (2, "--weight must be a number, not '1_0'"),
    "clip x.safetensors --limit z=1_0 --state s": (2, "must be a number, not '1_0'"),
    f"norm x.safetensors --threads {'9' * 4300}": (2, "--threads must be a whole number below 2^63"),
    "clip x.safetensors --group a:": (2, "the C of --group a: must be a number, not ''"),
    "clip x.safetensors --group a:nan": (2, "must be 0 or more, not nan"),
    "clip x.safetensors --group (:1": (2, "--group '(' is not a regular expression"),
    "clip x.safetensors --group zzz:1": (3, "--group zzz matches no tensor"),
    "clip x.safetensors --group a:1 --group .:2": (3, "is in two groups, --group a and --group ."),
    "clip x.safetensors --group a:1 --per-tensor --max-norm 1": (2, "tensor and cannot be combined with --group"),
    "clip x.safetensors --group a:1 --total-norm 1 --max-norm 1": (2, "cannot be combined with --total-norm"),
    "clip x.safetensors --group a:1 --max-value 1": (
        2,
        "--max-value uses no norm and cannot be combined with --group",
    ),
    "norm x.safetensors --group zzz": (3, "--group zzz matches no tensor"),
    "norm x.safetensors --group a --group a": (3, "is in two groups"),
    "accumulate": (2, "--into, --output or --output-dir is required"),
    "accumulate x.safetensors fewer": (2, "--into, --output or --output-dir is required"),
    "accumulate --into x.safetensors": (2, "no gradient given"),
    "accumulate --output new": (2, "no path is given"),
    "accumulate x.safetensors --into missing": (3, "use --output to write the sum alone"),
    "accumulate fewer --output x.safetensors --no-clobber": (3, "already exists"),
    "accumulate fewer --output x.safetensors --overwrite": (
        2,
        "--overwrite requires --into, whose old content it drops",
    ),
    "accumulate truncated --into x.safetensors": (3, "truncated: the header says"),
    "accumulate x.safetensors --into truncated": (3, "truncated: the header says"),
    "accumulate x.safetensors --into x.safetensors": (3, "named twice"),
    "accumulate larger --into x.safetensors": (3, "[2, 2] does not broadcast to [2], its shape in the buffer"),
    "accumulate fewer --into x.safetensors": (3, "is only in the buffer"),
    "accumulate x.safetensors --into fewer": (3, "is not in the buffer"),
    "accumulate integers --into fewer --missing skip": (3, "unsupported dtype I32"),
    "accumulate larger --into x.safetensors --weight 1 --weight 2": (2, "--weight gives 2 weights for 1 gradient"),
    "accumulate larger --into x.safetensors --weight nan": (2, "finite"),
    "accumulate fewer --into x.safetensors --missing skip --weight-key num_tokens": (3, "'many'"),
    "accumulate fewer --into x.safetensors --missing skip --weight-key steps": (3, "no 'steps' in its metadata"),
    "accumulate fewer --into x.safetensors --missing skip --mean --weight 0": (3, "add up to 0"),
    "accumulate fewer --into x.safetensors --dtype F32": (2, "--dtype requires a new set, without --into"),
    "accumulate fewer --into x.safetensors --clip-each -1": (2, "0 or more"),
    "zero truncated": (3, "truncated: the header says"),
    "zero lost": (3, "which does not exist; copy it, or correct the index"),
    "info lost": (3, "the index names the shard 2.safetensors, which does not exist; copy it, or correct the index"),
    "zero x.safetensors --include zzz": (3, "matches no tensor"),
    "zero x.safetensors --backend cuda": (4, "CUDA"),
    "zero": (2, "no path"),
    "layernorm-backward truncated": (3, "truncated: the header says"),
    "layernorm-backward x.safetensors": (3, "no tensor name ends in Y_grad"),
    "layernorm-backward norm": (3, "has shape [4], expected [3]"),
    "layernorm-backward norm --axis 2": (3, "no axis 2"),
    "layernorm-backward norm --prefix nope": (3, "--prefix nope matches no tensor Y_grad"),
    "layernorm-backward norm --kind batchnorm": (2, "--kind"),
    "layernorm-backward norm --invertible": (3, "use --y NAME if it has another name"),
    "layernorm-backward norm --x-grad-in-place --output new": (2, "--x-grad-in-place"),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_input_is_one_clear_line_with_a_hint_an_exit_code_and_no_changed_byte(tmp_path, call):
    lay_out_bad_inputs(tmp_path)
    exit_code, message = BAD_CALLS[call]
    before = snapshot(tmp_path)
    done = gradtool(*call.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (exit_code, "")
    (line,) = done.stderr.replace("\n  hint: ", "; ").splitlines()
    assert line.startswith("gradtool: error: ")
    assert message in line

    answer = gradtool_json(*call.split(), cwd=tmp_path)
    assert (answer["status"], answer["exit_code"], answer["data"]) == ("error", exit_code, {})
    error = answer["errors"][0]
    assert message in "; ".join(error[key] for key in ("message", "hint") if key in error)
    assert snapshot(tmp_path) == before


def test_nan_is_named_tensor_by_tensor_and_nothing_is_written(tmp_path):
    path = tmp_path / "nan.safetensors"
    path.write_bytes((SAMPLES / "nan.safetensors").read_bytes())
    before = snapshot(tmp_path)
    done = gradtool("clip", path, "--max-norm", "1")
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == f"gradtool: error: {path}: tensor 'blocks.0.fc1.bias': 46 NaN, 0 Inf, the first at [1]"
    assert lines[-2:] == [
        "gradtool: error: input contains NaN or Inf; nothing written",
        "  hint: use --nonfinite zero or --nonfinite propagate to continue",
    ]
    assert len(lines) == 5
    assert snapshot(tmp_path) == before
