"""Prints docs/terminal.svg, the README's picture of a terminal: python docs/make_terminal.py > docs/terminal.svg.

The picture shows what the real command prints on a terminal for the sample data, but for the line with the time. It has
the fonts of the reader's system, and is light or dark as that is.

To see any command at any width: python docs/make_terminal.py --columns 40 --folder GRADIENTS -- norm . --top 3.
"""

import argparse
import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parent.parent
COMMANDS = ("norm step_100 --top 3", "clip step_100 --max-norm 1", "clip bad.safetensors --max-norm 1")
FILES = {"step_100": "sharded", "bad.safetensors": "nan.safetensors"}
COLUMNS = 94
# In pixels: a character at the font size of the style sheet, the distance of two lines, and the margin.
WIDTH, LINE, MARGIN = 8.4, 19, 16
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>gradtool on a terminal</title>
<!-- Made by python docs/make_terminal.py > docs/terminal.svg from what the command prints. -->
<style>
  rect {{ fill: #ffffff; stroke: #d0d7de }}
  text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328 }}
  .bold {{ font-weight: bold }}
  .dim {{ fill: #656d76 }}
  .color1 {{ fill: #cf222e }}
  .color2 {{ fill: #1a7f37 }}
  .color3 {{ fill: #9a6700 }}
  .color6 {{ fill: #1b7c83 }}
  @media (prefers-color-scheme: dark) {{
    rect {{ fill: #0d1117; stroke: #30363d }}
    text {{ fill: #e6edf3 }}
    .dim {{ fill: #8d96a0 }}
    .color1 {{ fill: #ff7b72 }}
    .color2 {{ fill: #3fb950 }}
    .color3 {{ fill: #d29922 }}
    .color6 {{ fill: #39c5cf }}
  }}
</style>
<rect x="0.5" y="0.5" width="{inner_width}" height="{inner_height}" rx="8"/>
{texts}
</svg>"""


def main() -> None:
    """Print the README's picture, or that of a command in a folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--columns", type=int, default=COLUMNS)
    parser.add_argument("--folder", default=".")
    parser.add_argument("arguments", nargs="*", metavar="COMMAND")
    given = parser.parse_args()
    if not given.arguments:
        print(readme_picture())
        return
    lines = [f"\x1b[32m$\x1b[0m gradtool {shlex.join(given.arguments)}"]
    print(picture([*lines, *printed(given.arguments, given.folder, given.columns).splitlines()], given.columns))


def readme_picture() -> str:
    """Return the picture of several commands with copies of the sample data."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, sample in FILES.items():
            source = ROOT / "sample_data" / sample
            (shutil.copytree if source.is_dir() else shutil.copy)(source, Path(folder) / name)
        for command in COMMANDS:
            shown = printed(command.split(), folder, COLUMNS).splitlines()
            lines += [
                f"\x1b[32m$\x1b[0m gradtool {command}",
                *(line for line in shown if "\x1b[1mtime " not in line),
                "",
            ]
    return picture(lines[:-1], COLUMNS)


def picture(lines: list[str], columns: int) -> str:
    """Return the picture of lines with escape sequences; as a terminal does, it goes on below after its last column."""
    console = Console(width=columns)
    rows = [row for line in lines for row in rows_of(line, console)]
    width, height = round(columns * WIDTH + 2 * MARGIN), len(rows) * LINE + 2 * MARGIN
    texts = (text for number, row in enumerate(rows) for text in texts_of(row, number))
    return SVG.format(
        width=width, height=height, inner_width=width - 1, inner_height=height - 1, texts="\n".join(texts)
    )


def rows_of(line: str, console: Console) -> list[Text]:
    """Return the rows of a terminal that a line takes."""
    text = Text.from_ansi(line)
    return list(text.divide(range(console.width, len(text), console.width)))


def printed(arguments: list[str], folder: str, columns: int) -> str:
    """Return what the command prints on a terminal, with its escape sequences."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
    variables |= {"TERM": "xterm", "PYTHONUTF8": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "gradtool", *arguments]
    parts = []
    with subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, cwd=folder, env=variables):  # noqa: S603
        os.close(writer)
        while part := read(reader):
            parts.append(part)
    os.close(reader)
    # A slow machine shows a progress bar, and erases it before the result.
    shown = b"".join(parts).decode().replace("\r\n", "\n").rpartition("\x1b[2K")[2]
    return shown.replace("\x1b[?25h", "")


def read(reader: int) -> bytes:
    """Return more of what is shown; nothing after the end, which Linux reports as an error."""
    try:
        return os.read(reader, 65_536)
    except OSError:
        return b""


def texts_of(row: Text, number: int) -> list[str]:
    """Return the texts of a row, each at its columns and as wide as they are, whatever font there is."""
    texts, column = [], 0
    y = MARGIN + (number + 0.75) * LINE
    for segment in row.render(Console(width=1_000)):
        for match in re.finditer(r"\S+(?: \S+)*", segment.text):
            x, length = MARGIN + (column + match.start()) * WIDTH, len(match[0]) * WIDTH
            place = f'x="{x:.1f}" y="{y:.1f}" textLength="{length:.1f}"'
            texts.append(f"<text {place}{look(segment.style)}>{escape(match[0])}</text>")
        column += len(segment.text)
    return texts


def look(style: Style | None) -> str:
    """Return the classes of a style in the style sheet, as an attribute."""
    names = [name for name in ("bold", "dim") if getattr(style, name, None)]
    names += [f"color{style.color.number}"] if style and style.color else []
    return f' class="{" ".join(names)}"' if names else ""


if __name__ == "__main__":
    main()
