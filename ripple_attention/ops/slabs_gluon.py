"""Tiles again, as a kernel in Gluon, for the case that counts most: bfloat16, 32 channels, a near
window.

In `ops/tiled_triton.py` all warps of a program meet the whole window of a tile. But a warp has 16
queries, two rows of eight, and those need only the rows around them: for R_max 4, 8 of the window's
14. Triton has no words for that; Gluon, its lower level, lets a warp choose what it reads from
shared memory. Here the window lies there in slabs of two rows, and warp w takes slabs w, w+1, …
What else follows: how far a row of keys is from a row of queries is the same for all warps, so its
group is known when compiling. Little more than half the instructions remain.

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
def _in_group(distance, g: gl.constexpr, RADII: gl.constexpr):
    """Which distances belong to group g, not the last."""
    if g == 0:
        return distance <= RADII[0]
    else:
        return (distance > RADII[g - 1]) & (distance <= RADII[g])


@gluon.jit
def _weights_at(distance, near, beyond, RADII: gl.constexpr):
    """The weight at each distance, (queries, keys)."""
    weight = beyond
    for g in gl.static_range(len(RADII)):
        weight = gl.where(_in_group(distance, g, RADII), near[g][:, None], weight)
    return weight


@gluon.jit
def _place(first, N: gl.constexpr, WIDE: gl.constexpr):
    """Batch, head, and a tile's first row and column."""
    across = gl.program_id(0)
    b, n, top, left = first + gl.program_id(2), across % N, gl.program_id(1) * 8, across // N * 8
    if WIDE:
        b, n, top, left = b.to(gl.int64), n.to(gl.int64), top.to(gl.int64), left.to(gl.int64)
    return b, n, top, left


@gluon.jit
def _warp():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x; shr.u32 $0, $0, 5;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _copy_windows(
    keys, values, k, v, b, n, top, left, k_strides, v_strides, H, W, REACH: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """Starts to copy what lies around a tile to shared memory, twice (4 + REACH, 32, WIDTH): a slab
    is two rows of 16 tokens, zero where there are none."""
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    index = gl.arange(0, 32, gl.SliceLayout(1, copied))
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, copied))[None, :]
    below, beside = index // 16, index % 16 - REACH
    if WIDE:
        below, beside = below.to(gl.int64), beside.to(gl.int64)
    present = (left + beside >= 0) & (left + beside < W) & (beside < 8 + REACH)
    k_at = _corner(k, b, n, top - REACH, left, k_strides)
    v_at = _corner(v, b, n, top - REACH, left, v_strides)
    k_offsets = (below * k_strides[1] + beside * k_strides[2])[:, None] + channel
    v_offsets = (below * v_strides[1] + beside * v_strides[2])[:, None] + channel
    for slab in gl.static_range(4 + REACH):
        row = top + below + (2 * slab - REACH)
        there = (present & (row >= 0) & (row < H))[:, None]
        async_copy.async_copy_global_to_shared(keys.index(slab), k_at + k_offsets, mask=there)
        async_copy.async_copy_global_to_shared(values.index(slab), v_at + v_offsets, mask=there)
        for _ in gl.static_range(2):  # one by one: a multiple may not fit 32 bits
            k_at += k_strides[1]
            v_at += v_strides[1]


@gluon.jit
def _copy_sums(into, base, head):
    """Starts to copy the high and the low parts of a head's sums, (2, 32, WIDTH)."""
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, 32, gl.SliceLayout(1, copied))[:, None]
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, copied))[None, :]
    at = base + head * ((2 * WIDTH + 3) * WIDTH) + row * WIDTH + channel
    async_copy.async_copy_global_to_shared(into.index(0), at)
    async_copy.async_copy_global_to_shared(into.index(1), at + WIDTH * WIDTH)


@gluon.jit
def _tile(top, left, H, W, LAYOUT: gl.constexpr, WIDE: gl.constexpr):
    """Rows and columns of a tile's tokens, from its first; and which there are."""
    index = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    row, column = index // 8, index % 8
    inside = (top + row < H) & (left + column < W)
    if WIDE:
        row, column = row.to(gl.int64), column.to(gl.int64)
    return row, column, inside


@gluon.jit
def _load_tile(
    base, b, n, top, left, strides, H, W, LAYOUT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The channels of a tile's tokens, (64, WIDTH), zero outside the grid."""
    row, column, inside = _tile(top, left, H, W, LAYOUT, WIDE)
    at = _corner(base, b, n, top, left, strides) + (row * strides[1] + column * strides[2])
    at = at[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(at, mask=inside[:, None], other=0.0)


@gluon.jit
def _load_weights(
    base, b, n, top, left, strides, H, W, COUNT: gl.constexpr, LAYOUT: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """α_g − α_rest of a tile's queries, for each box, and α_rest; each (64,)."""
    row, column, inside = _tile(top, left, H, W, LAYOUT, WIDE)
    at = _corner(base, b, n, top, left, strides) + (row * strides[1] + column * strides[2])
    rest = gl.load(at + COUNT * strides[4], mask=inside, other=0.0).to(gl.float32)
    near = ()
    for g in gl.static_range(COUNT):
        weight = gl.load(at + g * strides[4], mask=inside, other=0.0).to(gl.float32)
        near = near + (weight - rest,)
    return near, rest


@gluon.jit
def _far_across(REACH: gl.constexpr, LAYOUT: gl.constexpr):
    """How many columns queries of a tile are from the keys of a slab, (64, 32)."""
    query = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    key = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.abs(query % 8 - (key % 16 - REACH))


@gluon.jit
def _far_down(step: gl.constexpr, REACH: gl.constexpr, LAYOUT: gl.constexpr):
    """How many rows the queries of a warp, which are two rows, are from those of the slab that is
    `step` behind the warp's first."""
    query = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    key = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.abs(query // 8 % 2 - (key // 16 + (2 * step - REACH)))


@gluon.jit
def _halve(x):
    """(64, 32) → (64, 16): a slab's two rows, summed."""
    return gl.sum(x.reshape((64, 2, 16)), 1)


@gluon.jit
def slab_kernel(
    first, q, k, v, weights, state, out, denominator, q_strides, k_strides, v_strides,
    weight_strides, H, W, eps, N: gl.constexpr, RADII: gl.constexpr, WIDE: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Output and denominator + eps of a tile of 8×8 queries, as `tiled_triton.forward_kernel`."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    left_of: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_of: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    b, n, top, left = _place(first, N, WIDE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [4 + reach, 32, WIDTH], shared)
    values = gl.allocate_shared_memory(gl.bfloat16, [4 + reach, 32, WIDTH], shared)
    _copy_windows(keys, values, k, v, b, n, top, left, k_strides, v_strides, H, W, reach, WIDE)
    async_copy.commit_group()
    query = _load_tile(q, b, n, top, left, q_strides, H, W, left_of, WIDE)
    near, rest = _load_weights(
        weights, b, n, top, left, weight_strides, H, W, len(RADII), mma, WIDE
    )

    warp = _warp()
    zero = gl.zeros((64, 32), gl.float32, mma)
    far_across = _far_across(reach, mma)
    across_weight = _weights_at(far_across, near, zero, RADII)
    numerator = gl.zeros((64, WIDTH), gl.float32, mma)
    near_sums = _halve(zero)
    async_copy.wait_group(0)
    for step in gl.static_range(reach + 1):
        pairs = mma_v2(query, keys.index(warp + step).permute((1, 0)).load(right_of), zero)
        far_down = _far_down(step, reach, mma)
        down_weight = _weights_at(far_down, near, zero, RADII)
        pairs = pairs * gl.where(far_down >= far_across, down_weight, across_weight)
        near_sums += _halve(pairs)
        rounded = gl.convert_layout(pairs.to(gl.bfloat16), left_of)
        numerator = mma_v2(rounded, values.index(warp + step).load(right_of), numerator)
    total = gl.convert_layout(gl.sum(near_sums, 1), gl.SliceLayout(1, mma))

    if OVERLAP:
        gdc_wait()
    head = b * N + n
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, WIDTH], shared)
    ones = gl.allocate_shared_memory(gl.bfloat16, [16, WIDTH], shared)
    _copy_sums(sums, state, head)
    part = gl.arange(0, 16, gl.SliceLayout(1, copied))[:, None]
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, copied))[None, :]
    at = state + head * ((2 * WIDTH + 3) * WIDTH) + (2 * WIDTH + part) * WIDTH + channel
    async_copy.async_copy_global_to_shared(ones, at, mask=(part < 3) & (channel < WIDTH))
    async_copy.commit_group()
    async_copy.wait_group(0)
    far = mma_v2(query, sums.index(1).permute((1, 0)).load(right_of), zero)
    far = mma_v2(query, sums.index(0).permute((1, 0)).load(right_of), far)
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
    row, column, inside = _tile(top, left, H, W, mma, WIDE)
    token = ((b * H + top + row) * W + left + column) * N + n
    at = (token * WIDTH)[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, mma))[None, :]
    gl.store(out + at, numerator.to(gl.bfloat16), mask=inside[:, None])
    if denominator is not None:
        gl.store(denominator + token, result, mask=inside)


@gluon.jit
def _fold(x):
    """(64, 32) → (64, 4): the numbers of a row that one thread holds, summed."""
    x = gl.sum(gl.sum(x.reshape((64, 2, 2, 4, 2)), 1), 1)
    return gl.sum(x, 2)


@gluon.jit
def slab_gradient_kernel(
    first, grad, q, k, v, weights, out, denominator, state, delta, inverse, scaled, grad_q,
    grad_weights, grad_strides, q_strides, k_strides, v_strides, weight_strides, H, W,
    N: gl.constexpr, GROUPS: gl.constexpr, RADII: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """∂φq and ∂α of a tile of 8×8 queries, and what sums over queries take, as
    `tiled_triton.query_gradient_kernel`; GROUPS is the width of `scaled`."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    left_of: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right_of: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    rows: gl.constexpr = gl.SliceLayout(1, mma)
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    b, n, top, left = _place(first, N, WIDE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [4 + reach, 32, WIDTH], shared)
    values = gl.allocate_shared_memory(gl.bfloat16, [4 + reach, 32, WIDTH], shared)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, WIDTH], shared)
    _copy_windows(keys, values, k, v, b, n, top, left, k_strides, v_strides, H, W, reach, WIDE)
    _copy_sums(sums, state, b * N + n)
    async_copy.commit_group()
    upstream = _load_tile(grad, b, n, top, left, grad_strides, H, W, left_of, WIDE)
    query = _load_tile(q, b, n, top, left, q_strides, H, W, left_of, WIDE)
    row, column, inside = _tile(top, left, H, W, left_of, WIDE)
    token = ((b * H + top + row) * W + left + column) * N + n
    at = (token * WIDTH)[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, left_of))[None, :]
    result = gl.load(out + at, mask=inside[:, None], other=0.0)
    projection = gl.sum(upstream.to(gl.float32) * result.to(gl.float32), 1)
    projection = gl.convert_layout(projection, rows, assert_trivial=True)
    near, rest = _load_weights(
        weights, b, n, top, left, weight_strides, H, W, len(RADII), mma, WIDE
    )
    row, column, inside = _tile(top, left, H, W, mma, WIDE)
    token = ((b * H + top + row) * W + left + column) * N + n
    scale = gl.load(denominator + token, mask=inside, other=0.0)
    empty = gl.abs(scale) < SMALLEST
    scale = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, scale))
    gl.store(delta + token, projection, mask=inside)
    gl.store(inverse + token, scale, mask=inside)
    slot = gl.arange(0, GROUPS, gl.SliceLayout(0, mma))[None, :]
    of_keys = gl.zeros((64, GROUPS), gl.float32, mma)
    for g in gl.static_range(len(RADII)):
        of_keys = gl.where(slot == g, (scale * near[g])[:, None], of_keys)
    gl.store(scaled + token[:, None] * GROUPS + slot, of_keys, mask=inside[:, None])

    warp = _warp()
    zero = gl.zeros((64, 32), gl.float32, mma)
    far_across = _far_across(reach, mma)
    across_weight = _weights_at(far_across, near, zero, RADII)
    across_sums = zero
    gradient = zero
    minus = zero - projection[:, None]
    by_group = ()
    for _ in gl.static_range(len(RADII)):
        by_group = by_group + (_fold(zero),)
    async_copy.wait_group(0)
    for step in gl.static_range(reach + 1):
        key, value = keys.index(warp + step), values.index(warp + step)
        similarity = mma_v2(query, key.permute((1, 0)).load(right_of), zero)
        pull = mma_v2(upstream, value.permute((1, 0)).load(right_of), minus)
        products = similarity * pull
        far_down = _far_down(step, reach, mma)
        by_row = far_down >= far_across  # the distance is of rows, else of columns
        across_sums += gl.where(by_row, 0.0, products)
        products = gl.where(by_row, products, 0.0)
        more = ()
        for g in gl.static_range(len(RADII)):
            members = _in_group(far_down, g, RADII)
            # −0 adds nothing, and the compiler knows.
            more = more + (by_group[g] + _fold(gl.where(members, products, -0.0)),)
        by_group = more
        pull = pull * gl.where(by_row, _weights_at(far_down, near, zero, RADII), across_weight)
        rounded = gl.convert_layout(pull.to(gl.bfloat16), left_of)
        gradient = mma_v2(rounded, key.load(right_of), gradient)

    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, mma))
    ones = gl.zeros((WIDTH,), gl.float32, gl.SliceLayout(0, mma))
    start = state + (b * N + n) * ((2 * WIDTH + 3) * WIDTH) + 2 * WIDTH * WIDTH
    for part in gl.static_range(3):
        ones += gl.load(start + part * WIDTH + channel).to(gl.float32)
    far = mma_v2(upstream, sums.index(1).load(right_of), zero)
    far = mma_v2(upstream, sums.index(0).load(right_of), far)
    far -= projection[:, None] * ones[None, :]
    gradient += rest[:, None] * far
    at = (token * WIDTH)[:, None] + channel[None, :]
    gl.store(grad_q + at, (scale[:, None] * gradient).to(gl.bfloat16), mask=inside[:, None])
    whole = gl.sum(gl.convert_layout(query, mma).to(gl.float32) * far, 1)
    at = grad_weights + token * (len(RADII) + 1)
    for g in gl.static_range(len(RADII)):
        members = _in_group(far_across, g, RADII)
        total = gl.sum(by_group[g] + _fold(gl.where(members, across_sums, 0.0)), 1)
        total = gl.convert_layout(total, rows)
        whole -= total
        gl.store(at + g, (scale * total).to(grad_weights.dtype.element_ty), mask=inside)
    at = at + len(RADII)
    gl.store(at, (scale * whole).to(grad_weights.dtype.element_ty), mask=inside)


def serves(radii: list[int], q: Tensor, *copied: Tensor) -> bool:
    """Whether the kernels are for such queries and such tensors as are copied to shared memory.

    16 columns hold a tile and its reach; copies are of 16 bytes, which must lie on such bounds.
    """
    plain = all(
        x.shape[-1] == WIDTH.value
        and x.dtype == torch.bfloat16
        and x.data_ptr() % 16 == 0
        and all(stride % 16 == 0 for stride in x.stride()[:4])
        for x in copied
    )
    return plain and q.shape[-1] == WIDTH.value and radii[-1] <= 4


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


def launch_slab_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, out: Tensor,
    denominator: Tensor, cut: Tensor, results: tuple[Tensor, ...], radii: list[int], wide: bool,
) -> None:  # fmt: skip
    """The query's part of `tiled_triton_backward`: δ, 1/den, scaled weights, ∂φq and ∂α."""
    B, H, W, N, _ = v.shape
    launch(
        slab_gradient_kernel, (N * _parts_of(W, 8), _parts_of(H, 8), B),
        grad, q, k, v, spatial_weights, out, denominator, cut, *results,
        *(x.stride() for x in (grad, q, k, v, spatial_weights)), H, W,
        N, results[2].shape[-1], tuple(radii), wide, num_warps=4, maxnreg=128,
    )  # fmt: skip
