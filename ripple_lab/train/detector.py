"""A detector in training: its network, loss and average precision."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ripple_lab.detection.data import DetectionData
from ripple_lab.detection.evaluation import CocoEvaluation, find_objects
from ripple_lab.detection.loss import DetectionLoss, count_objects
from ripple_lab.detection.matching import Outputs, Target
from ripple_lab.train.detection import DetectionRecipe
from ripple_lab.train.module import Metrics, TrainedModule, decay_groups

SAID = ("logits", "boxes")
PARTS = ("focal", "l1", "giou")
Batch = tuple[list[Tensor], list[Target]]


class DetectorTraining(TrainedModule):
    """Trains and evaluates a recipe's detector.

    Args:
        recipe: What to train.
    """

    HEADINGS = {  # noqa: RUF012
        "ap": "AP",
        "ap50": "AP50",
        "ap75": "AP75",
        "ap_small": "AP_S",
        "ap_medium": "AP_M",
        "ap_large": "AP_L",
    }
    DIGITS = 3
    FIXED_SHAPES = False

    def __init__(self, recipe: DetectionRecipe):
        super().__init__(recipe, recipe.create_model())
        self.loss = DetectionLoss(recipe.loss)
        self.evaluations: dict[str, CocoEvaluation] = {}

    def create_data(self) -> DetectionData:
        return DetectionData(self.recipe)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The backbone, with a learning rate of its own, and the rest."""
        spec, parts = self.recipe.optimizer, dict(self.model.named_children())
        rates = [(parts.pop("backbone"), spec.backbone_lr), (nn.ModuleDict(parts), spec.lr)]
        return [
            group | {"lr": rate}
            for part, rate in rates
            for group in decay_groups(part, spec)
            if group["params"]
        ]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        images, targets = batch
        outputs: Outputs = self.model(images)  # type: ignore[assignment]
        layers = (outputs, *outputs["auxiliary"])
        total = torch.stack([layer[name].float().sum() for layer in layers for name in SAID]).sum()
        if not total.isfinite():
            # Nothing can be matched. The recorder stops the run and names the step.
            count_objects(targets, self.device)  # other processes wait for it
            return {"loss": total * math.nan} | {name: total.detach() for name in PARTS}
        return self.loss(outputs, targets)

    def on_validation_epoch_start(self) -> None:
        truth = self.data.ground_truth()
        self.evaluations = {prefix: CocoEvaluation(truth) for prefix in self.predictors()}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, targets = batch
        sizes = [target["size"] for target in targets]
        for prefix, predict in self.predictors().items():
            self.evaluations[prefix].update(find_objects(predict(images), sizes), targets)

    def metrics(self) -> Metrics:
        """Average precision, between 0 and 1; None where no picture has an object of that size."""
        found: Metrics = {}
        for prefix, evaluation in self.evaluations.items():
            for name, value in evaluation.compute().items():
                found[prefix + name] = None if math.isnan(value) else value
        self.evaluations = {}
        return found
