"""Paths that lead nowhere: what is said, and what is proposed instead."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import gradtool, snapshot, write, write_index

import gradtool as api
from gradtool import BadInputError
from gradtool.store.format import filetypes
from gradtool.store.format.hints import no_such_file, no_such_folder

ONES = np.ones(2, np.float32)


def said_of(problem):
    return "; ".join(filter(None, (problem.message, problem.hint)))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a few files, which is the current one."""
    for name in ("micro_0", "micro_1", "buffer"):
        write(tmp_path / "data" / f"{name}.safetensors", {"a": ONES})
    write_index(tmp_path / "sharded", {"1.safetensors": {"a": ONES}})
    (tmp_path / "text").write_text("nothing")
    (tmp_path / "dangling").symlink_to("../blobs/abc")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# By what is named: what is said.
PATHS = {
    "nothing.safetensors": "no such file",
    "data/micro_0.safetensor": "no such file; did you mean data/micro_0.safetensors?",
    "data/mciro_0.safetensors": "no such file; did you mean data/micro_0.safetensors?",
    "data/Buffer.safetensors": "no such file; did you mean data/buffer.safetensors?",
    "data/buffer": "no such file; did you mean data/buffer.safetensors?",
    "data//bufer.safetensors": "no such file; did you mean data/buffer.safetensors?",
    "./txt": "no such file; did you mean ./text?",
    "sharded/model.safetensors": "no such file; did you mean sharded/model.safetensors.index.json?",
    # Another rank or shard is another file, not a slip.
    "data/micro_7.safetensors": "no such file",
    "data/micro_10.safetensors": "no such file",
    "dta/micro_0.safetensors": "no such file: there is no folder dta; did you mean data?",
    "~nothing": "no such file",
    "elsewhere/x": "no such file: there is no folder elsewhere",
    "elsewhere/deeper/x": "no such file: there is no folder elsewhere",
    "/no/such/folder/x": "no such file: there is no folder /no",
    "text/x": "no such file: text is not a folder",
    "dangling": "is a symbolic link to ../blobs/abc, which does not exist; restore that file or correct the link",
    "dangling/x": "no such file: dangling is a symbolic link to ../blobs/abc, which does not exist; "
    "restore that file or correct the link",
    "~/x.safetensors": "no such file: ~ is not expanded; use Path.expanduser",
    "data/*.safetensors": "no such file: patterns are not expanded; use glob.glob",
    "data/micro_[01].safetensors": "no such file: patterns are not expanded; use glob.glob",
    "data/rank*.safetensors": "no such file: nothing matches the pattern",
    "dat?/x": "no such file: nothing matches the pattern",
    "'text'": "no such file, but text exists; remove the quotes that are part of the name",
    '"data/buffer.safetensors"': "no such file, but data/buffer.safetensors exists; "
    "remove the quotes that are part of the name",
    "text\n": "no such file, but text exists; remove the white space around the name",
    " text": "no such file, but text exists; remove the white space around the name",
    "text\r": "no such file, but text exists; "
    "remove the carriage return, which ends lines on Windows, with tr -d '\\r'",
    "data\\buffer.safetensors": "no such file, but data/buffer.safetensors exists; separate folders by /",
    "s3://bucket/x.safetensors": "is a URL, which gradtool cannot read; download the file (such as with aws s3 cp) or "
    "mount the storage first",
    "gs://bucket/x": "is a URL, which gradtool cannot read; download the file (such as with gcloud storage cp) or "
    "mount the storage first",
    "hf://org/repo": "is a URL, which gradtool cannot read; download the file (such as with hf download) or "
    "mount the storage first",
    "https://host/x": "is a URL, which gradtool cannot read; download the file (such as with curl -L) or "
    "mount the storage first",
    "az://x/y": "is a URL, which gradtool cannot read; download the file or mount the storage first",
    "file:///tmp/x": "is a URL, not a path; remove file://",
    "text/": "no such folder, but a file of that name; remove the slash at the end",
    "datta/": "no such folder; did you mean data?",
    "nowhere/": "no such folder",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_leads_nowhere_says_why(here, path):
    before = snapshot(here)
    for call in (api.norm, lambda one: api.clip(one, max_norm=1), api.zero, api.info, api.check):
        with pytest.raises(BadInputError) as caught:
            call(path)
        (problem,) = caught.value.problems
        assert (said_of(problem), problem.file, problem.code) == (PATHS[path], path, "missing-file")
    assert snapshot(here) == before


@pytest.mark.usefixtures("here")
def test_the_command_prints_the_hint_below():
    done = gradtool("norm", "data/bufer.safetensors")
    assert (done.returncode, done.stdout) == (3, "")
    line = "gradtool: error: data/bufer.safetensors: no such file\n"
    assert done.stderr == f"{line}  hint: did you mean data/buffer.safetensors?\n"


@pytest.mark.usefixtures("here")
def test_a_file_that_is_called_like_a_pattern_or_a_url_is_read():
    for name in ("*.safetensors", "a?", "~", "'q'", " x", "s3:/x"):
        assert api.norm(write(Path(name), {"a": ONES})).call.tensors == 1
    assert api.norm("s3://x").call.tensors == 1
    assert api.recover("s3://x").per_run == ()


def test_an_entry_of_a_list_is_named_with_its_number(here):
    (here / "list").write_text("data/micro_0.safetensors\n\ndata/bufer.safetensors\n")
    with pytest.raises(BadInputError) as caught:
        api.norm("data/micro_1.safetensors", files_from="list")
    assert str(caught.value) == (
        "data/bufer.safetensors: no such file (entry 2 of list); did you mean data/buffer.safetensors?"
    )


def test_an_entry_that_the_shell_did_not_expand_is_told_in_the_words_of_the_caller(here):
    (here / "list").write_text("~/x.safetensors\n")
    with pytest.raises(BadInputError) as caught:
        api.norm(files_from="list")
    assert said_of(caught.value.problems[0]) == "no such file: ~ is not expanded (entry 1 of list); use Path.expanduser"
    done = gradtool("norm", "--files-from", "list", cwd=here)
    assert done.stderr.splitlines() == [
        "gradtool: error: ~/x.safetensors: no such file: the shell did not expand the ~ (entry 1 of list)",
        "  hint: remove the quotes around it, or write $HOME",
    ]


def test_a_broken_link_in_a_set_is_named(here):
    (here / "data/z.safetensors").symlink_to("gone")
    for path in ("data", "data/"):
        with pytest.raises(BadInputError) as caught:
            api.norm(path)
        said = "is a symbolic link to gone, which does not exist; restore that file or correct the link"
        assert str(caught.value) == f"data/z.safetensors: {said}"
    (here / "sharded/1.safetensors").unlink()
    (here / "sharded/1.safetensors").symlink_to("../blobs/1")
    with pytest.raises(BadInputError, match=r"the shard 1.safetensors, a symbolic link to a file, which does not"):
        api.norm("sharded")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("bufer.safetensors", "no such file; use output to write the sum alone"),
        (
            "data/bufer.safetensors",
            "no such file; did you mean data/buffer.safetensors? Or use output to write the sum alone",
        ),
        ("s3://bucket/x", PATHS["s3://bucket/x.safetensors"]),
        ("dangling", PATHS["dangling"]),
    ],
)
def test_a_buffer_that_is_not_there_says_why(path, line):
    with pytest.raises(BadInputError) as caught:
        api.accumulate("data/micro_0.safetensors", into=path)
    assert said_of(caught.value.problems[0]) == line


def test_a_new_buffer_may_have_any_name_that_is_no_url(here):
    with pytest.raises(BadInputError, match="is a URL, which gradtool cannot write to"):
        api.accumulate("data/micro_0.safetensors", output="gs://bucket/x")
    api.accumulate("data/micro_0.safetensors", output="data/bufer.safetensors")
    assert (here / "data/bufer.safetensors").exists()


WRITTEN = "is a URL, which gradtool cannot write to; name a local path and upload the result"
TILDE = "~ is not expanded; use Path.expanduser"


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("option", "path", "file", "line"),
    [
        ("output", "s3://bucket/x", "s3://bucket/x", WRITTEN),
        ("output_dir", "s3://bucket/x", "s3://bucket/x", WRITTEN),
        ("output_dir", "HTTPS://host", "HTTPS://host", WRITTEN),
        ("output", "~/x", "~/x", TILDE),
        ("output_dir", "~/x", "~/x", TILDE),
    ],
)
def test_an_output_that_is_no_path_is_refused_before_anything_is_made(here, option, path, file, line, dry_run):
    before = sorted(here.rglob("*"))
    with pytest.raises(BadInputError) as caught:
        api.clip("data/micro_0.safetensors", max_norm=1, dry_run=dry_run, **{option: path})
    (problem,) = caught.value.problems
    assert (problem.file, said_of(problem), problem.code) == (file, line, "missing-file")
    assert sorted(here.rglob("*")) == before


def test_an_output_may_begin_with_a_tilde(here):
    api.clip("data/micro_0.safetensors", max_norm=1, output="~x.safetensors")
    api.clip("data/micro_0.safetensors", max_norm=1, output_dir="~new")
    (here / "~").mkdir()
    api.clip("data/micro_0.safetensors", max_norm=1, output="~/x.safetensors")
    for name in ("~x.safetensors", "~new/micro_0.safetensors", "~/x.safetensors"):
        assert (here / name).is_file()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("dta/x", "dta: no such folder; did you mean data?"),
        ("nowhere/x", "nowhere: no such folder"),
        ("text/x", "text: no such folder, but a file of that name"),
    ],
)
def test_the_folder_of_an_output_that_is_not_there_says_why(output, line):
    with pytest.raises(BadInputError) as caught:
        api.clip("data/micro_0.safetensors", max_norm=1, output=output)
    assert str(caught.value) == line


def test_recover_says_why_a_path_cannot_be_opened(here):
    said = {
        "s3://bucket/x.safetensors": f"s3://bucket/x.safetensors: {PATHS['s3://bucket/x.safetensors']}",
        "data/bufer.safetensors": f"data/bufer.safetensors: {PATHS['data//bufer.safetensors']}",
        "dta/x": f"{here}/dta: no such folder; did you mean {here}/data?",
    }
    for path, line in said.items():
        with pytest.raises(BadInputError) as caught:
            api.recover(path)
        assert str(caught.value) == line


def test_of_a_large_folder_only_a_part_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(filetypes, "_MAX_ENTRIES", 20)
    for number in range(30):
        (tmp_path / str(number)).touch()
    assert len(list(filetypes.entries_of(tmp_path))) == 20
    assert said_of(no_such_file(str(tmp_path / "x"))) == "no such file"


@given(path=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_made_up_paths_raise_nothing(path):
    for find in (no_such_file, no_such_folder):
        assert find(path)


@given(path=st.binary(min_size=1, max_size=30).filter(lambda one: b"\0" not in one))
def test_paths_that_are_no_text_raise_nothing(path):
    assert no_such_file(os.fsdecode(path))
