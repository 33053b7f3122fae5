"""Help: one screen, all of it, topics, and the recipes in them."""

import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from support import gradtool, read
from terminal import on_terminal

import gradtool as package
from gradtool.cli import COMMANDS
from gradtool.declare import PYTHON
from gradtool.help import DOCS, TOPICS, markdown_of, text_of

ROOT = Path(__file__).parents[1]
HEADING, NAME, RESET = "\x1b[1m", "\x1b[36m", "\x1b[0m"


@pytest.mark.parametrize("command", COMMANDS)
def test_short_help_is_one_screen_and_names_the_ten_options_used_most(command):
    lines = gradtool(command, "-h").stdout.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"Usage: gradtool {command} [OPTIONS]")
    assert f"    gradtool {command}" in "\n".join(lines[lines.index("  Examples:") :])
    options = {field.name: field for field in COMMANDS[command].declared if field.group != PYTHON}
    common = COMMANDS[command].common.split()
    assert len(common) == len(set(common)) <= 10
    shown = lines[lines.index("Options used most:") + 1 : -2]
    assert [line.split("  ")[1] for line in shown if line[2] != " "] == [options[name].usage for name in common]
    assert lines[-1] == f"gradtool {command} --help shows all options."


def test_an_argument_of_an_option_may_look_like_help(tmp_path):
    done = gradtool("norm", tmp_path, "--group", "--help")
    assert (done.returncode, "hint" in done.stderr) == (3, False)


@pytest.mark.parametrize("arguments", [[], ["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_ends_with_the_address_of_the_documentation(arguments):
    assert gradtool(*arguments).stdout.splitlines()[-1] == f"Documentation: {DOCS}"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Documentation"] == DOCS


def test_the_help_of_all_commands_is_one_screen():
    assert len(gradtool("-h").stdout.splitlines()) <= 30


@pytest.mark.parametrize("arguments", [["-V"], ["version"]])
def test_the_version_is_printed_however_it_is_asked_for(arguments):
    assert gradtool(*arguments).stdout == gradtool("--version").stdout == f"gradtool {package.__version__}\n"


@pytest.mark.parametrize(("columns", "widest"), [(40, 38), (80, 78), (120, 98), (200, 98)])
def test_help_is_as_wide_as_the_terminal_up_to_100(columns, widest):
    code, shown = on_terminal("clip", "--help", columns=columns, NO_COLOR="1")
    prose = re.sub(r"(?s)  Examples:.*?\n\n", "", shown)
    lengths = [len(line) for line in prose.splitlines()[1:] if DOCS not in line]
    assert code == 0
    assert widest - 12 <= max(lengths) <= widest
    assert "\x1b" not in shown


@pytest.mark.parametrize("arguments", [["clip", "--help"], ["clip", "-h"], ["--help"], ["help", "convert"]])
def test_help_is_coloured_on_a_terminal_only(arguments):
    coloured = on_terminal(*arguments)[1]
    assert HEADING in coloured
    assert NAME in coloured
    plain = re.sub(r"\x1b\[\d*m", "", coloured)
    assert plain == on_terminal(*arguments, NO_COLOR="1")[1] == on_terminal(*arguments, TERM="dumb")[1]
    assert "\x1b" not in gradtool(*arguments).stdout


def test_options_and_headings_have_their_colours():
    shown = on_terminal("clip", "--help")[1]
    assert f"{HEADING}Usage:{RESET} gradtool clip" in shown
    assert f"\n{HEADING}Output:{RESET}\n" in shown
    assert f"\n  {NAME}--max-norm C{RESET}  " in shown


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_topic_fits_the_terminal(topic, columns):
    done = gradtool("help", topic, env={"COLUMNS": str(columns)})
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert last == f"Documentation: {DOCS}"
    code = {line for block in re.findall(r"(?s)```sh\n(.*?)```", markdown_of(topic)) for line in block.splitlines()}
    assert max(len(line) for line in lines if line not in code) <= columns - 2
    assert max(map(len, code), default=0) <= 80
    assert "`" not in "".join(line for line in lines if line not in code)
    # Nothing is lost but the marks.
    words = re.sub(r"```(sh)?|(?m:^#+ )", " ", markdown_of(topic)).replace("`", "").split()
    assert " ".join(lines).split() == words


def test_topics_are_found_in_two_words_and_named_by_the_help():
    assert gradtool("help", "exit", "codes").stdout == gradtool("help", "exit-codes").stdout
    assert "convert, in, out or exit-codes" in gradtool("--help").stdout


def test_a_topic_is_on_the_page_of_the_commands():
    page = (ROOT / "docs/cli.md").read_text()
    for topic in TOPICS:
        assert re.sub("(?m)^(?=#)", "##", markdown_of(topic)).strip() in page


def test_exit_codes_are_those_of_the_page():
    page = (ROOT / "docs/output.md").read_text().partition("## Exit codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (\d.*?) \| (.*?) \|$", page)
    topic = re.sub(r"\n  (?=\S)", " ", markdown_of("exit-codes"))
    assert re.findall(r"(?m)^- (.*?): (.*)$", topic) == rows


def test_no_message_points_into_a_checkout():
    # Comments and docstrings may.
    for path in (ROOT / "gradtool").rglob("*.py"):
        texts = re.findall(r"""(?<!\")"([^"\n]*)"(?!\")""", path.read_text())
        assert [text for text in texts if "docs/" in text or ".md" in text.replace("{topic}.md", "")] == [], path


def recipe(section):
    """The command of a section of the topic, as it is printed, and so copied."""
    printed = text_of("convert").partition(f"\n{section}\n")[2]
    return re.search(r"(?ms)^python - .*?^EOF$", printed)[0].replace("python -", f"'{sys.executable}' -", 1)


def in_shell(command, folder):
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)


def run(section, folder, *names):
    """Run a recipe in a folder, with other arguments than the page has."""
    command = recipe(section)
    first = command.splitlines()[0]
    command = command.replace(first, f"'{sys.executable}' - {' '.join(names)} <<'EOF'", 1)
    return in_shell(command, folder)


def test_arrays_are_converted_by_the_recipes(tmp_path):
    arrays = {"w": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)), "b": np.ones(3, np.float32)}
    np.savez(tmp_path / "grads.npz", **arrays)
    np.save(tmp_path / "grads.npy", arrays["w"])
    (tmp_path / "grads.pkl").write_bytes(pickle.dumps(arrays))
    for section, names in (("From .npz", arrays), ("From .npy", ["w"]), ("From a pickle", arrays)):
        done = subprocess.run(
            ["bash", "-c", recipe(section)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), section
        converted = read(tmp_path / "grads.safetensors")
        assert {name: values.tolist() for name, values in converted.items()} == {
            name: arrays[name].tolist() for name in names
        }
        (tmp_path / "grads.safetensors").unlink()


def test_a_checkpoint_is_converted_by_the_recipe(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    table = torch.arange(12.0).reshape(3, 4)
    model = {"embed": table, "head": table, "turned": table.t(), "part": table[1:], "half": table.bfloat16()}
    grads = {"weight": torch.nn.Parameter(table + 1), "steps": 7}
    torch.save({"model": model, "optimizer": {"lr": 0.1}, "nested": {"grads": grads}}, tmp_path / "grads.pt")
    done = in_shell(recipe("From .pt"), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {name: values.tolist() for name, values in read(tmp_path / "grads.safetensors").items()} == {
        name: tensor.tolist() for name, tensor in model.items()
    }
    assert gradtool("norm", tmp_path / "grads.safetensors").returncode == 0
    assert run("From .pt", tmp_path, "grads.pt", "new.safetensors", "--key", "nested.grads").returncode == 0
    assert {name: values.tolist() for name, values in read(tmp_path / "new.safetensors").items()} == {
        "weight": (table + 1).tolist()
    }
    done = run("From .pt", tmp_path, "grads.pt", "none.safetensors")
    assert done.returncode == 2
    assert "no tensors; --key may be one of ['model', 'optimizer', 'nested']" in done.stderr
    torch.save(model, tmp_path / "flat.pt")
    assert run("From .pt", tmp_path, "flat.pt", "flat.safetensors").returncode == 0
    assert read(tmp_path / "flat.safetensors").keys() == model.keys()


STUB = """
import json, pickle
contiguous_format = "contiguous"
class Tensor:
    def __init__(self, values): self.values = values
    def clone(self, memory_format): return Tensor([memory_format, *self.values])
def load(path, map_location, weights_only):
    assert (map_location, weights_only) == ("cpu", True)
    return {"model": {"w": Tensor([1, 2]), "step": 3}, "lr": 0.1}
def is_tensor(value): return isinstance(value, Tensor)
"""
SAVER = """
import json
def save_file(tensors, path, metadata):
    with open(path, "w") as file:
        json.dump([{name: tensor.values for name, tensor in tensors.items()}, metadata], file)
"""


def test_the_recipe_for_a_checkpoint_asks_torch_for_what_is_needed(tmp_path, monkeypatch):
    """Where there is no torch."""
    (tmp_path / "torch.py").write_text(STUB)
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").touch()
    (tmp_path / "safetensors" / "torch.py").write_text(SAVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = in_shell(recipe("From .pt"), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    expected = '[{"w": ["contiguous", 1, 2]}, {"format": "pt"}]'
    assert (tmp_path / "grads.safetensors").read_text() == expected
    done = run("From .pt", tmp_path, "grads.pt", "none")
    assert (done.returncode, (tmp_path / "none").exists()) == (2, False)
    assert "no tensors; --key may be one of ['model', 'lr']" in done.stderr
