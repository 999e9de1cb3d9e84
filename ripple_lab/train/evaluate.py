"""Trained models at work: results on a data set, classes or objects of a picture."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from ripple_lab.data.augment import eval_transform
from ripple_lab.data.images import DataError
from ripple_lab.detection.evaluation import find_objects
from ripple_lab.detection.items import make_target
from ripple_lab.detection.transforms import evaluation_transform
from ripple_lab.train.checkpoint import CheckpointError, read_model
from ripple_lab.train.network import preprocessing
from ripple_lab.train.recipe import Recipe
from ripple_lab.train.weights import misfit

if TYPE_CHECKING:
    from ripple_lab.train.module import Metrics


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        images: How many were judged.
        damaged: How many could not be decoded.
        metrics: By the names that they have in a run's `result.json`.
        shown: Those that a person looks at first, as a table shows them.
    """

    images: int
    damaged: int
    metrics: "Metrics"
    shown: dict[str, str]


def evaluate(path: Path, recipe: Recipe, console: Console | None = None) -> Evaluation:
    """Judges the weights in a file on the test images of a recipe.

    Args:
        path: Of the weights.
        recipe: Its data are used, on its hardware.
        console: Where progress is shown; nowhere unless given.
    """
    from ripple_lab.train.progress import EvaluationProgress
    from ripple_lab.train.run import create_trainer

    weights, _, classes = read_model(path)
    module = replace(recipe, ema_decay=None).without_start().create_module()
    load(module.model, weights, path)
    data = module.data
    if data.classes != classes:
        raise DataError(
            f"{path} was trained on other classes ({', '.join(classes[:3])}, …) than those of the "
            f"images in {recipe.data.root} ({', '.join(data.classes[:3])}, …)"
        )
    trainer = create_trainer(recipe, [EvaluationProgress(console)] if console else [])
    trainer.validate(module, verbose=False)
    metrics = module.metrics()
    count = len(data.open(train=False)) - data.damaged
    return Evaluation(count, data.damaged, metrics, module.shown(metrics))


class Trained:
    """A model with its weights, ready to be asked.

    Args:
        path: A file of weights as `ripple train` writes it.
        device: Where to compute.

    Attributes:
        recipe: What it was trained by.
        classes: The name of each label.
    """

    def __init__(self, path: Path, device: str = "cpu"):
        weights, self.recipe, self.classes = read_model(path)
        self.device = device
        self.model: torch.nn.Module = self.recipe.without_start().create_model()
        load(self.model, weights, path)
        self.model.to(device).eval()


class Predictor(Trained):
    """Names the classes of pictures."""

    def __init__(self, path: Path, device: str = "cpu"):
        super().__init__(path, device)
        config = preprocessing(self.model)
        self.transform = eval_transform(
            config["input_size"][-1],
            mean=config["mean"],
            std=config["std"],
            crop_pct=config["crop_pct"],
            interpolation=config["interpolation"],
        )

    @torch.inference_mode()
    def __call__(self, image: Image.Image) -> list[tuple[str, float]]:
        """All classes with their probabilities, the most likely first."""
        logits = self.model(self.transform(image).unsqueeze(0).to(self.device))
        probabilities, order = logits.float().softmax(-1)[0].sort(descending=True)
        return [
            (self.classes[i], p)
            for i, p in zip(order.tolist(), probabilities.tolist(), strict=True)
        ]


class ObjectFinder(Trained):
    """Finds the objects in pictures."""

    def __init__(self, path: Path, device: str = "cpu"):
        super().__init__(path, device)
        self.transform = evaluation_transform(
            self.recipe.data.evaluation_scale, self.recipe.augmentation.max_size
        )

    @torch.inference_mode()
    def __call__(self, image: Image.Image) -> dict[str, Tensor]:
        """The likeliest objects, the likeliest first.

        Returns:
            "scores" (k,), "labels" (k,) and "boxes" (k, 4), left, top, right and bottom in pixels
            of the picture.
        """
        size = (image.height, image.width)
        pixels, _ = self.transform(image, make_target([], [], 0, size))
        return find_objects(self.model([pixels.to(self.device)]), [size])[0]


def load(model: torch.nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Puts weights into the model they were trained in."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = misfit(model.state_dict(), weights) or str(error).splitlines()[-1].strip()
        raise CheckpointError(
            f"{path} does not fit the model that its recipe names; weights: {reason}. Take the "
            "file as `ripple train` or `ripple pack` wrote it"
        ) from None
    if broken := [name for name, x in weights.items() if not x.isfinite().all()]:
        raise CheckpointError(
            f"{path} holds infinities or NaN, in {broken[0]} and {len(broken) - 1} others, so what "
            "it says means nothing: take another checkpoint"
        )
