"""Boxes with names and scores, drawn on a picture."""

import colorsys
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ripple_lab.data.pictures import in_colour
from ripple_lab.text import plain


def draw_objects(
    image: Image.Image,
    found: dict[str, Tensor],
    classes: Sequence[str],
    threshold: float = 0.5,
) -> Image.Image:
    """A copy of a picture with the objects that were found in it.

    Args:
        image: The picture.
        found: "boxes" (n, 4), left, top, right and bottom in pixels of the picture; "labels" (n,);
            "scores" (n,), which may be missing.
        classes: The name of each label.
        threshold: Objects with a lower score are not drawn.
    """
    picture = in_colour(image, upright=False)  # a copy; boxes go by the pixels as they are
    draw = ImageDraw.Draw(picture)
    line = max(1, round(min(picture.size) / 250))
    font = ImageFont.load_default(max(10, round(min(picture.size) / 35)))
    scores = found["scores"].tolist() if "scores" in found else [None] * len(found["labels"])
    rows = list(zip(found["boxes"].tolist(), found["labels"].tolist(), scores, strict=True))
    for box, label, score in reversed(rows):  # the most likely come first, and are drawn on top
        if score is not None and score < threshold:
            continue
        left, top, right, bottom = _inside(box, picture.size)
        color = _color(label)
        draw.rectangle((left, top, right, bottom), outline=color, width=line)
        text = plain(classes[label]) + ("" if score is None else f" {score:.2f}")
        width, height = (length + 2 * line for length in draw.textbbox((0, 0), text, font=font)[2:])
        # Above the box, or inside where there is no space, and never beyond the right edge.
        top = top - height if top >= height else top
        left = max(0, min(left, picture.width - 1 - width))
        draw.rectangle((left, top, left + width, top + height), fill=color)
        draw.text((left + line, top), text, fill="black", font=font)
    return picture


def _inside(box: list[float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The part of a box that a picture of (width, height) shows; its ends are pixels of it."""
    (left, right), (top, bottom) = (
        [min(max(box[axis + end], 0), size[axis] - 1) for end in (0, 2)] for axis in (0, 1)
    )
    return left, top, max(left, right), max(top, bottom)


def _color(label: int) -> tuple[int, ...]:
    """A bright colour for each class; neighbours are far apart."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618 % 1, 0.6, 1.0)
    return tuple(round(255 * value) for value in (red, green, blue))
