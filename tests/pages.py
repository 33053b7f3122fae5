"""The commands that pages show, and a copy of the repository to run them in."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def console_blocks(page):
    """The commands in the console blocks of a page and what is shown below each, by the heading they stand under."""
    sections, heading, fence = {}, "", None
    for line in page.read_text().splitlines(keepends=True):
        if line.startswith("```"):
            fence = line[3:].strip() if fence is None else None
        elif fence is None and line.startswith("#"):
            heading = line.strip("# \n")
        elif fence == "console":
            steps = sections.setdefault(heading, [])
            if line.startswith("$ "):
                steps.append((line[2:], ""))
            else:
                command, output = steps.pop()
                # A backslash continues the command; what follows a whole command is its output.
                goes_on = not output and command.endswith("\\\n")
                steps.append((command + line, "") if goes_on else (command, output + line))
    return sections


def lay_out_checkout(folder):
    """A copy of the sample data, and the real command on the path."""
    shutil.copytree(ROOT / "sample_data", folder / "checkout" / "sample_data")
    (folder / "bin").mkdir()
    for name, module in (("gradtool", "-P -m gradtool"), ("python", "")):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        command.chmod(0o755)
    return folder / "checkout", {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def in_a_shell(steps, folder, environment):
    """Run the commands of a section in one shell, as a reader does; a NUL after each ends its output."""
    script = "".join(f"{command}code=$?; printf '\\0'; [ $code = 0 ] || exit $code\n" for command, _ in steps)
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
