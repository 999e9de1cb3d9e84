"""What is known of the kernels by tiles without importing Triton: when a grid is one window."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Grids of up to so many tokens are one window: all pairs cost less than launches for a far part.
SINGLE_WINDOW_TOKENS = 384


def is_single_window(height: int, width: int, radii: Sequence[int]) -> bool:
    """Whether `tiled_triton` takes a grid as one window, with no far part."""
    return max(SINGLE_WINDOW_TOKENS, (8 + 2 * radii[-1]) ** 2) >= height * width


def far_sums_like(v: Tensor, num_features: int, radii: Sequence[int]) -> Tensor:
    """Room for what `tiled_triton` keeps of its far sum (see `kernels.far.split_state_kernel`)."""
    B, H, W, N, E = v.shape
    if is_single_window(H, W, radii):
        return v.new_empty(0)
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    return v.new_empty(B, N, 2 * E + 3, num_features, dtype=dtype)
