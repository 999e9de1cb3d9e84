"""Noise with labels, for smoke runs."""

import torch

from ripple_lab.data.images import Images


def synthetic_images(count: int, image_size: int, num_classes: int, seed: int) -> Images:
    """Random pictures; the labels go round the classes.

    Args:
        count: How many.
        image_size: Their side in pixels.
        num_classes: How many classes.
        seed: The same seed gives the same pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 3, image_size, image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    classes = tuple(f"class {label}" for label in range(num_classes))
    return Images(images, torch.arange(count) % num_classes, classes)
