"""Prints the part of CHANGELOG.md that is about a version; refuses a tag that is not the version of the package."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def notes(changelog: str, version: str) -> str:
    """What a changelog says about a version; raises `ValueError` if that is nothing, or the version has no date."""
    heading = re.search(rf"^## {re.escape(version)} \((.*)\)\n", changelog, re.MULTILINE)
    if heading is None:
        raise ValueError(f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        raise ValueError(f"CHANGELOG.md: the heading of {version} says ({heading[1]}) and not a date")
    text = re.split(r"^## ", changelog[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not text:
        raise ValueError(f"CHANGELOG.md says nothing about {version}")
    return text


def main() -> str:
    """The notes for the tag that is given."""
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "gradtool" / "_version.py").read_text(), re.MULTILINE)[1]
    if sys.argv[1:] != [f"v{version}"]:
        raise ValueError(f"the tag is {' '.join(sys.argv[1:]) or 'missing'}, and the version is {version}")
    return notes((ROOT / "CHANGELOG.md").read_text(), version)


if __name__ == "__main__":
    try:
        print(main())
    except ValueError as error:
        sys.exit(f"notes.py: {error}")
