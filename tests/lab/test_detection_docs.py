"""The page on detection: its commands are understood, its numbers are those of their files."""

import csv
import re
from pathlib import Path

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("timm")

from ripple_lab import paper
from ripple_lab.bench.detection import DetectionBenchmark, detector_cost
from ripple_lab.commands import train as commands
from ripple_lab.recipes import all_recipes, find_recipe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
TEXT = (ROOT / "docs/detection.md").read_text(encoding="utf-8")
SYSTEMS = {"softmax": "smca", "linear": "smca-la", "ripple": "smca-ripple"}
OVERFIT = "overfit-coco-4-smca-ripple-amd-epyc-1-threads.csv"
SPEED = "detection-amd-epyc-1-threads-float32.csv"
GPU_SPEED = "detection-nvidia-h200-bfloat16.csv"


def read(name):
    return list(csv.DictReader((RESULTS / name).open()))


def rows_of_table(first_heading):
    """The cells of the page's table whose first heading is this, row by row."""
    table = re.search(rf"^\| {re.escape(first_heading)} \|.*\n\|[-|: ]+\n((?:\|.*\n)+)", TEXT, re.M)
    assert table, first_heading
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in table[1].splitlines()]


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(targets) >= 5
    for target in targets:
        assert (ROOT / "docs" / target).exists(), target


def test_commands_of_training_are_understood():
    joined = TEXT.replace("\\\n", " ")  # a command may go over several lines
    lines = re.findall(r"^    ripple train (\S+)(.*?)(?: +#.*)?$", joined, re.M)
    assert len(lines) >= 5 and any("--optimizer.drops" in words for _, words in lines)
    for name, words in lines:
        commands.override(find_recipe(name), words.split(), "ripple train")


def test_costs_are_counted_and_beside_the_papers():
    rows = rows_of_table("name")
    assert [name for name, *_ in rows] == list(paper.DETECTORS)
    for name, _, *numbers in rows:
        cost, theirs = detector_cost(name), paper.DETECTORS[name]
        parameters, gflops = cost.parameters / 1e6, cost.gflops
        ours = f"{parameters:.1f}", f"{gflops:.0f} G"
        assert numbers == [
            ours[0],
            f"{theirs['parameters']:.1f}",
            ours[1],
            f"{theirs['gflops']:.0f} G",
        ]


def test_what_came_of_shapes_is_in_their_curves():
    rows = rows_of_table("encoder")
    assert [attention for attention, *_ in rows] == list(SYSTEMS)
    for attention, *numbers, minutes, link in rows:
        name = f"shapes-{SYSTEMS[attention]}-amd-epyc-1-threads.csv"
        assert link == f"[curve](../benchmarks/results/{name})"
        *_, last = (row for row in read(name) if row["kind"] == "evaluation")
        assert last["step"] == "1200"
        assert numbers == [f"{float(last[key]):.3f}" for key in ("ap", "ap50", "ap75")]
        assert float(last["ap50"]) >= 0.5
        about = all_recipes()[f"shapes-{SYSTEMS[attention]}"].text
        assert f"AP {numbers[0]}, AP50 {numbers[1]}" in about
        assert f"about {minutes.removeprefix('about ')} minutes" in " ".join(about.split())


def test_what_came_of_four_photos_is_in_its_curve():
    rows = [row for row in read(OVERFIT) if row["kind"] == "evaluation"]
    curve = {int(row["step"]): float(row["ap"]) for row in rows}
    printed = re.findall(r"AP (\d\.\d\d) after\s(\d+) steps", TEXT)
    assert len(printed) >= 3
    assert [f"{curve[int(step)]:.2f}" for _, step in printed] == [ap for ap, _ in printed]
    assert int(printed[-1][1]) == max(curve)


def test_speeds_are_those_of_their_file():
    measured = {
        (f"{row['height']}×{row['width']}", row["pass"], row["system"]): float(row["median_ms"])
        for row in read(SPEED)
    }
    rows = rows_of_table("encoder, one core of a CPU")
    assert len(rows) == len(measured) / len(SYSTEMS)
    for size, *numbers in rows:
        cells, kind = size.split(", ")
        found = [measured[cells, kind, system] for system in SYSTEMS]
        assert numbers == [f"{milliseconds / 1e3:.2f} s" for milliseconds in found]


def test_speeds_on_a_gpu_are_those_of_their_file():
    measured: dict[str, list[float]] = {}
    for row in read(GPU_SPEED):
        size = f"{row['height']}×{row['width']}"
        whole = f"whole detector, {size} pixels" if row["part"] == "detector" else size
        times = measured.setdefault(f"{whole}, {row['pass']}", [])
        times.append(float(row["median_ms"]))
    rows = rows_of_table("encoder, one H200, ms")
    assert {size: numbers for size, *numbers in rows} == {
        size: [f"{x:.2f}" for x in times] for size, times in measured.items()
    }
    for size, (softmax, _, ripple) in measured.items():
        small = size.startswith(("25×34", "whole"))
        assert small or ripple < softmax
        assert "200×272" not in size or 10 * ripple < softmax


def test_the_sizes_are_those_that_are_timed():
    config = DetectionBenchmark()
    sizes = [f"{height}×{width}" for height, width in (config.grids[0], config.grids[-1])]
    assert f"on {sizes[0]} cells (a picture of {'×'.join(map(str, config.image_size))}) up to" in (
        " ".join(TEXT.split())
    )
    assert sizes[1] in TEXT
