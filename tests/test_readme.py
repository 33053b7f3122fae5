"""The pages cannot go stale: their examples are run and compared, their options, keys, codes and links looked up."""

import doctest
import re

import pytest
from pages import ROOT, console_blocks, in_a_shell, lay_out_checkout
from support import gradtool, gradtool_json

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [
    "norm", "diff", "digest", "check", "info", "clip", "accumulate", "zero", "layernorm-backward", "recover", "doctor",
]  # fmt: skip


EXAMPLES = [
    pytest.param(steps, id=f"{page.stem}: {heading}")
    for page in PAGES
    for heading, steps in console_blocks(page).items()
]
PYTHON = [
    pytest.param(block, id=page.stem)
    for page in PAGES
    for block in re.findall(r"^```pycon\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.fixture
def checkout(tmp_path):
    return lay_out_checkout(tmp_path)


@pytest.mark.parametrize("steps", EXAMPLES)
def test_examples_print_what_the_page_shows(checkout, steps):
    folder, environment = checkout
    done = in_a_shell(steps, folder, environment)
    assert done.stdout.split("\0") == [*(output for _, output in steps), ""]
    assert done.returncode == 0


@pytest.mark.parametrize("block", PYTHON)
def test_python_examples_print_what_the_page_shows(checkout, monkeypatch, block):
    monkeypatch.chdir(checkout[0])
    example = doctest.DocTestParser().get_doctest(block, {}, "page", None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_readme_and_the_cookbook_have_examples():
    assert len(console_blocks(README)["Examples"]) >= 6
    assert len(console_blocks(ROOT / "docs" / "cookbook.md")) >= 12
    assert PYTHON


def options_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def test_every_option_the_pages_name_exists_and_every_option_is_named():
    everything = set().union(*(options_in(gradtool(command, "--help").stdout) for command in COMMANDS))
    named = set().union(*(options_in(page.read_text()) for page in PAGES))
    # Of the benchmarks, and of the command without a subcommand; of dask and of sbatch.
    others = {"--timing", "--version", "--scheduler-file", "--port", "--nthreads", "--no-nanny", "--dashboard-address"}
    others |= {"--show-completion"}
    others |= {"--interface", "--name", "--job-name", "--nodes", "--ntasks-per-node", "--cpus-per-task", "--time"}
    # And of a recipe in the topic that shows how to convert files.
    others |= {"--no-dashboard", "--key", "--mem", "--protocol", "--tls-ca-file", "--tls-cert", "--tls-key"}
    assert named - others == everything
    assert all(f"`gradtool {command}`" in README.read_text() for command in COMMANDS)


def test_the_first_screen_of_the_readme_has_a_picture_figures_and_the_line_that_installs_it():
    lines = README.read_text().splitlines()[:25]
    assert [line for line in lines if line.startswith("![") and line.endswith("(docs/terminal.svg)")]
    assert [line for line in lines if " s (" in line and "AMD" in line]
    assert [line for line in lines if line.startswith("pip install . && gradtool clip")]


def test_no_page_for_users_needs_what_only_tests_have():
    assert [page.name for page in PAGES if "GRADTOOL_FAULT" in page.read_text()] == []


def test_there_are_two_set_up_commands():
    assert len(re.findall(r"^```sh$", README.read_text(), re.MULTILINE)) == 2


def anchors_of(page):
    """The anchors that a page's headings get, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


CALLS = {
    "norm": ["sample_data/sharded", "--per-tensor", "--by-file", "--histogram", "--group", "patch"],
    "check": ["sample_data/nan.safetensors"],
    "digest": ["sample_data/sharded"],
    "info": ["sample_data/sharded"],
    "clip": ["sample_data/sharded", "--max-norm", "1", "--per-tensor"],
    "accumulate": [
        "sample_data/micro_0.safetensors", "nothing", "--into", "sample_data/buffer.safetensors", "--per-gradient",
        "--screen", "readable",
    ],
    "zero": ["sample_data/sharded"],
    "layernorm-backward": ["sample_data/layernorm.safetensors"],
    "doctor": ["sample_data"],
}  # fmt: skip
# Rows that cannot be had in the same call.
OTHER_ROWS = {
    "clip": ["sample_data/sharded", "--group", "patch:1"],
    "info": ["sample_data/split"],
    "check": ["sample_data/sharded", "sample_data/micro_0.safetensors"],
}


@pytest.mark.parametrize("command", CALLS)
def test_the_output_page_lists_the_keys_of_json_in_their_order(checkout, command):
    data = gradtool_json(command, *CALLS[command], cwd=checkout[0])["data"]
    if command in OTHER_ROWS:
        others = gradtool_json(command, *OTHER_ROWS[command], cwd=checkout[0])["data"]
        data |= {key: rows for key, rows in others.items() if key.startswith("per_") and rows}
    page = (ROOT / "docs" / "output.md").read_text()
    (lists,) = re.findall(rf"^### {command}\n.*?^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (summary,) = re.findall(r"CALL stands for (.*?)\.", page, re.DOTALL)
    lists = lists.replace("CALL", summary)
    rows = [key for key in data if key.startswith("per_") or key == "histogram"]
    of_data, of_rows = [], []
    # A list of rows is called like its key, the last one before its colon; a semicolon ends it.
    for part in lists.split(";"):
        before, *after = [re.findall(r"\w+", half) for half in part.split(":")]
        of_data += before
        of_rows += after
    assert of_data == list(data)
    assert of_rows == [list(data[key][0]) for key in rows]


def test_the_output_page_names_every_code_of_an_error_or_a_warning():
    source = "\n".join(path.read_text() for path in (ROOT / "gradtool").rglob("*.py"))
    raised = set(re.findall(r'\bcode(?:: \w+)?\s*=\s*"([a-z-]+)"|\bProblem\(\s*"([a-z-]+)"', source))
    table = (ROOT / "docs" / "output.md").read_text().partition("## Error codes")[2].partition("\n## Progress")[0]
    first = re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", table, re.MULTILINE)
    named = set(re.findall(r"[a-z][a-z-]+", " ".join(first)))
    leftovers = set(re.findall(r'": \("([a-z-]+)", f"', source))
    assert {"unaligned", "saturated"} < {other for _, other in raised}
    assert "leftover" in leftovers
    assert named == {code or other for code, other in raised} | leftovers
