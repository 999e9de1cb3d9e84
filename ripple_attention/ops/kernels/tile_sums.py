"""`tile_sums` as Triton kernels: a near window, wide boxes and coarse rings.

By parts, groups weigh as boxes do by the steps from each weight to the next, α_g − α_{g+1}, and by
α_rest for the whole grid. Programs take blocks of 8×8 queries: small boxes are a window of pairs;
of every wide one a block reads the state of its tile, Σ_j φk_j[v_j, 1]ᵀ, an M×(E+1) matrix. States
are made by one kernel, and summed over windows of tiles in PyTorch operations: there are few.
Keys read one state of queries, in which all wide boxes are one sum. A coarse ring is such sums;
what a box around a token holds beside them is added by `strips`.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ripple_attention.ops.box_sums import band_matrix
from ripple_attention.ops.kernels.common import (
    _add_products,
    _at,
    _dense_channels,
    _inverse,
    _load,
    _multiply,
    _padded,
    _parts,
    _place,
    _power_of_two,
    _pull,
    _quotient,
    _store,
    are_odd,
)
from ripple_attention.ops.kernels.launch import launch
from ripple_attention.ops.kernels.strips import Strips
from ripple_attention.ops.tile_sums import make_plan

BLOCK = 8  # rows and columns of queries in a program; divides a tile
CANCELLED: tl.constexpr = tl.constexpr(16 * torch.finfo(torch.float32).eps)  # `flush_cancellation`

# Names in kernels: RADII are those of the window, which has WINDOW steps of two rows of 16 keys and
# reaches to REACH. WIDE counts wide boxes without the whole grid. `steps` is (B, H, W, N, G), and
# `states` holds (WIDE, B, N, tile rows, tile columns, M, E+1) and, of the whole grid, (B, N, M,
# E+1); all are float32 and contiguous. STRIPS: there are sums of `strips`. Offsets take 64 bits.


@triton.jit
def _block(first, N: tl.constexpr):
    """Batch, head, row and column of a block's 64 tokens, and of the block among blocks."""
    b, n, down, across = _place(first, N)
    index = tl.arange(0, 64)
    return b.to(tl.int64), n, down * 8 + index // 8, across * 8 + index % 8, down, across


@triton.jit
def _index(b, n, row, column, H, W, N: tl.constexpr):
    """Of tokens' heads in a contiguous (B, H, W, N)."""
    return ((b * H + row) * W + column) * N + n


@triton.jit
def _window_step(step, row, column, down, across, H, W, SPANS: tl.constexpr, REACH: tl.constexpr):
    """Rows and columns of a step's 32 tokens, which there are, and distances (block, step)."""
    index = tl.arange(0, 32)
    other_row = down * 8 - REACH + step // SPANS * 2 + index // 16
    other_column = across * 8 - REACH + step % SPANS * 16 + index % 16
    present = (other_row >= 0) & (other_row < H) & (other_column >= 0) & (other_column < W)
    vertical = tl.abs(row[:, None] - other_row[None, :])
    distance = tl.maximum(vertical, tl.abs(column[:, None] - other_column[None, :]))
    return other_row, other_column, present, distance


@triton.jit
def _load_box(
    states, box, b, n, down, across, B, H, W, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The state that a block reads of a wide box: a matrix (PADDED_M, PADDED_E), and its last
    column."""
    rows, columns = (H + TILE - 1) // TILE, (W + TILE - 1) // TILE
    head = (box * B + b) * N + n
    tile = (head * rows + down * 8 // TILE) * columns + across * 8 // TILE
    if box == WIDE:  # the whole grid: one state for all tiles
        tile = WIDE * B * N * rows * columns + b * N + n
    feature = tl.arange(0, PADDED_M)
    at = states + tile * M * (E + 1)
    matrix = _load(at, feature * (E + 1), feature < M, E, PADDED_E)
    return matrix, tl.load(at + feature * (E + 1) + E, mask=feature < M, other=0.0)


@triton.jit
def _read(x, state, FLIP: tl.constexpr):
    """x @ state, or its transpose where FLIP, in float32."""
    parts = _parts(state, x.dtype, 2)
    PRECISION: tl.constexpr = "ieee" if x.dtype == tl.float32 else "tf32"
    return _multiply(x.to(parts[0].dtype), parts, 2, FLIP, PRECISION)


@triton.jit
def state_kernel(
    first, a, b_values, scale, last, states, a_strides, b_strides, B, H, W,
    N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, TILE: tl.constexpr, G: tl.constexpr, FIRST: tl.constexpr,
    BOXES: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Σ_i s_i a_i[b_i, d_i]ᵀ of a tile, for every wide box with an s of its own: from `scale`
    (B, H, W, N, G), whose wide boxes are from FIRST on. Without SCALED, s and d are 1."""
    b, n, down, across = _place(first, N)
    b = b.to(tl.int64)
    index, feature = tl.arange(0, 64), tl.arange(0, PADDED_M)
    PARTS: tl.constexpr = TILE // 8
    for box in range(BOXES):
        total = tl.zeros((PADDED_M, PADDED_E), tl.float32)
        column_total = tl.zeros((PADDED_M,), tl.float32)
        for part in range(PARTS * PARTS):
            row = down * TILE + part // PARTS * 8 + index // 8
            column = across * TILE + part % PARTS * 8 + index % 8
            inside = (row < H) & (column < W)
            left = _load(a, _at(b, n, row, column, a_strides), inside, M, PADDED_M)
            right = _load(b_values, _at(b, n, row, column, b_strides), inside, E, PADDED_E)
            wide = left.to(tl.float32)
            end = inside.to(tl.float32)
            if SCALED:
                token = _index(b, n, row, column, H, W, N)
                s = tl.load(scale + token * G + FIRST + box, mask=inside, other=0.0)
                wide *= s[:, None]
                end = tl.load(last + token, mask=inside, other=0.0)
            total = _add_products(tl.trans(wide), right, total, SCALED)
            column_total += tl.sum(wide * end[:, None], 0)
        rows, columns = (H + TILE - 1) // TILE, (W + TILE - 1) // TILE
        tile = (((box * B + b) * N + n) * rows + down) * columns + across
        at = states + tile * M * (E + 1)
        _store(at, feature * (E + 1), feature < M, total, E, PADDED_E)
        tl.store(at + feature * (E + 1) + E, column_total, mask=feature < M)


@triton.jit
def forward_kernel(
    first, q, k, v, steps, states, sums, totals, sizes, out, denominator,
    q_strides, k_strides, v_strides, B, H, W, eps,
    N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, TILE: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr,
    STRIPS: tl.constexpr, RADII: tl.constexpr, REACH: tl.constexpr, WINDOW: tl.constexpr,
    SPANS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Output and denominator + eps of a block."""
    b, n, row, column, down, across = _block(first, N)
    inside = (row < H) & (column < W)
    token = _index(b, n, row, column, H, W, N)
    query = _load(q, _at(b, n, row, column, q_strides), inside, M, PADDED_M)
    numerator = tl.zeros((64, PADDED_E), tl.float32)
    near = tl.zeros((64, 32), tl.float32)
    for step in range(WINDOW):
        other_row, other_column, present, distance = _window_step(
            step, row, column, down, across, H, W, SPANS, REACH
        )
        key = _load(k, _at(b, n, other_row, other_column, k_strides), present, M, PADDED_M)
        value = _load(v, _at(b, n, other_row, other_column, v_strides), present, E, PADDED_E)
        weight = tl.zeros((64, 32), tl.float32)
        for g in tl.static_range(len(RADII)):
            of_box = tl.load(steps + token * G + g, mask=inside, other=0.0)
            weight += tl.where(distance <= RADII[g], of_box[:, None], 0.0)
        pairs = tl.dot(query, tl.trans(key), input_precision="ieee") * weight
        near += pairs
        numerator = _add_products(pairs, value, numerator, SPLIT)
    total = tl.sum(near, 1)
    size = tl.abs(total)
    for box in range(WIDE + 1):
        state, end = _load_box(
            states, box, b, n, down, across, B, H, W, N, M, E, PADDED_M, PADDED_E, TILE, WIDE
        )
        of_box = tl.load(steps + token * G + len(RADII) + box, mask=inside, other=0.0)
        numerator += of_box[:, None] * _read(query, state, False)
        far = of_box * tl.sum(query.to(tl.float32) * end[None, :], 1)
        total += far
        size += tl.abs(far)
    if STRIPS:
        numerator += _load(sums, token * E, inside, E, PADDED_E)
        total += tl.load(totals + token, mask=inside, other=0.0)
        size += tl.load(sizes + token, mask=inside, other=0.0)
    total += eps
    rounding = size * CANCELLED
    total = tl.where(tl.abs(total) <= rounding, 0.0, total)
    total = tl.where(rounding < float("inf"), total, float("nan"))  # else sums have overflowed
    result = _quotient(numerator, total[:, None], query.dtype)
    _store(out, token * E, inside, result, E, PADDED_E)
    tl.store(denominator + token, total, mask=inside)


@triton.jit
def query_gradient_kernel(
    first, grad, q, k, v, steps, states, strips, out, denominator, delta, inverse, grad_q,
    grad_steps, grad_strides, q_strides, k_strides, v_strides, B, H, W,
    N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, TILE: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr,
    STRIPS: tl.constexpr, RADII: tl.constexpr, REACH: tl.constexpr, WINDOW: tl.constexpr,
    SPANS: tl.constexpr, SPLIT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """∂φq and ∂steps of a block; δ_i = ∂o_i·o_i and 1/den_i. With STRIPS, δ is there, and `strips`
    and `grad_steps` hold their part of ∂φq and ∂steps, both times den_i."""
    b, n, row, column, down, across = _block(first, N)
    inside = (row < H) & (column < W)
    token = _index(b, n, row, column, H, W, N)
    query = _load(q, _at(b, n, row, column, q_strides), inside, M, PADDED_M)
    upstream = _load(grad, _at(b, n, row, column, grad_strides), inside, E, PADDED_E)
    if STRIPS:
        projection = tl.load(delta + token, mask=inside, other=0.0)
    else:
        result = _load(out, token * E, inside, E, PADDED_E)
        projection = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
        tl.store(delta + token, projection, mask=inside)
    scale = _inverse(tl.load(denominator + token, mask=inside, other=0.0), upstream.dtype)
    tl.store(inverse + token, scale, mask=inside)
    gradient = tl.zeros((64, PADDED_M), tl.float32)
    if STRIPS:
        gradient += _load(strips, token * M, inside, M, PADDED_M)
    sums = tl.zeros((64, GROUPS), tl.float32)  # ∂steps of the window
    group = tl.arange(0, GROUPS)[None, :]
    minus = tl.broadcast_to(-projection[:, None], (64, 32))
    for step in range(WINDOW):
        other_row, other_column, present, distance = _window_step(
            step, row, column, down, across, H, W, SPANS, REACH
        )
        key = _load(k, _at(b, n, other_row, other_column, k_strides), present, M, PADDED_M)
        value = _load(v, _at(b, n, other_row, other_column, v_strides), present, E, PADDED_E)
        similarity = tl.dot(query, tl.trans(key), input_precision="ieee")
        pull = tl.dot(upstream, tl.trans(value), minus, input_precision="ieee")
        products, weight = similarity * pull, tl.zeros((64, 32), tl.float32)
        for g in tl.static_range(len(RADII)):
            of_box = tl.load(steps + token * G + g, mask=inside, other=0.0)
            weight += tl.where(distance <= RADII[g], of_box[:, None], 0.0)
            in_box = tl.sum(tl.where(distance <= RADII[g], products, 0.0), 1)
            sums += tl.where(group == g, in_box[:, None], 0.0)
        gradient = _add_products(pull * weight, key, gradient, SPLIT)
    to_steps = grad_steps + token[:, None] * G + group
    tl.store(to_steps, scale[:, None] * sums, mask=inside[:, None] & (group < len(RADII)))
    for box in range(WIDE + 1):
        state, end = _load_box(
            states, box, b, n, down, across, B, H, W, N, M, E, PADDED_M, PADDED_E, TILE, WIDE
        )
        at = token * G + len(RADII) + box
        pulls = _read(upstream, state, True) - projection[:, None] * end[None, :]
        gradient += tl.load(steps + at, mask=inside, other=0.0)[:, None] * pulls
        by_box = tl.sum(query.to(tl.float32) * pulls, 1)
        if STRIPS:
            by_box += tl.load(grad_steps + at, mask=inside & (box < WIDE), other=0.0)
        tl.store(grad_steps + at, scale * by_box, mask=inside)
    _store(grad_q, token * M, inside, scale[:, None] * gradient, M, PADDED_M)


@triton.jit
def key_gradient_kernel(
    first, grad, q, k, v, scaled, states, strips_k, strips_v, delta, grad_k, grad_v,
    grad_strides, q_strides, k_strides, v_strides, B, H, W,
    N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, TILE: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr,
    STRIPS: tl.constexpr, RADII: tl.constexpr, REACH: tl.constexpr, WINDOW: tl.constexpr,
    SPANS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """∂φk and ∂v of a block of keys; `scaled` holds the steps of all queries, each over its den.
    `states` has one state for each tile."""
    b, n, row, column, down, across = _block(first, N)
    inside = (row < H) & (column < W)
    token = _index(b, n, row, column, H, W, N)
    key = _load(k, _at(b, n, row, column, k_strides), inside, M, PADDED_M)
    value = _load(v, _at(b, n, row, column, v_strides), inside, E, PADDED_E)
    state, end = _load_box(
        states, 0, b, n, down, across, B, H, W, N, M, E, PADDED_M, PADDED_E, TILE, 1
    )
    key_gradient = _read(value, state, True) + end[None, :]
    value_gradient = _read(key, state, False)
    if STRIPS:
        key_gradient += _load(strips_k, token * M, inside, M, PADDED_M)
        value_gradient += _load(strips_v, token * E, inside, E, PADDED_E)
    for step in range(WINDOW):
        other_row, other_column, present, distance = _window_step(
            step, row, column, down, across, H, W, SPANS, REACH
        )
        other = _index(b, n, other_row, other_column, H, W, N)
        query = _load(q, _at(b, n, other_row, other_column, q_strides), present, M, PADDED_M)
        at = _at(b, n, other_row, other_column, grad_strides)
        upstream = _load(grad, at, present, E, PADDED_E)
        projection = tl.load(delta + other, mask=present, other=0.0)
        weight = tl.zeros((64, 32), tl.float32)
        for g in tl.static_range(len(RADII)):
            of_box = tl.load(scaled + other * G + g, mask=present, other=0.0)
            weight += tl.where(distance <= RADII[g], of_box[None, :], 0.0)
        similarity = tl.dot(key, tl.trans(query), input_precision="ieee")
        pull = _pull(value, upstream, projection)
        key_gradient = _add_products(pull * weight, query, key_gradient, SPLIT)
        value_gradient = _add_products(similarity * weight, upstream, value_gradient, SPLIT)
    _store(grad_k, token * M, inside, key_gradient, M, PADDED_M)
    _store(grad_v, token * E, inside, value_gradient, E, PADDED_E)


# Launchers


def tile_sums_triton_forward(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, bounds: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """Ripple attention by a window and shared sums. As `tile_sums_forward`."""
    q, k, v = (_dense_channels(x) for x in (q, k, v))
    out = v.new_empty(v.shape)
    denominator = v.new_empty(v.shape[:-1], dtype=torch.float32)
    plan = _Launches(q, v, bounds)
    steps = plan.steps(spatial_weights)
    with torch.cuda.device_of(v):
        states = plan.wide_sums(plan.states(k, v))
        sums = plan.strips.sums(q, k, v, steps) if plan.strips else (denominator,) * 3
        launch(
            forward_kernel, plan.blocks,
            q, k, v, steps, states, *sums, out, denominator,
            q.stride(), k.stride(), v.stride(), *plan.sizes, eps, *plan.constants, *plan.window,
            **plan.options,
        )  # fmt: skip
    return out, denominator


def tile_sums_triton_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    out: Tensor,
    denominator: Tensor,
    bounds: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `tile_sums_triton_forward` for q, k, v and the weights, in their types."""
    inputs = grad, q, k, v = tuple(_dense_channels(x) for x in (grad, q, k, v))
    out, denominator = out.contiguous(), denominator.contiguous()
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    delta, inverse = torch.empty_like(denominator), torch.empty_like(denominator)
    plan, strides = _Launches(q, v, bounds), [x.stride() for x in inputs]
    steps = plan.steps(spatial_weights)
    grad_steps = torch.empty_like(steps)
    strips_q, strips_k, strips_v = (delta,) * 3
    with torch.cuda.device_of(v):
        states = plan.wide_sums(plan.states(k, v))
        if plan.strips:
            torch.sum(grad.float() * out, -1, out=delta)
            strips_q = plan.strips.query_gradients(inputs, steps, delta, grad_steps)
        launch(
            query_gradient_kernel, plan.blocks,
            *inputs, steps, states, strips_q, out, denominator, delta, inverse, grads[0],
            grad_steps, *strides, *plan.sizes, *plan.constants, *plan.window,
            _power_of_two(steps.shape[-1]), **plan.options,
        )  # fmt: skip
        scaled = steps * inverse.unsqueeze(-1)
        states = plan.sum_of_all(plan.states(q, grad, scaled, -delta))
        if plan.strips:
            strips_k, strips_v = plan.strips.key_gradients(inputs, scaled, delta)
        launch(
            key_gradient_kernel, plan.blocks,
            *inputs, scaled, states, strips_k, strips_v, delta, grads[1], grads[2],
            *strides, *plan.sizes, *plan.constants, *plan.window, **plan.options,
        )  # fmt: skip
    grad_weights = grad_steps.diff(dim=-1, prepend=torch.zeros_like(grad_steps[..., :1]))
    grad_weights = F.pad(grad_weights, (0, spatial_weights.shape[-1] - steps.shape[-1]))
    return grads[0], grads[1], grads[2], grad_weights.to(spatial_weights.dtype)


class _Launches:
    """What the launches for some inputs have in common; not yet tuned."""

    def __init__(self, q: Tensor, v: Tensor, bounds: list[int]):
        (B, H, W, N, M), E = q.shape, v.shape[-1]
        self.plan = plan = make_plan(bounds, H, W)
        self.sizes, tile = (B, H, W), plan.tile
        self.tiles = (N * triton.cdiv(W, tile), triton.cdiv(H, tile), B)
        self.blocks = (N * triton.cdiv(W, BLOCK), triton.cdiv(H, BLOCK), B)
        # The radii of wide boxes, in tiles.
        self.cores = plan.boxes
        self.strips = None
        if plan.boxes and not plan.coarse:
            self.cores = tuple((radius + 1) // tile - 1 for radius in plan.boxes)
            self.strips = Strips(q, v, plan.boxes, tile, plan.rest + 1, len(plan.near))
        wide = (len(plan.boxes), self.strips is not None)
        self.constants = (N, M, E, _padded(M), _padded(E), tile, plan.rest + 1, *wide)
        reach = plan.near[-1] if plan.near else 0
        self.spans = triton.cdiv(BLOCK + 2 * reach, 16)
        steps = triton.cdiv(BLOCK + 2 * reach, 2) * self.spans if plan.near else 0
        self.window = (plan.near, reach, steps, self.spans, False)
        large = max(_padded(M), _padded(E)) > 64 or v.dtype != torch.bfloat16
        self.options = {"num_warps": 8 if large else 4, "num_stages": 1 if large else 2}
        if are_odd(M, E) and v.dtype != torch.float32:
            self.options = {"num_warps": 2, "num_stages": 1}

    def steps(self, weights: Tensor) -> Tensor:
        """From each weight to the next, and the last: float32, contiguous (B, H, W, N, G)."""
        weights = weights[..., : self.plan.rest + 1].float()
        return torch.cat([weights[..., :-1] - weights[..., 1:], weights[..., -1:]], -1)

    def states(
        self, a: Tensor, b: Tensor, scale: Tensor | None = None, last: Tensor | None = None
    ) -> Tensor:
        """(boxes, B, N, tile rows, tile columns, M, E+1): one box without a scale for each."""
        N, M, E, *_ = self.constants
        near = len(self.plan.near)
        boxes = 1 if scale is None else self.plan.rest + 1 - near
        columns, rows, B = self.tiles
        shape = (boxes, B, N, rows, columns // N, M, E + 1)
        states = a.new_empty(shape, dtype=torch.float32)
        launch(
            state_kernel, self.tiles,
            a, b, states if scale is None else scale, states if last is None else last, states,
            a.stride(), b.stride(), *self.sizes, *self.constants[:7], near, boxes,
            scale is not None, **self.options,
        )  # fmt: skip
        return states

    def wide_sums(self, states: Tensor) -> Tensor:
        """What tiles read: the sum over each wide box, and over the grid."""
        states = states[0]  # (B, N, tile rows, tile columns, M, E+1)
        size, state = states.shape[:4].numel(), states.shape[4:]
        sums = states.new_empty(size * len(self.cores) + states.shape[:2].numel(), *state)
        for box, radius in enumerate(self.cores):
            of_box = sums[box * size : (box + 1) * size].view(states.shape)
            _sum_windows(states, radius, out=of_box)
        torch.sum(states.flatten(2, 3).flatten(0, 1), 1, out=sums[len(self.cores) * size :])
        return sums

    def sum_of_all(self, states: Tensor) -> Tensor:
        """What keys read: for each wide box another state, and all in one sum."""
        total = states[-1].sum((2, 3), keepdim=True).expand_as(states[-1]).clone()
        for radius, state in zip(self.cores, states, strict=False):
            total += _sum_windows(state, radius)
        return total


def _sum_windows(states: Tensor, radius: int, out: Tensor | None = None) -> Tensor:
    """Sums over the tiles at most `radius` away, of (B, N, tile rows, tile columns, M, E+1)."""
    B, N, rows, columns, M, E1 = states.shape
    down, across = (band_matrix(size, radius, states) for size in (rows, columns))
    summed = torch.matmul(across, states.view(B * N * rows, columns, M * E1))
    flat = None if out is None else out.view(B * N, rows, columns * M * E1)
    return torch.matmul(down, summed.view(B * N, rows, -1), out=flat).view(states.shape)
