"""What every algorithm shares: types of sums, division by nothing, padding, work in parts.

What is not finite stays so. Where the definition (`ops.naive`) gives an infinity or NaN for an
infinity or NaN in q, k, v or the weights, every algorithm gives one or the other, forward and
backward; gradients of an algorithm with a sum over the image may hold more of them. Where finite
inputs overflow a sum, results that hold it are not finite either, never 0: which sums there are is
each algorithm's own. Only a denominator of 0, finite as it is, gives 0; and padded keys and values
give nothing.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from ripple_attention.partition import Partition


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """The type of all sums: float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that autocast asks for on the device of x, or None where it is off."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def autocast_unites(x: Tensor, y: Tensor) -> bool:
    """Whether autocast gives both one type where they meet: it casts no float64."""
    return autocast_dtype(y) is not None and torch.float64 not in (x.dtype, y.dtype)


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Keeps autocast out of a block of code that works on x."""
    if autocast_dtype(x) is None:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def heads_first(x: Tensor) -> Tensor:
    """(B, H, W, N, C) → (B, N, H, W, C), in the type of sums."""
    return x.to(accumulation_dtype(x)).permute(0, 3, 1, 2, 4)


def safe_divide(numerator: Tensor | float, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the denominator is 0, with zero gradients there too.

    A subnormal denominator counts as 0: its inverse would overflow. An infinite one gives NaN: it
    is a sum that overflowed, and x/∞ would be a 0 that looks right.
    """
    size = denominator.abs()
    empty = size < torch.finfo(denominator.dtype).tiny
    denominator = torch.where(empty, 1, denominator).masked_fill(size == torch.inf, torch.nan)
    return torch.where(empty, 0, numerator / denominator)


def flush_cancellation(denominator: Tensor, magnitude: Tensor, units: int = 16) -> Tensor:
    """The denominator, or 0 where it is no more than the rounding of what it is a difference of.

    Where eps lifts it above that, the rounding of the numerator is divided by more, and stays. NaN
    where that has overflowed: nothing is known of the difference then.

    Args:
        denominator: A difference of sums, and eps; without eps, zero in exact arithmetic where a
            query sees nothing.
        magnitude: The size of those sums.
        units: How many times the precision of that size their rounding may be.
    """
    rounding = units * torch.finfo(denominator.dtype).eps * magnitude
    flushed = denominator.masked_fill(denominator.abs() <= rounding, 0)
    return flushed.masked_fill(rounding == torch.inf, torch.nan)


def parts(v: Tensor, numbers_per_head: int, budget: int) -> Iterator[tuple[slice, ...]]:
    """Cuts (B, H, W, N, …) into pieces whose scratch memory stays within a budget.

    Whole images come together while they fit, else the heads of one image, else single heads.

    Args:
        v: Any tensor (B, H, W, N, …).
        numbers_per_head: Scratch numbers that one head of one image needs.
        budget: Scratch numbers that a piece may need.

    Yields:
        Indices for the first four dimensions.
    """
    batch, heads = v.shape[0], v.shape[3]
    fitting = max(1, budget // max(1, numbers_per_head))
    images, heads_at_once = max(1, fitting // heads), min(heads, fitting)
    for b in range(0, batch, images):
        for n in range(0, heads, heads_at_once):
            every = slice(None)
            yield slice(b, b + images), every, every, slice(n, n + heads_at_once)


def without_padding(k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Padding is φ(k) = 0; v too, so that whatever stands there (NaN even) stays there."""
    padded = mask[..., None, None]
    return k.masked_fill(padded, 0), v.masked_fill(padded, 0)


def drop_empty_groups(
    spatial_weights: Tensor, partition: Partition, key_padding_mask: Tensor | None
) -> Tensor:
    """Sets the weight of a group to 0 for queries that have no key in it.

    It changes nothing in exact arithmetic. In floating point it spares small or padded grids the
    difference of two equal sums, which is nothing but rounding.
    """
    _, H, W, _, _ = spatial_weights.shape
    if key_padding_mask is None:
        if partition.extent < max(H // 2, W // 2):
            return spatial_weights  # even from the middle, some token is in each group
        keys = torch.ones(1, H, W, dtype=torch.int64, device=spatial_weights.device)
    else:
        keys = (~key_padding_mask).long()
    table = F.pad(keys.cumsum(1).cumsum(2), (1, 0, 1, 0))  # ([B,] H+1, W+1)
    (top, bottom), (left, right) = (_box_edges(size, partition, keys.device) for size in (H, W))
    top, bottom = top[:, None], bottom[:, None]  # (H, 1, G−1)
    boxes = table[:, bottom, right] - table[:, top, right]
    boxes = boxes - table[:, bottom, left] + table[:, top, left]  # ([B,] H, W, G−1)
    everything = table[:, -1:, -1:, None].expand(-1, H, W, -1)
    counts = torch.cat([boxes, everything], -1).diff(dim=-1, prepend=torch.zeros_like(everything))
    return spatial_weights.masked_fill((counts == 0).unsqueeze(3), 0)


def _box_edges(size: int, partition: Partition, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first cell and the one behind the last of each cell's boxes on an axis: (size, G−1)."""
    centre = torch.arange(size, device=device)[:, None]
    radii = partition.box_radii(device)
    start, stop = centre - radii, centre + radii + 1
    if partition.tile:
        tile = centre // partition.tile
        radii = Partition(partition.tile_radii).box_radii(device)
        start = torch.cat([start, (tile - radii) * partition.tile], 1)
        stop = torch.cat([stop, (tile + radii + 1) * partition.tile], 1)
    return start.clamp(min=0), stop.clamp(max=size)
