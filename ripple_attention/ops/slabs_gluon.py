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
# ruff: noqa: RUF005, SIM102

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_wait

from ripple_attention.ops.kernel_parts import _parts_of
from ripple_attention.ops.launch import launch, multiprocessors, overlapping, overlaps

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # before Triton 3.7

WIDTH = gl.constexpr(32)  # of features and of values
SMALLEST = gl.constexpr(torch.finfo(torch.float32).tiny)  # of `safe_divide`
ROUNDING = gl.constexpr(16 * torch.finfo(torch.float32).eps)  # of `settle`

# Layouts. Of products: warp w has rows 16w to 16w + 15. Of sums over tokens: a quarter a warp.
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, MMA))
QUARTERS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8]))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
# Of 16 bytes a thread: the queries of a warp, and keys, or values, that all warps hold.
OF_QUERIES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
OF_KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [16, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]],
        [],
        [32, 32],
    )
)
OF_ONES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]],
        [],
        [16, 32],
    )
)
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))


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
    """Batch, head, and the numbers of a program's first tile, down and across."""
    across = gl.program_id(0)
    b, n, i, j = first + gl.program_id(2), across % N, gl.program_id(1), across // N
    if WIDE:
        b, n, i, j = b.to(gl.int64), n.to(gl.int64), i.to(gl.int64), j.to(gl.int64)
    return b, n, i, j


@gluon.jit
def _warp():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x; shr.u32 $0, $0, 5;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _slot(slab, RING: gl.constexpr):
    """Where a slab lies that is not two rings ahead; without a ring, where its number says."""
    if RING == 0:
        return slab
    else:
        return gl.where(slab >= RING, slab - RING, slab)


@gluon.jit
def _slabs(COUNT: gl.constexpr):
    """Shared memory for slabs, one by one and by four."""
    slabs = gl.allocate_shared_memory(gl.bfloat16, [COUNT, 32, WIDTH], SHARED)
    return slabs, slabs._reinterpret(gl.bfloat16, [COUNT // 4, 128, WIDTH], SHARED)


@gluon.jit
def _quad(left, W, END: gl.constexpr, SHIFT: gl.constexpr, WIDE: gl.constexpr):
    """The tokens of four slabs, two rows of 16 each, from column left − SHIFT on: row and column,
    from the first row and from `left`; and which columns there are and are asked for, up to END."""
    index = gl.arange(0, 128, gl.SliceLayout(1, COPIED))
    row, column = index // 16, index % 16 - SHIFT
    if WIDE:
        row, column = row.to(gl.int64), column.to(gl.int64)
    return row, column, (left + column >= 0) & (left + column < W) & (column < END)


@gluon.jit
def _copy_quad(into, base, row, column, there, strides):
    """Starts to copy four slabs to shared memory, zero where there are no tokens."""
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, COPIED))[None, :]
    at = (row * strides[1] + column * strides[2])[:, None] + channel
    async_copy.async_copy_global_to_shared(into, base + at, mask=there[:, None])


@gluon.jit
def _copy_rows(
    keys, values, k, v, b, n, top, left, k_strides, v_strides, H, W, slot, END: gl.constexpr,
    SHIFT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Starts to copy eight rows of keys and of values, from `top` on, to the four slabs `slot`."""
    row, column, present = _quad(left, W, END, SHIFT, WIDE)
    there = present & (top + row >= 0) & (top + row < H)
    k_at = _corner(k, b, n, top, left, k_strides)
    v_at = _corner(v, b, n, top, left, v_strides)
    _copy_quad(keys.index(slot), k_at, row, column, there, k_strides)
    _copy_quad(values.index(slot), v_at, row, column, there, v_strides)


@gluon.jit
def _copy_sums(sums, ones, state, head, REORDER: gl.constexpr):
    """Starts to copy the parts of a head's far sums: high and low, (2, 32, WIDTH), and the three of
    the sum that belongs to ones, (16, WIDTH).

    REORDER: rows, which are values, in the order that `_as_left` gives to channels.
    """
    row = gl.arange(0, 32, gl.SliceLayout(1, COPIED))[:, None]
    part = gl.arange(0, 16, gl.SliceLayout(1, COPIED))[:, None]
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, COPIED))[None, :]
    at = state + head * ((2 * WIDTH + 3) * WIDTH) + channel
    if REORDER:
        row = row // 2 % 4 * 8 + row // 8 * 2 + row % 2
    async_copy.async_copy_global_to_shared(sums.index(0), at + row * WIDTH)
    async_copy.async_copy_global_to_shared(sums.index(1), at + (WIDTH + row) * WIDTH)
    there = (part < 3) & (channel < WIDTH)
    async_copy.async_copy_global_to_shared(ones, at + (2 * WIDTH + part) * WIDTH, mask=there)


@gluon.jit
def _sum_slabs(keys, values, sums, ones, COUNT: gl.constexpr, FLIP: gl.constexpr):
    """The same sums, of all keys and values that lie in shared memory, where FLIP, transposed; ones
    are (32, WIDTH)."""
    total = gl.zeros((32, WIDTH), gl.float32, QUARTERS)
    of_ones = total
    one = gl.full((32, 32), 1.0, gl.bfloat16, gl.DotOperandLayout(0, QUARTERS, 2))
    for slab in gl.static_range(COUNT):
        key = keys.index(slab).load(gl.DotOperandLayout(1, QUARTERS, 2))
        value = values.index(slab).permute((1, 0)).load(gl.DotOperandLayout(0, QUARTERS, 2))
        total = mma_v2(value, key, total)
        of_ones = mma_v2(one, key, of_ones)  # 32 times the same
    high = total.to(gl.bfloat16)
    low = (total - high.to(gl.float32)).to(gl.bfloat16)
    if FLIP:
        sums.index(0).permute((1, 0)).store(high)
        sums.index(1).permute((1, 0)).store(low)
    else:
        sums.index(0).store(high)
        sums.index(1).store(low)
    row = gl.arange(0, 32, gl.SliceLayout(1, QUARTERS))[:, None]
    high = of_ones.to(gl.bfloat16).to(gl.float32)
    middle = (of_ones - high).to(gl.bfloat16).to(gl.float32)
    last = of_ones - high - middle
    parts = gl.where(row == 0, high, gl.where(row == 1, middle, gl.where(row == 2, last, 0.0)))
    ones.store(parts.to(gl.bfloat16))


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
def _results(b, n, top, left, H, W, N: gl.constexpr, WIDE: gl.constexpr):
    """Where the channels of a tile's tokens lie in (B, H, W, N, WIDTH), and which there are."""
    row, column, inside = _tile(top, left, H, W, OF_QUERIES, WIDE)
    token = ((b * H + top + row) * W + left + column) * N + n
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, OF_QUERIES))[None, :]
    return (token * WIDTH)[:, None] + channel, inside[:, None]


@gluon.jit
def _store_results(base, x, b, n, top, left, H, W, N: gl.constexpr, WIDE: gl.constexpr):
    """Stores x, (64, WIDTH), 16 bytes a thread."""
    at, there = _results(b, n, top, left, H, W, N, WIDE)
    gl.store(base + at, gl.convert_layout(x.to(gl.bfloat16), OF_QUERIES), mask=there)


@gluon.jit
def _load_weights(
    base, b, n, top, left, strides, H, W, COUNT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """α_g − α_rest of a tile's queries, for each box, and α_rest; each (64,)."""
    row, column, inside = _tile(top, left, H, W, MMA, WIDE)
    at = _corner(base, b, n, top, left, strides) + (row * strides[1] + column * strides[2])
    rest = gl.load(at + COUNT * strides[4], mask=inside, other=0.0).to(gl.float32)
    near = ()
    for g in gl.static_range(COUNT):
        weight = gl.load(at + g * strides[4], mask=inside, other=0.0).to(gl.float32)
        near = near + (weight - rest,)
    return near, rest


@gluon.jit
def _as_left(x, zero):
    """Queries as the left of a product over channels, which are in another order: what a thread
    loads at once is what it is to hold.

    Args:
        x: (64, WIDTH), as OF_QUERIES.
        zero: A number that is 0, which the compiler does not know: else it would put the registers
            in their order again for each product.
    """
    x = x.reshape((64, 4, 4, 2)).permute((0, 2, 1, 3)).reshape((64, WIDTH))
    x = gl.convert_layout(x, LEFT, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "or.b32 $0, $1, $2;", "=r,r,r,r", [x, zero], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _as_right(x, COUNT: gl.constexpr):
    """Keys as the right of such a product, their channels in the same order."""
    x = x.reshape((COUNT, 4, 4, 2)).permute((0, 2, 1, 3)).reshape((COUNT, WIDTH))
    return gl.convert_layout(x.permute((1, 0)), RIGHT, assert_trivial=True)


@gluon.jit
def _far_across(shift):
    """How many columns queries of a tile are from the keys of a slab, (64, 32), which begin `shift`
    columns before it."""
    query = gl.arange(0, 64, gl.SliceLayout(1, MMA))[:, None]
    key = gl.arange(0, 32, gl.SliceLayout(0, MMA))[None, :]
    return gl.abs(query % 8 + shift - key % 16)


@gluon.jit
def _far_down(step: gl.constexpr, REACH: gl.constexpr):
    """How many rows the queries of a warp, which are two rows, are from those of the slab that is
    `step` behind the warp's first."""
    query = gl.arange(0, 64, gl.SliceLayout(1, MMA))[:, None]
    key = gl.arange(0, 32, gl.SliceLayout(0, MMA))[None, :]
    return gl.abs(query // 8 % 2 - (key // 16 + (2 * step - REACH)))


@gluon.jit
def _halve(x):
    """(64, 32) → (64, 16): a slab's two rows, summed."""
    return gl.sum(x.reshape((64, 2, 16)), 1)


@gluon.jit
def _add_products(x, right, total, SPLIT: gl.constexpr):
    """total + x @ right; x, (64, 32), is rounded, or cut in two."""
    if SPLIT:
        high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
        low = (x - high).to(gl.bfloat16)
        total = mma_v2(gl.convert_layout(low, LEFT), right, total)
        x = high
    return mma_v2(gl.convert_layout(x.to(gl.bfloat16), LEFT), right, total)


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
    `tiled_triton.forward_kernel`."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    b, n, i, j = _place(first, N, WIDE)
    top, left = i * (8 * TILES), j * 8
    keys, key_quads = _slabs(RING)
    values, value_quads = _slabs(RING)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, WIDTH], SHARED)
    ones = gl.allocate_shared_memory(gl.bfloat16, [16, WIDTH], SHARED)
    for quad in gl.static_range(2):
        _copy_rows(
            key_quads, value_quads, k, v, b, n, top - reach + 8 * quad, left, k_strides, v_strides,
            H, W, quad, 8 + reach, reach, WIDE,
        )  # fmt: skip
    async_copy.commit_group()
    slab = gl.program_id(0) * 0  # the tile's first
    for tile in range(TILES):
        query = _as_left(_load_tile(q, b, n, top, left, q_strides, H, W, OF_QUERIES, WIDE), H >> 30)
        near, rest = _load_weights(weights, b, n, top, left, weight_strides, H, W, len(RADII), WIDE)
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
        if tile == 0:
            if OVERLAP:
                gdc_wait()
            _copy_sums(sums, ones, state, b * N + n, False)
            async_copy.commit_group()
            async_copy.wait_group(0)
            barrier()
        _finish(
            numerator, total, query, rest, sums, ones, out, denominator, b, n, top, left, H, W,
            eps, N, WIDE,
        )  # fmt: skip
        top += 8
        slab = _slot(slab + 4, RING)


@gluon.jit
def _copy_image(
    keys, values, k, v, b, n, k_strides, v_strides, H, W, REACH: gl.constexpr,
    QUADS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Copies a grid, with empty rows around it, and waits."""
    for quad in gl.static_range(QUADS):
        _copy_rows(
            keys, values, k, v, b, n, b * 0 + (8 * quad - REACH), 0, k_strides, v_strides, H, W,
            quad, 16, 0, WIDE,
        )  # fmt: skip
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()


@gluon.jit
def image_kernel(
    first, q, k, v, weights, out, denominator, q_strides, k_strides, v_strides, weight_strides,
    H, W, eps, N: gl.constexpr, RADII: gl.constexpr, DOWN: gl.constexpr, ACROSS: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """Output and denominator + eps of a whole grid of DOWN × ACROSS tiles, 2 × 2 at most."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    slabs: gl.constexpr = 4 * DOWN + 4
    b, n, _, _ = _place(first, N, WIDE)
    keys, key_quads = _slabs(slabs)
    values, value_quads = _slabs(slabs)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, WIDTH], SHARED)
    ones = gl.allocate_shared_memory(gl.bfloat16, [32, WIDTH], SHARED)
    _copy_image(
        key_quads, value_quads, k, v, b, n, k_strides, v_strides, H, W, reach, DOWN + 1, WIDE
    )
    _sum_slabs(keys, values, sums, ones, 4 * DOWN + reach, False)
    barrier()
    zero = b * 0  # of 64 bits if WIDE
    for tile in range(DOWN * ACROSS):
        top, left = zero + tile // ACROSS * 8, zero + tile % ACROSS * 8
        query = _as_left(_load_tile(q, b, n, top, left, q_strides, H, W, OF_QUERIES, WIDE), H >> 30)
        near, rest = _load_weights(weights, b, n, top, left, weight_strides, H, W, len(RADII), WIDE)
        far_across = _far_across(left)
        numerator, total = _near_part(
            query, near, keys, values, tile // ACROSS * 4, far_across, RADII, 0, True
        )
        _finish(
            numerator, total, query, rest, sums, ones.slice(0, 16), out, denominator, b, n, top,
            left, H, W, eps, N, WIDE,
        )  # fmt: skip


@gluon.jit
def _fold(x):
    """(64, 32) → (64, 4): the numbers of a row that one thread holds, summed."""
    x = gl.sum(gl.sum(x.reshape((64, 2, 2, 4, 2)), 1), 1)
    return gl.sum(x, 2)


@gluon.jit
def _tile_gradient(
    grad, q, weights, out, denominator, delta, inverse, scaled, grad_q, grad_weights,
    grad_strides, q_strides, weight_strides, keys, values, sums, parts, b, n, top, left, first,
    far_across, H, W, N: gl.constexpr, GROUPS: gl.constexpr, RADII: gl.constexpr,
    WIDE: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """∂φq and ∂α of a tile, and what sums over queries take.

    The window and the sums lie in shared memory; without WHOLE they are on their way there.
    `first` slab is that of warp 0.
    """
    reach: gl.constexpr = RADII[len(RADII) - 1]
    upstream = _load_tile(grad, b, n, top, left, grad_strides, H, W, OF_QUERIES, WIDE)
    query = _load_tile(q, b, n, top, left, q_strides, H, W, OF_QUERIES, WIDE)
    at, there = _results(b, n, top, left, H, W, N, WIDE)
    result = gl.load(out + at, mask=there, other=0.0)
    projection = gl.sum(upstream.to(gl.float32) * result.to(gl.float32), 1)
    projection = gl.convert_layout(projection, ROWS, assert_trivial=True)
    of_channels = gl.convert_layout(query, MMA)
    upstream, query = _as_left(upstream, H >> 30), _as_left(query, H >> 30)
    near, rest = _load_weights(weights, b, n, top, left, weight_strides, H, W, len(RADII), WIDE)
    row, column, inside = _tile(top, left, H, W, MMA, WIDE)
    token = ((b * H + top + row) * W + left + column) * N + n
    scale = gl.load(denominator + token, mask=inside, other=0.0)
    empty = gl.abs(scale) < SMALLEST
    scale = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, scale))
    gl.store(delta + token, projection, mask=inside)
    gl.store(inverse + token, scale, mask=inside)
    slot = gl.arange(0, GROUPS, gl.SliceLayout(0, MMA))[None, :]
    of_keys = gl.zeros((64, GROUPS), gl.float32, MMA)
    for g in gl.static_range(len(RADII)):
        of_keys = gl.where(slot == g, (scale * near[g])[:, None], of_keys)
    if WHOLE:  # as they are, without a far part
        of_keys += gl.where(slot <= len(RADII), (scale * rest)[:, None], 0.0)
    gl.store(scaled + token[:, None] * GROUPS + slot, of_keys, mask=inside[:, None])

    first += _warp()
    zero = gl.zeros((64, 32), gl.float32, MMA)
    across_weight = _weights_at(far_across, near, zero, RADII)
    across_sums = zero
    gradient = zero
    minus = zero - projection[:, None]
    by_group = ()
    for _ in gl.static_range(len(RADII)):
        by_group = by_group + (_fold(zero),)
    if not WHOLE:
        async_copy.wait_group(0)
        barrier()
    for step in gl.static_range(reach + 1):
        key, value = keys.index(first + step), values.index(first + step)
        similarity = mma_v2(query, _as_right(key.load(OF_KEYS), 32), zero)
        pull = mma_v2(upstream, _as_right(value.load(OF_KEYS), 32), minus)
        products = similarity * pull
        far_down = _far_down(step, reach)
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
        gradient = _add_products(pull, key.load(RIGHT), gradient, WHOLE)

    if WHOLE:  # sums are transposed, else their rows are in the order of the product
        far = mma_v2(upstream, _as_right(sums.index(1).load(OF_KEYS), 32), zero)
        far = mma_v2(upstream, _as_right(sums.index(0).load(OF_KEYS), 32), far)
    else:
        far = mma_v2(upstream, sums.index(1).load(RIGHT), zero)
        far = mma_v2(upstream, sums.index(0).load(RIGHT), far)
    far -= projection[:, None] * gl.sum(parts.load(MMA).to(gl.float32), 0)[None, :]
    gradient += rest[:, None] * far
    _store_results(grad_q, scale[:, None] * gradient, b, n, top, left, H, W, N, WIDE)
    whole = gl.sum(of_channels.to(gl.float32) * far, 1)
    at = grad_weights + token * (len(RADII) + 1)
    for g in gl.static_range(len(RADII)):
        members = _in_group(far_across, g, RADII)
        total = gl.sum(by_group[g] + _fold(gl.where(members, across_sums, 0.0)), 1)
        total = gl.convert_layout(total, ROWS)
        whole -= total
        gl.store(at + g, (scale * total).to(grad_weights.dtype.element_ty), mask=inside)
    at = at + len(RADII)
    gl.store(at, (scale * whole).to(grad_weights.dtype.element_ty), mask=inside)


@gluon.jit
def slab_gradient_kernel(
    first, grad, q, k, v, weights, out, denominator, state, delta, inverse, scaled, grad_q,
    grad_weights, grad_strides, q_strides, k_strides, v_strides, weight_strides, H, W,
    N: gl.constexpr, GROUPS: gl.constexpr, RADII: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """∂φq and ∂α of a tile of 8×8 queries, and what sums over queries take, as
    `tiled_triton.query_gradient_kernel`; GROUPS is the width of `scaled`."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    b, n, i, j = _place(first, N, WIDE)
    top, left = i * 8, j * 8
    keys, key_quads = _slabs(8)
    values, value_quads = _slabs(8)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, WIDTH], SHARED)
    parts = gl.allocate_shared_memory(gl.bfloat16, [16, WIDTH], SHARED)
    for quad in gl.static_range(2):
        _copy_rows(
            key_quads, value_quads, k, v, b, n, top - reach + 8 * quad, left, k_strides, v_strides,
            H, W, quad, 8 + reach, reach, WIDE,
        )  # fmt: skip
    _copy_sums(sums, parts, state, b * N + n, True)
    async_copy.commit_group()
    _tile_gradient(
        grad, q, weights, out, denominator, delta, inverse, scaled, grad_q, grad_weights,
        grad_strides, q_strides, weight_strides, keys, values, sums, parts, b, n, top, left, 0,
        _far_across(reach), H, W, N, GROUPS, RADII, WIDE, False,
    )  # fmt: skip


@gluon.jit
def image_gradient_kernel(
    first, grad, q, k, v, weights, out, denominator, delta, inverse, scaled, grad_q,
    grad_weights, grad_strides, q_strides, k_strides, v_strides, weight_strides, H, W,
    N: gl.constexpr, GROUPS: gl.constexpr, RADII: gl.constexpr, DOWN: gl.constexpr,
    ACROSS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The same of a whole grid of DOWN × ACROSS tiles, 2 × 2 at most."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    slabs: gl.constexpr = 4 * DOWN + 4
    b, n, _, _ = _place(first, N, WIDE)
    keys, key_quads = _slabs(slabs)
    values, value_quads = _slabs(slabs)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, WIDTH], SHARED)
    parts = gl.allocate_shared_memory(gl.bfloat16, [32, WIDTH], SHARED)
    _copy_image(
        key_quads, value_quads, k, v, b, n, k_strides, v_strides, H, W, reach, DOWN + 1, WIDE
    )
    _sum_slabs(keys, values, sums, parts, 4 * DOWN + reach, True)
    barrier()
    zero = b * 0  # of 64 bits if WIDE
    for tile in range(DOWN * ACROSS):
        top, left = zero + tile // ACROSS * 8, zero + tile % ACROSS * 8
        _tile_gradient(
            grad, q, weights, out, denominator, delta, inverse, scaled, grad_q, grad_weights,
            grad_strides, q_strides, weight_strides, keys, values, sums, parts.slice(0, 16), b, n,
            top, left, tile // ACROSS * 4, _far_across(left), H, W, N, GROUPS, RADII, WIDE, True,
        )  # fmt: skip


RING = 12  # slots for the slabs of a tile, 8 at most, and the next four


def copies(*inputs: Tensor) -> bool:
    """Whether kernels in Gluon can copy them: 16 bytes at a time, which must lie on such bounds."""
    return all(
        x.shape[-1] == WIDTH.value
        and x.dtype == torch.bfloat16
        and x.data_ptr() % 16 == 0
        and all(stride % 16 == 0 for stride in x.stride()[:4])
        for x in inputs
    )


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
            num_warps=4, maxnreg=128 if tiles > 1 else 96, **overlapping(),
        )  # fmt: skip


def launch_slab_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, out: Tensor,
    denominator: Tensor, cut: Tensor, results: tuple[Tensor, ...], radii: list[int], wide: bool,
) -> None:  # fmt: skip
    """The query's part of `tiled_triton_backward`: δ, 1/den, scaled weights, ∂φq and ∂α."""
    B, H, W, N, _ = v.shape
    inputs = grad, q, k, v, spatial_weights
    strides, groups = [x.stride() for x in inputs], results[2].shape[-1]
    if cut.numel() == 0:
        launch(
            image_gradient_kernel, (N, 1, B), *inputs, out, denominator, *results, *strides, H, W,
            N, groups, tuple(radii), _parts_of(H, 8), _parts_of(W, 8), wide,
            num_warps=4, maxnreg=255,
        )  # fmt: skip
    else:
        launch(
            slab_gradient_kernel, (N * _parts_of(W, 8), _parts_of(H, 8), B),
            *inputs, out, denominator, cut, *results, *strides, H, W,
            N, groups, tuple(radii), wide, num_warps=4, maxnreg=128,
        )  # fmt: skip


def _tiles_of_a_strip(heads: int, H: int, W: int, device: torch.device) -> int:
    """The more the better, as long as there are programs for the GPU two and a half times over."""
    tiles, enough = 1, 10 * multiprocessors(device)
    while tiles < 8 and heads * _parts_of(W, 8) * _parts_of(H, 16 * tiles) >= enough:
        tiles *= 2
    return tiles
