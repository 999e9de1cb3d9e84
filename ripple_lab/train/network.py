"""The network of a classifier and what its images need. Nothing here needs Lightning."""

from typing import Any

import timm
from timm.data import resolve_data_config
from torch import nn

from ripple_attention.models import MODELS  # makes our names known to timm, too
from ripple_attention.models.vit import RIPPLE_OPTIONS
from ripple_lab.console import did_you_mean
from ripple_lab.train.classification import ModelSpec
from ripple_lab.train.weights import brief

TIMM_NAMES = {
    "width": "embed_dim",
    "heads": "num_heads",
    "image_size": "img_size",
    "drop_path": "drop_path_rate",
}


def create_model(spec: ModelSpec, num_classes: int) -> nn.Module:
    """The network of a recipe, with fresh weights."""
    options = {name: value for name, value in vars(spec).items() if value is not None}
    name = options.pop("name")
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models())
        raise ValueError(
            f"model.name must be known to timm; got {name!r:.80}: {hint}`ripple models` lists ours"
        )
    if name in MODELS and MODELS[name]["attention"] != "ripple":
        unused = sorted(options.keys() & {"ripple_layers", "rotary", *RIPPLE_OPTIONS})
        if unused:
            raise ValueError(f"{name} has no ripples: leave out model.{', model.'.join(unused)}")
    if not options["class_token"]:
        del options["class_token"]  # as the named model has it
    scaling = options.pop("scaling", None)
    if scaling is not None:
        options["feature_map_options"] = {"scaling": scaling}
    options["pos_embed"] = "learn" if options.pop("position_embeddings") else "none"
    options = {TIMM_NAMES.get(name, name): value for name, value in options.items()}
    try:
        model = timm.create_model(name, num_classes=num_classes, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{name} cannot be made with {options}: {brief(error)}") from None
    patches: Any = model.patch_embed
    if any(s % p for s, p in zip(patches.img_size, patches.patch_size, strict=True)):
        raise ValueError(
            f"{name} cannot be made with {options}: its patches of {patches.patch_size} pixels "
            f"must divide images of {patches.img_size}"
        )
    return model


def preprocessing(model: nn.Module) -> dict[str, Any]:
    """What the model's images need: input_size, mean, std, crop_pct, interpolation."""
    config = resolve_data_config({}, model=model)
    side = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if side is not None:
        config["input_size"] = (config["input_size"][0], *side)
    return config
