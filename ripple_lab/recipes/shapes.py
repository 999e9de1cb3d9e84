"""Circles, squares and triangles, drawn on the spot: a detector from nothing, on the CPU.

Pictures of 64×96 to 96×128 pixels on one background; the first three stages of a ResNet-18 from
random weights, two layers of encoder and two of decoder. About ten minutes on one CPU core.
"""

from dataclasses import replace

from ripple_lab.recipes import Listed
from ripple_lab.train.detection import (
    DetectionAugmentation,
    DetectionDataSpec,
    DetectionOptimizerSpec,
    DetectionRecipe,
    DetectorSpec,
)
from ripple_lab.train.recipe import Hardware

SHAPES = DetectionRecipe(
    model=DetectorSpec(
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

RECIPES = {
    f"shapes-{system}": Listed(
        replace(
            SHAPES,
            name=f"shapes-{system}",
            model=replace(SHAPES.model, name=f"{system.replace('-', '_')}_resnet18"),
        ),
        f"{shows}, a detector from nothing on the CPU",
    )
    for system, shows in (("smca", "SMCA"), ("smca-la", "SMCA-LA"), ("smca-ripple", "SMCA-Ripple"))
}
