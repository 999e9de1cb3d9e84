"""DeiT's augmentation of thousands of small images at once, on the device that holds them.

We use no library, because RandAugment in kornia and torchvision chooses one operation for a whole
batch, and both round and interpolate unlike PIL. Here each image has its own operations, with
timm's probabilities, and each gives PIL's pixels.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from timm.data.auto_augment import RandAugment
from timm.data.random_erasing import RandomErasing
from torch import Generator, Tensor
from torchvision.transforms import ColorJitter
from torchvision.transforms.v2.functional import equalize_image

from ripple_lab.data.augment import stages
from ripple_lab.data.spec import Augmentation


class BatchAugmentation:
    """Augments a batch as `train_transform` augments one image: equal in distribution.

    Random numbers are drawn on the CPU, so every device gives the same images, except for rounding
    and for the noise in erased rectangles. The CPU never waits for the device.

    Args:
        aug: What happens to the images; `crop="resized"` is for the image-by-image path.
        image_size: S, side of the images in pixels.
        mean, std: Of each colour, between 0 and 1.
    """

    def __init__(
        self, aug: Augmentation, image_size: int, mean: Sequence[float], std: Sequence[float]
    ):
        if aug.crop == "resized":
            raise ValueError(
                'crop="resized" is for images of many sizes, taken image by image; for a batch '
                'use crop="pad" or "none", or use --data.no-in-memory'
            )
        self.image_size, self.mean, self.std = image_size, mean, std
        self.padding = aug.padding if aug.crop == "pad" else 0
        self.flip, self.interpolation = aug.flip, aug.interpolation
        self.fill = torch.tensor([min(255, round(255 * m)) for m in mean], dtype=torch.uint8)
        _, policy, to_tensor = stages(aug, image_size, mean, std)
        self.policies = [batch_policy(transform) for transform in policy.transforms]
        self.erasing = [t for t in to_tensor.transforms if isinstance(t, RandomErasing)]

    @torch.no_grad()
    def __call__(self, images: Tensor, generator: Generator) -> Tensor:
        """Augments each image on its own.

        Args:
            images: uint8 (B, 3, S, S) on any device; not changed.
            generator: On the CPU; all randomness comes from it.

        Returns:
            float32 (B, 3, S, S) on the same device, normalised.
        """
        expected = (3, self.image_size, self.image_size)
        if images.dtype != torch.uint8 or images.shape[1:] != expected:
            raise ValueError(
                f"images must be uint8 (B, {', '.join(map(str, expected))}); "
                f"got {images.dtype} {tuple(images.shape)}"
            )
        if images.device.type == "mps":  # has no float64, which PIL's rounding needs
            return self(images.cpu(), generator).to(images.device)
        images = self._crop_and_flip(images, generator)
        for names, draw in self.policies:
            self._operate(images, names, *draw(len(images), generator))
        normalized = normalize(images, self.mean, self.std)
        for erasing in self.erasing:
            _erase(normalized, *draw_boxes(erasing, len(images), self.image_size, generator))
        return normalized

    def _crop_and_flip(self, images: Tensor, generator: Generator) -> Tensor:
        count, size, padding = len(images), self.image_size, self.padding
        corner = torch.randint(2 * padding + 1, (2, count), generator=generator)
        flipped = torch.rand(count, generator=generator) < self.flip
        top, left = send(corner, images.device)
        windows = F.pad(images, [padding] * 4).unfold(2, size, 1).unfold(3, size, 1)
        cropped = windows[torch.arange(count, device=images.device), :, top, left]
        mirror = send(flipped, images.device)[:, None, None, None]
        return torch.where(mirror, cropped.flip(3), cropped)

    def _operate(
        self, images: Tensor, names: Sequence[str], chosen: Tensor, arguments: Tensor
    ) -> None:
        """Applies the operations drawn for each image, in place: images of one operation together.

        Args:
            chosen: int64 (n, B): indices into names, one past the last for none; applied in order.
            arguments: float64 (n, B).
        """
        order = chosen.argsort(dim=1, stable=True)
        counts = [step.bincount(minlength=len(names) + 1).tolist() for step in chosen]
        arguments = send(arguments.gather(1, order), images.device)
        order, fill = send(order, images.device), send(self.fill, images.device)
        for step, sizes in enumerate(counts):
            groups = zip(order[step].split(sizes), arguments[step].split(sizes), strict=True)
            moved = []
            for name, (rows, argument) in zip(names, groups, strict=False):  # the rest: no change
                if name in MATRICES:
                    moved.append((rows, matrices(name, argument, self.image_size)))
                elif len(rows):
                    images[rows] = operate(name, images[rows], argument, fill, self.interpolation)
            if moved:  # all at once: many small kernels take longer than a few large ones
                rows, maps = (torch.cat(parts) for parts in zip(*moved, strict=True))
                images[rows] = affine(images[rows], maps, fill, self.interpolation)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, 3, H, W) → float32, with the mean subtracted, divided by the deviation."""
    mean_, std_ = (send(torch.tensor(x), images.device)[:, None, None] for x in (mean, std))
    return (images.float() / 255 - mean_) / std_


def send(x: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


# What is drawn for each image, as timm's transforms of one image do

Draw = Callable[[int, Generator], tuple[Tensor, Tensor]]
Level = Callable[[Tensor, Tensor], Tensor]


def _signed(largest: float) -> Level:
    return lambda part, sign: sign * (part * largest)


# timm's LEVEL_TO_ARG: a tenth of the magnitude and a random sign → the operation's argument.
LEVELS: dict[str, Level] = {
    **dict.fromkeys(("AutoContrast", "Equalize", "Invert"), _signed(0)),
    **dict.fromkeys(("ShearX", "ShearY"), _signed(0.3)),
    **dict.fromkeys(("TranslateXRel", "TranslateYRel"), _signed(0.45)),
    "Rotate": _signed(30),
    "Posterize": lambda part, _: (part * 4).floor(),
    "PosterizeIncreasing": lambda part, _: 4 - (part * 4).floor(),
    "Solarize": lambda part, _: (part * 256).floor().clamp(max=256),
    "SolarizeIncreasing": lambda part, _: 256 - (part * 256).floor().clamp(max=256),
    "SolarizeAdd": lambda part, _: (part * 110).floor().clamp(max=128),
}
for _name in ("Color", "Contrast", "Brightness", "Sharpness"):
    LEVELS[_name] = lambda part, _: part * 1.8 + 0.1
    LEVELS[f"{_name}Increasing"] = lambda part, sign: (1 + sign * (part * 0.9)).clamp(min=0.1)


def batch_policy(transform: object) -> tuple[list[str], Draw]:
    """The names of a transform's operations, and a function that draws them for many images.

    The function takes the count B and a generator. It returns the indices of n operations, int64
    (n, B), one past the last name for none, and their arguments, float64 (n, B).
    """
    if isinstance(transform, ColorJitter):
        return ["Brightness", "Contrast", "Color"], partial(_draw_color_jitter, transform)
    if not isinstance(transform, RandAugment):
        raise ValueError(
            "batches are augmented by timm's RandAugment ('rand-…'); "
            f"{type(transform).__name__} is for the image-by-image path: use --data.no-in-memory"
        )
    names = [op.name for op in transform.ops]
    unknown = sorted(set(names) - LEVELS.keys())
    if unknown or transform.choice_weights is not None:
        raise ValueError(
            "batches are augmented by timm's RandAugment with all its operations equally likely; "
            f"{', '.join(unknown) or 'weights'} is for the image-by-image path: leave out -t… in "
            "auto_augment, or use --data.no-in-memory"
        )
    return names, partial(_draw_rand_augment, transform, names)


def _draw_rand_augment(
    policy: RandAugment, names: list[str], count: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    shape, op = (policy.num_layers, count), policy.ops[0]  # all operations have these in common
    chosen = torch.randint(len(names), shape, generator=generator)
    applied = _uniform(shape, generator) < op.prob
    if op.magnitude_std == float("inf"):
        magnitude = op.magnitude * _uniform(shape, generator)
    else:
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        magnitude = op.magnitude + op.magnitude_std * normal
    part = magnitude.clamp(0, op.magnitude_max or 10) / 10
    sign = 2.0 * (_uniform(shape, generator) < 0.5) - 1
    arguments = torch.zeros(shape, dtype=torch.float64)
    for index, name in enumerate(names):
        arguments = torch.where(chosen == index, LEVELS[name](part, sign), arguments)
    return torch.where(applied, chosen, len(names)), arguments


def _draw_color_jitter(
    jitter: ColorJitter, count: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Each of three changes once, in any order."""
    ranges = [r or (1.0, 1.0) for r in (jitter.brightness, jitter.contrast, jitter.saturation)]
    low, high = torch.tensor(ranges, dtype=torch.float64).T[..., None]
    factors = low + (high - low) * _uniform((3, count), generator)
    order = _uniform((3, count), generator).argsort(0)
    return order, factors.gather(0, order)


def draw_boxes(
    erasing: RandomErasing, count: int, size: int, generator: Generator, attempts: int = 10
) -> tuple[Tensor, Tensor, int]:
    """The rectangles that timm's RandomErasing erases in `count` images of side `size`.

    Returns:
        Indices of E images (E,); top, bottom, left and right (4, E); the seed of the noise.
    """
    erased = (_uniform((count,), generator) < erasing.probability).nonzero().flatten()
    shape = (attempts, len(erased))
    low, high = erasing.min_area, erasing.max_area
    area = size**2 * (low + (high - low) * _uniform(shape, generator))
    low, high = erasing.log_aspect_ratio
    aspect = (low + (high - low) * _uniform(shape, generator)).exp()
    sides = torch.stack([area * aspect, area / aspect]).sqrt().round()  # heights and widths
    fits = (sides < size).all(0)
    sides = sides[:, fits.int().argmax(0), torch.arange(len(erased))]  # the first that fits
    start = (_uniform((2, len(erased)), generator) * (size - sides + 1)).floor()
    edges = torch.stack([start, start + sides], 1).flatten(0, 1).long()
    noise_seed = int(torch.randint(2**63 - 1, (), generator=generator))
    return erased[fits.any(0)], edges[:, fits.any(0)], noise_seed


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _erase(images: Tensor, rows: Tensor, edges: Tensor, noise_seed: int) -> None:
    """Fills a rectangle of some images with normal noise, in place."""
    device = images.device
    top, bottom, left, right = send(edges, device)[..., None, None, None]
    column = torch.arange(images.shape[-1], device=device)
    row = column[:, None]
    erased = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    generator = torch.Generator(device).manual_seed(noise_seed)
    noise = torch.randn(len(rows), *images.shape[1:], generator=generator, device=device)
    rows = send(rows, device)
    images[rows] = torch.where(erased, noise, images[rows])


# PIL's operations, pixel by pixel: numbers are rounded where PIL rounds them, in its arithmetic.
# Images are uint8 (K, 3, S, S), each with its own argument.


def operate(
    name: str, images: Tensor, argument: Tensor, fill: Tensor, interpolation: str
) -> Tensor:
    """One operation on many images.

    Args:
        name: Of timm's operation.
        images: uint8 (K, 3, S, S).
        argument: float64 (K,): degrees, bits, a factor … as the operation needs.
        fill: uint8 (3,), the colour for pixels outside an image.
        interpolation: "bilinear" or "bicubic".

    Returns:
        uint8 (K, 3, S, S).
    """
    if name in MATRICES:
        return affine(images, matrices(name, argument, images.shape[-1]), fill, interpolation)
    return OPERATIONS[name.removesuffix("Increasing")](images, argument.view(-1, 1, 1, 1))


def _auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    low, high = (f(images, (2, 3), keepdim=True).double() for f in (torch.amin, torch.amax))
    scale = torch.full_like(low, 255) / (high - low).clamp(min=1)  # 255 / x is 255 · (1 / x)
    return torch.where(high > low, _truncate(images * scale + -low * scale), images)


def _contrast(images: Tensor, factor: Tensor) -> Tensor:
    gray = _gray(images)
    total, count = gray.sum((1, 2, 3), keepdim=True), gray[0].numel()
    return _blend((2 * total + count) // (2 * count), images, factor)  # the mean, ties upwards


def _sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blends with a smooth version: 13ths, 5 of the pixel and 1 of each neighbour; edges stay."""
    smooth = images.float()
    sums = F.avg_pool2d(smooth, 3, stride=1, divisor_override=1) + 4 * smooth[..., 1:-1, 1:-1]
    smooth[..., 1:-1, 1:-1] = (sums / 13 + 0.5).floor()  # never a tie: 13 is odd
    return _blend(smooth, images, factor)


def _gray(images: Tensor) -> Tensor:
    """PIL's conversion to "L": int32 (K, 1, S, S)."""
    red, green, blue = images.int().split(1, dim=1)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def _blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """PIL's blend, which also extrapolates: 0 gives the degenerate images, 1 the images."""
    start = degenerate.float()
    return _truncate(start + factor.float() * (images - start))


def _truncate(levels: Tensor) -> Tensor:
    return levels.clamp(0, 255).to(torch.uint8)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "AutoContrast": _auto_contrast,
    "Equalize": lambda images, _: equalize_image(images),
    "Invert": lambda images, _: 255 - images,
    "Posterize": lambda images, bits: (images - images % 2 ** (8 - bits)).to(torch.uint8),
    "Solarize": lambda images, least: torch.where(images < least, images, 255 - images),
    "SolarizeAdd": lambda images, add: torch.where(images < 128, _truncate(images + add), images),
    "Brightness": lambda images, factor: _blend(torch.zeros_like(images), images, factor),
    "Contrast": _contrast,
    "Color": lambda images, factor: _blend(_gray(images), images, factor),
    "Sharpness": _sharpness,
}


def _rotation(degrees: Tensor, size: int) -> Sequence[Tensor | float]:
    angle = -torch.deg2rad(degrees % 360)
    cos, sin = (f(angle).round(decimals=15) for f in (torch.cos, torch.sin))
    half = size / 2
    return cos, sin, cos * -half + sin * -half + half, -sin, cos, -sin * -half + cos * -half + half


# Argument and S → a, b, c, d, e, f: the pixel (x, y) shows what was at (ax + by + c, dx + ey + f).
MATRICES: dict[str, Callable[[Tensor, int], Sequence[Tensor | float]]] = {
    "Rotate": _rotation,
    "ShearX": lambda factor, size: (1, factor, 0, 0, 1, 0),
    "ShearY": lambda factor, size: (1, 0, 0, factor, 1, 0),
    "TranslateXRel": lambda part, size: (1, 0, part * size, 0, 1, 0),
    "TranslateYRel": lambda part, size: (1, 0, 0, 0, 1, part * size),
}


def matrices(name: str, argument: Tensor, size: int) -> Tensor:
    """The affine maps of an operation: float64 (K, 6) of arguments (K,), for images of side S."""
    numbers = MATRICES[name](argument, size)
    return torch.stack(
        [x if isinstance(x, Tensor) else torch.full_like(argument, x) for x in numbers], dim=1
    )


def affine(images: Tensor, matrix: Tensor, fill: Tensor, interpolation: str) -> Tensor:
    """Pictures seen through affine maps, as by `PIL.Image.transform`.

    Args:
        images: uint8 (K, 3, S, S).
        matrix: float64 (K, 6), a to f of each.
        fill: uint8 (3,), the colour for pixels outside.
        interpolation: "bilinear" or "bicubic"; PIL's cubic has a = −1 here, unlike its resize.

    Returns:
        uint8 (K, 3, S, S).
    """
    size = images.shape[-1]
    a, b, c, d, e, f = matrix[..., None, None, None].unbind(1)  # each (K, 1, 1, 1)
    column = torch.arange(size, dtype=torch.float64, device=images.device) + 0.5
    row = column[:, None]
    x, y = a * column + b * row + c, d * column + e * row + f
    inside = (x >= 0) & (x < size) & (y >= 0) & (y < size)
    columns, dx = _neighbours(x, interpolation, size)
    rows, dy = _neighbours(y, interpolation, size)
    pixels = images.flatten(2).double()

    def at(start: Tensor, column: Tensor) -> Tensor:
        index = (start + column).flatten(2).expand_as(pixels)
        return pixels.gather(2, index).view_as(images)

    starts = [row * size for row in rows]
    lines = [_interpolate([at(start, column) for column in columns], dx) for start in starts]
    return torch.where(inside, _truncate(_interpolate(lines, dy)), fill[:, None, None])


def _neighbours(position: Tensor, interpolation: str, size: int) -> tuple[list[Tensor], Tensor]:
    """Indices of the pixels around a position, and where it is between the middle two, 0 to 1."""
    offsets = (0, 1) if interpolation == "bilinear" else (-1, 0, 1, 2)
    first = (position - 0.5).floor()
    near = [(first.long() + offset).clamp(0, size - 1) for offset in offsets]
    return near, position - 0.5 - first


def _interpolate(values: list[Tensor], d: Tensor) -> Tensor:
    if len(values) == 2:
        first, second = values
        return first + (second - first) * d
    before, first, second, after = values
    slope = second - before
    square = 2 * (before - first) + second - after
    cube = first - before - second + after
    return first + d * (slope + d * (square + d * cube))
