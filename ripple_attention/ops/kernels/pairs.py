"""Every query meets every key, as Triton kernels: for wide partitions, of many rings or far ones.

Tiles as in `ops/tiled_triton.py`, the window being the grid. Weights are not chosen group by group
but looked up: a pair weighs what its row distance does or what its column distance does, whichever
is larger, so one number is read for a query and a row of keys, and one for a query and a column.
Many rings cost no more than few.

∂α is summed apart by rows, R_i(k) over the keys of row k no farther across than down, and by
columns, C_i(k) over the others of column k: no program holds a sum for every group. Which rows and
columns make up a group then is one small product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ripple_attention.ops.kernels.common import (
    _add_products,
    _corner,
    _dense_channels,
    _inverse,
    _load,
    _offsets,
    _padded,
    _place,
    _pull,
    _quotient,
    _span,
    _store,
    _tile,
    _token,
    _token_offsets,
    _walk,
)
from ripple_attention.ops.kernels.launch import launch
from ripple_attention.partition import Partition

# groups: for each distance, its group. Other names are those of `ops/kernel_parts.py`. Offsets take
# 64 bits.


@triton.jit
def forward_kernel(
    first, q, k, v, weights, groups, out, denominator, q_strides, k_strides, v_strides,
    weight_strides, H, W, eps, SPANS, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, TOKENS: tl.constexpr, SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Output and denominator + eps of a run of queries: Σ_j α_g(ij) (φq_i·φk_j)[v_j, 1]."""
    b, n, down, across = _place(first, N)
    top, left, row, column, inside = _tile(down, across, H, W, 1, TOKENS, True)
    at = _corner(q, b, n, top, left, q_strides, True)
    query = _load(at, _offsets(row, column, q_strides, True), inside, M, PADDED_M)
    of_query = _corner(weights, b, n, top, left, weight_strides, True)
    of_query += _offsets(row, column, weight_strides, True)
    numerator = tl.zeros((TOKENS, PADDED_E), tl.float32)
    total = tl.zeros((TOKENS, SPAN), tl.float32)
    for span in range(SPANS):
        below, others, present, far_across = _span(span, left, column, W, 1, SPAN, 0, True, 1)
        across_weight = _look_up_pairs(
            of_query, groups, far_across, inside, present, weight_strides[4]
        )
        k_row, k_offsets = _walk(k, b, n, top, left, below, others, k_strides, True)
        v_row, v_offsets = _walk(v, b, n, top, left, below, others, v_strides, True)
        for step in range(H):
            key = _load(k_row, k_offsets, present, M, PADDED_M)
            value = _load(v_row, v_offsets, present, E, PADDED_E)
            far_down = tl.abs(row - step)
            down_weight = _look_up(of_query, groups, far_down, inside, weight_strides[4])
            pairs = tl.dot(query, tl.trans(key), input_precision="ieee")  # (queries, keys)
            by_row = far_down[:, None] >= far_across
            pairs *= tl.where(by_row, down_weight[:, None], across_weight)
            total += pairs
            numerator = _add_products(pairs, value, numerator, SPLIT)
            k_row += k_strides[1]
            v_row += v_strides[1]
    result = tl.sum(total, 1) + eps
    numerator = _quotient(numerator, result[:, None], query.dtype)
    corner = _token(b, n, top, left, H, W, N, True)
    token = _token_offsets(row, column, W, N, True)
    _store(out + corner * E, token * E, inside, numerator, E, PADDED_E)
    tl.store(denominator + corner + token, result, mask=inside)


@triton.jit
def _look_up(of_query, groups, distance, inside, stride):
    """The weight of each query at a distance of its own."""
    group = tl.load(groups + distance, mask=inside, other=0)
    return tl.load(of_query + group * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _look_up_pairs(of_query, groups, distance, inside, present, stride):
    """The weights of queries at the distances of some keys, (queries, keys)."""
    mask = inside[:, None] & present[None, :]
    group = tl.load(groups + distance, mask=mask, other=0)
    return tl.load(of_query[:, None] + group * stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def query_gradient_kernel(
    first, grad, q, k, v, weights, groups, out, denominator, delta, inverse, grad_q, by_rows,
    by_columns, grad_strides, q_strides, k_strides, v_strides, weight_strides, H, W, SPANS, tokens,
    N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, TOKENS: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """∂φq of a run of queries; R by span and row, C by column; δ_i = ∂o_i·o_i and 1/den_i."""
    b, n, down, across = _place(first, N)
    top, left, row, column, inside = _tile(down, across, H, W, 1, TOKENS, True)
    corner = _token(b, n, top, left, H, W, N, True)
    token = corner + _token_offsets(row, column, W, N, True)
    at = _corner(grad, b, n, top, left, grad_strides, True)
    upstream = _load(at, _offsets(row, column, grad_strides, True), inside, E, PADDED_E)
    result = _load(out, token * E, inside, E, PADDED_E)
    projection = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + token, projection, mask=inside)
    scale = tl.load(denominator + token, mask=inside, other=0.0)
    scale = _inverse(scale, upstream.dtype)
    tl.store(inverse + token, scale, mask=inside)
    at = _corner(q, b, n, top, left, q_strides, True)
    query = _load(at, _offsets(row, column, q_strides, True), inside, M, PADDED_M)
    of_query = _corner(weights, b, n, top, left, weight_strides, True)
    of_query += _offsets(row, column, weight_strides, True)
    gradient = tl.zeros((TOKENS, PADDED_M), tl.float32)
    minus = tl.broadcast_to(-projection[:, None], (TOKENS, SPAN))
    to_row = by_rows + token  # of one span after the other
    for span in range(SPANS):
        below, others, present, far_across = _span(span, left, column, W, 1, SPAN, 0, True, 1)
        across_weight = _look_up_pairs(
            of_query, groups, far_across, inside, present, weight_strides[4]
        )
        across_sums = tl.zeros((TOKENS, SPAN), tl.float32)
        k_row, k_offsets = _walk(k, b, n, top, left, below, others, k_strides, True)
        v_row, v_offsets = _walk(v, b, n, top, left, below, others, v_strides, True)
        for step in range(H):
            key = _load(k_row, k_offsets, present, M, PADDED_M)
            value = _load(v_row, v_offsets, present, E, PADDED_E)
            far_down = tl.abs(row - step)
            down_weight = _look_up(of_query, groups, far_down, inside, weight_strides[4])
            similarity = tl.dot(query, tl.trans(key), input_precision="ieee")  # (queries, keys)
            pull = tl.dot(upstream, tl.trans(value), minus, input_precision="ieee")
            products = similarity * pull
            by_row = far_down[:, None] >= far_across
            across_sums += tl.where(by_row, 0.0, products)
            down_sum = tl.sum(tl.where(by_row, products, 0.0), 1)
            tl.store(to_row, scale * down_sum, mask=inside)
            pull *= tl.where(by_row, down_weight[:, None], across_weight)
            gradient = _add_products(pull, key, gradient, SPLIT)
            k_row += k_strides[1]
            v_row += v_strides[1]
            to_row += tokens
        to_column = by_columns + others.to(tl.int64)[None, :] * tokens + token[:, None]
        mask = inside[:, None] & present[None, :]
        tl.store(to_column, scale[:, None] * across_sums, mask=mask)
    _store(grad_q, token * M, inside, scale[:, None] * gradient, M, PADDED_M)


@triton.jit
def key_gradient_kernel(
    first, grad, q, k, v, scaled, groups, delta, grad_k, grad_v, grad_strides, q_strides,
    k_strides, v_strides, H, W, SPANS, G, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, TOKENS: tl.constexpr, SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """∂φk and ∂v of a run of keys; `scaled` holds α/den of all queries, (B, H, W, N, G)."""
    b, n, down, across = _place(first, N)
    top, left, row, column, inside = _tile(down, across, H, W, 1, TOKENS, True)
    at = _corner(k, b, n, top, left, k_strides, True)
    key = _load(at, _offsets(row, column, k_strides, True), inside, M, PADDED_M)
    at = _corner(v, b, n, top, left, v_strides, True)
    value = _load(at, _offsets(row, column, v_strides, True), inside, E, PADDED_E)
    key_gradient = tl.zeros((TOKENS, PADDED_M), tl.float32)
    value_gradient = tl.zeros((TOKENS, PADDED_E), tl.float32)
    for span in range(SPANS):
        below, others, present, far_across = _span(span, left, column, W, 1, SPAN, 0, True, 1)
        mask = inside[:, None] & present[None, :]
        group_across = tl.load(groups + far_across, mask=mask, other=0)
        q_row, q_offsets = _walk(q, b, n, top, left, below, others, q_strides, True)
        grad_row, grad_offsets = _walk(grad, b, n, top, left, below, others, grad_strides, True)
        token = _token(b, n, top, left, H, W, N, True) + others.to(tl.int64) * N
        for step in range(H):
            query = _load(q_row, q_offsets, present, M, PADDED_M)
            upstream = _load(grad_row, grad_offsets, present, E, PADDED_E)
            projection = tl.load(delta + token, mask=present, other=0.0)
            # Groups grow with distance: that of the larger is the larger of the groups.
            group_down = tl.load(groups + tl.abs(row - step), mask=inside, other=0)
            group = tl.maximum(group_down[:, None], group_across)
            weight = tl.load(scaled + (token * G)[None, :] + group, mask=mask, other=0.0)
            similarity = tl.dot(key, tl.trans(query), input_precision="ieee")  # (keys, queries)
            pull = _pull(value, upstream, projection)
            key_gradient = _add_products(pull * weight, query, key_gradient, SPLIT)
            value_gradient = _add_products(similarity * weight, upstream, value_gradient, SPLIT)
            q_row += q_strides[1]
            grad_row += grad_strides[1]
            token += W * N
    mine = _token(b, n, top, left, H, W, N, True) + _token_offsets(row, column, W, N, True)
    _store(grad_k, mine * M, inside, key_gradient, M, PADDED_M)
    _store(grad_v, mine * E, inside, value_gradient, E, PADDED_E)


# Launchers


def naive_triton_forward(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, radii: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """Ripple attention by all pairs. Arguments and results as of `tiled_forward`."""
    q, k, v = (_dense_channels(x) for x in (q, k, v))
    out = v.new_empty(v.shape)
    denominator = v.new_empty(v.shape[:-1], dtype=torch.float32)
    grid, spans, constants, options = _choose(q, v)
    with torch.cuda.device_of(v):
        launch(
            forward_kernel, grid,
            q, k, v, spatial_weights, _groups(v, radii), out, denominator,
            q.stride(), k.stride(), v.stride(), spatial_weights.stride(),
            *v.shape[1:3], eps, spans, *constants, **options,
        )  # fmt: skip
    return out, denominator


def naive_triton_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    out: Tensor,
    denominator: Tensor,
    radii: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `naive_triton_forward` for q, k, v and the weights, in the types of these."""
    grad, q, k, v = (_dense_channels(x) for x in (grad, q, k, v))
    out, denominator = out.contiguous(), denominator.contiguous()
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    delta, inverse = torch.empty_like(denominator), torch.empty_like(denominator)
    grid, spans, constants, options = _choose(q, v)
    H, W = v.shape[1:3]
    by_rows = delta.new_empty(spans, H, *delta.shape)
    by_columns = delta.new_empty(W, *delta.shape)
    groups = _groups(v, radii)
    strides = [x.stride() for x in (grad, q, k, v)]
    with torch.cuda.device_of(v):
        launch(
            query_gradient_kernel, grid,
            grad, q, k, v, spatial_weights, groups, out, denominator, delta, inverse, grads[0],
            by_rows, by_columns, *strides, spatial_weights.stride(), H, W, spans, delta.numel(),
            *constants, **options,
        )  # fmt: skip
        scaled = spatial_weights.float() * inverse.unsqueeze(-1)
        launch(
            key_gradient_kernel, grid,
            grad, q, k, v, scaled.contiguous(), groups, delta, grads[1], grads[2], *strides,
            H, W, spans, scaled.shape[-1], *constants, **options,
        )  # fmt: skip
    grad_weights = _sum_groups(by_rows.sum(0), groups, "kbrwn,rkg->brwng", len(radii) + 1)
    grad_weights += _sum_groups(by_columns, groups, "kbrwn,wkg->brwng", len(radii) + 1)
    return grads[0], grads[1], grads[2], grad_weights.to(spatial_weights.dtype)


def _sum_groups(profile: Tensor, groups: Tensor, product: str, count: int) -> Tensor:
    """Σ of a profile's rows (or columns) k that are of group g to a query's: (B, H, W, N, G)."""
    lines = torch.arange(len(profile), device=profile.device)
    member = groups[(lines[:, None] - lines[None, :]).abs()].long()  # (own line, k)
    return torch.einsum(product, profile, torch.nn.functional.one_hot(member, count).to(profile))


def _groups(v: Tensor, radii: list[int]) -> Tensor:
    """The group of each distance on the grid, int32."""
    return Partition(radii).group_of_distance(max(v.shape[1:3]), v.device).int()


def _choose(
    q: Tensor, v: Tensor
) -> tuple[tuple[int, int, int], int, tuple[int, ...], dict[str, int]]:
    """Programs, spans of a row, the kernels' constants from N on, and options; not yet tuned."""
    (B, H, W, N, M), E = q.shape, v.shape[-1]
    wide = max(_padded(M), _padded(E))
    tokens, span = (32, 32 if W > 16 else 16) if wide <= 64 else (16, 16)
    warps = 4 if v.dtype == torch.float32 or wide > 64 else 2
    constants = N, M, E, _padded(M), _padded(E), tokens, span, False
    grid = N, triton.cdiv(H * W, tokens), B
    return grid, triton.cdiv(W, span), constants, {"num_warps": warps, "num_stages": 2}
