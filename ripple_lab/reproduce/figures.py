"""The paper's figures: what is drawn, of which benchmark, and what is said below."""

from dataclasses import dataclass
from pathlib import Path

from ripple_lab.reproduce.markdown import markdown_table, rounded, short
from ripple_lab.reproduce.speeds import figure_command, figure_rows, measured_on, points, refused
from ripple_lab.reproduce.table import TableRow
from ripple_lab.results import Results, Row

PASSES = ("forward", "training step")
Made = tuple[str, list[str]]  # a page, and the commands of what it lacks


@dataclass(frozen=True)
class Curves:
    """Time and memory of whole models against tokens."""

    name: str
    title: str
    setting: str
    lines: tuple[TableRow, ...]


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
    "what `auto` took when it was measured. Boxes of the wide partitions reach beyond the tiles "
    "from 1,024 tokens on, so all pairs were computed there: these curves show all pairs, not the "
    "tables of the paper.",
    (
        TableRow("R_max 4: tiles, kernels", system=("ripple, R_max 4",)),
        TableRow(
            "logarithmic: tiles at 256 tokens, then all pairs, kernels",
            system=("ripple, logarithmic",),
        ),
        TableRow("dense: tiles at 256 tokens, then all pairs, kernels", system=("ripple, dense",)),
    ),
)
COMMAND = figure_command(SPEED.lines + PARTITIONS.lines)

# The runs of the divergence: a name, the file of the metrics, its epochs, the command.
DIVERGENCE = (
    (
        "stick-breaking, as printed",
        "cifar100-300-epochs-nvidia-h200/ripple.csv",
        300,
        "ripple train cifar100-ripple-tiny",
    ),
    (
        "stick-breaking, plain",
        "cifar100-plain-sticks-nvidia-h200/ripple.csv",
        60,
        "ripple train cifar100-short-ripple-tiny --model.balanced False",
    ),
)
IMAGES = 8  # of a training batch, in runs that do not name their number


def make_curves(curves: Curves, results: Results, folder: Path) -> Made:
    """Draws the figure; gives its page, and what is missing."""
    from ripple_lab.reproduce.charts import draw_curves

    rows = figure_rows(results, "models")
    draw_curves(curves.title, curves.lines, rows, PASSES, folder / curves.name)
    parts = [f"# {curves.title}", curves.setting, f"![{curves.title}]({curves.name}.png)"]
    parts += [f"Measured: {measured_on(rows)}."] if rows else []
    lacking = []
    for step in PASSES:
        timed = [line for line in curves.lines if points(rows, line, step, "median_ms")]
        absent = [line.label.split(":")[0] for line in curves.lines if line not in timed]
        if absent:
            who = ", ".join(absent) if timed else "all lines"
            lacking.append(f"{step}, {who}: not yet run: `{COMMAND}`")
        if timed:
            parts.append(_curve_table(curves, rows, step))
    return _page(parts, lacking)


def _curve_table(curves: Curves, rows: list[Row], step: str) -> str:
    lines, sizes = [], sorted({row["tokens"] for row in rows if row["pass"] == step})
    for line in curves.lines:
        times = dict(points(rows, line, step, "median_ms"))
        memory = dict(points(rows, line, step, "peak_mb"))
        cells = refused(rows, line, step)
        cells |= {n: f"{short(times[n])} ms, {short(memory.get(n))} MB" for n in times}
        lines.append([line.label, *(cells.get(size, "–") for size in sizes)])
    return markdown_table([step, *(f"{size:,} tokens" for size in sizes)], lines)


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
    counts = {rows[0].get("images") or IMAGES for rows in runs.values()}
    images = f" ({', '.join(map(str, sorted(counts)))} here)" if counts else ""
    rows = []
    for name, found in runs.items():
        values = [row["jsd"] for row in found]
        cells = [rounded(value, 4) for value in (values[0], max(values), values[-1])]
        rows.append([name, f"{found[-1]['epoch']:.0f}", *cells])
    parts = [
        f"# {title}",
        "The Jensen–Shannon divergence, in nats, of the spatial weights from the fixed ones (1/2, "
        f"1/4, …, the remainder for the rest), a mean over images{images}, tokens, heads and "
        f"layers. The dashed line is that of uniform weights, {uniform:.4f} for {groups} groups. "
        "The paper averages over all training images, and gives neither a unit nor numbers. Its "
        "curve starts near 0, as plain sticks do; the balanced sticks that it prints, and that are "
        "the default here, start at the uniform line.",
        f"![{title}](figure-jsd.png)",
        markdown_table(("run", "epochs", "JSD, first", "largest", "last"), rows) if rows else "",
    ]
    lacking = [
        f"{name}: not yet run: `{command}`, whose metrics.csv then goes to {file}"
        for name, file, _, command in DIVERGENCE
        if name not in runs
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
