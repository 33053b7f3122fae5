import numpy as np
import pytest

from gradtool import checks
from gradtool.errors import UsageError


def test_a_path_that_is_none_is_a_usage_error():
    assert checks.path("a path", b"x") == "x"
    for value in ("", b"", "a\0b", "a\ud800", 5, None):
        with pytest.raises(UsageError, match="a path"):
            checks.path("a path", value)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ("5GB", 5 * 10**9), ("500MB", 500 * 10**6), ("1GiB", 2**30), ("2 kib", 2048), ("1.5tb", 1500 * 10**9),
        ("10B", 10), ("123", 123), (7, 7), (np.int64(9), 9), ("999999999999999TiB", 999_999_999_999_999 * 2**40),
    ],
)  # fmt: skip
def test_a_size_may_have_a_unit(value, nbytes):
    assert checks.size("--size", value) == pytest.approx(nbytes, rel=1e-15)


@pytest.mark.parametrize(
    "value", ["", "GB", "5G", "5 GB ", "-1", "+1", "0", "0GB", "0.5", "1e9", "5XB", "٣", 0, -1, 1.5]
)
def test_a_size_that_is_none_is_a_usage_error(value):
    with pytest.raises(UsageError, match="^--size must be a size, such as 5GB, 500MB, 1GiB or a number of bytes, not"):
        checks.size("--size", value)


def test_a_flag_that_is_neither_true_nor_false_is_a_usage_error():
    for value in (True, 1, np.bool_(True)):
        assert (checks.flag("--quiet", value), checks.flag("--quiet", type(value)(0))) == (True, False)
    for value in ("no", "", None, 2, [], np.array([1.0, 2.0])):
        with pytest.raises(UsageError, match="--quiet must be True or False, not "):
            checks.flag("--quiet", value)
