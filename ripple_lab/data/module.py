"""The data of a recipe: its splits, and the loaders of one device. Nothing here needs Lightning."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ripple_lab.data.augment import eval_transform, train_transform
from ripple_lab.data.batch_augment import BatchAugmentation, normalize
from ripple_lab.data.cifar100 import load_cifar100
from ripple_lab.data.digits import load_digits_images
from ripple_lab.data.folders import SkipDamaged, check_same_classes, open_folder
from ripple_lab.data.images import Images
from ripple_lab.data.loaders import (
    InMemoryEvaluationLoader,
    InMemoryLoader,
    ResumableDataLoader,
    SeededBatches,
    SeededItems,
    TrainBatches,
    evaluation_batches,
)
from ripple_lab.data.synthetic import synthetic_images


class RecipeData:
    """Training and evaluation images of a recipe, decoded one by one.

    Args:
        recipe: Names the data and the augmentation.
    """

    collate: Any = None  # items → a batch; PyTorch's own way unless said otherwise

    def __init__(self, recipe: Any):
        self.recipe = recipe
        self._opened: dict[bool, Any] = {}

    def open_split(self, train: bool) -> Any:
        """The items of one split: what a batch is made of."""
        raise NotImplementedError

    def open(self, train: bool) -> Any:
        """The items of one split, opened once."""
        if train not in self._opened:
            self._opened[train] = self.open_split(train)
        return self._opened[train]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.open(train=False).classes)

    @property
    def damaged(self) -> int:
        """How many images could not be decoded so far."""
        return sum(getattr(data, "damaged", 0) for data in self._opened.values())

    def setup(self, stage: str = "") -> None:
        """Finds out now whether anything is missing, not in the middle of a run."""
        evaluation = self.open(train=False)
        if stage == "fit":
            check_same_classes(self.open(train=True), evaluation)

    def train_loader(
        self,
        device: torch.device,
        step: Callable[[], int] = lambda: 0,
        rank: int = 0,
        world: int = 1,
    ) -> Any:
        """The batches of one device.

        Args:
            device: Where the model is.
            step: Steps made so far: the loader goes on from there.
            rank, world: Which of how many devices.
        """
        data, recipe = self.open(train=True), self.recipe
        repeats = getattr(recipe.augmentation, "repeats", 1)
        batches = TrainBatches(
            len(data), recipe.batch_size, recipe.seed, step, rank, world, repeats
        )
        return self._train_loader(data, batches, device)

    def _train_loader(self, data: Any, batches: TrainBatches, device: torch.device) -> Any:
        workers = self.recipe.hardware.workers
        return ResumableDataLoader(
            SeededItems(data),
            batch_sampler=SeededBatches(batches),
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
            collate_fn=self.collate,
        )

    def evaluation_loader(self, device: torch.device, rank: int = 0, world: int = 1) -> Any:
        """The batches of one device; every image is in one of them, once."""
        data = self.open(train=False)
        # With two images or more a batch, no device has an empty one; one by one, the last might.
        images = max(2, self.recipe.batch_size // world)
        batches = evaluation_batches(len(data), images, rank, world)
        return self._evaluation_loader(data, batches, device)

    def sample_loader(self, device: torch.device, count: int) -> Any:
        """Some evaluation images, the same ones each time, spread over the whole set."""
        data = self.open(train=False)
        count = min(count, len(data))
        chosen = [number * len(data) // count for number in range(count)]
        size = self.recipe.batch_size
        batches = [chosen[start : start + size] for start in range(0, count, size)]
        return self._evaluation_loader(data, batches, device)

    def _evaluation_loader(self, data: Any, batches: list[list[int]], device: torch.device) -> Any:
        return torch.utils.data.DataLoader(
            data,
            batch_sampler=batches,
            num_workers=self.recipe.hardware.workers,
            pin_memory=device.type == "cuda",
            collate_fn=self.collate,
        )


class ClassificationData(RecipeData):
    """Images with labels: decoded one by one, or all in memory.

    Args:
        recipe: Names the data and what is done to it.
        preprocessing: timm's data configuration of the model: input_size, mean, std, crop_pct,
            interpolation.
    """

    def __init__(self, recipe: Any, preprocessing: dict[str, Any]):
        super().__init__(recipe)
        self.image_size = preprocessing["input_size"][-1]
        self.statistics = {"mean": preprocessing["mean"], "std": preprocessing["std"]}
        self.crop_pct = preprocessing["crop_pct"]
        self.interpolation = preprocessing["interpolation"]

    def open_split(self, train: bool) -> Any:
        """`Images` in memory, or a data set that decodes as it goes."""
        data = open_data(self.recipe, train, self.image_size)
        return (
            data if self.recipe.data.in_memory else SkipDamaged(data, self.transform(train), train)
        )

    def transform(self, train: bool) -> Any:
        """The transform of images that are decoded one by one."""
        if train:
            return train_transform(self.recipe.augmentation, self.image_size, **self.statistics)
        return eval_transform(
            self.image_size,
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            **self.statistics,
        )

    def _train_loader(self, data: Any, batches: TrainBatches, device: torch.device) -> Any:
        if not self.recipe.data.in_memory:
            return super()._train_loader(data, batches, device)
        augment = BatchAugmentation(self.recipe.augmentation, self.image_size, **self.statistics)
        return InMemoryLoader(data, batches, device, augment)

    def _evaluation_loader(self, data: Any, batches: list[list[int]], device: torch.device) -> Any:
        if not self.recipe.data.in_memory:
            return super()._evaluation_loader(data, batches, device)
        return InMemoryEvaluationLoader(
            data, batches, device, partial(normalize, **self.statistics)
        )


def open_data(recipe: Any, train: bool, image_size: int) -> Any:
    """The images of one split of a recipe's data set."""
    spec = recipe.data
    match spec.name:
        case "cifar100":
            data: Any = load_cifar100(spec.root, train, spec.download)
        case "digits":
            data = load_digits_images(train)
        case "synthetic":
            data = synthetic_images(spec.count, image_size, spec.num_classes, seed=int(train))
        case "imagenet":
            data = open_folder(spec.source, spec.root, train, spec.download)
    if train and spec.limit is not None:
        data = first_images(data, spec.limit)
    if recipe.data.in_memory and not isinstance(data, Images):
        raise ValueError(
            f"in_memory is for small images of one size; {spec.name} is read image by image: "
            "use --data.no-in-memory"
        )
    if len(data.classes) != spec.num_classes:
        raise ValueError(
            f"the recipe says data.num_classes={spec.num_classes}; {spec.name} has "
            f"{len(data.classes)} classes"
        )
    if spec.in_memory and data.images.shape[-1] != image_size:
        raise ValueError(
            f"images in memory are not resized: the model takes {image_size} pixels a side "
            f"(model.image_size), {spec.name} has {data.images.shape[-1]}: use --data.no-in-memory"
        )
    return data


def first_images(data: Any, count: int) -> Images:
    """So many images from the first on; all of them where there are fewer."""
    if not isinstance(data, Images):
        raise ValueError(
            "data.limit is for CIFAR-100, digits and synthetic images; of class folders the first "
            "images would be of few classes: give it a smaller folder"
        )
    return Images(data.images[:count], data.labels[:count], data.classes)
