"""The data of a recipe, as Lightning takes it."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from ripple_attention.data.augment import eval_transform, train_transform
from ripple_attention.data.batch_augment import BatchAugmentation, normalize
from ripple_attention.data.cifar100 import load_cifar100
from ripple_attention.data.digits import load_digits_images
from ripple_attention.data.folders import SkipDamaged, check_same_classes, open_folder
from ripple_attention.data.images import Images
from ripple_attention.data.loaders import (
    EvaluationBatches,
    InMemoryEvaluationLoader,
    InMemoryLoader,
    ResumableDataLoader,
    SeededBatches,
    SeededItems,
    TrainBatches,
)
from ripple_attention.data.made_up import made_up_images
from ripple_attention.train.recipe import Recipe


class RecipeData(pl.LightningDataModule):
    """Training and evaluation images of a recipe.

    Args:
        recipe: Names the data and what is done to it.
        preprocessing: timm's data configuration of the model: input_size, mean, std, crop_pct,
            interpolation.
    """

    def __init__(self, recipe: Recipe, preprocessing: dict[str, Any]):
        super().__init__()
        self.recipe = recipe
        self.image_size = preprocessing["input_size"][-1]
        self.statistics = {"mean": preprocessing["mean"], "std": preprocessing["std"]}
        self.crop_pct = preprocessing["crop_pct"]
        self.interpolation = preprocessing["interpolation"]
        self._opened: dict[bool, Any] = {}

    def open(self, train: bool) -> Any:
        """The data set, `Images` in memory or one that decodes as it goes; opened once."""
        if train not in self._opened:
            data = open_data(self.recipe, train, self.image_size)
            if not self.recipe.data.in_memory:
                data = SkipDamaged(data, self.transform(train), train)
            self._opened[train] = data
        return self._opened[train]

    def transform(self, train: bool) -> Any:
        """What is done to an image where they are taken one by one."""
        if train:
            return train_transform(self.recipe.augmentation, self.image_size, **self.statistics)
        return eval_transform(
            self.image_size,
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            **self.statistics,
        )

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.open(train=False).classes)

    @property
    def damaged(self) -> int:
        """Images met so far that could not be decoded."""
        return sum(getattr(data, "damaged", 0) for data in self._opened.values())

    def setup(self, stage: str = "") -> None:
        """Finds out now what is missing, not in the middle of a run."""
        evaluation = self.open(train=False)
        if stage == "fit":
            check_same_classes(self.open(train=True), evaluation)

    def train_dataloader(self) -> Any:
        recipe, trainer = self.recipe, self.trainer
        assert trainer is not None
        data = self.open(train=True)
        batches = TrainBatches(
            len(data),
            recipe.batch_size,
            recipe.seed,
            step=lambda: trainer.global_step,
            rank=trainer.global_rank,
            world=trainer.world_size,
        )
        if recipe.data.in_memory:
            augment = BatchAugmentation(recipe.augmentation, self.image_size, **self.statistics)
            return InMemoryLoader(data, batches, trainer.strategy.root_device, augment)
        return ResumableDataLoader(
            SeededItems(data),
            batch_sampler=SeededBatches(batches),
            num_workers=recipe.hardware.workers,
            persistent_workers=recipe.hardware.workers > 0,
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )

    def val_dataloader(self) -> Any:
        recipe, trainer = self.recipe, self.trainer
        assert trainer is not None
        data = self.open(train=False)
        images = max(1, recipe.batch_size // trainer.world_size)
        batches = EvaluationBatches(len(data), images, trainer.global_rank, trainer.world_size)
        device = trainer.strategy.root_device
        if recipe.data.in_memory:
            return InMemoryEvaluationLoader(
                data, batches, device, partial(normalize, **self.statistics)
            )
        return torch.utils.data.DataLoader(
            data,
            batch_sampler=batches,
            num_workers=recipe.hardware.workers,
            pin_memory=device.type == "cuda",
        )


def open_data(recipe: Recipe, train: bool, image_size: int) -> Any:
    """The images of one split of a recipe's data set."""
    spec = recipe.data
    match spec.name:
        case "cifar100":
            data: Any = load_cifar100(spec.root, train, spec.download)
        case "digits":
            data = load_digits_images(train)
        case "made-up":
            data = made_up_images(spec.count, image_size, spec.num_classes, seed=int(train))
        case "imagenet":
            data = open_folder(spec.source, spec.root, train, spec.download)
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
