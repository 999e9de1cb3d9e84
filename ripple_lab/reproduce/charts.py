"""Figures, as PNG and SVG, in colours that colour-blind eyes tell apart."""

from itertools import cycle, product
from pathlib import Path
from typing import Any

from ripple_lab.divergence import uniform_divergence
from ripple_lab.plots import plt, save
from ripple_lab.reproduce.columns import COLUMNS
from ripple_lab.reproduce.found import Row
from ripple_lab.reproduce.layout import PaperTable
from ripple_lab.reproduce.pages import Filled, row_label
from ripple_lab.reproduce.speeds import Line, Setting, points
from ripple_lab.reproduce.values import Measured

# Okabe and Ito's colours, and a marker each for prints without any.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PAPER, OURS = PALETTE[:2]


def draw_table(table: PaperTable, filled: Filled, folder: Path) -> None:
    """One column of a table as dots, a line for each row: the paper's, and ours with its range."""
    column, values = COLUMNS[table.drawn], filled[table.drawn]
    height = 1.4 + 0.4 * len(table.rows)
    figure, ax = plt.subplots(figsize=(8.5, height), layout="constrained")
    said: list[tuple[str, float, int, bool]] = []
    for place, (row, value) in enumerate(zip(table.rows, values, strict=True)):
        if table.drawn in row.paper:
            ax.plot(row.paper[table.drawn], place, "o", color=PAPER, mfc="white", ms=8, mew=1.8)
        for below, part in enumerate(value.parts() if isinstance(value, Measured) else []):
            mean, (least, most) = part.mean, (min(part.numbers), max(part.numbers))
            ax.errorbar(
                mean, place, xerr=[[mean - least], [most - mean]], fmt="s", color=OURS, ms=6,
                capsize=3,
            )  # fmt: skip
            said.append((", ".join(part.departs), mean, place, bool(below)))
    ax.margins(x=0.12)
    for words, mean, place, below in said:  # not beside it, where the paper's dot may be
        left = mean < sum(ax.get_xlim()) / 2
        ax.annotate(
            words, (mean, place), (-4 if left else 4, -5 if below else 5), fontsize=7.5,
            va="top" if below else "bottom", ha="left" if left else "right",
            textcoords="offset points",
        )  # fmt: skip
    ax.plot([], [], "o", color=PAPER, mfc="white", ms=8, mew=1.8, label="paper")
    measured = any(isinstance(value, Measured) for value in values)
    ax.plot([], [], "s", color=OURS, ms=6, label="ours" if measured else "ours: not yet run")
    names = [row_label(table, row.label, row.facts) for row in table.rows]
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel=column.heading, title=table.title, ylim=(len(names) - 0.5, -0.5))
    ax.grid(alpha=0.3)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    save_both(figure, folder / table.name)


def draw_curves(
    title: str,
    lines: tuple[Line, ...],
    setting: Setting | None,
    passes: tuple[str, ...],
    path: Path,
) -> None:
    """Time and memory against tokens, a row of panels for each pass."""
    figure, axes = plt.subplots(
        len(passes), 2, figsize=(10, 3.6 * len(passes)), layout="constrained", squeeze=False
    )
    for step, pair in zip(passes, axes, strict=True):
        quantities = (("median_ms", "milliseconds"), ("peak_mb", "peak memory, MB"))
        for ax, (quantity, name) in zip(pair, quantities, strict=True):
            for line, color, marker in zip(lines, PALETTE, MARKERS, strict=False):
                found = points(setting.rows, line, step, quantity) if setting else []
                if found:
                    ax.plot(*zip(*found, strict=True), color=color, marker=marker, label=line.label)
            ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel=name, title=step)
            ax.grid(alpha=0.3)
            if not ax.lines:
                ax.text(0.5, 0.5, "not yet run", ha="center", transform=ax.transAxes)
    if axes[0, 0].lines:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    figure.suptitle(f"{title}\n{setting.words}" if setting else title)
    save_both(figure, path)


def draw_divergence(title: str, runs: dict[str, list[Row]], groups: int, path: Path) -> None:
    """The divergence from the fixed weights, its layers, and where ripples halt, in training."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    colors = PALETTE[:1] + PALETTE[2:]  # one is that of the dashed line
    looks = cycle(product(("-", ":", "-."), colors))
    for (name, rows), (style, color) in zip(runs.items(), looks, strict=False):
        look = {"color": color, "ls": style, "label": name}
        epochs = [row["epoch"] for row in rows]
        axes[0].plot(epochs, [row["jsd"] for row in rows], **look)
        if all(row.get("halting_group") is not None for row in rows):
            axes[2].plot(epochs, [row["halting_group"] for row in rows], **look)
    uniform = uniform_divergence(groups)
    axes[0].axhline(uniform, color=OURS, ls="--", label="uniform weights")
    axes[0].set(title="JSD to the fixed weights", ylabel="nats", ylim=(0, None))
    _draw_layers(axes[1], next(iter(runs.items()), ("", [])))
    axes[1].axhline(uniform, color=OURS, ls="--")
    axes[1].set(ylabel="nats", ylim=(0, None))
    axes[2].set(title="mean group at which ripples halt", ylabel="group", ylim=(0, groups + 0.2))
    for ax in axes:
        ax.set(xlabel="epoch")
        ax.grid(alpha=0.3)
    if not runs:
        axes[0].text(0.5, 0.4, "not yet run", ha="center", transform=axes[0].transAxes)
    labels = axes[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(title)
    save_both(figure, path)


def _draw_layers(ax: Any, run: tuple[str, list[Row]]) -> None:
    name, rows = run
    layers = [column for column in (rows[0] if rows else {}) if column.startswith("jsd/layer_")]
    for number, column in enumerate(layers):
        color = plt.get_cmap("viridis")(number / max(1, len(layers) - 1))
        values = [(row["epoch"], row[column]) for row in rows if row[column] is not None]
        if values:
            layer = int(column.removeprefix("jsd/layer_")) + 1
            ax.plot(*zip(*values, strict=True), color=color, label=f"layer {layer}")
    if layers:
        ax.legend(fontsize=7, ncols=2)
    ax.set_title(f"layers of {name}" if layers else "layer by layer", fontsize=9)


def save_both(figure: Any, path: Path) -> None:
    """As PNG and as SVG, next to each other."""
    for suffix in (".png", ".svg"):
        save(figure, path.with_name(path.name + suffix))
