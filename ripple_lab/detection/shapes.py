"""Circles, squares and triangles on noise: a data set for detection that needs no files."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch.utils.data import Dataset

from ripple_lab.detection.annotations import Annotations
from ripple_lab.detection.items import make_target
from ripple_lab.detection.matching import Target

CLASSES = ("circle", "square", "triangle")
# Least and largest height and width of a picture, multiples of the unit: few sizes train faster.
SMALLEST, LARGEST, UNIT = (64, 96), (96, 128), 32
SIDES = (24, 48)  # least and largest side of a shape
MOST = 4  # shapes of a picture
BACKGROUND = (124, 116, 104)  # ImageNet's mean colour
# How often a shape is put somewhere else before it is given up for lack of space.
TRIES = 50


@dataclass(frozen=True)
class Scene:
    """What is in a picture.

    Attributes:
        size: Height and width in pixels.
        boxes: Left, top, right and bottom of each shape in pixels, int (n, 4).
        labels: int (n,).
        colors: Of each shape, (n, 3).
    """

    size: tuple[int, int]
    boxes: np.ndarray
    labels: np.ndarray
    colors: np.ndarray


class Shapes(Dataset[tuple[Image.Image, Target]]):
    """Pictures with one to four shapes that do not touch; seed and index decide each picture.

    Args:
        count: How many pictures.
        seed: Another seed gives other pictures.
        noise: Standard deviation of the noise, of 255.
    """

    classes = CLASSES

    def __init__(self, count: int, seed: int = 0, noise: float = 12.0):
        self.count, self.seed, self.noise = count, seed, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, Target]:
        if not 0 <= index < self.count:
            raise IndexError(f"there are {self.count} pictures; got {index=}")
        scene = self.scene(index)
        image = Image.new("RGB", scene.size[::-1], BACKGROUND)
        draw = ImageDraw.Draw(image)
        for box, label, color in zip(scene.boxes, scene.labels, scene.colors, strict=True):
            _draw_shape(draw, CLASSES[label], box.tolist(), tuple(color.tolist()))
        noise = np.random.default_rng((self.seed, index, 1)).normal(0, self.noise, (*scene.size, 3))
        pixels = (np.asarray(image) + noise).round().clip(0, 255).astype(np.uint8)
        return Image.fromarray(pixels), make_target(scene.boxes, scene.labels, index, scene.size)

    def scene(self, index: int) -> Scene:
        """What is in a picture, without drawing it."""
        rng = np.random.default_rng((self.seed, index))
        least, most = np.floor_divide((SMALLEST, LARGEST), UNIT)
        height, width = (UNIT * rng.integers(least, most + 1)).tolist()
        boxes: list[list[int]] = []
        labels: list[int] = []
        for _ in range(int(rng.integers(1, MOST + 1))):
            label = int(rng.integers(len(CLASSES)))
            for _ in range(TRIES):
                w, h = rng.integers(SIDES[0], SIDES[1] + 1, 2).tolist()
                h = h if CLASSES[label] == "triangle" else w
                left, top = rng.integers(0, (width - w + 1, height - h + 1)).tolist()
                box = [left, top, left + w, top + h]
                if not any(_touch(box, other) for other in boxes):
                    boxes.append(box)
                    labels.append(label)
                    break
        rng.integers(0, 256, 3)  # unused, but the colours, and so the results, depend on the draw
        # At least 64 of 255 away from the background, in every colour.
        colors = (BACKGROUND + rng.integers(64, 193, (len(boxes), 3))) % 256
        return Scene((height, width), np.array(boxes), np.array(labels), colors)

    def ground_truth(self) -> dict[str, Any]:
        """COCO's form of all objects, for an evaluator; the category of label 0 is 1."""
        scenes = [self.scene(index) for index in range(self.count)]
        corners = np.concatenate([scene.boxes for scene in scenes]).astype(np.float64)
        lengths = corners[:, 2:] - corners[:, :2]
        return Annotations(
            classes=CLASSES,
            category_ids=tuple(range(1, len(CLASSES) + 1)),
            image_ids=np.arange(self.count),
            names=np.array([f"shapes {self.seed} {index}" for index in range(self.count)]),
            sizes=np.array([scene.size for scene in scenes]),
            first=np.cumsum([0] + [len(scene.labels) for scene in scenes]),
            boxes=np.concatenate([corners[:, :2], lengths], axis=1),
            labels=np.concatenate([scene.labels for scene in scenes]),
            areas=lengths.prod(1),
            crowd=np.zeros(len(corners), np.bool_),
        ).ground_truth()


def _draw_shape(
    draw: ImageDraw.ImageDraw, name: str, box: list[int], color: tuple[int, ...]
) -> None:
    left, top, right, bottom = box[0], box[1], box[2] - 1, box[3] - 1  # Pillow's ends are inside
    match name:
        case "circle":
            draw.ellipse((left, top, right, bottom), fill=color)
        case "square":
            draw.rectangle((left, top, right, bottom), fill=color)
        case "triangle":
            tip = ((left + right) // 2, top)
            draw.polygon([(left, bottom), (right, bottom), tip], fill=color)


def _touch(one: list[int], other: list[int]) -> bool:
    return one[0] <= other[2] and other[0] <= one[2] and one[1] <= other[3] and other[1] <= one[3]
