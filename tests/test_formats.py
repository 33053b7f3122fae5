"""The formats of `--format`: which one is chosen, JSON lines, and what GitHub Actions gets."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from markdown_it import MarkdownIt
from support import SAMPLES, encode, gradtool, gradtool_json, sample, snapshot, write

from gradtool.ops.results import is_rows

NAN = float("nan")
MICRO = SAMPLES / "micro_0.safetensors"
# What a runner would act upon, alone or after a newline.
COMMANDS = [
    "::error::pwned",
    "\n::add-mask::a\n",
    "\r::stop-commands::x",
    "##[add-mask]a",
    "###[error]x",
    "%0A::error::x",
]
# What ends a property, a cell, a span of code, or is HTML.
MARKS = [
    "a,b:c=d",
    "a|b",
    "a\\|b",
    "`",
    "``x` ",
    "<img src=x onerror=alert(1)>",
    "[x](http://x.y)",
    "_a_ *b* @user &amp;",
]


def lines_of(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


def commands_in(text):
    """The workflow commands in what is printed, as the runner of GitHub Actions finds and reads them."""
    found = []
    for line in re.split(r"\r\n|\r|\n", text):
        new = re.match(r"\s*::([\w-]+)(?: (.*?))?::(.*)", line)
        old = re.search(r"##\[([\w-]+)[^\]]*\](.*)", line)
        if new:
            pairs = [pair.split("=", 1) for pair in (new[2] or "").split(",") if pair]
            found.append((new[1], {key: unescaped(value, ":,") for key, value in pairs}, unescaped(new[3])))
        elif old:
            found.append((old[1], {}, old[2]))
    return found


def unescaped(text, more=""):
    for character in "\r\n" + more + "%":
        text = text.replace(f"%{ord(character):02X}", character)
    return text


@pytest.fixture
def on_github(tmp_path):
    """The variables of a step, whose workspace is the folder of the test."""
    summary = tmp_path / "summary" / "step.md"
    summary.parent.mkdir()
    summary.write_text("before")
    return {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path), "GITHUB_STEP_SUMMARY": str(summary)}, summary


def test_json_is_the_format_json(tmp_path):
    path = sample(tmp_path)
    answers = [json.loads(gradtool("norm", path, *how).stdout) for how in (["--json"], ["--format", "JSON"])]
    answers += [json.loads(gradtool("norm", path, "--json", "--format=json").stdout)]
    answers += [json.loads(gradtool("norm", path, env={"GRADTOOL_FORMAT": "json"}).stdout)]
    for answer in answers:
        assert (answer["data"]["norm"], list(answer)) == (5.0, list(answers[0]))


def test_an_option_goes_before_the_variable(tmp_path):
    path = sample(tmp_path)
    assert gradtool("norm", path, "--format", "text", env={"GRADTOOL_FORMAT": "json"}).stdout.startswith("norm\t5.0\n")
    assert json.loads(gradtool("norm", path, "--json", env={"GRADTOOL_FORMAT": "jsonl"}).stdout)["exit_code"] == 0
    assert gradtool("norm", path, env={"GRADTOOL_FORMAT": ""}).stdout.startswith("norm\t5.0\n")


def test_a_format_that_there_is_not_is_a_usage_error(tmp_path):
    call = ["clip", sample(tmp_path), "--max-norm", "1"]
    before = snapshot(tmp_path)
    done = gradtool(*call, "--format", "xml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gradtool: error: --format must be one of text, json, jsonl, tsv, csv, github, not 'xml'\n"
    done = gradtool(*call, env={"GRADTOOL_FORMAT": "xml"})
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "gradtool: error: GRADTOOL_FORMAT must be one of text, json, jsonl, tsv, csv, github, not 'xml'\n"
    )
    done = gradtool(*call, "--json", "--format", "github")
    message, hint = "--json cannot be combined with --format github", "remove one of them"
    assert (done.returncode, done.stderr) == (2, f"gradtool: error: {message}\n  hint: {hint}\n")
    assert json.loads(done.stdout)["errors"] == [{"code": "usage", "message": message, "hint": hint}]
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        (["norm", SAMPLES / "sharded", "--top", "2", "--by-file"], ["tensor", "tensor", "file"]),
        (["clip", SAMPLES / "sharded", "--max-norm", "1", "--dry-run"], []),
        (["accumulate", MICRO, "--into", SAMPLES / "buffer.safetensors", "--per-gradient", "--dry-run"], ["gradient"]),
        (["layernorm-backward", SAMPLES / "layernorm.safetensors", "--dry-run"], ["layer"]),
        (["norm", SAMPLES / "nan.safetensors", "--top", "1"], ["tensor"]),
        (["norm", SAMPLES / "buffer.safetensors", "--histogram"], ["histogram"] * 37 + ["dtype"] * 6),
    ],
    ids=lambda value: value[0] if value and value[0] != "tensor" else "",
)  # fmt: skip
def test_json_lines_are_the_rows_and_then_the_rest(arguments, kinds):
    whole = json.loads(gradtool(*arguments, "--json").stdout)
    done = gradtool(*arguments, "--format", "jsonl")
    *rows, last = lines_of(done)
    assert [row["type"] for row in rows] == kinds
    expected = [row for key, value in whole["data"].items() if is_rows(key) for row in value]
    for row, one in zip(rows, expected, strict=True):
        assert list(row) == ["type", *one]
        if row["type"] != "layer":
            assert row == {"type": row["type"]} | one
    assert list(last) == ["type", *whole]
    assert last["type"] == "result"
    assert list(last["data"]) == [key for key in whole["data"] if not is_rows(key)]
    assert {key: last[key] for key in ("command", "status", "exit_code", "errors")} == {
        key: whole[key] for key in ("command", "status", "exit_code", "errors")
    }
    assert done.returncode == last["exit_code"]


@pytest.mark.parametrize("arguments", [["norm", "missing"], ["norm", "x", "--top", "many"], ["clop"]], ids=" ".join)
def test_json_lines_of_a_failure_are_one_line(arguments):
    done = gradtool(*arguments, "--format", "jsonl")
    [last] = lines_of(done)
    assert (last["type"], last["exit_code"], last["data"]) == ("result", done.returncode, {})
    assert last["status"] == "error"
    assert last["errors"]


def test_json_lines_are_written_in_parts(tmp_path):
    path = write(tmp_path / "x", {f"{i}." + "n" * 1000: np.ones(1, np.float32) for i in range(300)})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs, ThreadPoolExecutor() as pool:
        # A datagram for each write; an empty one ends.
        parts = pool.submit(lambda: list(iter(partial(ours.recv, 1 << 20), b"")))
        gradtool("norm", path, "--per-tensor", "--format", "jsonl", stdout=theirs)
        theirs.send(b"")
    assert len(b"".join(parts.result()).splitlines()) == 301
    assert max(map(len, parts.result())) < 70_000
    assert len(parts.result()) < 10


@pytest.mark.parametrize("form", ["text", "json", "jsonl", "tsv", "csv", "github"])
@pytest.mark.parametrize("arguments", [["norm", "--per-tensor"], ["clip", "--max-norm", "1"]], ids=["norm", "clip"])
def test_names_never_are_commands_to_the_runner(tmp_path, on_github, form, arguments):
    environment, summary = on_github
    names = [*COMMANDS, *MARKS]
    path = write(tmp_path / "::error::x,##[error]y", {name: encode([NAN], "F32") for name in names})
    for given in (path, tmp_path / "##[add-mask]missing\n::error::x"):
        done = gradtool(*arguments, given, "--format", form, env=environment)
        assert done.returncode in {1, 3}
        found = commands_in(done.stdout) + commands_in(done.stderr)
        assert {(level, properties["title"].split(" (")[0]) for level, properties, _ in found} == (
            {("error", f"gradtool {arguments[0]}")} if form == "github" else set()
        )
        assert len(found) <= 10
    assert commands_in(summary.read_text()) == []


def test_names_with_what_a_runner_would_act_upon_are_whole_in_json(tmp_path):
    names = [*COMMANDS, *MARKS, "####"]
    path = write(tmp_path / "x", dict.fromkeys(names, np.ones(1, np.float32)))
    assert [row["name"] for row in gradtool_json("norm", path, "--per-tensor")["data"]["per_tensor"]] == names


def test_github_gets_the_text_and_an_annotation_for_each_problem(tmp_path, on_github):
    environment, _ = on_github
    path = write(tmp_path / "grads" / "a,b:c%.safetensors", {"w\n100%": encode([1, NAN], "F32")})
    done = gradtool("norm", path, "--fail-above", "2", "--format", "github", env=environment, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("norm\tNaN\n")
    where = f"{path}: tensor 'w\\n100%': 1 NaN, 0 Inf, the first at [1]".replace("%", "%25")
    assert done.stdout.splitlines()[-2:] == [
        f"::error file=grads/a%2Cb%3Ac%25.safetensors,title=gradtool norm (nonfinite)::{where}",
        "::error title=gradtool norm (above-limit)::the norm is NaN, which is not within the limit 2.0",
    ]
    assert commands_in(done.stdout)[0] == (
        "error",
        {"file": "grads/a,b:c%.safetensors", "title": "gradtool norm (nonfinite)"},
        f"{path}: tensor 'w\\n100%': 1 NaN, 0 Inf, the first at [1]",
    )
    assert done.stderr == gradtool("norm", path, "--fail-above", "2", cwd=tmp_path).stderr


def test_a_failure_is_annotated_too_with_its_remedy(tmp_path, on_github):
    environment, summary = on_github
    path = write(tmp_path / "x", {"a": encode([NAN], "F32"), "b": encode([NAN], "F32")})
    done = gradtool("clip", path, "--max-norm", "1", "--format", "github", env=environment)
    assert done.returncode == 1
    assert [message for *_, message in commands_in(done.stdout)] == [
        f"{path}: tensor 'a': 1 NaN, 0 Inf, the first at [0]",
        f"{path}: tensor 'b': 1 NaN, 0 Inf, the first at [0]",
        "input contains NaN or Inf; nothing written. Use --nonfinite zero or --nonfinite propagate to continue",
    ]
    assert len(done.stdout.splitlines()) == 3
    assert "### gradtool `clip`: failed with exit code 1\n" in summary.read_text()
    assert "hint: use --nonfinite zero or --nonfinite propagate to continue\n" in summary.read_text()
    done = gradtool("clip", path, "--max-norm", "one", "--format=github", env=environment)
    assert [level for level, *_ in commands_in(done.stdout)] == ["error"]
    assert "### gradtool `clip`: failed with exit code 2\n" in summary.read_text()


@pytest.mark.parametrize(("count", "shown"), [(10, 10), (11, 9), (500, 9)])
def test_no_more_annotations_than_github_shows(tmp_path, on_github, count, shown):
    path = write(tmp_path / "x", {f"t{i}": encode([NAN], "F32") for i in range(count)})
    found = commands_in(gradtool("norm", path, "--format", "github", env=on_github[0]).stdout)
    assert len(found) == 10
    if shown < count:
        assert found[-1][2] == f"and {count - shown} more; --json lists them all"
    found = commands_in(gradtool("clip", path, "--max-norm", "1", "--format", "github", env=on_github[0]).stdout)
    assert len(found) == 10
    assert found[-2][2] == f"and {count - 8} more; --json lists them all"
    assert found[-1][2].endswith("Use --nonfinite zero or --nonfinite propagate to continue")


def test_a_warning_is_annotated_and_quiet_keeps_it_and_the_text_back(tmp_path, on_github):
    bad = write(tmp_path / "bad", {"a": encode([NAN], "F32")})
    good = write(tmp_path / "good", {"a": encode([1], "F32")})
    call = ["accumulate", bad, good, "--output", tmp_path / "new", "--nonfinite", "skip", "--dry-run"]
    done = gradtool(*call, "--format", "github", env=on_github[0])
    assert commands_in(done.stdout) == [
        (
            "warning",
            {"file": "bad", "title": "gradtool accumulate (skipped)"},
            f"{bad}: tensor 'a': whole gradient skipped: 1 NaN, 0 Inf, the first at [0]",
        )
    ]
    done = gradtool(*call, "--format", "github", "--quiet", env=on_github[0])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = gradtool("norm", bad, "--format", "github", "--quiet", env=on_github[0])
    assert [level for level, *_ in commands_in(done.stdout)] == ["error"]
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("workspace", "given", "shown"),
    [
        (".", "a/x", "a/x"),
        ("a", "a/x", "x"),
        ("b", "a/x", "a/x"),
        ("", "a/x", "a/x"),
        (".", "..x", "..x"),
        ("a", "../x", "../x"),
    ],
)
def test_a_file_is_named_from_the_workspace_if_it_is_in_it(tmp_path, workspace, given, shown):
    folder = tmp_path / "work"
    folder.mkdir()
    environment = {"GITHUB_WORKSPACE": str(folder / workspace) if workspace else ""}
    done = gradtool("norm", given, "--format", "github", env=environment, cwd=folder)
    [(_, properties, message)] = commands_in(done.stdout)
    assert properties["file"] == shown
    assert message.startswith(f"{given}: no such file")


def tables_in(text):
    """The text of the cells of each table, as Markdown is shown; nothing but text and code may be in them."""
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    assert {one.type for one in tokens} <= {
        *(f"{part}_{end}" for part in ("table", "thead", "tbody", "tr", "th", "td") for end in ("open", "close")),
        *("heading_open", "heading_close", "paragraph_open", "paragraph_close", "inline", "fence"),
    }
    tables = []
    for before, one in pairwise(tokens):
        if one.type == "table_open":
            tables.append([])
        elif one.type == "tr_open":
            tables[-1].append([])
        elif before.type in {"th_open", "td_open"}:
            assert {child.type for child in one.children} <= {"text", "code_inline"}
            tables[-1][-1].append("".join(child.content for child in one.children))
    return tables


def test_a_step_gets_a_section_with_tables_after_what_is_there(on_github):
    environment, summary = on_github
    call = ["norm", MICRO, "--top", "2", "--format", "github"]
    gradtool(*call, env=environment)
    first = summary.read_text()
    assert first.startswith(
        "before\n### gradtool `norm`: ok\n\n| field | value |\n| --- | --- |\n| norm | 3.5584793327392696 |\n"
    )
    facts, rows = tables_in(first)
    assert dict(facts)["tensors"] == "28"
    assert rows[0] == ["tensor", "file", "dtype", "shape", "norm", "max_abs", "nan", "inf", "zeros"]
    assert [(row[0], row[3], row[4]) for row in rows[1:]] == [
        ("blocks.0.qkv.weight", "120x40", "1.90381"), ("patch_embed.bias", "40", "1.29042"),
    ]  # fmt: skip
    gradtool(*call, env=environment)
    assert summary.read_text().startswith(first)
    assert len(tables_in(summary.read_text())) == 4


def test_what_was_written_is_in_the_section(tmp_path, on_github):
    environment, summary = on_github
    path = sample(tmp_path)
    gradtool("clip", path, "--max-norm", "1", "--format", "github", env=environment)
    [facts] = tables_in(summary.read_text())
    assert facts[1] == ["wrote", str(path)]
    assert dict(facts)["clipped"] == "yes"


def test_names_are_neither_markdown_nor_html_in_a_section(tmp_path, on_github):
    environment, summary = on_github
    names = [*MARKS, "a\\", "```", " x ", "", "a\\\\|", "| --- |", "$x$", "-", "~~~", "<!--"]
    path = write(tmp_path / "x", {name: encode([1, NAN], "F32") for name in names})
    gradtool("norm", path, "--per-tensor", "--format", "github", env=environment)
    _, rows = tables_in(summary.read_text())
    assert [row[0] for row in rows[1:]] == names
    assert {len(row) for row in rows} == {9}


@pytest.mark.parametrize("make", ["folder", "missing", "sealed", "fifo"])
def test_a_section_that_cannot_be_written_is_a_warning(tmp_path, make):
    where = tmp_path / {"folder": "", "missing": "none/step.md", "sealed": "/proc/version", "fifo": "fifo"}[make]
    if make == "fifo":
        os.mkfifo(where)
    # In a process of its own, which may take so long and no longer.
    environment = {"GITHUB_STEP_SUMMARY": str(where)}
    done = gradtool("norm", sample(tmp_path), "--format", "github", env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0
    assert re.fullmatch(f"gradtool: warning: {where}: cannot write the step summary: [A-Z][a-z ]+\n", done.stderr), (
        done.stderr
    )
    [(level, properties, _)] = commands_in(done.stdout)
    assert (level, properties["title"]) == ("warning", "gradtool norm (step-summary)")


def test_sections_stay_within_what_github_takes(tmp_path, on_github):
    environment, summary = on_github
    path = write(tmp_path / "x", {f"{i:04}." + "n" * 1000: np.ones(1, np.float32) for i in range(1500)})
    call = ["norm", path, "--per-tensor", "--format", "github"]
    assert gradtool(*call, env=environment).stderr == ""
    first = summary.read_bytes()
    assert 1_040_000 < len(first) <= 1 << 20
    _, rows = tables_in(first.decode())
    assert f"\nThere is no room for {1500 - len(rows) + 1:,} more rows.\n" in first.decode()
    # A section without rows may fit still, but not many.
    for _ in range(5):
        before = summary.read_bytes()
        done = gradtool(*call, env=environment)
        assert done.returncode == 0
        assert len(summary.read_bytes()) <= 1 << 20
    assert done.stderr == f"gradtool: warning: {summary}: the step summary is full; this call is missing from it\n"
    assert summary.read_bytes() == before


def test_only_the_github_format_writes_a_section(tmp_path, on_github):
    environment, summary = on_github
    for form in ("text", "json", "jsonl", "tsv", "csv"):
        gradtool("norm", sample(tmp_path), "--format", form, env=environment)
    assert summary.read_text() == "before"


def block(page, language):
    """The first block of a language under the heading of the job."""
    section = page.split("### Show the norm on GitHub\n")[1]
    fence = "````" if language == "markdown" else "```"
    return re.search(rf"^{fence}{language}\n(.*?)^{fence}$", section, re.MULTILINE | re.DOTALL)[1]


def without_time(text):
    return re.sub(r"(\bseconds\b[\s|]+)[\d.e-]+", r"\1…", text)


def test_the_job_in_the_cookbook_shows_what_the_page_says(tmp_path, on_github):
    environment, summary = on_github
    summary.write_text("")
    shutil.copytree(SAMPLES, tmp_path / "sample_data")
    page = (SAMPLES.parent / "docs" / "cookbook.md").read_text()
    job = block(page, "yaml")
    variables = dict(re.findall(r"^ +([A-Z_]+): (.*)$", job, re.MULTILINE))
    assert variables == {"GRADTOOL_FORMAT": "github"}
    [command] = re.findall(r"^ +- run: gradtool (.*)$", job, re.MULTILINE)
    done = gradtool(*shlex.split(command), env=environment | variables, cwd=tmp_path)
    assert done.returncode == 1
    log = block(page, "text")
    assert without_time(done.stdout) == without_time(log)
    assert without_time(summary.read_text()) == without_time(block(page, "markdown"))
    assert [level for level, *_ in commands_in(log)] == ["error"]
