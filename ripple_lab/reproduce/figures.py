"""The paper's figures: what is drawn, of which benchmark, and what is said below."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ripple_lab.bench.op import short
from ripple_lab.divergence import uniform_divergence
from ripple_lab.reproduce.charts import draw_curves, draw_divergence
from ripple_lab.reproduce.found import Results, Row
from ripple_lab.reproduce.runs import training_command
from ripple_lab.reproduce.speeds import (
    MAX_DISTANCE,
    Line,
    Setting,
    figure_command,
    model_setting,
    points,
)

DIVERGENCE_RECIPE = "cifar100-ripple-tiny"


@dataclass(frozen=True)
class Curves:
    """Time and memory against tokens.

    Args:
        name: As the command takes it.
        title: What it shows.
        setting: How the paper measured, and what ours are of.
        lines: What is drawn.
        passes: The benchmark's names of what is timed.
        choose: Gives the rows of one machine and setting.
        commands: Make what is missing.
    """

    name: str
    title: str
    setting: str
    lines: tuple[Line, ...]
    passes: tuple[str, ...]
    choose: Callable[[tuple[Line, ...], Results], Setting | None]
    commands: tuple[str, ...]


SPEED_LINES = (
    Line("DeiT (softmax)", ("DeiT, softmax SDPA",)),
    Line("DeiT-LA (linear)", ("DeiT-LA",)),
    Line("ripple (naïve)", ("ripple, all pairs in PyTorch operations",)),
    Line("ripple (DP)", ("ripple, tables in PyTorch operations",)),
    Line("ripple (tiled)", ("ripple, R_max 4",)),
)
PARTITION_LINES = (
    Line("ripple, R_max 4", ("ripple, R_max 4",)),
    Line("logarithmic", ("ripple, logarithmic",)),
    Line("dense", ("ripple, dense",)),
)
COMMAND = figure_command(line.systems[0] for line in SPEED_LINES + PARTITION_LINES)
PASSES = ("forward", "training step")
SPEED = Curves(
    "figure-speed",
    "Figure: time and memory against tokens",
    "The paper: whole vision transformers of width 96, batch 4, on one V100; it does not say "
    "whether forward alone. Ours: whole models of 12 layers, 9 of them ripple's; naïve and DP in "
    "PyTorch operations, the naïve one over all pairs, the others by kernels.",
    SPEED_LINES,
    PASSES,
    model_setting,
    (COMMAND,),
)
PARTITIONS = Curves(
    "figure-speed-partitions",
    "Figure: time and memory of the partitions against tokens",
    "The paper: whole vision transformers of width 96, batch 4. Ours: whole models, each layer by "
    "the algorithm that `auto` takes.",
    PARTITION_LINES,
    PASSES,
    model_setting,
    (COMMAND,),
)


def make_curves(curves: Curves, results: Results, folder: Path) -> tuple[str, list[str]]:
    """Draws the figure; gives its page, and what is missing."""
    setting = curves.choose(curves.lines, results)
    draw_curves(curves.title, curves.lines, setting, curves.passes, folder / curves.name)
    parts = [f"# {curves.title}", curves.setting, f"![{curves.title}]({curves.name}.png)"]
    rows = setting.rows if setting else []
    absent = []
    for step in curves.passes:
        timed = [line for line in curves.lines if points(rows, line, step, "median_ms")]
        labels = [line.label for line in curves.lines if line not in timed]
        if labels:
            absent.append(f"{step}, {', '.join(labels) if timed else 'all lines'}")
    if setting:
        files = ", ".join(f"`{file}`" for file in setting.files)
        departs = ", ".join(setting.departs)
        said = f" This departs from the paper's setting: {departs}." if departs else ""
        parts.append(f"Measured: {setting.words}; {files}.{said}")
        parts += [table for step in curves.passes if (table := _curve_table(curves, setting, step))]
        if departs and not absent:
            absent = ["all lines in the paper's setting"]
    remedy = ", ".join(f"`{command}`" for command in curves.commands)
    lacking = [f"{what}: not yet run: {remedy}" for what in absent]
    if lacking:
        parts.append("## Not there yet\n\n" + "\n".join(f"- {line}" for line in lacking))
    return "\n\n".join(parts) + "\n", lacking


def _curve_table(curves: Curves, setting: Setting, step: str) -> str:
    """Of a pass; empty where nothing was timed."""
    times = {line: dict(points(setting.rows, line, step, "median_ms")) for line in curves.lines}
    memory = {line: dict(points(setting.rows, line, step, "peak_mb")) for line in curves.lines}
    tokens = sorted({size for found in times.values() for size in found})
    if not tokens:
        return ""
    refused = {
        (row["system"], row["tokens"]): row["status"]
        for row in setting.rows
        if row["pass"] == step and row["status"] != "ok"
    }
    rows = [[step, *(f"{size:,} tokens" for size in tokens)], ["---"] + ["---:"] * len(tokens)]
    for line in curves.lines:
        cells = [
            f"{short(times[line][size])} ms, {short(memory[line].get(size, 0))} MB"
            if size in times[line] else refused.get((line.systems[0], size), "–")
            for size in tokens
        ]  # fmt: skip
        rows.append([line.label, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def divergence_runs(results: Results) -> dict[str, list[Row]]:
    """The rows of every run that logged its divergence, by the name of its file, longest first.

    Before all others come the longest of those that start as uniform weights and the longest of
    those that start as fixed ones. Runs with fixed weights, which do not diverge from themselves,
    are left out.
    """
    runs: dict[str, list[Row]] = {}
    for row in results.metrics:
        if row["kind"] == "ripples" and row.get("jsd") is not None:
            runs.setdefault(row["file"], []).append(row)
    runs = {name: rows for name, rows in runs.items() if max(row["jsd"] for row in rows) > 1e-6}
    runs = dict(sorted(runs.items(), key=lambda run: -run[1][-1]["epoch"]))
    longest: dict[bool, str] = {}
    for name, rows in runs.items():
        longest.setdefault(rows[0]["jsd"] < uniform_divergence(_groups(rows)) / 2, name)
    return {name: runs[name] for name in [*longest.values(), *runs]}


def _groups(rows: list[Row]) -> int:
    return rows[0].get("groups") or MAX_DISTANCE + 1


def make_divergence(results: Results, folder: Path) -> tuple[str, list[str]]:
    """Draws the figure on the JSD; gives its page, and what is missing.

    The column `groups` says how many groups a run has; without it, those of R_max 4. Runs with
    other groups than the longest one have another uniform line, and are left out.
    """
    runs = divergence_runs(results)
    groups = max((_groups(rows) for rows in list(runs.values())[:1]), default=MAX_DISTANCE + 1)
    runs = {name: rows for name, rows in runs.items() if _groups(rows) == groups}
    title = "Figure: JSD between stick-breaking and fixed weights, in training"
    draw_divergence(title, runs, groups, folder / "figure-jsd")
    parts = [
        f"# {title}",
        "The Jensen–Shannon divergence, in nats, of the spatial weights from the fixed ones (1/2, "
        "1/4, …, the remainder for the rest), a mean over images, tokens, heads and layers. The "
        f"dashed line is that of uniform weights, {uniform_divergence(groups):.4f} for {groups} "
        "groups. The paper gives neither a unit nor numbers. Its weights start near the fixed "
        "ones, as ours do by plain sticks (`--model.balanced False`); by balanced ones, which are "
        "the default, they start near the uniform line.",
        f"![{title}](figure-jsd.png)",
    ]
    lines = ["| run | epochs | JSD, first | largest | last |", "|---|---:|---:|---:|---:|"]
    for name, rows in runs.items():
        found = [row["jsd"] for row in rows]
        numbers = " | ".join(f"{value:.4f}" for value in (found[0], max(found), found[-1]))
        lines.append(f"| `{name}` | {rows[-1]['epoch']:.0f} | {numbers} |")
    if runs:
        parts.append("\n".join(lines))
        return "\n\n".join(parts) + "\n", []
    lacking = [
        f"no file of metrics has a column `jsd`: not yet run: "
        f"`{training_command(DIVERGENCE_RECIPE)}`, whose metrics.csv then goes under "
        "benchmarks/results"
    ]
    parts.append("## Not there yet\n\n" + "\n".join(f"- {line}" for line in lacking))
    return "\n\n".join(parts) + "\n", lacking
