"""DeiT's augmentation, image by image, by timm."""

from collections.abc import Callable, Sequence

from PIL import Image
from timm.data import create_transform
from timm.data.transforms import str_to_interp_mode
from torch import Tensor
from torchvision.transforms import Compose, RandomCrop, Resize

from ripple_lab.data.spec import Augmentation


def train_transform(
    aug: Augmentation, image_size: int, mean: Sequence[float], std: Sequence[float]
) -> Callable[[Image.Image], Tensor]:
    """DeiT's augmentation of one training image.

    Args:
        aug: The augmentation.
        image_size: S, side of the result in pixels.
        mean, std: Of each colour, between 0 and 1.

    Returns:
        A function of an RGB picture; its result is float32 (3, S, S), normalised. It draws from
        the generators of `random`, `numpy.random` and `torch`.
    """
    return Compose([s for stage in stages(aug, image_size, mean, std) for s in stage.transforms])


def stages(
    aug: Augmentation, image_size: int, mean: Sequence[float], std: Sequence[float]
) -> tuple[Compose, Compose, Compose]:
    """The parts of `train_transform`: crop and flip; colours and shapes; tensor and erasing."""
    try:
        crop_and_flip, policy, to_tensor = create_transform(
            image_size,
            is_training=True,
            separate=True,
            hflip=aug.flip,
            color_jitter=aug.color_jitter,
            auto_augment=aug.auto_augment,
            interpolation=aug.interpolation,
            mean=tuple(mean),
            std=tuple(std),
            re_prob=aug.erasing,
            re_mode="pixel",
        )
    except (AssertionError, ValueError) as error:
        raise ValueError(
            "auto_augment is a policy of timm's, such as 'rand-m9-mstd0.5-inc1', or None; "
            f"got {aug.auto_augment!r}: {error}"
        ) from error
    if aug.crop == "pad":
        crop_and_flip.transforms[0] = RandomCrop(image_size, padding=aug.padding)
    elif aug.crop == "none":
        mode = str_to_interp_mode(aug.interpolation)
        crop_and_flip.transforms[0] = Resize((image_size, image_size), mode)
    return crop_and_flip, policy, to_tensor


def eval_transform(
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    crop_pct: float = 1.0,
    interpolation: str = "bicubic",
) -> Callable[[Image.Image], Tensor]:
    """Prepares an image for evaluation: resize, cut out the centre, normalise.

    Args:
        image_size: S, side of the result in pixels.
        mean, std: Of each colour, between 0 and 1.
        crop_pct: The shorter side becomes S / crop_pct; 1 leaves an image of side S as it is.
        interpolation: How images are resized, by timm's name.

    Returns:
        A function of an RGB picture; its result is float32 (3, S, S).
    """
    return create_transform(
        image_size,
        mean=tuple(mean),
        std=tuple(std),
        crop_pct=crop_pct,
        interpolation=interpolation,
    )
