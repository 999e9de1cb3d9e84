"""COCO 2017 as in the paper (SMCA's schedule, 8 GPUs with two pictures each), and a small one.

- `coco-…-50`, `coco-…-108`: the learning rate falls to a tenth after 40 of 50 epochs, or 80 of 108.
- `coco-mini-…`: a small folder in COCO's format on one GPU or the CPU, with ResNet-18 and pictures
  of at most 320 pixels, for a smoke run on real pictures or a start on your own. `--data.root`
  names the folder, `--data.num-classes` its number of classes.
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

PAPER = DetectionRecipe(data=DetectionDataSpec("coco", root="data/coco"), validate_every=5)
MINI = DetectionRecipe(
    model=DetectorSpec(queries=100, encoder_layers=3, decoder_layers=3, feedforward=1024),
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

SYSTEMS = {"smca": "SMCA", "smca-la": "SMCA-LA", "smca-ripple": "SMCA-Ripple"}

RECIPES = {
    f"coco-{system}-{epochs}": Listed(
        replace(
            PAPER,
            name=f"coco-{system}-{epochs}",
            model=DetectorSpec(f"{system.replace('-', '_')}_resnet50"),
            optimizer=DetectionOptimizerSpec(drops=(drop,)),
            epochs=epochs,
        ),
        f"Table 3, {title}",
        "--hardware.devices 8",
    )
    for epochs, drop in ((50, 40), (108, 80))
    for system, title in SYSTEMS.items()
} | {
    f"coco-mini-{system}": Listed(
        replace(
            MINI,
            name=f"coco-mini-{system}",
            model=replace(MINI.model, name=f"{system.replace('-', '_')}_resnet18"),
        ),
        f"{title} on a folder of your own",
        "--data.root FOLDER",
    )
    for system, title in SYSTEMS.items()
}
