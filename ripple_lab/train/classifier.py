"""A classifier in training: its network, loss and accuracy."""

from typing import Any

import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from ripple_lab.data.module import ClassificationData
from ripple_lab.train.classification import ClassificationRecipe
from ripple_lab.train.module import Metrics, TrainedModule
from ripple_lab.train.network import preprocessing


class Classifier(TrainedModule):
    """Trains and evaluates a recipe's network.

    Args:
        recipe: What to train.
    """

    HEADINGS = {"top1": "top-1 %", "top5": "top-5 %"}  # noqa: RUF012
    DIGITS = 2
    FIXED_SHAPES = True

    def __init__(self, recipe: ClassificationRecipe):
        super().__init__(recipe, recipe.create_model())
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
