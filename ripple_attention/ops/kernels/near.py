"""The window of near softmax as Triton kernels: flash attention over the box around a query.

Tiles and windows are those of `kernels/window.py`, and so is the way a pair finds its weight.
Scores are kept no longer than a step: forward the largest so far and the sums in its units, as
flash attention does; backward the logarithm of the sum says what a pair weighed. Where a grid is
small, the window is the grid.

This module imports triton: `dispatch` says where it can run.
"""

# ruff: noqa: RUF005

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ripple_attention.ops.kernels.common import (
    _add_products,
    _corner,
    _dense_channels,
    _load,
    _offsets,
    _place,
    _quotient,
    _rounded,
    _span,
    _store,
    _tile,
    _token,
    _token_offsets,
    _walk,
)
from ripple_attention.ops.kernels.launch import launch
from ripple_attention.ops.kernels.window import SPLIT_PAIRS, Plan, _in_group, _plan, _weights_at
from ripple_attention.ops.near import LARGEST as LARGEST_EXPONENT
from ripple_attention.ops.tiling import is_single_window

LARGEST: tl.constexpr = tl.constexpr(LARGEST_EXPONENT)

# hidden: 1 for each padded token, (B, H, W), or None. Other names are those of `kernels/common.py`;
# M is the width of queries and keys, which are not mapped.


@triton.jit
def _near_weights(pointers, inside, stride, RADII: tl.constexpr):
    """Weights of some queries, or keys' queries: a vector for each near group."""
    near = ()
    for g in tl.static_range(len(RADII)):
        near = near + (tl.load(pointers + g * stride, mask=inside, other=0.0).to(tl.float32),)
    return near


@triton.jit
def _shown(hidden, b, row, column, there, H, W, WIDE: tl.constexpr):
    """Which tokens are on the grid and not padded."""
    if hidden is not None:
        token = _token(b, 0, 0, 0, H, W, 1, WIDE) + _token_offsets(row, column, W, 1, WIDE)
        there = there & (tl.load(hidden + token, mask=there, other=1) == 0)
    return there


@triton.jit
def _scores(left, right, scale):
    """s·q·k; NaN for −∞, which would hide that an input is infinite."""
    scores = scale * tl.dot(left, tl.trans(right), input_precision="ieee")
    return tl.where(scores == -float("inf"), float("nan"), scores)


@triton.jit
def _weighed(scores, log_sum, shown):
    """e^{s − log_sum}, cut where a pair weighs nothing; unlike `minimum`, NaN stays."""
    exponent = scores - log_sum
    return tl.where(shown, tl.exp(tl.where(exponent > LARGEST, LARGEST, exponent)), 0.0)


@triton.jit
def _pulls(left, right, DTYPE: tl.constexpr):
    """∂o·v, one of them in `_rounded` for tensor cores beside inputs of DTYPE."""
    if tl.float16 == DTYPE:
        left, right = left.to(tl.float32), right.to(tl.float32)
        return tl.dot(left, tl.trans(right), input_precision="tf32")
    else:
        return tl.dot(left, tl.trans(right), input_precision="ieee")


@triton.jit
def _add_rounded(pairs, upstream, total, DTYPE: tl.constexpr):
    """total + pairs @ upstream, which is `_rounded`."""
    if tl.float16 == DTYPE:
        return tl.dot(_rounded(pairs, DTYPE), upstream, total, input_precision="tf32")
    else:
        return _add_products(pairs, upstream, total, False)


@triton.jit
def forward_kernel(
    first, q, k, v, weights, hidden, out, log_sum, q_strides, k_strides, v_strides, weight_strides,
    H, W, scale, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, RADII: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, WINDOW_ROWS: tl.constexpr,
    SINGLE_WINDOW: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Mean of the values, and logarithm of Σ α e^{s q·k}, for a tile of queries."""
    reach: tl.constexpr = 0 if SINGLE_WINDOW else RADII[len(RADII) - 1]
    b, n, down, across = _place(first, N)
    top, left, row, column, inside = _tile(down, across, H, W, ROWS, COLUMNS, SINGLE_WINDOW)
    at = _corner(q, b, n, top, left, q_strides, WIDE)
    query = _load(at, _offsets(row, column, q_strides, WIDE), inside, M, PADDED_M)
    at = _corner(weights, b, n, top, left, weight_strides, WIDE)
    at += _offsets(row, column, weight_strides, WIDE)
    near = _near_weights(at, inside, weight_strides[4], RADII)
    beyond = tl.zeros((ROWS * COLUMNS,), tl.float32)

    largest = tl.full((ROWS * COLUMNS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS * COLUMNS,), tl.float32)
    numerator = tl.zeros((ROWS * COLUMNS, PADDED_E), tl.float32)
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
            shown = _shown(hidden, b, top + key_row, left + others, there, H, W, WIDE)
            far_down = tl.abs(row[:, None] - key_row[None, :])
            down_weight = _weights_at(far_down, near, beyond, 1, RADII)
            weight = tl.where(far_down >= far_across, down_weight, across_weight)
            seen = shown[None, :] & (weight != 0)
            scores = _scores(query, key, scale)
            highest = tl.max(tl.where(seen, scores, -float("inf")), 1)
            highest = tl.maximum(largest, highest)
            shift = tl.where(highest == -float("inf"), 0.0, highest)
            pairs = tl.where(seen, weight * tl.exp(scores - shift[:, None]), 0.0)
            decay = tl.exp(largest - shift)
            total = total * decay + tl.sum(pairs, 1)
            numerator = _add_products(pairs, value, numerator * decay[:, None], SPLIT)
            largest = highest
            for _ in tl.static_range(STEP):  # one by one: a multiple may not fit 32 bits
                k_row += k_strides[1]
                v_row += v_strides[1]

    corner = _token(b, n, top, left, H, W, N, WIDE)
    token = _token_offsets(row, column, W, N, WIDE)
    mean = _quotient(numerator, total[:, None], query.dtype)
    _store(out + corner * E, token * E, inside, mean, E, PADDED_E)
    empty = total == 0
    logarithm = tl.log(tl.where(empty, 1.0, total)) + largest
    logarithm = tl.where(empty, -float("inf"), logarithm)
    tl.store(log_sum + corner + token, logarithm, mask=inside)


@triton.jit
def query_gradient_kernel(
    first, grad, grad_log, q, k, v, weights, hidden, out, log_sum, delta, grad_q, grad_weights,
    q_strides, k_strides, v_strides, weight_strides, H, W, scale, N: tl.constexpr, M: tl.constexpr,
    E: tl.constexpr, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, RADII: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr,
    SPANS: tl.constexpr, WINDOW_ROWS: tl.constexpr, SINGLE_WINDOW: tl.constexpr,
    WIDE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """∂q and ∂α of a tile of queries, and what keys take of them, δ_i = ∂o_i·o_i − ∂log_i.

    With e = e^{s − log_sum} and the pull t = ∂o_i·v_j − δ_i:
    ∂q_i = s Σ_j α e t k_j,  ∂α_g(i) = Σ_{j in g} e t.
    """
    reach: tl.constexpr = 0 if SINGLE_WINDOW else RADII[len(RADII) - 1]
    b, n, down, across = _place(first, N)
    top, left, row, column, inside = _tile(down, across, H, W, ROWS, COLUMNS, SINGLE_WINDOW)
    at = _corner(q, b, n, top, left, q_strides, WIDE)
    query = _load(at, _offsets(row, column, q_strides, WIDE), inside, M, PADDED_M)
    dtype: tl.constexpr = query.dtype
    corner = _token(b, n, top, left, H, W, N, WIDE)
    token = _token_offsets(row, column, W, N, WIDE)
    upstream = _rounded(_load(grad + corner * E, token * E, inside, E, PADDED_E), dtype)
    result = _load(out + corner * E, token * E, inside, E, PADDED_E)
    projection = tl.sum(upstream.to(tl.float32) * result, 1)
    projection -= tl.load(grad_log + corner + token, mask=inside, other=0.0)
    tl.store(delta + corner + token, projection, mask=inside)
    log = tl.load(log_sum + corner + token, mask=inside, other=0.0)
    at = _corner(weights, b, n, top, left, weight_strides, WIDE)
    at += _offsets(row, column, weight_strides, WIDE)
    near = _near_weights(at, inside, weight_strides[4], RADII)
    beyond = tl.zeros((ROWS * COLUMNS,), tl.float32)

    gradient = tl.zeros((ROWS * COLUMNS, PADDED_M), tl.float32)
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
            shown = _shown(hidden, b, top + key_row, left + others, there, H, W, WIDE)
            far_down = tl.abs(row[:, None] - key_row[None, :])
            down_weight = _weights_at(far_down, near, beyond, 1, RADII)
            by_row = far_down >= far_across  # the distance is of rows, else of columns
            shown = shown[None, :] & (
                tl.where(by_row, far_down, far_across) <= RADII[len(RADII) - 1]
            )
            pull = _weighed(_scores(query, key, scale), log[:, None], shown)
            pull *= _pulls(upstream, value, dtype) - projection[:, None]
            across_sums += tl.where(by_row, 0.0, pull)
            products = tl.where(by_row, pull, 0.0)
            for i in tl.static_range(STEP):
                # −0 adds nothing, and the compiler knows: each sum is one row's.
                down_sum = tl.sum(tl.where(below[None, :] == i, products, -0.0), 1)
                far = tl.abs(row - (step + i - reach))
                sums = ()
                for g in tl.static_range(len(RADII)):
                    members = _in_group(far, g, RADII)
                    sums = sums + (by_group[g] + tl.where(members, down_sum, 0.0),)
                by_group = sums
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

    _store(grad_q + corner * M, token * M, inside, scale * gradient, M, PADDED_M)
    at = grad_weights + (corner + token) * len(RADII)
    for g in tl.static_range(len(RADII)):
        tl.store(at + g, by_group[g].to(grad_weights.dtype.element_ty), mask=inside)


@triton.jit
def key_gradient_kernel(
    first, grad, q, k, v, weights, hidden, log_sum, delta, grad_k, grad_v, q_strides, k_strides,
    v_strides, weight_strides, H, W, scale, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, RADII: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    WINDOW_ROWS: tl.constexpr, SINGLE_WINDOW: tl.constexpr, WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """∂k and ∂v of a tile of keys, from the queries around it: membership is symmetric.

    ∂k_j = s Σ_i α e t q_i,  ∂v_j = Σ_i α e ∂o_i.
    """
    reach: tl.constexpr = 0 if SINGLE_WINDOW else RADII[len(RADII) - 1]
    b, n, down, across = _place(first, N)
    top, left, row, column, inside = _tile(down, across, H, W, ROWS, COLUMNS, SINGLE_WINDOW)
    at = _corner(k, b, n, top, left, k_strides, WIDE)
    key = _load(at, _offsets(row, column, k_strides, WIDE), inside, M, PADDED_M)
    at = _corner(v, b, n, top, left, v_strides, WIDE)
    value = _load(at, _offsets(row, column, v_strides, WIDE), inside, E, PADDED_E)
    dtype: tl.constexpr = key.dtype
    mine = _shown(hidden, b, top + row, left + column, inside, H, W, WIDE)

    key_gradient = tl.zeros((ROWS * COLUMNS, PADDED_M), tl.float32)
    value_gradient = tl.zeros((ROWS * COLUMNS, PADDED_E), tl.float32)
    for span in range(SPANS):
        below, others, present, far_across = _span(
            span, left, column, W, STEP, SPAN, RADII[len(RADII) - 1], SINGLE_WINDOW, COLUMNS
        )
        q_row, q_offsets = _walk(q, b, n, top - reach, left, below, others, q_strides, WIDE)
        at_row, w_offsets = _walk(
            weights, b, n, top - reach, left, below, others, weight_strides, WIDE
        )
        token_row = _token(b, n, top - reach, left, H, W, N, WIDE)
        token = _token_offsets(below, others, W, N, WIDE)
        for step in range(0, WINDOW_ROWS, STEP):
            query_row = below + (step - reach)
            there = present & (top + query_row >= 0) & (top + query_row < H)
            query = _load(q_row, q_offsets, there, M, PADDED_M)
            upstream = _load(grad + token_row * E, token * E, there, E, PADDED_E)
            upstream = _rounded(upstream, dtype)
            projection = tl.load(delta + token_row + token, mask=there, other=0.0)
            log = tl.load(log_sum + token_row + token, mask=there, other=0.0)
            near = _near_weights(at_row + w_offsets, there, weight_strides[4], RADII)
            distance = tl.maximum(tl.abs(row[:, None] - query_row[None, :]), far_across)
            weight = _weights_at(distance, near, tl.zeros_like(log), 0, RADII)
            shown = mine[:, None] & there[None, :] & (distance <= RADII[len(RADII) - 1])
            pairs = weight * _weighed(_scores(key, query, scale), log[None, :], shown)
            pull = pairs * (_pulls(value, upstream, dtype) - projection[None, :])
            key_gradient = _add_products(pull, query, key_gradient, SPLIT)
            value_gradient = _add_rounded(pairs, upstream, value_gradient, dtype)
            for _ in tl.static_range(STEP):  # one by one: a multiple may not fit 32 bits
                q_row += q_strides[1]
                at_row += weight_strides[1]
            token_row += STEP * W * N

    corner = _token(b, n, top, left, H, W, N, WIDE)
    token = _token_offsets(row, column, W, N, WIDE)
    _store(grad_k + corner * M, token * M, inside, scale * key_gradient, M, PADDED_M)
    _store(grad_v + corner * E, token * E, inside, value_gradient, E, PADDED_E)


# Launchers


def near_triton_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    radii: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The window of near softmax. Arguments and results as of `near.window_by_pairs`."""
    q, k, v = (_dense_channels(x) for x in (q, k, v))
    out = v.new_empty(v.shape, dtype=torch.float32)
    log_sum = out.new_empty(v.shape[:-1])
    with torch.cuda.device_of(v):
        plan = _choose("forward", q, v, radii, (q, k, v, weights))
        launch(
            forward_kernel, plan.grid, q, k, v, weights, _hidden(mask), out, log_sum, q.stride(),
            k.stride(), v.stride(), weights.stride(), *v.shape[1:3], scale, *plan.constants,
            **plan.options,
        )  # fmt: skip
    return out, log_sum


def near_triton_backward(
    grad: Tensor,
    grad_log: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    mask: Tensor | None,
    out: Tensor,
    log_sum: Tensor,
    radii: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `near_triton_forward` for q, k, v and the weights, in the types of these."""
    q, k, v = (_dense_channels(x) for x in (q, k, v))
    grad, grad_log, out, log_sum = (x.contiguous() for x in (grad, grad_log, out, log_sum))
    grads = [x.new_empty(x.shape) for x in (q, k, v, weights)]
    delta, hidden = torch.empty_like(log_sum), _hidden(mask)
    inputs = q, k, v, weights
    more = [x.stride() for x in inputs] + [*v.shape[1:3], scale]
    with torch.cuda.device_of(v):
        by_query, by_key = (_choose(role, q, v, radii, inputs) for role in ("query", "key"))
        launch(
            query_gradient_kernel, by_query.grid, grad, grad_log, *inputs, hidden, out, log_sum,
            delta, grads[0], grads[3], *more, *by_query.constants, **by_query.options,
        )  # fmt: skip
        launch(
            key_gradient_kernel, by_key.grid, grad, *inputs, hidden, log_sum, delta, grads[1],
            grads[2], *more, *by_key.constants, **by_key.options,
        )  # fmt: skip
    return grads[0], grads[1], grads[2], grads[3]


def _hidden(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.to(torch.uint8).contiguous()


def _choose(role: str, q: Tensor, v: Tensor, radii: list[int], inputs: tuple[Tensor, ...]) -> Plan:
    """Tiles and windows of `kernels/window.py`; not yet tuned."""
    strides = tuple(x.stride() for x in inputs)
    single_window = is_single_window(q.shape[1], q.shape[2], radii)
    shape = (*q.shape, v.shape[-1])
    plan = _plan(role, shape, v.dtype, tuple(radii), strides, single_window, SPLIT_PAIRS, False)
    constants = plan.constants[:5] + plan.constants[6:-1]  # without PADDED_G and OVERLAP
    options = {name: x for name, x in plan.options.items() if name != "maxnreg"}
    return replace(plan, constants=constants, options=options)
