import numpy as np
import pytest

from gradtool import checks
from gradtool.errors import UsageError


def test_a_path_that_is_none_is_a_usage_error():
    assert checks.path("a path", b"x") == "x"
    for value in ("", b"", "a\0b", "a\ud800", 5, None):
        with pytest.raises(UsageError, match="a path"):
            checks.path("a path", value)


def test_a_flag_that_is_neither_true_nor_false_is_a_usage_error():
    assert checks.flag("--quiet", 1) is True
    with pytest.raises(UsageError, match="--quiet must be true or false, not array"):
        checks.flag("--quiet", np.array([1.0, 2.0]))
