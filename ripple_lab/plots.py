"""Pictures: ripples around a query, ripples a model learned, and benchmark curves."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.colors import LogNorm
from matplotlib.ticker import LogLocator, PercentFormatter
from torch import Tensor

from ripple_attention.partition import Partition, chebyshev, dense
from ripple_attention.spatial_weights import fixed_weights, halt, halt_group, stick_breaking
from ripple_lab.bench.op import read_csv
from ripple_lab.canvas import PALETTE, check_suffix, plt, save

COLORS = "viridis"
ACCENT = PALETTE[1]


def weight_map(
    weights: Tensor, partition: Partition, query: tuple[int, int], grid_size: tuple[int, int]
) -> Tensor:
    """The weight of every token for a query: its weights (G,) laid out on the grid (H, W)."""
    return weights[partition.groups(query, grid_size)]


def draw_ripples(
    ax: Any,
    weights: Tensor,
    partition: Partition,
    query: tuple[int, int],
    grid_size: tuple[int, int],
    norm: Any = None,
    cmap: str = COLORS,
) -> Any:
    """Draws the weights around one query as an image, the query marked, the boxes outlined.

    Args:
        ax: Matplotlib axes.
        weights: (G,).
        partition: Whose groups they weigh.
        query: Row and column.
        grid_size: (H, W).
        norm, cmap: Matplotlib's scale of weights, and its colours.
    """
    values = weight_map(weights, partition, query, grid_size).numpy()
    image = ax.imshow(values, cmap=cmap, norm=norm)
    row, column = query
    for radius in partition.radii:
        side = 2 * radius + 1
        corner = (column - radius - 0.5, row - radius - 0.5)
        ax.add_patch(
            plt.Rectangle(corner, side, side, fill=False, color="white", lw=0.8, alpha=0.6)
        )
    ax.plot(column, row, marker="o", color="white", markersize=4, markeredgecolor="black")
    ax.set(xticks=[], yticks=[], xlim=(-0.5, grid_size[1] - 0.5), ylim=(grid_size[0] - 0.5, -0.5))
    return image


def draw_explanation(path: Path) -> None:
    """The picture of the README: the same query under four sets of spatial weights."""
    check_suffix(path)
    partition, grid_size, query = chebyshev(4), (15, 19), (6, 7)
    panels = {
        "linear attention:\nevery token weighs the same": torch.zeros(4),
        "ripple attention,\na head that looks around": torch.tensor([1.5, 1.2, 0.8, 0.4]),
        "a head that stays close,\nwith a glance at the whole": torch.tensor([2.5, 3.0, 1.0, 0.0]),
        "a head that looks\npast its neighbours": torch.tensor([-1.5, -2.0, -0.5, 1.5]),
    }
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.1), layout="constrained")
    for ax, (title, logits) in zip(axes, panels.items(), strict=True):
        norm = LogNorm(vmin=0.005, vmax=1)
        image = draw_ripples(ax, stick_breaking(logits), partition, query, grid_size, norm)
        ax.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, label="spatial weight α", shrink=0.85, pad=0.01)
    save(figure, path)


def draw_figure_1(path: Path) -> None:
    """Figure 1 of the paper: rings, their weights and a halted ripple on a grid of 9 × 9 tokens.

    The groups come from `dense`, the weights from `fixed_weights`, the halting from `halt`.
    """
    check_suffix(path)
    grid_size, centre, corner, threshold = (9, 9), (4, 4), (6, 6), 0.1
    partition = dense(grid_size)
    weights = fixed_weights(partition.num_groups)
    halted, group = halt(weights, threshold), int(halt_group(weights, threshold))
    panels = (
        ("a. A query in the centre", weights, centre),
        ("b. A query off the centre", weights, corner),
        (f"c. Halted at ring {group} (τ = {threshold})", halted, corner),
    )
    figure, axes = plt.subplots(1, 3, figsize=(9.2, 3.2), layout="constrained")
    norm = LogNorm(vmin=float(weights.min()), vmax=1)
    for ax, (title, shown, query) in zip(axes, panels, strict=True):
        image = draw_ripples(ax, shown, partition, query, grid_size, norm, cmap="Blues")
        for ring in range(1, max(query) + 1):  # the weight of each ring, left of the query
            dark = norm(float(shown[ring])) > 0.55
            ax.text(query[1] - ring, query[0], f"{100 * float(shown[ring]):.2g}", ha="center",
                    va="center", fontsize=8.5, color="white" if dark else "black")  # fmt: skip
        ax.set_xticks(torch.arange(8) + 0.5, minor=True)
        ax.set_yticks(torch.arange(8) + 0.5, minor=True)
        ax.grid(which="minor", color="0.6", lw=0.5)
        ax.tick_params(which="minor", length=0)
        ax.set_title(title, fontsize=11)
    side, edges = 2 * group - 1, (corner[1] - group + 0.5, corner[0] - group + 0.5)
    axes[2].add_patch(plt.Rectangle(edges, side, side, fill=False, ls="--", lw=2.5, color=ACCENT))
    bar = figure.colorbar(image, ax=axes, shrink=0.75, pad=0.01, label="weight of a token, %")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    save(figure, path)


def draw_learned_ripples(
    images: Tensor, weights: list[Tensor], partition: Partition, path: Path
) -> None:
    """For each image a query and its ripples in every layer, and below the mean weights by ring.

    Args:
        images: (B, height, width).
        weights: For each layer (B, H, W, N, G).
        partition: Whose groups they weigh.
        path: Where the picture goes.
    """
    layers, (_, H, W, _, G) = len(weights), weights[0].shape
    query = (H // 2, W // 2)
    figure, axes = plt.subplots(
        len(images) + 1, layers + 1, figsize=(2.3 * (layers + 1), 2.2 * (len(images) + 1)),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    largest = max(float(layer[:, query[0], query[1]].mean(1).max()) for layer in weights)
    norm = plt.Normalize(0, largest)
    for b, image in enumerate(images):
        height, width = image.shape
        cell = (height / H, width / W)
        axes[b, 0].imshow(image.numpy(), cmap="gray_r")
        axes[b, 0].plot(
            (query[1] + 0.5) * cell[1] - 0.5, (query[0] + 0.5) * cell[0] - 0.5, "o", color="tab:red"
        )
        axes[b, 0].set(xticks=[], yticks=[])
        for layer, layer_weights in enumerate(weights):
            mean = layer_weights[b, query[0], query[1]].mean(0)  # over the heads
            shown = draw_ripples(axes[b, layer + 1], mean, partition, query, (H, W), norm)
    axes[0, 0].set_title("image and query")
    axes[-1, 0].axis("off")
    axes[-1, 0].text(
        0.0, 0.5, "mean weight of each ring,\na line for each head;\ndashed: linear attention",
        va="center", fontsize=8, transform=axes[-1, 0].transAxes,
    )  # fmt: skip
    names = [*(str(radius) for radius in range(G - 1)), "rest"]
    for layer, layer_weights in enumerate(weights):
        axes[0, layer + 1].set_title(f"layer {layer + 1}")
        ax = axes[-1, layer + 1]
        for n, profile in enumerate(layer_weights.mean((0, 1, 2))):
            ax.plot(names, profile.numpy(), marker=".", label=f"head {n + 1}")
        ax.axhline(1 / G, color="black", lw=0.8, ls="--")
        ax.set(ylim=(0, 1.1 * ax.dataLim.ymax), xlabel="ring")
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.colorbar(shown, ax=axes[:-1, :], label="spatial weight, mean of heads", shrink=0.8)
    save(figure, path)


def draw_benchmark(results: Path, path: Path) -> None:
    """Time and peak memory against tokens, from a CSV of `ripple bench op`, `layer` or `model`.

    Batches of models grow smaller as images grow, so of models it is the time of an image. Layers
    are drawn by `draw_layers`.
    """
    check_suffix(path)
    rows = [row for row in read_csv(results) if row["status"] == "ok"]
    if not rows:
        raise ValueError(f"{results} has nothing to draw: no system was timed")
    if "dim" in rows[0]:
        draw_layers(rows, path)
        return
    models, first = "images_per_second" in rows[0], rows[0]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.8), layout="constrained")
    sizes = sorted({row["tokens"] for row in rows})
    near = [size < 1.5 * before for before, size in pairwise([0, *sizes])]  # no room for both
    labels = ["" if close else f"{size:,}" for size, close in zip(sizes, near, strict=True)]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    names = [name.replace("+", " and ") for name in passes]
    panels = [(step, "median_ms", f"{name}, ms") for step, name in zip(passes, names, strict=True)]
    panels.append((passes[-1], "peak_mb", f"peak memory, {names[-1]}, MB"))
    fused = ("triton", "SDPA", "floor")  # of models all but those "in PyTorch operations"
    if models:
        fused = tuple({row["system"] for row in rows if "PyTorch" not in row["system"]})
    systems = list(dict.fromkeys(row["system"] for row in rows))
    larger = [1.2 * index for index in range(len(systems))][::-1]  # of lines that others may hide
    for ax, (step, quantity, title) in zip(axes, panels, strict=False):
        for size, system in zip(larger, systems, strict=True):
            points = [
                (row["tokens"], row[quantity] / (int(row["batch"]) if models else 1))
                for row in rows
                if row["system"] == system and row["pass"] == step
            ]
            if points:
                style = "-" if any(word in system for word in fused) else "--"
                ax.plot(*zip(*points, strict=True), ls=style, label=system,
                        marker="o", mfc="none", ms=4 + size, lw=1.5 + size / 8)  # fmt: skip
        each = " an image" if models else ""
        ax.set(xscale="log", yscale="log", xlabel="tokens", title=f"{title}{each}")
        ax.set_xticks(sizes, labels)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  markerscale=0.6)  # fmt: skip
    what = f"{first['hardware']}, {first['dtype']}, "
    if models:
        what += f"width {first.get('embed_dim', 192)}"
    else:
        what += f"batch {first['batch']}, {first['heads']} heads of {first['head_dim']}, "
        what += f"R_max {first['max_distance']}"
    figure.suptitle(f"{what}; dashed: in PyTorch operations")
    save(figure, path)


def draw_layers(rows: list[dict[str, Any]], path: Path) -> None:
    """Times of layers, a panel for each shape and a line for each system, beside softmax's."""
    from ripple_lab.bench.layer import digits, shape_of  # imports PyTorch's compiler

    shapes = list(dict.fromkeys(map(shape_of, rows)))
    systems = list(dict.fromkeys(row["system"] for row in rows))
    columns = min(3, len(shapes))
    lines = -(-len(shapes) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(2.4 + 3.6 * columns, 0.9 + lines * (1 + 0.26 * len(systems))),
        layout="constrained", squeeze=False, sharey=True,
    )  # fmt: skip
    looks = {"forward": ("white", "--"), "forward+backward": ("tab:blue", "-")}
    for ax, shape in zip(axes.flat, shapes, strict=False):
        times = {
            (row["system"], row["pass"]): row["median_ms"] for row in rows if shape_of(row) == shape
        }
        for step, (color, style) in looks.items():
            found = [(times[s, step], y) for y, s in enumerate(systems) if (s, step) in times]
            name = step.replace("+", " and ")
            marks = {"mfc": color, "color": "tab:blue", "ms": 6, "zorder": 3}
            ax.plot([x for x, _ in found], [y for _, y in found], "o", label=name, **marks)
            if ("softmax", step) in times:
                base = times["softmax", step]
                ax.axvline(base, color="tab:orange", ls=style, lw=1.2, label=f"softmax, {name}")
        for y, system in enumerate(systems):
            own = [times.get((system, step)) for step in looks]
            ax.text(1.02, y, " / ".join(map(digits, own)), va="center", fontsize=8,
                    transform=ax.get_yaxis_transform())  # fmt: skip
        ax.set(xscale="log", title=shape.replace("\n", ", "), ylim=(len(systems) - 0.5, -0.5))
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.set_yticks(range(len(systems)), systems)
        ax.grid(alpha=0.3)
    for ax in axes.flat[len(shapes) :]:
        ax.set_axis_off()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(
        f"{rows[0]['hardware']}, {rows[0]['dtype']}: layers of tokens × batch, channels/heads; ms"
    )
    save(figure, path)
