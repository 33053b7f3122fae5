import math

import numpy as np
import pytest
from layers import FORMS, assert_all, gradients, layer, reference, refused, two_layers
from support import gradtool, gradtool_json, write

from gradtool import UsageError, layernorm_backward


def test_several_files_are_done_in_one_run_each_with_its_own_layers(tmp_path):
    tensors = {name: layer((6, 9), prefix="n.", seed=seed) for seed, name in enumerate(("x", "y"))}
    paths = [write(tmp_path / name, one) for name, one in tensors.items()]
    result = layernorm_backward(paths)
    assert [(row.name, row.file) for row in result.per_layer] == [("n", str(path)) for path in paths]
    assert (result.call.files, result.output.files_written, result.layers, result.call.tensors) == (2, 2, 2, 10)
    for path, one in zip(paths, tensors.values(), strict=True):
        expected = reference({name[2:]: array for name, array in one.items()}, **FORMS["layernorm"])
        assert_all({name[2:]: array for name, array in gradients(path, "n.").items()}, expected, "F32", "F32")


def test_the_result_says_what_was_read_and_written(tmp_path):
    path = write(tmp_path / "x", layer((6, 9), types=("BF16", "F32", "F32"), prefix="n."))
    result = layernorm_backward(path, kind="rmsnorm", output=tmp_path / "out")
    assert (result.kind, result.invertible, result.layers, result.call.files, result.output.dry_run) == (
        "rmsnorm", False, 1, 1, False,
    )  # fmt: skip
    # Y_grad, X, scale and inv_std_dev.
    assert (result.call.tensors, result.call.elements, result.call.bytes) == (
        4,
        54 + 54 + 9 + 6,
        54 * 4 + 54 * 2 + 9 * 4 + 6 * 4,
    )
    assert (result.output.files_written, result.output.bytes_written) == (1, (tmp_path / "out").stat().st_size)
    (row,) = result.per_layer
    assert (row.name, row.file, row.shape, row.rows, row.columns) == ("n", str(path), (6, 9), 6, 9)
    assert row.bias_grad_norm is None


def test_the_command_says_and_does_the_same(tmp_path):
    path, other = two_layers(tmp_path), two_layers(tmp_path / "other")
    expected = layernorm_backward(other, kind="rmsnorm", prefix=["a.1"], scale_offset=1)
    data = gradtool_json("layernorm-backward", path, "--kind", "rmsnorm", "--prefix", "a.1", "--scale-offset", 1)[
        "data"
    ]
    assert path.read_bytes() == other.read_bytes()
    (row,), (expected_row,) = data["per_layer"], expected.per_layer
    assert (row["name"], row["shape"], row["x_grad_norm"]) == ("a.1", [4, 5], expected_row.x_grad_norm)
    assert (data["kind"], data["layers"], data["bytes_written"]) == ("rmsnorm", 1, expected.output.bytes_written)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "batchnorm"},
        {"kind": None},
        {"axis": 1.0},
        {"norm_eps": -1e-9},
        {"norm_eps": math.nan},
        {"norm_eps": math.inf},
        {"scale_offset": math.inf},
        {"scale_offset": "much"},
        {"nonfinite": "zero"},
        {"prefix": 5},
        {"output": "a", "output_dir": "b"},
        {"output": "a", "x_grad_in_place": True},
        {"threads": 0},
    ],
)
def test_arguments_that_make_no_sense_are_usage_errors_and_change_nothing(tmp_path, arguments):
    two_layers(tmp_path)
    refused(tmp_path, UsageError, **arguments)


def test_bad_input_and_nan_on_the_command_line_have_their_exit_codes(tmp_path):
    path = two_layers(tmp_path)
    done = gradtool("layernorm-backward", path, "--axis", 5)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"gradtool: error: {path}: tensor 'a.0.X': shape [6, 9] has no axis 5\n"
    write(tmp_path / "x", layer((6, 9)) | {"scale": np.full(9, math.nan)})
    done = gradtool("layernorm-backward", path)
    assert done.returncode == 1
    assert f"{path}: tensor 'scale': 9 NaN, 0 Inf, the first at [0]" in done.stderr
