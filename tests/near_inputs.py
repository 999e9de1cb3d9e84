"""Inputs of ripple attention that is near by softmax, and its definition a pair at a time."""

import torch
from torch import Tensor

from inputs import gradients, make_mask
from ripple_attention import (
    NearSoftmax,
    Partition,
    chebyshev,
    foveal,
    logarithmic,
    ripple_attention,
)

GRIDS = [(1, 1), (1, 7), (7, 5), (33, 20)]
CASES = {  # a partition, and up to which radius tokens weigh by softmax
    "rings": (chebyshev(3), None),
    "beyond the grid": (chebyshev(40), None),
    "one ring far": (chebyshev(4), 2),
    "doubling rings": (logarithmic(9), 3),
    "two boxes": (Partition((2, 5)), 2),
    "wide": (Partition((9,)), None),
    "coarse rings": (foveal(2, tile=4, rings=2), None),
}
BY_BOXES = ("naive", "tiled", "table")
WAYS = [(name, case) for case in CASES if case != "coarse rings" for name in BY_BOXES]
WAYS += [("naive", "coarse rings"), ("tile_sums", "coarse rings"), ("tile_sums", "doubling rings")]
NAMES = ("q", "k", "phi_q", "phi_k", "v", "weights", "far_scale", "prefix_k", "prefix_v")


def make_near(grid, partition, prefix=0, *, dtype=torch.float64, heads=2, width=6, features=5):
    """Tensors in the order of `NAMES`; those of prefix tokens where there are some."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64)

    groups = partition.num_groups + (prefix > 0)
    shapes = [(*grid, heads, c) for c in (width, width, features, features, 4, groups)]
    q, k, phi_q, phi_k, v, weights = (randn(*shape) for shape in shapes)
    made = [q, k, phi_q.sigmoid(), phi_k.sigmoid(), v, weights.softmax(-1), randn(*grid, heads)]
    if prefix:
        made += [randn(prefix, heads, width), randn(prefix, heads, 4)]
    kept = {5, 6}  # in the type of sums
    return tuple(
        x.to(torch.promote_types(dtype, torch.float32) if i in kept else dtype)
        for i, x in enumerate(made)
    )


def run(implementation, partition, distance=None, mask=None, prefix_mask=None):
    def function(q, k, phi_q, phi_k, v, weights, far_scale, prefix_k=None, prefix_v=None):
        return ripple_attention(
            phi_q,
            phi_k,
            v,
            weights,
            partition=partition,
            near=NearSoftmax(q, k, far_scale, distance),
            prefix_k=prefix_k,
            prefix_v=prefix_v,
            prefix_padding_mask=prefix_mask,
            key_padding_mask=mask,
            implementation=implementation,
        )

    return function


def definition(partition, distance=None, mask=None, prefix_mask=None):
    """As written: every query meets every key by one of two kernels, under one denominator."""

    def function(q, k, phi_q, phi_k, v, weights, far_scale, prefix_k=None, prefix_v=None):
        B, H, W, N, D = q.shape
        rows, columns = (
            x.flatten() for x in torch.meshgrid(*map(torch.arange, (H, W)), indexing="ij")
        )
        apart = torch.maximum((rows[:, None] - rows).abs(), (columns[:, None] - columns).abs())
        group = sum((apart > radius).long() for radius in partition.radii)
        if partition.tile:
            down, across = rows // partition.tile, columns // partition.tile
            tiles = torch.maximum((down[:, None] - down).abs(), (across[:, None] - across).abs())
            group = group + sum((tiles > radius).long() for radius in partition.tile_radii)
        near = apart <= (partition.reach if distance is None else distance)
        near, far = (x.expand(B, 1, -1, -1) for x in (near, ~near))
        if mask is not None:
            seen = ~mask.flatten(1)[:, None, None]
            near, far = near & seen, far & seen
        q, k, phi_q, phi_k, v, weights = (
            x.flatten(1, 2).transpose(1, 2) for x in (q, k, phi_q, phi_k, v, weights)
        )
        log_c = far_scale.flatten(1, 2).mT.unsqueeze(-1)
        P = 0 if prefix_k is None else prefix_k.shape[1]
        pairs = weights[..., P > 0 :].gather(-1, group.expand(B, N, -1, -1))
        far_pairs = pairs * far * (phi_q @ phi_k.mT)
        values = v
        if P:
            k = torch.cat([prefix_k.transpose(1, 2), k], 2)
            values = torch.cat([prefix_v.transpose(1, 2), v], 2)
            pairs = torch.cat([weights[..., :1].expand(-1, -1, -1, P), pairs], -1)
            first = torch.ones(B, P, dtype=torch.bool) if prefix_mask is None else ~prefix_mask
            near = torch.cat([first[:, None, None].expand(-1, -1, H * W, -1), near], -1)
        scores = (q @ k.mT * D**-0.5).masked_fill(~near, -torch.inf)
        largest = scores.detach().amax(-1, keepdim=True).clamp(min=-1e300)
        near_pairs = pairs * (scores - largest).exp()
        c = (log_c - largest).clamp(max=60).exp()
        total = near_pairs.sum(-1, keepdim=True) + c * far_pairs.sum(-1, keepdim=True)
        sums = near_pairs @ values + c * (far_pairs @ v)
        out = torch.where(total == 0, 0, sums / torch.where(total == 0, 1, total))
        return out.transpose(1, 2).unflatten(1, (H, W))

    return function


def compare(got, expected, inputs, reference_inputs=None):
    """Output and every gradient of two functions: name → (ours, theirs)."""
    ours, theirs = gradients(got, inputs), gradients(expected, reference_inputs or inputs)
    names = ("out", *NAMES)
    return {
        name: (x, y)
        for name, x, y in zip(names, (ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=False)
    }


def masks(kind: str, grid, prefix: int):
    """A mask of the grid and one of the prefix tokens, or None twice."""
    mask = make_mask(kind, grid)
    if mask is None or not prefix:
        return mask, None
    of_prefix = torch.zeros(2, prefix, dtype=torch.bool)
    of_prefix[1, -1] = True
    return mask, of_prefix
