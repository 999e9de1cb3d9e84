"""Matplotlib without a screen: its colours, and figures that are written whole or not at all."""

from pathlib import Path
from typing import Any

import matplotlib

from ripple_lab.files import replacing

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito's colours, which colour-blind eyes tell apart, and a marker each for prints.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def check_suffix(path: Path) -> None:
    """Refuses what cannot be written, before any work."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"the picture to write must end in .png or .svg; got {path}")


def save(figure: Any, path: Path) -> None:
    """Writes a figure, whole or not at all, and frees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as unfinished:
            figure.savefig(unfinished, format=path.suffix.lstrip("."), dpi=130)
    finally:
        plt.close(figure)


def save_both(figure: Any, path: Path) -> None:
    """As PNG and as SVG, next to each other."""
    for suffix in (".png", ".svg"):
        save(figure, path.with_name(path.name + suffix))
