"""What `ripple app` shows, without the browser: checkpoints, example pictures, and answers."""

import base64
import ctypes
import html
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from ripple_lab.inspection.explain import Explainer, Explanation
from ripple_lab.inspection.figure import head_tiles, layer_tiles, png, tiles_figure
from ripple_lab.inspection.views import AS_TRAINED, LayerView, Settings, shares
from ripple_lab.text import markdown, plain
from ripple_lab.train.checkpoint import EMBEDDED

EMBEDDED_CHOICE = "embedded: the 100 classes of CIFAR-100"
SIDE = 480  # pixels of the picture to click on


@dataclass(frozen=True)
class Answer:
    """What the page shows for one patch of one picture.

    Attributes:
        picture: To click on, patches ruled and one of them boxed.
        classes: Probabilities by name.
        words: What is seen, in Markdown.
        layers, heads: Pictures as HTML that needs no other file.
        grid_size: Rows and columns of patches.
    """

    picture: Image.Image
    classes: dict[str, float]
    words: str
    layers: str
    heads: str
    grid_size: tuple[int, int]


class Viewer:
    """Holds the checkpoints of a page, and answers its questions.

    Args:
        checkpoint: A file of weights, the folder of a run, or a folder of runs. None stands for
            the classifier that comes with the package, then for those in `runs`.
        device: Where to compute.
    """

    def __init__(self, checkpoint: Path | None = None, device: str = "cpu"):
        found = find_checkpoints(checkpoint or Path("runs"))
        if checkpoint is not None and not found:
            raise ValueError(
                "the checkpoint must be a .safetensors file, the folder of a run, or a folder of "
                f"such folders, as `ripple train` writes them; got {checkpoint}"
            )
        self.paths = {} if checkpoint else {EMBEDDED_CHOICE: EMBEDDED}
        self.paths |= {str(path): path for path in found}
        self.device = device
        self.choices = list(self.paths)
        self._explainer = cache(self._load)

    def explainer(self, choice: str) -> Explainer:
        """The classifier of that name, loaded once."""
        if choice not in self.choices:
            raise ValueError(f"the checkpoint must be one of {self.choices}; got {choice!r}")
        return self._explainer(choice)

    def _load(self, choice: str) -> Explainer:
        return Explainer.from_checkpoint(self.paths[choice], device=self.device)

    def first_choice(self) -> str:
        """The first checkpoint that can be loaded, preferably one with ripple layers."""
        others, reasons = [], []
        for choice in self.choices:
            try:
                if self.explainer(choice).max_distance:
                    return choice
                others.append(choice)
            except (ValueError, RuntimeError, OSError) as error:  # a detector's, or cut short
                reasons.append(str(error))
        if not others:
            raise ValueError(
                "the page shows classifiers, as `ripple train` and `ripple demo` write them; none "
                f"of {', '.join(self.choices)} is one: {reasons[0]}"
            )
        return others[0]

    def answer(
        self,
        choice: str,
        image: Image.Image,
        at: tuple[int, int] | None = None,
        layer: int = 0,
        settings: Settings = AS_TRAINED,
    ) -> Answer:
        """Looks at a picture from one patch; the middle one unless given.

        Args:
            choice: One of `choices`.
            image: The picture.
            at: Row and column of the patch; outside the grid, the nearest inside.
            layer: Whose heads are shown, from 0.
            settings: Ripples other than the trained ones.
        """
        explainer = self.explainer(choice)
        if not explainer.max_distance or settings == trained_settings(explainer):
            settings = AS_TRAINED
        trained = explainer(image)
        now = trained if settings == AS_TRAINED else explainer(image, settings)
        H, W = now.grid_size
        row, column = at or (H // 2, W // 2)
        at = min(max(row, 0), H - 1), min(max(column, 0), W - 1)
        layer = min(max(layer, 0), len(now.layers) - 1)
        figures = [layer_tiles(now, at), head_tiles(now, at, layer)]
        layers, heads = (png(tiles_figure(tiles, now, at)) for tiles in figures)
        return_memory()
        return Answer(
            clickable(now, at),
            {plain(name): share for name, share in now.classes[:5]},
            words(now, trained, at),
            as_html(layers, f"ripples and attention of patch {at} in every layer"),
            as_html(heads, f"ripples and attention of patch {at} by the heads of a layer"),
            now.grid_size,
        )


def return_memory() -> None:
    """Gives the system what glibc would keep of an answer: a page lives long."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def find_checkpoints(root: Path) -> list[Path]:
    """A file of weights or a run itself, or the runs in a folder, the newest first."""
    if root.is_file():
        return [root]
    found = [root / "model.safetensors", *root.glob("*/model.safetensors")]
    found = [path for path in found if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def trained_settings(explainer: Explainer) -> Settings:
    """The settings that the sliders show at first."""
    return Settings(explainer.max_distance, explainer.halt_threshold)


def clickable(explanation: Explanation, at: tuple[int, int]) -> Image.Image:
    """The picture as the model saw it, enlarged, with its patches ruled and one boxed."""
    H, W = explanation.grid_size
    cell = max(8, SIDE // max(H, W))
    pixels = (explanation.picture * 255).byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels).resize((W * cell, H * cell), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image, "RGBA")
    for r in range(1, H):
        draw.line([(0, r * cell), (W * cell, r * cell)], fill=(255, 255, 255, 70))
    for c in range(1, W):
        draw.line([(c * cell, 0), (c * cell, H * cell)], fill=(255, 255, 255, 70))
    row, column = at
    corners = [(column * cell, row * cell), ((column + 1) * cell - 1, (row + 1) * cell - 1)]
    draw.rectangle(corners, outline=(255, 0, 0), width=3)
    return image


def patch_at(x: float, y: float, grid_size: tuple[int, int]) -> tuple[int, int]:
    """The row and column of a click on the picture of `clickable`.

    >>> patch_at(479, 61, (8, 8))
    (1, 7)
    """
    cell = max(8, SIDE // max(grid_size))
    return int(y) // cell, int(x) // cell


def words(now: Explanation, trained: Explanation, at: tuple[int, int]) -> str:
    """What there is to see, in Markdown."""
    (name, probability), *_ = now.classes
    lines = [
        f"Patch at **row {at[0]}, column {at[1]}**. Class: **{markdown(name)}**, {probability:.1%}."
    ]
    if now.ripples:
        halting = [
            f"layer {i + 1}: {_halting(view, at)}"
            for i, view in enumerate(now.layers)
            if view.halted is not None and any(c.isdigit() for c in _halting(view, at))
        ]
        said = "; ".join(halting) or "nowhere, every ring keeps a weight of its own"
        lines.append(f"Ring where it halts, a number for each head (–: it does not): {said}.")
    else:
        lines.append("This model has no ripples: only its attention is shown.")
    if now is not trained:
        (before, likely), *_ = trained.classes
        lines.append(
            f"As trained: {markdown(before)}, {likely:.1%}. The sliders move "
            f"**{moved(now, trained, at):.1%}** of this patch's attention elsewhere, in the mean "
            "of layers and heads."
        )
    return "\n\n".join(lines)


def _halting(view: LayerView, at: tuple[int, int]) -> str:
    assert view.halted is not None and view.partition is not None
    groups = view.halted[0, at[0], at[1]].tolist()  # of each head
    return " ".join("–" if g == view.partition.num_groups else str(g) for g in groups)


def moved(now: Explanation, before: Explanation, at: tuple[int, int]) -> float:
    """The share of a patch's attention that moved, averaged over the ripple layers."""
    pairs = zip(now.ripples, before.ripples, strict=True)
    changes = [shares(a.coefficients(*at)) - shares(b.coefficients(*at)) for a, b in pairs]
    return float(torch.stack([c.abs().sum((-2, -1)).mean() / 2 for c in changes]).mean())


def as_html(data: bytes, alt: str) -> str:
    """A PNG inside the page itself."""
    source = base64.b64encode(data).decode()
    return (
        f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{source}" '
        'style="max-width:100%;height:auto;background:white">'
    )


def _sample(name: str) -> Image.Image:
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image(name))


def _digit(label: int) -> Image.Image:
    from ripple_lab.data.digits import load_digits_images

    digits = load_digits_images(train=False)
    return digits[int((digits.labels == label).nonzero()[0])][0]


EXAMPLES: dict[str, Callable[[], Image.Image]] = {
    "flower": partial(_sample, "flower.jpg"),
    "temple": partial(_sample, "china.jpg"),
    **{f"handwritten {label}": partial(_digit, label) for label in (0, 3, 7)},
}
