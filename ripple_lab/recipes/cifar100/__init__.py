"""CIFAR-100 as in the paper: the recipe of ImageNet, at batch 512 and half the learning rate."""

from dataclasses import replace

from ripple_lab.train.classification import ClassificationRecipe, DataSpec, ModelSpec
from ripple_lab.train.recipe import OptimizerSpec

SCHEDULE = ClassificationRecipe(
    data=DataSpec(name="cifar100", root="data", num_classes=100),
    optimizer=OptimizerSpec(lr=5e-4),
    batch_size=512,
    epochs=300,
)


def cifar100(name: str, **options: object) -> ClassificationRecipe:
    """The schedule with a model and its options."""
    return replace(SCHEDULE, model=ModelSpec(name=name, **options))  # type: ignore[arg-type]
