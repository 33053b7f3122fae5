import pytest

from gradtool import checks
from gradtool.errors import UsageError


def test_a_path_that_is_none_is_a_usage_error():
    assert checks.path("a path", b"x") == "x"
    for value in ("", b"", "a\0b", "a\ud800", 5, None):
        with pytest.raises(UsageError, match="a path"):
            checks.path("a path", value)
