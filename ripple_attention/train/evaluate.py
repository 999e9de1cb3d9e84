"""Trained models at work: accuracy on a data set, classes of a picture."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ripple_attention.data.augment import eval_transform
from ripple_attention.data.images import DataError
from ripple_attention.data.module import RecipeData
from ripple_attention.train.checkpoint import CheckpointError, read_description, read_weights
from ripple_attention.train.classifier import Classifier, create_model, preprocessing
from ripple_attention.train.recipe import Recipe


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in percent."""

    images: int
    top1: float
    top5: float
    damaged: int


def evaluate(path: Path, recipe: Recipe) -> Evaluation:
    """Accuracy of the weights in a file on the test images of a recipe."""
    from ripple_attention.train.run import create_trainer

    weights, _ = read_weights(path)
    _, classes = read_description(path)
    module = Classifier(replace(recipe, ema_decay=None))
    load(module.model, weights, path)
    data = RecipeData(recipe, preprocessing(module.model))
    if data.classes != classes:
        raise DataError(
            f"{path} was trained on other classes ({', '.join(classes[:3])}, …) than those of the "
            f"images in {recipe.data.root} ({', '.join(data.classes[:3])}, …)"
        )
    trainer = create_trainer(recipe, [])
    trainer.validate(module, data, verbose=False)
    accuracy = module.accuracy()
    count = len(data.open(train=False)) - data.damaged
    return Evaluation(count, accuracy["top1"], accuracy["top5"], data.damaged)


class Predictor:
    """Names the classes of pictures.

    Args:
        path: A file of weights as `ripple train` writes it.
        device: Where to compute.
    """

    def __init__(self, path: Path, device: str = "cpu"):
        recipe, self.classes = read_description(path)
        weights, _ = read_weights(path)
        self.model = create_model(recipe.model, recipe.data.num_classes).to(device).eval()
        load(self.model, weights, path)
        config = preprocessing(self.model)
        self.transform = eval_transform(
            config["input_size"][-1],
            mean=config["mean"],
            std=config["std"],
            crop_pct=config["crop_pct"],
            interpolation=config["interpolation"],
        )
        self.device = device

    @torch.inference_mode()
    def __call__(self, image: Image.Image) -> list[tuple[str, float]]:
        """All classes with their probabilities, the most likely first."""
        logits = self.model(self.transform(image).unsqueeze(0).to(self.device))
        probabilities, order = logits.float().softmax(-1)[0].sort(descending=True)
        return [
            (self.classes[i], p)
            for i, p in zip(order.tolist(), probabilities.tolist(), strict=True)
        ]


def load(model: torch.nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Puts weights into the model they were trained in."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise CheckpointError(
            f"{path} does not fit the model that its recipe names: {reason} …"
        ) from None


def open_image(path: Path) -> Image.Image:
    """A picture in colour, upright."""
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as a picture: {error}") from None
