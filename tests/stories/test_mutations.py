"""The catalogue of defects fits the package as it is."""

import importlib.util
import shutil
from pathlib import Path

import pytest

import gradtool

_SPEC = importlib.util.spec_from_file_location("mutations", Path(__file__).with_name("mutations.py"))
mutations = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(mutations)

PACKAGE = Path(gradtool.__file__).parent
ALL = mutations.PLANTED + mutations.PAST


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


def test_a_defect_that_fits_no_more_is_an_error(tmp_path):
    package = copy_of(ALL[0], tmp_path)
    mutations.plant(ALL[0], package)
    with pytest.raises(ValueError, match=ALL[0].name):
        mutations.plant(ALL[0], package)


def test_names_are_unique_and_what_goes_wrong_is_a_sentence():
    assert len({mutation.name for mutation in ALL}) == len(ALL)
    assert all(mutation.why.endswith(".") for mutation in ALL)
