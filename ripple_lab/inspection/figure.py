"""Pictures of an explanation: a picture, its ripples, and the attention of one of its patches.

Tiles of a section are pasted into one array, which draws faster than one axes for each tile and
looks the same in a file and in the browser.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ripple_lab.inspection.explain import Explanation
from ripple_lab.inspection.views import LayerView, shares
from ripple_lab.plots import COLORS, check_suffix, plt, save
from ripple_lab.text import plain

TILE, GAP = 112, 8  # pixels of a tile's longer side, and between tiles
SCREEN = (14.5, 8.2)  # inches of a whole explanation, which a screen of 1920×1080 shows at once

RIPPLES = "ripples:\nweight of each ring"
ATTENTION = "attention\n(ripples × similarity)"
LINEAR = "the same with linear\nattention (rings alike)"
HALTED = "ring where\neach patch halted"
KEY = (
    "Ripples: darker weighs less; all tiles of a row have one scale, from 0 (dark) to the row's "
    "largest (bright). Attention: shares that add up to 1, on a square-root scale that ripple and "
    "linear attention of a column share.\nHalted: bright patches look far, dark ones stop near; "
    "grey ones never halted, all rings keep a weight of their own. The box marks the patch."
)


@dataclass
class Tiles:
    """Rows of maps (H, W), each with its brightest value; None in a row leaves a gap."""

    columns: list[str]
    rows: dict[str, list[Tensor | None]] = field(default_factory=dict)
    largest: dict[str, list[float]] = field(default_factory=dict)
    captions: dict[str, list[str]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        maps: Sequence[Tensor | None],
        largest: Sequence[float] | None = None,
        captions: Sequence[str] = (),
    ) -> None:
        """A row; its largest value is the scale of all its tiles, unless one is given."""
        top = max((_top(m) for m in maps if m is not None), default=1.0)
        self.rows[name] = list(maps)
        self.largest[name] = [top] * len(maps) if largest is None else list(largest)
        self.captions[name] = list(captions) or [""] * len(maps)


def layer_tiles(explanation: Explanation, at: tuple[int, int]) -> Tiles:
    """A column for each layer, means over the heads."""
    views = explanation.layers
    names = [f"layer {i + 1}\n{view.kind}" for i, view in enumerate(views)]
    return _tiles(names, views, lambda view, maps: maps.mean(0), at)


def head_tiles(explanation: Explanation, at: tuple[int, int], layer: int) -> Tiles:
    """A column for each head of one layer, counted from 0."""
    view = explanation.layers[layer]
    heads = view.v.shape[3]
    names = [f"layer {layer + 1}\nhead {n + 1}" for n in range(heads)]
    counter = iter(range(10**6))
    return _tiles(
        names, [view] * heads, lambda _, maps: maps[next(counter) % heads], at, by_head=True
    )


def grid_tiles(
    explanation: Explanation, maps: Callable[[LayerView], Tensor | None], largest: float | None
) -> Tiles:
    """A tile for each head of each layer, of maps (N, H, W) of a layer; heads or layers, whichever
    are more, in columns."""
    by_layer = [maps(view) for view in explanation.layers]
    heads = max(view.v.shape[3] for view in explanation.layers)
    scales = [1.0 if m is None else largest or _top(m) for m in by_layer]
    tile = lambda m, n: None if m is None or n >= len(m) else m[n]
    layer_names = [f"layer {i + 1}" for i in range(len(by_layer))]
    head_names = [f"head {n + 1}" for n in range(heads)]
    if heads > len(by_layer):
        tiles = Tiles(head_names)
        for name, m, scale in zip(layer_names, by_layer, scales, strict=True):
            tiles.add(name, [tile(m, n) for n in range(heads)], [scale] * heads)
        return tiles
    tiles = Tiles(layer_names)
    for n, name in enumerate(head_names):
        tiles.add(name, [tile(m, n) for m in by_layer], scales)
    return tiles


def _tiles(
    names: list[str],
    views: list[LayerView],
    pick: Callable[[LayerView, Tensor], Tensor],
    at: tuple[int, int],
    by_head: bool = False,
) -> Tiles:
    tiles = Tiles(names)
    if any(view.weights is not None for view in views):
        ripples = [None if v.weights is None else pick(v, ripple_maps(v, at)) for v in views]
        captions = [_where_halted(v, at, i if by_head else None) for i, v in enumerate(views)]
        tiles.add(RIPPLES, ripples, captions=captions)
    attention = [pick(v, shares(v.coefficients(*at))[0].cpu()).sqrt() for v in views]
    linear = [
        pick(v, shares(v.linear_coefficients(*at))[0].cpu()).sqrt()
        if v.weights is not None
        else None
        for v in views
    ]
    pairs = zip(attention, linear, strict=True)
    largest = [max(_top(m) for m in pair if m is not None) for pair in pairs]
    title = ATTENTION if RIPPLES in tiles.rows else "attention"
    tiles.add(title, attention, largest, [_brightest(top**2) for top in largest])
    if RIPPLES in tiles.rows:
        tiles.add(LINEAR, linear, largest)
        halted = [None if v.halted is None else pick(v, halting_maps(v)) for v in views]
        never = [
            None if m is None else m.masked_fill(m == _groups(v), torch.nan)
            for m, v in zip(halted, views, strict=True)
        ]
        tiles.add(HALTED, never, [_groups(v) for v in views])
    return tiles


def _brightest(share: float) -> str:
    return f"max {share:.1%}" if share > 1e-6 else "nothing: its features are 0"


def ripple_maps(view: LayerView, at: tuple[int, int]) -> Tensor:
    """The spatial weight of every token for a query, by head: (N, H, W)."""
    assert view.weights is not None and view.partition is not None
    groups = view.partition.groups(at, view.grid_size)
    return view.weights[0, at[0], at[1]].cpu()[:, groups]


def halting_maps(view: LayerView) -> Tensor:
    """The group where every token halted, by head: (N, H, W); G where it did not."""
    assert view.halted is not None
    return view.halted[0].permute(2, 0, 1).cpu().float()


def _groups(view: LayerView) -> int:
    return view.partition.num_groups if view.partition is not None else 1


def _where_halted(view: LayerView, at: tuple[int, int], head: int | None) -> str:
    """Where the patch's own ripple halted, in words short enough for a tile."""
    if view.halted is None:
        return ""
    halted = view.halted[0, at[0], at[1]]  # (N,)
    did = halted < _groups(view)
    if head is not None:
        return f"halts at ring {int(halted[head])}" if did[head] else "does not halt"
    return f"{int(did.sum())}/{len(halted)} heads halt"


def _top(values: Tensor) -> float:
    return max(float(values.nan_to_num(0).max()), 1e-12)


def draw_tiles(ax: Any, tiles: Tiles, explanation: Explanation, at: tuple[int, int]) -> None:
    """Draws rows of tiles over the darkened picture, the patch boxed in each, rings outlined."""
    H, W = explanation.grid_size
    cell, step_y, step_x = _steps(tiles, (H, W))
    height, width = H * cell, W * cell
    grey = _grey(explanation.picture, (width, height))
    canvas = np.ones((len(tiles.rows) * step_y, len(tiles.columns) * step_x, 3))
    for r, (name, maps) in enumerate(tiles.rows.items()):
        for c, values in enumerate(maps):
            y, x = r * step_y, c * step_x
            if values is None:
                ax.text(x + width / 2, y + height / 2, "–", ha="center", va="center", color="0.5")
                continue
            tile = _overlay(values / tiles.largest[name][c], grey, cell)
            canvas[y : y + height, x : x + width] = tile
            corner = (x + at[1] * cell - 0.5, y + at[0] * cell - 0.5)
            ax.add_patch(plt.Rectangle(corner, cell, cell, fill=False, color="red", lw=1.1))
            caption = tiles.captions[name][c]
            ax.text(x + width / 2, y + height + 3, caption, ha="center", va="top", fontsize=6.5)
    ax.imshow(canvas, interpolation="nearest")
    middle_x = [c * step_x + width / 2 for c in range(len(tiles.columns))]
    middle_y = [r * step_y + height / 2 for r in range(len(tiles.rows))]
    ax.set_xticks(middle_x, tiles.columns, fontsize=8)
    ax.set_yticks(middle_y, list(tiles.rows), fontsize=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _grey(picture: Tensor, size: tuple[int, int]) -> np.ndarray:
    """The picture without colours (height, width, 1), between 0 and 1."""
    image = Image.fromarray((picture * 255).byte().permute(1, 2, 0).numpy()).convert("L")
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))[..., None] / 255


def _overlay(values: Tensor, grey: np.ndarray, cell: int) -> np.ndarray:
    """A map (H, W) between 0 and 1 in colour over the picture; NaN leaves the picture alone."""
    large = np.kron(values.float().numpy(), np.ones((cell, cell)))
    color = plt.get_cmap(COLORS)(np.nan_to_num(large))[..., :3]
    blended = 0.72 * color + 0.28 * grey
    return np.where(np.isnan(large)[..., None], 0.25 + 0.5 * grey, blended)


def draw_picture(ax: Any, explanation: Explanation, at: tuple[int, int]) -> None:
    """Draws the picture as the model saw it, its patches ruled, one of them boxed."""
    _, height, width = explanation.picture.shape
    H, W = explanation.grid_size
    ax.imshow(explanation.picture.permute(1, 2, 0).numpy(), interpolation="nearest")
    for r in range(1, H):
        ax.axhline(r * height / H - 0.5, color="white", lw=0.4, alpha=0.5)
    for c in range(1, W):
        ax.axvline(c * width / W - 0.5, color="white", lw=0.4, alpha=0.5)
    corner = (at[1] * width / W - 0.5, at[0] * height / H - 0.5)
    ax.add_patch(plt.Rectangle(corner, width / W, height / H, fill=False, color="red", lw=2))
    ax.set(xticks=[], yticks=[], title=f"row {at[0]}, column {at[1]}\nof {H} × {W} patches")


def draw_classes(ax: Any, explanation: Explanation, top: int = 5) -> None:
    """Draws the most likely classes as bars."""
    best = explanation.classes[:top][::-1]
    names = [plain(name, 28).replace("$", r"\$") for name, _ in best]  # $ begins a formula
    bars = ax.barh(names, [p for _, p in best], color="tab:blue")
    ax.bar_label(bars, [f"{p:.1%}" for _, p in best], padding=3, fontsize=8)
    ax.set(xlim=(0, 1.18), xticks=[], title="predicted classes")
    ax.spines[["top", "right", "bottom"]].set_visible(False)


def explain_figure(explanation: Explanation, at: tuple[int, int]) -> Any:
    """The whole explanation of one patch: picture, classes, layers, and every head.

    Args:
        explanation: Of one picture.
        at: Row and column of the patch, from 0.

    Returns:
        A matplotlib figure, for `plots.save`, which closes it.
    """
    explanation.layers[0].check_patch(*at)
    parts = [("Every layer, mean of its heads", layer_tiles(explanation, at))]
    attention = grid_tiles(
        explanation, lambda view: shares(view.coefficients(*at))[0].cpu().sqrt(), None
    )
    parts.append(("Attention, head by head (each layer on its own scale)", attention))
    if explanation.ripples:
        largest = max(_top(ripple_maps(view, at)) for view in explanation.ripples)
        ripples = grid_tiles(
            explanation,
            lambda view: None if view.weights is None else ripple_maps(view, at),
            largest,
        )
        parts.append((f"Ripples, head by head (bright: {largest:.0%})", ripples))
    figure: Any = plt.figure(figsize=SCREEN, layout="constrained")
    upper, lower, key = figure.subfigures(3, 1, height_ratios=[1.15, 1, 0.07])
    ratios = [3, _inches(parts[0][1], explanation)[0]]
    seen, means = upper.subfigures(1, 2, width_ratios=ratios)
    shown, classes = seen.subplots(2, 1, height_ratios=[1.6, 1])
    draw_picture(shown, explanation, at)
    draw_classes(classes, explanation)
    panels = [means, *np.atleast_1d(lower.subfigures(1, len(parts) - 1))]
    for panel, (title, tiles) in zip(panels, parts, strict=True):
        panel.suptitle(title, fontsize=10, x=0.01, ha="left", weight="bold")
        draw_tiles(panel.subplots(), tiles, explanation, at)
    key.text(0.01, 0.5, KEY, fontsize=7, va="center", wrap=True)
    return figure


def tiles_figure(tiles: Tiles, explanation: Explanation, at: tuple[int, int]) -> Any:
    """One section by itself, as the browser shows it."""
    width, height = _inches(tiles, explanation)
    figure, ax = plt.subplots(figsize=(width + 2.0, height + 0.6), layout="constrained")
    draw_tiles(ax, tiles, explanation, at)
    return figure


def _steps(tiles: Tiles, grid_size: tuple[int, int]) -> tuple[int, int, int]:
    """Pixels of a patch, from row to row, and from column to column."""
    H, W = grid_size
    cell = max(4, TILE // max(H, W))
    words = any(any(captions) for captions in tiles.captions.values())
    return cell, H * cell + GAP + (16 if words else 0), W * cell + GAP


def _inches(tiles: Tiles, explanation: Explanation) -> tuple[float, float]:
    """How large a section is drawn."""
    _, step_y, step_x = _steps(tiles, explanation.grid_size)
    return len(tiles.columns) * step_x / TILE * 1.15, len(tiles.rows) * step_y / TILE * 1.15


def png(figure: Any, dpi: int = 110) -> bytes:
    """A figure as the bytes of a PNG; frees it."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    plt.close(figure)
    return buffer.getvalue()


def write_explanation(explanation: Explanation, at: tuple[int, int], path: Path) -> None:
    """Writes `explain_figure` to a .png or .svg."""
    check_suffix(path)
    save(explain_figure(explanation, at), path)
