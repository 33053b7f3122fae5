"""Prints docs/api.md, made from the docstrings of what gradtool exports: python docs/make_api.py > docs/api.md."""

import dataclasses
import inspect
import re
from collections.abc import Iterable

import gradtool
from gradtool import options
from gradtool.declare import PYTHON, declared_of

PAGE = """\
# Python

<!-- Made by `python docs/make_api.py > docs/api.md` from docstrings. Change those. -->

The functions are the commands: same names, arguments and results. They are loaded when first used, so `import gradtool`
costs nothing. The [cookbook](cookbook.md#call-it-from-python) has an example, [numerics](numerics.md) the formulas, and
[output](output.md#json) what the fields of results mean.

{functions}

## Results

What a function returns is a frozen dataclass. Its rows, such as `per_tensor`, are dataclasses too.

{results}

## Errors

All are subclasses of `GradtoolError`. Each has the exit code of the command, and `problems`, the entries that JSON has
under `errors`.

{errors}
"""
FUNCTION = """\
## gradtool.{name}

```python
{signature}
```

{text}

{arguments}

{raises}

The result is {article} [{result}](#{anchor})."""
RESULT = """\
### {name}

{text}

```text
{fields}
```"""
PAGES = {
    "gradtool.backends.differences": "[Numerics](numerics.md#differences)",
    "gradtool.ops.clip.limits": "[numerics](numerics.md#limits-that-learn)",
    "gradtool.reduction": "[numerics](numerics.md#norms-and-sums)",
}
_WIDTH = 100
# The options that several functions have, and the group that each is in.
SHARED = {name: title for title, group in options.SHARED.items() for name in declared_of(group)}


def page() -> str:
    """The whole page."""
    public = [getattr(gradtool, name) for name in gradtool.__all__ if name != "__version__"]
    functions = [one for one in public if inspect.isroutine(one)]
    errors = [one for one in public if inspect.isclass(one) and issubclass(one, Exception)]
    results = [one for one in public if dataclasses.is_dataclass(one)]
    return PAGE.format(
        functions="\n\n".join(map(function, functions)),
        results="\n\n".join(map(result, results)),
        errors=table(("error", "is also", "when", "exit code"), map(error, sorted(errors, key=exit_code))),
    ).rstrip("\n")


def function(one: object) -> str:
    """The section of a function."""
    text, arguments, raises = parts_of(inspect.getdoc(one) or "")
    signature = inspect.signature(one)
    name = one.__name__
    returned = re.sub(r"\W+$", "", str(signature.return_annotation)).rpartition(".")[2]
    own = [(f"`{argument}`", help_of) for argument, help_of in arguments if argument not in SHARED]
    groups = dict.fromkeys(SHARED[argument] for argument, _ in arguments if argument in SHARED)
    links = [f"[{group}](cli.md#{group.lower()})" for group in groups if group != PYTHON]
    more = f"\n\nAnd those under {', '.join(links)}" if links else ""
    more += ", and `progress`: True for a bar, or a function." if PYTHON in groups else "." if more else ""
    return FUNCTION.format(
        name=name,
        signature=wrapped(name, signature),
        text=text,
        arguments=table(("argument", "meaning"), own) + more,
        raises=table(("raises", "when"), raises),
        article="an" if returned[0] in "AEIOU" else "a",
        result=returned,
        anchor=returned.lower(),
    )


def parts_of(docstring: str) -> tuple[str, list[tuple[str, str]], list[tuple[str, str]]]:
    """What a docstring says before its arguments, and its entries for arguments and for exceptions."""
    text, _, rest = docstring.partition("\nArgs:\n")
    arguments, _, raises = rest.partition("Raises:\n")
    return plain(text.strip()), entries(arguments), entries(raises)


def entries(block: str) -> list[tuple[str, str]]:
    """Names and what is said of each; a line that is indented further goes on with the one before."""
    joined = re.sub(r"\n {8,}", " ", block)
    return [(name, cell(text)) for name, text in re.findall(r"^ {4}(\w+): (.*)$", joined, re.MULTILINE)]


def wrapped(name: str, signature: inspect.Signature) -> str:
    """A call of a function, with its defaults."""
    positional, keyword = [], []
    for one in signature.parameters.values():
        is_required = one.default is one.empty
        default = f'"{one.default}"' if isinstance(one.default, str) else repr(one.default)
        text = one.name if is_required else f"{one.name}={default}"
        (keyword if one.kind is one.KEYWORD_ONLY else positional).append(text)
    parts = [*positional, *(["*"] if keyword else []), *keyword]
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part) > _WIDTH:
            lines.append("")
        lines[-1] += f"{part}, "
    body = "\n".join(f"    {line.rstrip()}" for line in lines)
    return f"{name}({', '.join(parts)})" if len(lines) == 1 else f"{name}(\n{body}\n)"


def result(one: type) -> str:
    """The section of a result."""
    fields = ", ".join(field.name for field in dataclasses.fields(one))
    lines = re.sub(rf"(.{{1,{_WIDTH}}})(?: |$)", r"\1\n", fields).strip()
    return RESULT.format(name=one.__name__, text=plain(inspect.getdoc(one) or ""), fields=lines)


def error(one: type) -> tuple[str, ...]:
    """The row of an error."""
    bases = [base.__name__ for base in one.__bases__ if base.__module__ == "builtins" and base is not Exception]
    also = f"`{bases[0]}`" if bases else ""
    return f"`{one.__name__}`", also, cell(plain(inspect.getdoc(one) or "")), exit_code(one)


def exit_code(one: type) -> str:
    """The exit code of an error; none for the base of all."""
    return str(getattr(one, "exit_code", ""))


def plain(text: str) -> str:
    """A docstring as Markdown: where it names a module, a link to the page that says the same."""
    for module, link in PAGES.items():
        text = text.replace(f"`{module}`", link)
    return text


def cell(text: str) -> str:
    """Text in a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page())
