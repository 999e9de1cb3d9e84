"""The definition: every query meets every key. Quadratic, and what all else is held to."""

import torch
from torch import Tensor

from ripple_attention.ops.common import accumulation_dtype, safe_divide
from ripple_attention.partition import Partition


def ripple_naive(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, radii: list[int], eps: float
) -> Tensor:
    """Ripple attention by all pairs, differentiable by autograd.

        out_i = Σ_j α(i,j) (φq_i·φk_j) v_j / (Σ_j α(i,j) (φq_i·φk_j) + eps)

    Args:
        q, k: Mapped queries and keys (B, H, W, N, M); padded keys are zero.
        v: Values (B, H, W, N, E).
        spatial_weights: (B, H, W, N, G).
        radii: Bounds of the partition's groups (`Partition.bounds`).
        eps: Added to the denominator.

    Returns:
        (B, H, W, N, E), in the type of v.
    """
    queries, keys, values = (_heads_first(x) for x in (q, k, v))
    similarity = queries @ keys.mT  # (B, N, L, L)
    return _weighted_mean(similarity * _pair_weights(spatial_weights, radii), values, v, eps)


def ripple_naive_shared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    numerator: Tensor,
    total: Tensor,
    radii: list[int],
    eps: float,
) -> Tensor:
    """`ripple_naive` whose mean has one share more, as in `library.register_shared`."""
    queries, keys, values = (_heads_first(x) for x in (q, k, v))
    pairs = queries @ keys.mT * _pair_weights(spatial_weights, radii)
    own = pairs.sum(-1, keepdim=True) + eps  # (B, N, L, 1)
    alive = own != 0
    sums = torch.where(alive, pairs @ values, 0) + _heads_first(numerator)
    denominator = torch.where(alive, own, 0) + _heads_first(total.unsqueeze(-1))
    out = safe_divide(sums, denominator)
    return out.transpose(1, 2).reshape(v.shape).to(v.dtype)


ripple_naive.shared = ripple_naive_shared  # type: ignore[attr-defined]


def ripple_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    radii: list[int],
    key_padding_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Softmax attention with the bias log α, written as α·exp(score) so that α may be 0.

    Arguments as in `ripple_naive`, but q and k not mapped; the mask is (B, H, W), True = padded.
    """
    queries, keys, values = (_heads_first(x) for x in (q, k, v))
    scores = scale * (queries @ keys.mT)  # (B, N, L, L)
    negative = spatial_weights < 0  # of which log α is NaN
    weights = _pair_weights(spatial_weights.masked_fill(negative, torch.nan), radii)
    hidden = weights == 0
    if key_padding_mask is not None:
        hidden = hidden | key_padding_mask.flatten(1)[:, None, None, :]
    scores = scores.masked_fill(hidden, -torch.inf)
    largest = scores.amax(-1, keepdim=True).detach()
    scores = scores - largest.masked_fill(largest == -torch.inf, 0)
    return _weighted_mean(weights * scores.exp(), values, v)


def _pair_weights(spatial_weights: Tensor, radii: list[int]) -> Tensor:
    """The weight of every key for every query: (B, H, W, N, G) → (B, N, L, L)."""
    B, H, W, N, _ = spatial_weights.shape
    groups = Partition.from_bounds(radii).pair_groups((H, W), spatial_weights.device)  # (L, L)
    return _heads_first(spatial_weights).gather(-1, groups.expand(B, N, -1, -1))


def _weighted_mean(pairs: Tensor, values: Tensor, like: Tensor, eps: float = 0.0) -> Tensor:
    out = safe_divide(pairs @ values, pairs.sum(-1, keepdim=True) + eps)  # (B, N, L, E)
    return out.transpose(1, 2).reshape(like.shape).to(like.dtype)  # (B, H, W, N, E)


def _heads_first(x: Tensor) -> Tensor:
    x = x.flatten(1, 2).transpose(1, 2)  # (B, H, W, N, C) → (B, N, L, C)
    return x.to(accumulation_dtype(x))
