"""CIFAR-100 for 20 epochs: the setting in which the stability of training was settled.

Crop, flip, mixup and cutmix alone, no drop path and no label smoothing, twice the paper's learning
rate after 2 epochs of warm-up.
"""

from dataclasses import replace

from ripple_lab.data.augment import Augmentation
from ripple_lab.recipes.cifar100 import SCHEDULE as FULL
from ripple_lab.train.classification import ClassificationRecipe, ModelSpec
from ripple_lab.train.recipe import OptimizerSpec

SCHEDULE = replace(
    FULL,
    augmentation=Augmentation(auto_augment=None, color_jitter=0.0, erasing=0.0),
    optimizer=OptimizerSpec(lr=1e-3, warmup_epochs=2),
    epochs=20,
    label_smoothing=0.0,
    ema_decay=None,
    validate_every=5,
)


def cifar100_20(name: str, **options: object) -> ClassificationRecipe:
    """The schedule with a model and its options."""
    model = ModelSpec(name=name, drop_path=0.0, **options)  # type: ignore[arg-type]
    return replace(SCHEDULE, model=model)
