"""The catalogue of defects fits the package as it is."""

import shutil
import subprocess
import sys
from pathlib import Path

import mutations
import pytest

HERE, PACKAGE = Path(__file__).parent, mutations.PACKAGE
ALL = mutations.PLANTED + mutations.PAST
KEPT = [mutation for mutation in ALL if (HERE / "found" / f"{mutation.name}.json").exists()]
# In a process of its own, which imports the package with the defect.
PLAY = """
import pathlib, sys
import gradtool, oracle, story
assert not pathlib.Path(gradtool.__file__).is_relative_to(sys.argv[2])
print(oracle.failure_of(story.from_json(pathlib.Path(sys.argv[1]).read_text())))
"""


def copy_of(mutation, folder):
    """The files that a defect changes, as they are."""
    for edit in mutation.edits:
        (folder / edit.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / edit.file, folder / edit.file)
    return folder


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_every_defect_can_be_planted_and_compiles(tmp_path, mutation):
    package = copy_of(mutation, tmp_path)
    mutations.plant(mutation, package)
    for edit in mutation.edits:
        text = (package / edit.file).read_text()
        assert text != (PACKAGE / edit.file).read_text()
        compile(text, edit.file, "exec")


@pytest.mark.skipif(sys.platform != "linux", reason="the calls of Linux are simulated")
@pytest.mark.parametrize("mutation", KEPT, ids=lambda mutation: mutation.name)
def test_a_kept_story_finds_the_defect_that_it_is_named_after(tmp_path, mutation):
    kept = HERE / "found" / f"{mutation.name}.json"
    with mutations.planted(mutation) as environment:
        environment["PYTHONPATH"] += f":{HERE}:{HERE.parent}"
        command = [sys.executable, "-c", PLAY, kept, PACKAGE.parent]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() != "None"


def test_a_defect_that_fits_no_more_is_an_error(tmp_path):
    package = copy_of(ALL[0], tmp_path)
    mutations.plant(ALL[0], package)
    with pytest.raises(ValueError, match=ALL[0].name):
        mutations.plant(ALL[0], package)


def test_names_are_unique_and_what_goes_wrong_is_a_sentence():
    assert len({mutation.name for mutation in ALL}) == len(ALL)
    assert all(mutation.why.endswith(".") for mutation in ALL)
