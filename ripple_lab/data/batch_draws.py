"""Random draws of many images' augmentation at once, read off timm's transforms of one image."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from timm.data.auto_augment import RandAugment
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import ColorJitter

DENOMINATOR = 10  # timm's magnitudes are tenths

Level = Callable[[Tensor, Tensor], Tensor]


def _signed(largest: float) -> Level:
    return lambda part, sign: sign * (part * largest)


def _either_way(part: Tensor, sign: Tensor) -> Tensor:
    return (1 + sign * (part * 0.9)).clamp(min=0.1)


def _forward(part: Tensor, sign: Tensor) -> Tensor:
    return part * 1.8 + 0.1


def _bits(part: Tensor, sign: Tensor) -> Tensor:
    return (part * 4).floor()


def _threshold(part: Tensor, sign: Tensor) -> Tensor:
    return (part * 256).floor().clamp(max=256)


# Magnitude / 10, and a sign → the argument of the operation: timm's LEVEL_TO_ARG.
LEVEL_TO_ARGUMENT: dict[str, Level] = {
    "AutoContrast": _signed(0),
    "Equalize": _signed(0),
    "Invert": _signed(0),
    "Rotate": _signed(30),
    "Posterize": _bits,
    "PosterizeIncreasing": lambda part, sign: 4 - _bits(part, sign),
    "Solarize": _threshold,
    "SolarizeIncreasing": lambda part, sign: 256 - _threshold(part, sign),
    "SolarizeAdd": lambda part, sign: (part * 110).floor().clamp(max=128),
    "Color": _forward,
    "ColorIncreasing": _either_way,
    "Contrast": _forward,
    "ContrastIncreasing": _either_way,
    "Brightness": _forward,
    "BrightnessIncreasing": _either_way,
    "Sharpness": _forward,
    "SharpnessIncreasing": _either_way,
    "ShearX": _signed(0.3),
    "ShearY": _signed(0.3),
    "TranslateXRel": _signed(0.45),
    "TranslateYRel": _signed(0.45),
}


class Steps(NamedTuple):
    """Operations on each of B images, n of them in turn."""

    chosen: Tensor
    """int64 (n, B): indices into the names of the operations; one past the last for none."""
    arguments: Tensor
    """float64 (n, B)."""


class Boxes(NamedTuple):
    """A rectangle in each of E images."""

    images: Tensor
    """int64 (E,): which images."""
    edges: Tensor
    """int64 (4, E): top, bottom, left and right; the second and last are outside."""


class RandAugmentDraws:
    """What timm's RandAugment does to images.

    Args:
        policy: timm's transform of one image, without weights for its operations.
    """

    def __init__(self, policy: RandAugment):
        unknown = sorted({op.name for op in policy.ops} - LEVEL_TO_ARGUMENT.keys())
        if unknown or policy.choice_weights is not None:
            raise ValueError(
                "batches are augmented by timm's RandAugment with all its operations equally "
                f"likely; {', '.join(unknown) or 'weights'} is for the image-by-image path: "
                "leave out -t… in auto_augment, or use --data.no-in-memory"
            )
        self.names = [op.name for op in policy.ops]
        self.layers = policy.num_layers
        first = policy.ops[0]  # all have these in common
        self.probability = first.prob
        self.magnitude, self.magnitude_std = first.magnitude, first.magnitude_std
        self.magnitude_max = first.magnitude_max or DENOMINATOR

    def draw(self, count: int, generator: torch.Generator) -> Steps:
        """Operations for `count` images."""
        shape = (self.layers, count)
        chosen = torch.randint(len(self.names), shape, generator=generator)
        applied = _uniform(shape, generator) < self.probability
        if self.magnitude_std == float("inf"):
            magnitude = self.magnitude * _uniform(shape, generator)
        else:
            normal = torch.randn(shape, generator=generator, dtype=torch.float64)
            magnitude = self.magnitude + self.magnitude_std * normal
        part = magnitude.clamp(0, self.magnitude_max) / DENOMINATOR
        sign = 2.0 * (_uniform(shape, generator) < 0.5) - 1
        arguments = torch.zeros(shape, dtype=torch.float64)
        for index, name in enumerate(self.names):
            argument = LEVEL_TO_ARGUMENT[name](part, sign)
            arguments = torch.where(chosen == index, argument, arguments)
        return Steps(torch.where(applied, chosen, len(self.names)), arguments)


class ColorJitterDraws:
    """What torchvision's ColorJitter without hue does: each change once, in any order."""

    names = ("Brightness", "Contrast", "Color")

    def __init__(self, jitter: ColorJitter):
        ranges = (jitter.brightness, jitter.contrast, jitter.saturation)  # None for no change
        self.ranges = [factors or (1.0, 1.0) for factors in ranges]

    def draw(self, count: int, generator: torch.Generator) -> Steps:
        """Operations for `count` images."""
        shape = (len(self.names), count)
        low, high = torch.tensor(self.ranges, dtype=torch.float64).T[..., None]
        factors = low + (high - low) * _uniform(shape, generator)
        order = _uniform(shape, generator).argsort(0)
        return Steps(order, factors.gather(0, order))


def draw_boxes(
    erasing: RandomErasing, count: int, size: int, generator: torch.Generator, attempts: int = 10
) -> Boxes:
    """The rectangles that timm's RandomErasing would choose in `count` images of side `size`."""
    erased = (_uniform((count,), generator) < erasing.probability).nonzero().flatten()
    shape = (attempts, len(erased))
    low, high = erasing.min_area, erasing.max_area
    area = size**2 * (low + (high - low) * _uniform(shape, generator))
    low, high = erasing.log_aspect_ratio
    aspect = (low + (high - low) * _uniform(shape, generator)).exp()
    sides = torch.stack([area * aspect, area / aspect]).sqrt().round()  # heights and widths
    fits = (sides < size).all(0)
    best = fits.int().argmax(0)  # the first that fits
    sides = sides[:, best, torch.arange(len(erased))]
    start = (_uniform((2, len(erased)), generator) * (size - sides + 1)).floor()
    edges = torch.stack([start, start + sides], 1).flatten(0, 1).long()
    return Boxes(erased[fits.any(0)], edges[:, fits.any(0)])


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)
