import inspect
import pickle
import re

import pytest
from support import gradtool as command

import gradtool
from gradtool.cli import app
from gradtool.errors import Problem

OPERATIONS = ["norm", "clip", "accumulate", "zero", "layernorm_backward", "recover"]


def options_of(name):
    """The options of a function, with their defaults."""
    parameters = inspect.signature(getattr(gradtool, name)).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


@pytest.mark.parametrize("name", OPERATIONS)
def test_command_and_function_have_the_same_options(name):
    shown = command(name.replace("_", "-"), "--help").stdout
    flags = {flag.removeprefix("no-").replace("-", "_") for flag in re.findall(r"(?m)^  (?:-\w, )?--([a-z-]+)", shown)}
    # The command prints, the function reports progress.
    assert flags - {"json", "quiet", "help"} == options_of(name).keys() - {"progress"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_command_and_function_have_the_same_arguments_and_defaults(monkeypatch, name):
    defaults, calls = options_of(name), []
    monkeypatch.setattr(gradtool, name, lambda *paths, **options: calls.append((paths, options)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        app([name.replace("_", "-"), *(["buffer"] if name == "accumulate" else []), "path", "--quiet"])
    [(paths, options)] = calls
    assert paths == (("buffer", ["path"]) if name == "accumulate" else (["path"],))
    assert options.pop("progress", None) is None
    assert {key: defaults[key] for key in options} == options


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_argument_is_documented(name):
    function = getattr(gradtool, name)
    for argument in inspect.signature(function).parameters:
        assert f"\n    {argument}: " in inspect.getdoc(function)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_misspelled_keyword_is_a_type_error(name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'thread'$"):
        getattr(gradtool, name)("path", thread=1)


def test_everything_public_can_be_imported_and_is_listed():
    for name in gradtool.__all__:
        assert getattr(gradtool, name) is not None
        assert name in dir(gradtool)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        gradtool.nope  # noqa: B018


def test_every_error_has_its_exit_code_and_a_standard_base():
    codes = {
        gradtool.NonFiniteError: (1, ArithmeticError),
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
