"""The recipe `digits`, trained on the spot, and a picture of the ripples that it learned."""

from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from ripple_attention.modules import RippleAttention, record_spatial_weights
from ripple_lab.data.batch_augment import normalize
from ripple_lab.data.digits import load_digits_images
from ripple_lab.plots import draw_learned_ripples
from ripple_lab.recipes import find_recipe
from ripple_lab.train.checkpoint import read_weights
from ripple_lab.train.evaluate import load
from ripple_lab.train.network import create_model, preprocessing
from ripple_lab.train.run import train

SHOWN = (0, 3, 7)


def run(output: Path, epochs: int | None, console: Console) -> float:
    """Trains in the folder, or goes on there, and writes `ripples.png` into it.

    Returns:
        The accuracy in percent on digits that it was not trained on.
    """
    recipe = find_recipe("digits")
    if epochs is not None:
        warmup = min(recipe.optimizer.warmup_epochs, epochs - 1)
        optimizer = replace(recipe.optimizer, warmup_epochs=warmup)
        recipe = replace(recipe, epochs=epochs, optimizer=optimizer)
    console.print(
        f"Training a small ripple classifier on scikit-learn's digits for {recipe.epochs} epochs "
        "on the CPU."
    )
    result = train(recipe, output, console, resume=True)
    console.print(
        f"Accuracy on 360 digits it has not seen: {result['top1']:.1f} %. "
        f"`ripple predict {output} PICTURE` names digits of your own."
    )
    picture = output / "ripples.png"
    draw(output / "model.safetensors", picture)
    console.print(f"The ripples it learned: {picture}", soft_wrap=True)
    return result["top1"]


def draw(weights: Path, picture: Path) -> None:
    """Draws the ripples of a digit classifier on one test image of each of a few digits."""
    model = create_model(find_recipe("digits").model, num_classes=10).eval()
    load(model, read_weights(weights)[0], weights)
    test = load_digits_images(train=False)
    examples = [int((test.labels == label).nonzero()[0]) for label in SHOWN]
    config = preprocessing(model)
    images = normalize(test.images[examples], config["mean"], config["std"])
    with torch.no_grad(), record_spatial_weights(model) as ripples:
        model(images)
    partition = next(m for m in model.modules() if isinstance(m, RippleAttention)).partition
    draw_learned_ripples(images[:, 0], list(ripples.values()), partition, picture)
