"""What the spatial weights do in training: their means, how far they are from fixed ones, and where
ripples halt, after every epoch, over the same images each time."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from ripple_attention.modules import record_spatial_weights
from ripple_attention.spatial_weights import SpatialWeights
from ripple_lab.divergence import divergence_from_fixed
from ripple_lab.train.recorder import Recorder, Row, append, forget_after

RIPPLES = "ripples.jsonl"
IMAGES = 512  # that are looked at, where an evaluation has as many


def has_ripples(model: nn.Module) -> bool:
    """Whether a model has spatial weights."""
    return any(isinstance(module, SpatialWeights) for module in model.modules())


def halting_group(weights: Tensor, threshold: float) -> Tensor:
    """The group before which less than the threshold is left of the stick, G where none is: (…).

    Args:
        weights: (…, G), halted or not: what a ripple has left when it halts is the same.
        threshold: τ.

    >>> halting_group(torch.tensor([[0.5, 0.4995, 0.00025, 0.00025], [0.4, 0.3, 0.2, 0.1]]), 1e-3)
    tensor([2, 4])
    """
    left = 1 - weights.cumsum(-1)  # after each group
    return 1 + (left[..., :-1] >= threshold).long().cumprod(-1).sum(-1)


def profile(model: nn.Module, batches: Iterable[Any]) -> dict[str, Any]:
    """Of each ripple layer, means over all tokens of some batches.

    Args:
        model: Run as it is, without gradients.
        batches: Images, as it takes them.

    Returns:
        "weights" (layers, heads, G) as lists, "divergence" and "halting" by layer, and the number
        of "images".
    """
    thresholds = {
        name: module.halt_threshold
        for name, module in model.named_modules()
        if isinstance(module, SpatialWeights)
    }
    sums: dict[str, Any] = dict.fromkeys(thresholds, 0)
    images = 0
    training = model.training
    model.eval()
    try:
        # `forward` is never compiled, so that its layers are seen.
        with torch.no_grad(), record_spatial_weights(model) as recorded:
            for batch in batches:
                model.forward(batch)
                count = len(next(iter(recorded.values())))
                images += count
                for name, weights in recorded.items():
                    sums[name] += count * _means(weights.float(), thresholds[name])
    finally:
        model.train(training)
    means = [total / images for total in sums.values()]
    return {
        "weights": [mean[:, :-2].tolist() for mean in means],
        "divergence": [float(mean[:, -2].mean()) for mean in means],
        "halting": [float(mean[:, -1].mean()) for mean in means],
        "images": images,
    }


def _means(weights: Tensor, threshold: float) -> Tensor:
    """Over the tokens, by head: of (B, H, W, N, G) the weights, divergence and halting (N, G+2)."""
    divergence = divergence_from_fixed(weights).unsqueeze(-1)
    halting = halting_group(weights, threshold).unsqueeze(-1)
    return torch.cat([weights, divergence, halting], -1).mean((0, 1, 2))


def summary(line: Row) -> Row:
    """A line of `ripples.jsonl` as a row of the metrics: means over the layers, and each layer's
    divergence."""
    layers, halting = line["divergence"], line["halting"]
    return {
        "kind": "ripples",
        "step": line["step"],
        "epoch": line["epoch"],
        "groups": len(line["weights"][0][0]),
        "images": line["images"],
        "jsd": sum(layers) / len(layers),
        "halting_group": sum(halting) / len(halting),
        **{f"jsd/layer_{index}": value for index, value in enumerate(layers)},
    }


class RippleProfiles(pl.Callback):
    """Writes down the profiles of a model's ripples before training and after every epoch.

    All are means over the same evaluation images, as they are, spread over the set. A row of the
    metrics gets the mean divergence from fixed weights (also by layer) and the mean halting group;
    `ripples.jsonl` the mean weights of each layer, head and group.
    """

    def __init__(self, folder: Path, recorder: Recorder):
        self.path = folder / RIPPLES
        self._recorder = recorder

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            forget_after(self.path, trainer.global_step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 0:
            self._write(trainer, module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_last_batch:
            self._write(trainer, module)

    def _write(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.is_global_zero:
            return
        epoch = trainer.global_step / trainer.num_training_batches
        device = trainer.strategy.root_device
        batches = module.data.sample_loader(device, IMAGES)
        found = profile(
            module.model, (trainer.strategy.batch_to_device(batch)[0] for batch in batches)
        )
        line = {"step": trainer.global_step, "epoch": epoch, **found}
        self._recorder.write(summary(line))
        append(self.path, line)
