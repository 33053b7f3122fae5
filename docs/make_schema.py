"""Prints the JSON Schema of what commands print: python docs/make_schema.py > gradtool/schema.json.

It is made from the classes of results. docs/schema.toml says what their fields mean, docs/output.md has the codes of
errors and warnings.
"""

import importlib
import inspect
import json
import pkgutil
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import gradtool
from gradtool import errors, help, options  # noqa: A004
from gradtool.cli import COMMANDS
from gradtool.errors import Problem
from gradtool.ops.results import SUMMARIES, is_rows
from gradtool.report.fields import NONFINITE, kind_of
from gradtool.report.json_output import SCHEMA

DOCS = Path(__file__).parent
ABOUT = (
    f"One object, printed on stdout, on failure too. {help.DOCS}/output.md explains it. "
    "A line of --format jsonl is described by #/$defs/line."
)
EMPTY = {"properties": {"data": {"maxProperties": 0}}}
STATUS = {
    "ok": {"properties": {"exit_code": {"const": 0}, "data": {"minProperties": 1}, "errors": {"maxItems": 0}}},
    "found": {"properties": {"exit_code": {"const": 1}, "errors": {"minItems": 1}}},
    "error": {"properties": {"exit_code": {"minimum": 2}, "errors": {"minItems": 1}}},
}
# In the one object, what may be a line has no type.
NO_LINE = {"properties": {"type": False}}
PLAIN = {
    float: {"$ref": "#/$defs/float"},
    Problem: {"$ref": "#/$defs/warning"},
    int: {"type": "integer"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
}


class Schema:
    """Definitions of the classes met so far, by their names."""

    def __init__(self) -> None:
        tables = tomllib.loads((DOCS / "schema.toml").read_text())
        self.choices = tables.pop("choices")
        self.texts = {f"{table}.{name}": text for table, texts in tables.items() for name, text in texts.items()}
        self.used: set[str] = set()
        self.types = types_of_package()
        self.definitions = {"float": float_schema(), "error": problem("Error codes"), "warning": problem("Warnings")}
        # The kinds of JSON lines, by the classes of rows.
        self.kinds: dict[str, set[str]] = {}

    def whole(self) -> dict:
        """Return the schema of what is printed, with that of a line among its definitions."""
        results = {
            name: self.result(getattr(gradtool, command.options.operation)) for name, command in COMMANDS.items()
        }
        rows = {
            command: [field.name for field in fields(cls) if is_rows(field.name)] for command, cls in results.items()
        }
        self.definitions["call"] = call(results)
        of_object = [of_command(name, cls, {"required": rows[name]}) for name, cls in results.items()]
        of_line = [
            of_command(name, cls, {"properties": dict.fromkeys(rows[name], False)}) for name, cls in results.items()
        ]
        lines = [{"$ref": f"#/$defs/{name}", "required": ["type"]} for name in self.kinds]
        last = {"$ref": "#/$defs/call", "required": ["type"], "allOf": of_line}
        self.definitions["line"] = {
            "description": "A line of --format jsonl: a row, or the last line, which has all but the rows.",
            "anyOf": [last, *lines],
        }
        self.refuse_unused()
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "What gradtool prints with --format json",
            "description": ABOUT,
            "$ref": "#/$defs/call",
            **NO_LINE,
            "allOf": of_object,
            "$defs": self.definitions,
        }

    def result(self, function: Callable[..., Any]) -> type:
        """Define and return the class of a command's result; whether it has its rows depends on the format."""
        cls = getattr(gradtool, inspect.signature(function).return_annotation)
        self.define(cls)
        definition = self.definitions[cls.__name__]
        definition["required"] = [name for name in definition["required"] if not is_rows(name)]
        return cls

    def define(self, cls: type) -> None:
        """Define a class: an object with all of its fields and no others."""
        if cls.__name__ in self.definitions:
            return
        self.definitions[cls.__name__] = definition = {"description": description_of(cls), "type": "object"}
        hints = self.hints(cls)
        names = [name for name in hints if name != "problems"]
        definition["properties"] = {name: self.field(cls, name, hints[name]) for name in names}
        definition["required"] = names
        definition["additionalProperties"] = False
        for name in filter(is_rows, names):
            for row in self.defined_as(typing.get_args(hints[name])[0]):
                self.line(row, kind_of(name))

    def hints(self, cls: type) -> dict[str, Any]:
        """Return the types of the fields of a class, with those of its summaries among them."""
        hints = typing.get_type_hints(cls, localns=self.types)
        local = {field.name: hints[field.name] for field in fields(cls)}
        for name in SUMMARIES:
            local |= self.hints(local.pop(name)) if name in local and is_dataclass(local[name]) else {}
        return local

    def defined_as(self, cls: type) -> list[type]:
        """Return the class and those that extend it: what an object of it may be."""
        return [kind for kind in self.types.values() if issubclass(kind, cls)]

    def line(self, cls: type, kind: str) -> None:
        """Let a class be a JSON line, too."""
        kinds = self.kinds.setdefault(cls.__name__, set())
        kinds.add(kind)
        text = {"description": "Only in JSON lines."}
        self.definitions[cls.__name__]["properties"] |= {"type": {"enum": sorted(kinds)} | text}

    def field(self, cls: type, name: str, hint: Any) -> dict:
        """Return what a field means, and what it may be."""
        keys = [*(f"{base.__name__}.{name}" for base in cls.__mro__), f"any.{name}"]
        key = next((key for key in keys if key in self.texts), None)
        if key is None:
            sys.exit(f"docs/schema.toml does not say what {keys[0]} is")
        self.used.add(key)
        choices = next((self.choices[key] for key in keys if key in self.choices), None)
        if isinstance(choices, str):
            choices = list(typing.get_args(getattr(options, choices)))
        kind = {"enum": choices} if choices else self.type_of(hint, name)
        return {"description": self.texts[key]} | kind

    def type_of(self, hint: Any, name: str) -> dict:
        """Return what a type is in JSON."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in {typing.Union, types.UnionType}:
            schema = {"anyOf": [self.type_of(argument, name) for argument in arguments]}
        elif origin is typing.Literal:
            schema = {"enum": list(arguments)}
        elif origin is tuple and arguments[1:] == (...,):
            schema = {"type": "array", "items": self.type_of(arguments[0], name) | (NO_LINE if is_rows(name) else {})}
        elif origin is dict and arguments[0] is str:
            schema = {"type": "object", "additionalProperties": self.type_of(arguments[1], name)}
        elif is_dataclass(hint) and hint is not Problem:
            schema = self.reference(hint)
        else:
            schema = PLAIN[hint]
        return schema

    def reference(self, cls: type) -> dict:
        """Return a reference to a class and to those that extend it, which are defined."""
        kinds = self.defined_as(cls)
        for subclass in kinds:
            self.define(subclass)
        references = [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds]
        return references[0] if len(references) == 1 else {"anyOf": references}

    def refuse_unused(self) -> None:
        """No text is about a field that is gone."""
        if unused := self.texts.keys() - self.used:
            sys.exit(f"docs/schema.toml is about what there is not: {', '.join(sorted(unused))}")


def types_of_package() -> dict[str, type]:
    """All classes of the package by name, because many are imported only for type checkers."""
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages(gradtool.__path__, "gradtool.")]
    values = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {cls.__name__: cls for cls in values if cls.__module__.startswith("gradtool.")}


def description_of(cls: type) -> str:
    """Return what the docstring of a class says, in the words of JSON."""
    return " ".join((inspect.getdoc(cls) or "").split()).replace("None", "null")


def float_schema() -> dict:
    """Return the schema of a number that reads back to the same bits, or one that JSON does not have."""
    text = "A number that reads back to the same bits; as text where JSON has no number for it."
    return {"description": text, "anyOf": [{"type": "number"}, {"enum": list(NONFINITE)}]}


def problem(section: str) -> dict:
    """Return the schema of an error or a warning, whose codes are in a section of docs/output.md."""
    page = (DOCS / "output.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    texts = {"message": "What is wrong.", "hint": "What to do.", "file": "Where.", "tensor": "Its name."}
    cells = re.findall(r"^\| (`[a-z-]+`(?:, `[a-z-]+`)*) \|", page, re.MULTILINE)
    known = re.findall(r"[a-z-]+", " ".join(cells))
    codes = {"description": "Does not change between versions.", "enum": known}
    strings = {key: {"description": text, "type": "string"} for key, text in texts.items()}
    index = {"description": "The element that it is about, counted from 0 in C order.", "type": "integer", "minimum": 0}
    return closed({"code": codes} | strings | {"index": index}, ["code", "message"])


def call(results: dict[str, type]) -> dict:
    """Return the schema of the object around the data of a call."""
    codes = [value for name, value in vars(errors).items() if name.startswith("EXIT_")]
    properties = {
        "type": {"description": "Only in JSON lines.", "const": "result"},
        "gradtool": {"description": "The version of the program.", "type": "string"},
        "schema": {"description": "The version of this format.", "const": SCHEMA},
        "command": {"description": "The first word of the command line that is not an option.", "type": "string"},
        "status": {"description": "Whether the call succeeded, found a problem, or failed."} | {"enum": [*STATUS]},
        "exit_code": {
            "description": "The exit code of the process; 128 plus the signal's number if a signal ended it.",
            "anyOf": [{"enum": sorted(codes)}, {"type": "integer", "minimum": 129, "maximum": 192}],
        },
        "data": {"description": "The result; empty if the command failed before it had a result.", "type": "object"},
        "errors": {"description": "What is wrong.", "type": "array", "items": {"$ref": "#/$defs/error"}},
    }
    has_data = {"properties": {"data": {"minProperties": 1}}}
    rules = [{"if": {"properties": {"status": {"const": status}}}, "then": rule} for status, rule in STATUS.items()]
    # `check` tells what it has found in the files that it could read.
    stopped = {"properties": {"status": {"const": "error"}, "command": {"not": {"const": "check"}}}}
    rules += [{"if": stopped, "then": EMPTY}]
    rules += [{"if": has_data, "then": {"properties": {"command": {"enum": [*results]}}}}]
    return closed(properties, [key for key in properties if key != "type"]) | {"allOf": rules}


def of_command(command: str, cls: type, rows: dict) -> dict:
    """Return the rule for the data of a command, if there are any."""
    is_it = {"properties": {"command": {"const": command}, "data": {"minProperties": 1}}}
    return {"if": is_it, "then": {"properties": {"data": {"$ref": f"#/$defs/{cls.__name__}"} | rows}}}


def closed(properties: dict, required: list[str]) -> dict:
    """Return the schema of an object without other properties."""
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


if __name__ == "__main__":
    print(json.dumps(Schema().whole(), indent=2))
