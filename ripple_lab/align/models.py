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

from ripple_lab.data.pictures import open_picture

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
    if (Path(name) / "config.json").is_file():
        found = _of_transformers(name)
    else:
        found = _of_timm(name, weights, side)
    return Pretrained(found.model.eval(), side or found.side, found.mean, found.std, found.missing)


def _of_timm(name: str, weights: Path | None, side: int | None) -> Pretrained:
    import timm
    from timm.data import resolve_model_data_config
    from timm.models import load_state_dict

    if not timm.is_model(name):
        raise ValueError(
            f"a model is the name of one of timm or a folder with a config.json; got {name!r}"
        )
    model: Any = timm.create_model(name, pretrained=weights is None)
    missing: list[str] = []
    if weights is not None:
        missing, unexpected = model.load_state_dict(load_state_dict(str(weights)), strict=False)
        if unexpected:
            raise ValueError(f"{weights} has weights that {name} has not: {', '.join(unexpected)}")
    config = resolve_model_data_config(model)
    own = int(config["input_size"][-1])
    if side not in (None, own) and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=(side, side))
    return Pretrained(model, own, config["mean"], config["std"], tuple(missing))


def _of_transformers(folder: str) -> Pretrained:
    from transformers import AutoImageProcessor, AutoModel

    model = AutoModel.from_pretrained(folder)
    model = getattr(model, "vision_model", model)  # of a model that reads as well
    processor = AutoImageProcessor.from_pretrained(folder)
    size = dict(processor.size)
    side = size.get("height") or size.get("shortest_edge") or size["longest_edge"]
    return Pretrained(model, int(side), tuple(processor.image_mean), tuple(processor.image_std))


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
        picture = open_picture(path).resize((side, side), Image.Resampling.BICUBIC)
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
