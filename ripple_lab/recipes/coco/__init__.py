"""COCO 2017 as in the paper: SMCA's schedule, 8 GPUs with two pictures each.

The learning rate falls to a tenth after 40 of 50 epochs, or after 80 of 108.
"""

from dataclasses import replace

from ripple_lab.train.detection import (
    DetectionDataSpec,
    DetectionOptimizerSpec,
    DetectionRecipe,
    DetectorSpec,
)

DROPS = {50: (40,), 108: (80,)}

SCHEDULE = DetectionRecipe(data=DetectionDataSpec("coco", root="data/coco"), validate_every=5)


def coco(name: str, epochs: int) -> DetectionRecipe:
    """The schedule of so many epochs with a detector."""
    return replace(
        SCHEDULE,
        model=DetectorSpec(name),
        optimizer=DetectionOptimizerSpec(drops=DROPS[epochs]),
        epochs=epochs,
    )
