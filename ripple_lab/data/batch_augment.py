"""DeiT's augmentation of thousands of small images at once, on the device where they lie."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.data.auto_augment import RandAugment
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import ColorJitter

from ripple_lab.data.augment import stages
from ripple_lab.data.batch_draws import (
    Boxes,
    ColorJitterDraws,
    RandAugmentDraws,
    Steps,
    draw_boxes,
)
from ripple_lab.data.batch_ops import MATRICES, affine, matrices, operate
from ripple_lab.data.spec import Augmentation


class BatchAugmentation:
    """What `train_transform` does to an image, done to a batch: equal in distribution.

    Random numbers are drawn on the CPU, so the result is the same on every device but for rounding
    and for the noise in erased rectangles, whose seed alone is drawn there. The device is never
    waited for.

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
        self.policies = [_draws(transform) for transform in policy.transforms]
        self.erasing = [t for t in to_tensor.transforms if isinstance(t, RandomErasing)]

    @torch.no_grad()
    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augments each image on its own.

        Args:
            images: uint8 (B, 3, S, S) on any device; left as they are.
            generator: On the CPU; decides everything.

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
        for policy in self.policies:
            self._change(images, policy.names, policy.draw(len(images), generator))
        normalized = normalize(images, self.mean, self.std)
        for erasing in self.erasing:
            boxes = draw_boxes(erasing, len(images), self.image_size, generator)
            noise_seed = int(torch.randint(2**63 - 1, (), generator=generator))
            _erase(normalized, boxes, noise_seed)
        return normalized

    def _crop_and_flip(self, images: Tensor, generator: torch.Generator) -> Tensor:
        count, size, padding = len(images), self.image_size, self.padding
        corner = torch.randint(2 * padding + 1, (2, count), generator=generator)
        flipped = torch.rand(count, generator=generator) < self.flip
        top, left = send(corner, images.device)
        windows = F.pad(images, [padding] * 4).unfold(2, size, 1).unfold(3, size, 1)
        cropped = windows[torch.arange(count, device=images.device), :, top, left]
        mirror = send(flipped, images.device)[:, None, None, None]
        return torch.where(mirror, cropped.flip(3), cropped)

    def _change(self, images: Tensor, names: Sequence[str], steps: Steps) -> None:
        """Applies the operations drawn for each image, in place: all images of one together."""
        order = steps.chosen.argsort(dim=1, stable=True)
        counts = [step.bincount(minlength=len(names) + 1).tolist() for step in steps.chosen]
        arguments = send(steps.arguments.gather(1, order), images.device)
        order, fill = send(order, images.device), send(self.fill, images.device)
        for step, sizes in enumerate(counts):
            groups = zip(order[step].split(sizes), arguments[step].split(sizes), strict=True)
            moved = []
            for name, (rows, argument) in zip(names, groups, strict=False):  # the rest: no change
                if name in MATRICES:
                    moved.append((rows, matrices(name, argument, self.image_size)))
                elif len(rows):
                    images[rows] = operate(name, images[rows], argument, fill, self.interpolation)
            if moved:  # all at once: on a GPU, many small kernels take longer than a few large ones
                rows, maps = (torch.cat(parts) for parts in zip(*moved, strict=True))
                images[rows] = affine(images[rows], maps, fill, self.interpolation)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (B, 3, H, W) → float32 of mean 0 and deviation 1, as those of the data set are."""
    mean_, std_ = (send(torch.tensor(x), images.device)[:, None, None] for x in (mean, std))
    return (images.float() / 255 - mean_) / std_


def send(x: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _draws(transform: object) -> RandAugmentDraws | ColorJitterDraws:
    if isinstance(transform, RandAugment):
        return RandAugmentDraws(transform)
    if isinstance(transform, ColorJitter):
        return ColorJitterDraws(transform)
    raise ValueError(
        f"batches are augmented by timm's RandAugment ('rand-…'); {type(transform).__name__} is "
        "for the image-by-image path: use --data.no-in-memory"
    )


def _erase(images: Tensor, boxes: Boxes, noise_seed: int) -> None:
    """Fills a rectangle of some images with normal noise, in place."""
    device, size = images.device, images.shape[-1]
    rows = send(boxes.images, device)
    top, bottom, left, right = send(boxes.edges, device)[..., None, None, None]
    column = torch.arange(size, device=device)
    row = column[:, None]
    erased = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    generator = torch.Generator(device).manual_seed(noise_seed)
    noise = torch.randn(len(rows), *images.shape[1:], generator=generator, device=device)
    images[rows] = torch.where(erased, noise, images[rows])
