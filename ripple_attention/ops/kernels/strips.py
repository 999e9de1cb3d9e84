"""What boxes around tokens hold beyond the core that a tile shares, as Triton kernels.

A box of radius kT − 1 + s holds, for every query of a tile of T×T tokens, the tiles nearer than k:
the core, which `tile_sums` reads as a state. What is left are strips: rows above and below the
core, as far across as the box reaches; and columns beside it, in the rows of the core alone. Each
has at most T − 1 + s lines, of which a query meets T − 1 + 2s in all. So programs take runs of
queries along a line, which share those lines, and meet their keys as pairs.

"Lines" are rows, and runs go along them, in the pass over rows; in the pass over columns the grid
is turned. That a key is in a strip of a query's holds as well the other way round, so keys go
through the same lines for their gradients. Sums over both passes are float32 (B, H, W, N, …).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ripple_attention.ops.kernels.common import (
    _add_products,
    _at,
    _ceil_divide,
    _load,
    _padded,
    _place,
    _power_of_two,
    _pull,
    _store,
    are_odd,
)
from ripple_attention.ops.kernels.launch import launch
from ripple_attention.partition import Partition

# Names in kernels: UPRIGHT is the pass over rows, which comes first. LINES and LENGTH are the sides
# of the grid, strides those of (B, line, run, N), and `tokens` those of a contiguous tensor.
# `radii` are the BOXES wide ones, whose steps are from FIRST on in (B, H, W, N, G).


@triton.jit
def _run(first, N: tl.constexpr, RUN: tl.constexpr):
    """Batch, head, line, where a program's run begins in the line, and the places of its tokens."""
    b, n, line, block = _place(first, N)
    return b.to(tl.int64), n, line, block * RUN, block * RUN + tl.arange(0, RUN)


@triton.jit
def _strips(
    radius, line, begin, LINES, LENGTH, TILE: tl.constexpr, UPRIGHT: tl.constexpr,
    RUN: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The strips of a run: the first line above the core, and how many; the first below, and how
    many there are in all; where in a line its keys begin, and how many spans hold them."""
    whole = (radius + 1) // TILE
    tile = line // TILE
    above = tl.maximum(line - radius, 0)
    lines_above = tl.maximum((tile - whole + 1) * TILE - above, 0)
    below = (tile + whole) * TILE
    lines = lines_above + tl.maximum(tl.minimum(line + radius + 1, LINES) - below, 0)
    halo = radius if UPRIGHT else (whole - 1) * TILE
    start = tl.maximum(begin - halo, 0)
    spans = tl.cdiv(tl.minimum(begin + RUN + halo, LENGTH) - start, SPAN)
    return above, lines_above, below, lines, start, spans


@triton.jit
def _keys(step, strips, SPAN: tl.constexpr):
    """Line and places of the keys of a step."""
    above, lines_above, below, _, start, spans = strips
    line = step // spans
    line = tl.where(line < lines_above, above + line, below + line - lines_above)
    return line, start + step % spans * SPAN + tl.arange(0, SPAN)


@triton.jit
def _in_box(run, other, radius, TILE: tl.constexpr, UPRIGHT: tl.constexpr):
    """Which keys along a line are in the strip of which tokens: (RUN, SPAN)."""
    if UPRIGHT:
        near = tl.abs(run[:, None] - other[None, :]) <= radius
    else:
        tiles = tl.abs((run // TILE)[:, None] - (other // TILE)[None, :])
        near = tiles < (radius + 1) // TILE
    return near


@triton.jit
def _add_to(
    base, offsets, inside, x, WIDTH: tl.constexpr, PADDED: tl.constexpr, UPRIGHT: tl.constexpr
):
    """Writes (RUN, PADDED) in the first pass, and adds to what that wrote in the second."""
    if not UPRIGHT:
        x += _load(base, offsets, inside, WIDTH, PADDED)
    _store(base, offsets, inside, x, WIDTH, PADDED)


@triton.jit
def _add_scalar(base, offsets, inside, x, UPRIGHT: tl.constexpr):
    """The same of a number each."""
    if not UPRIGHT:
        x += tl.load(base + offsets, mask=inside, other=0.0)
    tl.store(base + offsets, x, mask=inside)


@triton.jit
def forward_kernel(
    first, q, k, v, steps, radii, sums, totals, sizes, q_strides, k_strides, v_strides, tokens,
    LINES, LENGTH, BOXES, G, FIRST, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, TILE: tl.constexpr, UPRIGHT: tl.constexpr,
    RUN: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Numerators, denominators, and the size of what makes up the latter."""
    b, n, line, begin, run = _run(first, N, RUN)
    inside = run < LENGTH
    token = _at(b, n, line, run, tokens)
    query = _load(q, _at(b, n, line, run, q_strides), inside, M, PADDED_M)
    numerator = tl.zeros((RUN, PADDED_E), tl.float32)
    total, size = tl.zeros((RUN,), tl.float32), tl.zeros((RUN,), tl.float32)
    for box in range(BOXES):
        radius = tl.load(radii + box)
        strips = _strips(radius, line, begin, LINES, LENGTH, TILE, UPRIGHT, RUN, SPAN)
        of_box = tl.zeros((RUN, PADDED_E), tl.float32)
        ones = tl.zeros((RUN, SPAN), tl.float32)
        for step in range(strips[3] * strips[5]):
            other_line, other = _keys(step, strips, SPAN)
            present = other < LENGTH
            key = _load(k, _at(b, n, other_line, other, k_strides), present, M, PADDED_M)
            value = _load(v, _at(b, n, other_line, other, v_strides), present, E, PADDED_E)
            pairs = tl.dot(query, tl.trans(key), input_precision="ieee")
            pairs = tl.where(_in_box(run, other, radius, TILE, UPRIGHT), pairs, 0.0)
            ones += pairs
            of_box = _add_products(pairs, value, of_box, SPLIT)
        weight = tl.load(steps + token * G + FIRST + box, mask=inside, other=0.0)
        far = weight * tl.sum(ones, 1)
        numerator += weight[:, None] * of_box
        total += far
        size += tl.abs(far)
    _add_to(sums, token * E, inside, numerator, E, PADDED_E, UPRIGHT)
    _add_scalar(totals, token, inside, total, UPRIGHT)
    _add_scalar(sizes, token, inside, size, UPRIGHT)


@triton.jit
def query_gradient_kernel(
    first, grad, q, k, v, steps, radii, delta, grad_q, grad_steps, grad_strides, q_strides,
    k_strides, v_strides, tokens, LINES, LENGTH, BOXES, G, FIRST, N: tl.constexpr, M: tl.constexpr,
    E: tl.constexpr, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, TILE: tl.constexpr,
    UPRIGHT: tl.constexpr, RUN: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """∂φq and ∂steps, both times the denominator."""
    b, n, line, begin, run = _run(first, N, RUN)
    inside = run < LENGTH
    token = _at(b, n, line, run, tokens)
    query = _load(q, _at(b, n, line, run, q_strides), inside, M, PADDED_M)
    upstream = _load(grad, _at(b, n, line, run, grad_strides), inside, E, PADDED_E)
    projection = tl.load(delta + token, mask=inside, other=0.0)
    minus = tl.broadcast_to(-projection[:, None], (RUN, SPAN))
    gradient = tl.zeros((RUN, PADDED_M), tl.float32)
    for box in range(BOXES):
        radius = tl.load(radii + box)
        strips = _strips(radius, line, begin, LINES, LENGTH, TILE, UPRIGHT, RUN, SPAN)
        of_box = tl.zeros((RUN, PADDED_M), tl.float32)
        products = tl.zeros((RUN, SPAN), tl.float32)
        for step in range(strips[3] * strips[5]):
            other_line, other = _keys(step, strips, SPAN)
            present = other < LENGTH
            key = _load(k, _at(b, n, other_line, other, k_strides), present, M, PADDED_M)
            value = _load(v, _at(b, n, other_line, other, v_strides), present, E, PADDED_E)
            similarity = tl.dot(query, tl.trans(key), input_precision="ieee")
            pull = tl.dot(upstream, tl.trans(value), minus, input_precision="ieee")
            near = _in_box(run, other, radius, TILE, UPRIGHT) & present[None, :]
            pull = tl.where(near, pull, 0.0)
            products += similarity * pull
            of_box = _add_products(pull, key, of_box, SPLIT)
        at = token * G + FIRST + box
        gradient += tl.load(steps + at, mask=inside, other=0.0)[:, None] * of_box
        _add_scalar(grad_steps, at, inside, tl.sum(products, 1), UPRIGHT)
    _add_to(grad_q, token * M, inside, gradient, M, PADDED_M, UPRIGHT)


@triton.jit
def key_gradient_kernel(
    first, grad, q, k, v, scaled, radii, delta, grad_k, grad_v, grad_strides, q_strides, k_strides,
    v_strides, tokens, LINES, LENGTH, BOXES, G, FIRST, N: tl.constexpr, M: tl.constexpr,
    E: tl.constexpr, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, TILE: tl.constexpr,
    UPRIGHT: tl.constexpr, RUN: tl.constexpr, SPAN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """∂φk and ∂v; `scaled` holds the steps of all queries, each over its denominator."""
    b, n, line, begin, run = _run(first, N, RUN)
    inside = run < LENGTH
    token = _at(b, n, line, run, tokens)
    key = _load(k, _at(b, n, line, run, k_strides), inside, M, PADDED_M)
    value = _load(v, _at(b, n, line, run, v_strides), inside, E, PADDED_E)
    key_gradient = tl.zeros((RUN, PADDED_M), tl.float32)
    value_gradient = tl.zeros((RUN, PADDED_E), tl.float32)
    for box in range(BOXES):
        radius = tl.load(radii + box)
        strips = _strips(radius, line, begin, LINES, LENGTH, TILE, UPRIGHT, RUN, SPAN)
        for step in range(strips[3] * strips[5]):
            other_line, other = _keys(step, strips, SPAN)
            present = other < LENGTH
            query = _load(q, _at(b, n, other_line, other, q_strides), present, M, PADDED_M)
            at = _at(b, n, other_line, other, grad_strides)
            upstream = _load(grad, at, present, E, PADDED_E)
            at = _at(b, n, other_line, other, tokens)
            projection = tl.load(delta + at, mask=present, other=0.0)
            weight = tl.load(scaled + at * G + FIRST + box, mask=present, other=0.0)
            near = _in_box(run, other, radius, TILE, UPRIGHT)
            weights = tl.where(near, weight[None, :], 0.0)
            similarity = tl.dot(key, tl.trans(query), input_precision="ieee")
            pull = _pull(value, upstream, projection)
            key_gradient = _add_products(pull * weights, query, key_gradient, SPLIT)
            value_gradient = _add_products(similarity * weights, upstream, value_gradient, SPLIT)
    _add_to(grad_k, token * M, inside, key_gradient, M, PADDED_M, UPRIGHT)
    _add_to(grad_v, token * E, inside, value_gradient, E, PADDED_E, UPRIGHT)


# Launchers


class Strips:
    """The strips of all wide boxes on the grid of some inputs.

    Args:
        q, v: (B, H, W, N, M) and (B, H, W, N, E).
        radii: Of the wide boxes, each at least T − 1.
        tile: T.
        groups, first: There are so many steps, and those of wide boxes are from `first` on.
    """

    def __init__(
        self, q: Tensor, v: Tensor, radii: tuple[int, ...], tile: int, groups: int, first: int
    ):
        self.shape, M, E = q.shape[:4], q.shape[-1], v.shape[-1]
        self.radii = Partition(radii).box_radii(v.device).int()
        self.steps = len(radii), groups, first
        self.constants = (self.shape[3], M, E, _padded(M), _padded(E), tile)
        self.launch = _choose(q.dtype, M, E)

    def sums(self, q: Tensor, k: Tensor, v: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        """Numerators (B, H, W, N, E), denominators, and the size of these (B, H, W, N)."""
        sums = steps.new_empty(v.shape), steps.new_empty(v.shape[:4]), steps.new_empty(v.shape[:4])
        self._launch(forward_kernel, (q, k, v), (steps, self.radii, *sums))
        return sums

    def query_gradients(
        self, inputs: tuple[Tensor, ...], steps: Tensor, delta: Tensor, grad_steps: Tensor
    ) -> Tensor:
        """∂φq (B, H, W, N, M), and in `grad_steps` ∂steps of wide boxes, both times den."""
        gradient = steps.new_empty(inputs[1].shape)
        others = (steps, self.radii, delta, gradient, grad_steps)
        self._launch(query_gradient_kernel, inputs, others)
        return gradient

    def key_gradients(
        self, inputs: tuple[Tensor, ...], scaled: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """∂φk (B, H, W, N, M) and ∂v (B, H, W, N, E)."""
        gradients = scaled.new_empty(inputs[2].shape), scaled.new_empty(inputs[3].shape)
        self._launch(key_gradient_kernel, inputs, (scaled, self.radii, delta, *gradients))
        return gradients

    def _launch(self, kernel: Any, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
        """Runs a kernel over rows, then over columns."""
        B, H, W, N = self.shape
        tokens = (H * W * N, W * N, N, 1)
        longest, span, options = self.launch
        for upright in (True, False):
            sides = (H, W) if upright else (W, H)
            run = min(longest, max(16, _power_of_two(sides[1])))
            strides = [*(x.stride() for x in inputs), tokens]
            if not upright:
                strides = [(s[0], s[2], s[1], s[3]) for s in strides]
            launch(
                kernel, (N * _ceil_divide(sides[1], run), sides[0], B),
                *inputs, *others, *strides, *sides, *self.steps,
                *self.constants, upright, run, min(run, span), False, **options,
            )  # fmt: skip


def _choose(dtype: torch.dtype, M: int, E: int) -> tuple[int, int, dict[str, int]]:
    """Tokens of a run, keys that they meet at a time, and options, so that nothing spills; not yet
    tuned. Odd widths take runs of 32 tokens: see `common.are_odd`."""
    wide = max(_padded(M), _padded(E)) > 64
    warps = 8 if wide else 4
    if dtype == torch.float32:  # products on plain units
        return 32, 16, {"num_warps": warps, "num_stages": 1}
    if are_odd(M, E):
        return 32, 32, {"num_warps": 4, "num_stages": 1}
    return 64, 64, {"num_warps": warps, "num_stages": 1 if wide else 3}
