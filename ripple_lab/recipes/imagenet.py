"""ImageNet-1k as in the paper: DeiT's recipe without distillation and repeated augmentation."""

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
    data=DataSpec(name="imagenet", root="data/imagenet", num_classes=1000, in_memory=False),
    augmentation=Augmentation(crop="resized"),
    optimizer=OptimizerSpec(lr=1e-3),
    batch_size=1024,
    epochs=300,
)

DEIT_LA, RIPPLE = ModelSpec("deit_la_tiny_patch16_224"), ModelSpec("ripple_tiny_patch16_224")

MODELS = {
    "deit-tiny": (ModelSpec("deit6_tiny_patch16_224"), "Table 1, DeiT"),
    "convit-tiny": (ModelSpec("convit6_tiny_patch16_224"), "Table 1, ConViT"),
    "convit4-tiny": (
        ModelSpec("convit4_tiny_patch16_224"),
        "ConViT's own tiny model, of 4 heads, whose accuracy is table 1's",
    ),
    "deit-la-tiny": (DEIT_LA, "Table 1, DeiT-LA"),
    "deit-la-sinespe-tiny": (
        ModelSpec("deit_la_sinespe_tiny_patch16_224"),
        "Table 1, DeiT-LA + SineSPE",
    ),
    "deit-la-convspe-tiny": (
        ModelSpec("deit_la_convspe_tiny_patch16_224"),
        "Table 1, DeiT-LA + ConvSPE",
    ),
    "deit-la-rope-tiny": (ModelSpec("deit_la_rope_tiny_patch16_224"), "Table 1, DeiT-LA + RoPE"),
    "permuteformer-tiny": (ModelSpec("permuteformer_tiny_patch16_224"), "Table 1, PermuteFormer"),
    "ripple-tiny": (RIPPLE, "Table 1, Ripple"),
    "deit-la-tiny-rfa": (replace(DEIT_LA, feature_map="rfa"), "Table 6, RFA"),
    "deit-la-tiny-performer": (replace(DEIT_LA, feature_map="performer"), "Table 6, Performer"),
    "deit-la-tiny-dpfp": (replace(DEIT_LA, feature_map="dpfp"), "Table 6, DPFP"),
    "deit-la-tiny-t2r": (
        replace(DEIT_LA, feature_map="t2r"),
        "Table 6, T2R, and ours without the linear layer",
    ),
    "deit-la-tiny-random-w1": (
        replace(DEIT_LA, feature_map="learned-random-w1"),
        "Table 6, ours, W₁ redrawn at every step",
    ),
    "ripple-tiny-layers-3": (replace(RIPPLE, ripple_layers=3), "Table 7, 3 ripple layers"),
    "ripple-tiny-layers-6": (replace(RIPPLE, ripple_layers=6), "Table 7, 6 ripple layers"),
    "ripple-tiny-layers-12": (replace(RIPPLE, ripple_layers=12), "Table 7, 12 ripple layers"),
}

RECIPES = {
    f"imagenet-{name}": Listed(
        replace(PAPER, name=f"imagenet-{name}", model=model), shows, "--hardware.devices 8"
    )
    for name, (model, shows) in MODELS.items()
}
