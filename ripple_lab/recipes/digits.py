"""scikit-learn's digits: a small ripple classifier, trained in two minutes on two CPU cores."""

from ripple_lab.recipes import Listed
from ripple_lab.train.classification import (
    Augmentation,
    ClassificationRecipe,
    DataSpec,
    Mixing,
    ModelSpec,
)
from ripple_lab.train.recipe import Hardware, OptimizerSpec

DIGITS = ClassificationRecipe(
    name="digits",
    model=ModelSpec(
        name="ripple_tiny4_patch2_32", patch_size=4, width=64, heads=4, mlp_ratio=2.0, drop_path=0.0
    ),
    data=DataSpec(name="digits", num_classes=10),
    augmentation=Augmentation(
        padding=3, flip=0.0, auto_augment=None, color_jitter=0.0, erasing=0.2
    ),
    mixing=Mixing(mixup=0.0, cutmix=0.0),
    optimizer=OptimizerSpec(lr=3e-3, warmup_epochs=3),
    epochs=24,
    batch_size=24,
    label_smoothing=0.05,
    ema_decay=None,
    validate_every=4,
    hardware=Hardware(accelerator="cpu", precision="32-true"),
)

RECIPES = {"digits": Listed(DIGITS, "A small ripple classifier, on the CPU")}
