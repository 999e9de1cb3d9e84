"""A classifier in training: its network, loss and accuracy."""

from typing import Any

import timm
import torch.nn.functional as F
from timm.data import Mixup, resolve_data_config
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from ripple_attention.models import MODELS  # makes our names known to timm, too
from ripple_attention.models.vit import RIPPLE_OPTIONS
from ripple_lab.console import did_you_mean
from ripple_lab.data.module import ClassificationData
from ripple_lab.train.classification import ClassificationRecipe, ModelSpec
from ripple_lab.train.module import Metrics, TrainedModule

TIMM_NAMES = {
    "width": "embed_dim",
    "heads": "num_heads",
    "image_size": "img_size",
    "drop_path": "drop_path_rate",
}


def create_model(spec: ModelSpec, num_classes: int) -> nn.Module:
    """The network of a recipe, with fresh weights."""
    options = {name: value for name, value in vars(spec).items() if value is not None}
    name = options.pop("name")
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models())
        raise ValueError(
            f"model.name must be known to timm; got {name!r}: {hint}`ripple models` lists ours"
        )
    if name in MODELS and MODELS[name]["attention"] != "ripple":
        unused = sorted(options.keys() & {"ripple_layers", *RIPPLE_OPTIONS})
        if unused:
            raise ValueError(f"{name} has no ripples: leave out model.{', model.'.join(unused)}")
    if not options["class_token"]:
        del options["class_token"]  # as the named model has it
    scaling = options.pop("scaling", None)
    if scaling is not None:
        options["feature_map_options"] = {"scaling": scaling}
    options["pos_embed"] = "learn" if options.pop("position_embeddings") else "none"
    options = {TIMM_NAMES.get(name, name): value for name, value in options.items()}
    try:
        model = timm.create_model(name, num_classes=num_classes, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"{name} cannot be made with {options}: {error}") from None
    patches: Any = model.patch_embed
    if any(s % p for s, p in zip(patches.img_size, patches.patch_size, strict=True)):
        raise ValueError(
            f"{name} cannot be made with {options}: its patches of {patches.patch_size} pixels "
            f"must divide images of {patches.img_size}"
        )
    return model


def preprocessing(model: nn.Module) -> dict[str, Any]:
    """What the model's images need: input_size, mean, std, crop_pct, interpolation."""
    config = resolve_data_config({}, model=model)
    side = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if side is not None:
        config["input_size"] = (config["input_size"][0], *side)
    return config


class Classifier(TrainedModule):
    """Trains and evaluates a recipe's network.

    Args:
        recipe: What to train.
    """

    HEADINGS = {"top1": "top-1 %", "top5": "top-5 %"}  # noqa: RUF012
    DIGITS = 2
    FIXED_SHAPES = True

    def __init__(self, recipe: ClassificationRecipe):
        super().__init__(recipe, create_model(recipe.model, recipe.data.num_classes))
        self.mixup = None
        if recipe.mixes:
            self.mixup = Mixup(
                mixup_alpha=recipe.mixing.mixup,
                cutmix_alpha=recipe.mixing.cutmix,
                switch_prob=recipe.mixing.switch,
                label_smoothing=recipe.label_smoothing,
                num_classes=recipe.data.num_classes,
            )
        if recipe.hardware.compile:
            self.model.compile()
        classes = recipe.data.num_classes
        self.accuracies = nn.ModuleDict(
            {
                f"{prefix}top{k}": MulticlassAccuracy(
                    classes, top_k=min(k, classes), average="micro", ignore_index=-1
                )
                for prefix in self.predictors()
                for k in (1, 5)
            }
        )

    def create_data(self) -> ClassificationData:
        return ClassificationData(self.recipe, preprocessing(self.model))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        # Mixup draws on the CPU, so it is no part of what is replayed.
        return self.loss_of_step(self.loss, self.mixup(*batch) if self.mixup else tuple(batch))

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy with labels (B,) or, where images are mixed, with probabilities (B, C)."""
        logits = self.model(images).float()
        if self.mixup is None:
            return F.cross_entropy(logits, targets, label_smoothing=self.recipe.label_smoothing)
        return SoftTargetCrossEntropy()(logits, targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        for prefix, predict in self.predictors().items():
            logits = predict(images).float()
            for k in (1, 5):
                accuracy: Any = self.accuracies[f"{prefix}top{k}"]
                accuracy.update(logits, labels)

    def metrics(self) -> Metrics:
        """Top-1 and top-5 in percent."""
        results: Metrics = {}
        for name in self.accuracies:
            accuracy: Any = self.accuracies[name]
            results[name] = 100 * float(accuracy.compute())
            accuracy.reset()
        return results
