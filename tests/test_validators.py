import numpy as np
import pytest

from gradtool import validators
from gradtool.errors import UsageError


def test_a_path_that_is_none_is_a_usage_error():
    assert validators.path("a path", b"x") == "x"
    for value in ("", b"", "a\0b", "a\ud800", 5, None):
        with pytest.raises(UsageError, match="a path"):
            validators.path("a path", value)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        ("5GB", 5 * 10**9), ("500MB", 500 * 10**6), ("1GiB", 2**30), ("2 kib", 2048), ("1.5tb", 1500 * 10**9),
        ("10B", 10), ("123", 123), (7, 7), (np.int64(9), 9), ("999999999999999TiB", 999_999_999_999_999 * 2**40),
    ],
)  # fmt: skip
def test_a_size_may_have_a_unit(value, nbytes):
    assert validators.size("--size", value) == pytest.approx(nbytes, rel=1e-15)


@pytest.mark.parametrize(
    "value", ["", "GB", "5G", "5 GB ", "-1", "+1", "0", "0GB", "0.5", "1e9", "5XB", "٣", 0, -1, 1.5]
)
def test_a_size_that_is_none_is_a_usage_error(value):
    with pytest.raises(UsageError, match="^--size must be a size, such as 5GB, 500MB, 1GiB or a number of bytes, not"):
        validators.size("--size", value)


@pytest.mark.parametrize("text", ["5", "5.0", "5e0", " 5", "+5", "05"])
def test_a_number_of_the_command_line_is_a_text(text):
    assert validators.number_from("--x", text) == 5
    assert validators.numbers_from("--x", [text, "1"]) == [5, 1]
    if text.strip(" +").isdigit():
        assert validators.whole_from("--x", text) == 5


@pytest.mark.parametrize("value", ["5", "", np.str_("5"), b"5", True, None, [5]])
def test_a_text_is_no_number_in_python(value):
    with pytest.raises(UsageError, match="^x must be a number, not "):
        validators.number("x", value)
    with pytest.raises(UsageError, match="^x must be a whole number, not "):
        validators.whole("x", value)


@pytest.mark.parametrize("text", ["٣", "\uff13", "²", "1_0", "", "0x1", "1,5", "९.5"])
def test_digits_of_other_scripts_and_what_only_python_reads_are_no_numbers(text):
    with pytest.raises(UsageError, match="^--x must be a number, not "):
        validators.number_from("--x", text)
    with pytest.raises(UsageError, match="^--x must be a whole number, not "):
        validators.whole_from("--x", text)


def test_numbers_are_bounded():
    nines = "9" * 5000
    assert validators.number_from("--x", nines) == np.inf
    for value in (10**5000, -(10**5000)):
        with pytest.raises(UsageError, match="^--x is beyond the range of float64$"):
            validators.number("--x", value)
    assert validators.whole_from("--x", str(2**63 - 1)) == 2**63 - 1
    for value in (2**63, -(2**63), 10**5000, int(nines[:4300])):
        with pytest.raises(UsageError, match=r"^--x must be a whole number below 2\^63$"):
            validators.whole("--x", value)
    with pytest.raises(UsageError, match=r"^--x must be a whole number below 2\^63$"):
        validators.whole_from("--x", nines[:4300])
    with pytest.raises(UsageError, match="^--reduce must be"):
        validators.reduction("--reduce", f"trimmed={'0' * 5000}1")


def test_a_flag_that_is_neither_true_nor_false_is_a_usage_error():
    for value in (True, 1, np.bool_(True)):
        assert (validators.flag("--quiet", value), validators.flag("--quiet", type(value)(0))) == (True, False)
    for value in ("no", "", None, 2, [], np.array([1.0, 2.0])):
        with pytest.raises(UsageError, match="--quiet must be True or False, not "):
            validators.flag("--quiet", value)
