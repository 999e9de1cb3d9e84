"""Sine positions on the grid of each image, independent of padding."""

import math

import torch
from torch import Tensor


def padding_mask(cells: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """True where a grid lies outside its image.

    Args:
        cells: (B, 2): rows and columns of each image, at the top left of the grid.
        grid_size: (H, W).

    Returns:
        Bool (B, H, W).
    """
    rows, columns = _indices(grid_size, cells.device)
    height, width = cells[:, :, None, None].unbind(1)  # each (B, 1, 1)
    return (rows >= height) | (columns >= width)


def sine_positions(
    cells: Tensor, grid_size: tuple[int, int], dim: int, *, temperature: float = 10_000
) -> Tensor:
    """DETR's positions: sines and cosines of the row, then of the column, as parts of the image.

    Row i of h has the angle 2π·(i+1)/h. Of the dim/2 channels for rows, channel c holds the sine
    (c even) or cosine (c odd) of that angle ÷ temperature^(2⌊c/2⌋ ÷ (dim/2)). The other dim/2 are
    the same for columns. Padding does not change a cell's position.

    Args:
        cells: (B, 2): rows and columns of each image, at the top left of the grid.
        grid_size: (H, W).
        dim: Channels, divisible by 4.
        temperature: As above.

    Returns:
        (B, H, W, dim), float32.
    """
    if dim % 4:
        raise ValueError(f"sine positions need channels divisible by 4; got {dim=}")
    B, (H, W), half = len(cells), grid_size, dim // 2
    rates = temperature ** -(torch.arange(0, half, 2, device=cells.device) / half)  # (dim/4,)
    parts = []
    for axis, index in enumerate(_indices(grid_size, cells.device)):
        share = (index + 1) / cells[:, axis, None, None]  # (B, H, 1) or (B, 1, W)
        angles = 2 * math.pi * share[..., None] * rates
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)
        parts.append(waves.expand(B, H, W, half))
    return torch.cat(parts, -1)


def _indices(grid_size: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows (H, 1) and columns (1, W), counted from 0."""
    H, W = grid_size
    rows, columns = torch.arange(H, device=device), torch.arange(W, device=device)
    return rows[:, None], columns[None, :]
