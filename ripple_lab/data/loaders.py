"""Batches for a run: the same order on any number of devices, and after resuming at any step."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ripple_lab.data.batch_augment import send
from ripple_lab.data.images import Images

# How many images are augmented at once: enough to fill a GPU and to hide launches.
IMAGES_AT_ONCE = 8192


class TrainBatches:
    """Indices of each step's images on one device; the last, incomplete batch is left out.

    Each epoch has its own order, drawn only from the seed and the epoch. Iteration starts at the
    batch that `step()` names, so a resumed run sees what the interrupted one did not.

    Args:
        count: Images of the data set.
        batch_size: Images of a step, over all devices.
        seed: Of the order.
        step: Steps made so far.
        rank, world: Which of how many devices.
        repeats: How often an epoch, no longer for it, shows an image.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        seed: int,
        step: Callable[[], int] = lambda: 0,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
    ):
        if count < batch_size:
            raise ValueError(
                f"an epoch needs at least one batch: {batch_size=}, and there are {count} images"
            )
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self.step, self.rank, self.world, self.repeats = step, rank, world, repeats

    def __len__(self) -> int:
        return self.count // self.batch_size

    def position(self) -> tuple[int, int]:
        """The epoch and the batch in it that come next."""
        return divmod(self.step(), len(self))

    def order(self, epoch: int) -> Tensor:
        """Indices of this device's images in an epoch: (batches, images of a batch)."""
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        order = torch.randperm(self.count, generator=generator).repeat_interleave(self.repeats)
        return self._share(order)

    def copies(self) -> Tensor:
        """The number of the copy, from 0, that each image of `order` is."""
        return self._share(torch.arange(self.repeats).repeat(self.count))

    def _share(self, order: Tensor) -> Tensor:
        """What this device has of an epoch: (batches, images of a batch)."""
        order = order[: len(self) * self.batch_size]
        return order.view(len(self), self.world, -1)[:, self.rank]

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = self.position()
        yield from self.order(epoch)[first:].tolist()


class SeededBatches:
    """Batches of indices, each with a seed of its own for the epoch and the copy."""

    def __init__(self, batches: TrainBatches):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, first = self.batches.position()
        for batch, copies in zip(self.batches, self.batches.copies()[first:], strict=True):
            pairs = zip(batch, copies.tolist(), strict=True)
            yield [(i, mix_seed(self.batches.seed, epoch, i, copy)) for i, copy in pairs]


class SeededItems(Dataset[Any]):
    """A data set whose augmentation draws from the seed that comes with each index.

    So the result is the same in every process, and after resuming at any step.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: tuple[int, int]) -> Any:
        index, seed = item
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        return self.dataset[index]


def evaluation_batches(
    count: int, batch_size: int, rank: int = 0, world: int = 1
) -> list[list[int]]:
    """Indices for evaluation: every image once, the same number of batches on every device."""
    if count < world:
        raise ValueError(f"{count} images cannot be shared by {world} devices")
    parts = math.ceil(count / (batch_size * world)) * world
    return [part.tolist() for part in torch.arange(count).tensor_split(parts)[rank::world]]


class Resumable:
    """Lightning asks resumable loaders for a state; ours needs none, because the step decides."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class ResumableDataLoader(Resumable, DataLoader):
    """Batches made image by image, in other processes; takes `TrainBatches`."""


class InMemoryLoader(Resumable):
    """Batches of images that are kept on the device and augmented there, many batches at a time.

    Args:
        data: The images, uint8.
        batches: Their order.
        device: Where they are kept.
        augment: uint8 (B, 3, H, W) and a generator on the CPU → float32 (B, 3, S, S).
    """

    def __init__(
        self,
        data: Images,
        batches: TrainBatches,
        device: torch.device,
        augment: Callable[[Tensor, torch.Generator], Tensor],
    ):
        self.images, self.labels = data.images.to(device), data.labels.to(device)
        self.batches, self.augment = batches, augment

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, first = self.batches.position()
        order = self.batches.order(epoch)
        at_once = max(1, IMAGES_AT_ONCE // order.shape[1])
        for number, chunk in enumerate(order.split(at_once)):
            skipped = min(max(0, first - number * at_once), len(chunk))
            if skipped == len(chunk):
                continue
            seed = mix_seed(self.batches.seed, epoch, number, self.batches.rank)
            generator = torch.Generator().manual_seed(seed)
            index = send(chunk.flatten(), self.images.device)
            images = self.augment(self.images[index], generator).unflatten(0, chunk.shape)
            labels = self.labels[index].view(chunk.shape)
            yield from zip(images[skipped:], labels[skipped:], strict=True)


class InMemoryEvaluationLoader:
    """Batches of images that are kept on the device, only normalised."""

    def __init__(
        self,
        data: Images,
        batches: Any,
        device: torch.device,
        normalize: Callable[[Tensor], Tensor],
    ):
        self.images, self.labels = data.images.to(device), data.labels.to(device)
        self.batches, self.normalize = batches, normalize

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.batches:
            index = send(torch.tensor(batch), self.images.device)
            yield self.normalize(self.images[index]), self.labels[index]


def mix_seed(*numbers: int) -> int:
    """One seed of several numbers ≥ 0: neighbours give unrelated seeds.

    >>> mix_seed(0, 1) == mix_seed(1, 0)
    False
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
