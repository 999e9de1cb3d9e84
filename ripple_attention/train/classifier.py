"""A classifier in training: loss, optimiser and schedule of a recipe, as Lightning takes them."""

import math
from typing import Any

import lightning.pytorch as pl
import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.data import Mixup, resolve_data_config
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from ripple_attention.data.loaders import mix_seed
from ripple_attention.models import MODELS  # makes our names known to timm, too
from ripple_attention.models.vit import RIPPLE_OPTIONS
from ripple_attention.train.checkpoint import describe
from ripple_attention.train.recipe import ModelSpec, OptimizerSpec, Recipe

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
        close = timm.list_models(f"*{name}*")[:5] or ["see `ripple models`"]
        raise ValueError(
            f"model.name must be known to timm; got {name!r}. Near: {', '.join(close)}"
        )
    if name in MODELS and MODELS[name]["attention"] != "ripple":
        unused = sorted(options.keys() & {"ripple_layers", *RIPPLE_OPTIONS})
        if unused:
            raise ValueError(f"{name} has no ripples: leave out model.{', model.'.join(unused)}")
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


def learning_rate(step: int, steps_per_epoch: int, epochs: int, spec: OptimizerSpec) -> float:
    """Linear from `warmup_lr` to `lr`, then a cosine down to `min_lr` at the last step.

    >>> spec = OptimizerSpec(lr=1.0, warmup_lr=0.0, min_lr=0.0, warmup_epochs=2)
    >>> [round(learning_rate(step, 5, 4, spec), 2) for step in (0, 5, 10, 15, 20)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    warmup, total = spec.warmup_epochs * steps_per_epoch, epochs * steps_per_epoch
    if step < warmup:
        return spec.warmup_lr + (spec.lr - spec.warmup_lr) * step / warmup
    done = (step - warmup) / max(1, total - warmup)
    return spec.min_lr + (spec.lr - spec.min_lr) * (1 + math.cos(math.pi * done)) / 2


class Classifier(pl.LightningModule):
    """Trains and evaluates a recipe's network.

    Args:
        recipe: What to train.

    Attributes:
        gradient_norm: Of the last step, before clipping.
        last_evaluation: Metrics of the last evaluation, if there was one.
    """

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.recipe = recipe
        self.model = create_model(recipe.model, recipe.data.num_classes)
        self.ema: ModelEmaV3 | None = None
        if recipe.ema_decay is not None:
            self.ema = ModelEmaV3(self.model, decay=recipe.ema_decay).requires_grad_(False)
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
        self.accuracies = nn.ModuleDict(
            {name: self._accuracies() for name in ("weights", *(["ema"] if self.ema else []))}
        )
        self.gradient_norm = torch.zeros(())
        self.last_evaluation: dict[str, Any] = {}

    def _accuracies(self) -> nn.ModuleDict:
        classes = self.recipe.data.num_classes
        return nn.ModuleDict(
            {
                f"top{k}": MulticlassAccuracy(
                    classes, top_k=min(k, classes), average="micro", ignore_index=-1
                )
                for k in (1, 5)
            }
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Every step has seeds of its own: a resumed run draws what the broken one would have."""
        seed = mix_seed(self.recipe.seed, self.global_step, self.global_rank)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # timm's mixup draws from it

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        if self.mixup is None:
            logits = self.model(images).float()
            return F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        images, targets = self.mixup(images, labels)
        return SoftTargetCrossEntropy()(self.model(images).float(), targets)

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

    def configure_optimizers(self) -> Any:
        spec = self.recipe.optimizer
        optimizer = create_optimizer_v2(
            self.model, opt="adamw", lr=spec.lr, weight_decay=spec.weight_decay
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
        checkpoint["metadata"] = describe(self.recipe, self.trainer.datamodule.classes)  # type: ignore[attr-defined]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        # `forward` is never compiled: evaluation is too short to pay for a second compilation.
        logits = {"weights": self.model.forward(images)}
        if self.ema is not None:
            logits["ema"] = self.ema.module(images)
        for name, accuracies in self.accuracies.items():
            for accuracy in accuracies.values():  # type: ignore[operator]
                accuracy.update(logits[name].float(), labels)

    def accuracy(self) -> dict[str, float]:
        """Top-1 and top-5 of the last evaluation in percent, over all devices; then forgets it."""
        results = {}
        for name, accuracies in self.accuracies.items():
            for kind, accuracy in accuracies.items():  # type: ignore[operator]
                label = kind if name == "weights" else f"{name}_{kind}"
                results[label] = 100 * float(accuracy.compute())
                accuracy.reset()
        return results
