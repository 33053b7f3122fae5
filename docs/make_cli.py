"""Prints docs/cli.md, made from the commands and the options they declare: python docs/make_cli.py > docs/cli.md."""

import inspect
import re
from collections.abc import Iterable, Sequence

from gradtool import options as declarations
from gradtool.cli import COMMANDS
from gradtool.command import Command
from gradtool.declare import ARGUMENTS, OPTIONS, PYTHON, Declared, declared_of
from gradtool.errors import as_command, option
from gradtool.help import TOPICS, markdown_of

PAGE = """\
# Commands and options

<!-- Made by `python docs/make_cli.py > docs/cli.md` from gradtool/cli.py and gradtool/options.py. Change those. -->

{commands}

`gradtool COMMAND --help` shows the same, and `gradtool COMMAND -h` the options that are used most, with examples.
`gradtool help TOPIC` prints a [topic](#topics). Every command is also a [Python function](api.md): `gradtool norm
grads/ --per-tensor --top 5` is `gradtool.norm("grads/", per_tensor=True, top=5)`. The functions have all options except
those under [General](#general). Values from a fixed list, such as those of `--dtype`, may be in upper or lower case.

## Completion

To complete commands, options, their values and paths in your shell, add a line to its start-up file:

- bash, in `~/.bashrc`: `eval "$(gradtool --show-completion bash)"`
- zsh, in `~/.zshrc` below `compinit`: `eval "$(gradtool --show-completion zsh)"`
- fish, in `~/.config/fish/config.fish`: `gradtool --show-completion fish | source`
- PowerShell, in `$PROFILE`: `gradtool --show-completion pwsh | Out-String | Invoke-Expression`

gradtool never edits these files. If gradtool is installed in a system directory, `man gradtool` shows this page.

{sections}

{shared}

## Topics

`gradtool help convert` prints the first of these topics, and so on.

{topics}"""

COMMAND = """\
## gradtool {name}

{text}

```
{usage}
```

{options}

Also the options under {shared}. Examples:

```
{examples}
```"""
SHARED = {title: group for title, group in declarations.SHARED.items() if title != PYTHON}


def page() -> str:
    """Return the whole page."""
    rows = [(f"[{name}](#gradtool-{name})", text.partition("\n")[0]) for name, (*_, text) in COMMANDS.items()]
    return PAGE.format(
        commands=table(("command", "what it does"), rows),
        sections="\n\n".join(section(*item) for item in COMMANDS.items()),
        topics="\n\n".join(re.sub("(?m)^(?=#)", "##", markdown_of(name)).strip() for name in TOPICS),
        shared="\n\n".join(f"## {title}\n\n{options(declared_of(group).values())}" for title, group in SHARED.items()),
    )


def section(name: str, command: Command) -> str:
    """Return the section of a command."""
    text, examples = command.description.partition("\n\n")[2].rstrip().split("\n\n\b\nExamples:\n")
    declared = command.declared
    return COMMAND.format(
        name=name,
        text=text,
        usage=" ".join(["gradtool", name, *command.usage]),
        options=options(item for item in declared if item.group in {ARGUMENTS, OPTIONS}),
        shared=shared_of(declared),
        examples=inspect.cleandoc(examples),
    )


def shared_of(declared: Sequence[Declared]) -> str:
    """Return links to the options that a command shares; with their names, if it does not have all of a group."""
    links = []
    for title, group in SHARED.items():
        flags = [f"`{option(item.name).command}`" for item in declared if item.group == title]
        names = "" if len(flags) == len(declared_of(group)) else f" ({', '.join(flags)})"
        links += [f"[{title}](#{title.lower()}){names}"] if flags else []
    return ", ".join(links)


def options(declared: Iterable[Declared]) -> str:
    """Return a table of arguments and options."""
    rows = [(f"`{item.usage}`", as_command(item.text), item.default_text) for item in declared]
    return table(("option", "meaning", "default"), rows)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page())
