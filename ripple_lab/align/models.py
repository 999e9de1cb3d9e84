"""Pretrained models and photos, as the commands name them."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ripple_attention.checks import check_count
from ripple_lab.data.pictures import open_image
from ripple_lab.train.weights import CheckpointError, brief, misfit, read_weights

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True)
class Pretrained:
    """A model and what it wants of an image.

    Attributes:
        model: With its weights.
        side: Pixels of an image's height and width.
        mean, std: Of the three colours, as it was trained with.
        missing: Weights that the file did not have.
    """

    model: nn.Module
    side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    missing: tuple[str, ...] = ()


def load_pretrained(name: str, weights: Path | None = None, side: int | None = None) -> Pretrained:
    """A model of timm by its name, or one of transformers by its folder.

    Args:
        name: As "vit_small_patch16_dinov3", or the path of a folder with a config.json.
        weights: A file with weights of a timm model; those that timm downloads unless given.
        side: Of images; the model's own unless given.
    """
    if side is not None:
        check_count("side", side)
    if (Path(name) / "config.json").is_file():
        found = _of_transformers(name)
    else:
        found = _of_timm(name, weights, side)
    return Pretrained(found.model.eval(), side or found.side, found.mean, found.std, found.missing)


def _of_timm(name: str, weights: Path | None, side: int | None) -> Pretrained:
    import timm
    from timm.data import resolve_model_data_config

    if not timm.is_model(name):
        raise ValueError(
            f"a model is the name of one of timm or a folder with a config.json; got {name!r}"
        )
    try:
        model: Any = timm.create_model(name, pretrained=weights is None)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"the weights of {name} are not to be had from timm: {brief(error)} Name a file that "
            "has them, --weights"
        ) from None
    missing: list[str] = []
    if weights is not None:
        missing = load_weights(model, weights, name)
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if side is not None and patch is not None and side % patch[0]:
        raise ValueError(
            f"the patches of {name} have {patch[0]} pixels, so the side of images must be a "
            f"multiple of that; got {side=}: take {max(side // patch[0], 1) * patch[0]}"
        )
    config = resolve_model_data_config(model)
    own = int(config["input_size"][-1])
    if side not in (None, own) and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=(side, side))
    return Pretrained(model, own, config["mean"], config["std"], tuple(missing))


def load_weights(model: nn.Module, path: Path, name: str) -> list[str]:
    """Puts the weights of a file into a model of timm; returns the names of those it lacks.

    Executes nothing, whatever the file holds. A .safetensors file that carries a checksum of itself
    must match it.
    """
    from timm.models import load_state_dict

    if not path.is_file():
        raise ValueError(f"{path} is no file of weights: it is not there, or a folder or a pipe")
    if path.suffix == ".safetensors":
        weights, _ = read_weights(path)
    else:
        try:
            weights = load_state_dict(str(path), weights_only=True)
        except Exception as error:  # of many kinds: the file may say anything
            raise CheckpointError(
                f"{path} cannot be read as weights ({brief(error)}): take a .safetensors file, or "
                "one that torch.save wrote of a model's state_dict()"
            ) from None
    expected = model.state_dict()
    missing = [key for key in expected if key not in weights]
    given = {key: x for key, x in weights.items() if isinstance(x, Tensor)}
    there = {key: x for key, x in expected.items() if key in weights}
    if reason := misfit(there, given) or ("" if there else "none of its names is in the file"):
        raise CheckpointError(
            f"{path} does not fit {name}; weights: {reason}. Name the model that it is of"
        )
    model.load_state_dict(weights, strict=False)
    return missing


def _of_transformers(folder: str) -> Pretrained:
    """Executes nothing, whatever the files of the folder say."""
    from transformers import AutoImageProcessor, AutoModel

    try:
        model = AutoModel.from_pretrained(folder, trust_remote_code=False)
        processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        size = dict(processor.size)
        side = size.get("height") or size.get("shortest_edge") or size.get("longest_edge")
        colours = [tuple(map(float, x)) for x in (processor.image_mean, processor.image_std)]
        if not side or any(len(x) != 3 for x in colours):
            raise ValueError(f"images have a side and three colours; got {size}, {colours}")
    except Exception as error:  # of many kinds: the files may say anything
        raise ValueError(
            f"{folder} cannot be read as a model of transformers and its image processor: "
            f"{brief(error)}. Take a folder as save_pretrained of both writes it"
        ) from None
    model = getattr(model, "vision_model", model)  # of a model that reads as well
    mean, std = colours
    return Pretrained(model, int(side), mean, std)  # type: ignore[arg-type]


class Photos:
    """Batches of the photos in a folder, resized to a square and normalised; the same each time.

    Args:
        paths: Of pictures.
        pretrained: Says how.
        batch_size: Photos at a time; the last batch may have fewer.
        keep_on: A device that keeps all photos, as bytes; else they are read again each time.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        pretrained: Pretrained,
        batch_size: int = 1,
        keep_on: torch.device | None = None,
    ):
        self.paths, self.pretrained, self.batch_size = paths, pretrained, batch_size
        self.kept: Tensor | None = None
        if keep_on is not None:
            with ThreadPoolExecutor() as pool:
                self.kept = torch.stack([*pool.map(self.pixels, paths)]).to(keep_on)

    def __len__(self) -> int:
        return -(-len(self.paths) // self.batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, len(self.paths), self.batch_size):
            part = slice(start, start + self.batch_size)
            if self.kept is None:
                yield torch.stack([self.read(path) for path in self.paths[part]])
            else:
                yield self.normalised(self.kept[part])

    def read(self, path: Path) -> Tensor:
        return self.normalised(self.pixels(path))

    def pixels(self, path: Path) -> Tensor:
        """Bytes (3, S, S)."""
        side = self.pretrained.side
        picture = open_image(path).resize((side, side), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

    def normalised(self, pixels: Tensor) -> Tensor:
        colours = self.pretrained.mean, self.pretrained.std
        mean, std = (torch.tensor(x, device=pixels.device)[:, None, None] for x in colours)
        return (pixels / 255 - mean) / std


def find_photos(folder: Path, count: int | None = None) -> tuple[list[Path], list[Path]]:
    """Pictures of a folder, shuffled once for all: to learn from, and an eighth to measure with."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    paths = [paths[i] for i in order][:count]
    if len(paths) < 2:
        raise ValueError(
            f"blocks learn from some photos and are measured on others, so two are the least; "
            f"found {len(paths)} in {folder} that end in {', '.join(ENDINGS)}"
        )
    held_out = max(len(paths) // 8, 1)
    return paths[held_out:], paths[:held_out]
