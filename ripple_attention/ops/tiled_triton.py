"""Near window by tiles, far part as linear attention: the fast algorithm as Triton kernels.

The identities are those of `ops/tiled.py`. A program takes a tile of tokens of one head and walks
the window around it row by row; the group of a pair follows from its offset, so nothing but inputs
is read and nothing but results is written. Small grids are one window: no far part, one launch.

Choosing weights costs more than the matrix products if done group by group for every pair. But the
distance is max(|Δrow|, |Δcolumn|), so a pair weighs what its row distance does or what its column
distance does, whichever is larger. The first is one number for a query and a row of the window, the
second is the same for all rows: one comparison for a pair, however many groups. Sums by group, for
∂α, part in the same way. (∂k and ∂v, whose weights change with the row, choose by group.)

How half-precision inputs keep float32 sums: products of inputs are exact, so they run on tensor
cores as they are. Where one factor is a float32 intermediate (pairs, states), it is cut into parts
that tensor cores take, x = high + low: bfloat16 parts meet bfloat16 inputs, 19-bit tf32 parts meet
float16 inputs, whose own exponents would be too few. Denominators, whose differences decide what
counts as zero (`ops.common.settle`), are summed in float32 without tensor cores.

This module imports triton; `ops/triton_support.py` says where it can run, and imports it late.
"""

# Kernels have no types to declare, and Triton's tuples no unpacking.
# mypy: allow-untyped-defs, disable-error-code=assignment
# ruff: noqa: RUF005

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)  # of `safe_divide`
ROUNDING: tl.constexpr = tl.constexpr(16 * torch.finfo(torch.float32).eps)  # of `settle`


# Kernels. M and E are the widths of features and values, PADDED_M and PADDED_E the powers of two
# that hold them. WHOLE: the window is the grid. RADII: the partition. Strides are those of
# (B, H, W, N), and of G for the weights. Offsets are int64.


@triton.jit
def _place(tiles, N):
    """Batch, head and tile of this program: heads of one tile run together, as they lie."""
    program = tl.program_id(0)
    return (program // (N * tiles)).to(tl.int64), (program % N).to(tl.int64), program // N % tiles


@triton.jit
def _tile_tokens(tile, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    """Row and column of each token of a tile: a run of tokens where WHOLE, else a rectangle."""
    index = tl.arange(0, ROWS * COLUMNS)
    if WHOLE:
        index += tile * ROWS * COLUMNS
        row, column = index // W, index % W
    else:
        across = tl.cdiv(W, COLUMNS)
        row = tile // across * ROWS + index // COLUMNS
        column = tile % across * COLUMNS + index % COLUMNS
    return row, column


@triton.jit
def _window(
    tile, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REACH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """First row, first column, and the column after the last, of the window around a tile."""
    if WHOLE:
        top, left, right = tile * 0, tile * 0, W
    else:
        across = tl.cdiv(W, COLUMNS)
        top = tile // across * ROWS - REACH
        left = tile % across * COLUMNS - REACH
        right = tl.minimum(left + COLUMNS + 2 * REACH, W)
    return top, left, right


@triton.jit
def _span(span, left, right, column, SPAN: tl.constexpr):
    """Some columns of a window, which of them are there, and how far the tile's are from them."""
    others = left + span * SPAN + tl.arange(0, SPAN)
    present = (others >= 0) & (others < right)
    return others, present, tl.abs(column[:, None] - others[None, :])


@triton.jit
def _offsets(row, column, strides):
    return row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]


@triton.jit
def _token(b, row, column, n, H, W, N):
    """The index of a token's head in a contiguous (B, H, W, N)."""
    return ((b * H + row) * W + column) * N + n


@triton.jit
def _channels(offsets, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Offsets of the channels of some tokens, (tokens, PADDED), and which of them exist."""
    channel = tl.arange(0, PADDED)
    mask = inside[:, None]
    if WIDTH != PADDED:
        mask = mask & (channel < WIDTH)[None, :]
    return offsets[:, None] + channel[None, :], mask


@triton.jit
def _load(base, offsets, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Channels of some tokens, (tokens, PADDED), zero outside the grid and beyond WIDTH."""
    offsets, mask = _channels(offsets, inside, WIDTH, PADDED)
    return tl.load(base + offsets, mask=mask, other=0.0)


@triton.jit
def _store(base, token, inside, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Writes (tokens, PADDED) to the tokens of a contiguous (B, H, W, N, WIDTH)."""
    offsets, mask = _channels(token * WIDTH, inside, WIDTH, PADDED)
    tl.store(base + offsets, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _load_state(
    base, head, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr,
):  # fmt: skip
    """The sums of a head, of (B, N, E+1, M): (PADDED_E, PADDED_M) and, of the ones, (PADDED_M)."""
    start = base + head * ((E + 1) * M)
    value, feature = tl.arange(0, PADDED_E), tl.arange(0, PADDED_M)
    mask = (value < E)[:, None] & (feature < M)[None, :]
    state = tl.load(start + value[:, None] * M + feature[None, :], mask=mask, other=0.0)
    return state, tl.load(start + E * M + feature, mask=feature < M, other=0.0)


@triton.jit
def _load_weights(pointers, inside, stride, RADII: tl.constexpr, WHOLE: tl.constexpr):
    """Weights of some queries: of each group with a box, and beyond the last box.

    By near and far, α_g − α_rest and 0, with α_rest for the whole grid; if WHOLE, α_g and α_rest.
    Returned are a vector for each box, the one beyond them, and α_rest.
    """
    rest = tl.load(pointers + len(RADII) * stride, mask=inside, other=0.0).to(tl.float32)
    near = ()
    for g in tl.static_range(len(RADII)):
        weight = tl.load(pointers + g * stride, mask=inside, other=0.0).to(tl.float32)
        near = near + (weight if WHOLE else weight - rest,)
    return near, rest if WHOLE else tl.zeros_like(rest), rest


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
def _inverse(denominator):
    """1/denominator, and 0 where it counts as 0, as `safe_divide`."""
    empty = tl.abs(denominator) < SMALLEST
    return tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, denominator))


@triton.jit
def _parts(x, dtype: tl.constexpr):
    """x = high + low for a float32 x that is to meet inputs of a half-precision type.

    The high part keeps the bits that bfloat16 (8) or tf32 (11) hold, the low part is the remainder.
    """
    kept: tl.constexpr = -65536 if dtype == tl.bfloat16 else -8192
    high = (x.to(tl.int32, bitcast=True) & kept).to(tl.float32, bitcast=True)
    low = x - high
    if dtype == tl.bfloat16:
        high, low = high.to(tl.bfloat16), low.to(tl.bfloat16)
    return high, low


@triton.jit
def _add_products(x, inputs, total, SPLIT: tl.constexpr):
    """total + x @ inputs, for a float32 x. Without SPLIT, x is rounded to bfloat16 inputs' type."""
    if inputs.dtype == tl.float32:
        total = tl.dot(x, inputs, total, input_precision="ieee")
    elif inputs.dtype == tl.bfloat16 and not SPLIT:
        total = tl.dot(x.to(tl.bfloat16), inputs, total)
    else:
        high, low = _parts(x, inputs.dtype)
        exact = inputs.to(high.dtype)
        total = tl.dot(high, exact, total, input_precision="tf32")
        total = tl.dot(low, exact, total, input_precision="tf32")
    return total


@triton.jit
def _times_state(inputs, state):
    """inputs @ state, for a float32 state."""
    if inputs.dtype == tl.float32:
        result = tl.dot(inputs, state, input_precision="ieee")
    else:
        high, low = _parts(state, inputs.dtype)
        exact = inputs.to(high.dtype)
        result = tl.dot(exact, low, input_precision="tf32")
        result = tl.dot(exact, high, result, input_precision="tf32")
    return result


@triton.jit
def state_kernel(
    features, values, weights, delta, inverse, partial, feature_strides, value_strides,
    weight_strides, H, W, N, chunks, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """One chunk's share of a sum over the image, transposed: (E+1, M).

    Forward:  Sᵀ = Σ_j [v_j, 1] φk_jᵀ, of keys and values.
    BACKWARD: Tᵀ = Σ_i α_rest(i)/den_i · [∂o_i, −δ_i] φq_iᵀ, of queries and output gradients.
    """
    b, n, chunk = _place(chunks, N)
    features += b * feature_strides[0] + n * feature_strides[3]
    values += b * value_strides[0] + n * value_strides[3]
    weights += b * weight_strides[0] + n * weight_strides[3] + (GROUPS - 1) * weight_strides[4]
    total = tl.zeros((PADDED_E, PADDED_M), tl.float32)
    ones = tl.zeros((PADDED_M,), tl.float32)
    for block in range(BLOCKS):
        index = (chunk * BLOCKS + block) * TOKENS + tl.arange(0, TOKENS)
        row, column = index // W, index % W
        inside = row < H
        feature = _load(features, _offsets(row, column, feature_strides), inside, M, PADDED_M)
        value = _load(values, _offsets(row, column, value_strides), inside, E, PADDED_E)
        if BACKWARD:
            rest = tl.load(weights + _offsets(row, column, weight_strides), mask=inside, other=0.0)
            token = _token(b, row, column, n, H, W, N)
            weight = rest.to(tl.float32) * tl.load(inverse + token, mask=inside, other=0.0)
            weighted = tl.trans(value.to(tl.float32) * weight[:, None])
            total = _add_products(weighted, feature, total, True)
            weight *= -tl.load(delta + token, mask=inside, other=0.0)
            ones += tl.sum(feature.to(tl.float32) * weight[:, None], 0)
        else:
            total = tl.dot(tl.trans(value), feature, total, input_precision="ieee")
            ones += tl.sum(feature.to(tl.float32), 0)
    start = partial + ((chunk * (tl.num_programs(0) // chunks)) + b * N + n) * ((E + 1) * M)
    channel, m = tl.arange(0, PADDED_E), tl.arange(0, PADDED_M)
    mask = (channel < E)[:, None] & (m < M)[None, :]
    tl.store(start + channel[:, None] * M + m[None, :], total, mask=mask)
    tl.store(start + E * M + m, ones, mask=m < M)


@triton.jit
def forward_kernel(
    q, k, v, weights, state, out, denominator, q_strides, k_strides, v_strides, weight_strides, H,
    W, N, tiles, eps, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, RADII: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, WINDOW_ROWS: tl.constexpr, WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Output and denominator + eps of a tile of queries.

    [numerator, denominator]_i = α_rest φq_iᵀ S + Σ_{j in the box} (α_g − α_rest)(φq_i·φk_j)[v_j, 1]
    """
    b, n, tile = _place(tiles, N)
    q += b * q_strides[0] + n * q_strides[3]
    k += b * k_strides[0] + n * k_strides[3]
    v += b * v_strides[0] + n * v_strides[3]
    weights += b * weight_strides[0] + n * weight_strides[3]
    row, column = _tile_tokens(tile, W, ROWS, COLUMNS, WHOLE)
    inside = (row < H) & (column < W)
    query = _load(q, _offsets(row, column, q_strides), inside, M, PADDED_M)
    pointers = weights + _offsets(row, column, weight_strides)
    near, beyond, rest = _load_weights(pointers, inside, weight_strides[4], RADII, WHOLE)

    top, left, right = _window(tile, W, ROWS, COLUMNS, RADII[len(RADII) - 1], WHOLE)
    numerator = tl.zeros((ROWS * COLUMNS, PADDED_E), tl.float32)
    near_sums = tl.zeros((ROWS * COLUMNS, SPAN), tl.float32)
    for span in range(SPANS):
        key_column, present, across = _span(span, left, right, column, SPAN)
        across_weight = _weights_at(across, near, beyond, 1, RADII)
        for step in range(WINDOW_ROWS):
            key_row = top + step
            there = present & (key_row >= 0) & (key_row < H)
            key = _load(k, _offsets(key_row, key_column, k_strides), there, M, PADDED_M)
            value = _load(v, _offsets(key_row, key_column, v_strides), there, E, PADDED_E)
            down = tl.abs(row - key_row)
            down_weight = _weights_at(down, near, beyond, 1, RADII)
            pairs = tl.dot(query, tl.trans(key), input_precision="ieee")  # (queries, keys)
            pairs *= tl.where(down[:, None] >= across, down_weight[:, None], across_weight)
            near_sums += pairs
            numerator = _add_products(pairs, value, numerator, SPLIT)

    total = tl.sum(near_sums, 1)
    result = total + eps
    if not WHOLE:
        sums, ones = _load_state(state, b * N + n, M, E, PADDED_M, PADDED_E)
        numerator += rest[:, None] * _times_state(query, tl.trans(sums))
        far = rest * tl.sum(query.to(tl.float32) * ones[None, :], 1)
        result += far
        rounding = ROUNDING * (tl.abs(total) + tl.abs(far))
        result = tl.where(tl.abs(result) <= rounding, 0.0, result)
    empty = tl.abs(result) < SMALLEST
    numerator /= tl.where(empty, 1.0, result)[:, None]
    numerator = tl.where(empty[:, None], 0.0, numerator)
    token = _token(b, row, column, n, H, W, N)
    _store(out, token, inside, numerator, E, PADDED_E)
    tl.store(denominator + token, result, mask=inside)


@triton.jit
def query_gradient_kernel(
    grad, q, k, v, weights, out, denominator, state, delta, inverse, grad_q, grad_weights,
    grad_strides, q_strides, k_strides, v_strides, weight_strides, H, W, N, tiles, M: tl.constexpr,
    E: tl.constexpr, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, RADII: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """∂φq and ∂α of a tile of queries; and δ_i = ∂o_i·o_i and 1/den_i, for sums over queries.

    With the pull t_ij = ∂o_i·v_j − δ_i, and 1/den_i taken out of all sums:
    ∂φq_i = Σ_j w_ij t_ij φk_j / den_i,  ∂α_g(i) = Σ_{j in g} (φq_i·φk_j) t_ij / den_i.
    """
    b, n, tile = _place(tiles, N)
    grad += b * grad_strides[0] + n * grad_strides[3]
    q += b * q_strides[0] + n * q_strides[3]
    k += b * k_strides[0] + n * k_strides[3]
    v += b * v_strides[0] + n * v_strides[3]
    weights += b * weight_strides[0] + n * weight_strides[3]
    row, column = _tile_tokens(tile, W, ROWS, COLUMNS, WHOLE)
    inside = (row < H) & (column < W)
    token = _token(b, row, column, n, H, W, N)
    upstream = _load(grad, _offsets(row, column, grad_strides), inside, E, PADDED_E)
    result = _load(out, token * E, inside, E, PADDED_E)
    projection = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + token, projection, mask=inside)
    scale = _inverse(tl.load(denominator + token, mask=inside, other=0.0))
    tl.store(inverse + token, scale, mask=inside)
    query = _load(q, _offsets(row, column, q_strides), inside, M, PADDED_M)
    pointers = weights + _offsets(row, column, weight_strides)
    near, beyond, rest = _load_weights(pointers, inside, weight_strides[4], RADII, WHOLE)

    top, left, right = _window(tile, W, ROWS, COLUMNS, RADII[len(RADII) - 1], WHOLE)
    gradient = tl.zeros((ROWS * COLUMNS, PADDED_M), tl.float32)
    whole = tl.zeros((ROWS * COLUMNS,), tl.float32)  # of all keys, then of the rest
    by_group = ()
    for _ in tl.static_range(len(RADII)):
        by_group = by_group + (tl.zeros((ROWS * COLUMNS,), tl.float32),)
    for span in range(SPANS):
        key_column, present, across = _span(span, left, right, column, SPAN)
        across_weight = _weights_at(across, near, beyond, 1, RADII)
        across_sums = tl.zeros((ROWS * COLUMNS, SPAN), tl.float32)
        for step in range(WINDOW_ROWS):
            key_row = top + step
            there = present & (key_row >= 0) & (key_row < H)
            key = _load(k, _offsets(key_row, key_column, k_strides), there, M, PADDED_M)
            value = _load(v, _offsets(key_row, key_column, v_strides), there, E, PADDED_E)
            down = tl.abs(row - key_row)
            down_weight = _weights_at(down, near, beyond, 1, RADII)
            similarity = tl.dot(query, tl.trans(key), input_precision="ieee")  # (queries, keys)
            pull = tl.dot(upstream, tl.trans(value), input_precision="ieee") - projection[:, None]
            products = similarity * pull
            by_row = down[:, None] >= across  # the distance is that of rows, else of columns
            across_sums += tl.where(by_row, 0.0, products)
            down_sum = tl.sum(tl.where(by_row, products, 0.0), 1)
            sums = ()
            for g in tl.static_range(len(RADII)):
                sums = sums + (by_group[g] + tl.where(_in_group(down, g, RADII), down_sum, 0.0),)
            by_group = sums
            if WHOLE:
                whole += tl.where(down > RADII[len(RADII) - 1], down_sum, 0.0)
            pull *= tl.where(by_row, down_weight[:, None], across_weight)
            gradient = _add_products(pull, key, gradient, SPLIT)
        sums = ()
        for g in tl.static_range(len(RADII)):
            members = tl.where(_in_group(across, g, RADII), across_sums, 0.0)
            sums = sums + (by_group[g] + tl.sum(members, 1),)
        by_group = sums
        if WHOLE:
            whole += tl.sum(tl.where(across > RADII[len(RADII) - 1], across_sums, 0.0), 1)

    if not WHOLE:
        sums, ones = _load_state(state, b * N + n, M, E, PADDED_M, PADDED_E)
        far_pull = _times_state(upstream, sums) - projection[:, None] * ones[None, :]
        gradient += rest[:, None] * far_pull
        whole = tl.sum(query.to(tl.float32) * far_pull, 1)
    _store(grad_q, token, inside, scale[:, None] * gradient, M, PADDED_M)
    weight_type = grad_weights.dtype.element_ty
    pointers = grad_weights + token * (len(RADII) + 1)
    for g in tl.static_range(len(RADII)):
        tl.store(pointers + g, (scale * by_group[g]).to(weight_type), mask=inside)
        if not WHOLE:
            whole -= by_group[g]
    tl.store(pointers + len(RADII), (scale * whole).to(weight_type), mask=inside)


@triton.jit
def key_gradient_kernel(
    grad, q, k, v, weights, delta, inverse, state, grad_k, grad_v, grad_strides, q_strides,
    k_strides, v_strides, weight_strides, H, W, N, tiles, M: tl.constexpr, E: tl.constexpr,
    PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, RADII: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, WINDOW_ROWS: tl.constexpr,
    WHOLE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """∂φk and ∂v of a tile of keys, from the queries around it: who sees me is whom I see.

    ∂φk_j = Σ_i w_ij/den_i t_ij φq_i,  ∂v_j = Σ_i w_ij/den_i (φq_i·φk_j) ∂o_i, far parts by T.
    """
    b, n, tile = _place(tiles, N)
    grad += b * grad_strides[0] + n * grad_strides[3]
    q += b * q_strides[0] + n * q_strides[3]
    k += b * k_strides[0] + n * k_strides[3]
    v += b * v_strides[0] + n * v_strides[3]
    weights += b * weight_strides[0] + n * weight_strides[3]
    row, column = _tile_tokens(tile, W, ROWS, COLUMNS, WHOLE)
    inside = (row < H) & (column < W)
    key = _load(k, _offsets(row, column, k_strides), inside, M, PADDED_M)
    value = _load(v, _offsets(row, column, v_strides), inside, E, PADDED_E)

    top, left, right = _window(tile, W, ROWS, COLUMNS, RADII[len(RADII) - 1], WHOLE)
    key_gradient = tl.zeros((ROWS * COLUMNS, PADDED_M), tl.float32)
    value_gradient = tl.zeros((ROWS * COLUMNS, PADDED_E), tl.float32)
    for span in range(SPANS):
        query_column, present, across = _span(span, left, right, column, SPAN)
        for step in range(WINDOW_ROWS):
            query_row = top + step
            there = present & (query_row >= 0) & (query_row < H)
            query = _load(q, _offsets(query_row, query_column, q_strides), there, M, PADDED_M)
            at = _offsets(query_row, query_column, grad_strides)
            upstream = _load(grad, at, there, E, PADDED_E)
            token = _token(b, query_row, query_column, n, H, W, N)
            projection = tl.load(delta + token, mask=there, other=0.0)
            scale = tl.load(inverse + token, mask=there, other=0.0)
            pointers = weights + _offsets(query_row, query_column, weight_strides)
            near, beyond, _ = _load_weights(pointers, there, weight_strides[4], RADII, WHOLE)
            distance = tl.maximum(tl.abs(row - query_row)[:, None], across)
            scaled = ()
            for g in tl.static_range(len(RADII)):
                scaled = scaled + (near[g] * scale,)
            weight = _weights_at(distance, scaled, beyond * scale, 0, RADII)
            similarity = tl.dot(key, tl.trans(query), input_precision="ieee")  # (keys, queries)
            pull = tl.dot(value, tl.trans(upstream), input_precision="ieee") - projection[None, :]
            key_gradient = _add_products(pull * weight, query, key_gradient, SPLIT)
            value_gradient = _add_products(similarity * weight, upstream, value_gradient, SPLIT)

    if not WHOLE:
        sums, ones = _load_state(state, b * N + n, M, E, PADDED_M, PADDED_E)
        key_gradient += _times_state(value, sums) + ones[None, :]
        value_gradient += _times_state(key, tl.trans(sums))
    token = _token(b, row, column, n, H, W, N)
    _store(grad_k, token, inside, key_gradient, M, PADDED_M)
    _store(grad_v, token, inside, value_gradient, E, PADDED_E)


# Launchers


def tiled_triton_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    radii: list[int],
    eps: float,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Ripple attention by tiles. Arguments and results as of `tiled_forward`.

    Args:
        state: Sᵀ (B, N, E+1, M), contiguous and in float32, if it is known already.
    """
    q, k, v = (_dense_channels(x) for x in (q, k, v))
    out = v.new_empty(v.shape)
    denominator = v.new_empty(v.shape[:-1], dtype=torch.float32)
    plan = _choose(q, v, radii)
    with torch.cuda.device_of(v):
        if state is None and not plan.whole:
            state = _sum_state(k, v, spatial_weights)
        forward_kernel[plan.grid](
            q, k, v, spatial_weights, state, out, denominator,
            q.stride(), k.stride(), v.stride(), spatial_weights.stride(),
            *v.shape[1:4], plan.tiles, eps, *plan.constants,
            num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
    return out, denominator


def tiled_triton_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    out: Tensor,
    denominator: Tensor,
    radii: list[int],
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `tiled_triton_forward` for q, k, v and the weights, in the types of these."""
    grad, q, k, v = (_dense_channels(x) for x in (grad, q, k, v))
    out, denominator = out.contiguous(), denominator.contiguous()
    grads = [x.new_empty(x.shape) for x in (q, k, v, spatial_weights)]
    delta, inverse = torch.empty_like(denominator), torch.empty_like(denominator)
    plan = _choose(q, v, radii)
    strides = [x.stride() for x in (grad, q, k, v, spatial_weights)]
    sizes = (*v.shape[1:4], plan.tiles)
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    with torch.cuda.device_of(v):
        if state is None and not plan.whole:
            state = _sum_state(k, v, spatial_weights)
        query_gradient_kernel[plan.grid](
            grad, q, k, v, spatial_weights, out, denominator, state, delta, inverse,
            grads[0], grads[3], *strides, *sizes, *plan.constants, **options,
        )  # fmt: skip
        state = None if plan.whole else _sum_state(q, grad, spatial_weights, delta, inverse)
        key_gradient_kernel[plan.grid](
            grad, q, k, v, spatial_weights, delta, inverse, state, grads[1], grads[2],
            *strides, *sizes, *plan.constants, **options,
        )  # fmt: skip
    return grads[0], grads[1], grads[2], grads[3]


def _sum_state(
    features: Tensor, values: Tensor, spatial_weights: Tensor,
    delta: Tensor | None = None, inverse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """S of keys and values, or T of queries and gradients: (B, N, E+1, M) in float32.

    Chunks are summed in a fixed order, so results repeat bit for bit.
    """
    (B, H, W, N, M), E = features.shape, values.shape[-1]
    tokens, blocks, warps = _choose_state(H * W, max(M, E))
    chunks = triton.cdiv(H * W, tokens * blocks)
    partial = features.new_empty(chunks, B, N, E + 1, M, dtype=torch.float32)
    state_kernel[(B * N * chunks,)](
        features, values, spatial_weights, delta, inverse, partial,
        features.stride(), values.stride(), spatial_weights.stride(), H, W, N, chunks,
        M, E, _padded(M), _padded(E), spatial_weights.shape[-1], tokens, blocks,
        delta is not None, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return partial[0] if chunks == 1 else partial.sum(0)


def _dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _padded(width: int) -> int:
    """A width that tensor cores take."""
    return max(16, triton.next_power_of_2(width))


# Choices

# Grids of up to so many tokens are one window: all pairs cost less than launches for a far part.
WHOLE_TOKENS = 384

# Cut float32 factors in two for bfloat16 products (see above) rather than round them. Rounded, the
# errors of outputs and gradients grow by up to 1.4 times, and what eps fades out keeps 8 bits.
SPLIT_PAIRS = True

# Tokens whose sums one program forms, and how many of them at once.
STATE_TOKENS, STATE_BLOCK = 1024, 64


@dataclass(frozen=True)
class Plan:
    """What a program does and how many there are."""

    grid: tuple[int]
    tiles: int
    constants: tuple[Any, ...]  # of the kernels, from M on
    whole: bool
    warps: int
    stages: int


def _choose(q: Tensor, v: Tensor, radii: list[int]) -> Plan:
    """Tiles, windows and warps of the three kernels with tiles."""
    (B, H, W, N, M), E, reach = q.shape, v.shape[-1], radii[-1]
    tokens, warps, stages = _tile_table(v.dtype, max(_padded(M), _padded(E)))
    rows = min(triton.next_power_of_2(H), 8 if tokens >= 64 else 4)
    columns = tokens // rows
    height, width = rows + 2 * reach, columns + 2 * reach
    whole = max(WHOLE_TOKENS, height * width) >= H * W
    tiles = triton.cdiv(H, rows) * triton.cdiv(W, columns)
    if whole:
        height, width, tiles = H, W, triton.cdiv(H * W, tokens)
    span = 16 if width <= 16 or width % 32 in range(1, 17) else 32
    constants = (
        M, E, _padded(M), _padded(E), tuple(radii), rows, columns,
        span, triton.cdiv(width, span), height, whole, SPLIT_PAIRS,
    )  # fmt: skip
    return Plan((B * N * tiles,), tiles, constants, whole, warps, stages)


def _tile_table(dtype: torch.dtype, wide: int) -> tuple[int, int, int]:
    """Tokens of a tile, warps and stages, by the wider of φ and v. Not yet tuned on a GPU."""
    if dtype == torch.float32:  # products on plain units: small tiles keep them in registers
        return (32, 4, 2) if wide <= 64 else (16, 4, 2)
    return (32, 2, 2) if wide <= 64 else (32, 4, 2)


def _choose_state(tokens: int, wide: int) -> tuple[int, int, int]:
    """Tokens at once, how often, and warps of `state_kernel`."""
    block = STATE_BLOCK if wide <= 64 else 32
    return block, triton.cdiv(min(tokens, STATE_TOKENS), block), 4 if wide <= 64 else 8
