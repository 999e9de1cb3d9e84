"""CIFAR-100: the paper's recipe (ImageNet's at batch 512 and half the rate), and two shorter ones.

- `cifar100-…`: 300 epochs, as in the paper.
- `cifar100-short-…`: 60 epochs at twice the learning rate. There is no running mean of the weights,
  because it would reach back over the whole schedule.
- `cifar100-20-…`: 20 epochs of crop, flip, mixup and cutmix, where the stability of training was
  settled.
"""

from dataclasses import replace

from ripple_lab.recipes import Listed
from ripple_lab.train.classification import (
    Augmentation,
    ClassificationRecipe,
    DataSpec,
    ModelSpec,
)
from ripple_lab.train.recipe import OptimizerSpec

PAPER = ClassificationRecipe(
    data=DataSpec(name="cifar100", root="data", num_classes=100),
    optimizer=OptimizerSpec(lr=5e-4),
    batch_size=512,
    epochs=300,
)
SHORT = replace(
    PAPER, epochs=60, optimizer=OptimizerSpec(lr=1e-3), ema_decay=None, validate_every=5
)
STABILITY = replace(
    SHORT,
    augmentation=Augmentation(auto_augment=None, color_jitter=0.0, erasing=0.0),
    optimizer=OptimizerSpec(lr=1e-3, warmup_epochs=2),
    epochs=20,
    label_smoothing=0.0,
)

DEIT, CONVIT = ModelSpec("deit6_tiny_patch2_32"), ModelSpec("convit6_tiny_patch2_32")
DEIT_LA, RIPPLE = ModelSpec("deit_la_tiny_patch2_32"), ModelSpec("ripple_tiny_patch2_32")

MODELS = {
    "deit-tiny": (DEIT, "Table 2, DeiT"),
    "convit-tiny": (CONVIT, "Table 2, ConViT"),
    "deit-la-tiny": (DEIT_LA, "Table 2, DeiT-LA"),
    "ripple-tiny": (RIPPLE, "Table 2, Ripple"),
    "ripple-tiny-r2": (replace(RIPPLE, max_distance=2), "Table 4, R_max = 2"),
    "ripple-tiny-r8": (replace(RIPPLE, max_distance=8), "Table 4, R_max = 8"),
    "ripple-tiny-r16": (replace(RIPPLE, max_distance=16), "Table 4, R_max = 16"),
    "ripple-tiny-logarithmic": (
        replace(RIPPLE, partition="logarithmic", max_distance=15),
        "Table 4, logarithmic rings",
    ),
    "ripple-tiny-fixed": (replace(RIPPLE, weights="fixed"), "Table 4, fixed weights"),
    "ripple-tiny-softmax": (replace(RIPPLE, weights="softmax"), "Table 4, softmax weights"),
    "ripple-tiny-truncated": (replace(RIPPLE, weights="truncated"), "Table 4, truncated ripples"),
    "deit-la-tiny4": (ModelSpec("deit_la_tiny4_patch2_32"), "Table 8, DeiT-LA of 4 layers"),
    "ripple-tiny4": (ModelSpec("ripple_tiny4_patch2_32"), "Table 8, Ripple of 4 layers"),
}
NEAR = replace(RIPPLE, near="softmax", ripple_layers=12)
BEYOND = {
    "ripple-tiny-foveal": (
        replace(RIPPLE, partition="foveal", tile=4),
        "Beyond the paper, foveal rings",
    ),
    "ripple-tiny-near": (NEAR, "Beyond the paper, near softmax in all layers"),
    "ripple-tiny-near-foveal": (
        replace(NEAR, partition="foveal", tile=4),
        "Beyond the paper, near softmax and foveal rings",
    ),
    "ripple-tiny-near-rotary": (
        replace(NEAR, rotary=True),
        "Beyond the paper, near softmax and rotary positions",
    ),
}
WITHOUT_POSITIONS = {
    f"{name}-no-ape": (
        replace(MODELS[name][0], position_embeddings=False),
        f"{MODELS[name][1]}, no position embeddings",
    )
    for name in ("deit-tiny", "convit-tiny", "deit-la-tiny", "ripple-tiny")
}
STABLE = {
    name: (replace(model, drop_path=0.0), f"Stability of training, {system}")
    for name, model, system in (
        ("deit-tiny", DEIT, "DeiT"),
        ("deit-la-tiny", DEIT_LA, "DeiT-LA"),
        ("ripple-tiny", RIPPLE, "Ripple"),
    )
}

RECIPES = {
    f"{prefix}-{name}": Listed(
        replace(schedule, name=f"{prefix}-{name}", model=model), shows, options
    )
    for prefix, schedule, models, options in (
        ("cifar100", PAPER, MODELS | WITHOUT_POSITIONS | BEYOND, ""),
        ("cifar100-short", SHORT, MODELS | BEYOND, ""),
        ("cifar100-20", STABILITY, STABLE, "--hardware.compile"),
    )
    for name, (model, shows) in models.items()
}
