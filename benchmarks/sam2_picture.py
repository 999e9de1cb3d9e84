r"""A picture of what ripples leave of SAM 2's masks, and how far each of its blocks is off.

    python benchmarks/sam2_picture.py SAM2 PETS --weights runs/sam2-aligned/r8-far.safetensors \
        --results benchmarks/results/sam2-align-amd-epyc-1-threads.csv

SAM2 and PETS are folders as in sam2.py; `sam2_align.py` writes the weights and the CSV of errors.
"""

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import to_rgb
from safetensors.torch import load_file
from sam2 import Judge, decoder_inputs, find_jpegs, iou
from sam2_align import VARIANTS, turn

from ripple_lab.canvas import MARKERS, PALETTE, plt, save
from ripple_lab.reproduce.convert_blocks import VARIANTS as IN_WORDS
from ripple_lab.results import read_csv

BLOCKS = (5, 7, 9)
COLORS = {"both": "0.82", "unchanged alone": PALETTE[1], "ripples alone": PALETTE[0]}


@torch.no_grad()
def draw_masks(axes: np.ndarray, judge: Judge, variant: str, weights: Path) -> None:
    """A panel a photo: where both masks are, and where only one is."""
    model = copy.deepcopy(judge.teacher)
    turn(model, variant)
    model.load_state_dict(load_file(weights), strict=False)
    for ax, photo, image in zip(axes.flat, judge.photos, judge.images, strict=True):
        of_both = (decoder_inputs(network, judge.neck, image) for network in (judge.teacher, model))
        (one, other), _ = judge.masks(photo, *of_both)
        picture, parts = np.ones((*one.shape, 3)), (one & other, one & ~other, other & ~one)
        for part, color in zip(parts, COLORS.values(), strict=True):
            picture[part] = to_rgb(color)
        ax.imshow(picture)
        ax.set(xticks=[], yticks=[], title=f"alike {iou(one, other, np.ones_like(one)):.3f}")


def draw_errors(ax: plt.Axes, results: Path) -> None:
    """A line a variant, a dot a block."""
    rows = sorted(read_csv(results), key=lambda row: -float(row["embedding_error"]))
    for block, marker, color in zip(BLOCKS, MARKERS, PALETTE, strict=False):
        errors = [float(row[f"blocks.{block}.attn"]) for row in rows]
        ax.plot(errors, range(len(rows)), marker, color=color, label=f"block {block}")
    ax.set_yticks(range(len(rows)), [IN_WORDS[row["variant"]] for row in rows])
    ax.set(xlim=(0, None), xlabel="relative squared error of a block's output")
    ax.grid(axis="x", color="0.9")
    ax.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("pets", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--variant", default="r8-far", choices=VARIANTS)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("docs/images/sam2.png"))
    words = parser.parse_args()
    photos = find_jpegs(words.pets / "val")[::11][:6]
    figure, axes = plt.subplot_mosaic(
        [["errors", *"abc"], ["errors", *"def"]],
        width_ratios=(1.6, 1, 1, 1), figsize=(11, 4.6), layout="constrained",
    )  # fmt: skip
    draw_errors(axes["errors"], words.results)
    panels = np.array([axes[name] for name in "abcdef"])
    draw_masks(panels, Judge(words.folder, photos), words.variant, words.weights)
    marks = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(marks, COLORS, loc="outside lower right", ncols=3, frameon=False)
    save(figure, words.output)


if __name__ == "__main__":
    main()
