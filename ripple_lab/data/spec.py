"""Which images a classifier learns from, and what is done to them: plain data, imported at once."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ripple_lab.checks import at_least, at_most, fraction


@dataclass(frozen=True)
class DataSpec:
    """Which images."""

    RENAMED: ClassVar[dict[str, str]] = {
        "made-up": "synthetic"
    }  # values in recipe files of version 0.1

    name: Literal["cifar100", "imagenet", "digits", "synthetic"] = "cifar100"
    """The data set; "imagenet" is any set of class folders."""
    root: str = "data"
    """The folder that holds it."""
    source: str = ""
    """For "imagenet", a data-set name of timm's: "" for folders or tars, "hfds/…" for the Hub,
    from which what is missing is always fetched."""
    download: bool = False
    """Fetch what is missing."""
    in_memory: bool = True
    """Keep all images on the device and augment whole batches there; else image by image."""
    num_classes: int = 100
    """How many classes it has."""
    count: int = 1024
    """Of synthetic images: how many."""
    limit: int | None = None
    """Train on so many images alone, the first of the set; evaluation takes all. None for all."""

    def __post_init__(self) -> None:
        at_least(1, num_classes=self.num_classes, count=self.count)
        at_most(10**8, num_classes=self.num_classes, count=self.count)
        if self.limit is not None:
            at_least(1, limit=self.limit)


@dataclass(frozen=True)
class Augmentation:
    """What happens to a training image before it is mixed with others."""

    crop: Literal["none", "pad", "resized"] = "pad"
    """"pad": pad with black, then cut out the size again; "resized": a random part, resized."""
    padding: int = 4
    """Pixels of padding on each side, for "pad"."""
    flip: float = 0.5
    """Probability of a mirror image."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """timm's name of a RandAugment policy; None for none."""
    color_jitter: float = 0.3
    """Strength of random brightness, contrast and saturation; off where `auto_augment` is on."""
    erasing: float = 0.25
    """Probability that a random rectangle becomes noise."""
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    """How images are resized."""
    repeats: int = 1
    """Repeated augmentation: how often an epoch shows an image, each time augmented anew. An epoch
    stays as long, so it shows fewer different images."""

    def __post_init__(self) -> None:
        if self.crop not in ("none", "pad", "resized"):
            raise ValueError(f'crop is "none", "pad" or "resized"; got crop={self.crop!r}')
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError(
                f'interpolation is "bilinear" or "bicubic"; got {self.interpolation!r}'
            )
        at_least(1, repeats=self.repeats)
        fraction(flip=self.flip, erasing=self.erasing)
        at_least(0, padding=self.padding, color_jitter=self.color_jitter)


@dataclass(frozen=True)
class Mixing:
    """Mixup and cutmix of the images of a batch, by timm."""

    mixup: float = 0.8
    """α of mixup; 0 for none."""
    cutmix: float = 1.0
    """α of cutmix; 0 for none."""
    switch: float = 0.5
    """Probability of cutmix where both are on."""

    def __post_init__(self) -> None:
        at_least(0, mixup=self.mixup, cutmix=self.cutmix)
        fraction(switch=self.switch)
