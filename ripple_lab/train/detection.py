"""What a recipe of detection decides beside what all recipes do."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from ripple_lab.checks import at_least
from ripple_lab.detection.spec import (
    DetectionAugmentation,
    DetectionDataSpec,
    DetectorSpec,
    LossWeights,
)
from ripple_lab.train.recipe import OptimizerSpec, Recipe


@dataclass(frozen=True)
class DetectionOptimizerSpec(OptimizerSpec):
    """As of classifiers; the backbone, which is trained already, has a learning rate of its own."""

    lr: float = 1e-4
    """The largest learning rate."""
    backbone_lr: float = 1e-5
    """That of the backbone; it rises and falls as the other does."""
    warmup_epochs: int = 0
    """Epochs until the largest."""
    weight_decay: float = 1e-4
    """Of AdamW."""
    decay_everything: bool = True
    """Whether weight decay is also on biases and norms, as DETR has it."""
    clip: float | None = 0.1
    """Largest norm of the gradient; None for no clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, backbone_lr=self.backbone_lr)


@dataclass(frozen=True)
class DetectionRecipe(Recipe):
    """Everything that decides the result of training a detector."""

    task: ClassVar[str] = "detection"

    model: DetectorSpec = field(default_factory=DetectorSpec)
    data: DetectionDataSpec = field(default_factory=DetectionDataSpec)
    augmentation: DetectionAugmentation = field(default_factory=DetectionAugmentation)
    optimizer: DetectionOptimizerSpec = field(default_factory=DetectionOptimizerSpec)
    loss: LossWeights = field(default_factory=LossWeights)
    epochs: int = 50
    """Passes over the training pictures."""
    batch_size: int = 16
    """Pictures of a step, over all devices."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.data.evaluation_scale or 1) > self.augmentation.max_size:
            raise ValueError(
                "data.evaluation_scale must not exceed augmentation.max_size; got "
                f"{self.data.evaluation_scale} and {self.augmentation.max_size}"
            )
        if self.hardware.compile:
            raise ValueError(
                "hardware.compile is for classifiers: pictures of many sizes would be compiled "
                "again and again; leave it out"
            )

    def _create_model(self) -> Any:
        from ripple_lab.detection.model import create_detector

        spec = self.model
        return create_detector(
            spec.name,
            num_classes=self.data.num_classes,
            pretrained_backbone=spec.pretrained_backbone,
            fixed_stages=spec.fixed_stages,
            stages=spec.stages,
            num_queries=spec.queries,
            encoder_layers=spec.encoder_layers,
            decoder_layers=spec.decoder_layers,
            dim=spec.width,
            num_heads=spec.heads,
            feedforward_dim=spec.feedforward,
            dropout=spec.dropout,
            **spec.attention_options(),
        )

    def create_module(self) -> Any:
        from ripple_lab.train.detector import DetectorTraining

        return DetectorTraining(self)

    def without_start(self) -> Self:
        return replace(self, model=replace(self.model, pretrained_backbone=False))

    def smoke_run(self) -> Self:
        """A small one of its own kind from random weights, on small pictures of shapes."""
        short, model = super().smoke_run(), self.model
        small = replace(
            model,
            pretrained_backbone=False,
            stages=min(3, model.stages),
            queries=min(20, model.queries),
            encoder_layers=min(2, model.encoder_layers),
            decoder_layers=min(2, model.decoder_layers),
        )
        data = DetectionDataSpec(
            "shapes", num_classes=3, evaluation_scale=64, count=2 * short.batch_size
        )
        return replace(
            short,
            model=small,
            data=replace(data, evaluation_count=short.batch_size),
            augmentation=DetectionAugmentation(
                scales=(64, 96), max_size=128, crop_scales=(96,), crop_sizes=(48, 96)
            ),
        )
