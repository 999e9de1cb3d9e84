"""The paper's dynamic programming: boxes read from a summed-area table of φ(k)vᵀ.

Time grows with the number of groups, memory does not: a box is contracted as soon as it is read,
and the backward pass builds tables of its own and keeps none (docs/algorithm.md, "The table").
Throughout, v' = [v, 1]: the last column carries the denominator.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ripple_attention.ops.common import accumulation_dtype, parts, safe_inverse

# Numbers in one table at a time: whole images while they are small, single heads when they are not.
TABLE_NUMBERS = 2**20


def table_forward(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, radii: list[int]
) -> tuple[Tensor, Tensor]:
    """Ripple attention by summed-area tables. Arguments as in `ripple_naive`.

    Returns:
        The output (B, H, W, N, E) in the type of v, and the denominators (B, H, W, N) in float32
        or better.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    denominator = v.new_empty(v.shape[:-1], dtype=accumulation_dtype(v))
    for part in parts(v, _table_numbers(q, v), TABLE_NUMBERS):
        queries, keys, values, weights = (_heads_first(x[part]) for x in (q, k, v, spatial_weights))
        values = F.pad(values, (0, 1), value=1)
        sums = _weighted_sums(queries, keys, values, weights, radii)  # (B, N, H, W, E+1)
        out[part] = (sums[..., :-1] * safe_inverse(sums[..., -1:])).permute(0, 2, 3, 1, 4)
        denominator[part] = sums[..., -1].permute(0, 2, 3, 1)
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
    for part in parts(v, _table_numbers(q, v), TABLE_NUMBERS):
        queries, keys, values, weights = (_heads_first(x[part]) for x in inputs)
        values = F.pad(values, (0, 1), value=1)
        y = _heads_first(grad[part] * safe_inverse(denominator[part]).unsqueeze(-1))
        c = -(y * _heads_first(out[part])).sum(-1, keepdim=True)
        y = torch.cat([y, c], -1)  # (B, N, H, W, E+1)
        grad_q, grad_weights = _query_gradients(queries, keys, values, weights, y, radii)
        grad_k, grad_v = _key_gradients(queries, keys, values, weights, y, radii)
        pieces = (grad_q, grad_k, grad_v, grad_weights)
        for total, piece in zip(grads, pieces, strict=True):
            total[part] = piece.permute(0, 2, 3, 1, 4)
    return grads[0], grads[1], grads[2], grads[3]


def summed_area_table(x: Tensor) -> Tensor:
    """Sums over all rows above and columns left of every corner.

    (…, H, W, M, E) → (…, H+1, W+1, M, E), the first row and column zero.
    """
    table = F.pad(x.cumsum(-3), (0, 0, 0, 0, 1, 0, 1, 0))
    for row in range(2, table.shape[-4]):  # row upon row: cumsum(-4) would stride through memory
        table[..., row, :, :, :] += table[..., row - 1, :, :, :]
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
    queries: Tensor, keys: Tensor, values: Tensor, weights: Tensor, radii: list[int]
) -> Tensor:
    """Σ_g α_g Σ_{j in group g} (φq·φk_j) v'_j: (B, N, H, W, E+1)."""
    table = summed_area_table(_outer(keys, values))
    sums, inner = torch.zeros_like(values), torch.zeros_like(values)
    for group, radius in enumerate(radii):
        box = (queries.unsqueeze(-2) @ box_sums(table, radius)).squeeze(-2)
        sums.addcmul_(weights[..., group, None], box - inner)
        inner = box
    whole = table[..., -1, -1, :, :].unsqueeze(2)  # (B, N, 1, M, E+1)
    return sums.addcmul_(weights[..., -1:], queries @ whole - inner)


def _query_gradients(
    queries: Tensor, keys: Tensor, values: Tensor, weights: Tensor, y: Tensor, radii: list[int]
) -> tuple[Tensor, Tensor]:
    """∂φq = Σ_g α_g u_g and ∂α_g = φq·u_g, where u_g = (Σ_{j in group g} φk_j v'_jᵀ) y'."""
    table = summed_area_table(_outer(keys, values))
    grad_queries, grad_weights = torch.zeros_like(queries), torch.empty_like(weights)
    inner = torch.zeros_like(queries)
    for group in range(len(radii) + 1):
        if group < len(radii):
            box = (box_sums(table, radii[group]) @ y.unsqueeze(-1)).squeeze(-1)
        else:
            box = y @ table[..., -1, -1, :, :].unsqueeze(2).mT
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
    outer = _outer(queries, y)
    rest = torch.einsum("bnhwm,bnhwe->bnme", queries * weights[..., -1:], y)
    state = rest[:, :, None, None].expand_as(outer).contiguous()
    steps = weights[..., :-1] - weights[..., 1:]
    for group, radius in enumerate(radii):
        table = summed_area_table(outer * steps[..., group, None, None])
        state += box_sums(table, radius)
    grad_keys = (state @ values.unsqueeze(-1)).squeeze(-1)
    grad_values = (keys.unsqueeze(-2) @ state[..., :-1]).squeeze(-2)
    return grad_keys, grad_values


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a.unsqueeze(-1) * b.unsqueeze(-2)  # (…, M), (…, E) → (…, M, E)


def _table_numbers(q: Tensor, v: Tensor) -> int:
    return (v.shape[1] + 1) * (v.shape[2] + 1) * q.shape[-1] * (v.shape[-1] + 1)


def _heads_first(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x)).permute(0, 3, 1, 2, 4)  # (B, H, W, N, C) → (B, N, H, W, C)
