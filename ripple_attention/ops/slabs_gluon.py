"""Tiles again, as kernels in Gluon, for the case that counts most: bfloat16, 32 channels, a near
window.

In `ops/tiled_triton.py` all warps of a program meet the whole window of a tile. But a warp has 16
queries, two rows of eight, and those need only the rows around them: for R_max 4, 8 of the window's
14. Triton has no words for that; Gluon, its lower level, lets a warp choose what it reads from
shared memory. Here the window lies there in slabs of two rows, and warp w takes slabs w, w+1, …
What else follows: how far a row of keys is from a row of queries is the same for all warps, so its
group is known when compiling. Little more than half the instructions remain.

What a program has copied serves more than one tile. On large grids it walks down a strip of tiles,
and copies the rows of the next while it works at one. Grids of up to 16×16 tokens are copied as a
whole, if both sides are longer than 8, and their far sums are made from the copy: nothing but
inputs is read. Other kernels weigh all pairs of so small a grid as they are; here a window is taken
out of a sum, so pairs are cut in two for tensor cores, lest what remains be rounding.

The compiler takes the number of the slab for one that all warps share. It may: it only ever becomes
an address, and all warps go the same way.

Gluon is experimental, and not interpreted on a CPU. This module imports triton.
"""

# Kernels have no types to declare, and Triton's tuples no unpacking.
# mypy: allow-untyped-defs, disable-error-code="assignment, no-untyped-call"
# ruff: noqa: SIM102

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_wait

from ripple_attention.ops.kernel_parts import _parts_of
from ripple_attention.ops.launch import launch, multiprocessors, overlapping, overlaps
from ripple_attention.ops.slab_parts_gluon import (
    MMA,
    OF_KEYS,
    OF_ONES,
    OF_QUERIES,
    RIGHT,
    ROUNDING,
    ROWS,
    SHARED,
    SMALLEST,
    WIDTH,
    _add_products,
    _as_left,
    _as_right,
    _copy_rows,
    _copy_sums,
    _copy_window,
    _corner_of,
    _far_across,
    _far_down,
    _halve,
    _load_image,
    _load_tile,
    _load_weights,
    _near_and_rest,
    _place,
    _slabs,
    _slot,
    _store_results,
    _tile,
    _warp,
    _weights_at,
    barrier,
    copies,
)


@gluon.jit
def _near_part(
    query, near, keys, values, first, far_across, RADII: gl.constexpr, RING: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Σ over the window of (α_g − α_rest)(φq_i·φk_j)[v_j, 1]; `first` slab is that of warp 0."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    first += _warp()
    zero = gl.zeros((64, 32), gl.float32, MMA)
    across_weight = _weights_at(far_across, near, zero, RADII)
    numerator = gl.zeros((64, WIDTH), gl.float32, MMA)
    sums = _halve(zero)
    for step in gl.static_range(reach + 1):
        slot = _slot(first + step, RING)
        pairs = mma_v2(query, _as_right(keys.index(slot).load(OF_KEYS), 32), zero)
        far_down = _far_down(step, reach)
        down_weight = _weights_at(far_down, near, zero, RADII)
        pairs = pairs * gl.where(far_down >= far_across, down_weight, across_weight)
        sums += _halve(pairs)
        numerator = _add_products(pairs, values.index(slot).load(RIGHT), numerator, SPLIT)
    return numerator, gl.convert_layout(gl.sum(sums, 1), ROWS)


@gluon.jit
def _finish(
    numerator, total, query, rest, sums, ones, out, denominator, b, n, top, left, H, W, eps,
    N: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Adds the far part, divides and stores."""
    far = gl.zeros_like(numerator)
    far = mma_v2(query, _as_right(sums.index(1).load(OF_KEYS), 32), far)
    far = mma_v2(query, _as_right(sums.index(0).load(OF_KEYS), 32), far)
    numerator += rest[:, None] * far
    far = gl.zeros((64, 16), gl.float32, MMA)
    far = rest * gl.sum(mma_v2(query, _as_right(ones.load(OF_ONES), 16), far), 1)

    result = total + eps + far
    rounding = ROUNDING * (gl.abs(total) + gl.abs(far))
    result = gl.where(gl.abs(result) <= rounding, 0.0, result)
    empty = gl.abs(result) < SMALLEST
    blind = gl.abs(total + far) <= rounding  # sees nothing: the numerator is rounding, too
    scale = 1.0 / gl.where(empty, 1.0, result)
    numerator = gl.where((empty | blind)[:, None], 0.0, numerator * scale[:, None])
    row, column, inside = _tile(top, left, H, W, MMA, WIDE)
    token = ((b * H + top + row) * W + left + column) * N + n
    _store_results(out, numerator, b, n, top, left, H, W, N, WIDE)
    if denominator is not None:
        gl.store(denominator + token, result, mask=inside)


@gluon.jit
def strip_kernel(
    first, q, k, v, weights, state, out, denominator, q_strides, k_strides, v_strides,
    weight_strides, H, W, eps, N: gl.constexpr, RADII: gl.constexpr, TILES: gl.constexpr,
    RING: gl.constexpr, WIDE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Output and denominator + eps of a strip of tiles of 8×8 queries, one below the other, as
    `tiled_triton.forward_kernel`.

    The far sums come with the first window: few programs start before they are there.
    """
    reach: gl.constexpr = RADII[len(RADII) - 1]
    boxes: gl.constexpr = len(RADII)
    b, n, i, j = _place(first, N, WIDE)
    top, left = i * (8 * TILES), j * 8
    end = gl.minimum(H, top + 8 * TILES)
    keys, key_quads = _slabs(RING)
    values, value_quads = _slabs(RING)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, WIDTH], SHARED)
    ones = gl.allocate_shared_memory(gl.bfloat16, [16, WIDTH], SHARED)
    _copy_window(
        key_quads, value_quads, k, v, b, n, top, left, k_strides, v_strides, H, W, reach, TILES,
        WIDE,
    )  # fmt: skip
    loaded = _load_tile(q, b, n, top, left, q_strides, end, W, OF_QUERIES, WIDE)
    alpha = _load_weights(weights, b, n, top, left, weight_strides, end, W, boxes, WIDE)
    if OVERLAP:
        gdc_wait()
    _copy_sums(sums, ones, state, b * N + n, False)
    async_copy.commit_group()
    slab = gl.program_id(0) * 0  # the tile's first
    for tile in range(TILES):
        query = _as_left(loaded, H >> 30)
        near, rest = _near_and_rest(alpha, boxes)
        async_copy.wait_group(0)
        barrier()  # all has come, and none reads any more what the next tile does not need
        if TILES > 1:  # else nothing is known of what is below, how it is aligned, either
            if tile < TILES - 1:
                _copy_rows(
                    key_quads, value_quads, k, v, b, n, top - reach + 16, left, k_strides,
                    v_strides, H, W, _slot(slab + 8, RING) // 4, 8 + reach, reach, WIDE,
                )  # fmt: skip
        async_copy.commit_group()
        far_across = _far_across(reach)
        numerator, total = _near_part(
            query, near, keys, values, slab, far_across, RADII, RING, False
        )
        _finish(
            numerator, total, query, rest, sums, ones, out, denominator, b, n, top, left, H, W,
            eps, N, WIDE,
        )  # fmt: skip
        top += 8
        slab = _slot(slab + 4, RING)
        if TILES > 1:
            loaded = _load_tile(q, b, n, top, left, q_strides, end, W, OF_QUERIES, WIDE)
            alpha = _load_weights(weights, b, n, top, left, weight_strides, end, W, boxes, WIDE)


@gluon.jit
def image_kernel(
    first, q, k, v, weights, out, denominator, q_strides, k_strides, v_strides, weight_strides,
    H, W, eps, N: gl.constexpr, RADII: gl.constexpr, DOWN: gl.constexpr, ACROSS: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """Output and denominator + eps of a whole grid of DOWN × ACROSS tiles, 2 × 2 at most."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    b, n, _, _ = _place(first, N, WIDE)
    keys, values, sums, ones = _load_image(
        k, v, b, n, k_strides, v_strides, H, W, reach, DOWN, WIDE, False
    )
    for tile in range(DOWN * ACROSS):
        top, left = _corner_of(tile, b, ACROSS)
        query = _as_left(_load_tile(q, b, n, top, left, q_strides, H, W, OF_QUERIES, WIDE), H >> 30)
        alpha = _load_weights(weights, b, n, top, left, weight_strides, H, W, len(RADII), WIDE)
        near, rest = _near_and_rest(alpha, len(RADII))
        far_across = _far_across(left)
        numerator, total = _near_part(
            query, near, keys, values, tile // ACROSS * 4, far_across, RADII, 0, True
        )
        _finish(
            numerator, total, query, rest, sums, ones, out, denominator, b, n, top, left, H, W,
            eps, N, WIDE,
        )  # fmt: skip


RING = 12  # slots for the slabs of a tile, 8 at most, and the next four


def serves(whole: bool, radii: list[int], q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels are for such inputs.

    16 columns hold a tile and its reach, or a grid that is one window; one of which some query sees
    nothing in the rest would be the difference of two equal sums.
    """
    H, W = v.shape[1:3]
    fits = not whole or (8 < min(H, W) <= max(H, W) <= 16 and radii[-1] < max(H, W) // 2)
    return copies(k, v) and fits and q.shape[-1] == WIDTH.value and radii[-1] <= 4


def launch_slabs(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, cut: Tensor, out: Tensor,
    denominator: Tensor | None, radii: list[int], eps: float, wide: bool,
) -> None:  # fmt: skip
    """Output and denominators of `tiled_triton_forward`; the far sum is on its way in `cut`, or
    that is empty, if the grid is one window."""
    B, H, W, N, _ = v.shape
    inputs = q, k, v, spatial_weights
    strides = [x.stride() for x in inputs]
    if cut.numel() == 0:
        launch(
            image_kernel, (N, 1, B), *inputs, out, denominator, *strides, H, W, eps,
            N, tuple(radii), _parts_of(H, 8), _parts_of(W, 8), wide, num_warps=4, maxnreg=128,
        )  # fmt: skip
    else:
        tiles = _tiles_of_a_strip(B * N, H, W, v.device)
        ring = RING if tiles > 1 else 8
        launch(
            strip_kernel, (N * _parts_of(W, 8), _parts_of(H, 8 * tiles), B),
            *inputs, cut, out, denominator, *strides, H, W, eps,
            N, tuple(radii), tiles, ring, wide, overlaps(),
            num_warps=4, maxnreg=128, **overlapping(),
        )  # fmt: skip


def _tiles_of_a_strip(heads: int, H: int, W: int, device: torch.device) -> int:
    """The more the better, as long as there are programs for the GPU two and a half times over."""
    tiles, enough = 1, 10 * multiprocessors(device)
    while tiles < 8 and heads * _parts_of(W, 8) * _parts_of(H, 16 * tiles) >= enough:
        tiles *= 2
    return tiles
