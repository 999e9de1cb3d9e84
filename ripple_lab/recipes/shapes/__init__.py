"""Circles, squares and triangles, drawn on the spot: a detector from nothing, on the CPU.

Pictures of 64×96 to 96×128 pixels on one background; the first three stages of a ResNet-18 from
random weights, two layers of encoder and two of decoder.
"""

from ripple_lab.detection.transforms import DetectionAugmentation
from ripple_lab.train.detection import (
    DetectionDataSpec,
    DetectionOptimizerSpec,
    DetectionRecipe,
    DetectorSpec,
)
from ripple_lab.train.recipe import Hardware


def shapes(name: str) -> DetectionRecipe:
    """The schedule with a detector."""
    return DetectionRecipe(
        model=DetectorSpec(
            name,
            pretrained_backbone=False,
            fixed_stages=0,
            stages=3,
            queries=20,
            encoder_layers=2,
            decoder_layers=2,
            width=128,
            heads=4,
            feedforward=512,
            dropout=0.0,
        ),
        data=DetectionDataSpec("shapes", num_classes=3, evaluation_scale=None, count=3200),
        augmentation=DetectionAugmentation(scales=(), crop=0.0),
        optimizer=DetectionOptimizerSpec(
            lr=5e-4, backbone_lr=5e-4, warmup_lr=0.0, warmup_epochs=1, min_lr=1e-5
        ),
        epochs=6,
        batch_size=16,
        hardware=Hardware(accelerator="cpu", precision="32-true", workers=0),
    )
