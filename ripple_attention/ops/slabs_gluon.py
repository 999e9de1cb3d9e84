"""Tiles again, as a kernel in Gluon, for the case that counts most: bfloat16, 32 channels, a near
window.

In `ops/tiled_triton.py` all warps of a program meet the whole window of a tile. But a warp has 16
queries, two rows of eight, and those need only the rows around them: for R_max 4, 8 of the window's
14. Triton has no words for that; Gluon, its lower level, lets a warp choose what it reads from
shared memory. Here the window lies there in slabs of two rows, and warp w takes slabs w, w+1, …
What else follows: how far a row of keys is from a row of queries is the same for all warps, so its
group is known when compiling. Half the instructions remain.

The compiler takes the number of the slab for one that all warps share. It may: it only ever becomes
an address, and between the barriers around the loop warps do nothing together.

Gluon is experimental, and not interpreted on a CPU. This module imports triton.
"""

# Kernels have no types to declare, and Triton's tuples no unpacking.
# mypy: allow-untyped-defs, disable-error-code="assignment, no-untyped-call"
# ruff: noqa: RUF005

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_wait

from ripple_attention.ops.kernel_parts import _parts_of
from ripple_attention.ops.launch import launch, overlapping, overlaps

WIDTH = gl.constexpr(32)  # of features and of values
SMALLEST = gl.constexpr(torch.finfo(torch.float32).tiny)  # of `safe_divide`
ROUNDING = gl.constexpr(16 * torch.finfo(torch.float32).eps)  # of `settle`


@gluon.jit
def _corner(base, b, n, row, column, strides):
    return base + (b * strides[0] + n * strides[3] + row * strides[1] + column * strides[2])


@gluon.jit
def _weights_at(distance, near, beyond, RADII: gl.constexpr):
    """The weight at each distance, (queries, keys)."""
    weight = beyond
    for g in gl.static_range(len(RADII)):
        if g == 0:
            members = distance <= RADII[0]
        else:
            members = (distance > RADII[g - 1]) & (distance <= RADII[g])
        weight = gl.where(members, near[g][:, None], weight)
    return weight


@gluon.jit
def slab_kernel(
    first, q, k, v, weights, state, out, denominator, q_strides, k_strides, v_strides,
    weight_strides, H, W, eps, N: gl.constexpr, RADII: gl.constexpr, WIDE: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Output and denominator + eps of a tile of 8×8 queries, as `tiled_triton.forward_kernel`."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    slabs: gl.constexpr = 4 + reach
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    left_of: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_of: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])

    across = gl.program_id(0)
    b, n, down, across = first + gl.program_id(2), across % N, gl.program_id(1), across // N
    top, left = down * 8, across * 8
    if WIDE:
        b, n, top, left = b.to(gl.int64), n.to(gl.int64), top.to(gl.int64), left.to(gl.int64)

    # The window: a slab is two rows of 16 keys, of which the last few may be of no use.
    keys = gl.allocate_shared_memory(gl.bfloat16, [slabs, 32, WIDTH], shared)
    values = gl.allocate_shared_memory(gl.bfloat16, [slabs, 32, WIDTH], shared)
    index = gl.arange(0, 32, gl.SliceLayout(1, copied))
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, copied))[None, :]
    below, beside = index // 16, index % 16 - reach
    if WIDE:
        below, beside = below.to(gl.int64), beside.to(gl.int64)
    present = (left + beside >= 0) & (left + beside < W) & (beside < 8 + reach)
    k_at = _corner(k, b, n, top - reach, left, k_strides)
    v_at = _corner(v, b, n, top - reach, left, v_strides)
    k_offsets = (below * k_strides[1] + beside * k_strides[2])[:, None] + channel
    v_offsets = (below * v_strides[1] + beside * v_strides[2])[:, None] + channel
    for slab in gl.static_range(slabs):
        row = top + below + (2 * slab - reach)
        there = (present & (row >= 0) & (row < H))[:, None]  # zero elsewhere
        async_copy.async_copy_global_to_shared(keys.index(slab), k_at + k_offsets, mask=there)
        async_copy.async_copy_global_to_shared(values.index(slab), v_at + v_offsets, mask=there)
        for _ in gl.static_range(2):  # one by one: a multiple may not fit 32 bits
            k_at += k_strides[1]
            v_at += v_strides[1]
    async_copy.commit_group()

    # Queries, as products take them; and their weights, in the layout of results.
    index = gl.arange(0, 64, gl.SliceLayout(1, left_of))
    row, column = index // 8, index % 8
    inside = (top + row < H) & (left + column < W)
    if WIDE:
        row, column = row.to(gl.int64), column.to(gl.int64)
    at = _corner(q, b, n, top, left, q_strides) + (row * q_strides[1] + column * q_strides[2])
    at = at[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, left_of))[None, :]
    query = gl.load(at, mask=inside[:, None], other=0.0)
    index = gl.arange(0, 64, gl.SliceLayout(1, mma))
    row, column = index // 8, index % 8
    inside = (top + row < H) & (left + column < W)
    if WIDE:
        row, column = row.to(gl.int64), column.to(gl.int64)
    at = _corner(weights, b, n, top, left, weight_strides)
    at = at + (row * weight_strides[1] + column * weight_strides[2])
    rest = gl.load(at + len(RADII) * weight_strides[4], mask=inside, other=0.0).to(gl.float32)
    near = ()
    for g in gl.static_range(len(RADII)):
        weight = gl.load(at + g * weight_strides[4], mask=inside, other=0.0).to(gl.float32)
        near = near + (weight - rest,)

    warp = gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x; shr.u32 $0, $0, 5;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )
    zero = gl.zeros((64, 32), gl.float32, mma)
    key_row = gl.arange(0, 32, gl.SliceLayout(0, mma))[None, :] // 16 - reach
    key_column = gl.arange(0, 32, gl.SliceLayout(0, mma))[None, :] % 16 - reach
    far_across = gl.abs(index[:, None] % 8 - key_column)
    across_weight = _weights_at(far_across, near, zero, RADII)
    numerator = gl.zeros((64, WIDTH), gl.float32, mma)
    near_sums = gl.zeros((64, 32), gl.float32, mma)
    async_copy.wait_group(0)
    for step in gl.static_range(reach + 1):
        key = keys.index(warp + step).permute((1, 0)).load(right_of)
        pairs = mma_v2(query, key, zero)
        far_down = gl.abs(index[:, None] // 8 % 2 - (key_row + 2 * step))  # a warp has two rows
        down_weight = _weights_at(far_down, near, zero, RADII)
        pairs = pairs * gl.where(far_down >= far_across, down_weight, across_weight)
        near_sums += pairs
        value = values.index(warp + step).load(right_of)
        rounded = gl.convert_layout(pairs.to(gl.bfloat16), left_of)
        numerator = mma_v2(rounded, value, numerator)
    total = gl.sum(near_sums, 1)

    # The far part, by sums that may not be ready earlier: high parts, low parts, and of the ones.
    if OVERLAP:
        gdc_wait()
    parts = gl.allocate_shared_memory(gl.bfloat16, [2, 32, WIDTH], shared)
    ones = gl.allocate_shared_memory(gl.bfloat16, [16, WIDTH], shared)
    start = state + (b * N + n) * ((2 * WIDTH + 3) * WIDTH)
    at = start + gl.arange(0, 32, gl.SliceLayout(1, copied))[:, None] * WIDTH + channel
    async_copy.async_copy_global_to_shared(parts.index(0), at)
    async_copy.async_copy_global_to_shared(parts.index(1), at + WIDTH * WIDTH)
    part = gl.arange(0, 16, gl.SliceLayout(1, copied))[:, None]
    at = start + (2 * WIDTH + part) * WIDTH + channel
    async_copy.async_copy_global_to_shared(ones, at, mask=(part < 3) & (channel < WIDTH))
    async_copy.commit_group()
    async_copy.wait_group(0)
    far = gl.zeros((64, WIDTH), gl.float32, mma)
    far = mma_v2(query, parts.index(1).permute((1, 0)).load(right_of), far)
    far = mma_v2(query, parts.index(0).permute((1, 0)).load(right_of), far)
    numerator += rest[:, None] * far
    far = gl.zeros((64, 16), gl.float32, mma)
    far = rest * gl.sum(mma_v2(query, ones.permute((1, 0)).load(right_of), far), 1)

    result = total + eps + far
    rounding = ROUNDING * (gl.abs(total) + gl.abs(far))
    result = gl.where(gl.abs(result) <= rounding, 0.0, result)
    empty = gl.abs(result) < SMALLEST
    blind = gl.abs(total + far) <= rounding  # sees nothing: the numerator is rounding, too
    scale = 1.0 / gl.where(empty, 1.0, result)
    numerator = gl.where((empty | blind)[:, None], 0.0, numerator * scale[:, None])
    token = ((b * H + top + row) * W + left + column) * N + n
    at = (token * WIDTH)[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, mma))[None, :]
    gl.store(out + at, numerator.to(gl.bfloat16), mask=inside[:, None])
    if denominator is not None:
        gl.store(denominator + token, result, mask=inside)


def serves(q: Tensor, v: Tensor, radii: list[int]) -> bool:
    """Whether the kernel is for such queries and values: 16 columns hold a tile and its reach."""
    channels = q.shape[-1] == v.shape[-1] == WIDTH.value
    return channels and v.dtype == torch.bfloat16 and radii[-1] <= 4


def launch_slabs(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, cut: Tensor, out: Tensor,
    denominator: Tensor | None, radii: list[int], eps: float, wide: bool,
) -> None:  # fmt: skip
    """Output and denominators of `tiled_triton_forward`; the far sum is on its way in `cut`."""
    B, H, W, N, _ = v.shape
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": 96, **overlapping()}
    launch(
        slab_kernel, (N * _parts_of(W, 8), _parts_of(H, 8), B),
        q, k, v, spatial_weights, cut, out, denominator,
        q.stride(), k.stride(), v.stride(), spatial_weights.stride(), H, W, eps,
        N, tuple(radii), wide, overlaps(), **options,
    )  # fmt: skip
