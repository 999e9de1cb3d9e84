"""Pictures of tables, of curves, and of the divergence in training, as PNG and SVG."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ripple_lab.canvas import MARKERS, PALETTE, plt, save_both
from ripple_lab.reproduce.figures import Panel
from ripple_lab.reproduce.speeds import measured_on, points, refused
from ripple_lab.reproduce.table import Filled, Table
from ripple_lab.reproduce.table_columns import COLUMNS
from ripple_lab.results import Row

PAPER, OURS = PALETTE[:2]


def is_drawn(table: Table, filled: Filled) -> bool:
    """Whether there is a result of ours to draw."""
    cells = zip(*(filled[name] for name in table.drawn), strict=True)
    return any(all(cell[-1].numbers for cell in row) for row in cells)


def draw_table(table: Table, filled: Filled, folder: Path) -> None:
    """One column as dots, a line for each row; or one against the other."""
    draw = _draw_column if len(table.drawn) == 1 else _draw_against
    save_both(draw(table, filled), folder / table.name)


def _draw_column(table: Table, filled: Filled) -> Any:
    """The paper's numbers and ours, with the range of seeds and the notes in words."""
    (name,) = table.drawn
    figure, ax = plt.subplots(figsize=(8.5, 1.6 + 0.42 * len(table.rows)), layout="constrained")
    notes: list[tuple[str, float, int, bool]] = []
    for place, (row, cell) in enumerate(zip(table.rows, filled[name], strict=True)):
        if name in row.paper:
            ax.plot(row.paper[name], place, "o", color=PAPER, mfc="white", ms=8, mew=1.8)
        for below, number in enumerate(number for number in cell if number.numbers):
            mean, least, most = number.mean, min(number.numbers), max(number.numbers)
            spread = [[mean - least], [most - mean]]
            ax.errorbar(mean, place, xerr=spread, fmt="s", color=OURS, ms=6, capsize=3)
            notes.append((", ".join(number.notes), mean, place, bool(below)))
    ax.margins(x=0.14)
    for words, mean, place, below in notes:  # not beside it, where the paper's dot may be
        left = mean < sum(ax.get_xlim()) / 2
        ax.annotate(
            words, (mean, place), (-4 if left else 4, -5 if below else 5), fontsize=7.5,
            va="top" if below else "bottom", ha="left" if left else "right",
            textcoords="offset points",
        )  # fmt: skip
    ax.plot([], [], "o", color=PAPER, mfc="white", ms=8, mew=1.8, label="paper")
    ax.plot([], [], "s", color=OURS, ms=6, label="ours")
    ax.set_yticks(range(len(table.rows)), [table.name_of(row) for row in table.rows])
    ax.set(xlabel=COLUMNS[name].heading, ylabel=table.subject, ylim=(len(table.rows) - 0.5, -0.6))
    ax.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(table.title)
    return figure


def _draw_against(table: Table, filled: Filled) -> Any:
    """One column against the other, the paper's on the left and ours on the right."""
    across, up = table.drawn
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    notes: dict[str, None] = {}
    for index, row in enumerate(table.rows):
        look = {"marker": MARKERS[index % 7], "color": PALETTE[index % 7], "ms": 9, "ls": ""}
        look |= {"mfc": "white", "mew": 2} if index >= 7 else {}
        label, ours = table.name_of(row), (filled[across][index][-1], filled[up][index][-1])
        if all(number.numbers for number in ours):
            axes[1].plot(ours[0].mean, ours[1].mean, **look)
            notes |= dict.fromkeys(note for number in ours for note in number.notes)
        else:
            label += " (ours: not yet run)"
        axes[0].plot(row.paper[across], row.paper[up], **look, label=label)
    said = f"ours: {', '.join(notes)}" if notes else "ours"
    for ax, title in zip(axes, ("the paper", said), strict=True):
        ax.set(xlabel=COLUMNS[across].heading, ylabel=COLUMNS[up].heading, title=title)
        ax.margins(0.1)
        ax.ticklabel_format(useOffset=False)
        ax.xaxis.set_major_locator(plt.MaxNLocator(5))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(f"{table.title}\ndifferent machines: compare the order, not the speeds")
    return figure


def draw_curves(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Time and memory against tokens, a row of panels for each pass.

    A line that others hide is wider, and has larger markers, than those above it. Dashed lines are
    of PyTorch operations.
    """
    figure, axes = plt.subplots(
        len(panels), 2, figsize=(11, 3.7 * len(panels) + 0.6), layout="constrained", squeeze=False
    )
    labels = dict.fromkeys(line.label for panel in panels for line in panel.lines)
    looks = dict(zip(labels, zip(PALETTE, MARKERS, strict=True), strict=False))
    for panel, pair in zip(panels, axes, strict=True):
        for ax, (quantity, name) in zip(
            pair, (("median_ms", "milliseconds"), ("peak_mb", "peak memory, MB")), strict=True
        ):
            _draw_panel(ax, panel, quantity, looks)
            ax.set(ylabel=name, title=panel.title)
    legend = {
        label: handle
        for ax in axes[:, 0]
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=2,
                  frameon=False, markerscale=0.6)  # fmt: skip
    words = [measured_on(panel.rows).partition(";")[0] for panel in panels if panel.rows]
    figure.suptitle("\n".join([title, *words[:1]]))
    save_both(figure, path)


def _draw_panel(ax: Any, panel: Panel, quantity: str, looks: dict[str, tuple[str, str]]) -> None:
    found = [points(panel.rows, line, panel.step, quantity) for line in panel.lines]
    for index, (line, values) in enumerate(zip(panel.lines, found, strict=True)):
        color, marker = looks[line.label]
        if values:
            size, style = 2.5 * (len(found) - 1 - index), "--" if "PyTorch" in line.label else "-"
            ax.plot(
                *zip(*values, strict=True), color=color, marker=marker, label=line.label, ls=style,
                lw=1.5 + size / 4, ms=5 + size, mfc="none", mew=1.6, zorder=2,
            )  # fmt: skip
        for tokens, why in refused(panel.rows, line, panel.step).items():
            _mark_refused(ax, tokens, f"{line.label.split(':')[0]}: {why}", color)
    ax.set(xscale="log", yscale="log", xlabel="tokens")
    ax.margins(y=0.18)  # room for what does not fit
    ax.grid(alpha=0.3)
    if any(found):
        sizes = sorted({tokens for values in found for tokens, _ in values})
        ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
        ax.minorticks_off()
    else:
        ax.text(0.5, 0.5, "not yet run", ha="center", transform=ax.transAxes)


def _mark_refused(ax: Any, tokens: int, words: str, color: str) -> None:
    """A cross at the upper edge, where a point would be too large to be measured."""
    where = ax.get_xaxis_transform()
    ax.plot(tokens, 0.97, "x", color=color, ms=10, mew=2.5, transform=where, clip_on=False)
    ax.annotate(words, (tokens, 0.97), (-9, 0), xycoords=where, textcoords="offset points",
                ha="right", va="center", fontsize=8, color=color)  # fmt: skip


def draw_divergence(
    title: str, runs: dict[str, list[Row]], uniform: float, path: Path, halting: bool = False
) -> None:
    """The divergence from the fixed weights in training, a mean over the layers with their spread.

    Args:
        title: Of the figure.
        runs: Rows of metrics, or of `summary`, by the name of a system.
        uniform: The divergence of uniform weights.
        path: Without a suffix.
        halting: Draws the mean group at which ripples halt, too.
    """
    figure, axes = plt.subplots(
        1, 1 + halting, figsize=(11 if halting else 7, 4.4), layout="constrained", squeeze=False
    )
    ax, *others = axes[0]
    top = uniform
    for (name, rows), (style, color) in zip(
        runs.items(), product(("-", "-."), (PALETTE[0], *PALETTE[2:])), strict=False
    ):
        epochs = [row["epoch"] for row in rows]
        layers = [column for column in rows[0] if column.startswith("jsd/layer_")]
        spread = [[row[column] for column in layers] or [row["jsd"]] for row in rows]
        least, most = [min(values) for values in spread], [max(values) for values in spread]
        top = max(top, *most)
        marker = "o" if len(rows) < 4 else ""
        look = {"color": color, "ls": style, "marker": marker, "clip_on": False}
        label = f"{name}, mean of {len(layers)} layers"
        ax.plot(epochs, [row["jsd"] for row in rows], **look, label=label)
        ax.fill_between(epochs, least, most, color=color, alpha=0.18, lw=0, label="its layers")
        for other in others:
            other.plot(epochs, [row["halting_group"] for row in rows], **look)
    ax.axhline(uniform, color=OURS, ls="--", label="uniform weights (linear attention)")
    ax.axhline(0, color="black", lw=2.5, label="fixed weights", clip_on=False)
    last = max((rows[-1]["epoch"] for rows in runs.values()), default=1)
    ax.set(ylabel="JSD to the fixed weights, nats", ylim=(0, 1.12 * top))
    for other in others:
        groups = [row["halting_group"] for rows in runs.values() for row in rows]
        other.set(ylabel="mean group at which ripples halt", ylim=(0, 1.12 * max(groups)))
    for each in axes[0]:
        each.set(xlabel="epoch", xlim=(0, max(1, last)))
        each.grid(alpha=0.3)
    if not runs:
        ax.text(0.5, 0.4, "not yet run", ha="center", transform=ax.transAxes)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.suptitle(title)
    save_both(figure, path)
