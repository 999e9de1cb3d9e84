"""The paper's dynamic programming in Triton: tables in memory, boxes contracted as they are read.

The mathematics is that of `ops.table`: v' = [v, 1], tables of deviations from the mean, float32
throughout. A table is written once, along rows and then down columns; a query reads four corners of
it for each box and contracts them at once with φ(q) (or y', going back): what it holds is never
written. Inputs come as contiguous float32 copies with the heads first, (B·N, H·W, channels), whose
size is small beside a table's, M·(E+1) numbers for each token.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ripple_attention.ops.common import accumulation_dtype, safe_divide
from ripple_attention.ops.table import UNITS, table_parts
from ripple_attention.partition import Partition

CHANNELS_AT_ONCE = 256  # of a table, by one program of a scan
NUMBERS_AT_ONCE = 8192  # of boxes, by one program that reads them


@triton.jit
def _add(total, lost, x):
    """total + x, and what rounding has added to it (Kahan): a long sum as exact as a short one."""
    x -= lost
    larger = total + x
    return larger, (larger - total) - x


@triton.jit
def _scan_rows(a, b, mean, table, H, M, E1, CHANNELS, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """table[r+1, c+1] = Σ_{c' ≤ c} (a bᵀ − mean)[r, c'], for one row and a block of channels."""
    row = tl.program_id(0).to(tl.int64)  # of all images
    image, row_of_image = row // H, row % H
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    average = tl.load(mean + image * CHANNELS + channel, mask=inside, other=0.0)
    cell = (image * (H + 1) + row_of_image + 1) * (WIDTH + 1) + 1
    total, lost = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for column in range(WIDTH):
        token = row * WIDTH + column
        left = tl.load(a + token * M + channel // E1, mask=inside, other=0.0)
        right = tl.load(b + token * E1 + channel % E1, mask=inside, other=0.0)
        total, lost = _add(total, lost, left * right - average)
        tl.store(table + (cell + column) * CHANNELS + channel, total, mask=inside)


@triton.jit
def _scan_columns(table, peaks, W, CHANNELS, HEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Adds to each row of a table the one above, for one column and a block of channels.

    peaks[column] is the largest of the sums, without their sign.
    """
    column = tl.program_id(0).to(tl.int64)  # of all images
    image, column_of_image = column // W, column % W
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    total, lost = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    peak = tl.zeros((BLOCK,), tl.float32)
    for row in range(HEIGHT):
        cell = (image * (HEIGHT + 1) + row + 1) * (W + 1) + column_of_image + 1
        here = table + cell * CHANNELS + channel
        total, lost = _add(total, lost, tl.load(here, mask=inside, other=0.0))
        peak = tl.maximum(peak, tl.abs(total))
        tl.store(here, total, mask=inside)
    tl.store(peaks + column * CHANNELS + channel, peak, mask=inside)


@triton.jit
def _tokens(H, W, QUERIES: tl.constexpr):
    """Image, token of all images, row, column and whether there is one, of a program's queries."""
    blocks = tl.cdiv(H * W, QUERIES)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    token = (tl.program_id(0) % blocks) * QUERIES + tl.arange(0, QUERIES)
    return image, image * (H * W) + token, token // W, token % W, token < H * W


@triton.jit
def _load_tokens(x, token, inside, WIDTH, PADDED: tl.constexpr):
    """Rows of a (tokens, WIDTH) tensor, zero beyond its ends: (QUERIES, PADDED)."""
    channel = tl.arange(0, PADDED)
    mask = inside[:, None] & (channel < WIDTH)[None, :]
    return tl.load(x + token[:, None] * WIDTH + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _load_mean(mean, image, M, E1, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr):
    """(PADDED_M, PADDED_E)."""
    m, e = tl.arange(0, PADDED_M)[:, None], tl.arange(0, PADDED_E)[None, :]
    return tl.load(mean + image * M * E1 + m * E1 + e, mask=(m < M) & (e < E1), other=0.0)


@triton.jit
def _load_left(table, image, H, W, M, E1, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr):
    """All deviations of an image, what rounding has left out of the mean: as `_load_mean`."""
    last = table + ((image + 1) * (H + 1) * (W + 1) - 1) * M * E1
    return _load_mean(last, 0, M, E1, PADDED_M, PADDED_E)


@triton.jit
def _times_mean(query, average, inside):
    """query @ average, without tensor cores, in (QUERIES, PE).

    Triton takes the sum of a product of two that are broadcast for a matrix product, in tf32, and
    of fewer than eight features for a wrong one. A factor that is 1 for all queries hides it.
    """
    of_queries = average[None, :, :] * inside.to(tl.float32)[:, None, None]
    return tl.sum(query[:, :, None] * of_queries, 1)


@triton.jit
def _table_corner(
    table, image, row, column, inside, H, W, M, E1, PM: tl.constexpr, PE: tl.constexpr
):
    """The table at a corner for each query: (QUERIES, PM, PE)."""
    cell = (image * (H + 1) + row) * (W + 1) + column  # (QUERIES,)
    m, e = tl.arange(0, PM)[None, :, None], tl.arange(0, PE)[None, None, :]
    mask = inside[:, None, None] & (m < M) & (e < E1)
    return tl.load(table + (cell * (M * E1))[:, None, None] + m * E1 + e, mask=mask, other=0.0)


@triton.jit
def _box(
    table, image, row, column, radius, inside, H, W, M, E1, PM: tl.constexpr, PE: tl.constexpr
):
    """Deviations summed over the clipped box of each query, (QUERIES, PM, PE), and its cells."""
    top, bottom = tl.maximum(row - radius, 0), tl.minimum(row + radius + 1, H)
    left, right = tl.maximum(column - radius, 0), tl.minimum(column + radius + 1, W)
    near = _table_corner(table, image, bottom, right, inside, H, W, M, E1, PM, PE)
    near -= _table_corner(table, image, top, right, inside, H, W, M, E1, PM, PE)
    far = _table_corner(table, image, bottom, left, inside, H, W, M, E1, PM, PE)
    far -= _table_corner(table, image, top, left, inside, H, W, M, E1, PM, PE)
    return near - far, ((bottom - top) * (right - left)).to(tl.float32)


@triton.jit
def _forward(
    q, weights, mean, table, peak, radii, out, denominator, H, W, M, E1, eps, rounding,
    BOXES: tl.constexpr, QUERIES: tl.constexpr, PM: tl.constexpr, PE: tl.constexpr,
):  # fmt: skip
    """o_i = Σ_g α_g (φq·ring_g) of v, over that of 1, plus eps."""
    image, token, row, column, inside = _tokens(H, W, QUERIES)
    query = _load_tokens(q, token, inside, M, PM)
    average = _load_mean(mean, image, M, E1, PM, PE)
    of_mean = _times_mean(query, average, inside)  # (QUERIES, PE)
    value = tl.arange(0, PE)
    ones = (value == E1 - 1)[None, :]
    feature = tl.arange(0, PM)
    highest = tl.load(peak + image * M + feature, mask=feature < M, other=0.0)
    per_box = tl.sum(tl.abs(query) * highest[None, :], 1)  # the size of what a box adds up
    per_cell = tl.sum(tl.abs(query) * tl.sum(tl.where(ones, tl.abs(average), 0.0), 1)[None, :], 1)
    sums = tl.zeros((QUERIES, PE), tl.float32)
    inner = tl.zeros((QUERIES, PE), tl.float32)
    magnitude = tl.zeros((QUERIES,), tl.float32)
    for g in range(BOXES):
        radius = tl.load(radii + g)
        weight = tl.load(weights + token * (BOXES + 1) + g, mask=inside, other=0.0)
        deviations, count = _box(table, image, row, column, radius, inside, H, W, M, E1, PM, PE)
        box = tl.sum(query[:, :, None] * deviations, 1) + count[:, None] * of_mean
        sums += weight[:, None] * (box - inner)
        inner = box
        magnitude += tl.abs(weight) * (per_box + count * per_cell)
    rest = tl.load(weights + token * (BOXES + 1) + BOXES, mask=inside, other=0.0)
    left = _load_left(table, image, H, W, M, E1, PM, PE)
    whole = _times_mean(query, left, inside) + of_mean * (H * W * 1.0)
    sums += rest[:, None] * (whole - inner)
    magnitude += tl.abs(rest) * (per_box + H * W * per_cell)
    below = tl.sum(tl.where(ones, sums, 0.0), 1) + eps
    bound = rounding * magnitude
    below = tl.where(tl.abs(below) <= bound, 0.0, below)
    # Sums that have overflowed: see `flush_cancellation` and `safe_divide`.
    below = tl.where((bound < float("inf")) & (tl.abs(below) < float("inf")), below, float("nan"))
    quotient = tl.div_rn(sums, tl.where(below == 0, 1.0, below)[:, None])
    quotient = tl.where((below == 0)[:, None], 0.0, quotient)
    mask = inside[:, None] & (value < E1 - 1)[None, :]
    tl.store(out + token[:, None] * (E1 - 1) + value[None, :], quotient, mask=mask)
    tl.store(denominator + token, below, mask=inside)


@triton.jit
def _query_gradients(
    q, weights, y, mean, table, radii, grad_q, grad_weights, H, W, M, E1,
    BOXES: tl.constexpr, QUERIES: tl.constexpr, PM: tl.constexpr, PE: tl.constexpr,
):  # fmt: skip
    """∂φq = Σ_g α_g u_g and ∂α_g = φq·u_g, where u_g is ring g of φk v'ᵀ, times y'."""
    image, token, row, column, inside = _tokens(H, W, QUERIES)
    query, upstream = _load_tokens(q, token, inside, M, PM), _load_tokens(y, token, inside, E1, PE)
    average = _load_mean(mean, image, M, E1, PM, PE)
    of_mean = tl.sum(average[None, :, :] * upstream[:, None, :], 2)  # (QUERIES, PM)
    total = tl.zeros((QUERIES, PM), tl.float32)
    inner = tl.zeros((QUERIES, PM), tl.float32)
    for g in range(BOXES):
        radius = tl.load(radii + g)
        weight = tl.load(weights + token * (BOXES + 1) + g, mask=inside, other=0.0)
        deviations, count = _box(table, image, row, column, radius, inside, H, W, M, E1, PM, PE)
        box = tl.sum(deviations * upstream[:, None, :], 2) + count[:, None] * of_mean
        ring = box - inner
        total += weight[:, None] * ring
        tl.store(grad_weights + token * (BOXES + 1) + g, tl.sum(query * ring, 1), mask=inside)
        inner = box
    rest = tl.load(weights + token * (BOXES + 1) + BOXES, mask=inside, other=0.0)
    left = _load_left(table, image, H, W, M, E1, PM, PE)
    whole = tl.sum(left[None, :, :] * upstream[:, None, :], 2) + of_mean * (H * W * 1.0)
    ring = whole - inner
    total += rest[:, None] * ring
    tl.store(grad_weights + token * (BOXES + 1) + BOXES, tl.sum(query * ring, 1), mask=inside)
    feature = tl.arange(0, PM)
    mask = inside[:, None] & (feature < M)[None, :]
    tl.store(grad_q + token[:, None] * M + feature[None, :], total, mask=mask)


@triton.jit(do_not_specialize=["radius"])  # one kernel for all radii
def _add_key_gradients(
    k, values, mean, table, grad_k, grad_v, radius, H, W, M, E1,
    QUERIES: tl.constexpr, PM: tl.constexpr, PE: tl.constexpr,
):  # fmt: skip
    """Adds X v' to ∂φk and Xᵀ φk to ∂v', where X is one box of the table of α φq y'ᵀ."""
    image, token, row, column, inside = _tokens(H, W, QUERIES)
    key, value = _load_tokens(k, token, inside, M, PM), _load_tokens(values, token, inside, E1, PE)
    deviations, count = _box(table, image, row, column, radius, inside, H, W, M, E1, PM, PE)
    average = _load_mean(mean, image, M, E1, PM, PE)
    state = deviations + count[:, None, None] * average[None, :, :]  # (QUERIES, PM, PE)
    feature, channel = tl.arange(0, PM), tl.arange(0, PE)
    at_k = grad_k + token[:, None] * M + feature[None, :]
    at_v = grad_v + token[:, None] * E1 + channel[None, :]
    mask_k = inside[:, None] & (feature < M)[None, :]
    mask_v = inside[:, None] & (channel < E1)[None, :]
    of_k = tl.load(at_k, mask=mask_k, other=0.0) + tl.sum(state * value[:, None, :], 2)
    of_v = tl.load(at_v, mask=mask_v, other=0.0) + tl.sum(state * key[:, :, None], 1)
    tl.store(at_k, of_k, mask=mask_k)
    tl.store(at_v, of_v, mask=mask_v)


class _Table:
    """Box sums of a bᵀ at every cell of (H, W) grids, as in `ops.table.OuterTable`.

    Args:
        a: (B·N, H·W, M), float32 and contiguous.
        b: (B·N, H·W, E'), likewise.
        grid_size: (H, W).
    """

    def __init__(self, a: Tensor, b: Tensor, grid_size: Sequence[int]):
        H, W = grid_size
        images, _, M = a.shape
        E1 = b.shape[2]
        channels = M * E1
        self.mean = torch.bmm(a.mT, b).div_(H * W)  # (B·N, M, E')
        self.table = a.new_empty(images, H + 1, W + 1, channels)
        self.table[:, 0] = 0
        self.table[:, :, 0] = 0
        blocks = triton.cdiv(channels, CHANNELS_AT_ONCE)
        _scan_rows[images * H, blocks](
            a, b, self.mean, self.table, H, M, E1, channels, WIDTH=W, BLOCK=CHANNELS_AT_ONCE
        )
        self.peaks = a.new_empty(images, W, M, E1)
        _scan_columns[images * W, blocks](
            self.table, self.peaks, W, channels, HEIGHT=H, BLOCK=CHANNELS_AT_ONCE
        )
        padded = triton.next_power_of_2(M), triton.next_power_of_2(E1)
        queries = max(1, NUMBERS_AT_ONCE // (padded[0] * padded[1]))
        self.grid = (images * triton.cdiv(H * W, queries),)
        self.sizes = (H, W, M, E1)
        self.blocks: dict[str, Any] = {"QUERIES": queries, "PM": padded[0], "PE": padded[1]}
        self.blocks["num_warps"] = 4 if padded[0] * padded[1] <= NUMBERS_AT_ONCE else 16


def table_triton_forward(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, radii: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """Ripple attention by summed-area tables. Arguments as in `ripple_naive`.

    Returns:
        The output (B, H, W, N, E) in the type of v, and the denominators, eps included,
        (B, H, W, N) in float32.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    denominator = v.new_empty(v.shape[:-1], dtype=torch.float32)
    boxes = Partition(radii).box_radii(v.device).int()
    rounding = UNITS * torch.finfo(torch.float32).eps
    for part in table_parts(q, v):
        queries, keys, values, weights = (_flat(x[part]) for x in (q, k, v, spatial_weights))
        table = _Table(keys, F.pad(values, (0, 1), value=1), v.shape[1:3])
        quotients, below = torch.empty_like(values), values.new_empty(values.shape[:2])
        peak = table.peaks[..., -1].amax(1).contiguous()  # (B·N, M), of the denominator's column
        _forward[table.grid](
            queries, weights, table.mean, table.table, peak, boxes, quotients, below, *table.sizes,
            float(eps), rounding, BOXES=len(radii), **table.blocks,
        )  # fmt: skip
        out[part] = _heads_last(quotients, out[part])
        denominator[part] = _heads_last(below.unsqueeze(-1), out[part]).squeeze(-1)
    return out, denominator


def table_triton_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    out: Tensor,
    denominator: Tensor,
    radii: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `table_triton_forward`, each in the type of its input; as `table_backward`."""
    inputs = (q, k, v, spatial_weights)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    boxes = Partition(radii).box_radii(v.device).int()
    for part in table_parts(q, v):
        queries, keys, values, weights = (_flat(x[part]) for x in inputs)
        values = F.pad(values, (0, 1), value=1)
        below = _flat(denominator[part].unsqueeze(-1))
        y = _flat(grad[part]) * safe_divide(1, below)
        y = torch.cat([y, -(y * _flat(out[part])).sum(-1, keepdim=True)], -1)  # (B·N, H·W, E+1)

        table = _Table(keys, values, v.shape[1:3])
        grad_q, grad_weights = torch.empty_like(queries), torch.empty_like(weights)
        _query_gradients[table.grid](
            queries, weights, y, table.mean, table.table, boxes, grad_q, grad_weights,
            *table.sizes, BOXES=len(radii), **table.blocks,
        )  # fmt: skip
        del table

        rest = torch.bmm((queries * weights[..., -1:]).mT, y)  # (B·N, M, E+1)
        grad_k, grad_v = torch.bmm(values, rest.mT), torch.bmm(keys, rest)
        for group, radius in enumerate(radii):
            step = weights[..., group, None] - weights[..., group + 1, None]
            table = _Table(queries * step, y, v.shape[1:3])
            _add_key_gradients[table.grid](
                keys, values, table.mean, table.table, grad_k, grad_v, radius, *table.sizes,
                **table.blocks,
            )  # fmt: skip
            del table
        pieces = (grad_q, grad_k, grad_v[..., :-1], grad_weights)
        for total, piece in zip(grads, pieces, strict=True):
            total[part] = _heads_last(piece, total[part])
    return grads[0], grads[1], grads[2], grads[3]


def _flat(x: Tensor) -> Tensor:
    """(B, H, W, N, C) → (B·N, H·W, C), float32 and contiguous."""
    wide = x.to(accumulation_dtype(x)).permute(0, 3, 1, 2, 4)
    return wide.reshape(-1, x.shape[1] * x.shape[2], x.shape[4]).contiguous()


def _heads_last(x: Tensor, like: Tensor) -> Tensor:
    """(B·N, H·W, C) → (B, H, W, N, C), of the grid and heads of `like`."""
    B, H, W, N = like.shape[:4]
    return x.view(B, N, H, W, -1).permute(0, 2, 3, 1, 4)
