"""What the pages for contributors cite in backticks is there: every file, and every dotted name of the package."""

import functools
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import gradtool

ROOT = Path(__file__).parent.parent
PAGES = [page for page in (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md") if page.exists()]
SUFFIXES = (".py", ".md", ".toml", ".c", ".h", ".cuh")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


def cited(page):
    """The words in backticks, those in blocks left out."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.split(r"[^\w./*-]+", span) if word}


def is_path(word):
    return "/" in word.strip("/-") or word.endswith((*SUFFIXES, "/"))


def exists(path):
    """Whether there is such a path in the repository, the package or its operations; NAME stands for any."""
    pattern = path.replace("NAME", "*").strip("/")
    return any(any(base.glob(pattern)) for base in (ROOT, ROOT / "gradtool", ROOT / "gradtool" / "ops"))


def modules():
    found = pkgutil.walk_packages(gradtool.__path__, "gradtool.")
    return [gradtool, *(importlib.import_module(one.name) for one in found)]


def starts(first):
    """What the first part of a dotted name may be: a module, by its full or its last name, or a name in a module."""
    for module in modules():
        if module.__name__.rpartition(".")[2] == first:
            yield module
        if hasattr(module, first):
            yield getattr(module, first)
    if importlib.util.find_spec(first):
        yield importlib.import_module(first)


def part_of(value, name):
    # A field without a default is only an annotation of its class.
    return getattr(value, name, getattr(value, "__annotations__", {}).get(name))


def resolves(name):
    first, *rest = name.split(".")
    return any(functools.reduce(part_of, rest, value) is not None for value in starts(first))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_is_cited_exists(page):
    paths = sorted(filter(is_path, cited(page)))
    assert paths
    assert [path for path in paths if not exists(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_that_is_cited_exists(page):
    names = sorted(word for word in cited(page) if NAME.fullmatch(word) and not is_path(word))
    assert [name for name in names if not resolves(name)] == []
