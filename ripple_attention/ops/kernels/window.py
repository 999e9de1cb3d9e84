"""Near window by tiles, far part as linear attention: the fast algorithm as Triton kernels.

The identities are those of `ops/tiled.py`. A program takes a tile of tokens of one head and walks
the window around it row by row; the group of a pair follows from its offset, so nothing but inputs
is read and nothing but results is written. Small grids are one window: no far part, one launch.

Choosing weights costs more than the matrix products if done group by group for every pair. But the
distance is max(|Δrow|, |Δcolumn|), so a pair weighs what its row distance does or what its column
distance does, whichever is larger. The first is one number for a query and a row of the window, the
second is the same for all rows: one comparison for a pair, however many groups. Sums by group, for
∂α, part in the same way. For ∂k and ∂v weights change with the row: a warp gathers them from those
of the queries, or, where it cannot, chooses by group.

Pairs are rounded before they meet values (see `common`), and summed, for denominators,
without tensor cores.

This module imports triton: `dispatch` says where it can run.
"""

# ruff: noqa: RUF005

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ripple_attention.ops.kernels.common import (
    _add_products,
    _ceil_divide,
    _corner,
    _dense_channels,
    _inverse,
    _load,
    _offsets,
    _padded,
    _place,
    _power_of_two,
    _pull,
    _quotient,
    _span,
    _store,
    _tile,
    _token,
    _token_offsets,
    _walk,
    are_odd,
)
from ripple_attention.ops.kernels.far import (
    _load_split_ones,
    _split_state,
    _sum_chunks,
    _times_split_state,
)
from ripple_attention.ops.kernels.launch import launch, overlapping, overlaps
from ripple_attention.ops.tiling import far_sums_like, is_single_window

ROUNDING: tl.constexpr = tl.constexpr(
    16 * torch.finfo(torch.float32).eps
)  # of `flush_cancellation`


@triton.jit
def _load_weights(pointers, inside, stride, RADII: tl.constexpr, SINGLE_WINDOW: tl.constexpr):
    """Weights of some queries: of each group with a box, and beyond the last box.

    By near and far, α_g − α_rest and 0, with α_rest for the whole grid; if SINGLE_WINDOW, α_g and
    α_rest.
    Returned are a vector for each box, the one beyond them, and α_rest.
    """
    rest = tl.load(pointers + len(RADII) * stride, mask=inside, other=0.0).to(tl.float32)
    near = ()
    for g in tl.static_range(len(RADII)):
        weight = tl.load(pointers + g * stride, mask=inside, other=0.0).to(tl.float32)
        near = near + (weight if SINGLE_WINDOW else weight - rest,)
    return near, rest if SINGLE_WINDOW else tl.zeros_like(rest), rest


@triton.jit
def _in_group(distance, g: tl.constexpr, RADII: tl.constexpr):
    """Which distances belong to group g, not the last."""
    if g == 0:
        return distance <= RADII[0]
    elif RADII[g] == RADII[g - 1] + 1:
        return distance == RADII[g]
    else:
        return (distance > RADII[g - 1]) & (distance <= RADII[g])


@triton.jit
def _group_of(distance, RADII: tl.constexpr):
    """The group of each distance, counted from 0."""
    if RADII[len(RADII) - 1] - RADII[0] == len(RADII) - 1:  # one distance a group
        group = tl.minimum(tl.maximum(distance - RADII[0], 0), len(RADII))
    else:
        group = distance * 0
        for g in tl.static_range(len(RADII)):
            group += (distance > RADII[g]).to(tl.int32)
    return group


@triton.jit
def _weights_at(distance, near, beyond, axis: tl.constexpr, RADII: tl.constexpr):
    """The weight at each distance (a vector, or a matrix of which `axis` is not the queries')."""
    weight = beyond
    if len(distance.shape) == 2:
        weight = tl.broadcast_to(tl.expand_dims(beyond, axis), distance.shape)
    for g in tl.static_range(len(RADII)):
        value = near[g]
        if len(distance.shape) == 2:
            value = tl.expand_dims(value, axis)
        weight = tl.where(_in_group(distance, g, RADII), value, weight)
    return weight


@triton.jit
def forward_kernel(
    first, q, k, v, weights, state, out, denominator, q_strides, k_strides, v_strides,
    weight_strides, H, W, eps, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, PADDED_G: tl.constexpr, RADII: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr,
    SPANS: tl.constexpr, WINDOW_ROWS: tl.constexpr, SINGLE_WINDOW: tl.constexpr, WIDE: tl.constexpr,
    SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Output and denominator + eps of a tile of queries.

    [numerator, denominator]_i = α_rest φq_iᵀ S + Σ_{j in the box} (α_g − α_rest)(φq_i·φk_j)[v_j, 1]
    """
    reach: tl.constexpr = (
        0 if SINGLE_WINDOW else RADII[len(RADII) - 1]
    )  # of the window beyond the tile
    b, n, down, across = _place(first, N)
    top, left, row, column, inside = _tile(down, across, H, W, ROWS, COLUMNS, SINGLE_WINDOW)
    at = _corner(q, b, n, top, left, q_strides, WIDE)
    query = _load(at, _offsets(row, column, q_strides, WIDE), inside, M, PADDED_M)
    at = _corner(weights, b, n, top, left, weight_strides, WIDE)
    at += _offsets(row, column, weight_strides, WIDE)
    near, beyond, rest = _load_weights(at, inside, weight_strides[4], RADII, SINGLE_WINDOW)

    numerator = tl.zeros((ROWS * COLUMNS, PADDED_E), tl.float32)
    near_sums = tl.zeros((ROWS * COLUMNS, SPAN), tl.float32)
    for span in range(SPANS):
        below, others, present, far_across = _span(
            span, left, column, W, STEP, SPAN, RADII[len(RADII) - 1], SINGLE_WINDOW, COLUMNS
        )
        across_weight = _weights_at(far_across, near, beyond, 1, RADII)
        k_row, k_offsets = _walk(k, b, n, top - reach, left, below, others, k_strides, WIDE)
        v_row, v_offsets = _walk(v, b, n, top - reach, left, below, others, v_strides, WIDE)
        for step in range(0, WINDOW_ROWS, STEP):
            key_row = below + (step - reach)
            there = present & (top + key_row >= 0) & (top + key_row < H)
            key = _load(k_row, k_offsets, there, M, PADDED_M)
            value = _load(v_row, v_offsets, there, E, PADDED_E)
            far_down = tl.abs(row[:, None] - key_row[None, :])
            down_weight = _weights_at(far_down, near, beyond, 1, RADII)
            pairs = tl.dot(query, tl.trans(key), input_precision="ieee")  # (queries, keys)
            pairs *= tl.where(far_down >= far_across, down_weight, across_weight)
            near_sums += tl.sum(tl.reshape(pairs, (ROWS * COLUMNS, STEP, SPAN)), 1)
            numerator = _add_products(pairs, value, numerator, SPLIT)
            for _ in tl.static_range(STEP):  # one by one: a multiple may not fit 32 bits
                k_row += k_strides[1]
                v_row += v_strides[1]

    total = tl.sum(near_sums, 1)
    result = total + eps
    blind = inside != inside  # none
    if not SINGLE_WINDOW:
        if OVERLAP:
            gdc_wait()
        ones = _load_split_ones(state, b * N + n, M, E, PADDED_M, 16)
        far = _times_split_state(query, state, b * N + n, M, E, PADDED_M, PADDED_E, True)
        numerator += rest[:, None] * far
        far = tl.dot(
            query.to(ones.dtype),
            tl.trans(ones),
            input_precision="ieee" if query.dtype == tl.float32 else "tf32",
        )
        far = rest * tl.sum(far, 1)
        result += far
        rounding = ROUNDING * (tl.abs(total) + tl.abs(far))
        known = rounding < float("inf")  # else a sum has overflowed, and is no rounding
        result = tl.where(known & (tl.abs(result) <= rounding), 0.0, result)
        # Sees nothing: the numerator is rounding, too.
        blind = known & (tl.abs(total + far) <= rounding)
    numerator = tl.where(blind[:, None], 0.0, _quotient(numerator, result[:, None], query.dtype))
    corner = _token(b, n, top, left, H, W, N, WIDE)
    token = _token_offsets(row, column, W, N, WIDE)
    _store(out + corner * E, token * E, inside, numerator, E, PADDED_E)
    if denominator is not None:
        tl.store(denominator + corner + token, result, mask=inside)


@triton.jit
def query_gradient_kernel(
    first, grad, q, k, v, weights, out, denominator, state, delta, inverse, scaled, grad_q,
    grad_weights, grad_strides, q_strides, k_strides, v_strides, weight_strides, H, W,
    N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, PADDED_G: tl.constexpr, RADII: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, SINGLE_WINDOW: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """∂φq and ∂α of a tile of queries; and what sums over queries take, δ_i = ∂o_i·o_i, 1/den_i
    and w_i = (near weights)/den_i.

    With the pull t_ij = ∂o_i·v_j − δ_i, and 1/den_i taken out of all sums:
    ∂φq_i = Σ_j w_ij t_ij φk_j / den_i,  ∂α_g(i) = Σ_{j in g} (φq_i·φk_j) t_ij / den_i.
    """
    reach: tl.constexpr = 0 if SINGLE_WINDOW else RADII[len(RADII) - 1]
    groups: tl.constexpr = len(RADII) + 1
    b, n, down, across = _place(first, N)
    top, left, row, column, inside = _tile(down, across, H, W, ROWS, COLUMNS, SINGLE_WINDOW)
    corner = _token(b, n, top, left, H, W, N, WIDE)
    token = _token_offsets(row, column, W, N, WIDE)
    at = _corner(grad, b, n, top, left, grad_strides, WIDE)
    upstream = _load(at, _offsets(row, column, grad_strides, WIDE), inside, E, PADDED_E)
    result = _load(out + corner * E, token * E, inside, E, PADDED_E)
    projection = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + corner + token, projection, mask=inside)
    scale = tl.load(denominator + corner + token, mask=inside, other=0.0)
    scale = _inverse(scale, upstream.dtype)
    tl.store(inverse + corner + token, scale, mask=inside)
    at = _corner(q, b, n, top, left, q_strides, WIDE)
    query = _load(at, _offsets(row, column, q_strides, WIDE), inside, M, PADDED_M)
    at = _corner(weights, b, n, top, left, weight_strides, WIDE)
    at += _offsets(row, column, weight_strides, WIDE)
    near, beyond, rest = _load_weights(at, inside, weight_strides[4], RADII, SINGLE_WINDOW)
    slot = tl.arange(0, PADDED_G)[None, :]
    rows = tl.zeros((ROWS * COLUMNS, PADDED_G), tl.float32)
    for g in tl.static_range(len(RADII)):
        rows = tl.where(slot == g, near[g][:, None], rows)
    rows = scale[:, None] * tl.where(slot == len(RADII), beyond[:, None], rows)
    at = scaled + corner * PADDED_G + (token[:, None] * PADDED_G + slot)
    tl.store(at, rows, mask=inside[:, None])

    gradient = tl.zeros((ROWS * COLUMNS, PADDED_M), tl.float32)
    minus = tl.broadcast_to(-projection[:, None], (ROWS * COLUMNS, STEP * SPAN))
    whole = tl.zeros((ROWS * COLUMNS,), tl.float32)  # of all keys, then of the rest
    by_group = ()
    for _ in tl.static_range(len(RADII)):
        by_group = by_group + (tl.zeros((ROWS * COLUMNS,), tl.float32),)
    for span in range(SPANS):
        below, others, present, far_across = _span(
            span, left, column, W, STEP, SPAN, RADII[len(RADII) - 1], SINGLE_WINDOW, COLUMNS
        )
        across_weight = _weights_at(far_across, near, beyond, 1, RADII)
        across_sums = tl.zeros((ROWS * COLUMNS, STEP * SPAN), tl.float32)
        k_row, k_offsets = _walk(k, b, n, top - reach, left, below, others, k_strides, WIDE)
        v_row, v_offsets = _walk(v, b, n, top - reach, left, below, others, v_strides, WIDE)
        for step in range(0, WINDOW_ROWS, STEP):
            key_row = below + (step - reach)
            there = present & (top + key_row >= 0) & (top + key_row < H)
            key = _load(k_row, k_offsets, there, M, PADDED_M)
            value = _load(v_row, v_offsets, there, E, PADDED_E)
            far_down = tl.abs(row[:, None] - key_row[None, :])
            down_weight = _weights_at(far_down, near, beyond, 1, RADII)
            similarity = tl.dot(query, tl.trans(key), input_precision="ieee")  # (queries, keys)
            pull = tl.dot(upstream, tl.trans(value), minus, input_precision="ieee")
            products = similarity * pull
            by_row = far_down >= far_across  # the distance is of rows, else of columns
            across_sums += tl.where(by_row, 0.0, products)
            products = tl.where(by_row, products, 0.0)
            for i in tl.static_range(STEP):
                # −0 adds nothing, and the compiler knows: each sum is one row's.
                down_sum = tl.sum(tl.where(below[None, :] == i, products, -0.0), 1)
                far = tl.abs(row - (step + i - reach))
                sums = ()
                for g in tl.static_range(len(RADII)):
                    members = _in_group(far, g, RADII)
                    sums = sums + (by_group[g] + tl.where(members, down_sum, 0.0),)
                by_group = sums
                if SINGLE_WINDOW:
                    whole += tl.where(far > RADII[len(RADII) - 1], down_sum, 0.0)
            pull *= tl.where(by_row, down_weight, across_weight)
            gradient = _add_products(pull, key, gradient, SPLIT)
            for _ in tl.static_range(STEP):  # one by one: a multiple may not fit 32 bits
                k_row += k_strides[1]
                v_row += v_strides[1]
        sums = ()
        for g in tl.static_range(len(RADII)):
            members = tl.where(_in_group(far_across, g, RADII), across_sums, 0.0)
            sums = sums + (by_group[g] + tl.sum(members, 1),)
        by_group = sums
        if SINGLE_WINDOW:
            whole += tl.sum(tl.where(far_across > RADII[len(RADII) - 1], across_sums, 0.0), 1)

    if not SINGLE_WINDOW:
        if OVERLAP:
            gdc_wait()
        ones = tl.sum(_load_split_ones(state, b * N + n, M, E, PADDED_M, 4).to(tl.float32), 0)
        far_pull = _times_split_state(upstream, state, b * N + n, M, E, PADDED_M, PADDED_E, False)
        far_pull -= projection[:, None] * ones[None, :]
        gradient += rest[:, None] * far_pull
        whole = tl.sum(query.to(tl.float32) * far_pull, 1)
    _store(grad_q + corner * M, token * M, inside, scale[:, None] * gradient, M, PADDED_M)
    weight_type = grad_weights.dtype.element_ty
    at = grad_weights + corner * groups + token * groups
    for g in tl.static_range(len(RADII)):
        tl.store(at + g, (scale * by_group[g]).to(weight_type), mask=inside)
        if not SINGLE_WINDOW:
            whole -= by_group[g]
    tl.store(at + len(RADII), (scale * whole).to(weight_type), mask=inside)


@triton.jit
def key_gradient_kernel(
    first, grad, q, k, v, scaled, delta, state, grad_k, grad_v, grad_strides, q_strides, k_strides,
    v_strides, H, W, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, PADDED_G: tl.constexpr, RADII: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, SINGLE_WINDOW: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """∂φk and ∂v of a tile of keys, from the queries around it: membership is symmetric.

    ∂φk_j = Σ_i w_ij/den_i t_ij φq_i,  ∂v_j = Σ_i w_ij/den_i (φq_i·φk_j) ∂o_i, far parts by T.
    """
    reach: tl.constexpr = 0 if SINGLE_WINDOW else RADII[len(RADII) - 1]
    b, n, down, across = _place(first, N)
    top, left, row, column, inside = _tile(down, across, H, W, ROWS, COLUMNS, SINGLE_WINDOW)
    corner = _corner(k, b, n, top, left, k_strides, WIDE)
    key = _load(corner, _offsets(row, column, k_strides, WIDE), inside, M, PADDED_M)
    corner = _corner(v, b, n, top, left, v_strides, WIDE)
    value = _load(corner, _offsets(row, column, v_strides, WIDE), inside, E, PADDED_E)
    slot = tl.arange(0, PADDED_G)

    key_gradient = tl.zeros((ROWS * COLUMNS, PADDED_M), tl.float32)
    value_gradient = tl.zeros((ROWS * COLUMNS, PADDED_E), tl.float32)
    for span in range(SPANS):
        below, others, present, far_across = _span(
            span, left, column, W, STEP, SPAN, RADII[len(RADII) - 1], SINGLE_WINDOW, COLUMNS
        )
        q_row, q_offsets = _walk(q, b, n, top - reach, left, below, others, q_strides, WIDE)
        grad_row, grad_offsets = _walk(
            grad, b, n, top - reach, left, below, others, grad_strides, WIDE
        )
        token_row = _token(b, n, top - reach, left, H, W, N, WIDE)
        token = _token_offsets(below, others, W, N, WIDE)
        group_across = _group_of(far_across, RADII)
        for step in range(0, WINDOW_ROWS, STEP):
            query_row = below + (step - reach)
            there = present & (top + query_row >= 0) & (top + query_row < H)
            query = _load(q_row, q_offsets, there, M, PADDED_M)
            upstream = _load(grad_row, grad_offsets, there, E, PADDED_E)
            projection = tl.load(delta + token_row + token, mask=there, other=0.0)
            far_down = tl.abs(row[:, None] - query_row[None, :])
            if GATHER:
                # Groups grow with distance: that of the larger is the larger of the groups.
                group = tl.maximum(_group_of(far_down, RADII), group_across)
                at = scaled + token_row * PADDED_G + (token[None, :] * PADDED_G + slot[:, None])
                weight = tl.gather(tl.load(at, mask=there[None, :], other=0.0), group, 0)
            else:
                of_query = scaled + token_row * PADDED_G + token * PADDED_G
                near = ()
                for g in tl.static_range(len(RADII)):
                    near = near + (tl.load(of_query + g, mask=there, other=0.0),)
                beyond = tl.load(of_query + len(RADII), mask=there, other=0.0)
                weight = _weights_at(tl.maximum(far_down, far_across), near, beyond, 0, RADII)
            similarity = tl.dot(key, tl.trans(query), input_precision="ieee")  # (keys, queries)
            pull = _pull(value, upstream, projection)
            key_gradient = _add_products(pull * weight, query, key_gradient, SPLIT)
            value_gradient = _add_products(similarity * weight, upstream, value_gradient, SPLIT)
            for _ in tl.static_range(STEP):  # one by one: a multiple may not fit 32 bits
                q_row += q_strides[1]
                grad_row += grad_strides[1]
            token_row += STEP * W * N

    if not SINGLE_WINDOW:
        if OVERLAP:
            gdc_wait()
        head = b * N + n
        ones = tl.sum(_load_split_ones(state, head, M, E, PADDED_M, 4).to(tl.float32), 0)
        far = _times_split_state(value, state, head, M, E, PADDED_M, PADDED_E, False)
        key_gradient += far + ones[None, :]
        value_gradient += _times_split_state(key, state, head, M, E, PADDED_M, PADDED_E, True)
    first_token = _token(b, n, top, left, H, W, N, WIDE)
    token = _token_offsets(row, column, W, N, WIDE)
    _store(grad_k + first_token * M, token * M, inside, key_gradient, M, PADDED_M)
    _store(grad_v + first_token * E, token * E, inside, value_gradient, E, PADDED_E)


# Launchers


@dataclass(frozen=True)
class Plan:
    """What a program does and how many there are."""

    grid: tuple[int, int, int]
    constants: tuple[Any, ...]  # of the kernels, from N on
    single_window: bool
    wide: bool  # whether offsets take 64 bits
    gather: bool  # whether warps can gather weights, of half-precision inputs
    options: dict[str, Any]  # of the launch


def tiled_triton_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    radii: list[int],
    eps: float,
    keep: bool = True,
    partial: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Ripple attention by tiles. Arguments as of `tiled_forward`.

    Args:
        keep: Whether denominators, which the backward pass takes, are asked for.
        partial: Shares of chunks in the far sum, where they are known.

    Returns:
        Output and denominator as of `tiled_forward`, and the far sum in parts, as the backward pass
        takes it, empty where the grid is one window.
    """
    q, k, v = (_dense_channels(x) for x in (q, k, v))
    out = v.new_empty(v.shape)
    denominator = v.new_empty(v.shape[:-1], dtype=torch.float32) if keep else None
    split_state = far_sums_like(v, q.shape[-1], radii)
    with torch.cuda.device_of(v):
        plan = _choose("forward", q, v, radii, (q, k, v, spatial_weights))
        if not plan.single_window:
            shares = _sum_chunks(k, v, spatial_weights) if partial is None else partial
            _split_state(split_state, shares, k.dtype, overlap=partial is None)
        launch(
            forward_kernel, plan.grid,
            q, k, v, spatial_weights, None if plan.single_window else split_state, out, denominator,
            q.stride(), k.stride(), v.stride(), spatial_weights.stride(),
            *v.shape[1:3], eps, *plan.constants, **plan.options,
        )  # fmt: skip
    return out, denominator, split_state


def tiled_triton_inference(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, radii: list[int], eps: float
) -> Tensor:
    """The output alone, where no gradient will be asked for."""
    return tiled_triton_forward(q, k, v, spatial_weights, radii, eps, keep=False)[0]


def tiled_triton_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    out: Tensor,
    denominator: Tensor,
    split_state: Tensor,
    radii: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `tiled_triton_forward` for q, k, v and the weights, in the types of these.

    Args:
        grad: ∂out.
        q, k, v, spatial_weights, radii: As they were.
        out, denominator, split_state: The results of the forward pass.
    """
    grad, q, k, v = (_dense_channels(x) for x in (grad, q, k, v))
    out, denominator = out.contiguous(), denominator.contiguous()
    grads = [x.new_empty(x.shape) for x in (q, k, v, spatial_weights)]
    delta, inverse = torch.empty_like(denominator), torch.empty_like(denominator)
    scaled = delta.new_empty(*delta.shape, _padded_groups(len(radii)))
    inputs = grad, q, k, v, spatial_weights
    strides = [x.stride() for x in (grad, q, k, v)]
    with torch.cuda.device_of(v):
        by_query, by_key = (_choose(role, q, v, radii, inputs) for role in ("query", "key"))
        launch(
            query_gradient_kernel, by_query.grid,
            *inputs, out, denominator, None if by_query.single_window else split_state,
            delta, inverse, scaled, grads[0], grads[3], *strides, spatial_weights.stride(),
            *v.shape[1:3],
            *by_query.constants, **by_query.options,
        )  # fmt: skip
        back = None
        if not by_key.single_window:
            shares = _sum_chunks(q, grad, spatial_weights, delta, inverse)
            back = _split_state(torch.empty_like(split_state), shares, q.dtype)
        launch(
            key_gradient_kernel, by_key.grid, grad, q, k, v, scaled, delta, back,
            grads[1], grads[2], *strides, *v.shape[1:3], *by_key.constants, by_key.gather,
            **by_key.options,
        )  # fmt: skip
    return grads[0], grads[1], grads[2], grads[3]


def _padded_groups(boxes: int) -> int:
    """A number of groups, the rest among them, that a warp can gather from."""
    return max(4, _power_of_two(boxes + 1))


# Choices

# Split pairs in two as well (see above), a tenth slower. Rounded, they keep 8 bits (tf32: 11). That
# shows where a window's weight is less than the rest's, so that its mass is subtracted again, and
# where one pair is all there is; so grids of up to SPLIT_TOKENS have them split anyway.
SPLIT_PAIRS = False
SPLIT_TOKENS = 64


def _choose(role: str, q: Tensor, v: Tensor, radii: list[int], inputs: tuple[Tensor, ...]) -> Plan:
    """Tiles, windows and warps of a kernel with tiles, which reads these inputs.

    Both roles of the backward pass see the same grids as SINGLE_WINDOW.
    """
    strides = tuple(x.stride() for x in inputs)
    single_window = is_single_window(q.shape[1], q.shape[2], radii)
    shape = (*q.shape, v.shape[-1])
    return _plan(
        role, shape, v.dtype, tuple(radii), strides, single_window, SPLIT_PAIRS, overlaps()
    )


@lru_cache(4096)
def _plan(
    role: str, shape: tuple[int, ...], dtype: torch.dtype, radii: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...], single_window: bool, split: bool, early: bool,
) -> Plan:  # fmt: skip
    (B, H, W, N, M, E), reach = shape, radii[-1]
    widest = max(_padded(M), _padded(E))
    follows_sums = (
        not single_window and role != "query"
    )  # whose far sum is kept from the forward pass
    rows, columns, step, options = _tile_table(role, dtype, widest, single_window)
    if dtype == torch.bfloat16 and are_odd(M, E):
        rows, columns, step, options = _tile_table(role, dtype, 128, single_window)
    height, width = rows + 2 * reach, columns + 2 * reach
    grid = N * _ceil_divide(W, columns), _ceil_divide(H, rows), B
    if single_window:
        height, width, grid = H, W, (N, _ceil_divide(H * W, rows * columns), B)
    span = 16 if width <= 16 or width % 32 in range(1, 17) else 32
    step = min(step, _power_of_two(height))
    height = _ceil_divide(height, step) * step
    groups = _padded_groups(len(radii))
    # The window begins before the grid and ends behind it.
    reached = [B * b + (H + height) * h + (W + width) * w + N * n for b, h, w, n, *_ in strides]
    wide = max(*reached, (B * H + height) * (W + width) * N * max(M, E, groups)) >= 2**31
    constants = (
        N, M, E, _padded(M), _padded(E), groups, radii, rows, columns,
        step, span, _ceil_divide(width, span), height, single_window, wide,
        split or H * W <= SPLIT_TOKENS, follows_sums and early,
    )  # fmt: skip
    if follows_sums and early:
        options |= overlapping()
    fills_warps = groups * step * span >= 32 * options["num_warps"]
    gather = fills_warps and dtype != torch.float32 and widest <= 64
    return Plan(grid, constants, single_window, wide, gather, options)


def _tile_table(
    role: str, dtype: torch.dtype, wide: int, single_window: bool
) -> tuple[int, int, int, dict[str, int]]:
    """Rows and columns of a tile, rows of the window at once, and options of the launch.

    Odd widths go as the widest do, by 32 queries: see `common.are_odd`.

    Args:
        role: "forward", "query" or "key".
        dtype: Of the inputs.
        wide: The wider of φ and v.
        single_window: Whether the window is the grid.
    """
    if dtype == torch.float32:  # products on plain units: small tiles keep them in registers
        return 4, 8 if wide <= 64 else 4, 1, {"num_warps": 4, "num_stages": 2}
    if wide > 64:
        return 4, 8, 1, {"num_warps": 4, "num_stages": 2}
    if dtype == torch.float16:  # float32 operands, twice as large
        return 4, 8, 1, {"num_warps": 2, "num_stages": 2}
    if wide > 32 and single_window:
        return 8, 8, 2, {"num_warps": 4, "num_stages": 3}
    if role == "key":
        if wide > 32:
            return 8, 8, 2, {"num_warps": 4, "num_stages": 3}
        return 4, 8, 2, {"num_warps": 1, "num_stages": 3}
    if role == "forward" and wide <= 32:  # registers for five or six programs at a time
        return 8, 8, 2, {"num_warps": 4, "num_stages": 3, "maxnreg": 96 if single_window else 80}
    return 8, 8, 2, {"num_warps": 4, "num_stages": 4, "maxnreg": 128}
