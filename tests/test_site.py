"""The pages of the site are those of the repository, and every link in them leads to where it led there."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://example.org/x"


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("make_site", ROOT / "docs" / "make_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(site):
    return site.pages(REPOSITORY)


def names_in(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            yield from (name for names in entry.values() for name in names)


def test_every_page_is_in_the_navigation_once(pages):
    nav = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(names_in(nav)) == sorted(pages)


def test_every_link_leads_to_a_page_of_the_site_or_to_a_file_of_the_repository(site, pages):
    for page, text in pages.items():
        for link in re.findall(r"\]\((?!#)([^)\s]+)\)", text):
            path = link.partition("#")[0]
            if path.startswith(f"{REPOSITORY}/"):
                kind, branch, target = path.removeprefix(f"{REPOSITORY}/").split("/", 2)
                assert (ROOT / target).is_dir() if kind == "tree" else (ROOT / target).is_file(), (page, link)
                assert branch == "main"
            else:
                assert path in {*pages, site.PICTURE} or path.startswith("https://"), (page, link)


def test_links_between_pages_keep_their_anchors(site):
    names = {"README.md": "index.md", "docs/cli.md": "cli.md", "docs/gpu.md": "gpu.md"}
    text = "[a](cli.md#norm) [b](../README.md) [c](#here) [d](https://x.org/y) [e](../tests) [f](../setup.py)"
    assert site.relinked(text, "docs/gpu.md", names, REPOSITORY) == (
        f"[a](cli.md#norm) [b](index.md) [c](#here) [d](https://x.org/y) [e]({REPOSITORY}/tree/main/tests) "
        f"[f]({REPOSITORY}/blob/main/setup.py)"
    )


def test_a_link_that_leads_nowhere_is_an_error(site):
    with pytest.raises(SystemExit, match=r"docs/gpu\.md: a link leads to nope\.md, which does not exist"):
        site.relinked("[x](nope.md)", "docs/gpu.md", {}, REPOSITORY)


def test_llms_txt_lists_every_page_with_what_it_is_about(site, pages):
    text = site.llms(pages["index.md"], "gradtool", "What it is")
    assert text.startswith("# gradtool\n\n> What it is\n\n- [Why gradients in files?](why.md): five jobs")
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \w.*\.$", text, re.MULTILINE)
    assert sorted(listed) == sorted(pages.keys() - {"index.md"})
