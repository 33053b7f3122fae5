"""What a user may not do: the error names the file or the folder that refuses, and what may not be done to it."""

import pytest
from neighbours import folder_of, grads, state
from users import ALICE, run_as

ENTERED = "cannot enter this folder"
LISTED = "cannot list this folder"
WRITTEN = "cannot write to this folder"


@pytest.fixture
def place(root):
    """Folders of another user, each with a file: to be entered by nobody else, not to be listed, not to be written.

    In a "blind" one, everybody may write.
    """
    for name, mode in (("shut", 0o700), ("unlisted", 0o711), ("blind", 0o733), ("fixed", 0o755), ("open", 0o777)):
        grads(0, folder_of(0, root / name, mode) / "x.safetensors", 0o666 if name == "blind" else 0o644)
    (root / "shut/in").mkdir()
    grads(0, root / "open/sealed.safetensors", 0o600, seed=2)
    grads(0, root / "open/fixed.safetensors", 0o644, seed=3)
    return root


FOLDERS = ("shut", "unlisted", "blind", "fixed", "open")


def files_of(place):
    return {path: one for path, one in state(place).items() if not path.is_dir()}


# By the arguments: the file or folder that is named, and what may not be done to it.
REFUSED = {
    "norm open/sealed.safetensors": ("open/sealed.safetensors", "cannot read this file"),
    "norm open": ("open/sealed.safetensors", "cannot read this file"),
    "norm shut/x.safetensors": ("shut", ENTERED),
    "norm shut/in/missing": ("shut", ENTERED),
    "norm shut/in/": ("shut", ENTERED),
    "norm shut": ("shut", ENTERED),
    "norm unlisted": ("unlisted", LISTED),
    "norm --files-from shut/list": ("shut", ENTERED),
    "clip --max-norm 1 shut/x.safetensors": ("shut", ENTERED),
    "clip --max-norm 1 fixed/x.safetensors": ("fixed", WRITTEN),
    "clip --max-norm 1 fixed/x.safetensors --write inplace": ("fixed", WRITTEN),
    "clip --max-norm 1 unlisted/x.safetensors": ("unlisted", LISTED),
    # Who cannot see other runs must not write.
    "clip --max-norm 1 blind/x.safetensors --no-fsync --write inplace": ("blind", LISTED),
    "clip --max-norm 1 open/x.safetensors --no-fsync --output blind/new": ("blind", LISTED),
    "zero blind/x.safetensors --no-fsync": ("blind", LISTED),
    "clip --max-norm 1 open/fixed.safetensors --write inplace": (
        "open/fixed.safetensors",
        "cannot write to this file",
    ),
    "clip --max-norm 1 open/x.safetensors --output fixed/y": ("fixed", WRITTEN),
    "clip --max-norm 1 open/x.safetensors --output shut/y": ("shut", ENTERED),
    "clip --max-norm 1 open/x.safetensors --output shut/in/y": ("shut", ENTERED),
    "clip --max-norm 1 open/x.safetensors --output-dir fixed": ("fixed", WRITTEN),
    "clip --max-norm 1 open/x.safetensors --output-dir fixed/new/deeper": ("fixed", WRITTEN),
    "clip --max-norm 1 open/x.safetensors --output-dir shut/in/new": ("shut", ENTERED),
    "accumulate open/x.safetensors --into fixed/x.safetensors": ("fixed", WRITTEN),
    "accumulate open/x.safetensors --into shut/x.safetensors": ("shut", ENTERED),
    "accumulate open/x.safetensors --output fixed/new": ("fixed", WRITTEN),
    "accumulate open/x.safetensors --output shut/new": ("shut", ENTERED),
    "zero fixed/x.safetensors": ("fixed", WRITTEN),
    "recover shut/in": ("shut", ENTERED),
    "recover unlisted": ("unlisted", LISTED),
    "recover unlisted/x.safetensors": ("unlisted", LISTED),
    "recover blind/x.safetensors": ("blind", LISTED),
}


def advice_for(call, culprit):
    """The option of this call that writes elsewhere, for those that only write there."""
    command, *words = call.split()
    if command in ("norm", "recover") or culprit == "shut":
        return ""
    for name in ("--output", "--output-dir"):
        if name in words:
            return f", or use another folder for {name}"
    return f", or use --output {'instead of --write inplace' if 'inplace' in words else 'to write to another folder'}"


@pytest.mark.parametrize("call", REFUSED)
def test_what_is_refused_is_named_and_nothing_is_changed(place, call):
    culprit, what = REFUSED[call]
    before = files_of(place)
    # Text, because a Path drops the slash at its end.
    words = [f"{place}/{word}" if word.partition("/")[0] in FOLDERS else word for word in call.split()]
    answer = run_as(ALICE, *words)
    assert (answer.code, answer.out) == (5, "")
    line = f"{place / culprit}: Permission denied: {what}\n  hint: check its permissions{advice_for(call, culprit)}"
    assert answer.err == f"gradtool: error: {line}\n"
    assert files_of(place) == before


def test_a_link_into_a_folder_that_may_not_be_entered_names_that_folder(place):
    (place / "open/link.safetensors").symlink_to(place / "shut/x.safetensors")
    answer = run_as(ALICE, "norm", place / "open/link.safetensors")
    assert answer.err == f"gradtool: error: {place}/shut: Permission denied: {ENTERED}\n  hint: check its permissions\n"


def test_what_may_be_read_is_read_though_its_folder_may_not_be_listed_or_written(place):
    for name in ("unlisted", "fixed"):
        assert run_as(ALICE, "norm", place / name / "x.safetensors").code == 0
