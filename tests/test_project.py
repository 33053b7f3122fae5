"""What is written in several files of the project agrees, and what the workflows run is pinned."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import gradtool

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
USES = re.compile(r"uses: (\S+)(.*)")
HASHED = re.compile(r"[\w.-]+(?:/[\w.-]+)+@[0-9a-f]{40}")
LOCAL = re.compile(r"\./\.github/workflows/[\w.-]+\.yml")

CHANGELOG = """# Changelog

## 0.3.0 (unreleased)

- Next.

## 0.2.0 (2026-01-31)

- New.

## 0.1.0 (2026-01-01)
"""


@pytest.fixture
def notes():
    spec = importlib.util.spec_from_file_location("notes", ROOT / ".ci" / "notes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_citation_is_of_this_version_of_this_repository():
    citation = dict(re.findall(r"^([\w-]+): (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert citation["version"] == gradtool.__version__
    assert citation["repository-code"] == REPOSITORY
    assert (citation["title"], citation["license"]) == (PROJECT["name"], PROJECT["license"])
    assert citation["abstract"] == PROJECT["description"]


def test_all_pages_name_the_same_repository():
    owner = REPOSITORY.removeprefix("https://github.com/")
    assert re.findall(r"--repo (\S+)", (ROOT / "SECURITY.md").read_text()) == [owner]
    assert [url for url in PROJECT["urls"].values() if not url.startswith(REPOSITORY)] == []


def test_the_versions_of_python_are_the_same_everywhere():
    prefix = "Programming Language :: Python :: 3."
    versions = ["3." + one.removeprefix(prefix) for one in PROJECT["classifiers"] if one.startswith(prefix)]
    tested = re.search(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text())[1]
    wheels = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    checked = re.search(r"for version in (.*); do", (ROOT / ".ci" / "release").read_text())[1]
    assert versions[0] == PROJECT["requires-python"].removeprefix(">=")
    assert re.findall(r'"(.*?)"', tested) == versions
    assert [f"3.{number}" for number in re.findall(r"cp3(\d+)-", wheels)] == versions
    assert checked.split() == versions


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_by_its_hash_and_says_which_version_that_is(workflow):
    for action, comment in USES.findall(workflow.read_text()):
        assert LOCAL.fullmatch(action) or HASHED.fullmatch(action), action
        assert LOCAL.fullmatch(action) or re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_a_job_says_what_else_it_may(workflow):
    top = workflow.read_text().partition("\njobs:")[0]
    assert "permissions:\n  contents: read\n" in top
    assert "write" not in re.sub(r"#.*", "", top)
    assert "secrets." not in workflow.read_text()


def test_the_notes_of_a_release_are_its_part_of_the_changelog(notes):
    assert notes.notes(CHANGELOG, "0.2.0") == "- New."


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.3.0", "the heading of 0.3.0 says (unreleased) and not a date"),
        ("0.1.0", "says nothing about 0.1.0"),
        ("0.2", "has no section '## 0.2 (YYYY-MM-DD)'"),
    ],
)
def test_a_version_without_date_or_notes_is_not_released(notes, version, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        notes.notes(CHANGELOG, version)


@pytest.mark.parametrize("arguments", [[], ["v9.9.9"], [gradtool.__version__]])
def test_a_tag_that_is_not_the_version_is_not_released(notes, monkeypatch, arguments):
    monkeypatch.setattr("sys.argv", ["notes.py", *arguments])
    with pytest.raises(ValueError, match=f"the version is {re.escape(gradtool.__version__)}"):
        notes.main()
