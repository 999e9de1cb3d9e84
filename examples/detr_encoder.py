"""Ripple attention in DETR's encoder: images of different sizes in one batch, padding masked.

Run it with: python examples/detr_encoder.py
"""

import torch
from torch import Tensor, nn

from ripple_attention import RippleAttention


class EncoderLayer(nn.Module):
    """DETR's layer; positions belong to queries and keys, not to values."""

    def __init__(self, dim: int = 64, num_heads: int = 4):
        super().__init__()
        self.attention = RippleAttention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x + positions, x, key_padding_mask=padding))
        return self.norm2(x + self.mlp(x))


def batch(images: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Puts features (H, W, C) of several sizes in one batch; the mask is True on padding."""
    H, W = (max(image.shape[side] for image in images) for side in (0, 1))
    x = torch.full((len(images), H, W, images[0].shape[-1]), torch.nan)  # so that leaks show
    padding = torch.ones(len(images), H, W, dtype=torch.bool)
    for i, image in enumerate(images):
        h, w, _ = image.shape
        x[i, :h, :w], padding[i, :h, :w] = image, False
    return x, padding


def main() -> None:
    torch.manual_seed(0)
    images = [torch.randn(h, w, 64) for h, w in ((25, 34), (34, 25), (20, 20))]
    positions = torch.randn(34, 34, 64)
    layer = EncoderLayer()
    x, padding = batch(images)
    together = layer(x, positions, padding)
    print(f"a batch of {tuple(x.shape)}, {padding.float().mean():.0%} of it padding")
    for i, image in enumerate(images):
        h, w, _ = image.shape
        alone = layer(image[None], positions[:h, :w], torch.zeros(1, h, w, dtype=torch.bool))[0]
        difference = (together[i, :h, :w] - alone).abs().max()
        print(f"image of {h}×{w} cells: alone and in the batch, results differ by {difference:.0e}")


if __name__ == "__main__":
    main()
