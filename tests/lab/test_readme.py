"""The README's code runs as it is printed, and its links lead somewhere."""

import re

import pytest

from results import ROOT, read_results
from ripple_lab.bench.op import markdown_table, read_csv
from ripple_lab.commands import train as commands
from ripple_lab.recipes import all_recipes, find_recipe

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/algorithm.md",
    "docs/training.md",
    "docs/cifar100.md",
    "docs/performance.md",
]


def test_the_readmes_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 4
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (2, 64, 64, 6, 32)
    assert names["y"].shape == (2, 14, 14, 192)
    assert names["weights"].shape[-1] == 5


def test_the_readmes_numbers_are_those_of_the_results_file():
    results = ROOT / "benchmarks/results/op-amd-epyc-2-threads-float32.csv"
    assert markdown_table(read_csv(results)) in (ROOT / "README.md").read_text()


def test_the_demos_figure_is_that_of_the_results_file():
    (row,) = read_results("digits-amd-epyc-2-threads.csv")
    assert f"{float(row['top1']):.1f} % top-1" in all_recipes()["digits"].text
    assert row["changes"] == ""


def test_the_figures_of_shapes_are_those_of_the_results_file():
    *_, last = (
        row
        for row in read_results("shapes-smca-ripple-amd-epyc-1-threads.csv")
        if row["kind"] == "evaluation"
    )
    figures = f"AP {float(last['ap']):.3f}, AP50 {float(last['ap50']):.3f}"
    assert figures in all_recipes()["shapes-smca-ripple"].text
    assert last["step"] == "1200"


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/cifar100.md"])
def test_commands_of_training_are_understood(page):
    lines = re.findall(r"^    ripple train (\S+)(.*?)(?:  #.*)?$", (ROOT / page).read_text(), re.M)
    assert len(lines) >= 4
    for name, words in lines:
        words = re.sub(r"--(resume|quick|help|output \S+)", "", words).split()
        if name != "--list":
            commands.override(find_recipe(name), words, "ripple train")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_versions_agree():
    import ripple_attention

    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {ripple_attention.__version__}\n" in citation
