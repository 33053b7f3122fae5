"""Tests that try every step of something: a sample of them always runs, and `pytest -m exhaustive` runs the rest."""

import itertools

import pytest
from hypothesis import settings

EXHAUSTIVE = pytest.mark.exhaustive
PARTS = pytest.mark.parametrize("part", ["sample", pytest.param("rest", marks=EXHAUSTIVE)])


def examples(count, part):
    """How many examples hypothesis tries: for a sample, a tenth of them, but ten at least."""
    return settings(max_examples=max(10, count // 10) if part == "sample" else count)


def is_sampled(number):
    """Whether the step with a number, from 1, is in the sample."""
    return number == 1 or number % 5 == 0


def numbers(part, last=None):
    """Of 1, 2, 3 and so on, the "sample", the "rest" or "all"; where the last one is known, it is in the sample too."""
    for number in itertools.count(1):
        if part == "sample" and last is not None and number >= last:
            yield last
            return
        if part == "all" or is_sampled(number) == (part == "sample"):
            yield number


def up_to(last, part):
    """The numbers of a part, of which there are so many in all."""
    return list(itertools.takewhile(lambda number: number <= last, numbers(part, last)))
