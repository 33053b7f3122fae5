import inspect
import math
import pickle
import re

import numpy as np
import pytest
from support import encode, write
from support import gradtool as command

import gradtool
from gradtool.cli import COMMANDS
from gradtool.command import parse
from gradtool.errors import Problem

OPERATIONS = [
    "norm", "diff", "digest", "check", "info", "clip", "accumulate", "zero", "layernorm_backward", "recover", "doctor",
]  # fmt: skip
# The command line, and the arguments of the function, of those that take anything but paths.
ARGUMENTS = {
    "diff": (["a", "b"], ("a", "b")),
    "doctor": (["path"], ("path",)),
}


def options_of(name):
    """The options of a function, with their defaults."""
    parameters = inspect.signature(getattr(gradtool, name)).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", OPERATIONS)
def test_command_and_function_have_the_same_options(name):
    shown = command(name.replace("_", "-"), "--help").stdout
    flags = {flag.replace("-", "_") for flag in re.findall(r"(?m)^  (?:-\w, )?--([a-z0-9-]+)", shown)}
    # The command prints, the function reports progress.
    assert flags - {"format", "columns", "json", "quiet", "verbose", "help"} == options_of(name).keys() - {"progress"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_command_and_function_have_the_same_arguments_and_defaults(name):
    on_command_line, arguments = ARGUMENTS.get(name, (["path"], (["path"],)))
    request = parse(COMMANDS, [name.replace("_", "-"), *on_command_line, "--quiet"])
    assert request.command == name.replace("_", "-")
    assert request.display.quiet
    assert vars(request.options) == vars(getattr(gradtool, name).options(*arguments))


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_argument_is_documented(name):
    function = getattr(gradtool, name)
    for argument in inspect.signature(function).parameters:
        assert f"\n    {argument}: " in inspect.getdoc(function)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_misspelled_keyword_is_a_type_error(name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'thread'$"):
        getattr(gradtool, name)(*ARGUMENTS.get(name, (["path"],))[0], thread=1)


def test_docstrings_name_arguments_and_not_options():
    for name in OPERATIONS:
        assert "--" not in getattr(gradtool, name).__doc__


def test_everything_public_can_be_imported_and_is_listed():
    for name in gradtool.__all__:
        assert getattr(gradtool, name) is not None
        assert name in dir(gradtool)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        gradtool.nope  # noqa: B018


def test_every_error_has_its_exit_code_and_a_standard_base():
    codes = {
        gradtool.NonFiniteError: (1, ArithmeticError),
        gradtool.TooFewError: (1, ValueError),
        gradtool.UsageError: (2, ValueError),
        gradtool.BadInputError: (3, ValueError),
        gradtool.BackendUnavailableError: (4, RuntimeError),
        gradtool.SystemRefusedError: (5, OSError),
    }
    for error, (code, base) in codes.items():
        assert error.exit_code == code
        assert issubclass(error, base)
        assert issubclass(error, gradtool.GradtoolError)


def test_errors_can_be_handed_from_process_to_process():
    for error in (
        gradtool.BadInputError("is wrong", file="f", tensor="t"),
        gradtool.NonFiniteError("nothing was written", [Problem("nonfinite", "1 NaN", "f", "t"), Problem("x", "y")]),
    ):
        copied = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
        assert (type(copied), str(copied), copied.problems) == (type(error), str(error), error.problems)
    assert str(error) == "nothing was written; f: tensor 't': 1 NaN (and 1 more)"


@pytest.mark.parametrize("given", [{"a": np.ones(2)}, np.ones(2), [np.ones(2)], 5, None], ids=str)
def test_arrays_in_place_of_paths_are_told_how_to_be_saved(given):
    with pytest.raises(gradtool.UsageError, match=r"not arrays .* save .* with safetensors\.numpy\.save_file"):
        gradtool.norm(given)


def test_progress_must_be_a_function_or_a_switch(tmp_path):
    path = write(tmp_path / "x", {"a": encode([1], "F32")})
    with pytest.raises(gradtool.UsageError, match=r"^progress must be a function, True or False, not 3$"):
        gradtool.norm(path, progress=3)


def test_a_buffer_that_is_an_array_is_told_so_without_its_values():
    with pytest.raises(gradtool.UsageError, match=r"^expected paths of safetensors files, not arrays"):
        gradtool.accumulate("x", into={"a": np.ones(2)})


def test_an_open_file_is_no_path_and_is_not_read(tmp_path):
    path = write(tmp_path / "x", {"a": encode([3, 4], "F32")})
    with path.open("rb") as file:
        for given in (file, [file]):
            with pytest.raises(gradtool.UsageError, match="not open files; pass the name of the file$"):
                gradtool.norm(given)
        assert file.tell() == 0


def test_strings_of_numpy_are_paths(tmp_path):
    path = write(tmp_path / "x", {"a": encode([3, 4], "F32")})
    assert gradtool.norm(np.str_(path)).norm == gradtool.norm([np.str_(path)]).norm == 5


def test_paths_that_a_shell_would_expand_are_to_be_expanded_in_python(tmp_path):
    write(tmp_path / "x", {"a": encode([3, 4], "F32")})
    with pytest.raises(gradtool.BadInputError, match=r"no such file.*; .*Path\.expanduser"):
        gradtool.norm("~/x")
    with pytest.raises(gradtool.BadInputError, match=r"no such file.*; .*glob"):
        gradtool.norm(tmp_path / "*")


def test_warnings_of_functions_speak_python(tmp_path):
    path = write(tmp_path / "x", {"a": encode([3, 4], "F32")})
    (warning,) = gradtool.norm(path, threads=5000).call.warnings
    assert warning.message.startswith("threads=5000 exceeds the limit")
    assert warning.as_command().message.startswith("--threads 5000 exceeds the limit")


def test_errors_of_functions_speak_python_and_those_of_commands_do_not(tmp_path):
    path = write(tmp_path / "x", {"a": encode([math.nan], "F32")})
    with pytest.raises(gradtool.NonFiniteError) as caught:
        gradtool.clip(path, max_norm=1)
    assert caught.value.summary == caught.value.args[0]
    assert f"{path}: tensor 'a': 1 NaN, 0 Inf, the first at [0]" in str(caught.value)
    assert 'nonfinite="zero"' in str(caught.value)
    *_, hint = command("clip", path, "--max-norm", "1").stderr.splitlines()
    assert hint.startswith("  hint: ")
    assert "--nonfinite zero" in hint
    with pytest.raises(gradtool.UsageError, match=r"^threads must be at least 1, not 0$"):
        gradtool.clip(path, max_norm=1, threads=0)


def test_a_result_is_shown_in_one_line_with_what_counts(tmp_path):
    path = write(tmp_path / "x", {"a": encode([3, 4], "F32"), "b": encode([0], "F32")})
    assert repr(gradtool.norm(path, per_tensor=True)) == (
        "NormResult(norm=5.0, max_abs=4.0, files=1, tensors=2, per_tensor=<2 rows>)"
    )
    assert repr(gradtool.norm(path, by_file=True)).endswith("per_file=<1 row>)")
    assert repr(gradtool.clip(path, max_norm=9)) == (
        "ClipResult(norm_before=5.0, norm_after=5.0, coef=1.0, clipped=False, files=1, tensors=2)"
    ).replace("coef=1.0", f"coef={gradtool.clip(path, max_norm=9).coef}")


def test_functions_can_be_pickled():
    for name in OPERATIONS:
        function = getattr(gradtool, name)
        assert pickle.loads(pickle.dumps(function)) is function  # noqa: S301 - our own


def test_progress_true_shows_a_bar_on_a_terminal_only(tmp_path, capsys):
    path = write(tmp_path / "x", {"a": np.ones(300_000, np.float32)})
    assert gradtool.norm(path, progress=True).norm == gradtool.norm(path, progress=False).norm
    assert capsys.readouterr() == ("", "")


def test_what_was_written_is_named_as_the_caller_did(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(tmp_path / name, {name: encode([3, 4], "F32")})
    assert gradtool.clip(["a", "b"], max_norm=1).output.wrote == ("a", "b")
    assert gradtool.clip(["a", "b"], max_norm=9).output.wrote == ()
    assert gradtool.clip(["a", "b"], max_norm=0.5, dry_run=True).output.wrote == ()
    assert gradtool.clip(["a", "b"], max_norm=9, output_dir="new").output.wrote == ("new",)
    assert gradtool.clip("a", max_norm=9, output="c").output.wrote == ("c",)
    assert gradtool.accumulate("a", output="d").output.wrote == ("d",)
    assert gradtool.accumulate("d", into="a", write="inplace").output.wrote == ("a",)
    assert gradtool.zero(["b", "c"]).output.wrote == ("b", "c")
