"""ImageNet-1k as in the paper: DeiT's recipe without distillation and repeated augmentation."""

from dataclasses import replace

from ripple_lab.data.augment import Augmentation
from ripple_lab.train.classification import ClassificationRecipe, DataSpec, ModelSpec
from ripple_lab.train.recipe import OptimizerSpec

SCHEDULE = ClassificationRecipe(
    data=DataSpec(name="imagenet", root="data/imagenet", num_classes=1000, in_memory=False),
    augmentation=Augmentation(crop="resized"),
    optimizer=OptimizerSpec(lr=1e-3),
    batch_size=1024,
    epochs=300,
)


def imagenet(name: str, **options: object) -> ClassificationRecipe:
    """The schedule with a model and its options."""
    return replace(SCHEDULE, model=ModelSpec(name=name, **options))  # type: ignore[arg-type]
