"""Pages say what the result files say; the README's code, links and commands are good."""

import re
import shlex
from pathlib import Path

import pytest

from ripple_lab.commands import train as commands
from ripple_lab.recipes import find_recipe
from ripple_lab.reproduce import blocks

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in blocks.pages(ROOT)}


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if "<!-- res" in text])
def test_make_results_changes_nothing(page):
    assert blocks.fill(PAGES[page]) == PAGES[page]


def test_a_block_that_nothing_writes_is_named():
    with pytest.raises(ValueError, match=r"readme-results.*; a page asks for 'nope'"):
        blocks.fill("<!-- results: nope -->\nold\n<!-- end of results -->")


def test_the_readme_is_one_page_with_three_tables():
    assert len(PAGES["README.md"].splitlines()) <= 120
    names = re.findall(r"<!-- results: (\S+) -->\n\|", PAGES["README.md"])
    assert names == ["readme-speed", "support-matrix", "readme-results"]


def test_the_readmes_python_runs():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL):
        exec(compile(block, "README.md", "exec"), names)
    assert names["y"].shape == names["x"].shape


def test_commands_of_training_are_understood():
    text = "\n".join(PAGES.values()).replace("\\\n", "")
    found = re.findall(r"^    ripple train ([a-z].*)", text, re.M)
    for line in found:
        name, *words = shlex.split(line, comments=True)
        if not {"--output", "--help"} & set(words):
            kept = [word for word in words if word not in ("--resume", "--quick")]
            commands.override(find_recipe(name), kept, "ripple train")
    assert len(found) >= 4


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), target


def test_the_versions_agree():
    import ripple_attention

    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {ripple_attention.__version__}\n" in citation
