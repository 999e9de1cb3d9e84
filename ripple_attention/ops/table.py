"""The paper's dynamic programming: boxes read from a summed-area table of φ(k)vᵀ.

Time grows with the number of groups, memory does not: a box is contracted as soon as it is read,
and the backward pass builds tables of its own and keeps none (docs/algorithm.md, "The table").
Throughout, v' = [v, 1]: the last column carries the denominator.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ripple_attention.ops.common import (
    accumulation_dtype,
    flush_cancellation,
    heads_first,
    parts,
    safe_divide,
)

# Numbers in one table at a time: near the cache on a CPU, enough to fill the machine elsewhere.
NUMBERS_ON_CPU = 2**20
NUMBERS_ELSEWHERE = 2**27
# Of `flush_cancellation`; the largest that was seen is 2.7, over grids of up to 512×512 tokens.
UNITS = 8


def table_forward(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, radii: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """Ripple attention by summed-area tables. Arguments as in `ripple_naive`.

    Returns:
        The output (B, H, W, N, E) in the type of v, and the denominators, eps included,
        (B, H, W, N) in float32 or better.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    denominator = v.new_empty(v.shape[:-1], dtype=accumulation_dtype(v))
    for part in table_parts(q, v):
        queries, keys, values, weights = (heads_first(x[part]) for x in (q, k, v, spatial_weights))
        values = F.pad(values, (0, 1), value=1)
        above, below = _weighted_sums(queries, keys, values, weights, radii, eps)
        out[part] = safe_divide(above, below).permute(0, 2, 3, 1, 4)
        denominator[part] = below.squeeze(-1).permute(0, 2, 3, 1)
    return out, denominator


def table_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    out: Tensor,
    denominator: Tensor,
    radii: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `table_forward` for q, k, v and the weights, each in the type of its input.

    With y'_i = [∂o_i, −∂o_i·o_i]/den_i, queries read φ(k)v'ᵀ again, against y' instead of φ(q). And
    as i is in group g of j just when j is in group g of i, keys read α φ(q)y'ᵀ in the same way.
    """
    inputs = (q, k, v, spatial_weights)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    for part in table_parts(q, v):
        queries, keys, values, weights = (heads_first(x[part]) for x in inputs)
        values = F.pad(values, (0, 1), value=1)
        y = heads_first(grad[part] * safe_divide(1, denominator[part]).unsqueeze(-1))
        c = -(y * heads_first(out[part])).sum(-1, keepdim=True)
        y = torch.cat([y, c], -1)  # (B, N, H, W, E+1)
        grad_q, grad_weights = _query_gradients(queries, keys, values, weights, y, radii)
        grad_k, grad_v = _key_gradients(queries, keys, values, weights, y, radii)
        pieces = (grad_q, grad_k, grad_v, grad_weights)
        for total, piece in zip(grads, pieces, strict=True):
            total[part] = piece.permute(0, 2, 3, 1, 4)
    return grads[0], grads[1], grads[2], grads[3]


@dataclass(frozen=True)
class OuterTable:
    """Box sums of the outer products a bᵀ at every cell, held so that float32 is enough.

    The table is of a bᵀ minus its mean: prefix sums then wander about zero instead of growing with
    the number of cells, and their differences keep more digits. A box adds back its count of means.
    """

    table: Tensor  # (B, N, H+1, W+1, M, E)
    mean: Tensor  # (B, N, M, E)

    @classmethod
    def build(cls, a: Tensor, b: Tensor) -> "OuterTable":
        """Of a (B, N, H, W, M) and b (B, N, H, W, E)."""
        mean = torch.einsum("bnhwm,bnhwe->bnme", a, b) / (a.shape[2] * a.shape[3])
        outer = a.unsqueeze(-1) * b.unsqueeze(-2)
        return cls(summed_area_table(outer.sub_(mean[:, :, None, None])), mean)

    def boxes(self, radius: int) -> tuple[Tensor, Tensor]:
        """Deviations from the mean, summed over each cell's box (B, N, H, W, M, E), and how many
        cells it holds (H, W, 1).
        """
        H, W = (size - 1 for size in self.table.shape[2:4])
        rows, columns = (_clipped(size, radius, self.table) for size in (H, W))
        return box_sums(self.table, radius), (rows[:, None] * columns).unsqueeze(-1)

    def whole_grid(self) -> tuple[Tensor, int]:
        """The same of a box that holds every cell: (B, N, 1, M, E), and the number of cells.

        The deviations are what rounding has left out of the mean.
        """
        H, W = (size - 1 for size in self.table.shape[2:4])
        return self.table[:, :, -1:, -1], H * W

    def steps(self, radius: int) -> int:
        """How many roundings of a prefix sum a box holds, in each of its corners."""
        return 1 if self.table.device.type == "cpu" else 2 * radius + 1

    def peak(self) -> Tensor:
        """The largest prefix sum of the last column of b, by feature: (B, N, 1, M, 1)."""
        return self.table[..., -1].abs().amax((2, 3))[:, :, None, :, None]


def summed_area_table(x: Tensor) -> Tensor:
    """Sums over all rows above and columns left of every corner.

    (…, H, W, M, E) → (…, H+1, W+1, M, E), the first row and column zero. On a CPU they are added
    up in float64, and rounded once along a row and once down a column.
    """
    table = F.pad(x.cumsum(-3), (0, 0, 0, 0, 1, 0, 1, 0))
    if table.device.type != "cpu":
        return table.cumsum_(-4)
    total = torch.zeros_like(table[..., 0, :, :, :], dtype=torch.float64)
    for row in range(1, table.shape[-4]):  # on a CPU, cumsum would stride through memory
        total += table[..., row, :, :, :]
        table[..., row, :, :, :] = total
    return table


def box_sums(table: Tensor, radius: int) -> Tensor:
    """Sums over the clipped box around every cell: (…, H+1, W+1, M, E) → (…, H, W, M, E)."""
    for dim in (-4, -3):
        size = table.shape[dim] - 1
        centre = torch.arange(size, device=table.device)
        upper = table.index_select(dim, (centre + radius + 1).clamp(max=size))
        table = upper.sub_(table.index_select(dim, (centre - radius).clamp(min=0)))
    return table


def _weighted_sums(
    queries: Tensor, keys: Tensor, values: Tensor, weights: Tensor, radii: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """Σ_g α_g Σ_{j in group g} (φq·φk_j) v'_j, split: numerator and denominator + eps.

    Returns:
        (B, N, H, W, E) and (B, N, H, W, 1).
    """
    table = OuterTable.build(keys, values)
    mean = queries @ table.mean.unsqueeze(2)  # (B, N, H, W, E+1)
    size = queries.abs()
    per_box, per_cell = size @ table.peak(), size @ table.mean[:, :, None, :, -1:].abs()
    sums, inner = torch.zeros_like(values), torch.zeros_like(values)
    magnitude = torch.zeros_like(mean[..., -1:])
    count: Tensor | int
    for group in range(len(radii) + 1):
        if group < len(radii):
            deviations, count = table.boxes(radii[group])
            box = (queries.unsqueeze(-2) @ deviations).squeeze(-2) + count * mean
            steps = table.steps(radii[group])
        else:
            left, count = table.whole_grid()
            box = queries @ left + count * mean
            steps = table.steps(max(mean.shape[2:4]))
        weight = weights[..., group, None]
        sums.addcmul_(weight, box - inner)
        magnitude.addcmul_(weight.abs(), steps * per_box + count * per_cell)
        inner = box
    return sums[..., :-1], flush_cancellation(sums[..., -1:] + eps, magnitude, UNITS)


def _query_gradients(
    queries: Tensor, keys: Tensor, values: Tensor, weights: Tensor, y: Tensor, radii: list[int]
) -> tuple[Tensor, Tensor]:
    """∂φq = Σ_g α_g u_g and ∂α_g = φq·u_g, where u_g = (Σ_{j in group g} φk_j v'_jᵀ) y'."""
    table = OuterTable.build(keys, values)
    mean = y @ table.mean.unsqueeze(2).mT  # (B, N, H, W, M)
    grad_queries, grad_weights = torch.zeros_like(queries), torch.empty_like(weights)
    inner = torch.zeros_like(queries)
    for group in range(len(radii) + 1):
        if group < len(radii):
            deviations, count = table.boxes(radii[group])
            box = (deviations @ y.unsqueeze(-1)).squeeze(-1) + count * mean
        else:
            left, cells = table.whole_grid()
            box = y @ left.mT + cells * mean
        ring = box - inner
        grad_queries.addcmul_(weights[..., group, None], ring)
        grad_weights[..., group] = (queries * ring).sum(-1)
        inner = box
    return grad_queries, grad_weights


def _key_gradients(
    queries: Tensor, keys: Tensor, values: Tensor, weights: Tensor, y: Tensor, radii: list[int]
) -> tuple[Tensor, Tensor]:
    """∂φk = X v' and ∂v = Xᵀ φk, where X_j = Σ_g Σ_{i in group g of j} α_g(i) φq_i y'_iᵀ.

    By parts: a ring of weight α_g and all inside it is a box of weight α_g − α_{g+1} for each g.
    """
    rest = torch.einsum("bnhwm,bnhwe->bnme", queries * weights[..., -1:], y)
    state = rest[:, :, None, None].repeat(1, 1, *keys.shape[2:4], 1, 1)  # (B, N, H, W, M, E+1)
    for group, radius in enumerate(radii):
        step = (weights[..., group] - weights[..., group + 1]).unsqueeze(-1)
        table = OuterTable.build(queries * step, y)
        deviations, count = table.boxes(radius)
        state += deviations
        state.addcmul_(count.unsqueeze(-1), table.mean[:, :, None, None])
    grad_keys = (state @ values.unsqueeze(-1)).squeeze(-1)
    grad_values = (keys.unsqueeze(-2) @ state[..., :-1]).squeeze(-2)
    return grad_keys, grad_values


def _clipped(size: int, radius: int, like: Tensor) -> Tensor:
    """How many of the cells within `radius` of each cell lie on an axis of this size."""
    centre = torch.arange(size, device=like.device)
    count = (centre + radius + 1).clamp(max=size) - (centre - radius).clamp(min=0)
    return count.to(like.dtype)


def table_parts(q: Tensor, v: Tensor) -> Iterator[tuple[slice, ...]]:
    numbers = (v.shape[1] + 1) * (v.shape[2] + 1) * q.shape[-1] * (v.shape[-1] + 1)
    return parts(v, numbers, NUMBERS_ON_CPU if v.device.type == "cpu" else NUMBERS_ELSEWHERE)
