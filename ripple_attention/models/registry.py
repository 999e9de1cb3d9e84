"""The paper's vision transformers by name, in timm's registry."""

import sys
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import resample_abs_pos_embed
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor

from ripple_attention.models.vit import GridVisionTransformer

CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)

FAMILIES = {
    "ripple_tiny": "ripple",
    "deit6_tiny": "softmax",
    "deit_la_tiny": "linear",
    "deit_la_rope_tiny": "rope",
    "deit_la_sinespe_tiny": "sinespe",
    "deit_la_convspe_tiny": "convspe",
    "permuteformer_tiny": "permute",
    "convit6_tiny": "gated",
}

TINY = {"embed_dim": 192, "depth": 12, "num_heads": 6}
IMAGENET = {"img_size": 224, "patch_size": 16, "num_classes": 1000}
CIFAR100 = {"img_size": 32, "patch_size": 2, "num_classes": 100}

MODELS: dict[str, dict[str, Any]] = {
    **{f"{name}_patch16_224": {"attention": a, **TINY, **IMAGENET} for name, a in FAMILIES.items()},
    **{f"{name}_patch2_32": {"attention": a, **TINY, **CIFAR100} for name, a in FAMILIES.items()},
    "ripple_tiny4_patch2_32": {"attention": "ripple", **TINY, **CIFAR100, "depth": 4},
    "deit_la_tiny4_patch2_32": {"attention": "linear", **TINY, **CIFAR100, "depth": 4},
    # ConViT's own tiny model, but for its class token: its official weights fit.
    "convit4_tiny_patch16_224": {"attention": "gated", **TINY, **IMAGENET, "num_heads": 4},
}


def _cfg(arguments: dict[str, Any]) -> dict[str, Any]:
    """What timm's data pipeline needs to know about a model. There are no weights to fetch."""
    on_cifar = arguments["img_size"] == 32
    return {
        "num_classes": arguments["num_classes"],
        "input_size": (3, arguments["img_size"], arguments["img_size"]),
        "crop_pct": 1.0 if on_cifar else 0.875,
        "interpolation": "bicubic",
        "mean": CIFAR100_MEAN if on_cifar else IMAGENET_DEFAULT_MEAN,
        "std": CIFAR100_STD if on_cifar else IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }


default_cfgs = generate_default_cfgs({name: _cfg(arguments) for name, arguments in MODELS.items()})


def adapt_state_dict(
    state_dict: dict[str, Tensor], model: GridVisionTransformer
) -> dict[str, Tensor]:
    """A DeiT, ViT or ConViT checkpoint for one of our models, position embeddings resized.

    ConViT's official tiny weights are for `convit4_tiny_patch16_224`.

    Leaves out a distillation token and its head, and, unless the model has one, the class token
    and its position.
    """
    state_dict = state_dict.get("model", state_dict)  # type: ignore[assignment]
    adapted = {}
    for name, value in state_dict.items():
        if name == "dist_token" or name.startswith("head_dist."):
            continue
        if name == "cls_token" and model.cls_token is None:
            continue
        if name == "pos_embed":
            if model.pos_embed is None:
                continue
            side = int(value.shape[1] ** 0.5)
            prefix = value.shape[1] - side * side
            positions = resample_abs_pos_embed(
                value[:, prefix:], new_size=list(model.patch_embed.grid_size), num_prefix_tokens=0
            )
            value = torch.cat([value[:, : min(prefix, model.num_prefix_tokens)], positions], 1)
        adapted[name] = value
    return adapted


def _register(name: str, arguments: dict[str, Any]) -> None:
    def create(pretrained: bool = False, **kwargs: Any) -> GridVisionTransformer:
        return build_model_with_cfg(
            GridVisionTransformer,
            name,
            pretrained,
            pretrained_filter_fn=adapt_state_dict,
            feature_cfg={"out_indices": 3, "feature_cls": "getter"},
            **arguments | kwargs,
        )

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"{name}: {arguments['attention']} attention, {arguments['depth']} layers."
    setattr(sys.modules[__name__], name, create)
    register_model(create)


for _name, _arguments in MODELS.items():
    _register(_name, _arguments)


def count_parameters(model: torch.nn.Module) -> int:
    """The number of learned numbers in a model."""
    return sum(parameter.numel() for parameter in model.parameters())
