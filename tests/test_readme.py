"""The README's code runs as it is printed, and its links lead somewhere."""

import csv
import re
from pathlib import Path

import pytest

from ripple_attention.bench.op import markdown_table, read_csv
from ripple_attention.recipes import all_recipes, find_recipe
from ripple_attention.train import commands

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/algorithm.md",
    "docs/training.md",
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
    (row,) = csv.DictReader((ROOT / "benchmarks/results/digits-amd-epyc-2-threads.csv").open())
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


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_figures_of_training_are_those_of_the_results_file(page):
    text = (ROOT / page).read_text()
    rows = list(csv.DictReader((ROOT / "benchmarks/results/stability-nvidia-h200.csv").open()))
    for system in ("deit", "deit-la", "ripple"):
        runs = [row for row in rows if row["recipe"] == f"cifar100-20-{system}-tiny"]
        top1, largest = (
            ", ".join(f"{float(row[name]):.1f}" for row in runs)
            for name in ("top1", "gradient_norm_max")
        )
        assert re.search(rf"\| {top1} \|.* {largest} \|", text)


def read_results(name):
    return list(csv.DictReader((ROOT / "benchmarks/results" / name).open()))


def test_other_figures_of_training_are_those_of_their_files():
    text = (ROOT / "docs/training.md").read_text().replace("\n", " ")
    linear, ripple = read_results("stability-lr-5e-4-nvidia-h200.csv")
    (speed,) = read_results("training-speed-nvidia-h200.csv")
    assert "lr: 0.001 → 0.0005; epochs: 20 → 10" in linear["changes"]
    first, second = (float(run["top1"]) for run in (linear, ripple))
    assert f"{first:.1f} % (DeiT-LA) and {second:.1f} % (ripple)" in text
    first, second = (float(run["gradient_norm_max"]) for run in (linear, ripple))
    assert f"largest norms of {first:.1f} and {second:.1f}" in text
    assert f"{float(speed['images_per_second']):,.0f} images/s" in text


def test_figures_of_speed_are_those_of_their_files():
    text = (ROOT / "docs/performance.md").read_text()
    rows = read_results("op-nvidia-h200-bfloat16-batch-64.csv")
    named = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    times = {(row["median_ms"]) for row in rows}
    forward = {row["system"]: row["median_ms"] for row in rows if row["pass"] == "forward"}
    ripple, softmax, linear = (
        forward[name] for name in ("ripple tiled triton", "softmax SDPA", "linear attention")
    )
    readme = " ".join((ROOT / "README.md").read_text().split())
    claim = f"takes {ripple} ms for 64 images, PyTorch's softmax attention {softmax} and its linear"
    assert f"{claim} attention {linear};" in readme
    assert len(named) == 7 and {number for _, *numbers in named for number in numbers} <= times
    versions = re.findall(
        r"^\| (\d [^|]+?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (.+?) \|$", text, re.M
    )
    columns = ("forward", 65536), ("query_gradient", 65536), ("key_gradient", 65536)
    columns += (("key_gradient", 196),)
    assert len(versions) == 4
    rows = read_results("tuning-nvidia-h200.csv")
    for version, *printed in versions:
        for number, (kernel, tokens) in zip(printed, columns, strict=True):
            chosen = [
                float(row["microseconds"])
                for row in rows
                if (row["version"], row["kernel"]) == (version, kernel)
                and (row["tokens"], row["head_dim"]) == (str(tokens), "32")
            ]
            assert number == (str(min(chosen)) if chosen else "–")


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
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
