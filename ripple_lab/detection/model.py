"""Detectors by name: a backbone, an encoder and a decoder put together."""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from ripple_lab.console import did_you_mean
from ripple_lab.detection.backbone import WEIGHTS, Backbone
from ripple_lab.detection.decoder import Decoder
from ripple_lab.detection.encoder import Encoder
from ripple_lab.detection.positions import padding_mask, sine_positions

FAMILIES = {"smca": "softmax", "smca_la": "linear", "smca_ripple": "ripple"}
DETECTORS: dict[str, tuple[str, str]] = {  # name → attention of the encoder, backbone
    f"{family}_{backbone}": (attention, backbone)
    for backbone in WEIGHTS
    for family, attention in FAMILIES.items()
}


class Detections(TypedDict):
    """The output of a decoder layer for B images with Q queries each.

    logits: (B, Q, classes), each an independent yes or no.
    boxes: (B, Q, 4): centre x, y, width and height, from 0 to 1 as parts of each image.
    """

    logits: Tensor
    boxes: Tensor


class Output(Detections):
    """The output of the last layer; `auxiliary` has those of the layers before it, in order."""

    auxiliary: list[Detections]


class Detector(nn.Module):
    """An SMCA detector. `create_detector` makes one by name.

    Args:
        backbone: Images → features.
        encoder: Cells attend to each other, by the chosen attention.
        decoder: Queries attend to cells.
        dim: C, channels of encoder and decoder, divisible by 4.
    """

    def __init__(self, backbone: Backbone, encoder: Encoder, decoder: Decoder, dim: int = 256):
        super().__init__()
        self.dim = dim
        self.backbone = backbone
        self.projection = nn.Conv2d(backbone.channels, dim, kernel_size=1)
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, images: Sequence[Tensor] | Tensor) -> Output:
        """Finds objects. An image's result does not depend on the others of its batch.

        Args:
            images: Each (3, height, width), of any size, with colours normalised by ImageNet's mean
                and standard deviation; or one tensor (B, 3, height, width).
        """
        images = list(images)
        _check(images)
        device, stride = images[0].device, self.backbone.stride
        pixels = [(image.shape[1], image.shape[2]) for image in images]
        sizes = _on_device(pixels, device)  # (B, 2)
        x = self.projection(self.backbone(images)).permute(0, 2, 3, 1).contiguous()  # (B, H, W, C)
        grid_size = (x.shape[1], x.shape[2])
        cells = (sizes / stride).ceil()
        positions = sine_positions(cells, grid_size, self.dim).to(x.dtype)
        # No mask without padding, so that softmax takes its fastest kernel.
        mask = padding_mask(cells, grid_size) if len(set(pixels)) > 1 else None
        memory = self.encoder(x, positions, mask)
        logits, boxes = self.decoder(memory, positions, sizes.flip(1) / stride, mask)
        layers = [Detections(logits=a, boxes=b) for a, b in zip(logits, boxes, strict=True)]
        return Output(**layers[-1], auxiliary=layers[:-1])


def create_detector(
    name: str,
    *,
    num_classes: int = 91,
    pretrained_backbone: bool = True,
    fixed_stages: int = 2,
    stages: int = 4,
    num_queries: int = 300,
    encoder_layers: int = 6,
    decoder_layers: int = 6,
    dim: int = 256,
    num_heads: int = 8,
    feedforward_dim: int = 2048,
    dropout: float = 0.1,
    **attention_options: Any,
) -> Detector:
    """Makes a detector.

    Args:
        name: "smca_resnet50" (softmax attention in the encoder), "smca_la_resnet50" (linear),
            "smca_ripple_resnet50", or the same with `_resnet18`.
        num_classes: Logits of a query. COCO's category ids go up to 90, hence 91.
        pretrained_backbone: Whether the backbone starts from torchvision's ImageNet weights.
        fixed_stages: How much of the backbone is not trained, see `Backbone`; 0 for a backbone that
            starts from random weights.
        stages: How many of the backbone's four stages to use; three have cells of 16 pixels.
        num_queries: The most objects that an image can have.
        encoder_layers, decoder_layers: How many.
        dim, num_heads, feedforward_dim, dropout: Of encoder and decoder alike.
        attention_options: Of the encoder's attention, for example `max_distance` of
            `RippleAttention` or `feature_map` of `LinearAttention`.

    >>> import torch
    >>> model = create_detector("smca_ripple_resnet18", num_classes=3, pretrained_backbone=False)
    >>> found = model.eval()([torch.randn(3, 64, 96), torch.randn(3, 100, 80)])
    >>> found["logits"].shape, found["boxes"].shape
    (torch.Size([2, 300, 3]), torch.Size([2, 300, 4]))
    """
    if name not in DETECTORS:
        hint = did_you_mean(str(name), DETECTORS)
        known = ", ".join(DETECTORS)
        raise ValueError(f"there is no detector {name!r}: {hint}The detectors are {known}.")
    if num_classes < 1 or num_queries < 1:
        raise ValueError(
            f"a detector needs a class and a query at least; got {num_classes=}, {num_queries=}"
        )
    attention, backbone = DETECTORS[name]
    shared: dict[str, Any] = {"dim": dim, "num_heads": num_heads}
    shared |= {"feedforward_dim": feedforward_dim, "dropout": dropout}
    encoder = Encoder(attention, num_layers=encoder_layers, **shared, **attention_options)
    decoder = Decoder(num_classes, num_layers=decoder_layers, num_queries=num_queries, **shared)
    features = Backbone(
        backbone, pretrained=pretrained_backbone, fixed_stages=fixed_stages, stages=stages
    )
    return Detector(features, encoder, decoder, dim)


def _on_device(rows: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Numbers as float32, copied without waiting for the device."""
    numbers = torch.tensor(rows, dtype=torch.float32)
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def _check(images: list[Tensor]) -> None:
    if not images:
        raise ValueError("a detector needs one image at least; got an empty list")
    for index, image in enumerate(images):
        colours = image.dim() == 3 and image.shape[0] == 3 and image.numel() > 0
        if not colours or not image.is_floating_point():
            raise ValueError(
                "a detector takes images as floating-point tensors (3, height, width); got "
                f"{tuple(image.shape)}, {image.dtype} at place {index}. Convert with torchvision's "
                "v2.functional.to_image and to_dtype(…, scale=True), then normalise the colours."
            )
