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
# How often a shape is put somewhere else before it is given up for lack of space.
TRIES = 50


@dataclass(frozen=True)
class Scene:
    """What is in a picture.

    Attributes:
        size: Height and width in pixels.
        background: Its colour.
        boxes: Left, top, right and bottom of each shape in pixels, int (n, 4).
        labels: int (n,).
        colors: Of each shape, (n, 3).
    """

    size: tuple[int, int]
    background: tuple[int, ...]
    boxes: np.ndarray
    labels: np.ndarray
    colors: np.ndarray


class Shapes(Dataset[tuple[Image.Image, Target]]):
    """Pictures with one to four shapes that do not touch; seed and index decide each picture.

    Args:
        count: How many pictures.
        seed: Another seed gives other pictures.
        smallest, largest: Least and largest height and width of a picture in pixels.
        sides: Least and largest side of a shape in pixels.
        most: Shapes of a picture, at most.
        noise: Standard deviation of the noise, of 255.
        unit: Height and width of a picture are multiples of this; pictures of few different sizes
            are faster to train on.
        background: Colour behind the shapes; None for another one in every picture.
    """

    classes = CLASSES

    def __init__(
        self,
        count: int,
        seed: int = 0,
        smallest: tuple[int, int] = (96, 128),
        largest: tuple[int, int] = (128, 160),
        sides: tuple[int, int] = (16, 56),
        most: int = 4,
        noise: float = 12.0,
        unit: int = 1,
        background: tuple[int, int, int] | None = None,
    ):
        if not 2 <= sides[0] <= sides[1] <= min(smallest):
            raise ValueError(
                f"sides are the least, 2 or more, and the largest, no more than the smallest "
                f"picture has; got {sides=}, {smallest=}"
            )
        if any(low > high for low, high in zip(smallest, largest, strict=True)):
            raise ValueError(f"smallest must not exceed largest; got {smallest=}, {largest=}")
        if unit < 1 or any(length % unit for length in (*smallest, *largest)):
            raise ValueError(
                f"unit must divide the smallest and the largest lengths; got {unit=}, "
                f"{smallest=}, {largest=}"
            )
        if count < 1 or most < 1 or noise < 0:
            raise ValueError(
                f"count and most must be at least 1, noise at least 0; got {count=}, {most=}, "
                f"{noise=}"
            )
        self.count, self.seed, self.most, self.noise = count, seed, most, noise
        self.smallest, self.largest, self.sides, self.unit = smallest, largest, sides, unit
        self.background = background

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, Target]:
        if not 0 <= index < self.count:
            raise IndexError(f"there are {self.count} pictures; got {index=}")
        scene = self.scene(index)
        image = Image.new("RGB", scene.size[::-1], scene.background)
        draw = ImageDraw.Draw(image)
        for box, label, color in zip(scene.boxes, scene.labels, scene.colors, strict=True):
            _draw_shape(draw, CLASSES[label], box.tolist(), tuple(color.tolist()))
        noise = np.random.default_rng((self.seed, index, 1)).normal(0, self.noise, (*scene.size, 3))
        pixels = (np.asarray(image) + noise).round().clip(0, 255).astype(np.uint8)
        return Image.fromarray(pixels), make_target(scene.boxes, scene.labels, index, scene.size)

    def scene(self, index: int) -> Scene:
        """What is in a picture, without drawing it."""
        rng = np.random.default_rng((self.seed, index))
        least, most = np.floor_divide((self.smallest, self.largest), self.unit)
        height, width = (self.unit * rng.integers(least, most + 1)).tolist()
        boxes: list[list[int]] = []
        labels: list[int] = []
        for _ in range(int(rng.integers(1, self.most + 1))):
            label = int(rng.integers(len(CLASSES)))
            for _ in range(TRIES):
                w, h = rng.integers(self.sides[0], self.sides[1] + 1, 2).tolist()
                h = h if CLASSES[label] == "triangle" else w
                left, top = rng.integers(0, (width - w + 1, height - h + 1)).tolist()
                box = [left, top, left + w, top + h]
                if not any(_touch(box, other) for other in boxes):
                    boxes.append(box)
                    labels.append(label)
                    break
        background = rng.integers(0, 256, 3)
        if self.background is not None:
            background = np.array(self.background)
        # At least 64 of 255 away from the background, in every colour.
        colors = (background + rng.integers(64, 193, (len(boxes), 3))) % 256
        return Scene(
            (height, width),
            tuple(background.tolist()),
            np.array(boxes),
            np.array(labels),
            colors,
        )

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
