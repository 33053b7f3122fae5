"""Makes the site of the pages of this repository: python docs/make_site.py [FOLDER], by default site.

Needs `pip install '.[docs]'`. A link that leads nowhere is an error. Beside each page the site has its Markdown, and
llms.txt lists them for programs that read.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path, PurePosixPath

DOCS = Path(__file__).parent
ROOT = DOCS.parent
# Pages that are not in this folder, and what the site calls them.
OTHERS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
PICTURE = "terminal.svg"
LLMS = """\
# {name}

> {description}

{pages}
"""


def pages(repository: str) -> dict[str, str]:
    """Return the text of every page of the site, by its name there; links are those of the site."""
    files = {name: ROOT / name for name in OTHERS} | {f"docs/{page.name}": page for page in sorted(DOCS.glob("*.md"))}
    names = {name: OTHERS.get(name, PurePosixPath(name).name) for name in [*files, f"docs/{PICTURE}"]}
    return {names[name]: relinked(file.read_text("utf-8"), name, names, repository) for name, file in files.items()}


def relinked(text: str, page: str, names: dict[str, str], repository: str) -> str:
    """Return the text of a page: links to pages lead to those of the site, others to files of the repository."""

    def link(found: re.Match[str]) -> str:
        path, anchor = found[1], found[2] or ""
        target = (ROOT / page).parent.joinpath(path).resolve().relative_to(ROOT).as_posix()
        if target in names:
            return f"]({names[target]}{anchor})"
        if not (ROOT / target).exists():
            raise SystemExit(f"{page}: a link leads to {path}, which does not exist")
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"]({repository}/{kind}/main/{target}{anchor})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]+)?\)", link, text)


def llms(home: str, name: str, description: str) -> str:
    """Return the text of llms.txt: the list of pages of the home page."""
    listed = " ".join(home.partition("## Documentation\n")[2].partition("\nLicense")[0].split())
    found = re.findall(r"\[([^]]+)\]\(([^)]+)\): (.*?)(?= -|(?<=\.) (?=\[)|$)", listed)
    return LLMS.format(
        name=name,
        description=description,
        pages="\n".join(f"- [{title}]({page}): {text}" for title, page, text in found),
    )


def main(output: Path) -> None:
    """Make the site in a folder, which is replaced."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    repository = project["urls"]["Repository"]
    texts = pages(repository)
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "docs"
        source.mkdir()
        for page, text in texts.items():
            (source / page).write_text(text, "utf-8")
        shutil.copy(DOCS / PICTURE, source / PICTURE)
        (source / "llms.txt").write_text(llms(texts["index.md"], project["name"], project["description"]), "utf-8")
        config = (DOCS / "zensical.toml").read_text("utf-8")
        config = config.replace("[project]\n", f'[project]\nrepo_url = "{repository}"\n', 1)
        (Path(work) / "zensical.toml").write_text(config, "utf-8")
        subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=work, check=True)
        for page in texts:
            shutil.copy(source / page, Path(work) / "site" / page)
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(Path(work) / "site", output)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site"))
