import inspect
import pickle

import pytest

import gradtool
from gradtool import cli
from gradtool.errors import Problem

# What only one of the twins has: the command prints, the function reports progress.
OPERATIONS = ["norm", "clip", "accumulate", "zero", "layernorm_backward"]
COMMAND_ONLY = {"json", "quiet"}
FUNCTION_ONLY = {"progress"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_command_and_function_have_the_same_arguments_and_defaults(name):
    def defaults(function, leave_out):
        parameters = inspect.signature(function).parameters.values()
        return {one.name: one.default or None for one in parameters if one.name not in leave_out}

    assert defaults(getattr(cli, name), COMMAND_ONLY) == defaults(getattr(gradtool, name), FUNCTION_ONLY)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_argument_is_documented(name):
    function = getattr(gradtool, name)
    for argument in inspect.signature(function).parameters:
        assert f"    {argument}: " in inspect.getdoc(function)


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
