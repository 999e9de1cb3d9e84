"""The paper's figures: what is drawn, of which benchmark, and what is said below."""

from dataclasses import dataclass
from pathlib import Path

from ripple_lab.reproduce.markdown import markdown_table, rounded, short
from ripple_lab.reproduce.speeds import (
    RESULTS,
    figure_command,
    figure_rows,
    measured_on,
    operator_command,
    points,
    refused,
)
from ripple_lab.reproduce.table import TableRow
from ripple_lab.results import Results, Row

Made = tuple[str, list[str]]  # a page, and the commands of what it lacks


@dataclass(frozen=True)
class Curves:
    """Time and memory against tokens."""

    name: str
    title: str
    setting: str
    lines: tuple[TableRow, ...]  # whole models
    alone: tuple[TableRow, ...] = ()  # attention alone


@dataclass(frozen=True)
class Panel:
    """What was measured of one pass, time on the left and memory on the right."""

    title: str
    step: str  # the pass, as result files name it
    lines: tuple[TableRow, ...]
    rows: list[Row]


SPEED = Curves(
    "figure-speed",
    "Figure: time and memory against tokens",
    "The paper: whole vision transformers of width 96, batch 4, on one V100; it does not say "
    "whether forward alone. Ours: whole models of 12 layers, 9 of them ripple's. Solid lines are "
    "fused kernels; the paper's naïve algorithm and its DP, dashed, are PyTorch operations.",
    (
        TableRow("DeiT: softmax, fused kernel", system=("DeiT, softmax SDPA",)),
        TableRow("DeiT-LA: linear, our kernels", system=("DeiT-LA",)),
        TableRow("ripple, R_max 4: tiles, our kernels", system=("ripple, R_max 4",)),
        TableRow(
            "ripple (DP): tables, PyTorch operations",
            system=("ripple, tables in PyTorch operations",),
        ),
        TableRow(
            "ripple (naïve): all pairs, PyTorch operations",
            system=("ripple, all pairs in PyTorch operations",),
        ),
    ),
)
PARTITIONS = Curves(
    "figure-speed-partitions",
    "Figure: time and memory of the partitions against tokens",
    "The paper: whole vision transformers of width 96, batch 4. Ours: whole models, each layer by "
    "what `auto` took when it was measured. From 1,024 tokens on, logarithmic and dense rings "
    "reach beyond the tiles, so these models meet all pairs there. The paper reads summed-area "
    "tables: the last pair of panels has them as kernels, for attention alone. Not yet timed are "
    "tables of logarithmic rings, and tables as kernels in whole models.",
    (
        TableRow("R_max 4: tiles, kernels", system=("ripple, R_max 4",)),
        TableRow(
            "logarithmic: tiles at 256 tokens, then all pairs, kernels",
            system=("ripple, logarithmic",),
        ),
        TableRow("dense: tiles at 256 tokens, then all pairs, kernels", system=("ripple, dense",)),
    ),
    (
        TableRow("alone, dense: tables, kernels", system=("ripple table triton",), growing=True),
        TableRow("alone, R_max 4: tables, kernels", system=("ripple table triton",)),
        TableRow("alone, R_max 4: all pairs, kernels", system=("ripple naive triton",)),
        TableRow("alone, R_max 4: tiles, kernels", system=("ripple tiled triton",)),
    ),
)
COMMAND = figure_command(SPEED.lines + PARTITIONS.lines)

# The runs of the divergence: a name, the file of the metrics, its epochs, the command.
DIVERGENCE = (
    (
        "stick-breaking, as printed",
        "cifar100-300-epochs-nvidia-h200/ripple.csv",
        300,
        "ripple train cifar100-ripple-tiny --ema-decay None --optimizer.no-decay-feature-maps "
        "--hardware.compile",
    ),
    (
        "stick-breaking, plain",
        "cifar100-plain-sticks-nvidia-h200/ripple.csv",
        60,
        "ripple train cifar100-short-ripple-tiny --model.balanced False --hardware.compile",
    ),
)
IMAGES = 8  # of each epoch's last batch, in runs of version 0.1, which do not name their number
FIXED_IMAGES = 512  # that runs look at today, the same after each epoch


def panels(curves: Curves, results: Results) -> list[Panel]:
    """What a figure shows, a line of it each."""
    models = figure_rows(results, "models")
    found = [Panel(step, step, curves.lines, models) for step in ("forward", "training step")]
    if curves.alone:
        rows, step = figure_rows(results, "operators"), "forward+backward"
        found.append(Panel("attention alone, both passes", step, curves.alone, rows))
    return found


def make_curves(curves: Curves, results: Results, folder: Path) -> Made:
    """Draws the figure; gives its page, and what is missing."""
    from ripple_lab.reproduce.charts import draw_curves

    found = panels(curves, results)
    draw_curves(curves.title, found, folder / curves.name)
    parts = [f"# {curves.title}", curves.setting, f"![{curves.title}]({curves.name}.png)"]
    measured = dict.fromkeys(measured_on(panel.rows) for panel in found if panel.rows)
    parts += [f"Measured: {', and '.join(measured)}."] if measured else []
    lacking = []
    for panel in found:
        absent: dict[str, list[str]] = {}
        for line in panel.lines:
            if not points(panel.rows, line, panel.step, "median_ms"):
                alone = line in curves.alone
                command = operator_command(line.growing) if alone else COMMAND
                absent.setdefault(command, []).append(line.label.split(":")[0])
        lacking += [
            f"{panel.title}, {'; '.join(names)}: not yet run: `{command}`"
            for command, names in absent.items()
        ]
        if sum(map(len, absent.values())) < len(panel.lines):
            parts.append(_curve_table(panel))
    return _page(parts, lacking)


def _curve_table(panel: Panel) -> str:
    cells: dict[str, dict[int, str]] = {}
    for line in panel.lines:
        times, memory = (
            dict(points(panel.rows, line, panel.step, quantity))
            for quantity in ("median_ms", "peak_mb")
        )
        cells[line.label] = refused(panel.rows, line, panel.step) | {
            size: f"{short(times[size])} ms, {short(memory.get(size))} MB" for size in times
        }
    sizes = sorted({size for found in cells.values() for size in found})
    lines = [[label, *(found.get(size, "–") for size in sizes)] for label, found in cells.items()]
    return markdown_table([panel.title, *(f"{size:,} tokens" for size in sizes)], lines)


def divergence_runs(results: Results) -> dict[str, list[Row]]:
    """The rows on ripples of those runs that came to their end, by name."""
    found = {}
    for name, file, epochs, _ in DIVERGENCE:
        rows = [row for row in results.file(file) if row["kind"] == "ripples"]
        if rows and rows[-1]["epoch"] >= epochs - 0.5:
            found[name] = rows
    return found


def make_divergence(results: Results, folder: Path) -> Made:
    """Draws the figure on the JSD; gives its page, and what is missing."""
    from ripple_lab.divergence import uniform_divergence
    from ripple_lab.reproduce.charts import draw_divergence

    runs = divergence_runs(results)
    groups = max((rows[0]["groups"] for rows in runs.values()), default=5)
    uniform = uniform_divergence(groups)
    title = "Figure: JSD between stick-breaking and fixed weights, in training"
    draw_divergence(title, runs, uniform, folder / "figure-jsd")
    images = {name: rows[0].get("images") or IMAGES for name, rows in runs.items()}
    rows = []
    for name, found in runs.items():
        values = [row["jsd"] for row in found]
        cells = [rounded(value, 4) for value in (values[0], max(values), values[-1])]
        rows.append([name, str(images[name]), f"{found[-1]['epoch']:.0f}", *cells])
    parts = [
        f"# {title}",
        "The Jensen–Shannon divergence, in nats, of the spatial weights from the fixed ones (1/2, "
        f"1/4, …, the remainder for the rest), a mean over images, tokens, heads and layers. The "
        f"dashed line is that of uniform weights, {uniform:.4f} for {groups} groups. The paper "
        "averages over all training images, and gives neither a unit nor numbers. `ripple train` "
        f"takes {FIXED_IMAGES} evaluation images, the same after each epoch; version 0.1 took "
        f"{IMAGES} of each epoch's last batch. The paper's curve starts near 0, as plain sticks "
        "do; the balanced sticks that it prints, and that are the default here, start at the "
        "uniform line.",
        f"![{title}](figure-jsd.png)",
        markdown_table(("run", "images", "epochs", "JSD, first", "largest", "last"), rows)
        if rows
        else "",
    ]
    lacking = [
        f"{name}{f', over {FIXED_IMAGES} images' * (name in runs)}: not yet run: `{command}`, "
        f"whose metrics.csv then goes to {RESULTS}/{file}"
        for name, file, _, command in DIVERGENCE
        if images.get(name, 0) < FIXED_IMAGES
    ]
    return _page(parts, lacking)


def make_figure_1(results: Results, folder: Path) -> Made:
    """Draws the paper's figure 1; nothing is measured for it."""
    from ripple_lab.plots import draw_figure_1

    for suffix in (".png", ".svg"):
        draw_figure_1(folder / f"figure-1{suffix}")
    title = "Figure 1: rings, their weights and a halted ripple"
    said = "Drawn by the library's own partition, fixed weights and halting, on 9 × 9 tokens."
    return _page([f"# {title}", said, f"![{title}](figure-1.png)"], [])


def _page(parts: list[str], lacking: list[str]) -> Made:
    if lacking:
        parts.append("## Not there yet\n\n" + "\n".join(f"- {line}" for line in lacking))
    return "\n\n".join(filter(None, parts)) + "\n", lacking
