"""DETR's augmentation of pictures with boxes, by torchvision; it draws from torch's generator."""

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import box_convert
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from ripple_lab.detection.matching import Target
from ripple_lab.detection.spec import DetectionAugmentation

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as the backbones take it

Transform = Callable[[Image.Image, Target], tuple[Tensor, Target]]


def train_transform(aug: DetectionAugmentation) -> Transform:
    """DETR's augmentation of one training picture.

    Args:
        aug: What happens to it.

    Returns:
        Picture and target, boxes in pixels → normalised float32 (3, H, W), and the target with
        boxes as centre, width and height relative to that image. Boxes that were cut off, down to
        less than a pixel, are left out.
    """
    resize: v2.Transform = v2.Identity()
    if aug.scales:
        resize = _resize(aug.scales, aug.max_size)
    flip = v2.RandomHorizontalFlip(aug.flip)
    if not aug.crop:
        return DetectionTransform([flip, resize])
    cut = v2.Compose([_resize(aug.crop_scales, None), RandomSizeCrop(*aug.crop_sizes), resize])
    return DetectionTransform([flip, v2.RandomChoice([resize, cut], p=[1 - aug.crop, aug.crop])])


def evaluation_transform(scale: int | None = 800, max_size: int = 1333) -> Transform:
    """Resizes a picture for evaluation.

    Args:
        scale: Its shorter side in pixels; None leaves it as it is.
        max_size: The longer side is at most this.

    Returns:
        As `train_transform`.
    """
    if scale is None:
        return DetectionTransform([])
    return DetectionTransform([_resize((scale,), max_size)])


class DetectionTransform:
    """Transforms pictures and boxes into the form that model and loss take.

    Args:
        steps: Transforms of torchvision's version 2.
    """

    def __init__(self, steps: list[Callable[..., Any]]):
        self._steps = v2.Compose([v2.ToImage(), *steps, v2.SanitizeBoundingBoxes()])
        self._normalize = v2.Compose(
            [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD), v2.ToPureTensor()]
        )

    def __call__(self, image: Image.Image, target: Target) -> tuple[Tensor, Target]:
        changed, target = self._steps(image, target)
        height, width = changed.shape[-2:]
        boxes = box_convert(target["boxes"].as_subclass(Tensor), "xyxy", "cxcywh")
        relative = boxes / torch.tensor([width, height, width, height])
        return self._normalize(changed), target | {"boxes": relative}


class RandomSizeCrop(v2.Transform):
    """Cuts out a part of random height, width and place.

    Args:
        least, most: Height and width of the part in pixels; never more than the picture has.
    """

    def __init__(self, least: int, most: int):
        super().__init__()
        self.least, self.most = least, most

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        full_height, full_width = v2.query_size(flat_inputs)
        height, width = self._length(full_height), self._length(full_width)
        top, left = _draw(0, full_height - height), _draw(0, full_width - width)
        return {"top": top, "left": left, "height": height, "width": width}

    def _length(self, full: int) -> int:
        return _draw(min(self.least, full), min(self.most, full))

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return F.crop(inpt, **params)


def _resize(scales: tuple[int, ...], max_size: int | None) -> v2.RandomChoice:
    """The shorter side becomes one of `scales`."""
    # If both are the same, the longer side alone decides, and torchvision must be told.
    sizes = [None if scale == max_size else scale for scale in scales]
    return v2.RandomChoice([v2.Resize(size, max_size=max_size) for size in sizes])


def _draw(least: int, most: int) -> int:
    return int(torch.randint(least, most + 1, ()))
