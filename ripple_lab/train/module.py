"""A model in training: optimiser, schedule, clipping and running mean, as Lightning takes them."""

import logging
import math
from collections.abc import Callable
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import torch
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from ripple_attention.feature_maps import FeatureMap
from ripple_lab.data.loaders import mix_seed
from ripple_lab.data.module import RecipeData
from ripple_lab.train.checkpoint import describe
from ripple_lab.train.graphs import NotRecordableError, StepGraph, why_eager
from ripple_lab.train.recipe import OptimizerSpec, Recipe

Metrics = dict[str, float | None]

_log = logging.getLogger(__name__)


def learning_rate(step: int, steps_per_epoch: int, epochs: int, spec: OptimizerSpec) -> float:
    """Linear from `warmup_lr` to `lr`; then a cosine down to `min_lr` at the last step, or a tenth
    after each of `drops`.

    >>> spec = OptimizerSpec(lr=1.0, warmup_lr=0.0, min_lr=0.0, warmup_epochs=2)
    >>> [round(learning_rate(step, 5, 4, spec), 2) for step in (0, 5, 10, 15, 20)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    >>> spec = OptimizerSpec(lr=1.0, warmup_epochs=0, drops=(2, 3))
    >>> [round(learning_rate(step, 5, 4, spec), 2) for step in (0, 9, 10, 14, 15)]
    [1.0, 1.0, 0.1, 0.1, 0.01]
    """
    warmup, total = spec.warmup_epochs * steps_per_epoch, epochs * steps_per_epoch
    if step < warmup:
        return spec.warmup_lr + (spec.lr - spec.warmup_lr) * step / warmup
    if spec.drops is not None:
        return spec.lr * 0.1 ** sum(step >= epoch * steps_per_epoch for epoch in spec.drops)
    done = (step - warmup) / max(1, total - warmup)
    return spec.min_lr + (spec.lr - spec.min_lr) * (1 + math.cos(math.pi * done)) / 2


def decay_groups(part: nn.Module, spec: OptimizerSpec) -> list[dict[str, Any]]:
    """Parameters without weight decay and with it. Biases, norms, those that the part names, and
    feature maps where the spec says so, have none, unless all have it."""
    if spec.decay_everything:
        trained = [parameter for parameter in part.parameters() if parameter.requires_grad]
        return [{"params": trained, "weight_decay": spec.weight_decay}]
    named: Any = getattr(part, "no_weight_decay", set)  # as timm's models have it
    without = set(named())
    if not spec.decay_feature_maps:
        for name, module in part.named_modules():
            if isinstance(module, FeatureMap):
                without |= {f"{name}.{parameter}" for parameter, _ in module.named_parameters()}
    return param_groups_weight_decay(part, spec.weight_decay, no_weight_decay_list=without)


class TrainedModule(pl.LightningModule):
    """Trains a recipe's network; a task adds its loss and its metrics.

    Args:
        recipe: What to train.
        model: Its network, with fresh weights.

    Attributes:
        HEADINGS: The metrics that a person looks at first, and how they are called in a table.
        DIGITS: Digits of a metric after the point.
        FIXED_SHAPES: Whether all batches have the same shapes.
        gradient_norm: Of the last step, before clipping.
        last_evaluation: Metrics of the last evaluation, if there was one.
    """

    HEADINGS: ClassVar[dict[str, str]]
    DIGITS: ClassVar[int]
    FIXED_SHAPES: ClassVar[bool]

    def __init__(self, recipe: Recipe, model: nn.Module):
        super().__init__()
        self.recipe: Any = recipe
        self.model = model
        self.data: Any = self.create_data()
        self.ema: ModelEmaV3 | None = None
        if recipe.ema_decay is not None:
            self.ema = ModelEmaV3(self.model, decay=recipe.ema_decay).requires_grad_(False)
        self.gradient_norm = torch.zeros(())
        self.last_evaluation: dict[str, Any] = {}
        self._graphs = False  # whether steps are to be replayed
        self._graph: StepGraph | None = None
        self._replayed = False  # the step being made

    def create_data(self) -> RecipeData:
        """The recipe's images, as this network takes them."""
        raise NotImplementedError

    def train_dataloader(self) -> Any:
        trainer = self.trainer
        return self.data.train_loader(
            trainer.strategy.root_device,
            lambda: trainer.global_step,
            trainer.global_rank,
            trainer.world_size,
        )

    def val_dataloader(self) -> Any:
        trainer = self.trainer
        return self.data.evaluation_loader(
            trainer.strategy.root_device, trainer.global_rank, trainer.world_size
        )

    def metrics(self) -> Metrics:
        """Results of the last evaluation, over all devices; then forgets it."""
        raise NotImplementedError

    def shown(self, metrics: dict[str, Any]) -> dict[str, str]:
        """What a person looks at first, by its heading."""
        return {
            heading: "–" if metrics[name] is None else f"{metrics[name]:.{self.DIGITS}f}"
            for name, heading in self.HEADINGS.items()
        }

    def predictors(self) -> dict[str, Any]:
        """What is evaluated, by the beginning of its metrics' names: weights, and their mean."""
        # `forward` is never compiled: evaluation is too short to pay for a second compilation.
        return {"": self.model.forward} | ({"ema_": self.ema.module} if self.ema else {})

    def on_train_start(self) -> None:
        machine, processes = self.recipe.hardware, self.trainer.world_size
        reason = why_eager(machine, self.device, processes, self.FIXED_SHAPES)
        self._graphs = reason is None
        if reason is not None and self.device.type == "cuda":  # elsewhere nobody expects graphs
            self._say_eager(reason)

    def _say_eager(self, reason: str) -> None:
        if self.trainer.is_global_zero:
            _log.warning("Steps are not replayed as CUDA graphs: %s.", reason)

    def loss_of_step(self, loss: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        """The loss of a batch; where steps are replayed, its gradients are made, too.

        Args:
            loss: The tensors of a batch → its loss.
            batch: Its tensors.
        """
        if self._graphs and self._graph is None:
            try:
                self._graph = StepGraph(self.model, loss, batch)
            except NotRecordableError as error:
                self._graphs = False
                self._say_eager(str(error))
        if self._graph is None or not self._graph.fits(batch):
            self._replayed = False
            return loss(*batch)
        self._replayed = True
        return self._graph(batch)

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not self._replayed:
            super().optimizer_zero_grad(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        if not self._replayed:
            super().backward(*args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Every step has seeds of its own: a resumed run draws what the broken one would have."""
        seed = mix_seed(self.recipe.seed, self.global_step, self.global_rank)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # timm's mixup draws from it

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.ema is not None:
            self.ema.update(self.model, step=self.global_step)

    def configure_gradient_clipping(
        self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any
    ) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.gradient_norm = nn.utils.get_total_norm(gradients)
        if self.recipe.optimizer.clip is not None:
            nn.utils.clip_grads_with_norm_(
                self.model.parameters(), self.recipe.optimizer.clip, self.gradient_norm
            )

    def parameter_groups(self) -> Any:
        """The model, or parts of it with learning rates or a weight decay of their own."""
        spec = self.recipe.optimizer
        if spec.decay_feature_maps and not spec.decay_everything:
            return self.model
        return decay_groups(self.model, spec)

    def configure_optimizers(self) -> Any:
        spec = self.recipe.optimizer
        options: dict[str, Any] = {}
        # With 16-mixed, Lightning leaves it to a fused optimizer to undo the scale of gradients.
        if self.device.type == "cuda" and self.recipe.hardware.precision != "16-mixed":
            options["fused"] = True
        optimizer = create_optimizer_v2(
            self.parameter_groups(),
            opt="adamw",
            lr=spec.lr,
            weight_decay=spec.weight_decay,
            **options,
        )
        steps = int(self.trainer.estimated_stepping_batches) // self.recipe.epochs
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: learning_rate(step, steps, self.recipe.epochs, spec) / spec.lr,
        )
        self._schedule = schedule
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def learning_rate_of_last_step(self) -> float:
        """What the step just made was made with: the schedule is one step ahead."""
        step = self.global_step - 1
        return self.recipe.optimizer.lr * self._schedule.lr_lambdas[0](step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["metadata"] = describe(self.recipe, self.data.classes)
