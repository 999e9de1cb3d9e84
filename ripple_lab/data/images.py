"""Small images of one size, all of them in memory."""

from dataclasses import dataclass

from PIL import Image
from torch import Tensor


class DataError(RuntimeError):
    """Data is missing or damaged. The message says what was wanted, where, and how to get it."""


@dataclass(frozen=True)
class Images:
    """A data set in memory; an item is a picture and its label.

    Attributes:
        images: uint8 (L, 3, H, W).
        labels: int64 (L,).
        classes: The name of each label.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        pixels = self.images[index].permute(1, 2, 0).contiguous()  # (H, W, 3)
        return Image.fromarray(pixels.numpy()), int(self.labels[index])
