"""PIL's operations on pictures, for many at once, each with an argument of its own.

Images are uint8 (K, 3, S, S) and arguments float64 (K, 1, 1, 1). Each result is that of PIL, pixel
by pixel: numbers are rounded where PIL rounds them, in the arithmetic that PIL uses.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Operation = Callable[[Tensor, Tensor], Tensor]
Matrix = tuple[Tensor | float, ...]

# Neighbours that a pixel is interpolated from, along each axis.
NEIGHBOURS = {"bilinear": (0, 1), "bicubic": (-1, 0, 1, 2)}


def operate(
    name: str, images: Tensor, argument: Tensor, fill: Tensor, interpolation: str
) -> Tensor:
    """One operation on many images.

    Args:
        name: Of timm's operation.
        images: uint8 (K, 3, S, S).
        argument: float64 (K,): degrees, bits, a factor … as the operation needs.
        fill: uint8 (3,), the colour of what was outside an image.
        interpolation: "bilinear" or "bicubic".

    Returns:
        uint8 (K, 3, S, S).
    """
    if name in MATRICES:
        return affine(images, matrices(name, argument, images.shape[-1]), fill, interpolation)
    return OPERATIONS[name.removesuffix("Increasing")](images, argument.view(-1, 1, 1, 1))


def auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretches each colour so that its darkest pixel becomes 0 and its brightest 255."""
    low = images.amin((2, 3), keepdim=True).double()
    high = images.amax((2, 3), keepdim=True).double()
    scale = torch.full_like(low, 255) / (high - low).clamp(min=1)  # 255 / x is 255 · (1 / x)
    return torch.where(high > low, _truncate(images * scale + -low * scale), images)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Spreads each colour's levels so that all are about equally frequent."""
    levels = images.flatten(2).long()  # (K, 3, S·S)
    count = torch.zeros(*levels.shape[:2], 256, dtype=torch.long, device=images.device)
    count.scatter_add_(2, levels, torch.ones_like(levels))
    brightest = levels.amax(2, keepdim=True)
    step = (levels.shape[2] - count.gather(2, brightest)) // 255
    darker = count.cumsum(2) - count
    table = ((step // 2 + darker) // step.clamp(min=1)).clamp(max=255)
    equalized = table.gather(2, levels).to(torch.uint8)
    return torch.where(step > 0, equalized, images.flatten(2)).view_as(images)


def invert(images: Tensor, _: Tensor) -> Tensor:
    return 255 - images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keeps the highest bits of each level."""
    step = 2 ** (8 - bits).clamp(min=0, max=8)
    return (images - images % step).to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Inverts what is not below the threshold."""
    return torch.where(images < threshold, images, 255 - images)


def solarize_add(images: Tensor, amount: Tensor) -> Tensor:
    """Brightens what is below 128."""
    return torch.where(images < 128, _truncate(images + amount), images)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(torch.zeros_like(images), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    gray = _gray(images)
    total, count = gray.sum((1, 2, 3), keepdim=True), gray[0].numel()
    return _blend((2 * total + count) // (2 * count), images, factor)  # the mean, ties upwards


def color(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(_gray(images), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blends with a smooth version: 13ths, 5 of the pixel and 1 of each neighbour; edges stay."""
    pixels = images.float()
    smooth = pixels.clone()
    inner = pixels[..., 1:-1, 1:-1]
    sums = F.avg_pool2d(pixels, 3, stride=1, divisor_override=1) + 4 * inner
    smooth[..., 1:-1, 1:-1] = (sums / 13 + 0.5).floor()  # never a tie: 13 is odd
    return _blend(smooth, images, factor)


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": auto_contrast,
    "Equalize": equalize,
    "Invert": invert,
    "Posterize": posterize,
    "Solarize": solarize,
    "SolarizeAdd": solarize_add,
    "Brightness": brightness,
    "Contrast": contrast,
    "Color": color,
    "Sharpness": sharpness,
}


def rotation(degrees: Tensor, size: int) -> Matrix:
    """PIL's matrix of a rotation about the centre, counter-clockwise."""
    angle = -torch.deg2rad(degrees % 360)
    cos, sin = (f(angle).round(decimals=15) for f in (torch.cos, torch.sin))
    half = size / 2
    return cos, sin, cos * -half + sin * -half + half, -sin, cos, -sin * -half + cos * -half + half


# Argument and S → a, b, c, d, e, f: the pixel (x, y) shows what was at (ax + by + c, dx + ey + f).
MATRICES: dict[str, Callable[[Tensor, int], Matrix]] = {
    "Rotate": rotation,
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
        fill: uint8 (3,), the colour of what was outside.
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
    starts = [row * size for row in rows]
    pixels = images.flatten(2).double()

    def at(start: Tensor, column: Tensor) -> Tensor:
        index = (start + column).flatten(2).expand_as(pixels)
        return pixels.gather(2, index).view_as(images)

    lines = [_interpolate([at(start, column) for column in columns], dx) for start in starts]
    return torch.where(inside, _truncate(_interpolate(lines, dy)), fill[:, None, None])


def _neighbours(position: Tensor, interpolation: str, size: int) -> tuple[list[Tensor], Tensor]:
    """Indices of the pixels about a position, and where it lies between the middle two, 0 to 1."""
    position = position - 0.5
    first = position.floor()
    offsets = NEIGHBOURS[interpolation]
    return [(first.long() + offset).clamp(0, size - 1) for offset in offsets], position - first


def _interpolate(values: list[Tensor], d: Tensor) -> Tensor:
    if len(values) == 2:
        first, second = values
        return first + (second - first) * d
    before, first, second, after = values
    slope = second - before
    square = 2 * (before - first) + second - after
    cube = first - before - second + after
    return first + d * (slope + d * (square + d * cube))


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
