"""What a classifier learned about distance: mean ripples, where they halt, their divergence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ripple_attention.partition import Partition
from ripple_attention.spatial_weights import fixed_weights
from ripple_lab.data.pictures import in_colour
from ripple_lab.divergence import divergence_from_fixed, uniform_divergence
from ripple_lab.files import write_csv
from ripple_lab.inspection.explain import Explainer
from ripple_lab.inspection.views import LayerView
from ripple_lab.plots import COLORS, plt, save

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass
class Profile:
    """One layer's ripples over many images; all numbers are means, except for the counts.

    Attributes:
        name: Of the layer in the model.
        partition: Whose groups they weigh.
        weights, squares: Of each head and group (N, G), the weights and their squares.
        halted: The group where each token halted (N, H, W), with G for one that did not.
        shares: Of each head (N, G + 1), the share of tokens that halted at each group, or not.
        divergence: Of each head (N,), the divergence of a token's weights from the fixed ones.
        strength, weak: Of each head (N,), what eps leaves of a token's attention, and the share of
            tokens of which it leaves less than half; see `LayerView.strength`.
        active: Of each head and feature (2, N, M), the share of queries and of keys for which it is
            not zero.
        images: How many images the means are over.
    """

    name: str
    partition: Partition
    weights: Tensor
    squares: Tensor
    halted: Tensor
    shares: Tensor
    divergence: Tensor
    strength: Tensor
    weak: Tensor
    active: Tensor
    images: int

    @classmethod
    def of(cls, view: LayerView) -> "Profile":
        """Of one batch."""
        assert view.weights is not None and view.halted is not None and view.partition is not None
        weights, halted = view.weights.double().cpu(), view.halted.cpu()
        strength = view.strength().double().cpu()
        groups = torch.arange(weights.shape[-1] + 1)
        over_tokens = (0, 1, 2)
        return cls(
            view.name,
            view.partition,
            weights.mean(over_tokens),
            weights.square().mean(over_tokens),
            halted.double().mean(0).permute(2, 0, 1),
            (halted.unsqueeze(-1) == groups).double().mean(over_tokens),
            divergence_from_fixed(weights).mean(over_tokens),
            strength.mean(over_tokens),
            (strength < 0.5).double().mean(over_tokens),
            view.active().double().cpu(),
            len(weights),
        )

    def join(self, other: "Profile") -> "Profile":
        """Merges two profiles; each image has the same weight."""
        total = self.images + other.images
        names = (
            "weights",
            "squares",
            "halted",
            "shares",
            "divergence",
            "strength",
            "weak",
            "active",
        )
        means = {
            name: (getattr(self, name) * self.images + getattr(other, name) * other.images) / total
            for name in names
        }
        return Profile(self.name, self.partition, images=total, **means)

    @property
    def deviations(self) -> Tensor:
        """The standard deviation of the weights over tokens and images (N, G)."""
        return (self.squares - self.weights.square()).clamp(min=0).sqrt()

    @property
    def rings(self) -> list[str]:
        """The distances of each group, in words."""
        radii = (-1, *self.partition.radii)
        names = [f"{a + 1}" if b == a + 1 else f"{a + 1}–{b}" for a, b in pairwise(radii)]
        tiles = (0, *self.partition.tile_radii)
        coarse = [f"{a + 1}–{b} tiles" if a else f"≤ {b} tiles" for a, b in pairwise(tiles)]
        return [*names, *coarse, "rest"]


def profile(
    explainer: Explainer, images: Sequence[Image.Image | Tensor], batch_size: int = 32
) -> list[Profile]:
    """The profile of every ripple layer.

    Args:
        explainer: Whose layers.
        images: Pictures, or images (3, height, width) as its transform prepares them.
        batch_size: How many images are processed at a time.
    """
    if not explainer.max_distance:
        raise ValueError(
            f"there are no ripples to analyze: {type(explainer.model).__name__} has no "
            "RippleAttention. `ripple models --only ripple` lists models that have"
        )
    profiles: dict[str, Profile] = {}
    for start in range(0, len(images), batch_size):
        prepared = [
            image if isinstance(image, Tensor) else explainer.transform(in_colour(image))
            for image in images[start : start + batch_size]
        ]
        _, views = explainer.record(torch.stack(prepared))
        for view in views:
            if view.weights is not None:
                new, old = Profile.of(view), profiles.get(view.name)
                profiles[view.name] = old.join(new) if old else new
    if not profiles:
        raise ValueError("profiles are means over images; got none")
    return list(profiles.values())


def pictures_of_folder(folder: Path, count: int) -> list[Image.Image]:
    """The first pictures of a folder, by name."""
    from ripple_lab.data.pictures import open_image

    names = folder.iterdir() if folder.is_dir() else []
    paths = sorted(path for path in names if path.suffix.lower() in PICTURES)
    if not paths:
        raise ValueError(f"there must be pictures ({', '.join(PICTURES)}) in the folder {folder}")
    return [open_image(path) for path in paths[:count]]


def recipe_pictures(weights: Path, image_size: int, count: int) -> list[Image.Image]:
    """Test pictures of a checkpoint's recipe, spread over the whole set."""
    from ripple_lab.data.images import DataError
    from ripple_lab.data.module import open_data
    from ripple_lab.train.checkpoint import read_description

    recipe: Any = read_description(weights)[0]
    try:
        data = open_data(recipe, False, image_size)
    except DataError as error:
        raise DataError(
            f"{error} (an option of `ripple train`); or look at pictures of your own, "
            "--images FOLDER"
        ) from error
    count = min(count, len(data))
    return [data[i * len(data) // count][0] for i in range(count)]


def training_rows(weights: Path) -> list[dict[str, Any]]:
    """What a checkpoint's run recorded about its ripples after each epoch, if it did.

    Args:
        weights: A run's own file of weights, or one of its `checkpoints/step-…/`.
    """
    from ripple_lab.train.recorder import read_metrics
    from ripple_lab.train.ripples import RIPPLES, summary

    folder = weights.absolute().parent
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    return [summary(line) for line in read_metrics(run / RIPPLES)]


def write_training(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes the divergence in training as CSV, and draws it as PNG and SVG."""
    from ripple_lab.reproduce.charts import draw_divergence as draw_curve

    path = folder / "divergence-in-training"
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(rows, path.with_suffix(".csv"))
    title = "JSD between the ripples and the fixed weights, in training"
    uniform = uniform_divergence(rows[0]["groups"])
    draw_curve(title, {"this run": rows}, uniform, path, halting=True)
    return [path.with_suffix(suffix) for suffix in (".csv", ".png", ".svg")]


def write_analysis(profiles: Sequence[Profile], folder: Path) -> list[Path]:
    """Writes the profiles as CSV, and draws each as PNG and SVG.

    Returns:
        What was written: weights, halting, divergence and strength, each in the three formats.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, tuple[Any, Any]] = {
        "weights": (weight_rows, draw_weights),
        "halting": (halting_rows, draw_halting),
        "divergence": (divergence_rows, draw_divergence),
        "strength": (strength_rows, draw_strength),
    }
    written = []
    for name, (rows, draw) in parts.items():
        write_csv(rows(profiles), folder / f"{name}.csv")
        for suffix in (".png", ".svg"):
            save(draw(profiles), folder / f"{name}{suffix}")
        written += [folder / f"{name}{suffix}" for suffix in (".csv", ".png", ".svg")]
    return written


def weight_rows(profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """Mean and deviation of the weight of every layer, head and ring."""
    return [
        {
            **_head(layer, it, n),
            "ring": ring,
            "mean": f"{it.weights[n, g]:.6f}",
            "deviation": f"{it.deviations[n, g]:.6f}",
        }
        for layer, it in enumerate(profiles)
        for n in range(len(it.weights))
        for g, ring in enumerate(it.rings)
    ]


def halting_rows(profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """The share of tokens that halt at each ring, and of those that do not halt."""
    return [
        {**_head(layer, it, n), "halts_at": ring, "share": f"{it.shares[n, g]:.6f}"}
        for layer, it in enumerate(profiles)
        for n in range(len(it.shares))
        for g, ring in enumerate([*it.rings, "never"])
    ]


def divergence_rows(profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """The divergence from fixed weights of every layer and head, and what uniform ones have."""
    return _by_head(
        profiles,
        divergence_from_fixed=lambda it, n: it.divergence[n],
        divergence_of_uniform=lambda it, _: uniform_divergence(it.partition.num_groups),
    )


def strength_rows(profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """What eps leaves of the attention of every layer and head, how often less than half; how many
    features are not zero; and how many are zero for all keys, here and in all heads of the layer,
    which share a map."""
    return _by_head(
        profiles,
        strength=lambda it, n: it.strength[n],
        share_below_half=lambda it, n: it.weak[n],
        active_features_of_queries=lambda it, n: it.active[0, n].mean(),
        active_features_of_keys=lambda it, n: it.active[1, n].mean(),
        dead_features=lambda it, n: (it.active[1, n] == 0).double().mean(),
        dead_features_of_all_heads=lambda it, _: (it.active[1] == 0).all(0).double().mean(),
    )


def _by_head(
    profiles: Sequence[Profile], **columns: Callable[[Profile, int], Any]
) -> list[dict[str, Any]]:
    """A row for each layer and head, with a number in each column."""
    return [
        _head(layer, it, n) | {name: f"{number(it, n):.6f}" for name, number in columns.items()}
        for layer, it in enumerate(profiles)
        for n in range(len(it.weights))
    ]


def _head(layer: int, it: Profile, head: int) -> dict[str, Any]:
    return {"layer": layer + 1, "name": it.name, "head": head + 1, "images": it.images}


def draw_weights(profiles: Sequence[Profile]) -> Any:
    """A panel for each layer: the mean weight of every ring, a line for each head."""
    columns = min(4, len(profiles))
    rows = -(-len(profiles) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.9 * columns + 1.5, 2.3 * rows + 0.4), sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for i, ax in enumerate(axes.flat):
        if i >= len(profiles):
            ax.axis("off")
            continue
        it = profiles[i]
        for n, mean in enumerate(it.weights):
            ax.plot(it.rings, mean.numpy(), marker=".", label=f"head {n + 1}")
        G = it.partition.num_groups
        ax.plot(it.rings, fixed_weights(G).numpy(), "k:", lw=1, label="fixed weights")
        ax.axhline(1 / G, color="black", lw=0.8, ls="--", label="linear attention")
        ax.set(title=f"layer {i + 1}", xlabel="distance")
        ax.yaxis.set_major_formatter("{x:.0%}")
    axes[0, 0].set_ylim(0, 1.1 * max(ax.dataLim.ymax for ax in axes.flat[: len(profiles)]))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.suptitle(f"Mean weight of each ring, {profiles[0].images} images", fontsize=11)
    return figure


def draw_halting(profiles: Sequence[Profile]) -> Any:
    """For every layer and head, a map of the ring where tokens halt; bright means far."""
    heads = max(len(it.halted) for it in profiles)
    figure, axes = plt.subplots(
        heads, len(profiles), figsize=(max(5.0, 1.1 * len(profiles) + 2.2), 1.1 * heads + 0.8),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    largest = max(it.partition.num_groups for it in profiles)
    for layer, it in enumerate(profiles):
        for n, ax in enumerate(axes[:, layer]):
            ax.set(xticks=[], yticks=[])
            if n < len(it.halted):
                values = it.halted[n].numpy()
                image = ax.imshow(values, cmap=COLORS, vmin=1, vmax=largest)
        axes[0, layer].set_title(f"layer {layer + 1}", fontsize=8)
    for n in range(heads):
        axes[n, 0].set_ylabel(f"head {n + 1}", fontsize=8)
    label = f"ring where a patch halts, mean ({largest}: never)"
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    return figure


def draw_divergence(profiles: Sequence[Profile]) -> Any:
    """The divergence from fixed weights by layer: a dot for each head, a line for the mean."""
    figure, ax = _by_layer([it.divergence for it in profiles])
    layers = [i + 1 for i in range(len(profiles))]
    uniform = [uniform_divergence(it.partition.num_groups) for it in profiles]
    ax.plot(layers, uniform, color="black", ls="--", lw=0.8, label="linear attention")
    ax.set(
        ylabel="Jensen–Shannon divergence, nats", ylim=(0, 1.1 * ax.dataLim.ymax),
        title="How far ripples are from the fixed weights 1/2, 1/4, …",
    )  # fmt: skip
    ax.legend(fontsize=8)
    return figure


def draw_strength(profiles: Sequence[Profile]) -> Any:
    """What eps leaves of attention by layer: a dot for each head, a line for the mean."""
    figure, ax = _by_layer([it.strength for it in profiles])
    ax.set(ylabel="den / (den + eps), mean of tokens", ylim=(0, 1.02), title="What eps leaves")
    ax.legend(fontsize=8)
    return figure


def _by_layer(values: Sequence[Tensor]) -> tuple[Any, Any]:
    """A number of each head (N,) by layer, and their means."""
    figure, ax = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
    layers = [i + 1 for i in range(len(values))]
    for layer, heads in zip(layers, values, strict=True):
        ax.plot([layer] * len(heads), heads.numpy(), "o", color="tab:blue", ms=4)
    means = [float(heads.mean()) for heads in values]
    ax.plot(layers, means, color="tab:blue", label="mean of the heads (dots)")
    ax.set(xticks=layers, xlabel="layer")
    return figure, ax
