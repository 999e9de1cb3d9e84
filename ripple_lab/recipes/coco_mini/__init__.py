"""A small folder in COCO's format: ResNet-18, pictures of at most 320 pixels, one GPU or the CPU.

For a smoke run on real pictures, or a start on a set of one's own: `--data.root` names its folder,
`--data.num-classes` how many classes it has. A few hundred pictures are too few to learn COCO.
"""

from ripple_lab.detection.transforms import DetectionAugmentation
from ripple_lab.train.detection import (
    DetectionDataSpec,
    DetectionOptimizerSpec,
    DetectionRecipe,
    DetectorSpec,
)
from ripple_lab.train.recipe import Hardware


def coco_mini(name: str) -> DetectionRecipe:
    """The schedule with a detector."""
    return DetectionRecipe(
        model=DetectorSpec(name, queries=100, encoder_layers=3, decoder_layers=3, feedforward=1024),
        data=DetectionDataSpec("coco", root="data/coco-mini", evaluation_scale=224),
        augmentation=DetectionAugmentation(
            scales=(160, 192, 224, 256),
            max_size=320,
            crop_scales=(200, 240, 280),
            crop_sizes=(160, 240),
        ),
        optimizer=DetectionOptimizerSpec(lr=2e-4, backbone_lr=2e-5, drops=(80,)),
        epochs=100,
        batch_size=8,
        validate_every=10,
        hardware=Hardware(workers=2),
    )
