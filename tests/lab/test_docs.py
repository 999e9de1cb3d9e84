"""README and documentation: they build, their code runs, their numbers are those of the results."""

import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ripple_attention
from ripple_lab.commands import train
from ripple_lab.recipes import find_recipe
from ripple_lab.reproduce import blocks

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in blocks.pages(ROOT)
}
CODE = {name: re.findall(r"```python\n(.*?)```", text, re.S) for name, text in PAGES.items()}


class Page(HTMLParser):
    """What a page loads, links to and can be linked at."""

    def __init__(self, path):
        super().__init__()
        self.loaded, self.links, self.anchors = set(), set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found.get("id"), found.get("name")} - {None}
        led = tag == "a" or found.get("rel") in ("index", "search", "next", "prev")
        kind = self.links if led else self.loaded
        kind |= {found.get("src"), found.get("href")}

    def inside(self, targets):
        """Those targets that are not on another server."""
        return {t for t in targets - {None} if not (urlsplit(t).scheme or urlsplit(t).netloc)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the site is, as `make docs` builds it."""
    output = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "docs", output],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return output.resolve()


@pytest.fixture(scope="module")
def site(folder):
    """Its pages by their path."""
    return {path: Page(path) for path in folder.rglob("*.html")}


def test_every_page_is_built(site, folder):
    built = {f"docs/{path.relative_to(folder).with_suffix('').as_posix()}" for path in site}
    assert built >= PAGES.keys() - {"README"}


def test_links_and_pictures_lead_somewhere(site):
    checked = 0
    for path, page in site.items():
        for target in page.inside(page.links | page.loaded):
            where, _, anchor = target.partition("#")
            file = (path.parent / unquote(urlsplit(where).path)).resolve() if where else path
            assert file.exists(), f"{path.name}: {target}"
            if anchor and file in site:
                assert unquote(anchor) in site[file].anchors, f"{path.name}: {target}"
            checked += 1
    assert checked > 100


def test_nothing_is_loaded_from_elsewhere(site, folder):
    for path, page in site.items():
        assert page.loaded - {None} == page.inside(page.loaded), path.name
    styles = list(folder.rglob("*.css"))
    assert len(styles) > 2
    for style in styles:
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"(?:url\(|@import)\s*[\"']?\s*(?:https?:)?//", text), style.name


def test_every_public_name_is_in_the_reference(site):
    pages = (page for path, page in site.items() if path.parent.name == "api")
    documented = {anchor.rpartition(".")[2] for page in pages for anchor in page.anchors}
    assert set(ripple_attention.__all__) <= documented


@pytest.mark.parametrize("name", [name for name, code in CODE.items() if code])
def test_the_code_of_a_page_runs(name):
    names = {}
    for block in CODE[name]:
        exec(compile(block, name, "exec"), names)


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if "<!-- res" in text])
def test_make_results_changes_nothing(name):
    assert blocks.fill(PAGES[name]) == PAGES[name]


def test_a_block_that_nothing_writes_is_named():
    with pytest.raises(ValueError, match=r"readme-results.*; a page asks for 'nope'"):
        blocks.fill("<!-- results: nope -->\nold\n<!-- end of results -->")


def test_the_readme_is_one_page_with_three_tables():
    readme = PAGES["README"]
    assert len(readme.splitlines()) <= 120
    names = re.findall(r"<!-- results: (\S+) -->\n\|", readme)
    assert names == ["readme-speed", "support-matrix", "readme-results"]
    for target in re.findall(r"\]\(([^)#]+)", readme):
        assert (ROOT / target).exists(), target


def test_commands_of_training_are_understood():
    text = "\n".join(PAGES.values()).replace("\\\n", "")
    found = re.findall(r"^    ripple train ([a-z].*)", text, re.M)
    for line in found:
        name, *words = shlex.split(line, comments=True)
        if not {"--output", "--help"} & set(words):
            kept = [word for word in words if word not in ("--resume", "--quick")]
            train.override(find_recipe(name), kept, "ripple train")
    assert len(found) >= 4


def test_the_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {ripple_attention.__version__}\n" in citation
