"""Residual networks of torchvision as feature extractors, for images of different sizes."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models import ResNet18_Weights, ResNet50_Weights, WeightsEnum
from torchvision.ops import FrozenBatchNorm2d

WEIGHTS: dict[str, WeightsEnum] = {  # those that DETR and SMCA start from
    "resnet50": ResNet50_Weights.IMAGENET1K_V1,
    "resnet18": ResNet18_Weights.IMAGENET1K_V1,
}
STEM = ("conv1", "bn1", "relu", "maxpool")
STAGES = ("layer1", "layer2", "layer3", "layer4")


class Backbone(nn.Module):
    """A ResNet with frozen batch norm; with all stages, a cell is 32×32 pixels.

    Args:
        name: "resnet50" or "resnet18".
        pretrained: Whether to load torchvision's ImageNet weights.
        fixed_stages: How much of the network is not trained: 0 nothing, 1 the stem, 2 (as in DETR)
            the stem and the first stage, up to 5 for all. Use 0 with random weights.
        stages: How many of the four stages to use; each one less halves the side of a cell and
            the channels. Use fewer for small pictures.

    Attributes:
        channels: Of the maps: 2048 or 512 after four stages.
        stride: Side of a cell in pixels: 32 after four stages.
    """

    def __init__(
        self,
        name: str = "resnet50",
        *,
        pretrained: bool = True,
        fixed_stages: int = 2,
        stages: int = len(STAGES),
    ):
        super().__init__()
        if name not in WEIGHTS:
            raise ValueError(f"a backbone is one of {', '.join(WEIGHTS)}; got {name!r}")
        if fixed_stages not in range(len(STAGES) + 2):
            raise ValueError(
                "fixed_stages must be 0 (all is trained), 1 (the stem is fixed) … 5 (nothing is "
                f"trained); got {fixed_stages=}"
            )
        if stages not in range(1, len(STAGES) + 1):
            raise ValueError(f"a backbone has 1 to {len(STAGES)} stages; got {stages=}")
        network = torchvision.models.get_model(
            name, weights=None, norm_layer=FrozenBatchNorm2d, num_classes=1000
        )
        self.channels: int = network.fc.in_features >> (len(STAGES) - stages)
        self.stride = 2 ** (1 + stages)
        if pretrained:
            network.load_state_dict(pretrained_weights(name))
        else:
            _start_without_statistics(network)
        self.body = nn.Sequential()
        for part in (*STEM, *STAGES[:stages]):
            self.body.add_module(part, getattr(network, part))
        # Frozen norms have no parameters.
        fixed = ("conv1", *STAGES[:stages])[:fixed_stages]
        for part in fixed:
            self.body.get_submodule(part).requires_grad_(False)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Features of images on a common grid.

        Args:
            images: Each (3, height, width), of any size.

        Returns:
            (B, channels, H, W), large enough for the largest; an image has its
            ⌈height/stride⌉×⌈width/stride⌉ cells at the top left, and zeros elsewhere.
        """
        # Images of one size run as a batch, and only the features are padded. So no convolution
        # sees padding: an image has the features that it has alone, bit by bit, and no work is
        # spent on padding. (Padded images would need a mask before each convolution, because
        # frozen norms turn zeros into something else.)
        alike: dict[torch.Size, list[int]] = {}
        for index, image in enumerate(images):
            alike.setdefault(image.shape, []).append(index)
        H, W = (max(self.cells(image.shape[axis]) for image in images) for axis in (1, 2))
        maps: dict[int, Tensor] = {}
        for (_, height, width), indices in alike.items():
            together = self.body(torch.stack([images[index] for index in indices]))
            if len(alike) == 1:
                return together
            padded = F.pad(together, (0, W - self.cells(width), 0, H - self.cells(height)))
            maps |= zip(indices, padded, strict=True)
        return torch.stack([maps[index] for index in range(len(images))])

    def cells(self, pixels: int) -> int:
        """How many cells a side of that many pixels has: each halving rounds up."""
        return math.ceil(pixels / self.stride)


def pretrained_weights(name: str) -> dict[str, Tensor]:
    """ImageNet weights of a backbone, from torch's cache or the network."""
    weights = WEIGHTS[name]
    try:
        return dict(weights.get_state_dict(progress=False, check_hash=True))
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"the ImageNet weights of {name} are not in {torch.hub.get_dir()}/checkpoints and "
            f"cannot be fetched from {weights.url} ({error}). Put the file there, or start from "
            "random weights: pretrained_backbone=False, fixed_stages=0 (of a recipe: "
            "--model.no-pretrained-backbone --model.fixed-stages 0)."
        ) from error


def _start_without_statistics(network: nn.Module) -> None:
    """Random weights whose features stay small without norms that scale them.

    With frozen norms that have no statistics, every block would double the variance.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    blocks = [block for stage in STAGES for block in getattr(network, stage)]
    for block in blocks:
        last = block.bn3 if hasattr(block, "bn3") else block.bn2
        last.weight.fill_(len(blocks) ** -0.5)
