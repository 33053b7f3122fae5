"""What commands print as JSON, checked against the schema that the package has."""

import functools
import importlib.resources
import json

import jsonschema

from gradtool.report import requested_format


def check_printed(arguments, printed):
    """Check the output of a command line, if that is JSON; one that was killed may have none."""
    words = list(map(str, arguments))
    form = requested_format(words)
    if not printed or {"--help", "-h"} & set(words):
        return
    if form == "json":
        checked(printed)
    elif form == "jsonl":
        for line in printed.splitlines():
            checked(line, "line")


def checked(printed, definition=""):
    """One object as it was printed, or a line of JSON lines: parsed, if it is as the schema says."""
    value = json.loads(printed)
    error = jsonschema.exceptions.best_match(validator(definition).iter_errors(value))
    assert error is None, f"{error.json_path}: {error.message}"
    return value


@functools.cache
def validator(definition=""):
    """The validator of the one object, or of a definition of the schema."""
    schema = package_schema()
    if definition:
        schema = {"$schema": schema["$schema"], "$ref": f"#/$defs/{definition}", "$defs": schema["$defs"]}
    return jsonschema.Draft202012Validator(schema)


def package_schema():
    return json.loads(importlib.resources.files("gradtool").joinpath("schema.json").read_text())
