"""Patterns of the shell that are given as regular expressions."""

import re
import shlex
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import gradtool, write

from gradtool import BadInputError, UsageError, norm
from gradtool.errors import as_command
from gradtool.store.format.hints import shell_pattern_hint

NAMES = ("blocks.0.fc1.weight", "blocks.0.fc1.bias", "blocks.1.fc1.weight", "head")


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "x", dict.fromkeys(NAMES, np.ones(2, np.float32)))


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("*weight", '"*weight" is not a regular expression: nothing to repeat at position 0; {}".*weight"'),
        ("*.weight", r'"*.weight" is not a regular expression: nothing to repeat at position 0; {}".*\\.weight"'),
        ("?.weight", r'"?.weight" is not a regular expression: nothing to repeat at position 0; {}".\\.weight"'),
        ("b**fc1", '"b**fc1" is not a regular expression: multiple repeat at position 2; {}"b.*fc1"'),
        ("(", '"(" is not a regular expression: missing ), unterminated subpattern at position 0'),
    ],
)
def test_a_pattern_that_is_no_regular_expression_but_one_of_the_shell(path, pattern, line):
    for option in ("include", "exclude"):
        with pytest.raises(UsageError) as caught:
            norm(path, **{option: pattern})
        assert str(caught.value) == f"{option}=" + line.format(f"if it is a shell pattern, write {option}=")


@pytest.mark.parametrize(
    ("pattern", "regex"),
    [
        ("blocks*fc1*weight", '"blocks.*fc1.*weight"'),
        ("blocks.?.fc1.*", r'"blocks\\..\\.fc1\\..*"'),
        # It is one that matches nothing either.
        ("nope*x", None),
        ("nope", None),
        ("heads+", None),
    ],
)
def test_a_pattern_without_a_match_that_would_match_in_the_shell(path, pattern, regex):
    with pytest.raises(BadInputError) as caught:
        norm(path, include=pattern)
    write_it = "" if regex is None else f"; if it is a shell pattern, write include={regex}"
    assert str(caught.value) == f'include="{pattern}" matches no tensor name{write_it}'


@pytest.mark.parametrize("pattern", ["*weight", "blocks*fc1*weight", "blocks.?.fc1.*"])
def test_what_is_proposed_selects_what_the_shell_would(path, pattern):
    said = gradtool("norm", path, "--include", pattern).stderr
    proposed = shlex.split(said)[-2:]
    assert proposed[0] == "--include"
    done = gradtool("norm", path, *proposed)
    assert done.returncode == 0
    expected = [name for name in NAMES if "weight" in name] if "weight" in pattern else [*NAMES[:3]]
    assert f"tensors\t{len(expected)}\n" in done.stdout


@pytest.mark.parametrize("pattern", ["blocks.*.weight", "weight*", "fc1"])
def test_a_regular_expression_that_matches_gets_no_hint(path, pattern):
    assert norm(path, include=pattern).call.tensors > 0


def test_a_pattern_of_many_stars_costs_no_more_than_others():
    began = time.process_time()
    assert shell_pattern_hint("include", "a*" * 2000 + "b", ["a" * 4096]) is None
    assert time.process_time() - began < 60


@given(pattern=st.text(st.sampled_from("ab*?[]\\.()+"), max_size=12), names=st.lists(st.text(max_size=8), max_size=3))
def test_made_up_patterns_raise_nothing_and_what_is_proposed_is_a_regular_expression(pattern, names):
    for given_names in (names, None):
        said = shell_pattern_hint("include", pattern, given_names)
        if said:
            re.compile(shlex.split(as_command(said).partition("--include ")[2])[0])
