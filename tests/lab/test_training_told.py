"""Every result that the page on training tells of is that of a committed file."""

import re

import pytest

from results import ROOT, read_results


@pytest.mark.parametrize("page", ["README.md", "docs/training.md"])
def test_figures_of_training_are_those_of_the_results_file(page):
    text = (ROOT / page).read_text()
    rows = read_results("stability-nvidia-h200.csv")
    for system in ("deit", "deit-la", "ripple"):
        runs = [row for row in rows if row["recipe"] == f"cifar100-20-{system}-tiny"]
        top1, largest = (
            ", ".join(f"{float(row[name]):.1f}" for row in runs)
            for name in ("top1", "gradient_norm_max")
        )
        assert re.search(rf"\| {top1} \|.* {largest} \|", text)


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


def test_speeds_of_replayed_steps_are_those_of_their_file():
    text = (ROOT / "docs/training.md").read_text()
    rows = {
        (row["recipe"], row["compiled"], row["graphs"]): row
        for row in read_results("train-graphs-nvidia-h200.csv")
    }
    for (recipe, compiled, graphs), row in rows.items():
        if graphs == "True":
            times = (row["step_ms"], rows[recipe, compiled, "False"]["step_ms"], row["kernels_ms"])
            rates = row["images_per_second"], row["whole_epoch_images_per_second"]
            cells = [f"`{recipe}`", "yes" if compiled == "True" else "no"]
            cells += [f"{float(x):.1f}" for x in times] + [f"{float(x):,.0f}" for x in rates]
            assert f"| {' | '.join(cells)} |" in text
