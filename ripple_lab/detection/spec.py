"""Which detector, pictures and loss: plain data, imported at once."""

from dataclasses import dataclass
from typing import Literal

from ripple_lab.attention import AttentionSpec
from ripple_lab.checks import at_least, at_most, fraction


@dataclass(frozen=True)
class DetectorSpec(AttentionSpec):
    """Which detector; the options of attention are those of its encoder."""

    name: str = "smca_ripple_resnet50"
    """One of ours; `ripple models --only smca` lists them."""
    pretrained_backbone: bool = True
    """Start the backbone from ImageNet weights: fetched from the network (45 to 100 MB) unless they
    are in torch's cache."""
    fixed_stages: int = 2
    """How much of the backbone is not trained: 0 nothing, 2 the stem and the first stage."""
    stages: int = 4
    """How many stages of the backbone there are: 4 have cells of 32 pixels, 3 of 16, 2 of 8."""
    queries: int = 300
    """The most objects that a picture can have."""
    encoder_layers: int = 6
    """Layers in which cells look at each other."""
    decoder_layers: int = 6
    """Layers in which queries look at cells."""
    width: int = 256
    """Channels of encoder and decoder."""
    heads: int = 8
    """Heads of each attention layer."""
    feedforward: int = 2048
    """Channels between the two linear layers of a layer."""
    dropout: float = 0.1
    """Of attention and of what is added to tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partition == "dense":
            raise ValueError(
                "dense rings need a grid of one size, and pictures have many; got "
                "partition='dense': use \"chebyshev\" with a max_distance"
            )
        fraction(dropout=self.dropout)
        sizes = ("queries", "encoder_layers", "decoder_layers", "width", "heads", "feedforward")
        at_least(1, **{name: getattr(self, name) for name in sizes})
        at_most(1000, encoder_layers=self.encoder_layers, decoder_layers=self.decoder_layers)


@dataclass(frozen=True)
class DetectionDataSpec:
    """Which pictures."""

    name: Literal["coco", "shapes"] = "coco"
    """"coco" is any folder in COCO's format; "shapes" are drawn on the spot."""
    root: str = "data/coco"
    """The folder that holds it."""
    num_classes: int = 80
    """How many classes it has."""
    evaluation_scale: int | None = 800
    """The shorter side of a picture that is judged, in pixels; None leaves it as it is."""
    count: int = 4096
    """Of shapes: how many pictures to train on."""
    evaluation_count: int = 256
    """Of shapes: how many pictures to judge."""

    def __post_init__(self) -> None:
        at_least(1, num_classes=self.num_classes, count=self.count)
        at_least(1, evaluation_count=self.evaluation_count)
        at_most(10**8, count=self.count, evaluation_count=self.evaluation_count)
        if self.evaluation_scale is not None:
            at_least(1, evaluation_scale=self.evaluation_scale)


@dataclass(frozen=True)
class DetectionAugmentation:
    """What happens to a training picture. Lengths are in pixels."""

    flip: float = 0.5
    """Probability of a mirror image."""
    scales: tuple[int, ...] = tuple(range(480, 801, 32))
    """The shorter side becomes one of these; none of them leaves a picture as it is."""
    max_size: int = 1333
    """The longer side is at most this, whatever the shorter one becomes."""
    crop: float = 0.5
    """Probability that a part is cut out before."""
    crop_scales: tuple[int, ...] = (400, 500, 600)
    """For that, the shorter side first becomes one of these."""
    crop_sizes: tuple[int, int] = (384, 600)
    """The least and the largest height and width of the part; never more than the picture has."""

    def __post_init__(self) -> None:
        fraction(flip=self.flip, crop=self.crop)
        for name in ("scales", "crop_scales"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"{name} must be lengths ≥ 1; got {name}={getattr(self, name)}")
        if not self.crop_scales and self.crop:
            raise ValueError("crop_scales must be one or more lengths ≥ 1, or crop 0; got none")
        if self.max_size < max(self.scales, default=1):
            raise ValueError(
                "max_size must be at least the largest of scales; got "
                f"max_size={self.max_size}, scales={self.scales}"
            )
        if not 1 <= self.crop_sizes[0] <= self.crop_sizes[1]:
            raise ValueError(
                f"crop_sizes are the least and the largest; got crop_sizes={self.crop_sizes}"
            )


@dataclass(frozen=True)
class LossWeights:
    """What each part of the cost of a match, and of the loss, is multiplied by."""

    focal: float = 2.0
    """Classes."""
    l1: float = 5.0
    """Distance of boxes."""
    giou: float = 2.0
    """Overlap of boxes."""
    alpha: float = 0.25
    """Of the focal loss: weight of what is there; 1 − alpha is that of what is not."""
    gamma: float = 2.0
    """Of the focal loss: how much less the easy ones count."""

    def __post_init__(self) -> None:
        at_least(0, focal=self.focal, l1=self.l1, giou=self.giou, gamma=self.gamma)
        fraction(alpha=self.alpha)
