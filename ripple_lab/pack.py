"""A trained model to pass on: its weights in half precision, and a page that says what it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ripple_lab.files import replace_text
from ripple_lab.gather import gather
from ripple_lab.text import markdown
from ripple_lab.train.checkpoint import (
    describe,
    find_weights,
    read_model,
    write_weights,
)
from ripple_lab.train.recipe import Recipe

MEASURES = {"top1": "top-1 %", "top5": "top-5 %", "ap": "AP", "ap50": "AP50"}


def pack(run: Path, path: Path, ema: bool = False) -> Path:
    """Writes the weights of a finished run, float16, and a model card beside them.

    Where the data lay on the machine that trained it is left out.

    Args:
        run: Folder of a finished run.
        path: The .safetensors file to write. The card has the same name and ends in .md.
        ema: Take the running mean of the weights.

    Returns:
        The path of the card.
    """
    if path.suffix != ".safetensors":
        raise ValueError(f"a model is packed into a .safetensors file; got {path}")
    (result,) = gather([run])
    source = find_weights(run, ema)
    read, recipe, classes = read_model(source)
    recipe = replace(recipe, data=replace(recipe.data, root=type(recipe.data)().root))
    weights = {name: _half(name, value) for name, value in read.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_weights(path, weights, describe(recipe, classes))
    card = path.with_suffix(".md")
    replace_text(card, _card(path, recipe, classes, weights, result, ema))
    return card


def _half(name: str, value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    small = value.half()
    if not torch.equal(small.isfinite(), value.isfinite()):
        raise ValueError(
            f"weights must fit half precision, ±{torch.finfo(torch.half).max:,.0f}; {name} has "
            f"{float(value.abs().max()):,.0f}"
        )
    return small


def _card(
    path: Path,
    recipe: Recipe,
    classes: tuple[str, ...],
    weights: dict[str, Tensor],
    result: dict[str, Any],
    ema: bool,
) -> str:
    """What the model is, how it came about, how good it is, and what it is not for."""
    parameters = sum(value.numel() for value in weights.values())
    own = {key.removeprefix("ema_"): result[key] for key in result if key.startswith("ema_") == ema}
    measures = ", ".join(f"{name} {own[key]:.4g}" for key, name in MEASURES.items() if key in own)
    shown = ", ".join(map(markdown, classes[:5])) + (", …" if len(classes) > 5 else "")
    rows = {
        "model": f"`{recipe.model.name}`, {parameters / 1e6:.2f} M numbers, "
        f"{path.stat().st_size / 1e6:.1f} MB in half precision",
        "data": recipe.data.name,
        "classes": f"{len(classes)}: {shown}",
        "trained by": f"`ripple train {recipe.name} --seed {recipe.seed}`",
        "changed in the recipe": markdown(result["changes"]) or "nothing",
        "epochs": f"{result['epochs']}, {result['steps']:,} steps",
        "hardware": f"{markdown(result['hardware'])}, {result['images_per_second']:,.0f} images/s",
        "result": f"{measures} on the recipe's test images, in full precision",
        "weights": "their running mean" if ema else "as they were after the last step",
    }
    lines = "\n".join(f"| {name} | {text} |" for name, text in rows.items())
    return f"""# {path.stem}

| | |
|---|---|
{lines}

    ripple predict {path.name} picture.jpg
    ripple evaluate {path.name}

**Limits.** It names one of its classes for any picture, whatever it shows. It has learned from one
set of data, with that set's sizes, styles and mistakes, and was judged on the same kind. It is made
to try ripple attention and to compare it; nothing that matters to anybody should rest on it.
"""
