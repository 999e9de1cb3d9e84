"""A folder as `ripple train` leaves it, without training: for tests of what looks into models."""

from dataclasses import replace

import torch

from ripple_attention.modules import RippleAttention
from ripple_lab.recipes import find_recipe
from ripple_lab.train.checkpoint import describe, write_weights
from ripple_lab.train.network import create_model


def write_small_run(folder, seed=0, classes=tuple("0123456789")):
    """A tiny classifier of digits with lively ripples; some of them halt."""
    recipe = find_recipe("digits")
    small = replace(recipe.model, patch_size=8, width=24, heads=2, depth=3, ripple_layers=2)
    recipe = replace(recipe, model=replace(small, halt_threshold=0.05))
    torch.manual_seed(seed)
    model = create_model(recipe.model, 10)
    enliven(model)
    folder.mkdir(parents=True)
    write_weights(folder / "model.safetensors", model.state_dict(), describe(recipe, classes))
    return folder


@torch.no_grad()
def enliven(model):
    """Gives spatial weights logits far from 0, so that ripples differ and some halt."""
    for layer in model.modules():
        if isinstance(layer, RippleAttention) and hasattr(layer.spatial_weights, "embedding"):
            layer.qkv.weight.normal_(std=0.3)
            layer.spatial_weights.embedding.normal_(std=3.0)
