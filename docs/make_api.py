"""Prints docs/api.md, made from the docstrings of what gradtool exports: python docs/make_api.py > docs/api.md."""

import dataclasses
import inspect
import re
from collections.abc import Iterable

import gradtool

PAGE = """\
# Python

<!-- Made by `python docs/make_api.py > docs/api.md` from docstrings. Change those. -->

Each command has a function of the same name, with the same defaults and results, and with the same options but for the
[general ones](cli.md#general). An argument means the same as the [command's option](cli.md) of that name: `--max-norm
1` is `max_norm=1`, and a flag is True or False. If an option can be repeated, its argument takes a list or a single
value; so do `paths` and `gradients`. A path is a `str` or an `os.PathLike`. All functions but `info`, `recover` and
`doctor` have `progress`: True for a progress bar on stderr, or a function that is called with the name of the pass, the
bytes done and the total bytes.

Functions are loaded when first used, so `import gradtool` is fast. The [cookbook](cookbook.md#call-it-from-python) has
an example, [numerics](numerics.md) has the formulas, and [output](output.md#json) explains the fields of results.

{functions}

## Results

Every function returns a frozen dataclass. Rows, such as those in `per_tensor`, are dataclasses too. `to_dict()` returns
a result as the dict that [JSON](output.md#json) has under `data`, with the same keys in the same order, made of plain
dicts, lists, strings and numbers. NaN and Inf stay floats there, so `json.dumps` needs `allow_nan`; messages spell
options as Python does.

{results}

## Errors

All errors are subclasses of `GradtoolError`. Each has the `exit_code` of the command, and a list of `problems`, which
JSON has under `errors`. Every function may raise `UsageError`. Functions with a `backend` may also raise
`BackendUnavailableError`.

{errors}
"""
FUNCTION = """\
## gradtool.{name}

```python
{signature}
```

{text}

Arguments: [gradtool {command}](cli.md#gradtool-{command}). Result: [{result}](#{anchor}).

{raises}"""
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
# These mean the same for all functions; the section on errors has them.
_GENERAL_ERRORS = {"UsageError", "BackendUnavailableError"}


def page() -> str:
    """Return the whole page."""
    public = [getattr(gradtool, name) for name in gradtool.__all__ if name != "__version__"]
    functions = [value for value in public if inspect.isroutine(value)]
    errors = [value for value in public if inspect.isclass(value) and issubclass(value, Exception)]
    results = [value for value in public if dataclasses.is_dataclass(value)]
    return PAGE.format(
        functions="\n\n".join(map(section, functions)),
        results="\n\n".join(map(result, results)),
        errors=table(("error", "is also", "when", "exit code"), map(error, sorted(errors, key=exit_code))),
    ).rstrip("\n")


def section(function: object) -> str:
    """Return the section of a function."""
    text, raises = parts_of(inspect.getdoc(function) or "")
    signature = inspect.signature(function)
    result_name = re.sub(r"\W+$", "", str(signature.return_annotation)).rpartition(".")[2]
    return FUNCTION.format(
        name=function.__name__,
        command=function.__name__.replace("_", "-"),
        signature=wrapped(function.__name__, signature),
        text=text,
        raises=table(("raises", "when"), raises),
        result=result_name,
        anchor=result_name.lower(),
    )


def parts_of(docstring: str) -> tuple[str, list[tuple[str, str]]]:
    """Return what a docstring says before its arguments, and the errors of this function with what each means."""
    text, _, rest = docstring.partition("\nArgs:\n")
    block = re.sub(r"\n {8,}", " ", rest.partition("Raises:\n")[2])
    raises = re.findall(r"^ {4}(\w+): (.*)$", block, re.MULTILINE)
    return plain(text.strip()), [(name, cell(when)) for name, when in raises if name not in _GENERAL_ERRORS]


def wrapped(name: str, signature: inspect.Signature) -> str:
    """Return a call of a function, with its defaults."""
    positional, keyword = [], []
    for parameter in signature.parameters.values():
        is_required = parameter.default is parameter.empty
        default = f'"{parameter.default}"' if isinstance(parameter.default, str) else repr(parameter.default)
        text = parameter.name if is_required else f"{parameter.name}={default}"
        (keyword if parameter.kind is parameter.KEYWORD_ONLY else positional).append(text)
    parts = [*positional, *(["*"] if keyword else []), *keyword]
    lines = [""]
    for part in parts:
        if len(lines[-1]) + len(part) > _WIDTH:
            lines.append("")
        lines[-1] += f"{part}, "
    body = "\n".join(f"    {line.rstrip()}" for line in lines)
    return f"{name}({', '.join(parts)})" if len(lines) == 1 else f"{name}(\n{body}\n)"


def result(cls: type) -> str:
    """Return the section of a result."""
    fields = ", ".join(field.name for field in dataclasses.fields(cls))
    lines = re.sub(rf"(.{{1,{_WIDTH}}})(?: |$)", r"\1\n", fields).strip()
    return RESULT.format(name=cls.__name__, text=plain(inspect.getdoc(cls) or ""), fields=lines)


def error(cls: type) -> tuple[str, ...]:
    """Return the row of an error."""
    bases = [base.__name__ for base in cls.__bases__ if base.__module__ == "builtins" and base is not Exception]
    also = f"`{bases[0]}`" if bases else ""
    return f"`{cls.__name__}`", also, cell(plain(inspect.getdoc(cls) or "")), exit_code(cls)


def exit_code(cls: type) -> str:
    """Return the exit code of an error; none for the base of all."""
    return str(getattr(cls, "exit_code", ""))


def plain(text: str) -> str:
    """Return a docstring as Markdown; a module in it becomes a link to the page that says the same."""
    for module, link in PAGES.items():
        text = text.replace(f"`{module}`", link)
    return text


def cell(text: str) -> str:
    """Return text as a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page())
