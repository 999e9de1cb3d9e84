"""How far spatial weights are from the fixed ones: the Jensen–Shannon divergence."""

import torch
from torch import Tensor

from ripple_attention.spatial_weights import fixed_weights


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """The Jensen–Shannon divergence of two distributions, in nats.

        JSD(p, q) = S(m) − (S(p) + S(q))/2,    m = (p + q)/2,    S(x) = −Σ x log x

    It is symmetric, 0 for equal distributions and log 2 for disjoint ones. The paper does not name
    its unit; for bits, divide by log 2.

    Args:
        p: (…, G): weights, at least 0, that add up to 1 over the groups.
        q: The same, of a shape that broadcasts with p's.

    Returns:
        (…), in float32 or better.

    >>> half = torch.tensor([0.5, 0.5])
    >>> float(jensen_shannon(half, half))
    0.0
    """
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(
            "two distributions are over the same groups, so the last axes of p and q are equally "
            f"long; got shapes {tuple(p.shape)} and {tuple(q.shape)}"
        )
    dtype = torch.promote_types(torch.promote_types(p.dtype, q.dtype), torch.float32)
    p, q = p.to(dtype), q.to(dtype)
    entropy = torch.special.entr
    mixed = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    return mixed.sum(-1).clamp(min=0)  # rounding could leave less


def divergence_from_fixed(weights: Tensor) -> Tensor:
    """Of weights (…, G): the divergence (…) from the fixed ones, 1/2, 1/4, …, the remainder."""
    return jensen_shannon(weights, fixed_weights(weights.shape[-1]).to(weights))


def uniform_divergence(num_groups: int) -> float:
    """The divergence of G uniform weights, those of plain linear attention, from the fixed ones.

    >>> round(uniform_divergence(5), 4)
    0.0768
    """
    uniform = torch.full((num_groups,), 1 / num_groups, dtype=torch.float64)
    return float(divergence_from_fixed(uniform))
