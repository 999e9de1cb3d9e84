"""New ripples begin with near and far on one scale: log c = a + ⟨u, q⟩ by least squares.

For each head, Σ_far c·φ(q)·φ(k) is to be Σ_far e^{s q·k}, over a sample of queries. Without this,
most steps of an alignment would go into finding the scale.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ripple_attention.ops.common import without_autocast
from ripple_lab.align.lessons import Lesson, attend

QUERIES = 256  # of each image
RIDGE = 1e-2  # of the mean square of queries


@torch.no_grad()
def calibrate(attention: Any, lessons: Iterable[Lesson]) -> None:
    """Sets the scale of an attention's far part by what its teacher was given.

    Does nothing where the far part has no scale, its scale has learned already, or nothing is far.
    """
    ripple = attention.ripple
    scale = getattr(ripple, "far_scale", None)
    if scale is None or scale.weight.any():
        return
    samples = [sample for lesson in lessons for sample in far_sums(attention, lesson)]
    if not samples:
        return
    q, gap, share = (torch.cat(parts) for parts in zip(*samples, strict=True))
    with without_autocast(q):  # equations in half precision have no solution worth the name
        ones = torch.ones_like(gap).unsqueeze(-1)
        x = torch.cat([q, ones], -1).transpose(0, 1)  # (N, S, D + 1)
        weighted = x * share.T.unsqueeze(-1)
        penalty = RIDGE * weighted.square().sum((1, 2)) / x.shape[-1]
        square = weighted.mT @ x
        diagonal = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        diagonal[-1, -1] = 0  # the constant is free
        square = square + penalty[:, None, None] * diagonal
        solved = torch.linalg.lstsq(square, weighted.mT @ gap.T.unsqueeze(-1)).solution[..., 0]
    scale.weight.copy_(solved[:, :-1])
    scale.bias.copy_(solved[:, -1])


def far_sums(attention: Any, lesson: Lesson) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of some queries of each image: (S, N, D), how far the logarithms of both sums are apart
    (S, N), and the share of softmax attention that is far (S, N).
    """
    ripple = attention.ripple
    heard: list[Any] = []
    hook = ripple.register_forward_pre_hook(
        lambda module, args, kwargs: heard.append((args, kwargs)), with_kwargs=True
    )
    with hook:
        attend(attention, lesson)
    (q, k, _), named = heard[0]
    with without_autocast(q):
        H, W = named["grid_size"]
        dtype = torch.promote_types(q.dtype, torch.float32)
        q, k = (x[:, ripple.num_prefix_tokens :].to(dtype) for x in (q, k))  # (B, L, N, D)
        features = ripple.feature_map(q.unflatten(1, (H, W)), k.unflatten(1, (H, W)))
        phi_q, phi_k = (x.flatten(1, 2) for x in features)  # (B, L, N, M)
        reach = ripple.partition.reach if ripple.near_distance is None else ripple.near_distance
        chosen = torch.randperm(H * W, generator=torch.Generator().manual_seed(0))[:QUERIES]
        chosen = chosen.to(q.device)
        place = torch.stack([torch.arange(H * W) // W, torch.arange(H * W) % W], -1).to(q.device)
        far = (place[chosen, None] - place).abs().amax(-1) > reach  # (S, L)
        chosen = chosen[far.any(1)]
        far = far[far.any(1)]
        scale = ripple.head_dim**-0.5 if ripple.scale is None else ripple.scale
        samples = []
        for image in range(len(q)):
            scores = scale * torch.einsum("snd,lnd->snl", q[image, chosen], k[image])
            exact = scores.masked_fill(~far[:, None], -torch.inf).logsumexp(-1)  # (S, N)
            products = torch.einsum("snm,lnm->snl", phi_q[image, chosen], phi_k[image])
            found = (products * far[:, None]).sum(-1).clamp(min=1e-12).log()
            share = (exact - scores.logsumexp(-1)).exp()
            samples.append((q[image, chosen], exact - found, share))
        return samples
