"""Pictures with their objects, one by one and in batches."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torchvision.tv_tensors import BoundingBoxes

from ripple_lab.data.folders import SkipDamaged
from ripple_lab.detection.matching import Target

# The image_id of a picture that could not be decoded: evaluation leaves it out.
DAMAGED = -1


class DetectionPictures(Protocol):
    """A data set whose items are a picture and its objects; `ground_truth` is COCO's form of it."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image, Target]: ...

    def ground_truth(self) -> dict[str, Any]: ...


def make_target(boxes: Any, labels: Any, image_id: int, size: tuple[int, int]) -> Target:
    """The objects of a picture, as torchvision's transforms take them.

    Args:
        boxes: Left, top, right and bottom in pixels, (n, 4).
        labels: (n,).
        image_id: The data set's number of the picture.
        size: Its height and width in pixels; transforms leave them as they are.
    """
    corners = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {
        "boxes": BoundingBoxes(corners, format="XYXY", canvas_size=size),  # type: ignore[call-overload]
        "labels": torch.as_tensor(labels, dtype=torch.int64),
        "image_id": image_id,
        "size": size,
    }


class DetectionItems(SkipDamaged):
    """Transformed pictures and targets; damaged pictures are skipped, counted and warned about.

    In training the next picture takes the place of a damaged one. In evaluation a black one
    does, without objects and with the image_id −1, which the evaluation leaves out.

    Args:
        dataset: Items are a picture and its target.
        transform: Picture and target → what the network and the loss take.
        train: Whether this is training.
    """

    def __init__(
        self,
        dataset: DetectionPictures,
        transform: Callable[[Image.Image, Target], tuple[Tensor, Target]],
        train: bool,
    ):
        super().__init__(dataset, transform, train)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:  # type: ignore[override]
        item: Any = self._read(index)
        while item is None and self.train:
            index = (index + 1) % len(self)
            item = self._read(index)
        if item is None:
            item = Image.new("RGB", (256, 256)), make_target([], [], DAMAGED, (256, 256))
        return self.transform(*item)


def collate(items: list[tuple[Tensor, Target]]) -> tuple[list[Tensor], list[Target]]:
    """A batch: images of different sizes, float32 (3, H, W) each, and their targets."""
    images, targets = zip(*items, strict=True)
    return list(images), list(targets)
