"""What a classifier saw: the ripples of every layer, and the resulting attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ripple_attention.modules import GridAttention, RippleAttention
from ripple_lab.data.pictures import in_colour
from ripple_lab.inspection.views import AS_TRAINED, LayerView, Settings, record_attention
from ripple_lab.text import check_names


@dataclass(frozen=True)
class Explanation:
    """A picture, its predicted classes, and how every layer looked at it.

    Attributes:
        picture: As the model saw it, (3, height, width) between 0 and 1.
        classes: Every class with its probability, the most likely first.
        layers: One view for each attention layer, in order; B = 1.
    """

    picture: Tensor
    classes: list[tuple[str, float]]
    layers: list[LayerView]

    @property
    def grid_size(self) -> tuple[int, int]:
        return self.layers[0].grid_size

    @property
    def ripples(self) -> list[LayerView]:
        """The ripple layers."""
        return [view for view in self.layers if view.weights is not None]


class Explainer:
    """Looks at pictures through a classifier.

    Args:
        model: Any network with attention layers of this package, in evaluation mode.
        classes: The names of its classes.
        transform: From a picture to what the model takes (3, height, width).
        mean, std: Of each colour, by which the transform normalises.
        device: Where to compute.
    """

    def __init__(
        self,
        model: nn.Module,
        classes: Sequence[str],
        transform: Callable[[Image.Image], Tensor],
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: str = "cpu",
    ):
        self.model = model.to(device).eval()
        self.classes, self.transform = tuple(classes), transform
        self.mean, self.std = (torch.tensor(x).view(3, 1, 1) for x in (mean, std))
        self.device = device
        self._lock = Lock()  # recording changes the model for a moment

    @classmethod
    def from_checkpoint(cls, path: Path, *, ema: bool = False, device: str = "cpu") -> "Explainer":
        """From a file of weights or the folder of a run, as `ripple predict` takes them."""
        from ripple_lab.train.checkpoint import find_weights, read_description
        from ripple_lab.train.evaluate import Predictor

        file = find_weights(path, ema)
        recipe, _ = read_description(file)
        task = getattr(recipe, "task", "classification")
        if task != "classification":
            raise ValueError(
                f"{file} was trained for {task}; only classifiers can be explained so far"
            )
        predictor = Predictor(file, device)
        return cls.from_model(predictor.model, predictor.classes, device=device)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        classes: Sequence[str] | None = None,
        *,
        device: str = "cpu",
    ) -> "Explainer":
        """From a model of timm's kind; classes are numbered unless named."""
        from ripple_lab.data.augment import eval_transform
        from ripple_lab.train.network import preprocessing

        config = preprocessing(model)
        statistics = {name: config[name] for name in ("mean", "std")}
        transform = eval_transform(
            config["input_size"][-1],
            crop_pct=config["crop_pct"],
            interpolation=config["interpolation"],
            **statistics,
        )
        count: Any = getattr(model, "num_classes", 0)
        names = [f"class {i}" for i in range(count)] if classes is None else classes
        return cls(model, names, transform, device=device, **statistics)

    @property
    def max_distance(self) -> int:
        """The largest R_max of the layers; 0 without ripple layers."""
        layers = [m for m in self.model.modules() if isinstance(m, RippleAttention)]
        return max((layer.partition.reach + 1 for layer in layers), default=0)

    @property
    def halt_threshold(self) -> float:
        """τ of the first ripple layer."""
        layers = (m for m in self.model.modules() if isinstance(m, RippleAttention))
        return next((layer.spatial_weights.halt_threshold for layer in layers), 0.0)

    @property
    def image_size(self) -> int:
        """The side in pixels of the images that the model is made for."""
        from ripple_lab.train.network import preprocessing

        return preprocessing(self.model)["input_size"][-1]

    @property
    def num_layers(self) -> int:
        """How many attention layers there are to see."""
        return sum(isinstance(module, GridAttention) for module in self.model.modules())

    def record(
        self,
        images: Tensor,
        settings: Settings = AS_TRAINED,
    ) -> tuple[Tensor, list[LayerView]]:
        """Logits, and a view of every layer, of prepared images (B, 3, height, width)."""
        asked, largest = settings.max_distance, self.max_distance
        if asked is not None and not 1 <= asked <= largest:
            raise ValueError(
                f"max_distance may be 1 to {largest}, what the model was trained with: it has no "
                f"sticks for rings beyond; got {asked}"
            )
        with self._lock, torch.no_grad(), record_attention(self.model, settings) as views:
            logits = self.model(images.to(self.device))
        return logits.float(), list(views.values())

    def __call__(
        self,
        image: Image.Image | Tensor,
        settings: Settings = AS_TRAINED,
    ) -> Explanation:
        """Explains a picture, or an image (3, height, width) as the transform prepares them."""
        prepared = image if isinstance(image, Tensor) else self.transform(in_colour(image))
        logits, views = self.record(prepared.unsqueeze(0), settings)
        check_names(self.classes, logits.shape[-1], f"the list for {type(self.model).__name__}")
        probabilities, order = logits.softmax(-1)[0].sort(descending=True)
        pairs = zip(order.tolist(), probabilities.tolist(), strict=True)
        picture = (prepared.cpu() * self.std + self.mean).clamp(0, 1)
        return Explanation(picture, [(self.classes[i], p) for i, p in pairs], views)
